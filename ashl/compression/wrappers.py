"""Wrappers: functions from codec to codec, and the codec of a link that they compose.

A wrapper is a `Step` in front of a codec. Before encoding, it changes the vector or the context.
After encoding, it learns which part was sent. Payloads are those of the codec inside. The steps of
a message, in order: clipping, density schedules, running mean, error feedback or momentum
correction. `per_layer` encodes each layer separately.

A codec with a protocol of its own (`Collective`) knows only at the end of the protocol which part
of a vector was sent, see `run_protocol`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    CodecInput,
    Collective,
    EncodeContext,
    Layout,
    OuterCodec,
    State,
    Team,
    Traits,
    slices,
)
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.device import read_scalars, to_host
from ashl.errors import UsageError

CHANGE = 0.5  # η of Accordion


class Sent(NamedTuple):
    """Content of a message: a payload of a codec, or with codec = None a vector, None = nothing."""

    codec: Codec | None
    content: Tensor | None

    def add(self, out: Tensor, scale: float = 1.0) -> None:
        """Add scale · the content to `out` in place."""
        if self.content is None:
            return
        if self.codec is None:
            out.add_(self.content, alpha=scale)
        else:
            self.codec.add(out, self.content, scale)


@dataclass(frozen=True)
class Step:
    """A wrapper's step, with the defaults of one that does nothing. Its state is None at first."""

    imports: ClassVar[type | None] = None  # state of another stage with which it may begin

    def traits(self, traits: Traits) -> Traits:
        """Return the traits with this step around a codec."""
        return traits

    def schedule(self, context: EncodeContext) -> EncodeContext:
        """Return the context with the density of this message; the largest that may occur."""
        return context

    def transform(
        self, state: State, x: Tensor, context: EncodeContext
    ) -> tuple[State, Tensor, EncodeContext]:
        """Return (state, vector, context) for the next step or the codec."""
        return state, x, self.schedule(context)

    def update_state(self, state: State, x: Tensor, sent: Sent) -> State:
        """Return the state after encoding; x is the vector before this step."""
        return state

    def restore_dropped(self, state: State, sent: Sent) -> State:
        """Return the state after the last message was dropped in transit."""
        return state


class Sender(NamedTuple):
    """The sender's state: one of each step, and that of the codec."""

    steps: tuple[State, ...]
    inner: State = None

    @property
    def error(self) -> Tensor | None:
        """The residual that a step keeps, None if there is none."""
        kept = find_residual(self)
        return None if kept is None else kept.error


@dataclass(frozen=True)
class WrappedCodec(OuterCodec):
    """A codec with steps around it, from the outside in."""

    steps: tuple[Step, ...]

    @property
    def traits(self) -> Traits:
        traits = self.codec.traits
        for step in self.steps:
            traits = step.traits(traits)
        return traits

    def encode(
        self, sender: Sender | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Sender, Tensor]:
        states, vectors, source = self.prepare_encoding(sender, x, context)
        inner, payload = self.codec.encode(*source)
        return self.finish_encoding(states, vectors, Sent(self.codec, payload), inner), payload

    def prepare_encoding(
        self, sender: Sender | None, x: Tensor, context: EncodeContext
    ) -> tuple[list[State], list[Tensor], CodecInput]:
        """Run all steps before encoding: (their states, the vector before each, codec's input)."""
        old = sender or Sender((None,) * len(self.steps))
        states, vectors = [], []
        for step, state in zip(self.steps, old.steps, strict=True):
            vectors.append(x)
            state, x, context = step.transform(state, x, context)
            states.append(state)
        return states, vectors, CodecInput(old.inner, x, context)

    def finish_encoding(
        self, states: list[State], vectors: list[Tensor], sent: Sent, inner: State
    ) -> Sender:
        """Run all steps after encoding."""
        every = zip(self.steps, states, vectors, strict=True)
        return Sender(tuple(step.update_state(state, x, sent) for step, state, x in every), inner)

    def restore_dropped(self, sender: Sender, payload: Tensor) -> Sender:
        sent = Sent(self.codec, payload)
        states = zip(self.steps, sender.steps, strict=True)
        return Sender(
            tuple(step.restore_dropped(state, sent) for step, state in states),
            self.codec.restore_dropped(sender.inner, payload),
        )

    def residual(self, sender: Sender | None) -> Tensor | None:
        if sender is None:
            return None
        return self.codec.residual(sender.inner) if sender.error is None else sender.error

    def import_state(self, kept: State) -> State:
        if any(step.imports is type(kept) for step in self.steps):
            return Sender(
                tuple(kept if step.imports is type(kept) else None for step in self.steps)
            )
        inner = self.codec.import_state(kept)
        return None if inner is None else Sender((None,) * len(self.steps), inner)

    def density(self, context: EncodeContext) -> float | None:
        for step in self.steps:
            context = step.schedule(context)
        return context.ratio


def with_steps(codec: Codec, *steps: Step) -> Codec:
    """Return the codec with these steps around it, from the outside in."""
    return WrappedCodec(codec, steps) if steps else codec


def inner_codec(codec: Codec) -> Codec:
    """Return the codec inside all wrappers."""
    return codec.codec if isinstance(codec, WrappedCodec) else codec


async def run_protocol(
    codec: Codec, sender: State, team: Team, x: Tensor, context: EncodeContext
) -> tuple[State, Tensor]:
    """Run the protocol of a `Collective` inside its wrappers and return (sender, update)."""
    if not isinstance(codec, WrappedCodec):
        assert isinstance(codec, Collective)
        outcome = await codec.collective(team, CodecInput(sender, x, context))
        return outcome.inner, outcome.update
    assert isinstance(codec.codec, Collective)
    states, vectors, source = codec.prepare_encoding(sender, x, context)
    outcome = await codec.codec.collective(team, source)
    sent = Sent(None, outcome.sent)
    finish = partial(codec.finish_encoding, states, vectors, sent, outcome.inner)
    return await team.compute(finish), outcome.update


# --- the codec of a link


def wrap_codec(option: Codec, layout: Layout) -> Codec:
    """Return the codec of a worker's link: `codec_for_layers` inside the wrappers of the option.

    Raises: UsageError if error feedback or momentum correction is not supported for the codec.
    """
    codec = codec_for_layers(option, layout)
    keeps = option.momentum is not None or option.error_feedback
    if keeps and not (codec.traits.contraction or codec.traits.drains):
        key, fix = "error_feedback=true", "set compression.error_feedback=false"
        if option.momentum is not None:
            key = f"momentum={option.momentum:g}"
            fix = "set compression.momentum=null, and optimizer.momentum instead"
        raise UsageError(
            f"compression.{key}: needs a codec whose error never exceeds the update, and the error"
            f" of compression={type(option).__module__.rpartition('.')[2]} may exceed it with"
            f" these settings; {fix}"
        )
    return with_steps(codec, *steps_of(option))


def steps_of(option: Codec) -> list[Step]:
    """Return the steps of an option's wrappers, from the outside in."""
    steps: list[Step] = []
    if option.clip_norm is not None:
        steps.append(Clipping(option.clip_norm))
    if option.critical_ratio is not None:
        steps.append(Accordion(option.critical_ratio))
    if option.warmup_epochs:
        assert option.ratio is not None, "a codec without a density has no warm-up"
        steps.append(WarmUp(option.warmup_epochs, option.ratio))
    if option.beta is not None:
        steps.append(RunningMean(option.beta))
    if option.momentum is not None:
        steps.append(MomentumCorrection(option.momentum, option.masking))
    elif option.error_feedback:
        steps.append(ErrorFeedback(option.feedback_gain, option.feedback_decay))
    return steps


def codec_for_layers(option: Codec, layout: Layout) -> Codec:
    """Return the codec without wrappers, as pulls and gossip use it, for the layers of a model."""
    codec = option.for_layout(layout)
    return Layerwise(codec, tuple(layer.size for layer in layout)) if codec.per_layer else codec


def find_residual(sender: State) -> State:
    """Return the residual or velocity in a sender's state; None if there is none."""
    states = (*sender.steps, sender.inner) if isinstance(sender, Sender) else (sender,)
    return next((state for state in states if isinstance(state, Residual | Velocity)), None)


def convert_sender(sender: State, codec: Codec) -> State:
    """Return the sender's state with which a stage with another codec begins.

    It has the residual or the velocity, if that codec can use it; else it is None.
    """
    kept = find_residual(sender)
    return None if kept is None else codec.import_state(kept)


def slice_state(state: State, start: int, stop: int) -> State:
    """Return a sender's state for the elements [start, stop) of its vectors, as views.

    Steps keep vectors element by element, and numbers that are equal for all parts. So the states
    of the parts of a vector, joined, equal the state that one message of all of it would leave.
    """
    if isinstance(state, Tensor):
        return state[start:stop]
    if isinstance(state, tuple):
        return rebuild_tuple(state, (slice_state(field, start, stop) for field in state))
    return state


def join_states(states: Sequence[State]) -> State:
    """Return the state of the whole vector from the states of its parts, in order."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if isinstance(first, tuple):
        return rebuild_tuple(first, map(join_states, zip(*states, strict=True)))
    return first


def rebuild_tuple(state: tuple, fields: Iterator[State]) -> tuple:
    """Return a tuple of the type of `state` with these fields."""
    return type(state)(*fields) if hasattr(state, "_fields") else tuple(fields)


# --- error feedback


class Residual(NamedTuple):
    """State of error feedback: e, and the learning rate of e."""

    error: Tensor | None = None
    lr: float = 1.0


@dataclass(frozen=True)
class ErrorFeedback(Step):
    """Add the compression error of earlier messages to the next message.

    Rule: p = x + α·e, send C(p), e ← β·e + (x − C(p)), with e = 0 at first. α = β = 1 is plain
    error feedback, e ← p − C(p): the sum of all x equals the sum of all messages plus e, so that
    nothing is lost, only delayed. Smaller values are ECQ-SGD, which forgets old errors. If a
    message is dropped, its content returns to e.

    e has the unit of the model. If x is a gradient, e is rescaled when the learning rate changes.
    It is also converted at a boundary between a stage of gradients and a stage of model
    differences.

    Limits: C has to be a contraction, or its residual has to stay bounded.
    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; Wu et al.,
    "Error Compensated Quantized SGD", ICML 2018.
    """

    imports: ClassVar[type | None] = Residual
    gain: float = 1.0
    decay: float = 1.0

    def traits(self, traits: Traits) -> Traits:
        return traits._replace(unbiased=False)

    def transform(
        self, state: Residual | None, x: Tensor, context: EncodeContext
    ) -> tuple[Residual, Tensor, EncodeContext]:
        error, lr = state or Residual()
        error = rescale(error, lr, context.lr)
        if error is None:
            return Residual(x, context.lr), x, context
        p = x + (error if self.gain == 1 else error * self.gain)
        whole = p if self.gain == self.decay else x + error * self.decay
        return Residual(whole, context.lr), p, context

    def update_state(self, state: Residual, x: Tensor, sent: Sent) -> Residual:
        assert state.error is not None
        shared = state.error is x or state.error is sent.content
        rest = state.error.clone() if shared else state.error
        sent.add(rest, -1.0)
        return state._replace(error=rest)

    def restore_dropped(self, state: Residual, sent: Sent) -> Residual:
        return state._replace(error=add_content(state.error, sent))


def add_content(error: Tensor | None, sent: Sent) -> Tensor:
    """Return the residual plus the content of a dropped message."""
    assert error is not None
    whole = error.clone()
    sent.add(whole)
    return whole


def rescale(vector: Tensor | None, before: float, now: float) -> Tensor | None:
    """Return a vector in gradient units, rescaled so that lr · vector keeps its value.

    It is unchanged if one of the rates is 0.
    """
    if vector is None or before == now or not before or not now:
        return vector
    return vector * (before / now)


# --- momentum correction


class Velocity(NamedTuple):
    """State of momentum correction: u and v (None = 0), u before masking, and the learning rate of
    v.
    """

    velocity: Tensor | None = None
    error: Tensor | None = None
    before: Tensor | None = None
    lr: float = 1.0


@dataclass(frozen=True)
class MomentumCorrection(Step):
    """Accumulate velocities at the sender before selection, instead of in the optimizer.

    Rule: u ← m·u + x, v ← v + u, send C(v), v ← v − C(v). With factor masking, u ← 0 for each
    element that was sent, so that an old velocity does not move an element again that has just
    moved. If a message is dropped, its content returns to v, and u returns to its previous value.

    Limits: C(v) = v without masking is momentum SGD.
    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    imports: ClassVar[type | None] = Velocity
    decay: float
    masking: bool

    def traits(self, traits: Traits) -> Traits:
        return traits._replace(unbiased=False, lossless=False)

    def transform(
        self, state: Velocity | None, x: Tensor, context: EncodeContext
    ) -> tuple[Velocity, Tensor, EncodeContext]:
        old = state or Velocity()
        velocity = old.velocity
        if old.lr * context.lr < 0:  # gradients and model differences: the stage has changed
            velocity = rescale(velocity, old.lr, context.lr)
        u = x.clone() if velocity is None else x + velocity * self.decay
        error = rescale(old.error, old.lr, context.lr)
        v = u.clone() if error is None else u + error
        return Velocity(u, v, None, context.lr), v, context

    def update_state(self, state: Velocity, x: Tensor, sent: Sent) -> Velocity:
        u, v, _, lr = state
        assert u is not None
        assert v is not None
        content = torch.zeros_like(v)
        sent.add(content)
        masked = torch.where(content == 0, u, 0) if self.masking else u
        return Velocity(masked, v - content, u if self.masking else None, lr)

    def restore_dropped(self, state: Velocity, sent: Sent) -> Velocity:
        velocity = state.velocity if state.before is None else state.before
        return Velocity(velocity, add_content(state.error, sent), None, state.lr)


# --- running mean


class Average(NamedTuple):
    """State of a running mean: u."""

    mean: Tensor


@dataclass(frozen=True)
class RunningMean(Step):
    """Encode a running mean of the updates, as in Signum.

    Rule: u ← β·u + (1 − β)·x with u = 0 at first; send C(u). Sending takes nothing away from u,
    unlike momentum correction. A dropped message does not change u either: u depends on the
    worker's updates, not on its messages.

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018.
    """

    decay: float

    def transform(
        self, state: Average | None, x: Tensor, context: EncodeContext
    ) -> tuple[Average, Tensor, EncodeContext]:
        if state is None:
            mean = x * (1 - self.decay)
        else:
            mean = (state.mean * self.decay).add_(x, alpha=1 - self.decay)
        return Average(mean), mean, context


# --- schedules of the density


@dataclass(frozen=True)
class WarmUp(Step):
    """Begin with a high density.

    Rule: in epoch e of E the density is ratio^((e + 1)/(E + 1)), then ratio. For ratio = 0.1 % and
    E = 4 it is 25, 6.3, 1.6, 0.4 and 0.1 %.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    epochs: int
    ratio: float

    def schedule(self, context: EncodeContext) -> EncodeContext:
        ratio = self.ratio if context.ratio is None else context.ratio
        passed = min(1.0, (int(context.epoch) + 1) / (self.epochs + 1))
        return context._replace(ratio=ratio**passed)


class Regime(NamedTuple):
    """State of Accordion: the epoch, and whether it is critical.

    `total` is the sum of the updates of the epoch, `before` the norm of that sum in the epoch
    before.
    """

    epoch: int = 0
    total: Tensor | None = None
    before: float | None = None
    critical: bool = True


@dataclass(frozen=True)
class Accordion(Step):
    """Send more while gradients change fast.

    Rule: G is the sum of a worker's updates in an epoch. If |‖G_before‖ − ‖G‖| ≥ η·‖G_before‖, the
    next epoch is critical and has the larger density. The first two epochs of a stage are critical,
    too, because a comparison needs two sums.

    Source: Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime
    Identification", MLSys 2021, with its η = 0.5. Differs: each worker decides for itself and for
    the whole model; the paper decides for each layer.
    """

    critical_ratio: float

    def schedule(self, context: EncodeContext) -> EncodeContext:
        return context._replace(ratio=self.critical_ratio)

    def transform(
        self, state: Regime | None, x: Tensor, context: EncodeContext
    ) -> tuple[Regime, Tensor, EncodeContext]:
        epoch = int(context.epoch)
        old = state or Regime(epoch)
        if epoch > old.epoch and old.total is not None:
            norm = vector_norm(old.total)
            critical = old.before is None or abs(old.before - norm) >= CHANGE * old.before
            old = Regime(epoch, None, norm, critical)
        elif old.total is None:  # first update of the stage
            old = old._replace(epoch=epoch)
        total = x if old.total is None else old.total + x
        return old._replace(total=total), x, self.schedule(context) if old.critical else context


# --- clipping


@dataclass(frozen=True)
class Clipping(Step):
    """Shorten each worker's update before the other steps see it.

    Rule: x ← x · min(1, θ·n^(−1/2) / ‖x‖) with n workers, which bounds the norm of their sum by
    about θ. If x already contains the worker's weight, as in an all-reduce, the bound contains it,
    too.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    norm: float

    def transform(
        self, state: State, x: Tensor, context: EncodeContext
    ) -> tuple[State, Tensor, EncodeContext]:
        norm, bound = vector_norm(x), abs(context.weight) * self.norm / context.workers**0.5
        return state, x if norm <= bound else x * (bound / norm), context


def vector_norm(x: Tensor) -> float:
    return read_scalars([torch.linalg.vector_norm(x, dtype=torch.float64)])[0]


# --- layers


@dataclass(frozen=True)
class Layerwise(OuterCodec):
    """A stateless codec, applied to each layer.

    Rule: C(x) = (C(x_1), …, C(x_L)) with x_l the elements of layer l. Each layer has a scale and a
    density of its own, so that a layer with small gradients is sent, too. This is a different
    algorithm than C on the whole vector.
    Bits: 32 for each layer and those of the layers' payloads. Format: the size of each layer's
    payload in bytes, uint32; then the payloads in order.
    Source: Aji and Heafield, EMNLP 2017 (local and global thresholds).
    """

    code: ClassVar[int] = 1
    sizes: tuple[int, ...]

    @property
    def traits(self) -> Traits:
        return self.codec.traits._replace(linear=False, reduces=False)

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        payloads = [
            self.codec.encode(None, x[part], context._replace(layer=context.layer + layer))[1]
            for layer, part in enumerate(slices(self.sizes))
        ]
        lengths = torch.tensor([len(payload) for payload in payloads]).to(torch.int32)
        parts = Parts(len(x), torch.cat(payloads), scales=lengths)
        return sender, write_payload(self.code, len(x), parts)

    def content(self, payload: Tensor, d: int) -> Tensor:
        pieces = [
            self.codec.decode(None, piece, part.stop - part.start)[1]
            for part, piece in self._pieces(payload, d)
        ]
        return torch.cat(pieces)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + sum(4 + self.codec.encoded_nbytes(ratio, size) for size in self.sizes)

    def bound(self, ratio: float | None, d: int) -> float:
        return max(self.codec.bound(ratio, size) for size in self.sizes)

    def _pieces(self, payload: Tensor, d: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the position and the payload of each layer."""
        parts = read_payload(payload, self.code, d)
        scales = typed_part(parts.scales, torch.int32, len(self.sizes), "lengths")
        lengths = to_host(scales).long() & 2**32 - 1
        if int(lengths.sum()) != len(parts.values) or len(parts.indices):
            raise PayloadError(
                f"the payloads of the layers declare {int(lengths.sum())} bytes, but"
                f" {len(parts.values)} were received"
            )
        return zip(slices(self.sizes), parts.values.split(lengths.tolist()), strict=True)

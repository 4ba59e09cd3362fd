"""Contract of a codec: how a sender encodes an update and how a receiver decodes it.

A codec is an option derived from `Codec`. Its methods are pure: they never change their arguments,
and they take and return state. `sender` and `receiver` are the codec's states at the two ends of
one link, None at first. The link owns them (see `ashl.stage.compression_pipeline`), so that one
place handles dropped messages, stage boundaries and replies to several clients.

Most codecs have no state. They define two functions:

    pack(x, context) -> Parts    x float32 [d], finite or not, never changed
    unpack(parts, d) -> x        float32 [d], or `Elements`: some elements, all others being 0

x and the parts are tensors in host memory, or on a device if the codec is not `on_host`. The
kernels of `ashl.compression.kernels` have the same bits on both. Parts are not trusted: `unpack`
checks each length and index before it uses them. If x is not finite, the decoded vector contains a
NaN or an infinity, except with `traits.scale_free`. A codec with state overrides `encode` and, if
the receiver has state, too, `decode`.

A payload contains everything that decoding needs. It is one flat tensor with memory of its own;
only a lossless codec may send x itself. The bytes of the payload are counted and paid for. Decoding
raises PayloadError for a payload of another program, version or length.

A codec that needs more methods also derives from `Reduces`, `Linear` or `Collective`.
`ashl.compression.wrappers` puts error feedback, momentum, clipping and schedules around a codec. A
run that only simulates time encodes nothing: it calls `encoded_nbytes`, and `simulate_collective`
of a `Collective`.

Source of the wrappers whose fields are here: error feedback, Seide et al., Interspeech 2014;
ECQ-SGD, Wu et al., ICML 2018; momentum correction, factor masking, clipping and warm-up, Lin et
al., "Deep Gradient Compression", ICLR 2018; Accordion, Agarwal et al., MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.kernels import as_native, silence_warnings, sparse_vector
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    header_of,
    read_payload,
    write_payload,
)
from ashl.data.counter_rng import CounterRng, counter_rng
from ashl.data.rng import Purpose, bulk_stream
from ashl.option import Contract, Fraction, Natural, Positive, Ratio, option

ALL = 2**32 - 1  # in place of a worker's rank: random numbers that all workers share
Estimator = Literal["minibatch", "full", "svrg"]
State = Any  # state of a codec at one end of a link: tensors, numbers, and named tuples of both
T = TypeVar("T")


class Layer(NamedTuple):
    """One parameter tensor: its name in the model and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the layer as the matrix of its first dimension by all others."""
        return (self.shape[0], prod(self.shape[1:])) if self.shape else (1, 1)


Layout = tuple[Layer, ...]


def size_of(layout: Layout) -> int:
    """Return d, the number of elements of the flat vector."""
    return sum(layer.size for layer in layout)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return the position of each layer in the flat vector."""
    ends = [0, *accumulate(sizes)]
    return [slice(a, b) for a, b in pairwise(ends)]


def layer_name(layout: Layout, index: int) -> str:
    """Return the name of the layer that contains an element of the flat vector."""
    end = 0
    for layer in layout:
        end += layer.size
        if index < end:
            return layer.name
    raise IndexError(index)


class Traits(NamedTuple):
    """Guarantees of a codec C; sync modes, topologies and checks rely on them."""

    unbiased: bool = False  # E C(x) = x
    contraction: bool = False  # E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with δ > 0: error feedback is allowed
    # ‖C(x) − x‖ ≤ ‖x‖, with equality for small x; the residual of error feedback stays bounded,
    # so error feedback is allowed
    drains: bool = False
    linear: bool = False  # the sum of payloads decodes to the sum: an all-reduce may add them
    lossless: bool = False  # C(x) = x
    variable: bool = False  # the size of a payload depends on x
    full_gradient: bool = False  # needs the gradient over all samples, not over a minibatch
    reduces: bool = False  # `reduce` decodes all payloads of one merge together
    # C(x) does not preserve the norm of x: valid for gradients, not for differences between models
    scale_free: bool = False


class EncodeContext(NamedTuple):
    """Circumstances of one message.

    (seed, worker, round, layer) name the random streams of the message; `round` counts the worker's
    own messages. Random numbers that all workers share depend on `version` instead, the version of
    the model on which x was computed. So workers with the same model share them, however many
    messages each has sent. None means that all workers have sent equally many messages.

    `ratio` is the density of this message, in (0, 1]; None selects the option's own density. Codecs
    without a density ignore it. It may differ from message to message. `lr` is the factor of x on
    its way into the model: 1 for a difference between models, minus the learning rate for a
    gradient. `weight` is the factor that x already contains.
    """

    ratio: float | None = None
    seed: int = 0
    worker: int = 0
    round: int = 0
    layer: int = 0
    workers: int = 1
    epoch: float = 0.0  # passes over the training data since the start of the run
    lr: float = 1.0
    weight: float = 1.0
    params: Tensor | None = None  # the model on which x was computed
    version: int | None = None
    # with `estimator = "moments"`: Σ (share · gradient)² over the parts of the minibatch
    squares: Tensor | None = None

    def stream(self) -> np.random.Generator:
        """Return a sequential generator of this worker's random numbers for this message, on the
        host.
        """
        return bulk_stream(self.seed, Purpose.CODEC, self.worker, self.round, self.layer)

    def words(self, *more: int) -> CounterRng:
        """Return this worker's random words for this message, addressed by index, on the host or a
        device.

        `more` separates several streams of one message.
        """
        return counter_rng(self.seed, Purpose.CODEC, self.worker, self.round, self.layer, *more)

    @property
    def common(self) -> int:
        """Number of the round that all workers share: `version` if it is known, else `round`."""
        return self.round if self.version is None else self.version

    def shared_stream(self) -> np.random.Generator:
        """Return a generator of random numbers that are identical on all workers in this round."""
        return bulk_stream(self.seed, Purpose.CODEC, ALL, self.common, self.layer)


ENCODE_CONTEXT = EncodeContext()


class Elements(NamedTuple):
    """Some elements of a vector: their indices, a tensor or a slice, and their values."""

    indices: Any
    values: Tensor

    def to_dense(self, d: int) -> Tensor:
        """Return the vector [d] with these elements, else 0."""
        return sparse_vector(self.indices, self.values, d)


def as_float32(x: Tensor) -> Tensor:
    """Return a vector as contiguous float32, outside autograd."""
    return x.detach().to(torch.float32).contiguous()


class Codec(Contract, group="compression"):
    """Base class of codecs, with the defaults of a codec without special features.

    A field of an option may replace each of these class variables.
    """

    # number of the codec in the header of a payload, unique among codecs
    code: ClassVar[int] = 0
    parts: ClassVar[int] = 1  # with `estimator = "moments"`: parts of a minibatch
    per_layer: ClassVar[bool] = False  # True: `wrappers.Layerwise` encodes each layer separately
    warmup_epochs: ClassVar[int] = 0
    critical_ratio: ClassVar[float | None] = None
    error_feedback: ClassVar[bool] = False
    feedback_gain: ClassVar[float] = 1.0
    feedback_decay: ClassVar[float] = 1.0
    momentum: ClassVar[float | None] = None
    masking: ClassVar[bool] = False
    clip_norm: ClassVar[float | None] = None
    beta: ClassVar[float | None] = None

    @property
    def needs(self) -> dict[str, str]:
        traits, needs = self.traits, {}
        if self.momentum is not None:
            needs["no_momentum"] = "momentum"
        if self.beta is not None:
            needs |= {"no_momentum": "beta", "no_codec_momentum": "beta"}
        if traits.lossless:
            return needs
        needs["codec"] = ""
        if traits.scale_free or traits.full_gradient or self.estimator != "minibatch":
            needs["gradients"] = ""
        if traits.full_gradient:
            needs["steps_of_sgd"] = ""
        if self.estimator == "full":
            needs["fixed_batches"] = "estimator"
        if traits.reduces:
            needs["joint_weights"] = ""
        if self.critical_ratio is not None:
            needs["own_densities"] = "critical_ratio"
        return needs

    @property
    def ratio(self) -> float | None:
        """The density, None for a codec without one."""
        return None

    @property
    def estimator(self) -> str:
        """The gradient estimator that the codec needs, see `ashl.topology.local_work`."""
        return "minibatch"

    @property
    def traits(self) -> Traits:
        """The guarantees of the codec."""
        return Traits()

    @property
    def on_host(self) -> bool:
        """True if the codec works in host memory only; otherwise it works on the device of x or
        payload.
        """
        return True

    # --- encoding and decoding

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        """Encode a vector x, float32 [d]."""
        raise NotImplementedError

    def unpack(self, parts: Parts, d: int) -> Tensor | Elements:
        """Decode the parts of a payload of d elements.   Raises: PayloadError if they are
        malformed.
        """
        raise NotImplementedError

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        """Encode a flat vector x [d] and return (sender, payload)."""
        with silence_warnings():
            parts = self.pack(as_float32(x), context)
        return sender, write_payload(self.code, len(x), parts)

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        """Decode the payload of a vector of d elements and return (receiver, x).

        Raises: PayloadError if the payload is malformed or has another number of elements.
        """
        found = self.content(payload, d)
        return receiver, found.to_dense(d) if isinstance(found, Elements) else found

    def content(self, payload: Tensor, d: int) -> Tensor | Elements:
        """Return the decoded vector, or some of its elements, of a codec that `decodes_alone`."""
        with silence_warnings():
            return self.unpack(read_payload(payload, self.code, d), d)

    @property
    def decodes_alone(self) -> bool:
        """True if a payload alone determines the decoded vector."""
        return type(self).decode is Codec.decode

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        """Return the exact size of a payload in bytes; an upper bound if `traits.variable`."""
        raise NotImplementedError

    def add(self, out: Tensor, payload: Tensor, scale: float = 1.0) -> None:
        """Add scale · x to `out` in place, x being the content of the payload."""
        d = len(out)
        found = self.content(payload, d)
        if isinstance(found, Elements) and out.dtype == torch.float32:
            with silence_warnings():
                as_native(out)[as_native(found.indices)] += as_native(found.values) * float(scale)
        else:
            whole = found.to_dense(d) if isinstance(found, Elements) else found
            out.add_(whole, alpha=scale)

    def bound(self, ratio: float | None, d: int) -> float:
        """Return b such that E‖C(x) − x‖² ≤ b·‖x‖²; infinity if there is no guarantee."""
        return math.inf

    # --- the sender's state

    def restore_dropped(self, sender: State, payload: Tensor) -> State:
        """Return the sender's state after its last message was dropped in transit."""
        return sender

    def residual(self, sender: State) -> Tensor | None:
        """Return the part of earlier vectors that the sender has not sent yet; None if there is
        none.
        """
        return None

    def import_state(self, kept: State) -> State:
        """Return a sender's state made from the `Residual` or `Velocity` of another codec.

        None if this codec cannot use it.
        """
        return None

    # --- variants of the codec

    def for_layout(self, layout: Layout) -> Codec:
        """Return the codec for a model with these layers.   Raises: UsageError if they are not
        supported.
        """
        return self

    def for_pulls(self) -> Codec:
        """Return the codec for pulls, which are differences between models."""
        return self

    def density(self, context: EncodeContext) -> float | None:
        """Return the density of a message, after all schedules around the codec."""
        return context.ratio


@dataclass(frozen=True)
class OuterCodec(Codec):
    """A codec around another one, which does all that this one does not override."""

    codec: Codec

    @property
    def traits(self) -> Traits:
        return self.codec.traits

    @property
    def on_host(self) -> bool:
        return self.codec.on_host

    @property
    def decodes_alone(self) -> bool:
        return self.codec.decodes_alone

    @property
    def ratio(self) -> float | None:
        return self.codec.ratio

    @property
    def estimator(self) -> str:
        return self.codec.estimator

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        return self.codec.encode(sender, x, context)

    def content(self, payload: Tensor, d: int) -> Tensor | Elements:
        return self.codec.content(payload, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.codec.encoded_nbytes(ratio, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.codec.bound(ratio, d)


class ByLayers(Codec, contract=True):
    """Codec that treats each layer by its shape; without a layout, a vector is one layer."""

    layout: ClassVar[Layout] = ()

    def for_layout(self, layout: Layout) -> Codec:
        shaped = copy(self)
        object.__setattr__(shaped, "layout", layout)
        return shaped

    def layers(self, d: int) -> Layout:
        """Return the layers of a vector.

        Raises: PayloadError if the layers do not have d elements.
        """
        layout = self.layout or (Layer("all", (d,)),)
        if d != size_of(layout):
            raise PayloadError(
                f"expected a vector of {size_of(layout)} elements, as the layers have; received {d}"
            )
        return layout


class Keeps(NamedTuple):
    """Optimizer-like state that survives a stage boundary."""

    residual: bool = True
    momentum: bool = True


class Reduces(Codec, contract=True):
    """Codec with `traits.reduces`: the result of a merge is not Σ weight · decoded payload."""

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """Merge payloads and return (memory, x). The node that merges keeps the memory.

        Raises: PayloadError if a payload is malformed.
        """
        raise NotImplementedError

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        """Return the memory with which a stage begins, made from the memory of the previous stage.

        Args: worth is the value of one unit of the previous stage in units of this stage.
        Returns: None if this stage cannot use the memory.
        """
        return None


class Linear(Codec, contract=True):
    """Codec with `traits.linear`: an all-reduce may sum the summands of the payloads.

    Payloads of one round differ in their values only, which are the summand.
    Source: sums of masked updates as in Konečný et al., "Federated Learning: Strategies for
    Improving Communication Efficiency", 2016.
    """

    unsummed_bytes: ClassVar[int] = 0  # bytes of a payload beside header and values

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type of the values."""
        return torch.float32

    def summand(self, payload: Tensor) -> Tensor:
        """Return the flat tensor of a payload that the all-reduce sums."""
        return payload[values_of(payload)].view(self.sum_dtype)

    def with_summand(self, payload: Tensor, total: Tensor) -> Tensor:
        """Return a payload whose summand is `total`."""
        whole = payload.clone()
        values = total.detach().to(self.sum_dtype).contiguous()
        whole[values_of(payload)] = values.view(torch.uint8)
        return whole

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """Return the size of a summand in bytes."""
        return self.encoded_nbytes(ratio, d) - HEADER.size - self.unsummed_bytes


def values_of(payload: Tensor) -> slice:
    """Return the position of the values in a payload."""
    *_, scale_bytes, value_bytes = header_of(payload)
    return slice(HEADER.size + scale_bytes, HEADER.size + scale_bytes + value_bytes)


class CodecInput(NamedTuple):
    """Input of a codec from the wrappers around it: its own state, the vector, and the context."""

    inner: State
    x: Tensor
    context: EncodeContext


class Outcome(NamedTuple):
    """Result of a collective protocol.

    `update` is identical on all workers. `sent` is the part of this worker's vector that the update
    contains. `inner` is the codec's state afterwards.
    """

    update: Tensor
    sent: Tensor | None = None  # None: the worker keeps no residual
    inner: State = None


class Team(Protocol):
    """The workers that merge, as a collective protocol sees them.

    Members are numbered from 0 in rank order; `place` is the number of a member. An implementation
    may piggyback other data of the merge on these messages. Messages are tensors, or `SizeOnly` in
    a run that is only timed.
    """

    @property
    def size(self) -> int: ...

    @property
    def place(self) -> int:
        """Number of this worker among the members."""
        ...

    @property
    def weight(self) -> float:
        """Factor c_j of this worker's vector in the sum."""
        ...

    @property
    def not_finite(self) -> bool:
        """True if a member's update is known to be not finite; the protocol may then stop early."""
        ...

    async def all_reduce(self, x: Any, weight: float = 1.0) -> Tensor:
        """Return Σ weight · x, added in rank order and identical on all members."""
        ...

    async def all_gather(self, x: Any) -> list[Tensor]:
        """Return the bytes of every member, uint8 of any lengths, in rank order."""
        ...

    async def send(self, place: int, name: str, payload: Any, *numbers: float) -> None:
        """Send a payload to one member; the numbers cost no time."""
        ...

    async def recv(
        self, place: int, name: str, final: bool = False
    ) -> tuple[Tensor, tuple[float, ...]]:
        """Receive (payload, numbers) from one member.

        `final` says that this member already holds the totals of all members.
        """
        ...

    def compute(self, fn: Callable[[], T], work: float = 0.0) -> Awaitable[T]:
        """Run fn() and return its result; its time counts as compression, 1 unit of work per
        encoding.
        """
        ...


class Collective(Codec, contract=True):
    """Codec with a protocol of its own among all workers of an all-reduce."""

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        """Return the members with which member `place` exchanges point-to-point messages."""
        return ()

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Run the protocol and return the merged update, Σ c·C(x) or the codec's form of it."""
        raise NotImplementedError

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        """Send messages of the same sizes as `collective`, as `SizeOnly`."""
        raise NotImplementedError


@option
class Wrappable(Codec):
    """Fields of the wrappers that may be put around a codec; see `ashl.compression.wrappers`."""

    error_feedback: bool
    feedback_gain: Fraction
    feedback_decay: Fraction
    momentum: Fraction | None
    masking: bool
    clip_norm: Positive | None


# Fields of a codec inside another codec: the outer one keeps the residual and clips.
PLAIN: dict[str, Any] = {
    "error_feedback": False,
    "feedback_gain": 1.0,
    "feedback_decay": 1.0,
    "momentum": None,
    "masking": True,
    "clip_norm": None,
}


@option
class WithDensity(Wrappable):
    """Fields of the density and of its schedule."""

    ratio: Ratio
    warmup_epochs: Natural
    critical_ratio: Ratio | None

    def num_selected(self, ratio: float | None, d: int) -> int:
        """Return k for a density; None selects the option's own density."""
        return selected_count(self.ratio if ratio is None else ratio, d)


def selected_count(share: float, d: int) -> int:
    """Return k = max(1, round(density · d)).

    Raises: ValueError if the density is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"compression.ratio={share}: the density must be above 0 and at most 1")
    return max(1, round(share * d))

"""Compress pushes and pulls: a codec between sender and receiver, with the state that it keeps at
both.

Push: the codec with its wrappers encodes the update. The messages of one worker meet the same
`sender` state at the worker and the same `receiver` state at the server; payloads that are reduced
together share one `memory`. Pull, where pulls are compressed: with h_i the model that worker i
holds, C(w − h_i) is sent and both ends add it, h_i ← h_i + C(w − h_i). Elements that were not sent
are still in w − h_i at the next pull, so h_i carries the residual and C needs no error feedback.
The first pull, and one that would be no shorter, is the model itself, so a ratio of 1 is the plain
pull, bit for bit.

A codec works on the vectors' device, or in the host's memory alone (`on_host`); its input is moved
there, and its output is moved back.

`CodecState` is part of a rank's state, so that a checkpoint holds it, and only this module changes
it. In a run that is only timed, vectors and payloads are `SizeOnly`, and of the codec only its size
functions are called.

Source: pulls are EF21-P of Gruntkowska, Tyurin and Richtárik, "EF21-P and Friends", ICML 2023, with
one copy per worker because workers pull at different times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from ashl.compression.contract import (
    Codec,
    CodecInput,
    Collective,
    EncodeContext,
    Keeps,
    Linear,
    Outcome,
    Reduces,
    State,
    Traits,
)
from ashl.compression.wrappers import wrapper
from ashl.compression.wrappers.compose import convert_sender
from ashl.compression.wrappers.two_pass import capture_codec_input, update_sender
from ashl.errors import UsageError
from ashl.learn.device import HOST, to_device, to_host
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly, Vector

Body: TypeAlias = Tensor | SizeOnly  # what travels of it
BESIDE = 1_000_000  # bytes


@dataclass
class CodecState:
    """What a codec keeps at this rank's ends of its links."""

    sender: State = None  # on the way up
    receivers: dict[int, State] = field(default_factory=dict)  # ... where it arrives, by worker
    memory: State = None  # where bodies are reduced together
    gradients: bool = False  # whether they are of gradients, and not of differences between models
    held: dict[int, Vector] = field(
        default_factory=dict
    )  # by a server: the model that each worker has

    def copy(self) -> CodecState:
        """The same, to go on with; what codecs keep is never changed."""
        return replace(self, receivers=dict(self.receivers), held=dict(self.held))

    def forget(self, worker: int) -> None:
        """This worker is gone; should it come back, both ends begin anew."""
        self.receivers.pop(worker, None)
        self.held.pop(worker, None)


@dataclass(frozen=True)
class CompressionPipeline:
    """A codec as a stage uses it, for vectors of d elements."""

    codec: Codec  # with what is wrapped around it
    d: int
    layer: int = 0  # of the model, the first in these elements
    device: str = HOST  # where the vectors are

    @cached_property
    def innermost(self) -> Codec:
        """Without anything around it: by it a body is read, and differences between models are
        sent.
        """
        return wrapper.innermost(self.codec)

    @cached_property
    def traits(self) -> Traits:
        return self.codec.traits

    @cached_property
    def down(self) -> Codec:
        """What compresses a pull."""
        return self.innermost.for_pulls()

    @cached_property
    def unread(self) -> SizeOnly:
        """What is decoded where a run is only timed."""
        return SizeOnly(4 * self.d)

    @property
    def most_bytes(self) -> int:
        """Bytes that no message exceeds: two models, or a body of all elements, and a little that
        goes beside them.
        """
        return BESIDE + max(
            8 * self.d, *(self.codec.encoded_nbytes(share, self.d) for share in (None, 1.0))
        )

    @property
    def adds_up(self) -> bool:
        """Whether an all-reduce carries messages of one body's size, whatever the number of
        workers.
        """
        return self.traits.lossless or self.traits.linear or isinstance(self.innermost, Collective)

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        """The ranks that a protocol of the codec's own exchanges messages with."""
        return self.innermost.peers(place, size) if isinstance(self.innermost, Collective) else ()

    @property
    def has_own_messages(self) -> bool:
        """Whether that exchanges any."""
        return bool(self.peers(0, 2))

    def carry_over(
        self, ends: CodecState, keeps: Keeps, gradients: bool, rate: float
    ) -> CodecState:
        """The ends when a stage begins with this link, at this learning rate. Both begin anew, but
        for what workers hold, and for what is kept of updates, at a sender or where bodies are
        reduced, if the codec takes that up.
        """
        memory = None
        if ends.memory is not None and isinstance(self.innermost, Reduces):
            worth = (
                1.0
                if gradients == ends.gradients or not rate
                else -1 / rate
                if gradients
                else -rate
            )
            memory = self.innermost.convert_memory(ends.memory, keeps, worth)
        sender = (
            self._move_state(convert_sender(ends.sender, self.codec)) if keeps.residual else None
        )
        return CodecState(sender, memory=memory, gradients=gradients, held=ends.held)

    def _move_state(self, state: State) -> State:
        """What another codec kept, where this one works."""
        if isinstance(state, Tensor):
            return self.move_to_codec(self.codec, state)
        return type(state)(*map(self._move_state, state)) if isinstance(state, tuple) else state

    # --- up

    def encode(self, ends: CodecState, x: Vector, context: EncodeContext) -> Body:
        if isinstance(x, SizeOnly):
            return SizeOnly(self.codec.encoded_nbytes(self.codec.share(context), self.d))
        ends.sender, body = self.codec.encode(
            ends.sender, self.move_to_codec(self.codec, x), context
        )
        if context.round == 0:
            self.check_size(body, context)
        return body

    def move_to_codec(self, codec: Codec, x: Tensor) -> Tensor:
        """A vector, or a body, where a codec works."""
        if self.device == HOST:
            return x
        return to_host(x) if codec.on_host else to_device(x, self.device)

    def move_from_codec(self, x: Tensor) -> Tensor:
        """A vector that the codec made."""
        return to_device(x, self.device)

    def check_size(self, body: Tensor, context: EncodeContext) -> None:
        """A first message is as long as the codec says: by that runs are planned and timed. Raises
        UsageError.
        """
        size, most = (
            self.codec.encoded_nbytes(self.codec.share(context), self.d),
            self.traits.variable,
        )
        if body.nbytes > size or (body.nbytes < size and not most):
            name, at = type(self.innermost).__name__, "at most " if most else ""
            raise UsageError(
                f"{name} wrote {body.nbytes} bytes for {self.d} elements, but encoded_nbytes says"
                f" {at}{size}; make them agree, or set variable in its traits and let"
                " encoded_nbytes be the most"
            )

    def restore_dropped(self, ends: CodecState, body: Body) -> None:
        """A body was dropped on the way: the sender takes back what was in it."""
        if (
            not isinstance(body, SizeOnly) and body.dtype == torch.uint8
        ):  # else it was sent as it is
            ends.sender = self.codec.restore_dropped(ends.sender, body)

    def residual(self, ends: CodecState) -> Tensor | None:
        """What the sender keeps for later."""
        return self.codec.residual(ends.sender)

    def decode(self, ends: CodecState, worker: int, body: Body) -> Vector:
        """What a worker sent. Raises BodyError."""
        if isinstance(body, SizeOnly):
            return self.unread
        ends.receivers[worker], x = self.innermost.decode(
            ends.receivers.get(worker), self.move_to_codec(self.innermost, body), self.d
        )
        return self.move_from_codec(x)

    def receive_body(self, ends: CodecState, worker: int, body: Body) -> Vector | Body:
        """The same, but the body as it is where bodies are reduced together."""
        return body if self.traits.reduces else self.decode(ends, worker, body)

    def reduce(self, ends: CodecState, bodies: Sequence[Body], weights: Sequence[float]) -> Vector:
        """What the bodies of a merge are together, with `traits.reduces`. Raises BodyError."""
        real = [
            self.move_to_codec(self.innermost, body) for body in bodies if isinstance(body, Tensor)
        ]
        if len(real) < len(bodies):
            return self.unread
        assert isinstance(self.innermost, Reduces), "a codec that reduces is derived from Reduces"
        ends.memory, x = self.innermost.reduce(ends.memory, real, weights, self.d)
        return self.move_from_codec(x)

    def merge(
        self,
        ends: CodecState,
        bodies: Sequence[Body],
        weights: Sequence[float],
        workers: Sequence[int],
    ) -> Vector:
        """Σ c·C(x) of the bodies of these workers, or what else they are together. Raises
        BodyError.
        """
        if self.traits.reduces:
            return self.reduce(ends, bodies, weights)
        each = zip(workers, bodies, weights, strict=True)
        return sum_in_rank_order(
            [self.decode(ends, worker, body) * weight for worker, body, weight in each]
        )

    # --- up, summed on the way

    def summand(self, body: Body, context: EncodeContext) -> Body:
        """What of a body an all-reduce sums, with `traits.linear`."""
        assert isinstance(self.innermost, Linear), "a codec that is linear is derived from Linear"
        if isinstance(body, SizeOnly):
            return SizeOnly(self.innermost.summed_bytes(self.codec.share(context), self.d))
        return self.innermost.summand(body)

    def decode_sum(self, ends: CodecState, body: Body, total: Body) -> Vector:
        """What a sum of summands decodes to, where this worker's body was this one. Raises
        BodyError.
        """
        if isinstance(body, SizeOnly) or isinstance(total, SizeOnly):
            return self.unread
        assert isinstance(self.innermost, Linear)
        whole = self.innermost.summed(body, self.move_to_codec(self.innermost, total))
        if self.traits.reduces:
            return self.reduce(ends, [whole], [1.0])
        return self.move_from_codec(self.innermost.decode(None, whole, self.d)[1])

    def before(self, ends: CodecState, x: Tensor, context: EncodeContext) -> CodecInput:
        """What a protocol of the codec's own is given of x."""
        return capture_codec_input(
            self.codec, ends.sender, self.move_to_codec(self.codec, x), context
        )

    def after(
        self, ends: CodecState, x: Tensor, context: EncodeContext, outcome: Outcome
    ) -> Tensor:
        """The update that the protocol came to; the sender keeps what of x is not in it."""
        ends.sender = update_sender(
            self.codec, ends.sender, self.move_to_codec(self.codec, x), context, outcome
        )
        return self.move_from_codec(outcome.update)

    # --- differences between models

    def difference(self, x: Vector, context: EncodeContext) -> Body:
        """x by the codec alone, without state."""
        if isinstance(x, SizeOnly):
            return SizeOnly(self.innermost.encoded_nbytes(context.ratio, self.d))
        return self.innermost.encode(None, self.move_to_codec(self.innermost, x), context)[1]

    def add_bodies(self, vector: Vector, bodies: Sequence[tuple[Body, float]]) -> Vector:
        """vector + Σ weight · content of such bodies, a new vector. Raises BodyError."""
        return (
            vector
            if isinstance(vector, SizeOnly)
            else self._add_bodies(self.innermost, vector, bodies)
        )

    def pull_bytes(self, ratio: float | None) -> int:
        """Bytes of a pull of this share; None = of the model."""
        return (
            4 * self.d
            if ratio is None
            else min(4 * self.d, self.down.encoded_nbytes(ratio, self.d))
        )

    def encode_pull(
        self, ends: CodecState, worker: int, model: Vector, context: EncodeContext
    ) -> Body:
        """At the server: what to send a worker that is to have this model."""
        held = ends.held.get(worker)
        if held is None or self.down.encoded_nbytes(context.ratio, self.d) >= model.nbytes:
            ends.held[worker] = model
            return model
        if isinstance(model, SizeOnly) or isinstance(held, SizeOnly):
            return SizeOnly(self.down.encoded_nbytes(context.ratio, self.d))
        _, body = self.down.encode(None, self.move_to_codec(self.down, model - held), context)
        ends.held[worker] = self.apply_pull(held, body)
        return body

    def record_full_pull(self, ends: CodecState, worker: int, model: Vector) -> None:
        """At the server: this worker has been sent the model itself."""
        ends.held[worker] = model

    def apply_pull(self, params: Vector, body: Body) -> Vector:
        """At the worker: the model after a pull. Nothing is changed in place. Raises BodyError."""
        if isinstance(params, SizeOnly) or isinstance(body, SizeOnly):
            return params
        if body.dtype == torch.float32 and body.shape == params.shape:
            return body
        return self._add_bodies(self.down, params, [(body, 1.0)])

    def _add_bodies(
        self, codec: Codec, vector: Tensor, bodies: Sequence[tuple[Body, float]]
    ) -> Tensor:
        total = vector.clone()
        for body, weight in bodies:
            assert isinstance(body, Tensor)
            body = self.move_to_codec(codec, body)
            if not codec.on_host or self.device == HOST:
                codec.add(
                    total, body, weight
                )  # which need not make the whole vector of a sparse body
            else:
                total.add_(self.move_from_codec(codec.decode(None, body, self.d)[1]), alpha=weight)
        return total

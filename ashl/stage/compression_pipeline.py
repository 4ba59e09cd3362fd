"""Compress pushes and pulls: a codec between sender and receiver, with the state that it keeps at
both.

Push: the codec with its wrappers encodes the update. The worker keeps one `sender` state for its
messages, and the receiver one of `receivers` for each worker. A codec that reduces all payloads of
a merge together keeps one `memory` instead.
Pull: if pulls are compressed, C(w − h_i) is sent, where h_i is the model that worker i holds. Both
sides add it: h_i ← h_i + C(w − h_i). Elements that were not sent are still in w − h_i at the next
pull, so h_i carries the residual and C needs no error feedback. The first pull is the model itself,
and so is a pull that would be no shorter. Therefore a ratio of 1 is the plain pull, bit for bit.

A codec works on the vectors' device, or in the host's memory alone (`on_host`). Its input is moved
there, and its output is moved back.

`CodecState` is part of a rank's state, so that a checkpoint holds it. In a run that is only timed,
vectors and payloads are `SizeOnly`, and of the codec only its size functions are called.

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
    Collective,
    EncodeContext,
    Keeps,
    Linear,
    Reduces,
    State,
    Team,
    Traits,
)
from ashl.compression.wrappers import (
    convert_sender,
    inner_codec,
    rebuild_tuple,
    run_protocol,
)
from ashl.device import HOST, to_device, to_host
from ashl.errors import UsageError
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly, Vector

Payload: TypeAlias = Tensor | SizeOnly  # an encoded vector, as it is sent
EXTRA_BYTES = 1_000_000  # bytes allowed in a message beside its payload


@dataclass
class CodecState:
    """The state of a codec at one rank."""

    sender: State = None  # state of the sender of pushes
    # by worker: state of the receiver of pushes
    receivers: dict[int, State] = field(default_factory=dict)
    memory: State = None  # state shared by payloads that are reduced together
    gradients: bool = False  # True if the codec encodes gradients, False for differences of models
    # at a server, by worker: the model that the worker holds
    held: dict[int, Vector] = field(default_factory=dict)

    def copy(self) -> CodecState:
        """Return a copy to continue with; codecs never change their state in place."""
        return replace(self, receivers=dict(self.receivers), held=dict(self.held))

    def forget(self, worker: int) -> None:
        """Delete the state of a failed worker; after a rejoin both sides begin without state."""
        self.receivers.pop(worker, None)
        self.held.pop(worker, None)


@dataclass(frozen=True)
class CompressionPipeline:
    """A codec as a stage uses it, for vectors of d elements."""

    codec: Codec  # with its wrappers
    d: int
    layer: int = 0  # number of the first layer in these elements
    device: str = HOST  # device of the vectors

    @cached_property
    def inner_codec(self) -> Codec:
        """Return the codec without its wrappers; it decodes payloads, and encodes differences
        between models.
        """
        return inner_codec(self.codec)

    @cached_property
    def traits(self) -> Traits:
        return self.codec.traits

    @cached_property
    def pull_codec(self) -> Codec:
        """Return the codec of pulls."""
        return self.inner_codec.for_pulls()

    @cached_property
    def size_only_vector(self) -> SizeOnly:
        """Return the decoded vector of a run that is only timed."""
        return SizeOnly(4 * self.d)

    @property
    def max_message_bytes(self) -> int:
        """Return an upper bound on the bytes of a message: the larger of two models and a payload
        of full density, and `EXTRA_BYTES`.
        """
        return EXTRA_BYTES + max(
            8 * self.d, *(self.codec.encoded_nbytes(share, self.d) for share in (None, 1.0))
        )

    @property
    def has_constant_size(self) -> bool:
        """Return True if the message of an all-reduce has the size of one payload, for any number
        of workers.
        """
        return (
            self.traits.lossless or self.traits.linear or isinstance(self.inner_codec, Collective)
        )

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        """Return the peers in the codec's own protocol of worker `place` of `size` workers."""
        return (
            self.inner_codec.peers(place, size) if isinstance(self.inner_codec, Collective) else ()
        )

    def carry_over(
        self, state: CodecState, keeps: Keeps, gradients: bool, rate: float
    ) -> CodecState:
        """Return the codec state for a stage that begins with this pipeline, at learning rate
        `rate`.

        Kept are the models that workers hold and, if the codec can convert them, the residual at a
        sender and the memory. All other state is dropped. A model moves by −rate · gradient, by
        which a memory is converted between gradients and differences of models.
        """
        memory = None
        if state.memory is not None and isinstance(self.inner_codec, Reduces):
            factor = 1.0
            if gradients != state.gradients and rate:
                factor = -1 / rate if gradients else -rate
            memory = self.inner_codec.convert_memory(state.memory, keeps, factor)
        sender = (
            self._move_state(convert_sender(state.sender, self.codec)) if keeps.residual else None
        )
        return CodecState(sender, memory=memory, gradients=gradients, held=state.held)

    def _move_state(self, state: State) -> State:
        """Move the state of another codec to the device of this one."""
        if isinstance(state, Tensor):
            return self.move_to_codec(self.codec, state)
        if isinstance(state, tuple):
            return rebuild_tuple(state, map(self._move_state, state))
        return state

    # --- pushes

    def encode(self, state: CodecState, x: Vector, context: EncodeContext) -> Payload:
        """Encode an update, and update the sender's state."""
        if isinstance(x, SizeOnly):
            return SizeOnly(self.declared_nbytes(context))
        state.sender, payload = self.codec.encode(
            state.sender, self.move_to_codec(self.codec, x), context
        )
        if context.round == 0:
            self.check_size(payload, context)
        return payload

    def declared_nbytes(self, context: EncodeContext) -> int:
        """Return the declared bytes of a message; an upper bound if `traits.variable`."""
        return self.codec.encoded_nbytes(self.codec.density(context), self.d)

    def move_to_codec(self, codec: Codec, x: Tensor) -> Tensor:
        """Move a vector or a payload to the device of a codec."""
        if self.device == HOST:
            return x
        return to_host(x) if codec.on_host else to_device(x, self.device)

    def move_from_codec(self, x: Tensor) -> Tensor:
        """Move a decoded vector to the device of the vectors."""
        return to_device(x, self.device)

    def check_size(self, payload: Tensor, context: EncodeContext) -> None:
        """Raise UsageError unless a first message has the size that the codec declares, by which
        runs are planned and timed.
        """
        size, variable = self.declared_nbytes(context), self.traits.variable
        if payload.nbytes > size or (payload.nbytes < size and not variable):
            name, at = type(self.inner_codec).__name__, "at most " if variable else ""
            raise UsageError(
                f"{name} wrote {payload.nbytes} bytes for {self.d} elements, but encoded_nbytes"
                f" says {at}{size}; make them agree, or set variable in its traits and let"
                " encoded_nbytes be the most"
            )

    def restore_dropped(self, state: CodecState, payload: Payload) -> None:
        """Add the content of a dropped payload back to the sender's state."""
        # a payload that is not uint8 is a vector that was sent without encoding
        if not isinstance(payload, SizeOnly) and payload.dtype == torch.uint8:
            state.sender = self.codec.restore_dropped(state.sender, payload)

    def decode(self, state: CodecState, worker: int, payload: Payload) -> Vector:
        """Decode the payload of a worker. Raises PayloadError."""
        if isinstance(payload, SizeOnly):
            return self.size_only_vector
        state.receivers[worker], x = self.inner_codec.decode(
            state.receivers.get(worker), self.move_to_codec(self.inner_codec, payload), self.d
        )
        return self.move_from_codec(x)

    def receive_payload(self, state: CodecState, worker: int, payload: Payload) -> Vector | Payload:
        """Decode the payload of a worker, or return it unchanged if payloads are reduced
        together.
        """
        return payload if self.traits.reduces else self.decode(state, worker, payload)

    def reduce(
        self, state: CodecState, payloads: Sequence[Payload], weights: Sequence[float]
    ) -> Vector:
        """Reduce the payloads of a merge to one update, for codecs with `traits.reduces`. Raises
        PayloadError.
        """
        tensors = [
            self.move_to_codec(self.inner_codec, payload)
            for payload in payloads
            if isinstance(payload, Tensor)
        ]
        if len(tensors) < len(payloads):
            return self.size_only_vector
        assert isinstance(self.inner_codec, Reduces), "a codec that reduces is derived from Reduces"
        state.memory, x = self.inner_codec.reduce(state.memory, tensors, weights, self.d)
        return self.move_from_codec(x)

    def merge(
        self,
        state: CodecState,
        payloads: Sequence[Payload],
        weights: Sequence[float],
        workers: Sequence[int],
    ) -> Vector:
        """Return Σ c·C(x) of the payloads of these workers, or their reduction. Raises
        PayloadError.
        """
        if self.traits.reduces:
            return self.reduce(state, payloads, weights)
        each = zip(workers, payloads, weights, strict=True)
        return sum_in_rank_order(
            [self.decode(state, worker, payload) * weight for worker, payload, weight in each]
        )

    # --- pushes by all-reduce

    def summand(self, payload: Payload, context: EncodeContext) -> Payload:
        """Return the part of a payload that an all-reduce sums, for codecs with `traits.linear`."""
        assert isinstance(self.inner_codec, Linear), "a codec that is linear is derived from Linear"
        if isinstance(payload, SizeOnly):
            return SizeOnly(self.inner_codec.summed_bytes(self.codec.density(context), self.d))
        return self.inner_codec.summand(payload)

    def decode_sum(self, state: CodecState, payload: Payload, total: Payload) -> Vector:
        """Decode a sum of summands with the rest of this worker's payload. Raises PayloadError."""
        if isinstance(payload, SizeOnly) or isinstance(total, SizeOnly):
            return self.size_only_vector
        assert isinstance(self.inner_codec, Linear)
        total_payload = self.inner_codec.with_summand(
            payload, self.move_to_codec(self.inner_codec, total)
        )
        if self.traits.reduces:
            return self.reduce(state, [total_payload], [1.0])
        return self.move_from_codec(self.inner_codec.decode(None, total_payload, self.d)[1])

    def residual(self, state: CodecState) -> Tensor | None:
        """Return the residual that the sender keeps for later messages."""
        return self.codec.residual(state.sender)

    async def run_protocol(
        self, state: CodecState, team: Team, x: Vector, context: EncodeContext
    ) -> Vector:
        """Run the codec's own protocol over all workers, update the sender's state, and return the
        merged update.
        """
        if isinstance(x, SizeOnly):
            assert isinstance(self.inner_codec, Collective)
            await team.compute(lambda: None, work=1)
            await self.inner_codec.simulate_collective(team, self.codec.density(context), self.d)
            return x
        state.sender, update = await run_protocol(
            self.codec, state.sender, team, self.move_to_codec(self.codec, x), context
        )
        return self.move_from_codec(update)

    # --- differences between models

    def encode_difference(self, x: Vector, context: EncodeContext) -> Payload:
        """Encode a difference of models by the codec without wrappers and state."""
        if isinstance(x, SizeOnly):
            return SizeOnly(self.inner_codec.encoded_nbytes(context.ratio, self.d))
        return self.inner_codec.encode(None, self.move_to_codec(self.inner_codec, x), context)[1]

    def add_payloads(self, vector: Vector, payloads: Sequence[tuple[Payload, float]]) -> Vector:
        """Return a new vector: vector + Σ weight · content of the payloads. Raises PayloadError."""
        if isinstance(vector, SizeOnly):
            return vector
        return self._add_payloads(self.inner_codec, vector, payloads)

    def encode_pull(
        self, state: CodecState, worker: int, model: Vector, context: EncodeContext
    ) -> Payload:
        """Encode, at the server, a pull by which a worker gets close to this model."""
        held = state.held.get(worker)
        if held is None or self.pull_codec.encoded_nbytes(context.ratio, self.d) >= model.nbytes:
            state.held[worker] = model
            return model
        if isinstance(model, SizeOnly) or isinstance(held, SizeOnly):
            return SizeOnly(self.pull_codec.encoded_nbytes(context.ratio, self.d))
        _, payload = self.pull_codec.encode(
            None, self.move_to_codec(self.pull_codec, model - held), context
        )
        state.held[worker] = self.apply_pull(held, payload)
        return payload

    def apply_pull(self, params: Vector, payload: Payload) -> Vector:
        """Return, at the worker, the model after a pull. Nothing is changed in place. Raises
        PayloadError.
        """
        if isinstance(params, SizeOnly) or isinstance(payload, SizeOnly):
            return params
        if payload.dtype == torch.float32 and payload.shape == params.shape:
            return payload
        return self._add_payloads(self.pull_codec, params, [(payload, 1.0)])

    def _add_payloads(
        self, codec: Codec, vector: Tensor, payloads: Sequence[tuple[Payload, float]]
    ) -> Tensor:
        total = vector.clone()
        for payload, weight in payloads:
            assert isinstance(payload, Tensor)
            payload = self.move_to_codec(codec, payload)
            if not codec.on_host or self.device == HOST:
                # `add` can skip the decoded vector of a sparse payload
                codec.add(total, payload, weight)
            else:
                total.add_(
                    self.move_from_codec(codec.decode(None, payload, self.d)[1]), alpha=weight
                )
        return total

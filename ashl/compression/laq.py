"""LAQ: send the quantized change of a gradient only if it is large; without quantization, LAG.

Rule: g is the worker's gradient. Q is its last sent form, which both ends keep, 0 at first. R = ‖g
− Q‖_∞ and τ = 1/(2^b − 1). δ = 2τR·q − R with q = ⌊(g − Q + R)/(2τR) + ½⌋ in 0 … 2^b − 1. The
worker skips a message if it has skipped fewer than `max_age` in a row and

    ‖δ‖² ≤ (1/γ²) Σ_{j ≤ D} ξ_j ‖x^{t+1−j} − x^{t−j}‖² + 3(‖ε‖² + ‖ε'‖²)

Then it sends 0 bytes, and the server uses Q again. Otherwise it sends δ, and Q ← Q + δ at both
ends. ξ_j = xi/D, D = `memory`. x are the models that the worker received. ε = g − Q − δ, and ε' is
that of the last message. LAG (`bits=null`) has δ = g − Q and sends g itself: no errors accumulate.
A dropped message leaves Q unchanged at both ends.
Bits: 32 + b·d when sent, 32·d with LAG, 0 when skipped.

Limits: LAG with xi = 0 is gradient descent, bit for bit. With `estimator=minibatch`, the noise of
the gradients counts as change, and hardly any message is skipped. With momentum or Adam, a model
moves farther than γ·Q, so that no message would be sent any more; this is refused. If a few
elements are far larger than the rest, as in deep models, 4 bits leave an ε as long as g itself.
Then each worker skips until `max_age`; 8 bits suffice. If an element is not finite, all of Q
becomes NaN.

Source: Chen et al., "LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed
Learning", NeurIPS 2018; Sun et al., "Communication-Efficient Distributed Learning via Lazily
Aggregated Quantized Gradients", NeurIPS 2019.
Differs: the papers sum the workers' gradients; here they are averaged. So their 1/(γn)² with f = Σ
f_i is 1/γ² with this learning rate. All workers are assumed to have equal weight.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    EncodeContext,
    Estimator,
    PayloadError,
    Traits,
)
from ashl.compression.wire.arrays import (
    Array,
    array_of,
    as_bytes,
    divide,
    read,
    tensor_of,
    wide,
    zeros,
)
from ashl.compression.wire.bits import BLOCK, blocks, pack, packed_bytes, unpack, unpack_bytes
from ashl.compression.wire.levels import reach_of
from ashl.compression.wire.payload_format import (
    HEADER,
    Parts,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.learn.device import numbers
from ashl.option import Count, NonNegative, Number, option

LEVELS, WHOLE = 0, 1  # forms of a payload: levels of δ, or g as float32


class Lazy(NamedTuple):
    """The sender's state.

    `sent` is Q, `error` is ‖ε'‖², `age` is the number of messages skipped since. `model` is the
    last model, and `moves` are the squared lengths of its last D moves. `before` holds the first
    three as they were before the last message.
    """

    sent: Tensor | None = None
    error: float = 0.0
    age: int = 0
    model: Tensor | None = None
    moves: tuple[float, ...] = ()
    before: tuple[Tensor | None, float, int] = (None, 0.0, 0)


@option
class LAQ(Codec):
    """Sends if the gradient has changed."""

    code: ClassVar[int] = 100
    on_host: ClassVar[bool] = False
    estimator: Estimator
    bits: Annotated[int, Number, Field(ge=1, le=16)] | None
    xi: NonNegative
    memory: Count
    max_age: Count

    @property
    def traits(self) -> Traits:
        return Traits(variable=True, full_gradient=True)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + (4 * d if self.bits is None else 4 + packed_bytes(d, self.bits))

    def encode(
        self, sender: Lazy | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Lazy, Tensor]:
        state, g = model_changes(sender or Lazy(), context.params, self.memory), array_of(x)
        sent = zeros(g, len(g)) if state.sent is None else array_of(state.sent)
        with np.errstate(over="ignore", invalid="ignore"):
            parts = self._quantize(g, sent)
            now = self._apply(parts, sent)
            change, error = distance(now, sent), distance(g, now)
        reach = self.xi / self.memory * sum(state.moves) / context.lr**2 if context.lr else 0.0
        lazy = change <= reach + 3 * (error + state.error) and state.age < self.max_age
        before = (state.sent, state.error, state.age)
        if lazy and state.sent is not None:
            return state._replace(age=state.age + 1, before=before), x[:0].to(torch.uint8)
        after = state._replace(sent=tensor_of(now), error=error, age=0, before=before)
        return after, write_payload(self.code, x.numel(), parts)

    def decode(self, receiver: Tensor | None, payload: Tensor, d: int) -> tuple[Tensor, Tensor]:
        if isinstance(payload, Tensor) and not payload.numel():
            if receiver is None:
                raise PayloadError("received a skipped message before any gradient")
            return receiver, receiver
        parts = read_payload(payload, self.code, d)
        sent = zeros(parts.values, d) if receiver is None else array_of(receiver)
        with np.errstate(over="ignore", invalid="ignore"):
            now = tensor_of(self._apply(parts, sent))
            return now, now

    def restore_dropped(self, sender: Lazy, payload: Tensor) -> Lazy:
        sent, error, age = sender.before
        return sender._replace(sent=sent, error=error, age=age)

    def _quantize(self, g: Array, sent: Array) -> Parts:
        d, top = len(g), 2 ** (self.bits or 1) - 1
        if self.bits is None:
            return Parts(d, g, form=WHOLE)
        if isinstance(g, Tensor):
            reach = reach_of(g - sent)
            scales = np.array([reach if np.isfinite(reach) else np.nan], "<f4")
            levels = ((divide(g - sent, float(reach) or 1.0) + 1) * (top / 2) + 0.5).clamp(0, top)
            return Parts(
                d, pack(levels.to(torch.int32) * int(np.isfinite(reach)), self.bits), scales=scales
            )
        buffer = np.empty(min(BLOCK, d), np.float32)
        stream = np.empty(packed_bytes(d, self.bits), np.uint8)
        magnitudes = [np.abs(part, out=part).max() for _, part in changes(g, sent, buffer)]
        reach = np.max(magnitudes, initial=np.float32(0))
        if not np.isfinite(reach):
            stream[:] = 0
            return Parts(d, stream, scales=np.array([np.nan], "<f4"))
        for where, change in changes(g, sent, buffer):
            # Divide first: twice a large R would overflow float32.
            change /= reach if reach else np.float32(1)
            change += np.float32(1)
            change *= np.float32(top / 2)
            change += np.float32(0.5)
            levels = np.clip(change, 0, top, out=change).astype(
                np.uint8 if self.bits <= 8 else np.uint16
            )
            piece = pack(levels, self.bits)
            stream[where.start * self.bits // 8 :][: piece.size] = piece
        return Parts(d, stream, scales=np.array([reach], "<f4"))

    def _apply(self, parts: Parts, sent: Array) -> Array:
        """Return Q after a message, with the same bits at both ends."""
        d = len(sent)
        form = WHOLE if self.bits is None else LEVELS
        if parts.count != d or len(parts.indices) or parts.form != form:
            raise PayloadError(
                f"expected a gradient of {d} elements; received form {parts.form} with"
                f" {parts.count} values"
            )
        values = as_bytes(parts.values)
        if self.bits is None:
            typed_part(parts.scales, "<f4", 0, "scales")
            return array_of(tensor_of(typed_part(values, "<f4", d, "values")).clone())
        reach = typed_part(read(parts.scales).view(np.uint8), "<f4", 1, "scales")[0]
        if len(values) != packed_bytes(d, self.bits):
            raise PayloadError(
                f"received {len(values)} bytes, which do not hold {d} levels of {self.bits} bits"
            )
        unpacked = unpack_bytes if self.bits <= 8 else unpack
        if isinstance(sent, Tensor):
            levels = unpacked(values, self.bits, d).to(torch.float32)
            return (levels * (2 / (2**self.bits - 1)) - 1) * float(reach) + sent
        now = np.empty(d, np.float32)
        for where in blocks(d):
            change = now[where]
            change[:] = unpacked(values[where.start * self.bits // 8 :], self.bits, change.size)
            change *= np.float32(2 / (2**self.bits - 1))
            change -= np.float32(1)
            change *= reach
            change += sent[where]
        return now


def model_changes(state: Lazy, model: Tensor | None, memory: int) -> Lazy:
    """Return the state after the worker has received a model."""
    if model is None or state.model is None:
        return state._replace(model=model)
    with np.errstate(over="ignore", invalid="ignore"):
        move = distance(array_of(model), array_of(state.model))
    return state._replace(model=model, moves=(move, *state.moves)[:memory])


def changes(x: np.ndarray, y: np.ndarray, buffer: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield x − y block by block; each block overwrites the one before."""
    return (
        (where, np.subtract(x[where], y[where], out=buffer[: where.stop - where.start]))
        for where in blocks(x.size)
    )


def distance(x: Array, y: Array) -> float:
    """Return ‖x − y‖² in float64; on a device, the last bits may differ."""
    if isinstance(x, Tensor):
        apart = wide(x - y)
        return numbers([apart @ apart])[0]
    buffer, total = np.empty(min(BLOCK, x.size), np.float32), 0.0
    for _, part in changes(x, y, buffer):
        apart = wide(part)
        total += float(np.einsum("i,i->", apart, apart))
    return total

"""LAQ: send the quantized change of a gradient only if it is large; without quantization, LAG.

Use when: gradients change slowly, so that many messages may be left out.
Avoid when: minibatches are used: it needs the gradient over all samples.
Alternatives: `qsgd`; `ef21`.

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

import math
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import read_levels, write_levels
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    EncodeContext,
    Estimator,
    Traits,
    as_float32,
)
from ashl.compression.kernels import (
    Array,
    as_native,
    blocks,
    convert,
    divide,
    packed_bytes,
    silence_warnings,
)
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    all_values,
    as_bytes,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.device import read_scalars, to_host
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
    traits: ClassVar[Traits] = Traits(variable=True, full_gradient=True)
    estimator: Estimator
    bits: Annotated[int, Number, Field(ge=1, le=16)] | None
    xi: NonNegative
    memory: Count
    max_age: Count

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + (4 * d if self.bits is None else 4 + packed_bytes(d, self.bits))

    def encode(
        self, sender: Lazy | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Lazy, Tensor]:
        state, g = model_changes(sender or Lazy(), context.params, self.memory), as_float32(x)
        sent = torch.zeros_like(g) if state.sent is None else state.sent
        parts = self._quantize(g, sent)
        now = self._apply(parts, sent)
        change, error = squared_distance(now, sent), squared_distance(g, now)
        reach = self.xi / self.memory * sum(state.moves) / context.lr**2 if context.lr else 0.0
        lazy = change <= reach + 3 * (error + state.error) and state.age < self.max_age
        before = (state.sent, state.error, state.age)
        if lazy and state.sent is not None:
            return state._replace(age=state.age + 1, before=before), x[:0].to(torch.uint8)
        after = state._replace(sent=now, error=error, age=0, before=before)
        return after, write_payload(self.code, len(g), parts)

    def decode(self, receiver: Tensor | None, payload: Tensor, d: int) -> tuple[Tensor, Tensor]:
        if isinstance(payload, Tensor) and not payload.numel():
            if receiver is None:
                raise PayloadError("received a skipped message before any gradient")
            return receiver, receiver
        parts = read_payload(payload, self.code, d)
        sent = receiver
        if sent is None:
            sent = torch.zeros(d, device=str(payload.device))
        now = self._apply(parts, sent)
        return now, now

    def restore_dropped(self, sender: Lazy, payload: Tensor) -> Lazy:
        sent, error, age = sender.before
        return sender._replace(sent=sent, error=error, age=age)

    def _quantize(self, g: Tensor, sent: Tensor) -> Parts:
        d, top = len(g), 2 ** (self.bits or 1) - 1
        if self.bits is None:
            return Parts(d, g, form=WHOLE)
        old, new = as_native(sent), as_native(g)
        with silence_warnings():
            reaches = read_scalars([abs(new[w] - old[w]).max() for w in blocks(new)])
        reach = math.nan if any(map(math.isnan, reaches)) else max(reaches)
        if not math.isfinite(reach):
            stream = g.new_zeros(packed_bytes(d, self.bits), dtype=torch.uint8)
            return Parts(d, stream, scales=torch.tensor([math.nan]))

        def to_levels(where: slice, rows: Array) -> Array:
            # Divide first: twice a large R would overflow float32.
            change = divide(rows.reshape(-1) - old[where], reach or 1.0)
            change += 1
            change *= top / 2
            change += 0.5
            return convert(change.clip(0, top), torch.uint8 if top < 256 else torch.int32)

        stream = write_levels(g, 1, d, top, "none", to_levels)
        return Parts(d, stream, scales=torch.tensor([reach]))

    def _apply(self, parts: Parts, sent: Tensor) -> Tensor:
        """Return Q after a message, with the same bits at both ends."""
        d, form = len(sent), WHOLE if self.bits is None else LEVELS
        values, scales = as_bytes(all_values(parts, d, form)), as_bytes(parts.scales)
        if self.bits is None:
            typed_part(scales, torch.float32, 0, "scales")
            return typed_part(values, torch.float32, d, "values").clone()
        reach = float(to_host(typed_part(scales, torch.float32, 1, "scales"))[0])
        top, old = 2**self.bits - 1, as_native(sent)[:, None]

        def to_values(where: slice, rows: Array) -> None:
            rows *= 2 / top
            rows -= 1
            rows *= reach
            rows += old[where]

        with silence_warnings():
            return read_levels(values, 1, d, top, "none", to_values)


def model_changes(state: Lazy, model: Tensor | None, memory: int) -> Lazy:
    """Return the state after the worker has received a model."""
    if model is None or state.model is None:
        return state._replace(model=model)
    move = squared_distance(as_float32(model), as_float32(state.model))
    return state._replace(model=model, moves=(move, *state.moves)[:memory])


def squared_distance(x: Array, y: Array) -> float:
    """Return ‖x − y‖² in float64; on a device, the last bits may differ."""
    total = 0.0
    x, y = as_native(x), as_native(y)
    with silence_warnings():
        for where in blocks(x):
            apart = x[where] - y[where]
            if isinstance(apart, Tensor):
                total += read_scalars([apart.double() @ apart.double()])[0]
            else:
                wide = apart.astype(np.float64)
                total += float(np.einsum("i,i->", wide, wide))
    return total

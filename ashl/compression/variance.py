"""Variance criterion: delay each element until its accumulated gradient has a certain sign.

Use when: elements should travel only once their sign is certain.
Avoid when: batches are small, or encoding time counts: it sends nearly all noise.
Alternatives: `topk`; `laq`.

Rule, for each element, with g the minibatch's gradient and s = Σ_p (share_p·g_p)² over parts p of
it, an estimate of g's second moment: r ← r + g, v ← v + s. If r² > α·v, send C(r), then r ← 0 and v
← 0; otherwise v ← ζ·v. C(r) is a sign and a power of two, M·2^−e with e = 0 … 7, the one nearest to
|r|. M is the largest power of two that is at most max |r| of the sent elements. An element whose
nearest power is below M·2^−7 is not sent yet. If a message is dropped, its elements of r return to
their values, and those of v stay 0. r and v have the unit of the model: they are rescaled when the
learning rate changes.
Bits: 32 for each value sent, of which 1 is the sign, 3 are e and 28 the index; and 32 for M.

Limits: at most 2^28 elements. With parts of more than one sample, v is too large where gradients
agree (see `ashl.topology.local_work`). With a single part, r² > v hardly ever holds before the
second minibatch. The rounding error is not fed back.

Source: Tsuzuku, Imachi and Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning", ICLR workshop 2018, with its α between 1 and 2 and ζ = 0.999.
Differs: one M for the whole model, where the paper has one for each matrix; so layers with small
gradients are sent later. The parts of the paper have one sample each.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import check_ascending
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    Elements,
    EncodeContext,
    Layout,
    Traits,
    as_float32,
    size_of,
)
from ashl.compression.kernels import (
    Array,
    as_native,
    as_tensor,
    bits_as,
    convert,
    look_up,
    pack,
    silence_warnings,
    where_true,
)
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part, write_payload
from ashl.compression.wrappers import rescale
from ashl.device import read_scalars, to_host
from ashl.errors import UsageError
from ashl.option import Count, Fraction, Number, option

PLACE_BITS = 28  # bits of an index
SMALLEST = 7  # e of the smallest value


class Waiting(NamedTuple):
    """The sender's state: r and v, and the learning rate of both.

    `places` and `values` are the indices and values of r that were sent last.
    """

    error: Tensor | None = None
    squares: Tensor | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    lr: float = 1.0


@option
class Variance(Codec):
    """Sends the elements with a certain sign."""

    code: ClassVar[int] = 101
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(variable=True)
    estimator: ClassVar[str] = "moments"
    alpha: Annotated[float, Number, Field(ge=1, allow_inf_nan=False)]
    zeta: Fraction
    parts: Count

    def for_layout(self, layout: Layout) -> Variance:
        """Return the codec itself.

        Raises: UsageError if the model has more than 2^28 elements.
        """
        if size_of(layout) > 2**PLACE_BITS:
            raise UsageError(
                f"compression=variance: has {PLACE_BITS} bits for an index, and this model has more"
                f" than {2**PLACE_BITS} elements; set compression=topk"
            )
        return self

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + 4 * d

    def encode(
        self, sender: Waiting | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Waiting, Tensor]:
        old, g, lr = sender or Waiting(), as_float32(x), context.lr
        error, spread = rescale(old.error, old.lr, lr), rescale(old.squares, old.lr**2, lr**2)
        fresh = torch.zeros_like(g) if context.squares is None else as_float32(context.squares)
        sums = g + (0.0 if error is None else error)
        squares = fresh + (0.0 if spread is None else spread)
        # Negated "at most" instead of "greater than", so that NaN is sent.
        r, wide, spreads = as_native(sums), as_native(sums.double()), as_native(squares.double())
        with silence_warnings():
            places = as_native(where_true(~(wide**2 <= self.alpha * spreads)))
        top, signs, steps = round_to_power(r[places])
        sent = steps <= SMALLEST
        places, words = places[sent], signs[sent] << 31 | steps[sent] << PLACE_BITS
        values = as_tensor(r[places])
        squares *= self.zeta
        r[places] = 0.0
        as_native(squares)[places] = 0.0
        parts = Parts(len(places), pack(words | places, 32), scales=torch.tensor([top]))
        after = Waiting(sums, squares, as_tensor(places), values, lr)
        return after, write_payload(self.code, len(g), parts)

    def unpack(self, parts: Parts, d: int) -> Elements:
        top = to_host(typed_part(parts.scales, torch.float32, 1, "scales"))
        words = typed_part(parts.values, torch.int32, parts.count, "values")
        places = (words & 2**PLACE_BITS - 1).long()
        if parts.form or len(parts.indices):
            raise PayloadError(f"expected {parts.count} values; received form {parts.form}")
        check_ascending(places, parts.count, d)
        levels = top * 0.5 ** torch.arange(SMALLEST + 1)
        table = torch.cat([levels, -levels])
        return Elements(places, look_up(table, words >> PLACE_BITS & 2 * SMALLEST + 1))

    def residual(self, sender: Waiting | None) -> Tensor | None:
        return sender and sender.error

    def restore_dropped(self, sender: Waiting, payload: Tensor) -> Waiting:
        assert sender.error is not None
        assert sender.places is not None
        assert sender.values is not None
        sums = sender.error.clone()
        sums[sender.places] = sender.values
        return sender._replace(error=sums, places=sender.places[:0], values=sender.values[:0])


def round_to_power(x: Array) -> tuple[float, Array, Array]:
    """Return (M, signs, e): M, and sign bit and exponent e of each element, int64.

    e is the exponent of M / |C(x)|: above 7 if x is too small, and 0 if x is not finite.
    """
    length, signs = abs(x), convert(bits_as(x, torch.int32) < 0, torch.int64)
    top = read_scalars([length.max()])[0] if len(x) else 0.0
    zero = convert(length == 0, torch.int64)
    if not math.isfinite(top) or not top:
        return top, signs, zero * (SMALLEST + 1)
    highest = math.frexp(top)[1] - 1
    # |x| = mantissa · 2^exponent, mantissa in [0.5, 1); ties go up
    mantissa, exponent = torch.frexp(length) if isinstance(length, Tensor) else np.frexp(length)
    nearest = exponent - convert(mantissa < 0.75, torch.int32)
    steps = (highest - nearest).clip(min=0) * (1 - zero) + zero * (SMALLEST + 1)
    return math.ldexp(1.0, highest), signs, steps

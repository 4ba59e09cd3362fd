"""Variance criterion: delay each element until its accumulated gradient has a certain sign.

Rule, for each element, with g the minibatch's gradient and s = Σ_p (share_p·g_p)² over parts p of
it, an estimate of g's second moment: r ← r + g, v ← v + s. If r² > α·v, send C(r), then r ← 0 and v
← 0; otherwise v ← ζ·v. C(r) is a sign and a power of two, M·2^−e with e = 0 … 7, the one nearest to
|r|. M is the largest power of two that is at most max |r| of the sent elements. An element below
M·2^−7 is not sent yet. If a message is dropped, its content returns to r. r and v have the unit of
the model: they are rescaled when the learning rate changes.
Bits: 32 for each value sent, of which 1 is the sign, 3 are e and 28 the index; and 32 for M.

Limits: at most 2^28 elements. With parts of more than one sample, v is too large where gradients
agree (see `topology.estimate`). With a single part, r² > v hardly ever holds before the second
minibatch. The rounding error is not fed back.

Source: Tsuzuku, Imachi and Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning", ICLR workshop 2018, with its α between 1 and 2 and ζ = 0.999.
Differs: one M for the whole model, where the paper has one for each matrix; so layers with small
gradients are sent later. The parts of the paper have one sample each.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field
from torch import Tensor

from ashl.compression.common.code import Sparse
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    EncodeContext,
    Layout,
    PayloadError,
    Traits,
    size_of,
)
from ashl.compression.wire.arrays import (
    Array,
    array_of,
    as_index,
    is_true,
    look_up,
    ops,
    read,
    tensor_of,
    where_true,
    wide,
)
from ashl.compression.wire.bits import pack
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part, write_payload
from ashl.compression.wrappers.feedback import rescale
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
    places: Any = None
    values: Any = None
    lr: float = 1.0


@option
class Variance(Sparse):
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
        old = sender or Waiting()
        g = array_of(x)
        fresh = ops(g).zeros_like(g) if context.squares is None else array_of(context.squares)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = g + self._kept(old.error, old.lr, context.lr, 1)
            squares = fresh + self._kept(old.squares, old.lr, context.lr, 2)
            # Negated "at most" instead of "greater than", so that NaN is sent.
            places = where_true(~(wide(sums) ** 2 <= self.alpha * wide(squares)))
            top, signs, steps = round_to_power(sums[places])
            sent = steps <= SMALLEST
            places, words = places[sent], (signs[sent] << 31) | (steps[sent] << PLACE_BITS)
            values = sums[places]
            squares *= self.zeta
            sums[places] = squares[places] = 0
        after = Waiting(*map(tensor_of, (sums, squares, places, values)), lr=context.lr)
        return after, write_payload(
            self.code, x.numel(), Parts(len(places), pack(words | places, 32), scales=top)
        )

    def unpack(self, parts: Parts, d: int) -> Any:
        top = typed_part(read(parts.scales), "<f4", 1, "scales")
        words = typed_part(parts.values, "<i4", parts.count, "values")
        places = as_index(words & 2**PLACE_BITS - 1)
        sound = not len(places) or is_true((places[-1] < d) & (places[1:] > places[:-1]).all())
        if parts.form or len(parts.indices) or not sound:
            raise PayloadError(
                f"the received indices are not {parts.count} ascending numbers below {d}"
            )
        levels = np.ldexp(top, -np.arange(SMALLEST + 1, dtype=np.int32))
        return places, look_up(
            np.concatenate([levels, -levels]), words >> PLACE_BITS & 2 * SMALLEST + 1
        )

    def residual(self, sender: Waiting | None) -> Tensor | None:
        return sender and sender.error

    def restore_dropped(self, sender: Waiting, payload: Tensor) -> Waiting:
        assert sender.error is not None
        sums = sender.error.clone()
        sums[sender.places] = sender.values
        return sender._replace(error=sums, places=sender.places[:0], values=sender.values[:0])

    def _kept(self, vector: Tensor | None, before: float, now: float, power: int) -> Any:
        """Return a kept vector in units of the present learning rate."""
        kept = rescale(vector, before**power, now**power)
        return 0.0 if kept is None else array_of(kept)


def round_to_power(x: Array) -> tuple[np.ndarray, Array, Array]:
    """Return (M, signs, e): M float32 [1], and sign bit and exponent e of each element.

    e is the exponent of M / |C(x)|: above 7 if x is too small, and 0 if x is not finite.
    """
    length, signs, where = abs(x), as_index(ops(x).signbit(x)), ops(x).where
    top = float(read(length.max()[None])[0]) if len(x) else 0.0
    if not np.isfinite(top) or not top:
        return np.array([top], "<f4"), signs, where(length == 0, SMALLEST + 1, 0)
    highest = int(np.frexp(top)[1]) - 1
    mantissa, exponent = ops(x).frexp(length)  # |x| = mantissa · 2^exponent, mantissa in [0.5, 1)
    nearest = where(mantissa < 0.75, exponent - 1, exponent)  # ties go up
    steps = where(length == 0, SMALLEST + 1, (highest - nearest).clip(0))
    return np.array([np.ldexp(np.float32(1), highest)], "<f4"), signs, steps

"""Symmetric grid: every element is rounded up or down to a multiple of one step, at random, so that its mean is kept.

Rule: L = 2^(b−1) − 1, Δ = ‖x‖_∞ / L; q_j = ⌊x_j/Δ + u_j⌋ in −L … L with u_j uniform in [0, 1) (drawn in 16 bits);
decoded to Δ·q_j. E C(x) = x and E‖C(x) − x‖² ≤ d·Δ²/4 ≤ d/(4L²)·‖x‖². Bits: b·d + 32. A body names its b, so that it
may change from message to message, and may hold float32 instead.

Limit: one large element makes the grid coarse for all. What is not finite makes all of them NaN.

Source: Yu, Wu and Huang, "Double Quantization for Communication-Efficient Distributed Optimization", NeurIPS 2019
(AsyLPG, with `sync=asylpg`); the bound as for stochastic rounding, Suresh et al., "Distributed Mean Estimation with
Limited Communication", ICML 2017.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ashl.compression.base.code import Code
from ashl.compression.contract import BodyError, Flags, Turn
from ashl.compression.wire.bits import BLOCK, pack, packed_bytes, unpack, unpack_bytes
from ashl.compression.wire.body import HEADER, Parts, typed
from ashl.compression.wire.levels import dithered
from ashl.option import Number, option

MOST = 16  # bits
WHOLE = 0  # the form of a body of float32; of all others it is b


@option
class Grid(Code):
    """Rounds to a grid of 2^b − 1 points."""

    code: ClassVar[int] = 102
    flags: ClassVar[Flags] = Flags(unbiased=True)
    bits: Annotated[int, Number, Field(ge=2, le=MOST)]

    def pack(self, x: np.ndarray, turn: Turn) -> Parts:
        return rounded(x, self.bits, turn)

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        return read(parts, d)

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + packed_bytes(d, self.bits)

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (4 * most(self.bits) ** 2) + 1e-9


def most(bits: int) -> int:
    """L: steps from zero to the end of the grid."""
    return 2 ** (bits - 1) - 1


def rounded(x: np.ndarray, bits: int, turn: Turn) -> Parts:
    """x on the grid of so many bits."""
    words, steps = turn.words(), most(bits)
    top = np.maximum(x.max(initial=0), -x.min(initial=0))
    levels = np.zeros(x.size, np.uint8 if bits <= 8 else np.uint16)
    buffer = np.empty(min(BLOCK, x.size), np.float32)
    for start in range(0, x.size if np.isfinite(top) and top else 0, BLOCK):
        part = x[start : start + BLOCK]
        y = np.divide(part, top, out=buffer[: part.size])
        y *= np.float32(steps)
        np.clip(y, -steps, steps, out=y)
        levels[start : start + BLOCK] = dithered(y, words, start, steps)
    if not np.isfinite(top):
        top = np.nan
    return Parts(x.size, pack(levels, bits), scales=np.array([top], "<f4"), form=bits)


def read(parts: Parts, d: int) -> np.ndarray:
    """What such a body decodes to. Raises BodyError."""
    bits, count = parts.form, parts.count
    if count != d or parts.indices.size or not (bits == WHOLE or 2 <= bits <= MOST):
        raise BodyError(f"what came is no grid of {d} elements: form {bits}, {count} values")
    if bits == WHOLE:
        typed(parts.scales, "<f4", 0, "scales")
        return typed(parts.values, "<f4", d, "values").copy()
    if parts.values.size != packed_bytes(d, bits):
        raise BodyError(f"{d} numbers of {bits} bits came in {parts.values.size} bytes")
    top, steps = typed(parts.scales, "<f4", 1, "scales")[0], np.float32(most(bits))
    x = (unpack_bytes if bits <= 8 else unpack)(parts.values, bits, d).astype(np.float32)
    x -= steps
    x /= steps
    x *= top
    return x

"""Stochastic uniform quantization: every element is rounded at random to one of k levels from the least to the largest.

Rule: q_j = ⌊(k − 1)·(x_j − lo)/(hi − lo) + u_j⌋ with lo and hi the least and largest element and u_j uniform in [0, 1);
C(x)_j = lo + q_j·(hi − lo)/(k − 1). E C(x) = x, E‖C(x) − x‖² ≤ d/(2(k − 1)²)·‖x‖², and the mean of n workers has one
n-th of it. Bits: d·⌈log2 k⌉ + 64.

Limit: one outlier makes the steps coarse for all; `rotated` spreads it. No contraction where d is large, hence nothing
for feedback. Where lo = hi nothing is lost. What is not finite makes all of them NaN.

Source: Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ashl.compression import Flags, Turn
from ashl.compression.aids import Aids
from ashl.compression.bits import BLOCK, packed_bytes
from ashl.compression.body import HEADER, Parts, typed
from ashl.compression.code import Code
from ashl.compression.levels import packed, rounded, rows_of, spread, unpacked, whole, width
from ashl.option import Number, option

Levels = Annotated[int, Number, Field(ge=2, le=256)]


@option
class Uniform(Code, Aids):
    """Levels between the ends of the vector."""

    code: ClassVar[int] = 13
    flags: ClassVar[Flags] = Flags(unbiased=True)
    levels: Levels
    layers: bool

    def pack(self, x: np.ndarray, turn: Turn) -> Parts:
        ends, top, rng = np.array([[x.min(), x.max()]]), self.levels - 1, turn.stream()
        blocks = (rounded(placed(block, ends, top), rng) for _, block in rows_of(x, min(BLOCK, x.size)))
        return Parts(x.size, packed(x.size, top, blocks), scales=ends)

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        ends, top = typed(parts.scales, "<f4", 2, "ends")[None], self.levels - 1
        return unpacked(whole(parts, d), d, min(BLOCK, d), top, lambda _, block: between(block, ends, top))

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 8 + packed_bytes(d, width(self.levels - 1))

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (2 * (self.levels - 1) ** 2)


def placed(rows: np.ndarray, ends: np.ndarray, top: int) -> np.ndarray:
    """Where the elements of rows [n, m] lie between ends [n, 2], from 0 to top."""
    return spread(rows - ends[:, :1], ends[:, 1:] - ends[:, :1], top)


def between(numbers: np.ndarray, ends: np.ndarray, top: int) -> np.ndarray:
    """Back again, in place."""
    numbers *= (ends[:, 1:] - ends[:, :1]) / np.float32(top)
    numbers += ends[:, :1]
    return numbers

"""Stochastic uniform quantization: round each element at random to one of k equidistant levels.

Use when: the simplest unbiased quantizer of a whole vector is wanted.
Avoid when: elements have outliers: levels are equidistant.
Alternatives: `qsgd` in buckets; `rotated`.

Rule: the levels are between lo and hi, the least and the largest element. q_j = ⌊(k − 1)·(x_j −
lo)/(hi − lo) + u_j⌋ with u_j uniform in [0, 1); C(x)_j = lo + q_j·(hi − lo)/(k − 1). E C(x) = x,
E‖C(x) − x‖² ≤ d/(2(k − 1)²)·‖x‖², and the mean of n workers has 1/n of it.
Bits: d·⌈log2 k⌉ + 64.

Limits: one outlier makes the steps coarse for all elements; `rotated` spreads it. It is not a
contraction for large d, so error feedback is not supported. If lo = hi, the message is exact. If an
element is not finite, all become NaN.

Source: Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import EntropyCode, level_bytes, read_levels, write_levels
from ashl.compression.contract import EncodeContext, Traits, Wrappable
from ashl.compression.kernels import (
    BLOCK,
    Array,
    as_native,
    as_tensor,
    divide,
    extremes_of,
    round_levels,
    rounding_noise,
    scale_levels,
)
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.option import Number, option

ROW = BLOCK // 8  # elements; eight rows are a block
Levels = Annotated[int, Number, Field(ge=2, le=256)]


@option
class StochasticUniform(Wrappable):
    """Levels between the least and the largest element."""

    code: ClassVar[int] = 13
    on_host: ClassVar[bool] = False
    levels: Levels
    per_layer: bool
    entropy: EntropyCode

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, variable=self.entropy != "none")

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        d, top, row = len(x), self.levels - 1, min(ROW, len(x))
        ends = as_native(extremes_of(x)[None])
        noise = rounding_noise(x, context.words(), top)

        def to_levels(where: slice, rows: Array) -> Array:
            y = place_levels(rows, ends, top * noise.unit)
            return round_levels(y, noise, where.start * row)

        stream = write_levels(x, row, d, top, self.entropy, to_levels)
        return Parts(d, stream, scales=as_tensor(ends))

    def unpack(self, parts: Parts, d: int) -> Tensor:
        ends = as_native(typed_part(parts.scales, torch.float32, 2, "ends"))[None]
        top = self.levels - 1

        def to_values(_: slice, rows: Array) -> None:
            rows *= divide(ends[:, 1:] - ends[:, :1], top)
            rows += ends[:, :1]

        return read_levels(all_values(parts, d), min(ROW, d), d, top, self.entropy, to_values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 8 + level_bytes(d, self.levels - 1, self.entropy)

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (2 * (self.levels - 1) ** 2)


def place_levels(rows: Array, ends: Array, top: float) -> Array:
    """Return the positions of the rows [n, m] between their ends [n, 2], from 0 to top."""
    return scale_levels(rows - ends[:, :1], ends[:, 1:] - ends[:, :1], top)

"""Stochastic uniform quantization: round each element at random to one of k equidistant levels.

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

from pydantic import Field

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire.arrays import Array, divide
from ashl.compression.wire.bits import BLOCK
from ashl.compression.wire.entropy_code import EntropyCode
from ashl.compression.wire.levels import (
    all_levels,
    ends_of,
    level_bytes,
    pack_levels,
    rows_of,
    scale_levels,
    unpack_levels,
)
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.stochastic_rounding import round_to_uint8, rounding_noise
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Number, option

ROW = BLOCK // 8  # elements; eight rows are a block, see `levels.row_step`
Levels = Annotated[int, Number, Field(ge=2, le=256)]


@option
class StochasticUniform(Code, Wrappers):
    """Levels between the least and the largest element."""

    code: ClassVar[int] = 13
    on_host: ClassVar[bool] = False
    levels: Levels
    per_layer: bool
    entropy: EntropyCode

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, variable=self.entropy != "none")

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        ends, top, row = ends_of(x)[None], self.levels - 1, min(ROW, len(x))
        noise = rounding_noise(x, context.words(), top)

        def numbers(where: slice, block: Array) -> Array:
            return round_to_uint8(
                place_levels(block, ends, top * noise.unit), noise, where.start * row
            )

        blocks = (numbers(where, block) for where, block in rows_of(x, row))
        return Parts(len(x), pack_levels(len(x), top, blocks, self.entropy), scales=ends)

    def unpack(self, parts: Parts, d: int) -> Array:
        ends, top = typed_part(parts.scales, "<f4", 2, "ends")[None], self.levels - 1
        row = min(ROW, d)
        return unpack_levels(
            all_levels(parts, d),
            d,
            row,
            top,
            lambda _, block: interpolate(block, ends, top),
            self.entropy,
        )

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 8 + level_bytes(d, self.levels - 1, self.entropy)

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (2 * (self.levels - 1) ** 2)


def place_levels(rows: Array, ends: Array, top: float) -> Array:
    """Return the positions of the rows [n, m] between their ends [n, 2], from 0 to top."""
    return scale_levels(rows - ends[:, :1], ends[:, 1:] - ends[:, :1], top)


def interpolate(numbers: Array, ends: Array, top: int) -> Array:
    """Convert numbers from 0 to top back to values between the ends, in place."""
    numbers *= divide(ends[:, 1:] - ends[:, :1], top)
    numbers += ends[:, :1]
    return numbers

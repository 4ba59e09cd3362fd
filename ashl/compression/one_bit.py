"""1-bit SGD: one bit for each element says whether it is negative; either side decodes to its mean.

Rule: C(x)_j = the mean of all x_j ≥ 0 where x_j ≥ 0, and of all x_j < 0 where it is not, by parts
of x: the whole vector, each layer, or each column (or row) of each layer's matrix [outputs, all
else]; the paper has columns. The mean of an empty side is 0. ‖C(x) − x‖² ≤ (1 − 1/d)‖x‖², less the
finer the parts. Bits: d, and 64 for each part.

Limit: −0 counts as negative. Columns are short where a layer has few outputs: of 10 elements, a bit
each costs 6.4 more for the means. What is not finite makes its side, or its part, not finite.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext, Layout, Traits
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.bits import BLOCK, pack_signs, packed_bytes, unpack
from ashl.compression.wire.device_kernels import block_sums
from ashl.compression.wire.levels import all_levels, row_sums
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wrappers.layers import slices
from ashl.compression.wrappers.options import Wrappers
from ashl.learn.device import numbers
from ashl.option import option

Matrix = tuple[int, int, bool]  # rows, columns, and whether the columns are the parts


@option
class OneBit(Code, Wrappers):
    """Two means, of the whole vector or of parts of it."""

    code: ClassVar[int] = 12
    traits: ClassVar[Traits] = Traits(contraction=True)
    per: Literal["vector", "layer", "row", "column"]

    def for_layout(self, layout: Layout) -> Code:
        """The codec for a model's layers."""
        if self.per == "vector" or not layout:
            return self
        if self.per == "layer":
            return TwoMeans(tuple((1, layer.size, False) for layer in layout))
        shapes = (layer.shape if len(layer.shape) > 1 else (1, layer.size) for layer in layout)
        columns = self.per == "column"
        return TwoMeans(tuple((s[0], prod(s[1:]), columns and s[0] > 1) for s in shapes))

    @property
    def on_host(self) -> bool:
        return self.per in ("row", "column")

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        return TwoMeans(((1, len(x), False),)).pack(x, context)

    def unpack(self, parts: Parts, d: int) -> Array:
        return TwoMeans(((1, d, False),)).unpack(parts, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return TwoMeans(((1, d, False),)).encoded_nbytes(ratio, d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / d


@dataclass(frozen=True)
class TwoMeans(Code):
    """The same for matrices that follow each other."""

    code: ClassVar[int] = OneBit.code
    traits: ClassVar[Traits] = OneBit.traits
    matrices: tuple[Matrix, ...]

    @property
    def on_host(self) -> bool:
        return any(rows > 1 for rows, _, _ in self.matrices)

    def split(self, x: Array) -> Iterator[Array]:
        """x as matrices whose rows are the parts: views."""
        sizes = [rows * columns for rows, columns, _ in self.matrices]
        for place, (rows, columns, turned) in zip(slices(sizes), self.matrices, strict=True):
            matrix = x[place].reshape(rows, columns)
            yield matrix.T if turned else matrix

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        means = [two_means(rows) for rows in self.split(x)]
        return Parts(len(x), pack_signs(x), scales=np.concatenate(means).astype(np.float32))

    def unpack(self, parts: Parts, d: int) -> Array:
        stream = typed_part(all_levels(parts, d), "u1", packed_bytes(d, 1), "signs")
        if isinstance(stream, Tensor):
            sides = typed_part(parts.scales, "<f4", 2 * self._count(), "means").view(-1, 2)
            parts_there = zip(self.split(unpack(stream, 1, d)), sides, strict=True)
            return torch.cat(
                [torch.where(negative[0] > 0, side[1], side[0]) for negative, side in parts_there]
            )
        means = typed_part(parts.scales, "<u4", 2 * self._count(), "means").reshape(
            -1, 2
        )  # bits, of which some are flipped
        negative = np.unpackbits(stream, count=d, bitorder="little")
        x, start = np.empty(d, np.uint32), 0
        for rows, signs in zip(self.split(x), self.split(negative), strict=True):
            above, below = (
                means[start : start + len(rows), :1],
                means[start : start + len(rows), 1:],
            )
            for columns in column_blocks(rows):
                block = signs[:, columns].astype(np.uint32)
                block *= above ^ below
                block ^= above
                rows[:, columns] = block
            start += len(rows)
        return x.view(np.float32)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + packed_bytes(d, 1) + 8 * self._count()

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / max(rows if turned else columns for rows, columns, turned in self.matrices)

    def _count(self) -> int:
        """How many parts there are."""
        return sum(columns if turned else rows for rows, columns, turned in self.matrices)


def two_means(rows: Array) -> np.ndarray:
    """The means [n, 2], float64, of what is not negative and of what is, in each row; on a device
    there is but one.
    """
    if isinstance(rows, Tensor):
        sides, fewer = (
            (rows[0].clamp(min=0), rows[0].clamp(max=0)),
            numbers([torch.signbit(rows[0]).sum()])[0],
        )
        sums = np.array([sum(block_sums(side, BLOCK)) for side in sides])
        return (sums / np.maximum([rows.shape[1] - fewer, fewer], 1))[None]
    sums, counts = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
    for columns in column_blocks(rows):
        block = rows[:, columns]
        sums += row_sums(np.maximum(block, 0)), row_sums(np.minimum(block, 0))
        negative = np.signbit(block)
        fewer = np.count_nonzero(negative) if len(rows) == 1 else negative.sum(1)
        counts += np.stack([block.shape[1] - fewer, fewer]).reshape(2, -1)
    return (sums / np.maximum(counts, 1)).T


def column_blocks(rows: np.ndarray) -> Iterator[slice]:
    """Columns of which all rows together fit the cache."""
    step = max(1, BLOCK // len(rows))
    return (slice(start, start + step) for start in range(0, rows.shape[1], step))

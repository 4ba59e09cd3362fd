"""1-bit SGD: send the sign of each element; negative and other elements decode to their means.

Rule: C(x)_j is the mean of all x_i ≥ 0 if x_j ≥ 0, else the mean of all x_i < 0. The means are
those of the whole vector, of each layer, or of each column (or row) of each layer's matrix
[outputs, all else]; the paper uses columns. The mean of an empty side is 0. ‖C(x) − x‖² ≤ (1 −
1/d)‖x‖², with d the largest number of elements that share two means.
Bits: d, and 64 for each pair of means.

Limits: −0 counts as negative. If a layer has few outputs, its columns are short: for columns of 10
elements, the means cost 6.4 bits per element. An element that is not finite makes its side of its
part not finite.

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

Matrix = tuple[int, int, bool]  # rows, columns, and whether columns (else rows) share means


@option
class OneBit(Code, Wrappers):
    """Two means of the whole vector or of parts of it."""

    code: ClassVar[int] = 12
    traits: ClassVar[Traits] = Traits(contraction=True)
    per: Literal["vector", "layer", "row", "column"]

    def for_layout(self, layout: Layout) -> Code:
        """Return the codec for the layers of a model."""
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
    """Signs and means of consecutive matrices."""

    code: ClassVar[int] = OneBit.code
    traits: ClassVar[Traits] = OneBit.traits
    matrices: tuple[Matrix, ...]

    @property
    def on_host(self) -> bool:
        return any(rows > 1 for rows, _, _ in self.matrices)

    def split(self, x: Array) -> Iterator[Array]:
        """Yield x as matrices whose rows share means, as views."""
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
            sides = typed_part(parts.scales, "<f4", 2 * self._num_parts(), "means").view(-1, 2)
            parts_there = zip(self.split(unpack(stream, 1, d)), sides, strict=True)
            return torch.cat(
                [torch.where(negative[0] > 0, side[1], side[0]) for negative, side in parts_there]
            )
        # The bits of both means: elements are composed from them by exclusive or.
        means = typed_part(parts.scales, "<u4", 2 * self._num_parts(), "means").reshape(-1, 2)
        negative = np.unpackbits(stream, count=d, bitorder="little")
        x, start = np.empty(d, np.uint32), 0
        for rows, signs in zip(self.split(x), self.split(negative), strict=True):
            own = means[start : start + len(rows)]
            above, below = own[:, :1], own[:, 1:]
            for columns in column_blocks(rows):
                block = signs[:, columns].astype(np.uint32)
                block *= above ^ below
                block ^= above
                rows[:, columns] = block
            start += len(rows)
        return x.view(np.float32)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + packed_bytes(d, 1) + 8 * self._num_parts()

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / max(rows if turned else columns for rows, columns, turned in self.matrices)

    def _num_parts(self) -> int:
        """Return the number of parts with means of their own."""
        return sum(columns if turned else rows for rows, columns, turned in self.matrices)


def two_means(rows: Array) -> np.ndarray:
    """Return the means [n, 2], float64, of non-negative and of negative elements of each row.

    On a device there is only one row.
    """
    if isinstance(rows, Tensor):
        sides = rows[0].clamp(min=0), rows[0].clamp(max=0)
        num_negative = numbers([torch.signbit(rows[0]).sum()])[0]
        sums = np.array([sum(block_sums(side, BLOCK)) for side in sides])
        return (sums / np.maximum([rows.shape[1] - num_negative, num_negative], 1))[None]
    sums, counts = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
    for columns in column_blocks(rows):
        block = rows[:, columns]
        sums += row_sums(np.maximum(block, 0)), row_sums(np.minimum(block, 0))
        negative = np.signbit(block)
        num_negative = np.count_nonzero(negative) if len(rows) == 1 else negative.sum(1)
        counts += np.stack([block.shape[1] - num_negative, num_negative]).reshape(2, -1)
    return (sums / np.maximum(counts, 1)).T


def column_blocks(rows: np.ndarray) -> Iterator[slice]:
    """Return slices of columns whose rows together fit the cache."""
    step = max(1, BLOCK // len(rows))
    return (slice(start, start + step) for start in range(0, rows.shape[1], step))

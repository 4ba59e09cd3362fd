"""1-bit SGD: send the sign of each element; negative and other elements decode to their means.

Use when: every element should travel, in one bit, with two means a layer and error feedback.
Avoid when: error feedback is not possible.
Alternatives: `sign` with one scale; `terngrad`, unbiased.

Rule: C(x)_j is the mean of all x_i ≥ 0 if x_j ≥ 0, else the mean of all x_i < 0. The means are
those of the whole vector, of each layer, or of each column of a layer's matrix [outputs, all else];
the paper uses columns. The mean of an empty side is 0. ‖C(x) − x‖² ≤ (1 − 1/d)‖x‖², with d the
largest number of elements that share two means.
Bits: d, and 64 for each pair of means.

Limits: −0 counts as negative. If a layer has few outputs, its columns are short: for columns of 10
elements, the means cost 6.4 bits per element. An element that is not finite makes its side of its
part not finite.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import ByLayers, EncodeContext, Traits, Wrappable, slices
from ashl.compression.kernels import (
    BLOCK,
    as_native,
    as_tensor,
    block_sums,
    blocks,
    count_where,
    pack_signs,
    packed_bytes,
    unpack_truths,
)
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.option import option


@dataclass(frozen=True)
class Matrix:
    """A part of the vector with a pair of means for each column; a vector is one column."""

    rows: int
    columns: int = 1


@option
class OneBit(ByLayers, Wrappable):
    """Two means of the whole vector or of parts of it."""

    code: ClassVar[int] = 12
    traits: ClassVar[Traits] = Traits(contraction=True)
    per: Literal["vector", "layer", "column"]

    @property
    def on_host(self) -> bool:
        return self.per == "column"

    def matrices(self, d: int) -> list[Matrix]:
        """Return the parts of a vector."""
        if self.per == "vector":
            return [Matrix(d)]
        matrices = []
        for layer in self.layers(d):
            rows, columns = layer.matrix
            single = self.per != "column" or len(layer.shape) < 2 or rows == 1
            matrices.append(Matrix(layer.size) if single else Matrix(rows, columns))
        return matrices

    def split(self, x: Tensor) -> Iterator[tuple[Matrix, Tensor]]:
        """Yield the parts of x, and views of their elements."""
        matrices = self.matrices(len(x))
        parts = slices([matrix.rows * matrix.columns for matrix in matrices])
        for part, matrix in zip(parts, matrices, strict=True):
            yield matrix, x[part].view(matrix.rows, matrix.columns)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        means = [
            means_of_vector(part.view(-1)) if matrix.columns == 1 else means_of_columns(part)
            for matrix, part in self.split(x)
        ]
        return Parts(len(x), pack_signs(x), scales=torch.cat(means).float())

    def unpack(self, parts: Parts, d: int) -> Tensor:
        signs = typed_part(all_values(parts, d), torch.uint8, packed_bytes(d, 1), "signs")
        means = typed_part(parts.scales, torch.float32, 2 * self._num_pairs(d), "means")
        negative, x = as_tensor(unpack_truths(signs, d)), torch.empty(d, device=str(signs.device))
        start = 0
        for (matrix, part), (_, below_zero) in zip(
            self.split(x), self.split(negative), strict=True
        ):
            # Elements are composed by exclusive or from the bits of both means.
            own = means.view(-1, 2)[start : start + matrix.columns].T.contiguous().view(torch.int32)
            start += matrix.columns
            above, below = as_native(own.view(2, 1, -1))
            bits, truths = as_native(part.view(torch.int32)), as_native(below_zero)
            for where in blocks(bits, max(1, BLOCK // matrix.columns)):
                block = bits[where]
                block[:] = truths[where]
                block *= above ^ below
                block ^= above
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + packed_bytes(d, 1) + 8 * self._num_pairs(d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / max(matrix.rows for matrix in self.matrices(d))

    def _num_pairs(self, d: int) -> int:
        return sum(matrix.columns for matrix in self.matrices(d))


def means_of_vector(x: Tensor) -> Tensor:
    """Return the means [1, 2], float64, of non-negative and of negative elements."""
    negative = count_where(x.view(torch.int32), lambda bits: bits < 0)
    sums = [
        sum(block_sums(x, lambda part: part.clip(min=0))),
        sum(block_sums(x, lambda part: part.clip(max=0))),
    ]
    counts = [max(1, len(x) - negative), max(1, negative)]
    return torch.tensor([sums], dtype=torch.float64) / torch.tensor([counts])


def means_of_columns(part: Tensor) -> Tensor:
    """Return the means [columns, 2], float64, of non-negative and of negative elements."""
    rows = part.numpy().T
    sums, counts = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
    step = max(1, BLOCK // len(rows))
    for start in range(0, rows.shape[1], step):
        block = rows[:, start : start + step]
        sums += sum_rows(np.maximum(block, 0)), sum_rows(np.minimum(block, 0))
        negative = np.signbit(block).sum(1)
        counts += block.shape[1] - negative, negative
    return torch.from_numpy((sums / np.maximum(counts, 1)).T)


def sum_rows(rows: np.ndarray) -> np.ndarray:
    """Return the sum of each row, in float64 only if float32 overflows."""
    sums = rows.sum(1)
    return sums if np.isfinite(sums).all() else rows.sum(1, dtype=np.float64)

"""DeMo: send the largest cosine coefficients of the accumulated updates, block by block.

Rule: each layer, as a matrix, is split into blocks of at most 64 × 64, as equal as possible. Each
block has an orthonormal cosine transform (DCT-II), of which the k' = max(1, round(ratio · size))
largest coefficients are sent. With the feedback e ← β·e + x − C(β·e + x), β = `feedback_gain` =
`feedback_decay`, e is the momentum of the paper, from which the sent part is subtracted. The
transform preserves norms, so ‖C(x) − x‖² ≤ (1 − k'/size)‖x‖².
Bits: those of the values, ⌈log2 size⌉ for each index, and 32 for the largest |x_j|, by which x is
divided first.

Limits: ratio = 1 is no compression. A block at the edge of a layer is padded with zeros.

Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
Differs: in the paper, the sign of the merged update moves the model; here, the update itself does,
so learning rates differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from ashl.compression.common.code import Code, kept_count
from ashl.compression.common.deterministic_matmul import multiply_mirrored, to_integers
from ashl.compression.common.select import largest_of_rows
from ashl.compression.common.sparsifier import DENSE, SPARSE, Share
from ashl.compression.contract import EncodeContext, Layer, Layout, PayloadError, Traits
from ashl.compression.wire.arrays import (
    Array,
    as_bytes,
    beside,
    concatenate,
    divide,
    is_true,
    look_up,
    ops,
    read,
    zeros,
)
from ashl.compression.wire.bits import BLOCK, pack, packed_bytes, unpack
from ashl.compression.wire.index_code import width
from ashl.compression.wire.levels import reach_of
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.value_code import (
    ValueCode,
    read_values,
    value_bound,
    value_bytes,
    write_values,
)
from ashl.compression.wrappers.layers import with_layout
from ashl.option import option

SIDE = 64  # most rows and columns of a block
SCALE, BITS = 22, 24  # bits of cosines and of coefficients: 64² products sum to less than 2⁵³
LARGEST = float(np.finfo(np.float32).max)
ROUNDING = 2.0**-20  # squared error of the transform and its inverse, relative to ‖x‖²


class Grid(NamedTuple):
    """A layer as a matrix that is split into blocks."""

    start: int  # first element of the layer in the flat vector
    rows: int
    columns: int
    share: float

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        down, across = self.block_counts
        return -(-self.rows // down), -(-self.columns // across)

    @property
    def block_counts(self) -> tuple[int, int]:
        """Number of blocks below each other and beside each other."""
        return -(-self.rows // SIDE), -(-self.columns // SIDE)

    @property
    def size(self) -> int:
        """Number of elements of a block."""
        return math.prod(self.block)

    @property
    def kept(self) -> int:
        """Number k' of coefficients that are sent of a block."""
        return kept_count(self.share, self.size)

    @property
    def blocks(self) -> int:
        return math.prod(self.block_counts)

    @property
    def sent(self) -> int:
        """Number of coefficients that are sent of all blocks."""
        return self.blocks * self.kept

    def strips(self, like: Array) -> Iterator[slice]:
        """Return slices of the rows of blocks that fit the cache; one slice on a device."""
        down, across = self.block_counts
        step = down if isinstance(like, Tensor) else max(1, BLOCK // (across * self.size))
        return (slice(first, min(first + step, down)) for first in range(0, down, step))

    def forward(self, x: Array, top: np.float32, strip: slice) -> Array:
        """Return the coefficients [blocks, size] of a strip of x/top."""
        rows = self.rows_of_strip(x, strip)
        height, width = self.block
        across = self.block_counts[1]
        filled = zeros(x, (strip.stop - strip.start) * height, across * width)
        filled[: len(rows), : self.columns] = divide(rows, float(top) or 1.0)
        blocks = filled.reshape(-1, height, across, width).swapaxes(1, 2).reshape(-1, height, width)
        return rotate_blocks(
            beside(x, cosines(height)), blocks, beside(x, cosines(width)).T
        ).reshape(-1, self.size)

    def backward(self, coefficients: Array, indices: Array, x: Array, strip: slice) -> Array:
        """Write the inverse transform of a strip into x and return its rows.

        Args: coefficients and indices [blocks, kept], the indices within each block.
        """
        rows = self.rows_of_strip(x, strip)
        height, width = self.block
        across = self.block_counts[1]
        whole, unit = to_integers(coefficients, BITS)
        blocks = scatter(look_up(interleave(height, width), indices), whole, self.size).reshape(
            -1, width, height
        )
        half = (
            ops(whole)
            .round(multiply_mirrored(*half_cosines(blocks, width, -SCALE), blocks))
            .swapaxes(1, 2)
        )
        blocks = multiply_mirrored(*half_cosines(blocks, height, 0), half)
        blocks *= (unit * 2.0**-SCALE)[:, :, None]
        filled = (
            blocks.reshape(-1, across, height, width).swapaxes(1, 2).reshape(-1, across * width)
        )
        rows[:] = filled[: len(rows), : self.columns]
        return rows

    def rows_of_strip(self, x: Array, strip: slice) -> Array:
        """Return the rows of the layer in the flat vector x that a strip covers."""
        height = self.block[0]
        matrix = x[self.start : self.stop].reshape(self.rows, self.columns)
        return matrix[strip.start * height : strip.stop * height]


def rotate_blocks(left: Array, blocks: Array, right: Array) -> Array:
    """Return left @ block @ right for each block.

    The products are so small that BLAS does not split them among threads, which would wait for busy
    cores.
    """
    if len(left) == 1:
        return blocks[:, 0] @ right
    return left @ (blocks @ right)


@cache
def cosines(n: int) -> np.ndarray:
    """Return the matrix of the orthonormal DCT-II, float32 [frequency, position]."""
    matrix = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)


@cache
def integer_cosines(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 2^SCALE · cosines(n), rounded, for even and for odd frequencies: float64 [position,
    frequency].

    Only the first half of the positions is returned, because the second half mirrors it.
    """
    half = np.rint(cosines(n)[:, : -(-n // 2)].T.astype(np.float64) * 2.0**SCALE)
    return np.ascontiguousarray(half[:, ::2]), np.ascontiguousarray(half[:, 1::2])


def half_cosines(like: Array, n: int, scale: int) -> list[Array]:
    """Return integer_cosines(n) · 2^scale on the device of `like`."""
    return [beside(like, part) * 2.0**scale for part in integer_cosines(n)]


@cache
def interleave(height: int, width: int) -> np.ndarray:
    """Return the position of each coefficient of a block in its reordered transpose.

    There, even frequencies are before odd ones, in both directions.
    """
    along, down = (np.argsort(np.r_[0:n:2, 1:n:2]) for n in (width, height))
    return (along * height + down[:, None]).reshape(-1)


def scatter(indices: Array, values: Array, size: int) -> Array:
    """Return [n, size] with the values [n, k] at their indices, else 0."""
    if isinstance(values, Tensor):
        return values.new_zeros((len(values), size)).scatter_(1, indices, values)
    blocks = np.zeros((len(values), size))
    np.put_along_axis(blocks, indices, values, 1)
    return blocks


def count_sent(grids: list[Grid]) -> int:
    """Return the number of coefficients of a payload."""
    return sum(grid.sent for grid in grids)


@option
class DeMo(Code, Share):
    """Sends the largest cosine coefficients of each block."""

    code: ClassVar[int] = 62
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True)
    layout: ClassVar[Layout | None] = None
    values: ValueCode

    def for_layout(self, layout: Layout) -> DeMo:
        return with_layout(self, layout)

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        grids = self.grids(context.ratio, len(x))
        if self.form(grids, len(x)) == DENSE:
            return Parts(len(x), x, form=DENSE)
        top = reach_of(x)
        chosen, indices = [], []
        for grid in grids:
            found = []
            for strip in grid.strips(x):
                blocks = grid.forward(x, top, strip)
                inside = largest_of_rows(blocks, grid.kept)
                if isinstance(blocks, Tensor):
                    selected = blocks.gather(1, inside)
                else:
                    selected = np.take_along_axis(blocks, inside, 1)
                chosen.append(selected.reshape(-1))
                found.append(inside.reshape(-1))
            indices.append(pack(concatenate(found), width(grid.size)))
        values, scales = write_values(self.values, concatenate(chosen), context)
        scales = concatenate(
            [beside(scales, np.array([top], "<f4").view(np.uint8)), as_bytes(scales)]
        )
        share = np.array([self.ratio if context.ratio is None else context.ratio], "<f8").view(
            np.uint8
        )
        return Parts(count_sent(grids), values, concatenate([beside(x, share), *indices]), scales)

    def unpack(self, parts: Parts, d: int) -> Any:
        size = len(parts.indices)
        if parts.form == DENSE and not size + len(parts.scales) and parts.count == d:
            return typed_part(parts.values, "<f4", d, "values")
        if parts.form != SPARSE or size < 8 or len(parts.scales) < 4:
            raise PayloadError(
                f"expected blocks of coefficients; received form {parts.form} with {size} bytes of"
                " indices"
            )
        share = np.frombuffer(read(parts.indices[:8]).tobytes(), "<f8")[0]
        if not 0 < share <= 1:
            raise PayloadError(f"received a density of {share}; it must be above 0 and at most 1")
        grids = self.grids(float(share), d)
        sizes = [packed_bytes(grid.sent, width(grid.size)) for grid in grids]
        if parts.count != count_sent(grids) or size != 8 + sum(sizes):
            raise PayloadError(
                f"received {parts.count} coefficients with {size} bytes of indices, which do not"
                f" match {d} elements at a density of {share:g}"
            )
        values = read_values(self.values, parts.values, parts.scales[4:], parts.count)
        top = read(parts.scales[:4]).view("<f4")[0]
        x, value, start = zeros(values, d), 0, 8
        for grid, size in zip(grids, sizes, strict=True):
            inside = unpack(
                parts.indices[start : start + size], width(grid.size), grid.sent
            ).reshape(-1, grid.kept)
            if not is_true((inside < grid.size).all() & (inside[:, 1:] > inside[:, :-1]).all()):
                raise PayloadError(
                    f"the received indices are not {grid.kept} ascending numbers below {grid.size}"
                )
            content = values[value : value + grid.sent].reshape(inside.shape)
            for strip in grid.strips(x):
                part = slice(strip.start * grid.block_counts[1], strip.stop * grid.block_counts[1])
                rows = grid.backward(content[part], inside[part], x, strip)
                rows *= float(top)
                if LARGEST / SIDE**2 < top < np.inf:
                    ops(rows).clip(rows, -LARGEST, LARGEST, out=rows)
            value, start = value + grid.sent, start + size
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + min(4 * d, self.sparse_bytes(self.grids(ratio, d)))

    def bound(self, ratio: float | None, d: int) -> float:
        grids = self.grids(ratio, d)
        if self.form(grids, d) == DENSE:
            return 0.0
        coded = value_bound(self.values, count_sent(grids))
        return max(1 - grid.kept / grid.size * (1 - coded) for grid in grids) + ROUNDING

    def form(self, grids: list[Grid], d: int) -> int:
        """Return the form of a payload; float32 if that is not longer."""
        return DENSE if count_sent(grids) >= d or self.sparse_bytes(grids) >= 4 * d else SPARSE

    def sparse_bytes(self, grids: list[Grid]) -> int:
        indices = sum(packed_bytes(grid.sent, width(grid.size)) for grid in grids)
        return 12 + value_bytes(self.values, count_sent(grids)) + indices

    def grids(self, ratio: float | None, d: int) -> list[Grid]:
        """Return the grid of each layer.   Raises: PayloadError if the layers do not have d
        elements.
        """
        share, start, grids = self.ratio if ratio is None else ratio, 0, []
        for layer in self.layout or (Layer("all", (d,)),):
            rows = layer.shape[0] if len(layer.shape) > 1 else 1
            grids.append(Grid(start, rows, layer.size // rows, share))
            start += layer.size
        if start != d:
            raise PayloadError(
                f"expected a vector of {start} elements, as the layers have; received {d}"
            )
        return grids

"""DeMo: the largest cosine coefficients of what has gathered, block by block.

Rule: each layer, as a matrix, is cut into blocks of at most 64 × 64, as equal as can be; of the
orthonormal cosine transform (DCT-II) of each block the k' = max(1, round(ratio · size)) largest
coefficients are sent. With the feedback e ← β·e + x − C(β·e + x), β = `feedback_gain` =
`feedback_decay`, e is the paper's momentum, from which what was sent is taken away. As the
transform keeps lengths, ‖C(x) − x‖² ≤ (1 − k'/size)‖x‖². Bits: those of the values, ⌈log2 size⌉ for
each place, and 32 for the largest |x_j|, by which everything is divided first.

Limit: ratio = 1 is no compression. Edges that do not fill a block are filled up with zeros. In the
paper the sign of the merged update moves the model; here the update itself does, so that learning
rates differ.

Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
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

SIDE = 64  # of a block, at most
SCALE, BITS = 22, 24  # of cosines, and of coefficients: 64² products add up to less than 2⁵³
LARGEST = float(np.finfo(np.float32).max)
ROUNDING = 2.0**-20  # of a transform and back, relative to ‖x‖²


class Grid(NamedTuple):
    """A layer as a matrix that is cut into blocks."""

    start: int  # of the layer in the flat vector
    rows: int
    columns: int
    share: float

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        down, across = self.cut
        return -(-self.rows // down), -(-self.columns // across)

    @property
    def cut(self) -> tuple[int, int]:
        """So many blocks below and beside each other."""
        return -(-self.rows // SIDE), -(-self.columns // SIDE)

    @property
    def size(self) -> int:
        """Elements of a block."""
        return math.prod(self.block)

    @property
    def kept(self) -> int:
        """k', the coefficients of a block that are sent."""
        return kept_count(self.share, self.size)

    @property
    def blocks(self) -> int:
        return math.prod(self.cut)

    @property
    def sent(self) -> int:
        """Coefficients that are sent, of all blocks."""
        return self.blocks * self.kept

    def strips(self, like: Array) -> Iterator[slice]:
        """Blocks that lie beside each other, by row of blocks: as many rows as fit the cache; on a
        device all.
        """
        down, across = self.cut
        step = down if isinstance(like, Tensor) else max(1, BLOCK // (across * self.size))
        return (slice(first, min(first + step, down)) for first in range(0, down, step))

    def forward(self, x: Array, top: np.float32, strip: slice) -> Array:
        """The coefficients [blocks, size] of a strip of x/top."""
        rows, (height, width), across = self.of(x, strip), self.block, self.cut[1]
        filled = zeros(x, (strip.stop - strip.start) * height, across * width)
        filled[: len(rows), : self.columns] = divide(rows, float(top) or 1.0)
        blocks = filled.reshape(-1, height, across, width).swapaxes(1, 2).reshape(-1, height, width)
        return rotate_blocks(
            beside(x, cosines(height)), blocks, beside(x, cosines(width)).T
        ).reshape(-1, self.size)

    def backward(self, coefficients: Array, places: Array, x: Array, strip: slice) -> Array:
        """That strip again, as it is in x, of the coefficients [blocks, kept] and their places in
        each block.
        """
        rows, (height, width), across = self.of(x, strip), self.block, self.cut[1]
        whole, unit = to_integers(coefficients, BITS)
        blocks = scatter(look_up(interleave(height, width), places), whole, self.size).reshape(
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

    def of(self, x: Array, strip: slice) -> Array:
        """The rows of this layer, in the flat vector x, that a strip covers."""
        height = self.block[0]
        matrix = x[self.start : self.stop].reshape(self.rows, self.columns)
        return matrix[strip.start * height : strip.stop * height]


def rotate_blocks(left: Array, blocks: Array, right: Array) -> Array:
    """left @ block @ right of each: products so small that BLAS does not share them among threads,
    which waits long where cores are busy.
    """
    if len(left) == 1:
        return blocks[:, 0] @ right
    return left @ (blocks @ right)


@cache
def cosines(n: int) -> np.ndarray:
    """The orthonormal DCT-II: float32 [frequency, place]."""
    matrix = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)


@cache
def integer_cosines(n: int) -> tuple[np.ndarray, np.ndarray]:
    """2^SCALE times that, as whole numbers: of the first half of the places, which the other one
    mirrors, those of even and those of odd frequencies, float64 [place, frequency].
    """
    half = np.rint(cosines(n)[:, : -(-n // 2)].T.astype(np.float64) * 2.0**SCALE)
    return np.ascontiguousarray(half[:, ::2]), np.ascontiguousarray(half[:, 1::2])


def half_cosines(like: Array, n: int, scale: int) -> list[Array]:
    """The same times 2^scale, where that one lies."""
    return [beside(like, part) * 2.0**scale for part in integer_cosines(n)]


@cache
def interleave(height: int, width: int) -> np.ndarray:
    """Where each coefficient of a block comes to lie: in its transpose, even frequencies before odd
    ones.
    """
    along, down = (np.argsort(np.r_[0:n:2, 1:n:2]) for n in (width, height))
    return (along * height + down[:, None]).reshape(-1)


def scatter(places: Array, values: Array, size: int) -> Array:
    """[n, size] with these values [n, k] in these places, else 0."""
    if isinstance(values, Tensor):
        return values.new_zeros((len(values), size)).scatter_(1, places, values)
    blocks = np.zeros((len(values), size))
    np.put_along_axis(blocks, places, values, 1)
    return blocks


def count_sent(grids: list[Grid]) -> int:
    """Coefficients of a body."""
    return sum(grid.sent for grid in grids)


@option
class DeMo(Code, Share):
    """Keeps a share of the cosine coefficients."""

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
        chosen, places = [], []
        for grid in grids:
            found = []
            for strip in grid.strips(x):
                blocks = grid.forward(x, top, strip)
                inside = largest_of_rows(blocks, grid.kept)
                there = isinstance(blocks, Tensor)
                along = blocks.gather(1, inside) if there else np.take_along_axis(blocks, inside, 1)
                chosen.append(along.reshape(-1))
                found.append(inside.reshape(-1))
            places.append(pack(concatenate(found), width(grid.size)))
        values, scales = write_values(self.values, concatenate(chosen), context)
        scales = concatenate(
            [beside(scales, np.array([top], "<f4").view(np.uint8)), as_bytes(scales)]
        )
        share = np.array([self.ratio if context.ratio is None else context.ratio], "<f8").view(
            np.uint8
        )
        return Parts(count_sent(grids), values, concatenate([beside(x, share), *places]), scales)

    def unpack(self, parts: Parts, d: int) -> Any:
        size = len(parts.indices)
        if parts.form == DENSE and not size + len(parts.scales) and parts.count == d:
            return typed_part(parts.values, "<f4", d, "values")
        if parts.form != SPARSE or size < 8 or len(parts.scales) < 4:
            raise PayloadError(
                f"what came are no blocks of coefficients: form {parts.form}, {size} bytes"
            )
        share = np.frombuffer(read(parts.indices[:8]).tobytes(), "<f8")[0]
        if not 0 < share <= 1:
            raise PayloadError(f"a share of {share} of the coefficients came")
        grids = self.grids(float(share), d)
        sizes = [packed_bytes(grid.sent, width(grid.size)) for grid in grids]
        if parts.count != count_sent(grids) or size != 8 + sum(sizes):
            raise PayloadError(f"{parts.count} coefficients of {d} elements came with {size} bytes")
        values = read_values(self.values, parts.values, parts.scales[4:], parts.count)
        top = read(parts.scales[:4]).view("<f4")[0]
        x, value, start = zeros(values, d), 0, 8
        for grid, size in zip(grids, sizes, strict=True):
            inside = unpack(
                parts.indices[start : start + size], width(grid.size), grid.sent
            ).reshape(-1, grid.kept)
            if not is_true((inside < grid.size).all() & (inside[:, 1:] > inside[:, :-1]).all()):
                raise PayloadError(
                    f"the places that came are not {grid.kept} ascending numbers below {grid.size}"
                )
            content = values[value : value + grid.sent].reshape(inside.shape)
            for strip in grid.strips(x):
                part = slice(strip.start * grid.cut[1], strip.stop * grid.cut[1])
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
        """As float32 where that is no longer."""
        return DENSE if count_sent(grids) >= d or self.sparse_bytes(grids) >= 4 * d else SPARSE

    def sparse_bytes(self, grids: list[Grid]) -> int:
        places = sum(packed_bytes(grid.sent, width(grid.size)) for grid in grids)
        return 12 + value_bytes(self.values, count_sent(grids)) + places

    def grids(self, ratio: float | None, d: int) -> list[Grid]:
        """How each layer is cut, and how many coefficients of each block are kept."""
        share, start, grids = self.ratio if ratio is None else ratio, 0, []
        for layer in self.layout or (Layer("all", (d,)),):
            rows = layer.shape[0] if len(layer.shape) > 1 else 1
            grids.append(Grid(start, rows, layer.size // rows, share))
            start += layer.size
        if start != d:
            raise PayloadError(f"a vector of {d} elements came where the layers have {start}")
        return grids

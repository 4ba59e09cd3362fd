"""DeMo: send the largest cosine coefficients of the accumulated updates, block by block.

Use when: momentum should stay local and only its fast components travel.
Avoid when: matrices are small, or all bits must agree with another optimizer.
Alternatives: `topk`; `sparse_loco` with local steps.

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
from functools import cache, partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import (
    VALUES,
    ValueCode,
    index_width,
    read_values,
    value_bound,
    value_bytes,
    where_increasing,
    write_values,
)
from ashl.compression.contract import (
    ByLayers,
    EncodeContext,
    Traits,
    WithDensity,
    selected_count,
)
from ashl.compression.kernels import (
    BLOCK,
    Array,
    allocate,
    as_native,
    as_tensor,
    divide,
    is_true,
    largest_magnitude,
    largest_of_rows,
    look_up,
    multiply_matrices,
    multiply_mirrored,
    pack,
    packed_bytes,
    to_device_of,
    to_integers,
    unpack,
)
from ashl.compression.payload import HEADER, Parts, PayloadError, as_bytes, typed_part
from ashl.compression.sparse import DENSE, SPARSE
from ashl.device import is_on_host, to_host
from ashl.option import option

SIDE = 64  # most rows and columns of a block
SCALE, BITS = 22, 24  # bits of cosines and of coefficients: 64² products sum to less than 2⁵³
LARGEST = torch.finfo(torch.float32).max
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
    def k(self) -> int:
        """Number of coefficients that are sent of a block."""
        return selected_count(self.share, self.size)

    @property
    def blocks(self) -> int:
        return math.prod(self.block_counts)

    @property
    def num_coefficients(self) -> int:
        """Number of coefficients that are sent of all blocks."""
        return self.blocks * self.k

    def strips(self, like: Tensor) -> Iterator[slice]:
        """Return slices of the rows of blocks that fit the cache; one slice on a device."""
        down, across = self.block_counts
        step = max(1, BLOCK // (across * self.size)) if is_on_host(like) else down
        return (slice(first, min(first + step, down)) for first in range(0, down, step))

    def forward(self, x: Tensor, top: float, strip: slice) -> Tensor:
        """Return the coefficients [blocks, size] of a strip of x/top."""
        rows = as_native(self.rows_of_strip(x, strip))
        height, width = self.block
        across = self.block_counts[1]
        filled = allocate(rows, (strip.stop - strip.start) * height, across * width)
        filled[:] = 0
        filled[: len(rows), : self.columns] = divide(rows, top or 1.0)
        blocks = filled.reshape(-1, height, across, width).swapaxes(1, 2).reshape(-1, height, width)
        rotated = rotate_blocks(
            to_device_of(x, cosines(height)), blocks, to_device_of(x, cosines(width)).T
        )
        return as_tensor(rotated.reshape(-1, self.size))

    def backward(self, coefficients: Tensor, indices: Tensor, x: Tensor, top: float) -> None:
        """Write the inverse transform, times `top`, into the elements of x in this layer.

        Args: coefficients and indices [blocks, kept], the indices within each block.
        """
        height, width = self.block
        across = self.block_counts[1]
        whole, unit = to_integers(coefficients, BITS)
        places = look_up(interleave(height, width), indices)
        along, down = half_cosines(x, width, -SCALE), half_cosines(x, height, 0)
        unit = (unit * 2.0**-SCALE)[:, :, None]
        for strip in self.strips(x):
            part = slice(strip.start * across, strip.stop * across)
            spread = x.new_zeros((part.stop - part.start, self.size), dtype=torch.float64)
            spread.scatter_(1, places[part], as_tensor(whole[part]))
            blocks = as_native(spread).reshape(-1, width, height)
            half = multiply_mirrored(*along, blocks).round().swapaxes(1, 2)
            blocks = multiply_mirrored(*down, half)
            blocks *= unit[part]
            filled = blocks.reshape(-1, across, height, width).swapaxes(1, 2)
            rows = as_native(self.rows_of_strip(x, strip))
            rows[:] = filled.reshape(-1, across * width)[: len(rows), : self.columns]
            rows *= top
            if LARGEST / SIDE**2 < top < math.inf:
                rows[:] = rows.clip(-LARGEST, LARGEST)

    def rows_of_strip(self, x: Tensor, strip: slice) -> Tensor:
        """Return the rows of the layer in the flat vector x that a strip covers."""
        height = self.block[0]
        matrix = x[self.start : self.stop].view(self.rows, self.columns)
        return matrix[strip.start * height : strip.stop * height]


def rotate_blocks(left: Array, blocks: Array, right: Array) -> Array:
    """Return left @ block @ right for each block."""
    if len(left) == 1:
        return multiply_matrices(blocks[:, 0], right)
    return multiply_matrices(left, multiply_matrices(blocks, right))


@cache
def cosines(n: int) -> Tensor:
    """Return the matrix of the orthonormal DCT-II, float32 [frequency, position]."""
    matrix = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return torch.from_numpy(matrix.astype(np.float32))


@cache
def integer_cosines(n: int) -> tuple[Tensor, Tensor]:
    """Return 2^SCALE · cosines(n), rounded, for even and for odd frequencies: float64 [position,
    frequency].

    Only the first half of the positions is returned, because the second half mirrors it.
    """
    half = (cosines(n)[:, : -(-n // 2)].T.double() * 2.0**SCALE).round()
    return half[:, ::2].contiguous(), half[:, 1::2].contiguous()


def half_cosines(like: Tensor, n: int, scale: int) -> list[Array]:
    """Return integer_cosines(n) · 2^scale on the device of `like`."""
    return [as_native(to_device_of(like, part) * 2.0**scale) for part in integer_cosines(n)]


@cache
def interleave(height: int, width: int) -> Tensor:
    """Return the position of each coefficient of a block in its reordered transpose.

    There, even frequencies are before odd ones, in both directions.
    """
    along, down = (np.argsort(np.r_[0:n:2, 1:n:2]) for n in (width, height))
    return torch.from_numpy((along * height + down[:, None]).reshape(-1))


def count_sent(grids: list[Grid]) -> int:
    """Return the number of coefficients of a payload."""
    return sum(grid.num_coefficients for grid in grids)


@option
class DeMo(ByLayers, WithDensity):
    """Sends the largest cosine coefficients of each block."""

    code: ClassVar[int] = 62
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True)
    values: ValueCode

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        grids = self.grids(context.ratio, len(x))
        if self.form(grids, len(x)) == DENSE:
            return Parts(len(x), x, form=DENSE)
        top = largest_magnitude(x)
        chosen, indices = [], []
        for grid in grids:
            found = []
            for strip in grid.strips(x):
                blocks = grid.forward(x, top, strip)
                inside = largest_of_rows(blocks, grid.k)
                chosen.append(blocks.gather(1, inside).view(-1))
                found.append(inside.view(-1))
            indices.append(pack(torch.cat(found), index_width(grid.size)))
        values, scales = write_values(
            self.values, torch.cat(chosen), partial(context.words, VALUES)
        )
        tops = to_device_of(scales, as_bytes(torch.tensor([top])))
        ratio = self.ratio if context.ratio is None else context.ratio
        share = to_device_of(x, as_bytes(torch.tensor([ratio], dtype=torch.float64)))
        return Parts(
            count_sent(grids),
            values,
            torch.cat([share, *indices]),
            torch.cat([tops, as_bytes(scales)]),
        )

    def unpack(self, parts: Parts, d: int) -> Tensor:
        size = len(parts.indices)
        if parts.form == DENSE and not size + len(parts.scales) and parts.count == d:
            return typed_part(parts.values, torch.float32, d, "values")
        if parts.form != SPARSE or size < 8 or len(parts.scales) < 4:
            raise PayloadError(
                f"expected blocks of coefficients; received form {parts.form} with {size} bytes of"
                " indices"
            )
        (share,) = np.frombuffer(to_host(parts.indices[:8]).numpy().tobytes(), "<f8").tolist()
        if not 0 < share <= 1:
            raise PayloadError(f"received a density of {share}; it must be above 0 and at most 1")
        grids = self.grids(share, d)
        sizes = [packed_bytes(grid.num_coefficients, index_width(grid.size)) for grid in grids]
        if parts.count != count_sent(grids) or size != 8 + sum(sizes):
            raise PayloadError(
                f"received {parts.count} coefficients with {size} bytes of indices, which do not"
                f" match {d} elements at a density of {share:g}"
            )
        values = read_values(self.values, parts.values, parts.scales[4:], parts.count)
        top = float(to_host(typed_part(parts.scales[:4], torch.float32, 1, "scales"))[0])
        x, value, start = values.new_zeros(d), 0, 8
        for grid, size in zip(grids, sizes, strict=True):
            stream = parts.indices[start : start + size]
            inside = as_tensor(unpack(stream, index_width(grid.size), grid.num_coefficients)).view(
                -1, grid.k
            )
            if not is_true((inside < grid.size).all() & where_increasing(inside).all()):
                raise PayloadError(
                    f"the received indices are not {grid.k} ascending numbers below {grid.size}"
                )
            grid.backward(
                values[value : value + grid.num_coefficients].view(inside.shape), inside, x, top
            )
            value, start = value + grid.num_coefficients, start + size
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        grids = self.grids(ratio, d)
        return HEADER.size + (4 * d if self.form(grids, d) == DENSE else self.sparse_bytes(grids))

    def bound(self, ratio: float | None, d: int) -> float:
        grids = self.grids(ratio, d)
        if self.form(grids, d) == DENSE:
            return 0.0
        coded = value_bound(self.values, count_sent(grids))
        return max(1 - grid.k / grid.size * (1 - coded) for grid in grids) + ROUNDING

    def form(self, grids: list[Grid], d: int) -> int:
        """Return the form of a payload; float32 if that is not longer."""
        return DENSE if count_sent(grids) >= d or self.sparse_bytes(grids) >= 4 * d else SPARSE

    def sparse_bytes(self, grids: list[Grid]) -> int:
        indices = sum(packed_bytes(grid.num_coefficients, index_width(grid.size)) for grid in grids)
        return 12 + value_bytes(self.values, count_sent(grids)) + indices

    def grids(self, ratio: float | None, d: int) -> list[Grid]:
        """Return the grid of each layer."""
        share, start, grids = self.ratio if ratio is None else ratio, 0, []
        for layer in self.layers(d):
            rows = layer.shape[0] if len(layer.shape) > 1 else 1
            grids.append(Grid(start, rows, layer.size // rows, share))
            start += layer.size
        return grids

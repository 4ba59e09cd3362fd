"""Stochastic rotated quantization: rotate blocks at random, round to k levels, and rotate back.

Rule: a block has b = 4096 elements, or the next power of two if d is smaller; zeros complete the
last block. z = b^(−1/2)·H·diag(σ)·x, with the Hadamard matrix H and random signs σ that are equal
on all workers and new in each round. z is quantized between its least and its largest element as in
`uniform`, and rotated back by the receiver. The rotation spreads large elements over the block. E
C(x) = x and E‖C(x) − x‖² ≤ min(b/2, 2 ln b + 2)/(k − 1)²·‖x‖².
Bits: ⌈log2 k⌉ for each element of each block, 64 per block, and 64 for the seed of σ.

H is the Kronecker product of two smaller ones, so a rotation is two products with matrices of at
most 64 × 64, which is faster than butterflies.

Limits: takes several times the time of `uniform`. From k = 6 on, it is a contraction and may have
error feedback. If an element is not finite, also after the rotation, its block becomes NaN.

Source: Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017.
"""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.common.deterministic_matmul import hadamard_sums, signs_of
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.uniform import Levels, place_levels
from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import (
    Array,
    as_bytes,
    beside,
    concatenate,
    divide,
    read,
    view_as,
    zeros,
)
from ashl.compression.wire.entropy_code import EntropyCode
from ashl.compression.wire.levels import (
    all_levels,
    level_bytes,
    pack_levels,
    rows_of,
    unpack_levels,
)
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.stochastic_rounding import round_to_uint8, rounding_noise
from ashl.compression.wrappers.options import Wrappers
from ashl.data.counter_rng import CounterRng
from ashl.option import option

LARGEST = 4096  # largest block
SEED = np.dtype("<u8")  # type of the seed of σ


@option
class Rotated(Code, Wrappers):
    """Levels between the least and the largest element of rotated blocks."""

    code: ClassVar[int] = 14
    on_host: ClassVar[bool] = False
    levels: Levels
    per_layer: bool
    entropy: EntropyCode

    @property
    def traits(self) -> Traits:
        small, variable = self.bound(None, LARGEST) < 1, self.entropy != "none"
        return Traits(unbiased=True, contraction=small, variable=variable)

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        row, top = block_of(len(x)), self.levels - 1
        rows = -(-len(x) // row)
        noise = rounding_noise(x, context.words(), top)
        seed = context.shared().bit_generator.random_raw(1).astype(SEED)
        flips = CounterRng(int(seed[0]))
        ends = zeros(x, rows, 2)

        def numbers(where: slice, block: Array) -> Array:
            z = rotate(flip_signs(flips, where.start * row, block), row)
            ends[where, 0], ends[where, 1] = (
                (z.amin(1), z.amax(1)) if isinstance(z, Tensor) else (z.min(1), z.max(1))
            )
            return round_to_uint8(
                place_levels(z, ends[where], top * noise.unit), noise, where.start * row
            )

        blocks = (numbers(where, block) for where, block in rows_of(x, row))
        stream = pack_levels(rows * row, top, blocks, self.entropy)
        return Parts(
            len(x), stream, scales=concatenate([beside(x, seed.view(np.uint8)), as_bytes(ends)])
        )

    def unpack(self, parts: Parts, d: int) -> Array:
        row, top = block_of(d), self.levels - 1
        rows = -(-d // row)
        scales = typed_part(parts.scales, "u1", SEED.itemsize + 8 * rows, "seed and ends")
        ends = view_as(scales[SEED.itemsize :], "<f4").reshape(rows, 2)
        flips = CounterRng(int(read(scales[: SEED.itemsize]).view(SEED)[0]))

        def to_values(where: slice, block: Array) -> None:
            block[:] = flip_signs(flips, where.start * row, rotate_back(block, ends[where], top))

        stream = all_levels(parts, d)
        return unpack_levels(stream, rows * row, row, top, to_values, self.entropy)[:d]

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        row = block_of(d)
        rows = -(-d // row)
        return (
            HEADER.size
            + SEED.itemsize
            + 8 * rows
            + level_bytes(rows * row, self.levels - 1, self.entropy)
        )

    def bound(self, ratio: float | None, d: int) -> float:
        b = block_of(d)
        return min(b / 2, 2 * math.log(b) + 2) / (self.levels - 1) ** 2


def block_of(d: int) -> int:
    """Return b for d elements."""
    return min(LARGEST, 1 << (d - 1).bit_length())


def flip_signs(flips: CounterRng, start: int, rows: Array) -> Array:
    """Return diag(σ)·x for some rows, in a new array.

    `start`, a multiple of 64, is the number of elements before the rows.
    """
    if isinstance(rows, Tensor):
        words = flips.words(rows, start // 64, -(-rows.numel() // 64)).view(torch.uint8)
        return device_kernels.flip_signs(words, rows)
    words = flips.words(rows, start // 64, -(-rows.size // 64))
    signs = np.unpackbits(words.view(np.uint8), count=rows.size, bitorder="little").astype(
        np.uint32
    )
    signs <<= np.uint32(31)
    signs ^= np.ascontiguousarray(rows).view(np.uint32).reshape(-1)
    return signs.view(np.float32).reshape(rows.shape)


def rotate(rows: Array, size: int) -> Array:
    """Return b^(−1/2)·H·x of each row [n, b], which is its own inverse.

    It is a matrix product, so its last bits depend on the device.
    """
    left, right = hadamard(1 << size.bit_length() // 2), hadamard(1 << (size.bit_length() - 1) // 2)
    square = rows.reshape(-1, len(left), len(right))
    return (beside(rows, left) @ (square @ beside(rows, right))).reshape(rows.shape)


def rotate_back(numbers: Array, ends: Array, top: int) -> Array:
    """Return b^(−1/2)·H·y with the values y of numbers [n, b] between ends [n, 2].

    The result has the same bits on every machine and device, because only the numbers are rotated:
    their sums are whole and below 2²⁰. The lower end is equal for all elements of a row, so its
    rotation is in the first element only.
    """
    lowest, step, size = ends[:, :1], divide(ends[:, 1:] - ends[:, :1], top), numbers.shape[1]
    sums = hadamard_sums(numbers)
    first = (sums[:, :1] * 2.0 ** -(size.bit_length() - 1) * step + lowest) * math.sqrt(size)
    sums *= divide(step, math.sqrt(size))
    sums[:, :1] = first
    return sums


@cache
def hadamard(size: int) -> np.ndarray:
    """Return the orthogonal Hadamard matrix, float32."""
    return signs_of(size) / np.float32(math.sqrt(size))

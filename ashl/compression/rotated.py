"""Stochastic rotated quantization: in blocks, the vector is rotated at random, so that no element
stands out, then rounded at random to one of k levels, and rotated back at the other end.

Rule: for each block of b = 4096 elements (the next power of two, where d is smaller; the last is
filled up with zeros) z = b^(−1/2)·H·diag(σ)·x with H of Hadamard and random signs σ, the same on
all workers and new in each round; z is quantized between its least and largest element as by
`uniform`, and rotated back. E C(x) = x and E‖C(x) − x‖² ≤ min(b/2, 2 ln b + 2)/(k − 1)²·‖x‖². Bits:
⌈log2 k⌉ for each element of each block, 64 a block, and 64 for the seed of σ.

H of b is the Kronecker product of two smaller ones, so that rotating is two products with matrices
of 64 × 64, faster than butterflies.

Limit: several times the time of `uniform`. A contraction, which may have feedback, from k = 6 on.
What is not finite, or is so once rotated, makes its block NaN.

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

LARGEST = 4096
SEED = np.dtype("<u8")


@option
class Rotated(Code, Wrappers):
    """Levels between the ends of rotated blocks."""

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
        noise = rounding_noise(x, context.words(), top)
        rows, seed = -(-len(x) // row), context.shared().bit_generator.random_raw(1).astype(SEED)
        ends, flips = zeros(x, rows, 2), CounterRng(int(seed[0]))

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

        def meant(where: slice, block: Array) -> None:
            block[:] = flip_signs(flips, where.start * row, rotate_back(block, ends[where], top))

        return unpack_levels(all_levels(parts, d), rows * row, row, top, meant, self.entropy)[:d]

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
    """b for d elements."""
    return min(LARGEST, 1 << (d - 1).bit_length())


def flip_signs(flips: CounterRng, start: int, rows: Array) -> Array:
    """diag(σ)·x of these rows, in a new array; `start`, a multiple of 64, counts elements before
    them.
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
    """b^(−1/2)·H·x of each row [n, b]: its own inverse. A product of matrices, so a device's last
    bits are its own.
    """
    left, right = hadamard(1 << size.bit_length() // 2), hadamard(1 << (size.bit_length() - 1) // 2)
    square = rows.reshape(-1, len(left), len(right))
    return (beside(rows, left) @ (square @ beside(rows, right))).reshape(rows.shape)


def rotate_back(numbers: Array, ends: Array, top: int) -> Array:
    """The same of what numbers [n, b] between ends [n, 2] stand for, to the bit on every machine
    and device. Only the numbers are rotated, whose sums are whole and below 2²⁰; what they are
    counted from is alike for all of a row, so that it comes to lie in its first element.
    """
    lowest, step, size = ends[:, :1], divide(ends[:, 1:] - ends[:, :1], top), numbers.shape[1]
    sums = hadamard_sums(numbers)
    first = (sums[:, :1] * 2.0 ** -(size.bit_length() - 1) * step + lowest) * math.sqrt(size)
    sums *= divide(step, math.sqrt(size))
    sums[:, :1] = first
    return sums


@cache
def hadamard(size: int) -> np.ndarray:
    """The orthogonal one."""
    return signs_of(size) / np.float32(math.sqrt(size))

"""Stochastic rotated quantization: rotate blocks at random, round to k levels, and rotate back.

Use when: a quantizer suffers from outliers: a rotation spreads them.
Avoid when: encoding time counts: 15 copies of the vector.
Alternatives: `qsgd`; `uniform`.

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

import math
from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression import kernels
from ashl.compression.coding import EntropyCode, level_bytes, read_levels, write_levels
from ashl.compression.contract import EncodeContext, Traits, Wrappable
from ashl.compression.kernels import (
    Array,
    allocate,
    as_native,
    as_tensor,
    divide,
    hadamard_factors,
    hadamard_sums,
    multiply_matrices,
    round_levels,
    rounding_noise,
    to_device_of,
    view_as,
)
from ashl.compression.payload import HEADER, Parts, all_values, as_bytes, typed_part
from ashl.compression.uniform import Levels, place_levels
from ashl.data.counter_rng import CounterRng
from ashl.device import to_host
from ashl.option import option

LARGEST = 4096  # largest block
SEED_BYTES = 8  # size of the seed of σ


@option
class Rotated(Wrappable):
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

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        row, top = block_of(len(x)), self.levels - 1
        rows = -(-len(x) // row)
        noise = rounding_noise(x, context.words(), top)
        seed = torch.from_numpy(context.shared_stream().bit_generator.random_raw(1).view("u1"))
        ends = allocate(as_native(x), rows, 2)

        def to_levels(where: slice, block: Array) -> Array:
            z = rotate(flip_signs(seed, where.start * row, block), row)
            if isinstance(z, Tensor):
                ends[where, 0], ends[where, 1] = z.amin(1), z.amax(1)
            else:
                ends[where, 0], ends[where, 1] = z.min(1), z.max(1)
            y = place_levels(z, ends[where], top * noise.unit)
            return round_levels(y, noise, where.start * row)

        stream = write_levels(x, row, rows * row, top, self.entropy, to_levels)
        return Parts(
            len(x), stream, scales=torch.cat([to_device_of(x, seed), as_bytes(as_tensor(ends))])
        )

    def unpack(self, parts: Parts, d: int) -> Tensor:
        row, top = block_of(d), self.levels - 1
        rows = -(-d // row)
        scales = typed_part(parts.scales, torch.uint8, SEED_BYTES + 8 * rows, "seed and ends")
        ends = as_native(view_as(scales[SEED_BYTES:], torch.float32)).reshape(rows, 2)
        seed = to_host(scales[:SEED_BYTES])

        def to_values(where: slice, block: Array) -> None:
            block[:] = flip_signs(seed, where.start * row, rotate_back(block, ends[where], top))

        stream = all_values(parts, d)
        return read_levels(stream, row, rows * row, top, self.entropy, to_values)[:d]

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        row = block_of(d)
        rows = -(-d // row)
        stream = level_bytes(rows * row, self.levels - 1, self.entropy)
        return HEADER.size + SEED_BYTES + 8 * rows + stream

    def bound(self, ratio: float | None, d: int) -> float:
        b = block_of(d)
        return min(b / 2, 2 * math.log(b) + 2) / (self.levels - 1) ** 2


def block_of(d: int) -> int:
    """Return b for d elements."""
    return min(LARGEST, 1 << (d - 1).bit_length())


def flip_signs(seed: Tensor, start: int, rows: Array) -> Array:
    """Return diag(σ)·x for some rows, in new memory.

    `start`, a multiple of 64, is the number of elements before the rows.
    """
    key = int.from_bytes(seed.numpy().tobytes(), "little")
    flat = as_tensor(rows.reshape(-1))
    words = CounterRng(key).words(flat, start // 64, -(-len(flat) // 64))
    flipped = kernels.flip_signs(words.view(torch.uint8), flat, len(flat))
    return as_native(flipped).reshape(rows.shape)


def rotate(rows: Array, size: int) -> Array:
    """Return b^(−1/2)·H·x of each row [n, b], which is its own inverse.

    It is a matrix product, so its last bits depend on the device.
    """
    like = as_tensor(rows)
    left, right = (
        to_device_of(like, factor / math.sqrt(len(factor))) for factor in hadamard_factors(size)
    )
    square = rows.reshape(-1, len(left), len(right))
    return multiply_matrices(left, multiply_matrices(square, right)).reshape(rows.shape)


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

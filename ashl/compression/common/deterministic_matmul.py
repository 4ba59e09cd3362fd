"""Products of matrices that have the same bits on every machine: where each worker decodes by
itself, replicas would drift apart with libraries that add up in another order.

`outer_sum` adds element by element, term after term: for few terms. The others are for many small
blocks: of whole numbers, whose products and sums stay below 2^53, which float64 holds exactly, or
below 2^24 for float32: they are the same in whatever order.

Source: these are the fixed-point form of Demmel and Nguyen, "Fast Reproducible Floating-Point
Summation", 2013.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, beside
from ashl.compression.wire.bits import BLOCK


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Into `out` [m, n] Σ_k left[k] ⊗ right[k], of [r, m] and [r, n]."""
    if not len(left):
        out[:] = 0
        return
    if isinstance(left, Tensor):
        out[:] = left[0][:, None] * right[0]
        for u, v in zip(left[1:], right[1:], strict=True):
            out += u[:, None] * v
        return
    whole, step = torch.from_numpy(out), max(1, 2 * BLOCK // right.shape[1])
    columns, others = torch.from_numpy(left)[:, :, None], torch.from_numpy(right)
    buffer = whole.new_empty(min(step, len(out)), right.shape[1])
    for start in range(0, len(out), step):
        rows, parts = whole[start : start + step], columns[:, start : start + step]
        torch.mul(parts[0], others[0], out=rows)
        for u, v in zip(parts[1:], others[1:], strict=True):
            rows += torch.mul(u, v, out=buffer[: len(rows)])


def to_integers(values: Array, bits: int) -> tuple[Array, Array]:
    """float32 [n, k] as whole numbers, float64, of so many bits from the first one of a row's
    largest on; and what one of them is worth, [n, 1].
    """
    if isinstance(values, Tensor):
        shift = bits - torch.frexp(values.abs().amax(1, keepdim=True)).exponent
        return (
            values.to(torch.float64) * device_kernels.power(shift)
        ).round(), device_kernels.power(-shift)
    shift = bits - np.frexp(np.abs(values).max(1, keepdims=True))[1]
    whole = values.astype(np.float64)
    whole *= np.ldexp(1.0, shift)  # a power of two, so exact
    return np.rint(whole, out=whole), np.ldexp(1.0, -shift)


def multiply_mirrored(even: Array, odd: Array, blocks: Array) -> Array:
    """Matrixᵀ @ block of each, float64 [n, k, m], where the rows of the matrix are symmetric and
    antisymmetric in turn: of those the left halves, transposed, [⌈k/2⌉, ...], and blocks with their
    rows in that order. It takes half of the products.
    """
    half, rest = even.shape[1], odd.shape[1]
    same, other = even @ blocks[:, :half], odd @ blocks[:, half:]
    if isinstance(blocks, Tensor):
        return torch.cat([same + other, (same - other)[:, :rest].flip(1)], 1)
    whole = np.empty(blocks.shape)
    np.add(same, other, out=whole[:, :half])
    np.subtract(same[:, :rest], other[:, :rest], out=whole[:, half:][:, ::-1])
    return whole


def hadamard_sums(rows: Array) -> Array:
    """H·x of each row, float32 [n, b] with b a power of two and H the matrix of Hadamard with ±1.
    Of whole numbers whose sums stay below 2^24, which float32 holds exactly, in whatever order they
    are added.
    """
    size = rows.shape[1]
    left, right = signs_of(1 << size.bit_length() // 2), signs_of(1 << (size.bit_length() - 1) // 2)
    square = rows.reshape(-1, len(left), len(right))
    if isinstance(rows, Tensor):  # whose float32 may be of 10 bits in products
        wide = square.to(torch.float64) @ beside(rows, right).to(torch.float64)
        return (beside(rows, left).to(torch.float64) @ wide).to(torch.float32).reshape(rows.shape)
    return (left @ (square @ right)).reshape(rows.shape)


@cache
def signs_of(size: int) -> np.ndarray:
    """The matrix of Hadamard, for a power of two: float32 ±1."""
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h

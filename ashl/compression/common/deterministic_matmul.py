"""Matrix products with the same bits on every machine.

If each worker decodes for itself, libraries that add in different orders would make the replicas
drift apart. `outer_sum` adds term after term for each element, and is for few terms. The other
functions are for many small blocks of whole numbers. Their products and sums stay below 2^53 in
float64, or below 2^24 in float32, so they are exact in any order.

Source: fixed-point form of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, beside
from ashl.compression.wire.bits import BLOCK


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Write Σ_k left[k] ⊗ right[k] into `out` [m, n], for left [r, m] and right [r, n]."""
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
    """Return (whole numbers, unit) of float32 [n, k], such that values ≈ whole numbers · unit.

    The whole numbers are float64 with `bits` bits, counted from the highest bit of the row's
    largest magnitude. The unit is [n, 1].
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
    """Return matrixᵀ @ block for each block, float64 [n, k, m], with half of the multiplications.

    The rows of the matrix are symmetric and antisymmetric in turn. `even` and `odd` are the
    transposed left halves of these rows, [⌈k/2⌉, ...]; the rows of the blocks are in the same
    order, even before odd.
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
    """Return H·x of each row, float32 [n, b], with b a power of two and H the Hadamard matrix of
    ±1.

    The elements are whole numbers whose sums stay below 2^24, which float32 holds exactly in any
    order of additions.
    """
    size = rows.shape[1]
    left, right = signs_of(1 << size.bit_length() // 2), signs_of(1 << (size.bit_length() - 1) // 2)
    square = rows.reshape(-1, len(left), len(right))
    if isinstance(rows, Tensor):  # with TF32, products have 10 bits only: compute in float64
        wide = square.to(torch.float64) @ beside(rows, right).to(torch.float64)
        return (beside(rows, left).to(torch.float64) @ wide).to(torch.float32).reshape(rows.shape)
    return (left @ (square @ right)).reshape(rows.shape)


@cache
def signs_of(size: int) -> np.ndarray:
    """Return the Hadamard matrix of a size that is a power of two: float32 ±1."""
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h

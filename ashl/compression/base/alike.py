"""Products of matrices that have the same bits on every machine: where each worker decodes by itself, replicas would
drift apart with libraries that add up in another order.

`outer_sum` adds element by element, term after term: for few terms. `between` is for many small blocks: it turns them
into whole numbers whose products and sums stay below 2^53, which float64 holds exactly, in whatever order.

Source: the second is the fixed-point form of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import there
from ashl.compression.wire.arrays import Array, beside
from ashl.compression.wire.bits import BLOCK

PIECE = 1 << 15  # elements
FACTOR = 16  # rows of the small matrices of which a large one is made


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Into `out` [m, n] Σ_k left[k] ⊗ right[k], of [r, m] and [r, n]."""
    if isinstance(left, Tensor):
        out[:] = sum(u[:, None] * v for u, v in zip(left, right, strict=True))
        return
    whole, step = torch.from_numpy(out), max(1, 2 * BLOCK // right.shape[1])
    columns, others = torch.from_numpy(left)[:, :, None], torch.from_numpy(right)
    buffer = whole.new_empty(min(step, len(out)), right.shape[1])
    for start in range(0, len(out), step):
        rows = whole[start : start + step].zero_()
        for u, v in zip(columns[:, start : start + step], others, strict=True):
            rows += torch.mul(u, v, out=buffer[: len(rows)])


def between(left: np.ndarray, blocks: Array, right: np.ndarray, scale: int, bits: int) -> Array:
    """left @ block @ right of each block, float32 [n, h, w], all of them square. `left` and `right` are whole numbers,
    2^scale times what is meant; of a block's elements so many bits count, from the first one of its largest on."""
    if isinstance(blocks, Tensor):
        return there.between(beside(blocks, left), blocks, beside(blocks, right), scale, bits)
    first = right * 2.0**-scale

    def product(whole: np.ndarray) -> np.ndarray:
        half = whole @ first
        return np.matmul(left, np.rint(half, out=half) if scale else half, out=whole)

    return exactly(blocks, bits, scale, product)


def exactly(blocks: np.ndarray, bits: int, scale: int, product: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """float32 [n, ...]: `product` of blocks as float64 of whole numbers, of so many bits, brought back, and 2^−scale
    times that; a few blocks at a time, which stay in the cache."""
    out, step = np.empty(blocks.shape, np.float32), max(1, PIECE * len(blocks) // max(1, blocks.size))
    axes = tuple(range(1, blocks.ndim))
    with np.errstate(invalid="ignore"):
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            shift = bits - np.frexp(np.abs(part).max(axes, keepdims=True))[1]
            whole = part.astype(np.float64)
            whole *= np.ldexp(1.0, shift)  # a power of two, so exact
            whole = product(np.rint(whole, out=whole))
            whole *= np.ldexp(1.0, -scale - shift)
            out[start : start + step] = whole
    return out


def hadamard_sums(rows: np.ndarray, bits: int) -> np.ndarray:
    """H·x of each row, float32 [n, b] with b a power of two and H the matrix of Hadamard with ±1."""

    def product(whole: np.ndarray) -> np.ndarray:
        (n, b), left, spare = whole.shape, whole.shape[1], np.empty_like(whole)
        while left > 1:  # H is the Kronecker product of small ones: each turn takes an axis, and puts it last
            size = min(FACTOR, left)
            turned = spare.reshape(n, b // size, size)
            np.matmul(whole.reshape(n, size, b // size).swapaxes(1, 2), signs_of(size), out=turned)
            whole, spare, left = spare, whole, left // size
        return whole

    return exactly(rows, bits, 0, product)


@cache
def signs_of(size: int) -> np.ndarray:
    """The matrix of Hadamard, for a power of two: float64 ±1."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h

"""Products of matrices that have the same bits on every machine: where each worker decodes by itself, replicas would
drift apart with libraries that add up in another order.

`outer_sum` adds element by element, term after term: for few terms. `between` is for many small blocks: it turns them
into whole numbers whose products and sums stay below 2^53, which float64 holds exactly, in whatever order.

Source: the second is the fixed-point form of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

import numpy as np
from torch import Tensor

from ashl.compression.wire import there
from ashl.compression.wire.arrays import Array, beside
from ashl.compression.wire.bits import BLOCK


def outer_sum(left: Array, right: Array) -> Array:
    """Σ_k left[k] ⊗ right[k], of [r, m] and [r, n] the matrix [m, n]."""
    if isinstance(left, Tensor):
        return sum(u[:, None] * v for u, v in zip(left, right, strict=True))
    total = np.zeros((left.shape[1], right.shape[1]), left.dtype)
    step = max(1, BLOCK // right.shape[1])
    buffer = np.empty((min(step, len(total)), right.shape[1]), left.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
        for start in range(0, len(total), step):
            rows = total[start : start + step]
            for u, v in zip(left[:, start : start + step], right, strict=True):
                rows += np.multiply.outer(u, v, out=buffer[: len(rows)])
    return total


def between(left: np.ndarray, blocks: Array, right: np.ndarray, scale: int, bits: int) -> Array:
    """left @ block @ right of each block, float32 [n, h, w]. `left` and `right` are whole numbers, 2^scale times what
    is meant; of a block's elements so many bits count, from the first one of its largest on."""
    if isinstance(blocks, Tensor):
        return there.between(beside(blocks, left), blocks, beside(blocks, right), scale, bits)
    with np.errstate(invalid="ignore"):
        shift = bits - np.frexp(np.abs(blocks).max((1, 2), keepdims=True))[1]
        whole = np.rint(np.ldexp(blocks.astype(np.float64), shift)) @ right
        whole = left @ np.rint(np.ldexp(whole, -scale))
        return np.ldexp(whole, -scale - shift).astype(np.float32)

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


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Into `out` [m, n] Σ_k left[k] ⊗ right[k], of [r, m] and [r, n]."""
    if isinstance(left, Tensor):
        out[:] = sum(u[:, None] * v for u, v in zip(left, right, strict=True))
        return
    step = max(1, BLOCK // right.shape[1])
    buffer = np.empty((min(step, len(out)), right.shape[1]), left.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
        for start in range(0, len(out), step):
            rows = out[start : start + step]
            rows[:] = 0
            for u, v in zip(left[:, start : start + step], right, strict=True):
                rows += np.multiply.outer(u, v, out=buffer[: len(rows)])


def between(left: np.ndarray, blocks: Array, right: np.ndarray, scale: int, bits: int) -> Array:
    """left @ block @ right of each block, float32 [n, h, w]. `left` and `right` are whole numbers, 2^scale times what
    is meant; of a block's elements so many bits count, from the first one of its largest on."""
    if isinstance(blocks, Tensor):
        return there.between(beside(blocks, left), blocks, beside(blocks, right), scale, bits)
    with np.errstate(invalid="ignore"):
        shift = bits - np.frexp(np.abs(blocks).max((1, 2), keepdims=True))[1]
        whole = blocks * np.ldexp(1.0, shift)  # by a power of two, so exact
        np.rint(whole, out=whole)
        product = whole @ right
        if scale:
            product *= 2.0**-scale
            np.rint(product, out=product)
        whole = left @ product
        whole *= np.ldexp(1.0, -scale - shift)
        return whole.astype(np.float32)

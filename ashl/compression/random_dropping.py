"""Random dropping: send an element with a probability that follows its magnitude, unbiased.

Use when: an unbiased sparse codec that follows magnitudes is wanted.
Avoid when: encoding time counts: 22 copies of the vector.
Alternatives: `random_k`; `topk`, biased but sharper.

Rule: p_j = min(1, λ·|x_j|) with λ such that Σ p_j = k = max(1, round(ratio · d)); C(x)_j = x_j/p_j
with probability p_j, else 0. A fixed-point iteration finds λ: the part that the limit p_j = 1 cuts
off goes to the other elements, until no more is cut off. Then E C(x) = x, and E‖C(x) − x‖² = Σ
x_j²/p_j − ‖x‖² is the least that k elements on average allow. It is at most (d/k − 1)‖x‖².
Bits: those of the values and indices. All elements with p_j < 1 are sent with the same magnitude
1/λ.

Limits: if at most k elements are not 0, the message is exact. The number of elements varies around
k with a standard deviation of at most √k. Declared are k + 7√k + 16; one message in 10^10 would
exceed that, and drops its last elements. C(x) may be longer than x, so error feedback is refused.

Source: Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed
Optimization", NeurIPS 2018.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import value_bound
from ashl.compression.contract import Elements, EncodeContext, Traits
from ashl.compression.kernels import (
    as_native,
    blocks,
    largest_indices,
    largest_magnitude,
    where_true,
)
from ashl.compression.payload import HEADER, Parts
from ashl.compression.sparse import (
    DENSE,
    SPARSE,
    Sparsifier,
    max_nbytes,
    most_drawn,
    unbiased_bound,
)
from ashl.option import option

ROUNDS = 100  # most steps of the fixed-point iteration; a gradient needs a few
STEEPEST = 2.0**95  # largest λ relative to the largest magnitude: 2^32 times it is a float32


@option
class RandomDropping(Sparsifier):
    """Sends large elements, and some of the others."""

    code: ClassVar[int] = 53
    on_host: ClassVar[bool] = True  # draws from a sequential generator

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.values == "fp32", variable=True)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        k, d = self.num_selected(context.ratio, len(x)), len(x)
        if self.sends_all(k, d):
            return Parts(d, x, form=DENSE)
        top = largest_magnitude(x)
        if top == 0:
            return Parts(0, x[:0])
        if not math.isfinite(top):
            return self.format.pack(x, k, lambda: largest_indices(x, k), context)
        slope = find_slope(x, top, k)
        if slope == math.inf:
            indices = where_true(as_native(x) != 0)
        else:
            indices = draw_indices(x, top, slope, context.stream())
        indices = indices[: most_drawn(k, d)]
        kept = x.index_select(0, indices)
        least = float(np.float32(top) / np.float32(slope))
        kept = torch.copysign(kept.abs().clamp(min=least), kept)
        return self.format.pack_elements(Elements(indices, kept), d, context)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        k = self.num_selected(ratio, d)
        if self.sends_all(k, d):
            return HEADER.size + 4 * d
        return max_nbytes(self.values, self.indices, most_drawn(k, d), d)

    def sends_all(self, k: int, d: int) -> bool:
        """Return True if all elements are sent; this must not depend on the random numbers."""
        return self.format.form(most_drawn(k, d), d) != SPARSE

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.num_selected(ratio, d)
        if self.sends_all(k, d):
            return 0.0
        return unbiased_bound(k, d, value_bound(self.values, most_drawn(k, d)))


def find_slope(x: Tensor, top: float, k: int) -> float:
    """Return λ for magnitudes relative to the largest one; infinity if at most k elements are not
    0.
    """
    array, cut, slope = x.numpy(), -1, math.inf
    for _ in range(ROUNDS):
        count, rest = 0, 0.0
        for where in blocks(array):
            y = np.abs(array[where])
            y /= np.float32(top)
            certain = y >= 1 / slope if cut >= 0 else y > 1
            count += int(np.count_nonzero(certain))
            y[certain] = 0
            rest += float(y.sum(dtype=np.float64))
        if count == cut or count >= k:
            break
        if rest == 0:
            return math.inf
        cut, slope = count, (k - count) / rest
    return min(slope, STEEPEST)


def draw_indices(x: Tensor, top: float, slope: float, rng: np.random.Generator) -> Tensor:
    """Draw each element with its probability and return the ascending indices."""
    array, indices = x.numpy(), []
    for where in blocks(array):
        p = np.abs(array[where])
        p /= np.float32(top)
        p *= np.float32(slope * 2.0**32)
        u = rng.integers(0, 2**32, p.size, np.uint32).astype(np.float32)
        indices.append(np.flatnonzero(u < p) + where.start)
    return torch.from_numpy(np.concatenate(indices))

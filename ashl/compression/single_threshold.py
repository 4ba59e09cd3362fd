"""Single threshold: send the elements above one bound for all layers, estimated from a sample.

Use when: Top-K is wanted, with one cheap threshold for all layers.
Avoid when: the number of sent elements must be exact.
Alternatives: `topk`; `threshold`.

Rule: τ is the magnitude that a fraction `ratio` of a strided sample of some 6,000 to 36,000
elements reaches; C(x)_j = x_j if |x_j| ≥ τ, else 0. If fewer than k/2 or more than 2k of the d
elements reach τ, with k = max(1, round(ratio · d)), the k largest are sent instead. So ‖C(x) − x‖²
≤ (1 − k/(2d))‖x‖².
Bits: those of the values and of their indices; the declared size is that of 2k elements.

Limits: a vector of up to 65,000 elements is its own sample; there it is top-k with all elements
that equal the k-th. It avoids the exact selection of top-k, but saves little time. With
`per_layer`, each layer has a bound of its own.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
sampled as in Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from typing import ClassVar

from torch import Tensor

from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.kernels import estimate_threshold, indices_reaching, largest_indices
from ashl.compression.payload import Parts
from ashl.compression.sparse import DENSE, Sparsifier, max_nbytes
from ashl.option import option


@option
class SingleThreshold(Sparsifier):
    """Sends about a given fraction of the elements."""

    code: ClassVar[int] = 55
    promises: ClassVar[Traits] = Traits(contraction=True, variable=True)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        k = self.num_selected(context.ratio, len(x))
        bound = estimate_threshold(x, k)
        indices = indices_reaching(x, bound) if bound > 0 and k < len(x) else x[:0]
        if not k <= 2 * len(indices) <= 4 * k:
            indices = largest_indices(x, k)
        return self.format.pack(x, len(indices), lambda: indices, context)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return max_nbytes(self.values, self.indices, min(d, 2 * self.num_selected(ratio, d)), d)

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.num_selected(ratio, d)
        if self.format.form(k, d) == DENSE:
            return 0.0
        return self.format.bound(k if k == d else -(-k // 2), d)

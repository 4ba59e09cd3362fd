"""Unbiased subsampling: send random elements, scaled up by d/k.

Use when: an unbiased sparse codec is needed for a proof or a baseline.
Avoid when: the density is below 0.25: its variance is then too large to train.
Alternatives: `random_mask` with error feedback; `random_dropping`.

Rule: C(x)_j = d/k · x_j at k indices drawn without replacement, else 0. E C(x) = x, and E‖C(x) −
x‖² = (d/k − 1)‖x‖². With `shared`, all workers use the same indices; with values=fp32, too, an
all-reduce sums payloads in flight. Otherwise each worker draws its own, which averages the error
over the workers.
Bits: those of k values, and 64 for the seed.

Limits: ratio = 1 is no compression. On average, C(x) is longer than x, so error feedback would
diverge and is refused. The learning rate must be small enough for a variance of d/k: `random_mask`
with error feedback tolerates larger ones.

Source: Konečný and Richtárik, "Randomized Distributed Mean Estimation: Accuracy vs. Communication",
2018.
"""

from typing import ClassVar

from torch import Tensor

from ashl.compression.coding import value_bound
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.payload import Parts
from ashl.compression.sparse import DENSE, Seeded, unbiased_bound
from ashl.option import option


@option
class Subsampling(Seeded):
    """Random elements, scaled to be unbiased."""

    code: ClassVar[int] = 52
    shared: bool

    @property
    def traits(self) -> Traits:
        exact = self.values == "fp32"
        return Traits(unbiased=exact, linear=exact and self.shared)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        rng = context.shared_stream() if self.shared else context.stream()
        return self.pack_drawn(
            x, rng, context, scale=len(x) / self.num_selected(context.ratio, len(x))
        )

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.num_selected(ratio, d)
        if self.format.form(k, d) == DENSE:
            return 0.0
        return unbiased_bound(k, d, value_bound(self.values, k))

"""FedYogi: FedAdam with a mean square that decreases slowly, so that steps do not grow suddenly.

Use when: updates may shrink suddenly, and Adam's steps would then grow.
Avoid when: coordinates are of similar size.
Alternatives: `adam`; `nesterov`.

Rule: with Δ = Σ c_i·Δ_i, m ← β1·m + (1 − β1)·Δ and v ← v − (1 − β2)·Δ²·sign(v − Δ²). Then w ← w +
lr·m/(√v + τ), from m = 0 and v = τ². After updates that are much smaller than those before, v
decreases by a fraction of Δ² and not of v.

Limits: the first merge is FedAdam's if |Δ| is far above τ. β1 = 0 is `average` with lr = 2·τ far
above |Δ|.
Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (β1 = 0.9, β2 =
0.99); after Zaheer et al., "Adaptive Methods for Nonconvex Optimization", NeurIPS 2018.
"""

import torch
from torch import Tensor

from ashl.option import option
from ashl.outer.adam import FedAdam


@option
class FedYogi(FedAdam):
    """Steps by the mean update over the root of a mean square with additive changes."""

    def _squares(self, second: Tensor, update: Tensor) -> Tensor:
        square = update.square()
        return torch.sub(second, square.mul_(torch.sign(second - square)), alpha=1 - self.beta2)

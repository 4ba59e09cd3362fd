"""SlowMo: slow momentum of the merged updates, in units of the inner learning rate.

Rule: with Δ = Σ c_i·Δ_i and γ the inner learning rate, u ← β·u + Δ/γ, then w ← w + α·γ·u. So a rate
that falls takes the momentum of before down with it. Kept is m = γ·u, hence m ← β·(γ/γ₋)·m + Δ with
γ₋ the rate at the merge before, and w ← w + α·m. The workers' own moments are kept over a merge,
one of the paper's three strategies. Where pushes come one at a time, γ is that of the samples
applied so far, not the one that a late push was made with.

Limits: β = 0 and α = 1 is `average`; at a constant inner learning rate it is `heavy_ball` with lr =
α.
Source: Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD
with Slow Momentum", ICLR 2020 (α = 1, β from 0.4 to 0.8).
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class SlowMo(Outer):
    """Momentum that follows the inner learning rate."""

    linear: ClassVar[bool] = True
    alpha: Rate
    beta: Decay

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        momentum = update
        if moments is not None and moments[1] > 0:  # a rate of zero has left nothing behind
            momentum = torch.add(update, moments[0], alpha=self.beta * (inner_lr / moments[1]))
        return (momentum, inner_lr), torch.add(params, momentum, alpha=self.alpha)

"""SlowMo: slow momentum of the merged updates, in units of the inner learning rate.

Use when: the inner learning rate decays, and the outer momentum should follow it.
Avoid when: the rate is constant: `heavy_ball` is the same.
Alternatives: `heavy_ball`; `nesterov`.

Rule: with Δ = Σ c_i·Δ_i and the inner learning rate γ, u ← β·u + Δ/γ, then w ← w + α·γ·u. So a
decaying γ also reduces the effect of earlier momentum. The state is m = γ·u: m ← β·(γ/γ₋)·m + Δ,
with γ₋ the rate at the merge before, and w ← w + α·m. The workers keep their own moments over a
merge, one of the paper's three strategies. If pushes arrive one by one, γ is the rate for the
samples applied so far, rather than the rate of the stale push.

Limits: β = 0 and α = 1 is `average`. With a constant inner learning rate it is `heavy_ball` with lr
= α.
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
        if moments is not None and moments[1] > 0:  # a rate of zero gave no update
            momentum = torch.add(update, moments[0], alpha=self.beta * (inner_lr / moments[1]))
        return (momentum, inner_lr), torch.add(params, momentum, alpha=self.alpha)

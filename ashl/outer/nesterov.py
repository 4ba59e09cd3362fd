"""Nesterov momentum of the merged updates: DiLoCo's outer optimizer.

Use when: there are rounds of many local steps with AdamW: DiLoCo.
Avoid when: pushes are merged one by one, or H is small.
Alternatives: `delayed_nesterov` without a barrier; `heavy_ball`; `average`.

Rule: with Δ = Σ c_i·Δ_i, m ← μ·m + Δ, then w ← w + lr·(Δ + μ·m). That is
torch.optim.SGD(nesterov=True) on the pseudo-gradient −Δ. DiLoCo has AdamW on the workers, H of 50
to 500, lr = 0.7 and μ = 0.9. For pushes that arrive one by one take `delayed_nesterov`: here each
of n pushes is a step of the momentum.

Limit: μ = 0 and lr = 1 is `average`.
Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105; first, as BMUF-NBM, Chen and Huo, ICASSP 2016.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class Nesterov(Outer):
    """Momentum of the merged updates, with a look-ahead."""

    linear: ClassVar[bool] = True
    lr: Rate
    momentum: Decay

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        momentum = update if moments is None else torch.add(update, moments[0], alpha=self.momentum)
        ahead = torch.add(update, momentum, alpha=self.momentum)
        return (momentum,), torch.add(params, ahead, alpha=self.lr)

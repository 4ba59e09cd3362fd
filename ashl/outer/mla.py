"""MLA, momentum look-ahead: workers are given the model as momentum is about to move it, so that
they are less behind.

Rule: with Δ = Σ c_i·Δ_i, m ← μ·m + (1 − μ)·Δ, then w ← w + lr·(Δ + μ·m). In the paper's words θ ← θ
+ d + lr·Δ with Δ made at θ + d, d = lr·μ·m; kept and handed out here is w = θ + d, the point ahead.
Unlike `nesterov`, each update comes into the momentum with 1 − μ alone, as pushes that come one at
a time need. For asynchronous modes, as sync=asp.

Limit: μ = 0 and lr = 1 is `average`. Source: Ajanthan et al., "Momentum Look-Ahead for Asynchronous
Distributed Low-Communication Training", MCDC workshop at ICLR 2025. The paper was not at hand: the
rule is as two descriptions of it agree.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class MLA(Outer):
    """A running mean that steps ahead."""

    linear: ClassVar[bool] = True
    lr: Rate
    momentum: Decay

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        before = update * 0.0 if moments is None else moments[0]
        mean = torch.lerp(before, update, 1 - self.momentum)
        return (mean,), torch.add(
            params, torch.add(update, mean, alpha=self.momentum), alpha=self.lr
        )

"""Heavy-ball momentum of the merged updates: BMUF, and FedAvgM.

Use when: a simple server momentum over rounds of local steps is wanted.
Avoid when: pushes are merged one by one: n pushes multiply the momentum.
Alternatives: `nesterov`; `slowmo` if the inner rate decays.

Rule: with Δ = Σ c_i·Δ_i, m ← μ·m + Δ, then w ← w + lr·m. In BMUF lr is the block learning rate ζ
and μ the block momentum η; BMUF stores lr·m instead of m.

Limits: μ = 0 and lr = 1 is `average`. With a constant inner learning rate it is `slowmo` with α =
lr. The variant with look-ahead (BMUF-NBM) is `nesterov`.
Source: Chen and Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training
with Intra-block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016; at a
server, Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", arXiv 1909.06335.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class HeavyBall(Outer):
    """Momentum of the merged updates."""

    linear: ClassVar[bool] = True
    lr: Rate
    momentum: Decay

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        momentum = update if moments is None else torch.add(update, moments[0], alpha=self.momentum)
        return (momentum,), torch.add(params, momentum, alpha=self.lr)

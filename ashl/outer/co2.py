"""CO2's outer step: momentum of updates that land late, with a penalty on the gap and a bound on
the momentum.

Rule: with Δ = Σ c_i·Δ_i, m ← β·m + Δ/Λ, each element of m is cut to [−clip, clip], and w ← w +
lr·m. With overlap=delayed, by which Δ lands one round late, it is CO2; Λ > 1 trusts a late update
less, and the cut keeps momentum from running away with it. As in the released code Λ is given; one
that follows the gap between the models of successive rounds, as the paper's name for it suggests,
could not be verified and is not built. In the released code the cut has no effect, since what it
returns is thrown away; here it has.

Limits: Λ = 1 without a cut is `heavy_ball`, and with lr = 1 and β = 0 `average`.
Source: Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation
Overlap", ICLR 2024; the released code, weigao266/fairscale-CO2 of April 2024, whose defaults these
are.
"""

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class CO2(Outer):
    """Momentum of late updates, held in check."""

    lr: Rate
    momentum: Decay
    penalty: Rate
    clip: Rate | None

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        momentum = update / self.penalty
        if moments is not None:
            momentum = momentum.add_(moments[0], alpha=self.momentum)
        if self.clip is not None:
            momentum = momentum.clamp_(-self.clip, self.clip)
        return (momentum,), torch.add(params, momentum, alpha=self.lr)

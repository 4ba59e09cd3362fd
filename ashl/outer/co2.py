"""CO2's outer step: momentum of one-step-delayed updates, with a staleness penalty and a bound on
the momentum.

Use when: exchanges are delayed by a round (`overlap=delayed`), and momentum should account for it.
Avoid when: exchanges are not delayed.
Alternatives: `nesterov`; `slowmo`.

Rule: with Δ = Σ c_i·Δ_i, m ← β·m + Δ/Λ, with Λ = `penalty`. Each element of m is clipped to [−clip,
clip]. Then w ← w + lr·m. With overlap=delayed, which applies Δ one round late, it is CO2. Λ > 1
reduces the weight of delayed updates, and clipping keeps the momentum from growing without bound.

Limits: Λ = 1 without clipping is `heavy_ball`; with lr = 1 and β = 0 also `average`.
Source: Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation
Overlap", ICLR 2024; the released code, weigao266/fairscale-CO2 of April 2024, with the same
defaults.
Differs: Λ is a parameter, as in the released code. A Λ that follows the gap between successive
models, as the paper's term suggests, could not be verified and is not implemented. In the released
code clipping has no effect, because its result is discarded; here it has.
"""

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class CO2(Outer):
    """Momentum of delayed updates, with a penalty and clipping."""

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

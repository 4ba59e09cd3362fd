"""MLA, momentum look-ahead: workers receive the model after the expected next momentum step, which
reduces their staleness.

Use when: asynchronous local steps of a language model, where Nesterov momentum overshoots.
Avoid when: there is a barrier.
Alternatives: `heloco` for skewed shards; `delayed_nesterov`.

Rule: with Δ = Σ c_i·Δ_i, m ← μ·m + (1 − μ)·Δ, then w ← w + lr·(Δ + μ·m). In the paper's notation θ
← θ + d + lr·Δ, with Δ computed at θ + d and d = lr·μ·m. The server stores and sends the point
ahead, w = θ + d. Unlike `nesterov`, an update enters the momentum with the weight 1 − μ, as pushes
that arrive one by one need. It is for asynchronous modes such as sync=asp.

Limit: μ = 0 and lr = 1 is `average`.
Source: Ajanthan et al., "Momentum Look-Ahead for Asynchronous Distributed Low-Communication
Training", MCDC workshop at ICLR 2025. The paper was not available to us: the rule is that of two
descriptions, which agree.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.outer.contract import Moments, Outer, Rate


@option
class MLA(Outer):
    """A running mean of updates, with a look-ahead."""

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

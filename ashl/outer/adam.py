"""FedAdam: Adam on the merged updates.

Use when: coordinates of updates differ much in size, as under Adam on the workers.
Avoid when: merges are few: the mean square then says little.
Alternatives: `yogi`; `nesterov`.

Rule: with Δ = Σ c_i·Δ_i, m ← β1·m + (1 − β1)·Δ and v ← β2·v + (1 − β2)·Δ². Then w ← w + lr·m/(√v +
τ), from m = 0 and v = τ². As in the paper there is no bias correction, unlike `optimizer=adam`.

Limits: a coordinate that always moves by Δ has m = (1 − β1^t)·Δ and v = β2^t·τ² + (1 − β2^t)·Δ²
after t merges. β1 = β2 = 0 is w ← w + lr·Δ/(|Δ| + τ): steps of ±lr if |Δ| is far above τ, and
`average` with lr = τ far above |Δ|.
Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (β1 = 0.9, β2 =
0.99).
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ashl.optimizer.schedule import Decay
from ashl.option import Positive, option
from ashl.outer.contract import Moments, Outer, Rate


@option
class FedAdam(Outer):
    """Steps by the mean update over the root of its mean square."""

    lr: Rate
    beta1: Decay
    beta2: Decay
    tau: Annotated[Positive, Field(le=1e18)]  # τ² has to be a finite float32

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        first, second = (
            (update * 0.0, torch.full_like(update, self.tau**2)) if moments is None else moments
        )
        first = first * self.beta1 + update * (1 - self.beta1)
        second = self._squares(second, update)
        return (first, second), torch.addcdiv(
            params, first, second.sqrt().add_(self.tau), value=self.lr
        )

    def _squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Return the new mean square of the updates."""
        return torch.mul(second, self.beta2).addcmul_(update, update, value=1 - self.beta2)

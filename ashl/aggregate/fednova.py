"""FedNova: each update is normalised by the work behind it, so that unequal H introduces no bias.

Rule: w ← w + scale·τ_eff·Σ_i p_i·Δ_i / a_i. p_i = n_i/n is the worker's share of the data and τ_eff
= Σ_j p_j·a_j. a_i is the sum of the coefficients that worker i's H steps give its gradients: H for
plain SGD, and with a momentum ρ that starts from zero at each pull [H − ρ(1 − ρ^H)/(1 − ρ)]/(1 −
ρ). In this package the momentum stays with the worker. Every gradient then counts 1/(1 − ρ) in the
long run for every H, and `momentum` = 0 is the right choice. With small steps the model converges
to the minimum of Σ_i n_i/n·f_i.

Limit: equal H gives `data_share`. With `momentum` = 0, shards that follow a planned H, D_i = H_i /
Σ_j H_j, give `uniform` with n·Σ_j H_j²/(Σ_j H_j)² times its scale.
Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020.
"""

from collections.abc import Sequence
from typing import ClassVar

from ashl.aggregate.weighted import Weighted
from ashl.optimizer.schedule import Decay
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class FedNova(Weighted):
    """Weights by data share over local work.

    τ_eff sets the length of a step, so weights need not add up to 1.
    """

    normalised: ClassVar[bool] = False
    momentum: Decay

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        total = sum(w.data_share for w in workers)
        shares = [w.data_share / total for w in workers]
        work = [local_work(w.local_steps, self.momentum) for w in workers]
        effective = sum(p * a for p, a in zip(shares, work, strict=True))
        return [p * effective / a for p, a in zip(shares, work, strict=True)]


def local_work(steps: int, momentum: float) -> float:
    """Return ‖a‖₁ of H steps with momentum ρ: the sum over all steps of 1 + ρ + ρ² + …"""
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)

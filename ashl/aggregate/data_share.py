"""FedAvg's and ASHL's rule: each push counts by its worker's share of the data.

Rule: w ← w + scale·n_i/n·Δ_i with n_i the samples in the worker's shard, whatever
`dataset.partition` made of it.

Where H is planned and shards follow it, n_i/n = D_i = H_i / Σ_j H_j: with equal batches `samples`
and `mean` are then this rule. Since Δ_i already grows with H_i, a worker's mean gradient counts by
H_i²: see `fednova` and `uniform` for rules that count work once.

Source: Shen et al., "ASHL", IEEE TC 2024, Algorithm 3; McMahan et al., "Communication-Efficient
Learning of Deep Networks", AISTATS 2017 (n_k/n).
"""

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class DataShare(Weighted):
    """Weighted by the samples that a worker has."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [w.data_share for w in workers]

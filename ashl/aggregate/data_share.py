"""FedAvg's and ASHL's rule: each push counts by its worker's share of the data.

Rule: w ← w + scale·n_i/n·Δ_i, with n_i of the n samples in the worker's shard, for every
`dataset.partition`. If shards follow a planned H, n_i/n = D_i = H_i / Σ_j H_j; with equal batches
`samples` and `mean` are then the same rule. Since Δ_i already grows with H_i, a worker's mean
gradient then counts by H_i². `fednova` and `uniform` count work once.

Source: Shen et al., "ASHL", IEEE TC 2024, Algorithm 3; McMahan et al., "Communication-Efficient
Learning of Deep Networks", AISTATS 2017 (n_k/n).
"""

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class DataShare(Weighted):
    """Weights by the samples of a worker's shard."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [w.data_share for w in workers]

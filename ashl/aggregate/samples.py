"""Each push counts by the samples behind it: batch·H.

Rule: w ← w + scale·b_i·H_i / Σ_j b_j·H_j · Δ_i. `mean` with its default weights is the same rule;
so is `data_share` if batches are equal and shards follow a planned H.

Source: Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020 (weights by batch; here H steps of a
batch count H times).
"""

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Samples(Weighted):
    """Weights by the samples of a push."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [float(w.batch * w.local_steps) for w in workers]

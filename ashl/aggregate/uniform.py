"""Every push has the same weight: ADSP's rule.

Rule: w ← w + scale·Δ_i / n. So a worker's mean gradient counts by H_i.

Source: Hu, Wang and Wu, "ADSP", AAAI 2020 (a commit is applied with η = 1/M).
"""

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Uniform(Weighted):
    """Weights of 1/n."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [1.0] * len(workers)

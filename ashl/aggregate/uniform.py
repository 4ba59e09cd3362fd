"""Every push counts alike: ADSP's rule.

Rule: w ← w + scale·Δ_i / n. A worker's mean gradient counts by H_i.

Source: Hu, Wang and Wu, "ADSP", AAAI 2020 (the commit is applied with η = 1/M).
"""

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Uniform(Weighted):
    """Weighted by 1/n."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [1.0] * len(workers)

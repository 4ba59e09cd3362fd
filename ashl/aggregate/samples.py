"""Each push counts by the samples that its worker's plan lets it see: batch·H.

Rule: w ← w + scale·b_i·H_i / Σ_j b_j·H_j · Δ_i.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Samples(Weighted):
    """Weighted by samples."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [float(w.batch * w.local_steps) for w in workers]

"""ASHL's rule: each push counts by its worker's share of the data.

Rule: w ← w + scale·D_i·Δ_i with D_i = H_i / Σ_j H_j. Since Δ_i already grows with H_i, a worker's mean gradient counts
by H_i²: see `fednova` and `uniform` for rules that count work once.

Source: Shen et al., "ASHL", IEEE TC 2024, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class DataShare(Weighted):
    """Weighted by the plan's shares."""

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        return [w.data_share for w in workers]

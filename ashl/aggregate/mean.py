"""The weighted mean, at a barrier or one push at a time.

Rule: at a barrier, update = scale·Σ_i w_i·x_i over its members in rank order, with w_i renormalised over them. One at a
time, update = scale·w_i·x_i at each push, with Σ w_i = 1 over all workers. The weights are the samples behind a push
(batch·H), which makes n workers of batch b one worker of batch n·b, or the workers' planned shares of the data.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017 (weights by samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ashl.option import Positive, option
from ashl.plan.plan import WorkerPlan
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage import Push, Stage


@option
class Mean:
    """Weighted by samples or by data share."""

    scale: Positive
    weights: Literal["samples", "data_share"]

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        if self.weights == "samples":
            return [float(w.batch * w.local_steps) for w in workers]
        return [w.data_share for w in workers]

    def fold(self, stage: Stage, buffer: tuple[Push, ...], push: Push) -> tuple[tuple[Push, ...], Any]:
        """Order of arrival plays no part at a barrier, so the result is bitwise repeatable."""
        if len(buffer) + 1 < stage.quorum:
            return (*buffer, push), None
        members = sorted((*buffer, push), key=lambda p: p.worker)
        weights = stage.weights(tuple(p.worker for p in members))
        return (), sum_in_rank_order([p.body * w for p, w in zip(members, weights, strict=True)])

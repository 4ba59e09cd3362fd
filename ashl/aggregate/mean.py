"""The weighted mean, at a barrier or one push at a time.

Rule: w_i proportional to the samples behind a push (batch·H), which makes n workers of batch b one worker of batch n·b,
or to the workers' planned shares of the data.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017 (weights by samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Mean(Weighted):
    """Weighted by samples or by data share."""

    weights: Literal["samples", "data_share"]

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        if self.weights == "samples":
            return [float(w.batch * w.local_steps) for w in workers]
        return [w.data_share for w in workers]

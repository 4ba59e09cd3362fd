"""The weighted mean, at a barrier or one push at a time.

Rule: w_i proportional to the samples behind a push (batch·H), which makes n workers of batch b one
worker of batch n·b: `samples`; or to those that the worker has, n_i: `data_share`. The two are one
where batches are equal and shards follow a planned H.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017, where
each worker passes over its own samples equally often, so that the two are one, too.
"""

from collections.abc import Sequence
from typing import Literal

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Mean(Weighted):
    """Weighted by the samples of a push or of a shard."""

    weights: Literal["samples", "data_share"]

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        if self.weights == "samples":
            return [float(w.batch * w.local_steps) for w in workers]
        return [w.data_share for w in workers]

"""Weighted mean, of all pushes at a barrier or of one push at a time.

Rule: w ← w + scale·Σ_i w_i·Δ_i. With weights=samples w_i is proportional to the samples behind a
push (batch·H), so that n workers of batch b equal one worker of batch n·b. With weights=data_share
w_i is proportional to the samples n_i of the worker's shard. Both are equal if batches are equal
and shards follow a planned H.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017. There
each worker passes over its own samples equally often, so both are equal too.
"""

from collections.abc import Sequence
from typing import Literal

from ashl.aggregate.weighted import Weighted
from ashl.option import option
from ashl.plan.plan import WorkerPlan


@option
class Mean(Weighted):
    """Weights by the samples of a push or of a shard."""

    weights: Literal["samples", "data_share"]

    @property
    def needs(self) -> dict[str, str]:
        guards = ("staleness_discount", "clip_norm", "max_staleness")
        changed = [key for key in guards if getattr(self, key) is not None]
        changed += ["scale"] if self.scale != 1 else []
        return super().needs | {"weights": changed[0]} if changed else {}

    def weigh(self, workers: Sequence[WorkerPlan]) -> list[float]:
        if self.weights == "samples":
            return [float(w.batch * w.local_steps) for w in workers]
        return [w.data_share for w in workers]

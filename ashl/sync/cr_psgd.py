"""CR-PSGD: a barrier at every step, and batches that grow from one to the next, so that rounds
become few.

Rule: step t has b_i ← ⌊ρ^t·B_i⌋ samples of worker i, at most `max_batch`, or all that it has; w ← w
− γ·Σ_i b_i·g_i / Σ_j b_j. T samples take O(log T) rounds instead of O(T): as steps near the
optimum, they need less noise and not more steps. A batch that reaches the end of a shard goes on at
its start.

Rounding starts from B_i each time, so that a batch of one grows as well: ⌊ρ·⌊ρ·B⌋⌋ would stay at 1
below ρ = 2.

Limit: ρ = 1 is BSP. Gradients alone are exchanged, at a server or under all-reduce. Source: Yu and
Jin, "On the Computation and Communication Complexity of Parallel SGD with Dynamic Batch Sizes for
Stochastic Non-Convex Optimization", ICML 2019, Algorithm 1.
"""

import math
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.option import Count, Number, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


class Growth(NamedTuple):
    """Where the growth stands: t, the merges so far, and the samples that were applied when t was
    0.
    """

    t: int = 0
    version: int = 0
    since: int = 0


@option
class CRPSGD(BarrierRule, StepRule):
    """A barrier at every step, batches that grow."""

    exchange: ClassVar[str] = "gradient"
    resizes: ClassVar[bool] = True  # batches change, so weights have to follow the samples
    growth: Annotated[float, Number, Field(ge=1, le=1e6)]
    max_batch: Count | None

    def begin(self, stage: Stage, progress: Progress) -> Growth:
        return Growth(0, progress.version, progress.samples)

    def on_rescale(self, stage: Stage, state: Growth, progress: Progress) -> Growth:
        return state

    def observe(self, stage: Stage, state: Growth, progress: Progress, push: Push) -> Growth:
        return (
            state
            if progress.version == state.version
            else state._replace(t=state.t + 1, version=progress.version)
        )

    def next_assignment(
        self, stage: Stage, state: Growth, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=1, batch=self._batch(stage, state.t, rank))

    def observe_round(
        self, stage: Stage, state: Growth, progress: Progress, report: RoundReport
    ) -> Growth:
        return state._replace(t=state.t + 1, version=progress.version)

    def in_round(self, stage: Stage, state: Growth, progress: Progress) -> Stage:
        return stage.with_batches(
            tuple(self._batch(stage, state.t, rank) for rank in range(stage.num_workers))
        )

    def _batch(self, stage: Stage, t: int, rank: int) -> int:
        """⌊ρ^t·B_i⌋, or the most that it may be; never less than at first."""
        first = stage.worker(rank).batch
        most = max(
            first, stage.trainer.shard_size(rank) if self.max_batch is None else self.max_batch
        )
        return (
            most
            if t * math.log(self.growth) >= math.log(most / first)
            else int(first * self.growth**t)
        )

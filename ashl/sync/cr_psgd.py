"""CR-PSGD: synchronous steps with batches that grow from step to step, so that few rounds are
needed.

Use when: a round costs much more than a gradient, and gradient noise limits training.
Avoid when: the distance to a minimum limits training: large batches then waste samples.
Alternatives: `local_sgd`; `cr_psgd_catalyst` for non-convex losses.

Rule: in step t worker i computes its gradient on b_i = ⌊ρ^t·B_i⌋ samples. b_i is at most
`max_batch`, or the size of its shard without one. Then w ← w − γ·Σ_i b_i·g_i / Σ_j b_j. T samples
take O(log T) rounds instead of O(T), because steps near the optimum need less noise rather than
more steps. A batch that reaches the end of a shard continues at its start.
Waiting: every worker waits for all others at each step.

Limits: ρ = 1 is BSP. Only gradients are exchanged, through a server or by all-reduce.
Source: Yu and Jin, "On the Computation and Communication Complexity of Parallel SGD with Dynamic
Batch Sizes for Stochastic Non-Convex Optimization", ICML 2019, Algorithm 1.
Differs: in the paper a batch has no upper limit, and every sample is new. The recursion b ← ⌊ρ·b⌋
would keep a batch of one at one for ρ < 2, so b_i is rounded from ρ^t·B_i.

Family: synchronous steps.
Status: reproduction.
"""

import math
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.option import Count, Number, option
from ashl.plan.plan import WorkerPlan
from ashl.stage.contract import StageConfig
from ashl.stage.members import with_batches
from ashl.stage.progress import Progress
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


class Growth(NamedTuple):
    """State of the growth."""

    t: int = 0
    version: int = 0  # merges of the run so far
    since: int = 0  # samples that the run had applied at t = 0


@option
class CRPSGD(BarrierRule, StepRule):
    """A barrier at every step, with growing batches."""

    exchange: ClassVar[str] = "gradient"
    resizes: ClassVar[bool] = True  # batches change, so weights have to follow the samples
    growth: Annotated[float, Number, Field(ge=1, le=1e6)]  # ρ
    max_batch: Count | None

    def begin(self, stage: StageConfig, progress: Progress) -> Growth:
        return Growth(0, progress.version, progress.samples)

    def observe(self, stage: StageConfig, state: Growth, progress: Progress, push: Push) -> Growth:
        if progress.version == state.version:  # no merge since
            return state
        return state._replace(t=state.t + 1, version=progress.version)

    def next_assignment(
        self, stage: StageConfig, state: Growth, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=1, batch=self._batch(stage, state.t, rank))

    def observe_round(
        self, stage: StageConfig, state: Growth, progress: Progress, report: RoundReport
    ) -> Growth:
        return state._replace(t=state.t + 1, version=progress.version)

    def in_round(
        self, stage: StageConfig, state: Growth, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        batches = (self._batch(stage, state.t, rank) for rank in stage.workers)
        return with_batches(stage.plan.workers, batches)

    def _batch(self, stage: StageConfig, t: int, rank: int) -> int:
        """Return ⌊ρ^t·B_i⌋, at most the largest allowed batch and at least B_i."""
        first = stage.worker(rank).batch
        limit = stage.trainer.shard_size(rank) if self.max_batch is None else self.max_batch
        most = max(first, limit)
        if t * math.log(self.growth) >= math.log(most / first):  # ρ^t itself might overflow
            return most
        return int(first * self.growth**t)

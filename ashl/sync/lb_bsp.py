"""LB-BSP: synchronous steps, with each worker's batch in proportion to its speed.

Use when: workers are unequal, exchanges are short, and exact steps are wanted; with
`aggregate=samples`.
Avoid when: batches would become very small or too large for memory.
Alternatives: `bsp` for equal workers; `local_sgd` with planned H for slow links.

Rule: before each step b_i ← (Σ_j b_j)·v_i / Σ_j v_j in whole samples, at least 2. v_i is the
measured speed of worker i in samples per second, as a moving average. So b_i/v_i is equal for all
workers, and the total batch does not change. Then w ← w − γ·Σ_i b_i·g_i / Σ_j b_j, weighted by
samples (`aggregate=mean` or `samples`). A step with a constant part is balanced too, because v_i
follows b_i/t_i until all step times t_i are equal.
Waiting: every worker waits for all others at each step, at a server or under all-reduce. Under
all-reduce the workers exchange their step times in a small sum, one number each.

Limits: equal speeds and equal batches are BSP. Shards keep their sizes, so a fast worker passes
over its own shard more often; that is harmless if all shards have the same distribution
(`dataset.partition=iid`). Transfers are not balanced, as in the paper: where they dominate, workers
still wait for the slowest link.
Source: Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
Environments", SoCC 2020.
Differs: the paper predicts speeds by a recurrent network; here they are a moving average.

Family: synchronous steps.
Status: situational.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.data.partition import apportion
from ashl.option import option
from ashl.plan.plan import WorkerPlan
from ashl.stage.contract import StageConfig
from ashl.stage.members import with_batches
from ashl.stage.progress import Progress
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule, ServerState

LEAST = 2  # smallest batch in samples: BatchNorm needs two


@dataclass
class Balance:
    """Measured speeds and the batches that follow from them, by worker."""

    speeds: dict[int, float] = field(default_factory=dict)  # samples per second
    batches: dict[int, int] = field(default_factory=dict)


@option
class LBBSP(BarrierRule, StepRule):
    """A barrier at every step, with batches by speed."""

    exchange: ClassVar[str] = "gradient"
    resizes: ClassVar[bool] = True  # batches change, so weights have to follow the samples
    tells: ClassVar[bool] = True
    alpha: Annotated[float, Field(gt=0, le=1)]

    def begin(self, stage: StageConfig, progress: Progress) -> Balance:
        return Balance()

    def observe(
        self, stage: StageConfig, state: Balance, progress: Progress, push: Push
    ) -> Balance:
        """Update the worker's speed, and all batches once all workers wait."""
        speed = push.samples / (push.steps * push.step_s)
        known = state.speeds.get(push.worker, speed)
        state.speeds[push.worker] = known + self.alpha * (speed - known)
        self._share_out(stage, state, progress)
        return state

    def observe_round(
        self, stage: StageConfig, state: Balance, progress: Progress, report: RoundReport
    ) -> Balance:
        speeds = dict(state.speeds)
        present = [rank for rank, step_s in enumerate(report.step_s) if step_s]
        for rank in present:
            speed = (state.batches.get(rank) or stage.worker(rank).batch) / report.step_s[rank]
            known = speeds.get(rank, speed)
            speeds[rank] = known + self.alpha * (speed - known)
        sizes = share_out(whole_batch(stage), [speeds[rank] for rank in present])
        return Balance(speeds, dict(zip(present, sizes, strict=True)))

    def in_round(
        self, stage: StageConfig, state: Balance, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        planned = enumerate(stage.plan.workers)
        batches = (state.batches.get(rank, worker.batch) for rank, worker in planned)
        return with_batches(stage.plan.workers, batches)

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        """Share out the total batch among the running workers once all of them wait."""
        self._share_out(stage, state.rule_state, state.progress)

    def _share_out(self, stage: StageConfig, state: Balance, progress: Progress) -> None:
        if progress.waiting and len(progress.waiting) == progress.num_present:
            present = sorted(progress.waiting)
            sizes = share_out(whole_batch(stage), [state.speeds[worker] for worker in present])
            state.batches = dict(zip(present, sizes, strict=True))

    def next_assignment(
        self, stage: StageConfig, state: Balance, progress: Progress, rank: int
    ) -> Assignment:
        # 0, the planned batch, for a worker that has just joined
        return Assignment(local_steps=1, batch=state.batches.get(rank, 0))


def whole_batch(stage: StageConfig) -> int:
    """Return the samples of all workers in a step."""
    return sum(worker.batch for worker in stage.plan.workers)


def share_out(total: int, speeds: Sequence[float]) -> list[int]:
    """Return batches in proportion to speed that add up to `total`, each at least `LEAST` if
    `total` suffices.
    """
    sizes = apportion(total, speeds)
    least = min(LEAST, total // len(speeds))
    while sizes.min() < least:
        sizes[np.argmin(sizes)] += 1
        sizes[np.argmax(sizes)] -= 1
    return sizes.tolist()

"""LB-BSP: a barrier at every step, and each worker gets as large a batch as it can do in the same
time.

Rule: before each step b_i ← (Σ_j b_j)·v_i / Σ_j v_j in whole samples, with v_i the samples per
second that worker i was seen to compute, as a moving average; so b_i/v_i is the same for all and
the whole batch stays what it was. The gradients are weighted by the samples behind them
(`aggregate=mean` or `samples`), w ← w − γ·Σ_i b_i·g_i / Σ_j b_j. A step that also has a constant
part is balanced all the same, since v_i follows b_i/t_i until all t_i are equal. Shards stay as
they were: a fast worker walks through its own more often, which is harmless while shards are alike
(`dataset.partition=iid`).

At a server, or under all-reduce, where the workers tell each other what a step took them by a sum
of one number each.

Limit: equal speeds is BSP. Departs from the paper in that the speed is not forecast by a recurrent
network, and that links are not balanced (the paper's neither): where transfers dominate, their
differences still are waited for.
Source: Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
Environments", SoCC 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.data.partition import apportion
from ashl.option import option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule

LEAST = 2  # samples that a worker gets at least: BatchNorm needs two


@dataclass
class Balance:
    """How fast workers are, and what they get for it."""

    speeds: dict[int, float] = field(default_factory=dict)  # samples per second
    batches: dict[int, int] = field(default_factory=dict)


@option
class LBBSP(BarrierRule, StepRule):
    """A barrier at every step, batches by speed."""

    exchange: ClassVar[str] = "gradient"
    resizes: ClassVar[bool] = True  # batches change, so weights have to follow the samples
    tells: ClassVar[bool] = True
    alpha: Annotated[float, Field(gt=0, le=1)]

    def begin(self, stage: Stage, progress: Progress) -> Balance:
        return Balance()

    def observe(self, stage: Stage, state: Balance, progress: Progress, push: Push) -> Balance:
        """Follow the worker's speed."""
        speed = push.samples / (push.steps * push.step_s)
        known = state.speeds.get(push.worker, speed)
        state.speeds[push.worker] = known + self.alpha * (speed - known)
        return self.on_membership_change(stage, state, progress, push.worker)

    def observe_round(
        self, stage: Stage, state: Balance, progress: Progress, report: RoundReport
    ) -> Balance:
        speeds, present = (
            dict(state.speeds),
            [rank for rank, step_s in enumerate(report.step_s) if step_s],
        )
        for rank in present:
            speed = (state.batches.get(rank) or stage.worker(rank).batch) / report.step_s[rank]
            known = speeds.get(rank, speed)
            speeds[rank] = known + self.alpha * (speed - known)
        sizes = share_out(whole_batch(stage), [speeds[rank] for rank in present])
        return Balance(speeds, dict(zip(present, sizes, strict=True)))

    def in_round(self, stage: Stage, state: Balance, progress: Progress) -> Stage:
        planned = enumerate(stage.plan.workers)
        return stage.with_batches(
            tuple(state.batches.get(rank, worker.batch) for rank, worker in planned)
        )

    def on_membership_change(
        self, stage: Stage, state: Balance, progress: Progress, rank: int
    ) -> Balance:
        """Share out the whole batch to those who are there, once all of them wait."""
        if progress.waiting and len(progress.waiting) == progress.present:
            present = sorted(progress.waiting)
            sizes = share_out(whole_batch(stage), [state.speeds[worker] for worker in present])
            state.batches = dict(zip(present, sizes, strict=True))
        return state

    def next_assignment(
        self, stage: Stage, state: Balance, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(
            local_steps=1, batch=state.batches.get(rank, 0)
        )  # a newcomer's is as planned


def whole_batch(stage: Stage) -> int:
    """Samples of all workers in a step."""
    return sum(worker.batch for worker in stage.plan.workers)


def share_out(total: int, speeds: Sequence[float]) -> list[int]:
    """Whole batches in proportion to speed that add up to `total`, none below `LEAST` where there
    is enough.
    """
    sizes = apportion(total, speeds)
    least = min(LEAST, total // len(speeds))
    while sizes.min() < least:
        sizes[np.argmin(sizes)] += 1
        sizes[np.argmax(sizes)] -= 1
    return sizes.tolist()

"""LB-BSP: a barrier at every step, and each worker gets as large a batch as it can do in the same time.

Rule: before each step b_i ← (Σ_j b_j)·v_i / Σ_j v_j in whole samples, with v_i the samples per second that worker i
was seen to compute, as a moving average; so b_i/v_i is the same for all and the whole batch stays what it was. The
gradients are weighted by the samples behind them (`aggregate=mean` or `samples`), w ← w − γ·Σ_i b_i·g_i / Σ_j b_j.
A step that also has a constant part is balanced all the same, since v_i follows b_i/t_i until all t_i are equal.
Shards stay as they were: a fast worker walks through its own more often, which is harmless while shards are alike
(`dataset.partition=iid`).

Limit: equal speeds is BSP. Departs from the paper in that the speed is not forecast by a recurrent network, and
that links are not balanced (the paper's neither): where transfers dominate, their differences still are waited for.
Source: Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments",
SoCC 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.data.partition import apportion
from ashl.option import option
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.topology.parameter_server import BarrierRule, Orders

LEAST = 2  # samples that a worker gets at least: BatchNorm needs two


@dataclass
class Balance:
    """How fast workers are, and what they get for it."""

    speeds: dict[int, float] = field(default_factory=dict)  # samples per second
    batches: dict[int, int] = field(default_factory=dict)


@option
class LBBSP(BarrierRule):
    """A barrier at every step, batches by speed."""

    exchange: ClassVar[str] = "gradient"
    resizes: ClassVar[bool] = True  # batches change, so weights have to follow the samples
    alpha: Annotated[float, Field(gt=0, le=1)]

    def begin(self, stage: Stage, tally: Tally) -> Balance:
        return Balance()

    def observe(self, stage: Stage, state: Balance, tally: Tally, push: Push) -> Balance:
        """Follow the worker's speed."""
        speed = push.samples / (push.steps * push.step_s)
        known = state.speeds.get(push.worker, speed)
        state.speeds[push.worker] = known + self.alpha * (speed - known)
        return self.changed(stage, state, tally, push.worker)

    def changed(self, stage: Stage, state: Balance, tally: Tally, rank: int) -> Balance:
        """Share out the whole batch to those who are there, once all of them wait."""
        if tally.waiting and len(tally.waiting) == tally.present:
            total = sum(worker.batch for worker in stage.plan.workers)
            present = sorted(tally.waiting)
            sizes = share_out(total, [state.speeds[worker] for worker in present])
            state.batches = dict(zip(present, sizes, strict=True))
        return state

    def steer(self, stage: Stage, state: Balance, tally: Tally, rank: int) -> Orders:
        return Orders(local_steps=1, batch=state.batches.get(rank, 0))  # a newcomer's is as planned


def share_out(total: int, speeds: Sequence[float]) -> list[int]:
    """Whole batches in proportion to speed that add up to `total`, none below `LEAST` where there is enough."""
    sizes = apportion(total, speeds)
    least = min(LEAST, total // len(speeds))
    while sizes.min() < least:
        sizes[np.argmin(sizes)] += 1
        sizes[np.argmax(sizes)] -= 1
    return sizes.tolist()

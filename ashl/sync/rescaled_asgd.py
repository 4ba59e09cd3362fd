"""Rescaled ASGD: asynchronous, with the step of each push in proportion to its worker's cycle time.

Use when: workers are unequal and shards are skewed, and the server has no memory for their
gradients.
Avoid when: shards are equal: `asp` is simpler.
Alternatives: `ringleader`, which keeps a gradient of each worker; `asp`.

Rule: w ← w + c_i·(τ_i/mean_j τ_j)·Δ_i at each arrival. c_i = scale·w_i of `aggregate`, and τ_i is
the time between two pushes of worker i, as a moving average (the newest has a weight of 0.2). Each
worker then moves the model per second in proportion to w_i. In plain ASP the model converges to the
minimum of a sum that weighs the data of fast workers more. The first two pushes of a worker count
as in ASP, also after a rejoin; the mean is over the workers that are there. If H differs, Δ_i grows
with H_i, and `aggregate=fednova` corrects for it: the model then converges to the minimum of Σ_i
n_i/n·f_i, for all speeds and all H.
Waiting: no worker waits for another one. The server buffers nothing.

Limit: equal workers are ASP, up to rounding.
Source: Mahran, Maranjyan and Richtárik, "Rescaled Asynchronous SGD: Optimal Distributed
Optimization under Data and System Heterogeneity", arXiv 2605.13434, 2026, by its abstract only, so
its constants are not verified.
Differs: in the paper τ_i is known and constant; here it is measured.

Family: asynchronous server.
Status: situational.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ashl.aggregate.weighted import Push
from ashl.option import Count, option
from ashl.stage.contract import StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule, ServerState

CYCLE_WEIGHT = 0.2  # weight of a new cycle in the moving average


@dataclass
class Cycles:
    """Push times and cycle times, by worker."""

    pushed_s: dict[int, float] = field(default_factory=dict)  # run time of the last push, seconds
    cycle_s: dict[int, float] = field(default_factory=dict)  # moving average, seconds


@option
class RescaledASGD(ServerRule):
    """ASP with steps in proportion to cycle times."""

    local_steps: Count | Literal["plan"]

    def begin(self, stage: StageConfig, progress: Progress) -> Cycles:
        return Cycles()

    def observe(self, stage: StageConfig, state: Cycles, progress: Progress, push: Push) -> Cycles:
        worker = push.worker
        last = state.pushed_s.get(worker)
        if last is not None:
            known = state.cycle_s.get(worker, progress.now_s - last)
            state.cycle_s[worker] = known + CYCLE_WEIGHT * (progress.now_s - last - known)
        state.pushed_s[worker] = progress.now_s
        return state

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        state.rule_state.pushed_s.pop(rank, None)
        state.rule_state.cycle_s.pop(rank, None)

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        cycles = state.rule_state.cycle_s
        worker = state.progress.latest
        if worker in cycles and (total := math.fsum(cycles.values())):
            update = update * (cycles[worker] * len(cycles) / total)
        return super().step(stage, state, update, lr)

"""Rescaled ASGD: asynchronous, where who comes less often moves the model further each time.

Rule: ASP's, with a step in proportion to the worker's cycle: w ← w + c_i·(τ_i/mean_j τ_j)·Δ_i at
each arrival, with c_i = scale·w_i of `aggregate` and τ_i the time between two pushes of worker i,
as a moving average. Per second each worker then moves the model alike, in proportion to w_i; plain
ASP goes to the minimum of a sum that counts the data of fast workers more. Nothing is buffered. A
worker's first two pushes count as in ASP. Where H differs, Δ_i grows with H_i, and
`aggregate=fednova` takes that out: it then ends where Σ_i n_i/n·f_i is least, whatever speeds and H
are.

Limit: equal workers is ASP, to rounding. Source: Mahran, Maranjyan and Richtárik, "Rescaled
Asynchronous SGD: Optimal Distributed Optimization under Data and System Heterogeneity", arXiv
2605.13434, 2026. Of it the abstract was at hand, so that its constants could not be verified; there
τ_i is known and fixed, and here it is measured.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ashl.aggregate.weighted import Push
from ashl.option import Count, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.parameter_server import ServerRule

FOLLOWS = 0.2  # how much of a new cycle goes into the average


@dataclass
class Cycles:
    """When each worker came last, and how long its cycles take, in seconds."""

    came: dict[int, float] = field(default_factory=dict)
    cycle: dict[int, float] = field(default_factory=dict)


@option
class RescaledASGD(ServerRule):
    """ASP with steps by cycle."""

    local_steps: Count | Literal["plan"]

    def begin(self, stage: Stage, progress: Progress) -> Cycles:
        return Cycles()

    def observe(self, stage: Stage, state: Cycles, progress: Progress, push: Push) -> Cycles:
        worker, last = push.worker, state.came.get(push.worker)
        if last is not None:
            known = state.cycle.get(worker, progress.now_s - last)
            state.cycle[worker] = known + FOLLOWS * (progress.now_s - last - known)
        state.came[worker] = progress.now_s
        return state

    def step(self, stage: Stage, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        cycles, worker = state.rule_state.cycle, state.progress.latest
        if worker in cycles and (total := math.fsum(cycles.values())):
            update = update * (cycles[worker] * len(cycles) / total)
        return super().step(stage, state, update, lr)

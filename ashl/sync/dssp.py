"""Dynamic SSP: a bounded lead whose bound lies in a range; a controller decides how much of it the
fastest worker gets.

Use when: speeds change during the run, so that no fixed slack suits.
Avoid when: one worker is always slowest: the long-run rate is that of `ssp`.
Alternatives: `ssp` with a fixed slack; `asp` without one.

Rule: each push is applied at its arrival, as in SSP. A worker that leads the slowest by at most
s_low commits proceeds. If the fastest worker leads by more, the controller extrapolates its pushes
and those of the slowest worker, from the last two of each. It grants the r in [0, s_high − s_low]
commits after which the fastest worker would wait least for the slowest worker's next push; of equal
waits, the smallest r. After r more commits it decides again, for the remaining part of the range.
Until a worker has pushed twice, the start of the stage counts as a push of it. A grant lapses if
the lead is s_low or less again.
Waiting: a worker without a remaining grant waits until its lead is at most s_low.

Limits: s_low = s_high is SSP(s). With persistent speed differences the long-run rate is BSP's, as
with SSP.
Source: Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning",
ICDCS 2019, arXiv 1908.11848.
Differs: no worker proceeds with a lead above s_high. The paper states this bound, but its
controller can grant more in repeated decisions.

Family: bounded staleness.
Status: situational.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import Count, Natural, option
from ashl.stage.contract import StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule, ServerState


@dataclass
class Controller:
    """Push times, and the workers that may exceed the lower bound."""

    times: list[tuple[float, float]]  # run times of each worker's last two pushes, seconds
    credit: list[int]  # commits that each worker may still make beyond the lower bound
    granted: bool = False  # True if the latest push used a credit


@option
class DSSP(ServerRule):
    """Bounded lead, with the bound chosen from a range."""

    s_low: Natural
    s_high: Annotated[Natural, Field(le=10_000)]  # `grant` tries every value of the range
    local_steps: Count | Literal["plan"]

    def __post_init__(self) -> None:
        if self.s_low > self.s_high:
            raise UsageError(
                f"sync.s_low={self.s_low}: above sync.s_high={self.s_high}; take a range such as"
                " sync.s_low=3 sync.s_high=15"
            )

    def begin(self, stage: StageConfig, progress: Progress) -> Controller:
        n = progress.num_workers
        start_s = progress.now_s
        return Controller([(start_s, start_s)] * n, [0] * n)

    def may_proceed(self, state: Controller, progress: Progress) -> list[int]:
        ready = progress.workers_within_staleness(self.s_low)
        latest = progress.latest
        # `observe` did not see a push that was dropped as too stale
        _, late = progress.waiting.get(latest, (0, True))
        if state.granted and not late and latest not in ready:
            ready.append(latest)
        return ready

    def observe(
        self, stage: StageConfig, state: Controller, progress: Progress, push: Push
    ) -> Controller:
        """Note the time of the push and decide if its worker may exceed the lower bound."""
        worker = push.worker
        lead = progress.clocks[worker] - progress.slowest
        state.times[worker] = (state.times[worker][1], progress.now_s)
        state.granted = False
        if lead <= self.s_low:
            state.credit[worker] = 0
            return state
        if not state.credit[worker] and progress.clocks[worker] == progress.fastest:
            slowest = next(
                w
                for w, c in enumerate(progress.clocks)
                if c == progress.slowest and w not in progress.failed
            )
            state.credit[worker] = grant(
                state.times[worker], state.times[slowest], self.s_high - lead + 1
            )
        if state.credit[worker]:
            state.credit[worker] -= 1
            state.granted = True
        return state

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        """Let a rejoining worker begin as at the start of a stage."""
        now_s = state.progress.now_s
        state.rule_state.times[rank], state.rule_state.credit[rank] = (now_s, now_s), 0


def grant(fastest: tuple[float, float], slowest: tuple[float, float], limit: int) -> int:
    """Return r in [0, limit]: the number of further commits after which the fastest worker waits
    least for the slowest worker's next push.

    Args: fastest, slowest: run times in seconds of the worker's last two pushes.
    """
    now = fastest[1]
    stride = fastest[1] - fastest[0]
    period = slowest[1] - slowest[0]
    if limit <= 0 or period <= 0:  # without a push of the slowest there is no prediction
        return 0

    def wait(r: int) -> float:
        arrival = now + r * stride
        pushes = max(1, math.ceil((arrival - slowest[1]) / period))
        return slowest[1] + pushes * period - arrival

    return min(range(limit + 1), key=wait)

"""Dynamic SSP: the bound on the lead lies in a range, and a controller says how much of it the
fastest worker gets.

Rule: a worker that leads the slowest by at most s_low commits goes on. When the fastest exceeds
that, the controller looks at the last two pushes of the fastest and of the slowest, continues both
at their intervals, and grants the r in [0, s_high − s_low] commits after which the fastest would
wait least for the slowest's next push (ties: the smallest r). After r commits more it is judged
again, with what is left of the range; with nothing left it waits until its lead is s_low. No lead
at a release exceeds s_high, which the paper states but its controller, asked again and again, does
not ensure.

Limit: s_low = s_high is SSP(s). With persistent speed gaps the pace in the long run is BSP's, as
SSP's.
Source: Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning",
ICDCS 2019, arXiv
1908.11848.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import Count, Natural, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.parameter_server import ServerRule


@dataclass
class Controller:
    """When workers pushed, and who may exceed the lower bound."""

    times: list[tuple[float, float]]  # of each worker's last two pushes, in seconds
    credit: list[int]  # commits that each may still make beyond the lower bound
    granted: bool = False  # whether the latest push was one of these


@option
class DSSP(ServerRule):
    """Bounded lead, the bound chosen from a range."""

    s_low: Natural
    s_high: Annotated[Natural, Field(le=10_000)]  # each of them is looked at
    local_steps: Count | Literal["plan"]

    def __post_init__(self) -> None:
        if self.s_low > self.s_high:
            raise UsageError(
                f"sync.s_low={self.s_low} is above sync.s_high={self.s_high}; take a range such as "
                "sync.s_low=3 sync.s_high=15"
            )

    def begin(self, stage: Stage, progress: Progress) -> Controller:
        n, start_s = progress.num_workers, progress.now_s
        return Controller([(start_s, start_s)] * n, [0] * n)

    def may_proceed(self, state: Controller, progress: Progress) -> list[int]:
        ready, latest = progress.within_staleness(self.s_low), progress.latest
        _, late = progress.waiting.get(
            latest, (0, True)
        )  # a push that came too late is not observed
        if state.granted and not late and latest not in ready:
            ready.append(latest)
        return ready

    def observe(
        self, stage: Stage, state: Controller, progress: Progress, push: Push
    ) -> Controller:
        """Note the time of the push and decide whether it may go beyond the lower bound."""
        worker, lead = push.worker, progress.clocks[push.worker] - progress.slowest
        state.times[worker] = (state.times[worker][1], progress.now_s)
        state.granted = False
        if lead <= self.s_low:
            state.credit[worker] = 0
            return state
        if not state.credit[worker] and progress.clocks[worker] == progress.fastest:
            slowest = next(
                w
                for w, c in enumerate(progress.clocks)
                if c == progress.slowest and w not in progress.gone
            )
            state.credit[worker] = grant(
                state.times[worker], state.times[slowest], self.s_high - lead + 1
            )
        if state.credit[worker]:
            state.credit[worker] -= 1
            state.granted = True
        return state

    def on_membership_change(
        self, stage: Stage, state: Controller, progress: Progress, rank: int
    ) -> Controller:
        """A newcomer begins as at the start of a stage."""
        state.times[rank], state.credit[rank] = (progress.now_s, progress.now_s), 0
        return state


def grant(fastest: tuple[float, float], slowest: tuple[float, float], room: int) -> int:
    """r in [0, room]: after how many more commits the fastest worker waits least for the slowest's
    next push.
    """
    now, stride, period = fastest[1], fastest[1] - fastest[0], slowest[1] - slowest[0]
    if room <= 0 or period <= 0:  # the slowest has not pushed yet, so nothing can be foreseen
        return 0

    def wait(r: int) -> float:
        arrival = now + r * stride
        pushes = max(1, math.ceil((arrival - slowest[1]) / period))
        return slowest[1] + pushes * period - arrival

    return min(range(room + 1), key=wait)

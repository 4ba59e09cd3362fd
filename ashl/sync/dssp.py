"""Dynamic SSP: the bound on the lead lies in a range, and a controller says how much of it the fastest worker gets.

Rule: a worker that leads the slowest by at most s_low commits goes on. When the fastest exceeds that, the
controller looks at the last two pushes of the fastest and of the slowest, continues both at their intervals, and
grants the r in [0, s_high − s_low] commits after which the fastest would wait least for the slowest's next push
(ties: the smallest r). After r commits more it is judged again, with what is left of the range; with nothing left
it waits until its lead is s_low. No lead at a release exceeds s_high, which the paper states but its controller,
asked again and again, does not ensure.

Limit: s_low = s_high is SSP(s). With persistent speed gaps the pace in the long run is BSP's, as SSP's.
Source: Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS 2019, arXiv
1908.11848.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ashl.errors import UsageError
from ashl.option import Count, Natural, option
from ashl.stage.stage import Push, Stage, Tally


@dataclass
class Controller:
    """When workers pushed, and who may exceed the lower bound."""

    times: list[tuple[float, float]]  # of each worker's last two pushes, in seconds
    credit: list[int]  # commits that each may still make beyond the lower bound
    granted: bool = False  # whether the latest push was one of these


@option
class DSSP:
    """Bounded lead, the bound chosen from a range."""

    averages: ClassVar[bool] = False
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    s_low: Natural
    s_high: Natural
    local_steps: Count | Literal["plan"]

    def __post_init__(self) -> None:
        if self.s_low > self.s_high:
            raise UsageError(
                f"sync.s_low={self.s_low} is above sync.s_high={self.s_high}; take a range such as "
                "sync.s_low=3 sync.s_high=15"
            )

    def quorum(self, num_workers: int) -> int:
        return 1

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        ready = list(tally.within(self.s_low))
        control = self._control(tally)
        if control.granted and tally.latest in tally.waiting and tally.latest not in ready:
            ready.append(tally.latest)
        return ready

    def observe(self, stage: Stage, tally: Tally, push: Push, now_s: float) -> None:
        """Note the time of the push and decide whether it may go beyond the lower bound."""
        control, worker = self._control(tally), push.worker
        control.times[worker] = (control.times[worker][1], now_s)
        lead = tally.clocks[worker] - tally.slowest
        control.granted = False
        if lead <= self.s_low:
            control.credit[worker] = 0
            return
        if not control.credit[worker] and tally.clocks[worker] == max(tally.clocks):
            slowest = tally.clocks.index(tally.slowest)
            room = self.s_high - lead + 1
            control.credit[worker] = grant(control.times[worker], control.times[slowest], room)
        if control.credit[worker]:
            control.credit[worker] -= 1
            control.granted = True

    def _control(self, tally: Tally) -> Controller:
        """The state; it begins with the stage."""
        if not isinstance(tally.rule_state, Controller):
            n, start_s = tally.num_workers, tally.start["seconds"]
            tally.rule_state = Controller([(start_s, start_s)] * n, [0] * n)
        return tally.rule_state


def grant(fastest: tuple[float, float], slowest: tuple[float, float], room: int) -> int:
    """r in [0, room]: after how many more commits the fastest worker waits least for the slowest's next push."""
    now, stride, period = fastest[1], fastest[1] - fastest[0], slowest[1] - slowest[0]
    if room <= 0 or period <= 0:  # the slowest has not pushed yet, so nothing can be foreseen
        return 0

    def wait(r: int) -> float:
        arrival = now + r * stride
        pushes = max(1, math.ceil((arrival - slowest[1]) / period))
        return slowest[1] + pushes * period - arrival

    return min(range(room + 1), key=wait)

"""Stale synchronous parallel: a worker may lead the slowest by at most s commits.

Rule: after its commit c a worker goes on iff c − min_j c_j ≤ s; each push is applied as it comes,
w ← w + scale·w_i·Δ_i. When a worker goes on, its pull holds every update of clocks up to c − s − 1 and all its own.

Limits: s = 0 is BSP, s = null (unbounded) is ASP. With persistent speed gaps the pace in the long run is BSP's.
Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

import math
from typing import ClassVar, Literal

from ashl.option import Count, Natural, option
from ashl.stage.stage import Tally


@option
class SSP:
    """Bounded lead, counted in commits."""

    averages: ClassVar[bool] = False
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    staleness: Natural | None
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        return 1

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        return tally.within(math.inf if self.staleness is None else self.staleness)

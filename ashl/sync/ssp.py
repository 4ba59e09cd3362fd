"""Stale synchronous parallel: a worker may lead the slowest by at most s commits.

Rule: after its commit c a worker goes on iff c − min_j c_j ≤ s; each push is applied as it comes, w
← w + scale·w_i·Δ_i. When a worker goes on, its pull holds every update of clocks up to c − s − 1
and all its own.

Limits: s = 0 is BSP, s = null (unbounded) is ASP. With persistent speed gaps the pace in the long
run is BSP's.
Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013.
"""

import math
from typing import Any, Literal

from ashl.option import Count, Natural, option
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule


@option
class SSP(ServerRule):
    """Bounded lead, counted in commits."""

    staleness: Natural | None
    local_steps: Count | Literal["plan"]

    def may_proceed(self, state: Any, progress: Progress) -> list[int]:
        return progress.within_staleness(math.inf if self.staleness is None else self.staleness)

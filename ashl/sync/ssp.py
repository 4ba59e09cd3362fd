"""Stale synchronous parallel: a worker may lead the slowest one by at most s commits.

Use when: workers are unequal and leads must be bounded; with planned H nobody waits in the long
run.
Avoid when: one worker is always slower at H = 1: the long-run rate is then BSP's.
Alternatives: `asp` without a bound; `dssp` with a range; `adsp`.

Rule: each push is applied at its arrival, w ← w + scale·w_i·Δ_i, with Δ_i computed on the model
that worker i pulled.
Waiting: after its commit c a worker proceeds if c − min_j c_j ≤ s, and otherwise waits until the
slowest worker has committed. So its pull contains the first c − s commits of every worker, and all
of its own.

Limits: s = 0 is BSP, s = null (unbounded) is ASP. With persistent speed differences the long-run
rate is BSP's.
Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013.
Differs: no cache: a worker pulls the whole model after every commit.

Family: bounded staleness.
Status: situational.
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
        return progress.workers_within_staleness(
            math.inf if self.staleness is None else self.staleness
        )

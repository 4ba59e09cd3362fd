"""SHL, the second stage of ASHL: semi-asynchronous, with a small H_i per worker and a bounded lead
in commits.

Use when: the second stage of ASHL is to be used alone: a small H by speed and a bounded lead.
Avoid when: the loss is still high: a larger H would be cheaper.
Alternatives: `schedule=ashl`, with AHL before it; `ssp` with planned H.

Rule: SSP over commits. Each push is applied at its arrival, w ← w + scale·w_i·Δ_i. Worker i takes
the plan's H_i local steps between two commits.
Waiting: after its commit c a worker proceeds if c − min_j c_j ≤ s, and otherwise waits. The plan
makes all cycles equally long, so this bound is a safety net that almost never applies.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
Heterogeneous Environments", IEEE Transactions on Computers 73(1), 2024.
Differs: the server applies a push before its worker waits; see `schedule=ashl`.

Family: stages of ASHL.
Status: internal.
"""

from typing import Any, ClassVar

from ashl.option import Natural, option
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule


@option
class SHL(ServerRule):
    """Bounded lead in commits, with H of each worker from the plan."""

    local_steps: ClassVar[str] = "plan"
    staleness: Natural

    def may_proceed(self, state: Any, progress: Progress) -> list[int]:
        return progress.workers_within_staleness(self.staleness)

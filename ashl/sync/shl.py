"""ASHL's second stage: semi-asynchronous, with a small H for each worker and a bounded lead counted
in commits.

Rule: SSP's over commits, a worker goes on iff c − min_j c_j ≤ s, with the plan's H_i between two
commits. Since the plan makes the cycles equally long the bound almost never binds: it is a safety
net.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
Heterogeneous Environments", IEEE Transactions on Computers 73(1), 2024.
"""

from typing import Any, ClassVar

from ashl.option import Natural, option
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule


@option
class SHL(ServerRule):
    """Bounded lead in commits, H from the plan."""

    local_steps: ClassVar[str] = "plan"
    staleness: Natural

    def may_proceed(self, state: Any, progress: Progress) -> list[int]:
        return progress.within_staleness(self.staleness)

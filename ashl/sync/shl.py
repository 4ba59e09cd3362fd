"""ASHL's second stage: semi-asynchronous, with a small H for each worker and a bounded lead counted in commits.

Rule: SSP's over commits, a worker goes on iff c − min_j c_j ≤ s, with the plan's H_i between two commits. Since the
plan makes the cycles equally long the bound almost never binds: it is a safety net.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for Heterogeneous
Environments", IEEE Transactions on Computers 73(1), 2024.
"""

from typing import ClassVar

from ashl.option import Natural, option
from ashl.stage.stage import Tally


@option
class SHL:
    """Bounded lead in commits, H from the plan."""

    averages: ClassVar[bool] = False
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    local_steps: ClassVar[str] = "plan"
    staleness: Natural

    def quorum(self, num_workers: int) -> int:
        return 1

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        return tally.within(self.staleness)

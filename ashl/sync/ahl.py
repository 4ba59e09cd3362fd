"""ASHL's first stage: asynchronous, with a large H for each worker that makes all cycles equally long.

Rule: ASP's, w ← w + w_i·Δ_i at each arrival and that worker goes on, with the plan's H_i between two commits.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for Heterogeneous
Environments", IEEE Transactions on Computers 73(1), 2024.
"""

from typing import ClassVar

from ashl.option import option
from ashl.stage.stage import Tally


@option
class AHL:
    """Asynchronous, H from the plan."""

    averages: ClassVar[bool] = False
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    local_steps: ClassVar[str] = "plan"

    def quorum(self, num_workers: int) -> int:
        return 1

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        return list(tally.waiting)

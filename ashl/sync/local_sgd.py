"""Local SGD: H steps on each worker's own model, then all models are averaged.

Rule: w ← w + Σ_i w_i·(w_i^H − w), then all go on from the mean. The optimizer's moments stay on the worker and are not
averaged.

Limit: H = 1 is BSP (SGD, momentum). Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
"""

from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.stage.stage import Tally


@option
class LocalSGD:
    """A barrier at every H steps."""

    averages: ClassVar[bool] = True
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server", "all_reduce")
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        return num_workers

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

    def admit(self, tally: Tally) -> list[int]:
        return tally.behind()

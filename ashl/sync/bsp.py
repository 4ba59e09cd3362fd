"""Bulk synchronous parallel: nobody goes on before everybody has arrived.

Rule: w ← w − γ·Σ_i w_i·g_i over all n workers, then all go on. With `exchange=difference` each worker steps on its own
and the differences are averaged; for optimizers that are linear in the gradient (SGD, momentum) that is the same.

Source: Valiant, "A bridging model for parallel computation", CACM 1990.
"""

from typing import ClassVar, Literal

from ashl.option import option
from ashl.stage.stage import Tally


@option
class BSP:
    """A barrier at every step."""

    averages: ClassVar[bool] = True
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server", "all_reduce")
    local_steps: ClassVar[int] = 1
    exchange: Literal["gradient", "difference"]

    def quorum(self, num_workers: int) -> int:
        return num_workers

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

    def admit(self, tally: Tally) -> list[int]:
        return tally.behind()

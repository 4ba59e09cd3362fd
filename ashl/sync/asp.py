"""Asynchronous parallel: nobody ever waits for anybody.

Rule: w ← w + scale·w_i·Δ_i(w_pulled) at each arrival, then that worker goes on. `aggregate.scale=n` is the textbook's
full step per push; scale = 1 moves as far per n pushes as BSP does per step.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; Recht et al., "Hogwild", NIPS 2011.
"""

from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.stage.stage import Tally


@option
class ASP:
    """No bound at all."""

    averages: ClassVar[bool] = False
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        return 1

    def accepts(self, staleness: int) -> bool:
        return True

    def admit(self, tally: Tally) -> list[int]:
        return list(tally.waiting)

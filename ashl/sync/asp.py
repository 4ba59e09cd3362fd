"""Asynchronous parallel: nobody ever waits for anybody.

Rule: w ← w + scale·w_i·Δ_i(w_pulled) at each arrival, then that worker goes on. `aggregate.scale=n`
is the textbook's full step per push; scale = 1 moves as far per n pushes as BSP does per step.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; Recht et al., "Hogwild",
NIPS 2011.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class ASP(ServerRule):
    """No bound at all."""

    local_steps: Count | Literal["plan"]

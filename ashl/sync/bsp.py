"""Bulk synchronous parallel: nobody goes on before everybody has arrived.

Rule: w ← w − γ·Σ_i w_i·g_i over all n workers, then all go on. With `exchange=difference` each
worker steps on its own and the differences are averaged; for optimizers that are linear in the
gradient (SGD, momentum) that is the same.

Source: Valiant, "A bridging model for parallel computation", CACM 1990.
"""

from typing import Literal

from ashl.option import option
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import BarrierRule


@option
class BSP(BarrierRule, StepRule):
    """A barrier at every step."""

    exchange: Literal["gradient", "difference"]

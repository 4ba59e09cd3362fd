"""Local SGD: H steps on each worker's own model, then all models are averaged.

Rule: w ← w + Σ_i w_i·(w_i^H − w), then all go on from the mean. The optimizer's moments stay on the
worker and are not averaged.

Limit: H = 1 is BSP (SGD, momentum). Source: Stich, "Local SGD Converges Fast and Communicates
Little", ICLR 2019.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import BarrierRule


@option
class LocalSGD(BarrierRule, StepRule):
    """A barrier at every H steps."""

    local_steps: Count | Literal["plan"]

"""Rennala: B gradients at one point, from whoever is quick, then one step.

Rule: everyone computes gradients at the current model, one after the other; the server collects
them, and with the B-th w ← w − γ·Σ_b w_b·g_b, Σ w_b = 1. A worker may contribute several; one whose
gradient belongs to an older model has it dropped and counted, and goes on with the current one. As
long as the model is the same a reply carries none. What has come already is taken in before anyone
is answered. Work on a model that has become old is finished before it is dropped.

Limit: B = n on equal workers is BSP. Source: Tyurin and Richtárik, "Optimal Time Complexities of
Parallel Stochastic Optimization Methods Under a Fixed Computation Model", NeurIPS 2023.
"""

from typing import ClassVar

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class Rennala(ServerRule):
    """Minibatches of B gradients, filled by the quick."""

    averages: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True
    exchange: ClassVar[str] = "gradient"
    batch: Count

    def quorum(self, num_workers: int) -> int:
        return self.batch

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

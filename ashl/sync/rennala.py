"""Rennala: the server collects B gradients at one model, then takes one step; fast workers
contribute more of them.

Use when: workers are very unequal, and only gradients of the current model are wanted.
Avoid when: workers are equal: a step then needs as many gradients as `bsp`, behind a server.
Alternatives: `ringmaster`, which steps at each fresh gradient; `fedbuff`, which uses stale ones.

Rule: each worker computes gradients at the current model, one after another. With the B-th, B =
`batch`, w ← w − γ·Σ_b w_b·g_b, Σ w_b = 1. One worker may contribute several gradients. A gradient
of an older model is dropped and counted, and its worker receives the current model. While the model
does not change, replies carry no model. The server handles all pushes that have arrived before it
answers one. A worker finishes a gradient even if its model is outdated meanwhile.
Waiting: no worker waits for another one.

Limit: B = n on equal workers is BSP.
Source: Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods
Under a Fixed Computation Model", NeurIPS 2023.

Family: synchronous steps.
Status: situational.
"""

from typing import ClassVar

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class Rennala(ServerRule):
    """Minibatches of B gradients at one model."""

    averages: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True
    exchange: ClassVar[str] = "gradient"
    batch: Count

    def quorum(self, num_workers: int) -> int:
        return self.batch

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

"""Ringmaster: asynchronous, but what is R or more merges old is thrown away.

Rule: a push with delay τ < R is applied, w ← w + scale·w_i·Δ_i, any other is dropped and counted;
either way its worker goes on with the current model. A dropped push still moves its worker's own
momentum, and what its compressor had sent returns to the residual. Work that has become too old
meanwhile is finished before it is dropped. In theory R ~ max(1, σ²/ε) makes it optimal in time for
any speeds: with noisy gradients old ones are worth keeping.

Limits: R = null is ASP, R = 1 accepts only what was computed on the current model.

Source: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal
Time Complexity", ICML 2025, Algorithm 4.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class Ringmaster(ServerRule):
    """ASP with a bound on the delay instead of the lead."""

    max_staleness: Count | None
    local_steps: Count | Literal["plan"]

    def accepts(self, staleness: int) -> bool:
        return self.max_staleness is None or staleness < self.max_staleness

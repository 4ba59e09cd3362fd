"""Ringmaster: asynchronous, but the server drops pushes of staleness R or more.

Use when: some workers are extremely slow: pushes that are too stale are dropped.
Avoid when: all pushes are needed, because shards differ.
Alternatives: `asp` with `aggregate.max_staleness`; `rennala`.

Rule: a push whose worker pulled τ < R merges ago is applied at its arrival, w ← w + scale·w_i·Δ_i.
Any other push is dropped and counted, with R = `max_staleness`. In both cases the reply carries the
current model. A dropped push still updates its worker's own momentum, and its compressor's residual
takes it back. A worker finishes its work even if it is already too stale.
Waiting: no worker waits for another one.

Limits: R = null is ASP. R = 1 accepts only pushes computed on the current model. In theory R ~
max(1, σ²/ε) is optimal in time for all speeds: the noisier the gradients, the larger R.
Source: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal
Time Complexity", ICML 2025, Algorithm 4.

Family: asynchronous server.
Status: situational.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class Ringmaster(ServerRule):
    """ASP with a bound on the staleness instead of the lead."""

    max_staleness: Count | None
    local_steps: Count | Literal["plan"]

    def accepts(self, staleness: int) -> bool:
        return self.max_staleness is None or staleness < self.max_staleness

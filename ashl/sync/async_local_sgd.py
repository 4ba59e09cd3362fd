"""Async-Local SGD: a worker takes M local steps and pushes their sum; too stale pushes are dropped.

Use when: workers are unequal and exchanges are long: local steps, and no barrier.
Avoid when: outer momentum of 0.9 is used without tuning: stale updates overshoot.
Alternatives: `ahl` with H by speed; `decoupled` with a quorum; `local_sgd` with a barrier.

Rule: a worker takes M = `local_steps` steps from the model that it pulled. If δ merges happened
since, its push is applied, w ← w + scale·w_i·Δ_i, provided that (δ + 1)·M ≤ R. Otherwise the push
is dropped and counted. In both cases the reply carries the current model. (δ + 1)·M − 1 is the
staleness in steps of the last of the M gradients, which R = `max_staleness` bounds as in
Ringmaster.
Waiting: no worker waits for another one.

Limits: R = null is ASP with `local_steps` = M; M = 1 is Ringmaster.
Source: Tyurin and Sivtsov, "Birch SGD: A Tree Graph Framework for Local and Asynchronous SGD
Methods", ICLR 2026.

Family: asynchronous server.
Status: situational.
"""

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class AsyncLocalSGD(ServerRule):
    """Asynchronous local steps with a bound on the staleness in steps."""

    local_steps: Count
    max_staleness: Count | None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < self.local_steps:
            raise UsageError(
                f"sync.max_staleness={self.max_staleness}: drops every push of"
                f" sync.local_steps={self.local_steps} steps; take at least {self.local_steps}, or"
                " null"
            )

    def accepts(self, staleness: int) -> bool:
        return (
            self.max_staleness is None or (staleness + 1) * self.local_steps <= self.max_staleness
        )

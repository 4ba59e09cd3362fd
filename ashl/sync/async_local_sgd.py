"""Async-Local SGD: M local steps from the current model, and their sum applied at once.

Rule: a worker takes M steps from the model it pulled; its difference, when it arrives after δ
merges, is applied, w ← w + scale·w_i·Δ_i, unless (δ + 1)·M > R: then it is dropped and counted.
Either way its worker goes on with the current model. (δ + 1)·M − 1 is the distance, in steps,
between the model that the last of the M gradients moves and the one that it was computed on, so
that R bounds it as in Ringmaster.

Limits: R = null is ASP with `local_steps` = M; M = 1 is Ringmaster. Source: Tyurin and Sivtsov,
"Birch SGD: A Tree Graph Framework for Local and Asynchronous SGD Methods", ICLR 2026.
"""

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class AsyncLocalSGD(ServerRule):
    """Asynchronous local steps, with a bound on those in flight."""

    local_steps: Count
    max_staleness: Count | None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < self.local_steps:
            raise UsageError(
                f"sync.max_staleness={self.max_staleness} drops every push of"
                f" sync.local_steps={self.local_steps} steps; take at least {self.local_steps}, or"
                " null"
            )

    def accepts(self, staleness: int) -> bool:
        return (
            self.max_staleness is None or (staleness + 1) * self.local_steps <= self.max_staleness
        )

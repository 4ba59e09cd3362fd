"""FedBuff: nobody waits, and the server merges K pushes at a time.

Rule: a push goes into the buffer and its worker goes on at once with the current model; when K have
come, w ← w + scale·Σ_k w_k·s(τ_k)·Δ_k over them with Σ w_k = 1. The paper's 1/K is
`aggregate=uniform`, its s(τ) = (1 + τ)^−1/2 is `aggregate.staleness_discount=0.5`. A worker may be
in a merge several times. At the end of a stage what is left is merged as well.

Limits: K = 1 with `aggregate=uniform` and scale c is ASP with scale n·c, since each push makes a
merge of its own and counts whole in it. K = n is no barrier: on equal workers every merge holds
each of them once, but only one of them has seen the merge before, so that staleness is up to 1.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.
"""

from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class FedBuff(ServerRule):
    """Asynchronous, merged by the buffer."""

    averages: ClassVar[bool] = True
    buffer: Count
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        return self.buffer

"""FedBuff: asynchronous workers, and a server that merges K pushes at a time.

Use when: workers are very unequal and many, and momentum at every stale push would overshoot.
Avoid when: there are few workers: a buffer then waits for the slow ones.
Alternatives: `asp` merges each push; `rennala` drops stale gradients.

Rule: the server buffers each push and answers at once with the current model. Once K = `buffer`
pushes are in the buffer, w ← w + scale·Σ_k w_k·s(τ_k)·Δ_k over them, with Σ w_k = 1 and τ_k the
staleness in merges. One merge may contain several pushes of a worker. The paper's weights 1/K are
`aggregate=uniform`, and its s(τ) = (1 + τ)^−1/2 is `aggregate.staleness_discount=0.5`. Before
another stage the remaining pushes are merged too; at the end of the run they are dropped.
Waiting: no worker waits for another one.

Limits: K = 1 with `aggregate=uniform` and scale c is ASP with scale n·c, because each push is a
merge with weight 1. K = n is no barrier. On equal workers every merge then contains one push of
each; only one of them has seen the merge before, so staleness is up to 1.
Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.

Family: asynchronous server.
Status: situational.
"""

from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class FedBuff(ServerRule):
    """Asynchronous pushes, merged by the buffer."""

    averages: ClassVar[bool] = True
    buffer: Count
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        return self.buffer

"""Gossip-PGA: gossip, with a global average every `period` rounds.

Use when: a long sparse graph averages too slowly, and an all-reduce now and then is affordable.
Avoid when: the graph is dense or workers are very unequal.
Alternatives: `d_psgd` with `topology.graph=exponential`; `local_sgd` by all-reduce.

Rule: x_i ← Σ_j w_ij·(x_j + Δ_j). In every `period`-th round an all-reduce sets x_i to the mean over
all j of x_j + Δ_j instead; neighbours exchange control data only, and no models. So the period
bounds how far models diverge on a sparse graph, however large its diameter. Momentum is not
averaged.
Waiting: in each round a worker waits for its neighbours; in every `period`-th round it waits for
all workers.

Limits: period = null is D-PSGD (`atc`), bit for bit. period = 1 is local SGD by all-reduce with
aggregate=uniform, up to rounding.
Source: Chen, Yuan, Zhang, Pan, Xu and Yin, "Accelerating Gossip SGD with Periodic Global
Averaging", ICML 2021.

Family: gossip.
Status: situational.
"""

from typing import Any, Literal

from ashl.option import Count, option
from ashl.size_only import Vector
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, mix_models


@option
class GossipPGA(RoundRule):
    """Gossip averaging with periodic global averages."""

    local_steps: Count | Literal["plan"]
    period: Count | None

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        state.params = state.params + delta
        payload = state.params
        if self._is_global_round(now.k):
            share = state.params * (1 / len(now.graph.ranks))
            state.params = await now.ctx.all_reduce(share, now.graph.ranks)
            payload = None
        return {rank: (payload, ()) for rank in now.targets}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        if not self._is_global_round(now.k):
            state.params = mix_models(now.row, now.rank, state.params, received)

    def _is_global_round(self, k: int) -> bool:
        return self.period is not None and (k + 1) % self.period == 0

"""Gossip-PGA: gossip, and every so many rounds one average over all.

Rule: x_i ← Σ_j w_ij·(x_j + Δ_j), and in every `period`-th round x_i ← mean over all j of (x_j +
Δ_j), by an all-reduce. Between two of them only neighbours talk, so that what a sparse graph leaves
apart is bounded by the period and not by how long the graph is. In such a round neighbours still
tell each other what is known of the run, and no model.

Limits: period = null is D-PSGD (`atc`), bit for bit; period = 1 is local SGD by all-reduce with
aggregate=uniform, to rounding. Momentum stays at home. Source: Chen, Yuan, Zhang, Pan, Xu and Yin,
"Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021.
"""

from collections.abc import Mapping
from typing import Any, Literal

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.stage import Stage
from ashl.topology.gossip import Outgoing, RoundRule, RoundState, graph_of
from ashl.topology.mixing import mix


@option
class GossipPGA(RoundRule):
    """Neighbours, and now and then everybody."""

    local_steps: Count | Literal["plan"]
    period: Count | None

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        state.params = state.params + delta
        body = state.params
        if self._all_meet(k):
            state.params = await ctx.all_reduce(
                state.params * (1 / stage.num_workers), stage.workers
            )
            body = None
        return {rank: (body, ()) for rank in graph_of(stage).round(stage, k).targets[ctx.rank]}

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        if not self._all_meet(k):
            state.params = mix(
                graph_of(stage).round(stage, k).rows[rank], rank, state.params, heard
            )

    def _all_meet(self, k: int) -> bool:
        return self.period is not None and (k + 1) % self.period == 0

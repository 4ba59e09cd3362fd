"""D-PSGD: every worker mixes its model with its neighbours' and takes its own step, round by round.

Rule: `awc` (adapt while communicating) x_i ← Σ_j w_ij·x_j + Δ_i, where models travel while Δ_i is
computed at the model before mixing; `atc` (adapt, then communicate) x_i ← Σ_j w_ij·(x_j + Δ_j). W
is doubly stochastic, so both move the mean of all models by the mean of the Δ. With H local steps
between two rounds it is local SGD on a graph.

Limits: the complete graph with `atc` is BSP (SGD, momentum), to rounding; W = I is no exchange.
Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017, arXiv 1705.09056.
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
class DPSGD(RoundRule):
    """Mixing in rounds on a graph."""

    local_steps: Count | Literal["plan"]
    order: Literal["awc", "atc"]

    @property
    def early(self) -> bool:
        return self.order == "awc"

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        if delta is not None:
            state.params = state.params + delta
        return {
            rank: (state.params, ()) for rank in graph_of(stage).round(stage, k).targets[ctx.rank]
        }

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        state.params = mix(graph_of(stage).round(stage, k).rows[rank], rank, state.params, heard)
        if self.early:
            state.params = state.params + delta

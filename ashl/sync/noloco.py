"""NoLoCo: local steps by an inner optimizer, then an outer step with momentum in random pairs,
without a collective.

Rule: with φ_i the model after the last outer step and Δ_i = θ_i − φ_i what H inner steps made of
it, each worker meets one other, drawn alike by all from the seed, and
    δ_i ← α·δ_i + β·mean(Δ) − γ·(φ_i − mean(φ)),   φ_i ← φ_i + δ_i
with means over the two. Both Δ and φ travel: twice the model. Who is left over, with an odd number
of workers or on a sparse graph, is alone. Pairs are edges of the graph; as published, of the
complete one (topology.graph=complete).

This momentum is no option of the group `outer`: δ_i is one worker's and takes in the gap φ_i −
mean(φ) between two models, where an outer optimizer sees one merged update of one model.

Limits: α = 0, β = γ = 1 is the mean of the two models θ. γ should be above α, or the models drift
apart.
Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
Models", 2025, arXiv
2506.10911.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

from ashl.option import Count, NonNegative, Positive, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly, Vector, halves, joined
from ashl.stage.stage import Stage
from ashl.topology.gossip import Outgoing, RoundRule, RoundState, graph_of
from ashl.topology.graph import matching


@option
class NoLoCo(RoundRule):
    """An outer step with momentum in random pairs."""

    local_steps: Count | Literal["plan"]
    alpha: NonNegative
    beta: Positive
    gamma: NonNegative

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Any:
        """δ, zero at first."""
        return state.params * 0.0

    def sources(self, stage: Stage, rank: int, k: int) -> tuple[int, ...]:
        met = stage.cached(matchings_in)(k)
        return (met[rank],) if rank in met else ()

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        peers = self.sources(stage, ctx.rank, k)
        return {j: (joined(delta, state.params), ()) for j in peers}

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        if isinstance(delta, SizeOnly):
            return
        mean_delta, mean_params = delta, state.params
        for message in heard.values():
            other_delta, other_params = halves(message.body)
            mean_delta, mean_params = (
                (delta + other_delta) * 0.5,
                (state.params + other_params) * 0.5,
            )
        apart = state.params - mean_params
        state.rule_state = (
            state.rule_state * self.alpha + mean_delta * self.beta - apart * self.gamma
        )
        state.params = state.params + state.rule_state


def matchings_in(stage: Stage) -> Callable[[int], dict[int, int]]:
    """Who meets whom in a round, drawn once for all who ask."""
    edges, n = graph_of(stage).edges(stage), stage.num_workers
    all_pairs = len(edges) == n * (n - 1) // 2
    return lru_cache(maxsize=64)(partial(matching, None if all_pairs else edges, n, stage.seed))

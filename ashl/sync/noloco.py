"""NoLoCo: local steps by an inner optimizer, then an outer step with momentum in random pairs,
without a collective.

Use when: local steps with outer momentum, and no collective over all workers.
Avoid when: few workers have fast links: an all-reduce mixes better.
Alternatives: `local_sgd` with `outer=nesterov` (DiLoCo); `swarm`.

Rule: φ_i is the model of worker i after its last outer step, θ_i the model after H inner steps from
φ_i, and Δ_i = θ_i − φ_i. In each round all workers draw the same random pairs from the seed, and
each worker sets
    δ_i ← α·δ_i + β·mean(Δ) − γ·(φ_i − mean(φ)),   φ_i ← φ_i + δ_i
with means over its pair. A message holds Δ_i and φ_i, twice the model. A worker without a partner
(an odd number of workers, or a sparse graph) takes the step alone. Pairs are edges of the graph;
the published method draws from all pairs (topology.graph=complete).
Waiting: in each round a worker waits for its partner only.

Limits: α = 0 with β = γ = 1 is the mean of the two models θ. γ should be above α; otherwise the
models drift apart.
Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
Models", 2025, arXiv 2506.10911.
Note: this momentum is not an option of `outer`, because δ_i belongs to one worker and contains the
difference of two models. An outer optimizer steps on one merged update of one model.

Family: gossip.
Status: situational.
"""

from functools import lru_cache
from typing import Any, Literal

from ashl.option import Count, NonNegative, Positive, option
from ashl.size_only import SizeOnly, Vector, join_vectors, split_vectors
from ashl.stage.contract import StageConfig
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState
from ashl.topology.graph import MemberGraph, matching


@option
class NoLoCo(RoundRule):
    """An outer step with momentum in random pairs."""

    local_steps: Count | Literal["plan"]
    alpha: NonNegative
    beta: Positive
    gamma: NonNegative

    def begin(self, stage: StageConfig, state: RoundState, rank: int) -> Any:
        """Return δ = 0."""
        return state.params * 0.0

    def sources(self, graph: MemberGraph, rank: int, k: int) -> tuple[int, ...]:
        met = pairs_of(graph, k)
        return (met[rank],) if rank in met else ()

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        peers = self.sources(now.graph, now.rank, now.k)
        return {j: (join_vectors(delta, state.params), ()) for j in peers}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        if isinstance(delta, SizeOnly):
            return
        mean_delta, mean_params = delta, state.params
        for message in received.values():
            other_delta, other_params = split_vectors(message.payload)
            mean_delta = (delta + other_delta) * 0.5
            mean_params = (state.params + other_params) * 0.5
        apart = state.params - mean_params
        state.rule_state = (
            state.rule_state * self.alpha + mean_delta * self.beta - apart * self.gamma
        )
        state.params = state.params + state.rule_state


@lru_cache(maxsize=64)
def pairs_of(graph: MemberGraph, k: int) -> dict[int, int]:
    """Return the pairs of round k, drawn identically by all ranks."""
    ranks = graph.ranks
    n = len(ranks)
    all_pairs = len(graph.places) == n * (n - 1) // 2
    met = matching(None if all_pairs else graph.places, n, graph.seed, k)
    return {ranks[i]: ranks[j] for i, j in met.items()}

"""RelaySum: models are relayed along a spanning tree, so that every worker receives the plain mean
of all models, with a delay.

Use when: gossip on skewed shards: all models are averaged in full over a spanning tree.
Avoid when: the tree is deep: information arrives late.
Alternatives: `d_psgd`; `gossip_pga`.

Rule: in each round x_i ← x_i + Δ_i. Worker i sends to each neighbour j on the tree the sum m_ij =
x_i + Σ_{l≠j} m_li, with the number of models in it; m_li is the latest message from l. Then x_i ←
(x_i + Σ_j m_ji + (n − c)·x_0)/n, where c ≤ n is the number of models in the messages plus one. x_0,
the model at the start of the stage, replaces the n − c models that have not arrived yet. After as
many rounds as the diameter of the tree, the mean contains every model exactly once. A model k edges
away is k − 1 rounds old. So weights are uniform on every tree, for all degrees, which non-IID data
needs. The tree is the breadth-first search tree of the graph from rank 0.
Waiting: in each round a worker waits for its neighbours on the tree.

Limits: two workers are BSP. A mean over older models makes less progress per round, as if the
learning rate were divided by 1 + the mean delay. So trees of large diameter need a larger learning
rate.
Source: Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS
2021.

Family: gossip.
Status: reproduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ashl.option import Count, option
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import Vector
from ashl.stage.contract import StageConfig
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, numbers_of
from ashl.topology.graph import Edge, MemberGraph, Sources, depths, edge, sources_of


class Relay(NamedTuple):
    """A worker's state: its model at the start of the stage, and the latest message of each
    neighbour.
    """

    first: Any  # x_0
    received: dict[int, Relayed]


class Relayed(NamedTuple):
    """A sum of models, and the number of models in it."""

    total: Any
    count: int


@option
class RelaySum(RoundRule):
    """Delayed uniform averaging on a tree."""

    local_steps: Count | Literal["plan"]

    def begin(self, stage: StageConfig, state: RoundState, rank: int) -> Relay:
        return Relay(state.params, {})

    def sources(self, graph: MemberGraph, rank: int, k: int) -> tuple[int, ...]:
        return member_tree(graph)[rank]

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        state.params = state.params + delta
        outgoing = {
            j: relay_sum(state.params, state.rule_state.received, j)
            for j in self.sources(now.graph, now.rank, now.k)
        }
        return {j: (payload, (count,)) for j, (payload, count) in outgoing.items()}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        latest = {
            j: Relayed(message.payload, int(numbers_of(message)[0]))
            for j, message in received.items()
        }
        first = state.rule_state.first
        state.rule_state = Relay(first, latest)
        total, count = relay_sum(state.params, latest)
        n = len(now.graph.ranks)
        missing = n - count
        total = total + first * missing if missing else total
        state.params = total * (1 / n)


def relay_sum(own: Vector, received: Mapping[int, Relayed], but: int | None = None) -> Relayed:
    """Add the own model and the messages of all neighbours except `but`, in rank order."""
    parts = [received[j] for j in sorted(received) if j != but]
    return Relayed(
        sum_in_rank_order([own, *(part.total for part in parts)]),
        1 + sum(part.count for part in parts),
    )


@lru_cache(maxsize=16)
def member_tree(graph: MemberGraph) -> Sources:
    """Return the neighbours of each rank on the tree of a graph."""
    return graph.sources_by_rank(spanning_tree(graph.places, len(graph.ranks)))


def spanning_tree(edges: tuple[Edge, ...], n: int) -> Sources:
    """Return the neighbours of each rank on the breadth-first search tree from rank 0."""
    sources = sources_of(edges, n)
    depth = depths(sources)
    return sources_of(
        [edge(i, next(j for j in sources[i] if depth[j] < depth[i])) for i in range(1, n)], n
    )

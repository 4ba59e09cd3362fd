"""RelaySum: models are relayed along a spanning tree, so that everybody gets the plain mean of all,
only later.

Rule: with x_i half a step on (x_i + Δ_i) and m_ji the last message from j, send m_ij = x_i +
Σ_{l≠j} m_li to each neighbour j on the tree, with the count of models in it; then x_i ← (x_i + Σ_j
m_ji + (n − c)·x_0)/n, where c ≤ n models have come and x_0, the worker's model when the stage
began, stands in for the others. After as many rounds as the tree is wide, every model is in it
exactly once, as old as the way is long: weights are uniform on any tree, whatever the degrees,
which skewed data need.

The tree is that of breadth-first search from rank 0 in the graph. A mean over older models makes
less progress in a round, as if the learning rate were divided by 1 + the mean delay: on wide trees
it wants a larger one.

Limit: two workers are BSP.
Source: Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS
2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import Vector
from ashl.stage.stage import Stage
from ashl.topology.gossip import Outgoing, RoundRule, RoundState, graph_of
from ashl.topology.graph import Edge, Sources, depths, edge, sources_of
from ashl.topology.mixing import numbers_of


class Relay(NamedTuple):
    """x_0, and what each neighbour has sent last."""

    first: Any
    heard: dict[int, Relayed]


class Relayed(NamedTuple):
    """A sum of models, and how many are in it."""

    total: Any
    count: int


@option
class RelaySum(RoundRule):
    """Delayed uniform averaging on a tree."""

    local_steps: Count | Literal["plan"]

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Relay:
        return Relay(state.params, {})

    def sources(self, stage: Stage, rank: int, k: int) -> tuple[int, ...]:
        return stage.cached(tree_in)[rank]

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        state.params = state.params + delta
        outgoing = {
            j: relay_sum(state.params, state.rule_state.heard, j)
            for j in self.sources(stage, ctx.rank, k)
        }
        return {j: (body, (count,)) for j, (body, count) in outgoing.items()}

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        latest = {
            j: Relayed(message.body, int(numbers_of(message)[0])) for j, message in heard.items()
        }
        first = state.rule_state.first
        state.rule_state = Relay(first, latest)
        total, count = relay_sum(state.params, latest)
        n = stage.num_workers
        missing = n - count
        total = total + first * missing if missing else total
        state.params = total * (1 / n)


def relay_sum(own: Vector, heard: Mapping[int, Relayed], but: int | None = None) -> Relayed:
    """Its own model and what it has heard of, but not from whom it tells; summed in rank order."""
    parts = [heard[j] for j in sorted(heard) if j != but]
    return Relayed(
        sum_in_rank_order([own, *(part.total for part in parts)]),
        1 + sum(part.count for part in parts),
    )


def tree_in(stage: Stage) -> Sources:
    return tree(graph_of(stage).edges(stage), stage.num_workers)


def tree(edges: tuple[Edge, ...], n: int) -> Sources:
    """Everybody's neighbours on the spanning tree."""
    sources = sources_of(edges, n)
    depth = depths(sources)
    return sources_of(
        [edge(i, next(j for j in sources[i] if depth[j] < depth[i])) for i in range(1, n)], n
    )

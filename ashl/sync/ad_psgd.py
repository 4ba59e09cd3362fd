"""AD-PSGD: asynchronous gossip in which an active worker averages models with one neighbour at a
time.

Use when: workers are unequal, no node can carry a server, and three or more workers can meet.
Avoid when: one common model is needed during training, or shards are strongly skewed.
Alternatives: `swarm` with local steps between meetings; `asp` with a server; `ripples_smart` in
groups.

Rule: an active worker i draws a passive neighbour j at random. Both set their model to (x_i +
x_j)/2 in one exchange. Then worker i adds its local steps, x_i ← x_i + Δ_i, where Δ_i was computed
on a possibly stale copy of x_i. A passive worker computes in the same way and answers requests, but
sends none.
Roles: ranks of odd number are active and ranks of even number passive if the edges between them
connect all workers. Otherwise the parity of the distance from rank 0 in the graph decides. Edges
between two workers of one role are not used.
Waiting: no worker waits for a slower one. An active worker waits for the answer to its own request
only; with `overlap` the models travel while it computes.

Limits: one worker is SGD. A slow worker delays no other worker. The mean of all models changes by
the Δ_i alone.
Source: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv 1710.06952.
Differs: the exchange needs no lock (see `ashl.topology.pairs`). Roles are as published, but they
are not needed to avoid a deadlock.

Family: gossip.
Status: recommended.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ashl.option import Count, option
from ashl.topology.graph import Edge, MemberGraph, Sources, depths, sources_of
from ashl.topology.pairs import PairRule


@option
class ADPSGD(PairRule):
    """Asynchronous averaging in pairs of an active and a passive worker."""

    local_steps: Count | Literal["plan"]
    overlap: bool

    def peers(self, graph: MemberGraph, rank: int) -> tuple[int, ...]:
        """Return the neighbours that this worker may ask: the passive ones of an active worker,
        else none.
        """
        return passive_neighbours(graph)[rank]


@lru_cache(maxsize=16)
def passive_neighbours(graph: MemberGraph) -> Sources:
    """Return the passive neighbours of each active worker of a graph, by rank."""
    return graph.sources_by_rank(choose_partners(graph.places, len(graph.ranks)))


def choose_partners(edges: tuple[Edge, ...], n: int) -> Sources:
    """Return the passive neighbours of each active worker, by rank; none for passive workers."""
    crossing = edges_across(edges, range(n))
    role: Sequence[int] = range(n)
    # a negative depth: these edges do not connect all workers
    if min(depths(sources_of(crossing, n))) < 0:
        role = depths(sources_of(edges, n))
        crossing = edges_across(edges, role)
    neighbours = enumerate(sources_of(crossing, n))
    return tuple(passive if role[rank] % 2 else () for rank, passive in neighbours)


def edges_across(edges: Sequence[Edge], role: Sequence[int]) -> list[Edge]:
    """Return the edges between an even and an odd role."""
    return [(i, j) for i, j in edges if (role[i] + role[j]) % 2]

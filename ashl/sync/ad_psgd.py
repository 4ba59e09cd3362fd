"""AD-PSGD: nobody waits for anybody; half of the workers ask one neighbour at a time to average
models with them.

Rule: an active worker i computes Δ_i on its own, possibly stale, copy, draws a passive neighbour j,
both take (x_i + x_j)/2 in one atomic exchange, then x_i ← x_i + Δ_i; passive workers step and
answer. Roles follow the graph: even and odd ranks where the edges between them connect all,
otherwise the parity of the distance from rank 0; edges inside a role are not used. `overlap` hides
the exchange behind the computation.

Limits: one worker is SGD; a slow worker costs the others nothing. The mean of all models moves by
the Δ alone. Departs from the paper in that the exchange needs no lock (see `ashl.topology.pairs`),
so that roles are kept as published and are not what prevents a deadlock.
Source: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv 1710.06952.
"""

from collections.abc import Sequence
from typing import Literal

from ashl.option import Count, option
from ashl.stage.stage import Stage
from ashl.topology.gossip import graph_of
from ashl.topology.graph import Edge, Sources, depths, sources_of
from ashl.topology.pairs import PairRule


@option
class ADPSGD(PairRule):
    """Asynchronous averaging in pairs of an active and a passive worker."""

    local_steps: Count | Literal["plan"]
    overlap: bool

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom this worker may ask: an active one its passive neighbours, a passive one nobody."""
        return stage.cached(partners_in)[rank]


def partners_in(stage: Stage) -> Sources:
    return choose_partners(graph_of(stage).edges(stage), stage.num_workers)


def choose_partners(edges: tuple[Edge, ...], n: int) -> Sources:
    """By rank: the passive neighbours of the active workers, nobody for the passive ones."""
    crossing = edges_across(edges, range(n))
    role: Sequence[int] = range(n)
    if min(depths(sources_of(crossing, n))) < 0:
        role = depths(sources_of(edges, n))
        crossing = edges_across(edges, role)
    return tuple(heard if role[i] % 2 else () for i, heard in enumerate(sources_of(crossing, n)))


def edges_across(edges: Sequence[Edge], role: Sequence[int]) -> list[Edge]:
    """The edges between an even and an odd role."""
    return [(i, j) for i, j in edges if (role[i] + role[j]) % 2]

"""Costs of an all-reduce by a chosen algorithm, see `ashl.cluster.all_reduce_rounds`.

A round takes as long as its slowest message, and an all-reduce as long as its rounds in sequence. A
ring has no barrier between rounds; `ashl.cluster.network` computes its duration. `auto` is the
fastest algorithm for the given bytes over the links at the start of the run; among equals, the
first of `BY_NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ashl.cluster.all_reduce_rounds import BY_NAME, Round, nodes_of_members, rounds_of
from ashl.cluster.spec import Cluster, ContentionCosts, Measured
from ashl.cluster.speed import NS, Factors

MAX_CACHED = 4096  # maximum number of cached costs

Group = tuple[int, ...]
CostOf = Callable[[Round, np.ndarray], int]  # (round, bytes of each message) → nanoseconds


def contention_of(cluster: Cluster) -> ContentionCosts | None:
    """Return the measured contention between collectives and computing; None = none."""
    return cluster.contention if isinstance(cluster, Measured) else None


def cost_over_nics(
    node: np.ndarray, latency: np.ndarray, out: np.ndarray, into: np.ndarray
) -> CostOf:
    """Return the cost of a round between members on the nodes `node`.

    Args: `latency` holds seconds by member; `out` and `into` hold seconds per byte of each member's
    NIC, with one row for links between nodes and one for links inside. Messages that share a NIC
    are serialised.
    """
    g = len(node)

    def cost_ns(one: Round, nbytes: np.ndarray) -> int:
        inner = (node[one.src] == node[one.dst]).astype(int)
        held_s = []
        for rank, s_per_byte in ((one.src, out), (one.dst, into)):
            nic = np.where(inner, g + rank, node[rank])
            held_s.append(np.bincount(nic, s_per_byte[inner, rank] * nbytes)[nic])
        latency_s = np.maximum(latency[inner, one.src], latency[inner, one.dst])
        return int((np.rint(latency_s * NS) + np.rint(np.maximum(*held_s) * NS)).max())

    return cost_ns


class AllReduceCost(NamedTuple):
    """The algorithm of an all-reduce, its cost at the start of the run, and the bytes that each
    member sends and receives.
    """

    algorithm: str
    cost_ns: int
    sent: list[int]
    received: list[int]


class CollectiveNetwork(Protocol):
    """The properties of a network that all-reduce costs need. `steady`: True if the links never
    change.
    """

    steady: bool
    factors: Factors

    def ring_ns(self, group: Group, nbytes: int, now_ns: int) -> int: ...

    def round_ns(self, group: Group, now_ns: int) -> CostOf: ...


class AllReduceCosts:
    """All-reduce costs of one network, cached by group and bytes."""

    def __init__(
        self, algorithm: str, node: Sequence[int] | None, network: CollectiveNetwork
    ) -> None:
        self.algorithm = algorithm
        self.node = node
        self._network = network
        self._known: dict[tuple[Group, int], AllReduceCost] = {}

    def list_candidates(self, group: Group) -> list[str]:
        """Return the algorithms that `auto` compares.

        The star is not among them, and the hierarchy only if a node has several members.
        """
        nodes = nodes_of_members(group, self.node)
        excluded = {"star"} if 1 < len(set(nodes)) < len(nodes) else {"star", "hierarchical"}
        return [name for name in BY_NAME if name not in excluded]

    def initial_cost(self, group: Group, nbytes: int) -> AllReduceCost:
        """Return the cost of an all-reduce of `nbytes` at the start of the run."""
        if (found := self._known.get((group, nbytes))) is None:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            names = self.list_candidates(group) if self.algorithm == "auto" else [self.algorithm]
            found = min(
                (self.cost_of(name, group, nbytes, 0) for name in names),
                key=lambda known: known.cost_ns,
            )
            self._known[group, nbytes] = found
        return found

    def cost_ns(self, group: Group, nbytes: int, now_ns: int) -> int:
        """Return the nanoseconds of an all-reduce that begins now."""
        known = self.initial_cost(group, nbytes)
        return (
            known.cost_ns
            if self._network.steady
            else self.cost_of(known.algorithm, group, nbytes, now_ns).cost_ns
        )

    def cost_of(self, algorithm: str, group: Group, nbytes: int, now_ns: int) -> AllReduceCost:
        """Return the cost of an all-reduce by this algorithm that begins now."""
        g = len(group)
        if algorithm == "ring":
            moved = [2 * (g - 1) * nbytes // g] * g
            return AllReduceCost(
                algorithm, self._network.ring_ns(group, nbytes, now_ns), moved, moved
            )
        pieces, rounds = rounds_of(algorithm, nodes_of_members(group, self.node))
        round_ns = self._network.round_ns(group, now_ns)
        cost_ns = 0
        sent = np.zeros(g)
        received = np.zeros(g)
        for one in rounds:
            count = one.stop - one.start
            cost_ns += round_ns(one, nbytes * (count / pieces))
            sent += np.bincount(one.src, count, g)
            received += np.bincount(one.dst, count, g)
        moved = ([nbytes * int(count) // pieces for count in way] for way in (sent, received))
        return AllReduceCost(
            algorithm, self._network.factors.add_outages(group, cost_ns, now_ns), *moved
        )

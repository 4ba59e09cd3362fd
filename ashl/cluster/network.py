"""Network models: duration of transfers and collectives, in integer nanoseconds.

There are two models. With a declared `exchange_s` no NIC is ever busy: a transfer of worker i takes
`link_i · exchange_s / 2 · bytes / dense bytes` (between workers the larger factor holds).

Otherwise a transfer occupies the sender's NIC for bytes / bandwidth and crosses the link in
`latency_s`. It then occupies the receiver's NIC from the moment when its head has arrived and that
NIC is free. So many workers that push to one server at once queue at its NIC (incast). Head and
tail overlap: an uncontended transfer takes latency + bytes / bandwidth of the slower NIC. NICs
belong to nodes: workers that `cluster.node` places on one node share its NIC, and each has one of
its own for links inside the node.

A collective is a ring, ordered node by node and by rank within a node, so that it leaves each node
once. An all-reduce of g members takes 2(g − 1) rounds. In each, every member sends a chunk of bytes
/ g to the next member as soon as the chunk before has arrived. An all-gather takes g − 1 rounds.
The cost of a collective is that of these messages one by one, until the last has arrived. The
collective occupies the NICs of its ring from start to end: it begins when earlier messages have
left them, and later messages queue behind it. An all-reduce by another chosen algorithm takes as
long as `ashl.cluster.all_reduce_costs` computes, and occupies the same NICs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ashl.cluster.all_reduce_costs import AllReduceCosts, CostOf, cost_over_nics
from ashl.cluster.all_reduce_rounds import Round
from ashl.cluster.spec import Cluster, Measured
from ashl.cluster.speed import NS, Factors

MAX_CACHED = 4096  # maximum number of cached rings and costs

# (rank, or the first rank of its node; "out" or "in"; True for links inside a node)
Nic = tuple[int, str, bool]
# nanoseconds of a chunk at the sender's NIC, on the link, at the receiver's NIC
Edge = tuple[int, int, int]


class IncomingMessage(NamedTuple):
    """A message in flight; messages sort in the order in which the receiver's NIC serves them."""

    head_ns: int
    place: int  # position in the order of sending
    dst: int
    nbytes: int
    tail_ns: int
    # moment of the last byte, known once a collective waits for the message; else None
    end_ns: int | None


class Ring(NamedTuple):
    """The ring of a group's collectives: edges (from, to, True inside a node), and the NICs of both
    ends of each edge.
    """

    edges: tuple[tuple[int, int, bool], ...]
    nics: tuple[Nic, ...]


class ExchangeNetwork:
    """Network model with declared exchange times: nothing queues."""

    def __init__(self, cluster: Cluster, dense_bytes: int, algorithm: str | None = None) -> None:
        assert cluster.exchange_s is not None
        self.half_s = cluster.exchange_s / 2
        self.dense_bytes = dense_bytes
        self.num_workers = len(cluster.compute)
        self.factors = Factors(cluster, "link")
        self.outages = bool(self.factors.outages)
        self.steady = not cluster.events
        self._cache: dict[tuple[int, int, int], int] = {}
        self.all_reduce_costs = (
            None if algorithm is None else AllReduceCosts(algorithm, cluster.node, self)
        )

    def cost_ns(self, src: int, dst: int, nbytes: int, now_ns: int) -> int:
        if not nbytes and not self.outages:
            return 0
        if self.steady and (cost := self._cache.get((src, dst, nbytes))) is not None:
            return cost
        ends = [rank for rank in (src, dst) if rank < self.num_workers]
        factor = max((self.factors.factor_of(rank, now_ns) for rank in ends), default=1.0)
        cost = round(factor * self.half_s * (nbytes / self.dense_bytes) * NS)
        cost = self._cache[src, dst, nbytes] = self.factors.add_outages(ends, cost, now_ns)
        return cost

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Return the nanoseconds of an uncontended transfer."""
        return self.cost_ns(src, dst, nbytes, 0)

    def all_reduce_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        return (
            self.all_reduce_costs.cost_ns(group, nbytes, now_ns)
            if self.all_reduce_costs
            else self.ring_ns(group, nbytes, now_ns)
        )

    def ring_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        """Return the nanoseconds of a ring all-reduce."""
        g = len(group)
        factor = max(self.factors.factor_of(rank, now_ns) for rank in group)
        cost = round(2 * self.half_s * factor * (g - 1) / g * (nbytes / self.dense_bytes) * NS)
        return self.factors.add_outages(group, cost, now_ns)

    def round_ns(self, group: tuple[int, ...], now_ns: int) -> CostOf:
        """Return the cost function of the rounds of an all-reduce that begins now."""
        factors = np.array([self.factors.factor_of(rank, now_ns) for rank in group])

        def cost_ns(one: Round, nbytes: np.ndarray) -> int:
            slower = np.maximum(factors[one.src], factors[one.dst])
            return round(float((slower * self.half_s * (nbytes / self.dense_bytes) * NS).max()))

        return cost_ns

    def all_gather_ns(self, group: tuple[int, ...], total: int, now_ns: int) -> int:
        """Return the nanoseconds of an all-gather: half of a ring all-reduce of `total` bytes, the
        payloads of all members together.
        """
        return self.ring_ns(group, total, now_ns) // 2

    def free_ns(self, group: tuple[int, ...], rank: int | None = None) -> int:
        """Return the moment when the NICs that a group's collectives need are free, of all members
        or of one.
        """
        return 0

    def occupy_nics(self, group: tuple[int, ...], cost_ns: int, now_ns: int) -> int:
        """Return the moment when a collective begins: now, as no NIC is ever busy."""
        return now_ns

    def release(self) -> None:
        """Do nothing, as no NIC is ever busy."""


class NicNetwork:
    """Network model with latency, bandwidth, and the occupancy of the NICs of both ends."""

    def __init__(self, cluster: Cluster, dense_bytes: int, algorithm: str | None = None) -> None:
        self.cluster = cluster
        self.factors = Factors(cluster, "link")
        self._measured_all_reduce = cluster.all_reduce if isinstance(cluster, Measured) else None
        first: dict[int, int] = {}
        self._first = [  # by rank: the first rank on the same node; empty without nodes
            first.setdefault(node, rank) for rank, node in enumerate(cluster.node or ())
        ]
        # The first rank beyond the workers (a server) is on a node of its own; those after it (the
        # servers of nodes) are one on each node.
        if self._first:
            self._first += [len(self._first), *(first[node] for node in sorted(first))]
        self._free: dict[Nic, int] = {}
        # heaps: messages in flight to a receiver's NIC
        self._incoming: dict[Nic, list[IncomingMessage]] = {}
        self._posted = 0
        self.steady = not cluster.events
        self._rings: dict[tuple[int, ...], Ring] = {}
        self._costs: dict[tuple[tuple[int, ...], int, int], int] = {}
        self.all_reduce_costs = (
            None if algorithm is None else AllReduceCosts(algorithm, cluster.node, self)
        )

    def is_inside_node(self, src: int, dst: int) -> bool:
        return src < len(self._first) and self.node_of(src) == self.node_of(dst)

    def node_of(self, rank: int) -> int:
        """Return the first rank on the same node."""
        return self._first[rank] if rank < len(self._first) else rank

    def nic_of(self, rank: int, way: str, inner: bool) -> Nic:
        return rank if inner else self.node_of(rank), way, inner

    def service_ns(self, rank: int, nbytes: float, now_ns: int, inner: bool, out: bool) -> int:
        """Return the nanoseconds for which these bytes occupy this rank's NIC, out of it or into
        it.
        """
        return round(
            self.factors.factor_of(rank, now_ns)
            * nbytes
            / self.cluster.bytes_s(rank, out, inner)
            * NS
        )

    def latency_ns(self, src: int, dst: int, nbytes: float, now_ns: int) -> int:
        inner = self.is_inside_node(src, dst)
        return round(
            max(
                self.factors.factor_of(r, now_ns) * self.cluster.latency_of(r, inner)
                for r in (src, dst)
            )
            * NS
        )

    def queue_at_sender(self, src: int, dst: int, nbytes: int, now_ns: int) -> tuple[int, int, int]:
        """Queue a message at the sender's NIC.

        Returns: (start of the transfer, arrival of its head, earliest arrival of its tail).
        """
        inner = self.is_inside_node(src, dst)
        key = self.nic_of(src, "out", inner)
        start = max(now_ns, self._free.get(key, 0))
        service = self.service_ns(src, nbytes, now_ns, inner, out=True)
        latency = self.latency_ns(src, dst, nbytes, now_ns)
        paused = self.factors.add_outages((src,), 0, start)
        sending = self.factors.add_outages((src,), service, start)
        self._free[key] = start + sending
        return start, start + paused + latency, start + sending + latency

    def send_message(self, src: int, dst: int, nbytes: int, now_ns: int) -> tuple[int, int, int]:
        """Queue a message at the sender's NIC as `queue_at_sender` does, and register it as in
        flight.

        The caller calls `queue_at_receiver` at the moment when the head has arrived.
        """
        start, head, tail = self.queue_at_sender(src, dst, nbytes, now_ns)
        self._posted += 1
        incoming = self._incoming.setdefault(
            self.nic_of(dst, "in", self.is_inside_node(src, dst)), []
        )
        heappush(incoming, IncomingMessage(head, self._posted, dst, nbytes, tail, None))
        return start, head, tail

    def queue_at_receiver(self, src: int, dst: int, nbytes: int, head_ns: int, tail_ns: int) -> int:
        """Queue a message at the receiver's NIC, in the order in which heads arrive.

        Returns: the moment when the last byte has arrived.
        """
        inner = self.is_inside_node(src, dst)
        key = self.nic_of(dst, "in", inner)
        if (incoming := self._incoming.get(key)) and (end := heappop(incoming).end_ns) is not None:
            return end
        self._free[key] = self._receive_end_ns(key, dst, nbytes, head_ns)
        return max(self._free[key], tail_ns)

    def _receive_end_ns(self, nic: Nic, dst: int, nbytes: int, head_ns: int) -> int:
        """Return the moment when the receiver's NIC has received a message whose head has
        arrived.
        """
        start = max(head_ns, self._free.get(nic, 0))
        service = self.service_ns(dst, nbytes, head_ns, nic[2], out=False)
        return start + self.factors.add_outages((dst,), service, start)

    def _reserve_for_incoming(self, nic: Nic) -> None:
        """Reserve the NIC for all messages in flight to it, before any message that is sent from
        now on.
        """
        reserved = []
        for incoming in sorted(self._incoming[nic]):
            if incoming.end_ns is None:
                self._free[nic] = self._receive_end_ns(
                    nic, incoming.dst, incoming.nbytes, incoming.head_ns
                )
                incoming = incoming._replace(end_ns=max(self._free[nic], incoming.tail_ns))
            reserved.append(incoming)
        self._incoming[nic] = reserved  # a sorted list is a heap

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Return the nanoseconds of an uncontended transfer."""
        inner = self.is_inside_node(src, dst)
        ends = (src, True), (dst, False)
        service = max(self.service_ns(end, nbytes, 0, inner, out) for end, out in ends)
        return self.latency_ns(src, dst, nbytes, 0) + service

    def all_reduce_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        """Return the nanoseconds of an all-reduce through free NICs.

        The order of precedence is the chosen algorithm, the measured all-reduce of all workers, a
        ring.
        """
        if self.all_reduce_costs:
            return self.all_reduce_costs.cost_ns(group, nbytes, now_ns)
        if self._measured_all_reduce is not None and len(group) == len(self.cluster.compute):
            return round(self._measured_all_reduce.seconds(nbytes) * NS)
        return self.ring_ns(group, nbytes, now_ns)

    def ring_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        """Return the nanoseconds of a ring all-reduce, computed from the links."""
        return self._rounds_ns(group, nbytes, 2 * (len(group) - 1), now_ns)

    def round_ns(self, group: tuple[int, ...], now_ns: int) -> CostOf:
        """Return the cost function of the rounds of an all-reduce that begins now."""
        factors = np.array([self.factors.factor_of(rank, now_ns) for rank in group])
        nodes = np.unique([self.node_of(rank) for rank in group], return_inverse=True)[1]
        # links between nodes, and links inside a node if two members share one
        kinds = (False, len(set(nodes)) < len(group))
        latency = [[self.cluster.latency_of(rank, inner) for rank in group] for inner in kinds]
        bytes_s = self.cluster.bytes_s
        out = [[bytes_s(rank, True, inner) for rank in group] for inner in kinds]
        into = [[bytes_s(rank, False, inner) for rank in group] for inner in kinds]
        return cost_over_nics(nodes, factors * latency, factors / out, factors / into)

    def all_gather_ns(self, group: tuple[int, ...], total: int, now_ns: int) -> int:
        """Return the nanoseconds of an all-gather: one pass round the ring with `total` bytes, the
        payloads of all members together.
        """
        if self._measured_all_reduce is not None and len(group) == len(self.cluster.compute):
            return self.all_reduce_ns(group, total, now_ns) // 2
        return self._rounds_ns(group, total, len(group) - 1, now_ns)

    def free_ns(self, group: tuple[int, ...], rank: int | None = None) -> int:
        """Return the moment when the NICs that a group's collectives need are free, of all members
        or of one.
        """
        nics = self.ring(group).nics
        if rank is not None:
            nics = tuple(nic for nic in nics if nic[0] in (rank, self.node_of(rank)))
        return max(self._free.get(nic, 0) for nic in nics)

    def occupy_nics(self, group: tuple[int, ...], cost_ns: int, now_ns: int) -> int:
        """Occupy the NICs of a group's ring with a collective of `cost_ns`, and return its
        start.
        """
        if len(group) == 1:
            return now_ns
        for nic in self.ring(group).nics:
            if self._incoming.get(nic):
                self._reserve_for_incoming(nic)
        start = max(now_ns, self.free_ns(group))
        self._free.update(dict.fromkeys(self.ring(group).nics, start + cost_ns))
        return start

    def release(self) -> None:
        """Free all NICs, because no message is in flight, and aborted transfers count as ended."""
        self._free.clear()
        self._incoming.clear()

    def ring(self, group: tuple[int, ...]) -> Ring:
        """Return the ring of a group, ordered node by node."""
        ring = self._rings.get(group)
        if ring is None:
            if len(self._rings) >= MAX_CACHED:
                self._rings.clear()
            members = sorted(group, key=lambda rank: (self.node_of(rank), rank))
            edges = tuple(
                (a, b, self.is_inside_node(a, b))
                for a, b in zip(members, [*members[1:], members[0]], strict=True)
            )
            nics = tuple(
                self.nic_of(rank, way, e[2])
                for e in edges
                for rank, way in ((e[0], "out"), (e[1], "in"))
            )
            ring = self._rings[group] = Ring(edges, nics)
        return ring

    def _rounds_ns(self, group: tuple[int, ...], nbytes: int, rounds: int, now_ns: int) -> int:
        key = (group, nbytes, rounds)
        if self.steady and (cost := self._costs.get(key)) is not None:
            return cost
        if len(self._costs) >= MAX_CACHED:
            self._costs.clear()
        chunk = nbytes / len(group)
        edges = [
            (
                self.service_ns(a, chunk, now_ns, inner, out=True),
                self.latency_ns(a, b, nbytes, now_ns),
                self.service_ns(b, chunk, now_ns, inner, out=False),
            )
            for a, b, inner in self.ring(group).edges
        ]
        cost = self._costs[key] = self.factors.add_outages(group, ring_ns(edges, rounds), now_ns)
        return cost


class MeasuredNicNetwork(NicNetwork):
    """Network model of a profile with a latency of its own for pushes, pulls and empty messages."""

    def __init__(self, cluster: Measured, dense_bytes: int, algorithm: str | None = None) -> None:
        super().__init__(cluster, dense_bytes, algorithm)
        self._measured, self._server = cluster, len(cluster.compute)

    def latency_ns(self, src: int, dst: int, nbytes: float, now_ns: int) -> int:
        ends = [(src, self._measured.latencies), (dst, self._measured.pull_latencies)]
        if not nbytes and self._measured.empty_s:
            ends = [(src, self._measured.empty_s), (dst, self._measured.empty_s)]
        own_s = (self.factors.factor_of(r, now_ns) * own[r] for r, own in ends if r < self._server)
        return round(max(own_s, default=0.0) * NS)


def ring_ns(edges: list[Edge], rounds: int) -> int:
    """Return the nanoseconds until every member of a ring has received `rounds` messages.

    Each message is sent as soon as the one before has arrived. `edges[j]` leads from the j-th
    member to the next.
    """
    if len(set(edges)) == 1:  # equal edges: no member waits for another
        out, latency, into = edges[0]
        return rounds * (latency + max(out, into))
    out, latency, into = np.array(edges, dtype=np.int64).T
    had, out_free, in_free = np.zeros((3, len(edges)), dtype=np.int64)
    for _ in range(rounds):
        start = np.maximum(had, out_free)
        out_free = start + out
        head = start + latency
        in_free = np.maximum(head, in_free) + into
        had = np.roll(np.maximum(in_free, head + out), 1)
    return int(had.max(initial=0))


def make_network(
    cluster: Cluster, dense_bytes: int, algorithm: str | None = None
) -> ExchangeNetwork | NicNetwork:
    """Return the network model of a cluster; `algorithm` is that of all-reduces, if one was
    chosen.
    """
    if cluster.exchange_s is not None:
        return ExchangeNetwork(cluster, dense_bytes, algorithm)
    if isinstance(cluster, Measured) and cluster.pull_latencies:
        return MeasuredNicNetwork(cluster, dense_bytes, algorithm)
    return NicNetwork(cluster, dense_bytes, algorithm)

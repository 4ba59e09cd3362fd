"""How long transfers take, in integer nanoseconds.

Two models. With a declared `exchange_s`, ports have no occupancy and a transfer of worker i takes
`link_i · exchange_s / 2 · bytes / dense bytes` (between workers the larger factor holds). Otherwise a transfer
occupies the sender's port for bytes / bandwidth, crosses in `latency_s`, and occupies the receiver's port from the
moment its head arrives there and the port is free: many workers that push to one server at once queue at its port.
Head and tail overlap, so an uncontended transfer takes latency + bytes / the slower of the two ports.
"""

from __future__ import annotations

from ashl.cluster.spec import Cluster
from ashl.cluster.speed import NS, Factors

MBIT_BYTES = 125_000


class Exchange:
    """Declared exchange times; nothing queues."""

    ports = False

    def __init__(self, cluster: Cluster, dense_bytes: int) -> None:
        assert cluster.exchange_s is not None
        self.half_s = cluster.exchange_s / 2
        self.dense_bytes = dense_bytes
        self.num_workers = cluster.num_workers
        self.factors = Factors(cluster, "link")
        self._plain = not cluster.events
        self._cache: dict[tuple[int, int, int], int] = {}

    def cost_ns(self, src: int, dst: int, nbytes: int, now_ns: int) -> int:
        if not nbytes:
            return 0
        if self._plain and (cost := self._cache.get((src, dst, nbytes))) is not None:
            return cost
        ends = [rank for rank in (src, dst) if rank < self.num_workers]
        factor = max(self.factors.at(rank, now_ns) for rank in ends)
        cost = round(factor * self.half_s * (nbytes / self.dense_bytes) * NS)
        self._cache[src, dst, nbytes] = cost
        return cost

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int:
        """One uncontended transfer."""
        return self.cost_ns(src, dst, nbytes, 0)

    def all_reduce_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        g = len(group)
        factor = max(self.factors.at(rank, now_ns) for rank in group)
        return round(2 * self.half_s * factor * (g - 1) / g * (nbytes / self.dense_bytes) * NS)


class Ports:
    """Latency, bandwidth, and the occupancy of both ends. A machine's inner links are ports of their own."""

    ports = True

    def __init__(self, cluster: Cluster, dense_bytes: int) -> None:
        assert cluster.bandwidth_mbit_s is not None
        assert cluster.latency_s is not None
        self.cluster = cluster
        self.latency_s = cluster.latency_s
        self.bandwidth = cluster.bandwidth_mbit_s * MBIT_BYTES
        self.factors = Factors(cluster, "link")
        self._free: dict[tuple[int, str, bool], int] = {}

    def inner(self, src: int, dst: int) -> bool:
        node = self.cluster.node
        return node is not None and max(src, dst) < len(node) and node[src] == node[dst]

    def service_ns(self, rank: int, nbytes: int, now_ns: int, inner: bool) -> int:
        """How long these bytes hold this rank's port."""
        if rank >= self.cluster.num_workers:  # the server's port; null = never the bottleneck
            server = self.cluster.server_bandwidth_mbit_s
            return 0 if server is None else round(nbytes / (server * MBIT_BYTES) * NS)
        bandwidth = (self.cluster.inner_bandwidth_mbit_s or 0) * MBIT_BYTES if inner else self.bandwidth
        return round(self.factors.at(rank, now_ns) * nbytes / bandwidth * NS)

    def latency_ns(self, src: int, dst: int, now_ns: int) -> int:
        return round(max(self.factors.at(src, now_ns), self.factors.at(dst, now_ns)) * self.latency_s * NS)

    def depart(self, src: int, dst: int, nbytes: int, now_ns: int) -> tuple[int, int, int]:
        """Queue at the sender's port: (start of the transfer, arrival of its head, earliest arrival of its tail)."""
        inner = self.inner(src, dst)
        key = (src, "out", inner)
        start = max(now_ns, self._free.get(key, 0))
        service = self.service_ns(src, nbytes, now_ns, inner)
        self._free[key] = start + service
        head = start + self.latency_ns(src, dst, now_ns)
        return start, head, head + service

    def arrive(self, src: int, dst: int, nbytes: int, head_ns: int, tail_ns: int) -> int:
        """Queue at the receiver's port, in the order in which heads arrive; returns when the last byte is in."""
        inner = self.inner(src, dst)
        key = (dst, "in", inner)
        self._free[key] = max(head_ns, self._free.get(key, 0)) + self.service_ns(dst, nbytes, head_ns, inner)
        return max(self._free[key], tail_ns)

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int:
        """One uncontended transfer."""
        inner = self.inner(src, dst)
        return self.latency_ns(src, dst, 0) + max(self.service_ns(end, nbytes, 0, inner) for end in (src, dst))

    def all_reduce_ns(self, group: tuple[int, ...], nbytes: int, now_ns: int) -> int:
        """A ring: 2(g − 1) rounds, each of bytes / g over the slowest link."""
        g = len(group)
        if g == 1:
            return 0
        ring = list(zip(group, (*group[1:], group[0]), strict=True))
        latency = max(self.latency_ns(a, b, now_ns) for a, b in ring)
        slowest = max(self.service_ns(r, nbytes, now_ns, self.inner(a, b)) for a, b in ring for r in (a, b))
        return 2 * (g - 1) * (latency + round(slowest / g))


def network(cluster: Cluster, dense_bytes: int) -> Exchange | Ports:
    return Exchange(cluster, dense_bytes) if cluster.exchange_s is not None else Ports(cluster, dense_bytes)

"""Throttle a real run to its declared costs, and count how often the host was too slow for them.

A step or transfer with a declared cost ends at its start plus the cost. Without a declared cost it
takes its measured time, multiplied by the slowdown factor. A start is counted from the declared end
of the work before it, so that a sleep that overshoots by a tenth of a millisecond does not
accumulate. `Nics` knows when the NICs are free. Where workers of one node share a NIC, the process
of the job's store has one `Nics` for all ranks.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ashl.cluster.network import ExchangeNetwork, NicNetwork, make_network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Factors, Speed
from ashl.runtime.records import PacingStats

SLACK = 1.02  # a step or transfer is late if it takes more than this multiple of its declared time


class LatenessCounter:
    """A sum of declared times and of lateness. One thread adds."""

    __slots__ = ("declared_ns", "late_ns")

    def __init__(self) -> None:
        self.late_ns = self.declared_ns = 0

    def add(self, declared_ns: int, taken_ns: int) -> None:
        self.declared_ns += declared_ns
        if taken_ns > SLACK * declared_ns:
            self.late_ns += taken_ns - declared_ns


class Requests(Protocol):
    """The job's store, as far as a throttle uses it."""

    def call(self, name: str, *args: Any) -> Any: ...


class Throttle:
    """The emulated costs of one rank; without costs on a real cluster."""

    def __init__(
        self,
        cluster: Any,
        rank: int,
        batch: int,
        seed: int,
        dense_bytes: int,
        clock_ns: Callable[[], int],
        store: Requests,
        algorithm: str | None = None,
    ) -> None:
        """Set up the costs of a rank. `store` answers requests for shared NICs; `algorithm` is the
        all-reduce algorithm, if one is set.
        """
        self.rank = rank
        self.clock = clock_ns
        self.work = LatenessCounter()  # lateness of steps and encodings
        # by sender
        self.transfers: defaultdict[int, LatenessCounter] = defaultdict(LatenessCounter)
        self.speed: Speed | None = None
        self.network: ExchangeNetwork | NicNetwork | None = None
        self.compute = self.link = None
        if isinstance(cluster, Cluster):
            self.speed = Speed(cluster, batch, seed)
            self.compute = Factors(cluster, "compute")
            self.link = Factors(cluster, "link")
            if cluster.exchange_s is not None or cluster.bandwidth_mbit_s is not None:
                self.network = make_network(cluster, dense_bytes, algorithm)
        self._shares = isinstance(self.network, NicNetwork) and cluster.node is not None
        self._nics: Callable[..., Any] = (
            partial(store.call, "nics") if self._shares else Nics(self.network).call
        )

    def cost_ns(self, kind: str, work: float, start_ns: int) -> int | None:
        """Return the declared cost of a computation that starts at `start_ns`, or None. Call it
        once per computation, because it draws jitter.
        """
        return self.speed.cost_ns(self.rank, kind, work, start_ns) if self.speed else None

    def finish_compute(self, kind: str, cost: int | None, start_ns: int) -> int:
        """Wait until the declared end of a computation that started at `start_ns`; return the end
        in ns.
        """
        now = self.clock()
        if cost is None:
            factor = 1.0
            if self.compute and kind == "compute":
                factor = self.compute.factor_of(self.rank, start_ns)
            cost = round(factor * (now - start_ns)) if factor != 1.0 else 0
        elif kind in ("compute", "compress"):
            self.work.add(cost, now - start_ns)
        return self.wait_until(start_ns + cost)

    def wait_until(self, due_ns: int) -> int:
        """Wait until `due_ns` and return it, or return now if it has passed."""
        now = self.clock()
        if now >= due_ns:
            return now
        time.sleep((due_ns - now) / 1e9)
        return due_ns

    def schedule_departure(self, dst: int, nbytes: int, now_ns: int) -> tuple[int, int, int]:
        """Return when the header and when the payload of a message leave, and until when this rank
        is busy with sending, all in ns.
        """
        if self.network is None or not nbytes:
            return now_ns, now_ns, now_ns
        if isinstance(self.network, ExchangeNetwork):
            end = now_ns + self.network.cost_ns(self.rank, dst, nbytes, now_ns)
            return now_ns, end, end
        _, head, tail = self._nics("queue_at_sender", self.rank, dst, nbytes, now_ns)
        return head, head, tail

    def schedule_arrival(self, src: int, nbytes: int, header_ns: int, now_ns: int) -> int:
        """Return when a message counts as delivered, once its bytes have arrived."""
        if isinstance(self.network, NicNetwork):
            inner = self.network.is_inside_node(src, self.rank)
            tail = header_ns + self.network.service_ns(src, nbytes, header_ns, inner, out=True)
            due = self._nics("queue_at_receiver", src, self.rank, nbytes, header_ns, tail)
            self.transfers[src].add(due - header_ns, now_ns - header_ns)
            return due
        if self.network is not None:  # the sender has throttled it
            declared_ns = self.network.cost_ns(src, self.rank, nbytes, header_ns)
            self.transfers[src].add(declared_ns, now_ns - header_ns)
            return now_ns
        if self.link is not None:
            factor = max(self.link.factor_of(src, now_ns), self.link.factor_of(self.rank, now_ns))
            return round(header_ns + factor * (now_ns - header_ns))
        return now_ns

    def free_ns(self, group: tuple[int, ...]) -> int:
        """Return when this rank's NIC is free for a collective of a group."""
        return 0 if self.network is None else self._nics("free_ns", group, self.rank)

    def schedule_collective(
        self, group: tuple[int, ...], number: int, nbytes: int, now_ns: int, *, gathers: bool
    ) -> tuple[int, int | None]:
        """Return the begin of the group's collective of this number and its cost in ns; the cost is
        None if it is not declared. The group's NICs are occupied until its end.

        Args: nbytes: of the vector of an all-reduce, or (`gathers`) of all payloads of an
        all-gather together.
        """
        if self.network is None:
            return now_ns, None
        cost_of = self.network.all_gather_ns if gathers else self.network.all_reduce_ns
        cost_ns = cost_of(group, nbytes, now_ns)
        name = f"{group} {number}" if self._shares else None
        begin, cost = self._nics("occupy_nics", group, cost_ns, now_ns, name)
        return begin, cost

    def report(self) -> PacingStats:
        """Return by how much this rank was later than declared."""
        counters = [(self.rank, self.work), *self.transfers.items()]
        rows = [(rank, own.late_ns / 1e9, own.declared_ns / 1e9) for rank, own in counters]
        return PacingStats(self.rank, rows)


class Nics:
    """The state of NICs, of one rank or of all ranks. Several threads may call it."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._lock = threading.Lock()
        # by name: begin and cost of a collective, and how many members have not asked for it
        self._begun: dict[str, tuple[int, int, int]] = {}

    def call(self, name: str, *args: Any) -> Any:
        """Return the result of `queue_at_sender`, `queue_at_receiver` or `free_ns` of the network,
        or of `occupy_nics`.
        """
        assert name in ("queue_at_sender", "queue_at_receiver", "free_ns", "occupy_nics")
        values = [tuple(value) if isinstance(value, list) else value for value in args]
        with self._lock:
            return getattr(self if name == "occupy_nics" else self._network, name)(*values)

    def occupy_nics(
        self, group: tuple[int, ...], cost_ns: int, now_ns: int, name: str | None
    ) -> tuple[int, int]:
        """Return the begin and the cost of a collective. Among members that share this object the
        first one that asks decides for all; they ask by a name of the collective.
        """
        begun = self._begun.pop(name or "", None)
        if begun is None:
            begun = self._network.occupy_nics(group, cost_ns, now_ns), cost_ns, len(group)
        begin, cost, remaining = begun
        if name is not None and remaining > 1:
            self._begun[name] = begin, cost, remaining - 1
        return begin, cost

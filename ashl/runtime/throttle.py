"""Throttle a real run to its declared costs, and count how often the host was too slow for them.

A step or transfer with a declared cost ends at its start plus the cost. Without a declared cost it
takes its measured time, multiplied by the slowdown factor. A start is counted from the declared end
of the work before it, so that a sleep that overshoots by a tenth of a millisecond does not
accumulate. Workers on one node share a NIC: their processes keep its state in one document of the
job's store (`SharedNics`).
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ashl.cluster.network import Exchange, Ports, network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Factors, Speed
from ashl.runtime.records import Lateness, PacingStats

T = TypeVar("T")
SLACK = 1.02  # a step or transfer is late if it takes more than this multiple of its declared time


class LatenessCounter:
    """A count of late operations and their lateness. One thread counts."""

    __slots__ = ("count", "declared_ns", "late", "late_ns")

    def __init__(self) -> None:
        self.count = self.late = self.late_ns = self.declared_ns = 0

    def add(self, declared_ns: int, taken_ns: int) -> None:
        self.count += 1
        self.declared_ns += declared_ns
        if taken_ns > SLACK * declared_ns:
            self.late += 1
            self.late_ns += taken_ns - declared_ns

    def report(self) -> Lateness:
        return Lateness(self.count, self.late, self.late_ns / 1e9, self.declared_ns / 1e9)


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
        store: dist.Store,
        algorithm: str | None = None,
    ) -> None:
        """Set up the costs of a rank. In `store` the job's processes exchange when their shared
        NICs are free; `algorithm` is the all-reduce algorithm, if one is set.
        """
        self.rank = rank
        self.clock = clock_ns
        self.steps = LatenessCounter()
        self.encodings = LatenessCounter()
        # by sender
        self.transfers: defaultdict[int, LatenessCounter] = defaultdict(LatenessCounter)
        self.speed: Speed | None = None
        self.network: Exchange | Ports | None = None
        self.compute = self.link = None
        # the main thread, listeners and threads of collectives use the NICs
        self._lock = threading.Lock()
        if isinstance(cluster, Cluster):
            self.speed = Speed(cluster, batch, seed)
            self.compute = Factors(cluster, "compute")
            self.link = Factors(cluster, "link")
            if cluster.exchange_s is not None or cluster.bandwidth_mbit_s is not None:
                self.network = network(cluster, dense_bytes, algorithm)
        shares = isinstance(self.network, Ports) and cluster.node is not None
        self._shared = SharedNics(store, rank) if shares else None

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
            factor = (
                self.compute.at(self.rank, start_ns) if self.compute and kind == "compute" else 1.0
            )
            cost = round(factor * (now - start_ns)) if factor != 1.0 else 0
        elif kind in ("compute", "compress"):
            (self.steps if kind == "compute" else self.encodings).add(cost, now - start_ns)
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
        if isinstance(self.network, Exchange):
            end = now_ns + self.network.cost_ns(self.rank, dst, nbytes, now_ns)
            return now_ns, end, end
        _, head, tail = self._change_nics(
            self.network, lambda ports: ports.leave(self.rank, dst, nbytes, now_ns)
        )
        return head, head, tail

    def schedule_arrival(self, src: int, nbytes: int, header_ns: int, now_ns: int) -> int:
        """Return when a message counts as delivered whose bytes have arrived."""
        if isinstance(self.network, Ports):
            inner = self.network.inner(src, self.rank)
            tail = header_ns + self.network.service_ns(src, nbytes, header_ns, inner, out=True)
            due = self._change_nics(
                self.network, lambda ports: ports.arrive(src, self.rank, nbytes, header_ns, tail)
            )
            self.transfers[src].add(due - header_ns, now_ns - header_ns)
            return due
        if self.network is not None:  # the sender has throttled it
            self.transfers[src].add(
                self.network.cost_ns(src, self.rank, nbytes, header_ns), now_ns - header_ns
            )
            return now_ns
        if self.link is not None:
            factor = max(self.link.at(src, now_ns), self.link.at(self.rank, now_ns))
            return round(header_ns + factor * (now_ns - header_ns))
        return now_ns

    def free_ns(self, group: tuple[int, ...]) -> int:
        """Return when this rank's NIC is free for a collective of a group."""
        return 0 if self.network is None else self.network.free_ns(group, self.rank)

    def schedule_all_reduce(
        self, group: tuple[int, ...], number: int, nbytes: int, now_ns: int
    ) -> tuple[int, int | None]:
        """Return the begin of the group's all-reduce of this number and its cost in ns, or None
        without declared costs. The group's NICs are occupied until its end.
        """
        if self.network is None:
            return now_ns, None
        return self._hold_nics(
            self.network, group, number, self.network.all_reduce_ns(group, nbytes, now_ns), now_ns
        )

    def schedule_all_gather(
        self, group: tuple[int, ...], number: int, total: int, now_ns: int
    ) -> tuple[int, int | None]:
        """Return the begin and the cost of an all-gather of `total` bytes, as `schedule_all_reduce`
        does.
        """
        if self.network is None:
            return now_ns, None
        return self._hold_nics(
            self.network, group, number, self.network.all_gather_ns(group, total, now_ns), now_ns
        )

    def _hold_nics(
        self,
        network: Exchange | Ports,
        group: tuple[int, ...],
        number: int,
        cost_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        with self._lock:
            if self._shared is not None and isinstance(network, Ports) and len(group) > 1:
                return self._shared.begin_collective(
                    network, f"{group} {number}", group, cost_ns, now_ns
                )
            return network.hold(group, cost_ns, now_ns), cost_ns

    def _change_nics(self, network: Ports, change: Callable[[Ports], T]) -> T:
        with self._lock:
            return change(network) if self._shared is None else self._shared.apply(network, change)

    def report(self) -> PacingStats:
        """Return how often, and by how much, this rank was later than declared."""
        transfers = [(src, late.report()) for src, late in self.transfers.items()]
        return PacingStats(self.rank, self.steps.report(), transfers, self.encodings.report())


# --- NICs that several processes share


PORTS_KEY = "ports"


class SharedNics:
    """One process's view of NICs that several processes share. One thread at a time may use it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._text = ""  # the document as last read
        self._changes = 0

    def apply(self, network: Ports, change: Callable[[Ports], T]) -> T:
        """Apply `change` to the current state of the NICs and return its result. `change` may be
        called more than once.
        """
        return self._change(network, lambda _: change(network))

    def begin_collective(
        self, network: Ports, name: str, group: tuple[int, ...], cost_ns: int, now_ns: int
    ) -> tuple[int, int]:
        """Return the begin and the cost of the collective of this name; the first member that asks
        decides for all.
        """

        def change(begun: dict[str, list[int]]) -> tuple[int, int]:
            start, cost, left = begun.pop(name, None) or (
                network.hold(group, cost_ns, now_ns),
                cost_ns,
                len(group),
            )
            if left > 1:
                begun[name] = [start, cost, left - 1]
            return start, cost

        return self._change(network, change)

    def _change(self, network: Ports, change: Callable[[dict[str, list[int]]], T]) -> T:
        while True:
            known: dict[str, Any] = (
                json.loads(self._text) if self._text else {"free": [], "begun": {}}
            )
            network.go_on(
                ({(rank, way, inner): at for rank, way, inner, at in known["free"]}, {}, 0)
            )
            result = change(known["begun"])
            self._changes += 1
            free = [[*port, at] for port, at in network.saved()[0].items()]
            # makes each document unique; otherwise two processes could both take an equal document
            # for their own
            by = [
                self._rank,
                self._changes,
            ]
            text = json.dumps({"by": by, "free": free, "begun": known["begun"]})
            self._text = self._store.compare_set(PORTS_KEY, self._text, text).decode()
            if self._text == text:
                return result

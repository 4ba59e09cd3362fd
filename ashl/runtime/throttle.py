"""Making a real run last as long as was declared, and saying where the machine was too slow for that.

A step or transfer with a declared cost ends at its start plus the cost. Without one, it takes as long as it takes,
times the slowdown factor. Starts are counted from where the last one should have ended, so that a sleep that
overshoots by a tenth of a millisecond does not add up over a run.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ashl.cluster.network import Exchange, Ports, network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Factors, Speed
from ashl.runtime.nic_emulation import SharedNics
from ashl.runtime.records import Lateness, PacingStats

T = TypeVar("T")
SLACK = 1.02  # a step or transfer this much longer than declared is late


class LatenessCounter:
    """How often something took longer than declared, and by how much. One thread counts."""

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
    """The emulated costs of one rank; for a real cluster, none."""

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
        """In `store` the job's processes tell each other when the ports are free that they share; `algorithm`: the one
        of sums, where one was asked for."""
        self.rank, self.clock = rank, clock_ns
        self.steps, self.encodings = LatenessCounter(), LatenessCounter()
        self.transfers: defaultdict[int, LatenessCounter] = defaultdict(
            LatenessCounter
        )  # by the rank that they came from
        self.speed: Speed | None = None
        self.network: Exchange | Ports | None = None
        self.compute = self.link = None
        self._lock = threading.Lock()  # ports are asked for by the main thread, by listeners and by teams' threads
        if isinstance(cluster, Cluster):
            self.speed = Speed(cluster, batch, seed)
            self.compute, self.link = Factors(cluster, "compute"), Factors(cluster, "link")
            if cluster.exchange_s is not None or cluster.bandwidth_mbit_s is not None:
                self.network = network(cluster, dense_bytes, algorithm)
        shares = isinstance(self.network, Ports) and cluster.node is not None
        self._shared = SharedNics(store, rank) if shares else None

    def cost_ns(self, kind: str, work: float, start_ns: int) -> int | None:
        """What a computation that starts then is declared to cost; to be asked once, as jitter is drawn."""
        return self.speed.cost_ns(self.rank, kind, work, start_ns) if self.speed else None

    def computed(self, kind: str, cost: int | None, start_ns: int) -> int:
        """Wait until a computation that started then should end; returns when it counts as ended."""
        now = self.clock()
        if cost is None:
            factor = self.compute.at(self.rank, start_ns) if self.compute and kind == "compute" else 1.0
            cost = round(factor * (now - start_ns)) if factor != 1.0 else 0
        elif kind in ("compute", "compress"):
            (self.steps if kind == "compute" else self.encodings).add(cost, now - start_ns)
        return self.until(start_ns + cost)

    def until(self, due_ns: int) -> int:
        """Wait until then; returns when that was, or now where it is past."""
        now = self.clock()
        if now >= due_ns:
            return now
        time.sleep((due_ns - now) / 1e9)
        return due_ns

    def departure(self, dst: int, nbytes: int, now_ns: int) -> tuple[int, int, int]:
        """When the header and when the body of a message leave, and until when this rank is busy sending."""
        if self.network is None or not nbytes:
            return now_ns, now_ns, now_ns
        if isinstance(self.network, Exchange):
            end = now_ns + self.network.cost_ns(self.rank, dst, nbytes, now_ns)
            return now_ns, end, end
        _, head, tail = self._ask(self.network, lambda ports: ports.leave(self.rank, dst, nbytes, now_ns))
        return head, head, tail

    def arrival(self, src: int, nbytes: int, header_ns: int, now_ns: int) -> int:
        """When a message whose bytes are here counts as delivered."""
        if isinstance(self.network, Ports):
            inner = self.network.inner(src, self.rank)
            tail = header_ns + self.network.service_ns(src, nbytes, header_ns, inner, out=True)
            due = self._ask(self.network, lambda ports: ports.arrive(src, self.rank, nbytes, header_ns, tail))
            self.transfers[src].add(due - header_ns, now_ns - header_ns)
            return due
        if self.network is not None:  # its sender has paced it
            self.transfers[src].add(self.network.cost_ns(src, self.rank, nbytes, header_ns), now_ns - header_ns)
            return now_ns
        if self.link is not None:
            factor = max(self.link.at(src, now_ns), self.link.at(self.rank, now_ns))
            return round(header_ns + factor * (now_ns - header_ns))
        return now_ns

    def free_ns(self, team: tuple[int, ...]) -> int:
        """When this rank's ports are free for a collective of a team."""
        return 0 if self.network is None else self.network.free_ns(team, self.rank)

    def all_reduced(self, team: tuple[int, ...], number: int, nbytes: int, now_ns: int) -> tuple[int, int | None]:
        """When the team's all-reduce of that number begins, and what it costs; None = as long as it takes.
        It holds the team's ports."""
        if self.network is None:
            return now_ns, None
        return self._held(self.network, team, number, self.network.all_reduce_ns(team, nbytes, now_ns), now_ns)

    def all_gathered(self, team: tuple[int, ...], number: int, total: int, now_ns: int) -> tuple[int, int | None]:
        """The same of an all-gather of so many bytes."""
        if self.network is None:
            return now_ns, None
        return self._held(self.network, team, number, self.network.all_gather_ns(team, total, now_ns), now_ns)

    def _held(
        self, network: Exchange | Ports, team: tuple[int, ...], number: int, cost_ns: int, now_ns: int
    ) -> tuple[int, int]:
        with self._lock:
            if self._shared is not None and isinstance(network, Ports) and len(team) > 1:
                return self._shared.begin(network, f"{team} {number}", team, cost_ns, now_ns)
            return network.hold(team, cost_ns, now_ns), cost_ns

    def _ask(self, network: Ports, change: Callable[[Ports], T]) -> T:
        with self._lock:
            return change(network) if self._shared is None else self._shared.ask(network, change)

    def report(self) -> PacingStats:
        """How well the machine kept the declared pace."""
        transfers = [(src, late.report()) for src, late in self.transfers.items()]
        return PacingStats(self.rank, self.steps.report(), transfers, self.encodings.report())

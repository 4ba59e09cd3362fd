"""Inject faults into a simulation: workers fail and rejoin, or the server fails.

A worker that fails loses its state, the messages in flight to it, and the messages that it sent and
that have not arrived. NICs still receive those messages. Peers are notified `detect_s` later, or
when the worker rejoins, if that is sooner: a failure is always seen before the next incarnation.

Random faults: the k-th time to failure of worker i is Exp(mtbf_s), and the k-th time to repair
Exp(mttr_s). Each is the k-th draw of the worker's own stream. A failure that would leave fewer than
`min_workers` is skipped, and the next one is drawn. Faults never extend a run: it ends when all
running workers have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from heapq import heapify, heappush
from itertools import count
from typing import Any

import numpy as np

from ashl.cluster.network import Ports
from ashl.cluster.spec import Cluster, Event
from ashl.data.rng import Purpose, stream
from ashl.errors import AshlError
from ashl.runtime.effects import Message, PeerFailedError
from ashl.runtime.kernel import Mailbox, Task
from ashl.runtime.membership import SimMembership
from ashl.runtime.records import WorkerFailed, WorkerRejoined
from ashl.runtime.sim import Sim

FIRST = -(2**60)  # places of events before all others of an instant
# number of time budgets after which no worker fails at random: later work does not count, and the
# run is about to end
LAST_BUDGETS = 2


class DiscardingMailbox(Mailbox):
    """The mailbox of a failed worker: it drops every message."""

    __slots__ = ()

    def put(self, message: Message) -> Task | None:
        return None


class Churn:
    """Injects the faults of a cluster into a simulation. `start(ctx, joins=True)` returns the
    coroutine of a joining worker; `peers_of(rank)` returns the ranks that are notified of its
    failure.
    """

    def __init__(
        self,
        sim: Sim,
        cluster: Cluster,
        seed: int,
        min_workers: int,
        peers_of: Callable[[int], Sequence[int]],
        start: Callable[..., Coroutine],
    ) -> None:
        self.sim = sim
        self.cluster = cluster
        self.min_workers = min_workers
        self.peers_of = peers_of
        self.start = start
        # True if there is a server, so that the run tolerates the failure of all workers
        self.has_server = len(sim.contexts) > len(cluster.compute)
        self._places = count(FIRST)
        self.membership = SimMembership(sim, len(cluster.compute))
        # (peer, failed worker, time of the failure in ns, reason): not notified yet
        self._uninformed: set[tuple[int, int, int, str]] = set()
        for event in cluster.events:
            if event.server_fail:
                self._at(event.time_s, self._server_fails, event)
            elif event.fail or event.rejoin:
                self._at(event.time_s, self._apply_event, event)
        if cluster.churn is not None:
            for rank in range(len(cluster.compute)):
                self._draw(
                    rank,
                    stream(seed, Purpose.CHURN, rank),
                    cluster.churn.mtbf_s,
                    self._random_failure,
                )

    @property
    def over(self) -> bool:
        """Return True if a running rank has ended, and thereby the run."""
        return any(task.done and task.ctx.rank not in self.sim.gone for task in self.sim._mains)

    def _at(self, time_s: float, target: Any, value: Any) -> None:
        self._at_ns(round(time_s * 1e9), target, value)

    def _at_ns(self, time_ns: int, target: Any, value: Any) -> None:
        heappush(self.sim._heap, (time_ns, next(self._places), target, value))

    def _apply_event(self, event: Event) -> None:
        """Apply a declared failure or rejoin."""
        assert event.worker is not None
        if event.fail:
            self.fail(event.worker, "declared")
        else:
            self.rejoin(event.worker)

    def _server_fails(self, event: Event) -> None:
        if not self.over:
            raise AshlError(
                f"the server failed at {event.time_s:g} s, as cluster.events says, and no worker"
                " can continue without it"
            )

    # --- at random

    def _draw(self, rank: int, rng: np.random.Generator, mean_s: float, what: Any) -> None:
        self._at(self.sim.now_ns / 1e9 + rng.exponential(mean_s), what, (rank, rng))

    def _random_failure(self, item: tuple[int, np.random.Generator]) -> None:
        rank, rng = item
        churn = self.cluster.churn
        limit_ns = min(ctx.time_accounting.limit_ns for ctx in self.sim.contexts)
        if self.over or churn is None or self.sim.now_ns > LAST_BUDGETS * limit_ns:
            return
        remaining = (
            len(self.cluster.compute) - len(self.sim.gone)
            if self.has_server
            else len(self.membership.with_model - {rank}) + 1
        )
        if rank in self.sim.gone or remaining > self.min_workers:
            self.fail(rank, "random")
            self._draw(rank, rng, churn.mttr_s, self._random_rejoin)
        else:
            self._draw(rank, rng, churn.mtbf_s, self._random_failure)

    def _random_rejoin(self, item: tuple[int, np.random.Generator]) -> None:
        rank, rng = item
        churn = self.cluster.churn
        if not self.over and churn is not None:
            self.rejoin(rank)
            self._draw(rank, rng, churn.mtbf_s, self._random_failure)

    # --- a loss and a return

    def fail(self, rank: int, why: str) -> None:
        """Let a running worker fail at this instant."""
        sim, now = self.sim, self.sim.now_ns
        if rank in sim.gone or self.over:
            return
        sim.gone.add(rank)
        for task in [task for task in sim._tasks if task.ctx.rank == rank]:
            sim._cancel(task)
        self._truncate_accounting(rank)
        sim.contexts[rank].time_accounting.abort_collectives(now)
        self._discard_events(rank)
        sim._unit_free[rank] = sim._push_end[rank] = now
        sim.contexts[rank].counter = None
        sim.observer.emit(WorkerFailed(rank, now, why))
        assert self.cluster.failure_detection_s is not None
        peers = self.peers_of(rank)
        self.membership.fail_member(rank, peers)
        if not self.has_server and not self.membership.with_model:
            raise AshlError(
                f"worker {rank} failed at {now / 1e9:.6g} s and 0 of {len(self.cluster.compute)}"
                " workers remain that have the model: the run ends here"
            )
        for peer in peers:
            self._uninformed.add(item := (peer, rank, now, why))
            self._at_ns(now + round(self.cluster.failure_detection_s * 1e9), self._inform, item)

    def _inform(self, item: tuple[int, int, int, str]) -> None:
        """Notify a peer of a failure, unless it was notified already."""
        sim, (peer, rank, since_ns, why) = self.sim, item
        if item not in self._uninformed:
            return
        self._uninformed.remove(item)
        loss = PeerFailedError(
            rank, f"{why}, at {since_ns / 1e9:.6g} s", self.membership.failures[rank] - 1
        )
        for task, value in sim._mail[peer].mark_failed(loss, since_ns):
            if task.main:
                task.ctx.time_accounting.attribute_idle(sim.now_ns)
            sim._resume(task, value)
        self.membership.noticed_by(peer, rank)

    def rejoin(self, rank: int) -> None:
        """Let a failed worker rejoin, without any state."""
        sim = self.sim
        if rank not in sim.gone or self.over:
            return
        for item in sorted(item for item in self._uninformed if item[1] == rank):
            self._inform(item)
        self.membership.note_failure(rank)
        self._discard_events(rank)
        sim.gone.remove(rank)
        sim._mail[rank] = Mailbox()
        for peer in self.peers_of(rank):
            sim._mail[peer].failed_peers.pop(rank, None)
        ctx = sim.contexts[rank]
        ctx.incarnation = self.membership.failures[rank]
        ctx.time_accounting.limit_ns = min(other.time_accounting.limit_ns for other in sim.contexts)
        ctx.time_accounting.attribute_until("down", sim.now_ns)
        sim.observer.emit(WorkerRejoined(rank, sim.now_ns))
        sim._mains[rank] = sim.spawn(ctx, self.start(ctx, joins=True), main=True)

    def _truncate_accounting(self, rank: int) -> None:
        """Truncate a rank's accounted time at this instant."""
        sim = self.sim
        arriving_ns = [
            event[1].start_ns
            for _, _, target, event in sim._heap
            if target == sim._deliver and event[0] == rank
        ]
        sim.contexts[rank].time_accounting.truncate_at(
            sim.now_ns, sim._push_end[rank], min(arriving_ns, default=sim.now_ns)
        )

    def _discard_events(self, rank: int) -> None:
        """Discard the events of a rank and the messages in flight to it and from it."""
        sim = self.sim
        sim._mail[rank] = DiscardingMailbox()
        own_targets, kept_events = (sim._awake, sim._expire, sim._emit_part), []
        for time_ns, place, target, value in sim._heap:
            if target.__class__ is Task:
                discarded = target.ctx.rank == rank
            elif target == sim._deliver or target == sim._arrive:
                discarded = rank in (value[0], value[1].src)
                if discarded and target == sim._arrive:
                    discarded, target = False, self._receive_and_discard
            else:
                discarded = target in own_targets and value[0].ctx.rank == rank
                # the receive has ended already
                discarded = discarded or (
                    target == sim._expire and value[0].waiting is not value[1]
                )
            if not discarded:
                kept_events.append((time_ns, place, target, value))
        heapify(kept_events)
        sim._heap[:] = kept_events

    def _receive_and_discard(self, item: tuple[int, Message, int, int]) -> None:
        """Occupy the receiver's NIC with a message of a failed worker or to it, and discard the
        message.
        """
        dst, message, nbytes, tail = item
        assert isinstance(self.sim.network, Ports)
        self.sim.network.arrive(message.src, dst, nbytes, self.sim.now_ns, tail)

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
from ashl.runtime.records import Joined, Lost
from ashl.runtime.sim import Sim

FIRST = -(2**60)  # before all else that happens at an instant
# budgets of time, after which nobody fails at random: what is done then does not count, and is to
# end
LATE = 2


class DiscardingMailbox(Mailbox):
    """The mailbox of a failed worker: it drops every message."""

    __slots__ = ()

    def put(self, message: Message) -> Task | None:
        return None


class Churn:
    """Lets a cluster's events happen to a simulation. `start(ctx, comes=True)` is the coroutine of
    a worker that comes; `links(rank)` says who hears of a loss.
    """

    def __init__(
        self,
        sim: Sim,
        cluster: Cluster,
        seed: int,
        min_workers: int,
        links: Callable[[int], Sequence[int]],
        start: Callable[..., Coroutine],
    ) -> None:
        self.sim, self.cluster, self.min_workers, self.links, self.start = (
            sim,
            cluster,
            min_workers,
            links,
            start,
        )
        self.served = len(sim.contexts) > len(
            cluster.compute
        )  # so that somebody goes on whatever becomes of the workers
        self._places = count(FIRST)
        self.membership = SimMembership(sim, len(cluster.compute))
        self._uninformed: set[tuple[int, int, int, str]] = (
            set()
        )  # (a peer, who is lost, since when, why)
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
                    self._fails_at_random,
                )

    @property
    def over(self) -> bool:
        """Whether the run is: some rank that is there has ended."""
        return any(task.done and task.ctx.rank not in self.sim.gone for task in self.sim._mains)

    def _at(self, time_s: float, target: Any, value: Any) -> None:
        self._at_ns(round(time_s * 1e9), target, value)

    def _at_ns(self, time_ns: int, target: Any, value: Any) -> None:
        heappush(self.sim._heap, (time_ns, next(self._places), target, value))

    def _apply_event(self, event: Event) -> None:
        """What was declared."""
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

    def _fails_at_random(self, item: tuple[int, np.random.Generator]) -> None:
        rank, rng = item
        churn = self.cluster.churn
        limit_ns = min(ctx.time_accounting.limit_ns for ctx in self.sim.contexts)
        if self.over or churn is None or self.sim.now_ns > LATE * limit_ns:
            return
        left = (
            len(self.cluster.compute) - len(self.sim.gone)
            if self.served
            else len(self.membership.knowing - {rank}) + 1
        )
        if rank in self.sim.gone or left > self.min_workers:
            self.fail(rank, "random")
            self._draw(rank, rng, churn.mttr_s, self._comes_at_random)
        else:
            self._draw(rank, rng, churn.mtbf_s, self._fails_at_random)

    def _comes_at_random(self, item: tuple[int, np.random.Generator]) -> None:
        rank, rng = item
        churn = self.cluster.churn
        if not self.over and churn is not None:
            self.rejoin(rank)
            self._draw(rank, rng, churn.mtbf_s, self._fails_at_random)

    # --- a loss and a return

    def fail(self, rank: int, why: str) -> None:
        """A worker that is there is gone from now on."""
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
        sim.observer.emit(Lost(rank, now, why))
        assert self.cluster.failure_detection_s is not None
        peers = self.links(rank)
        self.membership.fail_member(rank, peers)
        if not self.served and not self.membership.knowing:
            raise AshlError(
                f"worker {rank} failed at {now / 1e9:.6g} s and 0 of {len(self.cluster.compute)}"
                " workers remain that have the model: the run ends here"
            )
        for peer in peers:
            self._uninformed.add(item := (peer, rank, now, why))
            self._at_ns(now + round(self.cluster.failure_detection_s * 1e9), self._inform, item)

    def _inform(self, item: tuple[int, int, int, str]) -> None:
        """A peer hears that a worker is lost, unless it has already."""
        sim, (peer, rank, since_ns, why) = self.sim, item
        if item not in self._uninformed:
            return
        self._uninformed.remove(item)
        loss = PeerFailedError(
            rank, f"{why}, at {since_ns / 1e9:.6g} s", self.membership.losses[rank] - 1
        )
        for task, value in sim._mail[peer].mark_failed(loss, since_ns):
            if task.main:
                task.ctx.time_accounting.attribute_idle(sim.now_ns)
            sim._resume(task, value)
        self.membership.noticed_by(peer, rank)

    def rejoin(self, rank: int) -> None:
        """A worker that is gone is back, and knows nothing."""
        sim = self.sim
        if rank not in sim.gone or self.over:
            return
        for item in sorted(item for item in self._uninformed if item[1] == rank):
            self._inform(item)
        self.membership.note_failure(rank)
        self._discard_events(rank)
        sim.gone.remove(rank)
        sim._mail[rank] = Mailbox()
        for peer in self.links(rank):
            sim._mail[peer].lost.pop(rank, None)
        ctx = sim.contexts[rank]
        ctx.incarnation = self.membership.losses[rank]
        ctx.time_accounting.limit_ns = min(other.time_accounting.limit_ns for other in sim.contexts)
        ctx.time_accounting.attribute_until("down", sim.now_ns)
        sim.observer.emit(Joined(rank, sim.now_ns))
        sim._mains[rank] = sim.spawn(ctx, self.start(ctx, comes=True), main=True)

    def _truncate_accounting(self, rank: int) -> None:
        """Cut a rank's accounted time off at this instant."""
        sim = self.sim
        coming = [
            v[1].start_ns
            for _, _, target, v in sim._heap
            if target == sim._deliver and v[0] == rank
        ]
        sim.contexts[rank].time_accounting.truncate_at(
            sim.now_ns, sim._push_end[rank], min(coming, default=sim.now_ns)
        )

    def _discard_events(self, rank: int) -> None:
        """Nothing comes any more of what goes on in this rank, or is on its way to it or
        from it.
        """
        sim = self.sim
        sim._mail[rank] = DiscardingMailbox()
        own, kept = (sim._awake, sim._expire, sim._emit_part), []
        for time_ns, place, target, value in sim._heap:
            if target.__class__ is Task:
                lost = target.ctx.rank == rank
            elif target == sim._deliver or target == sim._arrive:
                lost = rank in (value[0], value[1].src)
                if lost and target == sim._arrive:
                    lost, target = False, self._receive_and_discard
            else:
                lost = target in own and value[0].ctx.rank == rank
                lost = lost or (
                    target == sim._expire and value[0].waiting is not value[1]
                )  # nobody waits any more
            if not lost:
                kept.append((time_ns, place, target, value))
        heapify(kept)
        sim._heap[:] = kept

    def _receive_and_discard(self, item: tuple[int, Message, int, int]) -> None:
        """What a lost worker had sent, or was to get, is at a port, which takes it in all
        the same.
        """
        dst, message, nbytes, tail = item
        assert isinstance(self.sim.network, Ports)
        self.sim.network.arrive(message.src, dst, nbytes, self.sim.now_ns, tail)

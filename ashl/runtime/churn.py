"""Inject faults into a simulation: workers fail and rejoin, or the server fails.

A worker that fails loses its state, the messages in flight to it, and the messages that it sent and
that have not arrived. NICs still receive those messages. The failure is noticed
`cluster.failure_detection_s` later, or when the worker rejoins, if that is sooner: a failure is
always seen before the next incarnation.

With a topology that regroups (`Topology.regroups`), a noticed failure or a rejoin begins a new
epoch: every rank continues from its last safe point with the members of the epoch
(`ashl.stage.program`). With any other topology, the peers of the worker receive a message.

Random faults: the k-th time to failure of worker i is Exp(mtbf_s), and the k-th time to repair
Exp(mttr_s). Each is the k-th draw of the worker's own stream. A failure that would leave fewer than
`min_workers` is skipped, and the next one is drawn. Faults never extend a run: it ends when all
running workers have ended. Without `stop.seconds`, a run in which workers fail too often for any
merge ends with an error (`FAILURES_PER_MERGE`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from heapq import heapify, heappush
from typing import Any, NamedTuple

from ashl.cluster.spec import Cluster
from ashl.data.rng import Purpose, stream
from ashl.errors import AshlError
from ashl.runtime.effects import Epoch, Message, PeerFailedError
from ashl.runtime.records import WorkerFailed, WorkerRejoined
from ashl.runtime.sim import Sim

FIRST = -(2**60)  # places of events before all others of an instant
# number of time budgets after which no worker fails at random: later work does not count, and the
# run is about to end
LAST_BUDGETS = 2
# random failures between two merges, on average for each worker, that a run without a time budget
# tolerates: after more of them it would hardly reach its limit
FAILURES_PER_MERGE = 100


class SavedFaults(NamedTuple):
    """State of the faults at a pause, for a checkpoint."""

    epoch: Epoch
    failures: dict[int, int]
    failed_ranks: tuple[int, ...]
    uninformed: tuple[tuple[int, int, int, str], ...]
    # events to come: time in ns, place in the order of events, name of the method, its argument
    pending: tuple[tuple[int, int, str, Any], ...]
    places: int  # place of the next event
    draws: dict[int, int]  # random numbers that each worker has drawn
    # by rank: failed peers that it was notified of, with cause and earlier failures
    failed_peers: dict[int, tuple[tuple[int, str, int], ...]]
    # by rank: notifications that no receive has taken yet
    notifications: dict[int, tuple[Message, ...]]


class Churn:
    """Injects the faults of a cluster into a simulation.

    `start(ctx, joins=True)` returns the coroutine of a joining worker, and `start(ctx, saved=...,
    epoch=...)` that of a member of a new epoch; `peers_of(rank)` returns the ranks that are
    notified of its failure.
    """

    def __init__(
        self,
        sim: Sim,
        cluster: Cluster,
        seed: int,
        min_workers: int,
        peers_of: Callable[[int], Sequence[int]],
        start: Callable[..., Coroutine],
        regroups: bool = False,
    ) -> None:
        self.sim = sim
        self.cluster = cluster
        self.min_workers = min_workers
        self.peers_of = peers_of
        self.start = start
        # True if there is a server: then the run tolerates the failure of all workers
        self.has_server = len(sim.contexts) > len(cluster.compute)
        self._place = FIRST
        self._draws = Counter[int]()
        self.regroups = regroups
        self.failures = Counter[int]()  # failures of each worker so far
        self._merges = 0  # merges of the run at the latest random failure
        self._failures_since_merge = 0  # random failures of all workers since the latest merge
        self.epoch = Epoch(0, tuple(range(len(cluster.compute))))
        if regroups:
            sim.failed_ns = {}
            for ctx in sim.contexts:
                ctx.tolerates_failures = True
        # (peer, failed worker, time of the failure in ns, reason): not notified yet
        self._uninformed: set[tuple[int, int, int, str]] = set()
        self._streams = {
            rank: stream(seed, Purpose.CHURN, rank) for rank in range(len(cluster.compute))
        }
        for number, event in enumerate(cluster.events):
            if event.server_fail or event.fail or event.rejoin:
                self._schedule(event.time_s, self._apply_event, number)
        if cluster.churn is not None:
            for rank in range(len(cluster.compute)):
                self._schedule_random(rank, cluster.churn.mtbf_s, self._fail_at_random)

    @property
    def has_run_ended(self) -> bool:
        """Return True if a running rank has ended, and thereby the run."""
        return any(
            task.done and task.ctx.rank not in self.sim.failed_ranks for task in self.sim._mains
        )

    def _schedule(self, time_s: float, target: Any, value: Any) -> None:
        self._schedule_ns(round(time_s * 1e9), target, value)

    def _schedule_ns(self, time_ns: int, target: Any, value: Any) -> None:
        heappush(self.sim._heap, (time_ns, self._place, target, value))
        self._place += 1

    def _apply_event(self, number: int) -> None:
        """Apply a declared failure or rejoin."""
        event = self.cluster.events[number]
        if event.server_fail and self.has_run_ended:
            return
        if event.server_fail:
            raise AshlError(
                f"the server failed at {event.time_s:g} s, as cluster.events says, and no worker"
                " can continue without it"
            )
        assert event.worker is not None
        if event.fail:
            self.fail(event.worker, "declared")
        else:
            self.rejoin(event.worker)

    # --- at random

    def _schedule_random(self, rank: int, mean_s: float, what: Callable[[int], None]) -> None:
        self._draws[rank] += 1
        self._schedule(self.sim.now_ns / 1e9 + self._streams[rank].exponential(mean_s), what, rank)

    def _fail_at_random(self, rank: int) -> None:
        churn = self.cluster.churn
        limit_ns = min(ctx.time_accounting.limit_ns for ctx in self.sim.contexts)
        if self.has_run_ended or churn is None or self.sim.now_ns > LAST_BUDGETS * limit_ns:
            return
        if self.has_server:
            remaining = len(self.cluster.compute) - len(self.sim.failed_ranks)
        else:
            remaining = len(self._workers_with_model() - {rank}) + 1
        if rank in self.sim.failed_ranks or remaining > self.min_workers:
            if math.isinf(limit_ns):
                self._check_merges(churn.mtbf_s)
            self.fail(rank, "random")
            self._schedule_random(rank, churn.mttr_s, self._rejoin_at_random)
        else:
            self._schedule_random(rank, churn.mtbf_s, self._fail_at_random)

    def _check_merges(self, mtbf_s: float) -> None:
        """Count a random failure. Raises: AshlError if far too many came since the last merge."""
        counters = [ctx.counter for ctx in self.sim.contexts if ctx.counter is not None]
        merges = max((one.progress.report().merges for one in counters), default=0)
        if merges > self._merges:
            self._merges, self._failures_since_merge = merges, 0
        self._failures_since_merge += 1
        if self._failures_since_merge > FAILURES_PER_MERGE * len(self.cluster.compute):
            raise AshlError(
                f"cluster.churn.mtbf_s={mtbf_s:g}: workers fail too often; no merge ended during"
                f" the last {self._failures_since_merge} failures, until"
                f" {self.sim.now_ns / 1e9:.6g} s; take a longer mtbf_s, shorter rounds, or"
                " stop.seconds"
            )

    def _rejoin_at_random(self, rank: int) -> None:
        churn = self.cluster.churn
        if not self.has_run_ended and churn is not None:
            self.rejoin(rank)
            self._schedule_random(rank, churn.mtbf_s, self._fail_at_random)

    # --- checkpoints

    def save_state(self) -> SavedFaults:
        """Return the state of the faults at a pause."""
        mail = self.sim._mail
        events = self._pending_events()
        return SavedFaults(
            self.epoch,
            dict(self.failures),
            tuple(sorted(self.sim.failed_ranks)),
            tuple(sorted(self._uninformed)),
            tuple((time_ns, place, what.__name__, own) for time_ns, place, what, own in events),
            self._place,
            dict(self._draws),
            {
                rank: tuple((peer, of.why, of.incarnation) for peer, of in box.failed_peers.items())
                for rank, box in enumerate(mail)
            },
            {rank: tuple(box.undelivered_messages()) for rank, box in enumerate(mail)},
        )

    def _pending_events(self) -> list[tuple[int, int, Any, Any]]:
        """Return the events of faults that are to come."""
        return [item for item in self.sim._heap if getattr(item[2], "__self__", None) is self]

    def restore(self, saved: SavedFaults) -> Epoch | None:
        """Continue with the faults of a checkpoint. Returns: the present epoch, or None if none has
        begun.
        """
        sim = self.sim
        self.epoch = saved.epoch
        self.failures = Counter(saved.failures)
        self._place = saved.places
        self._uninformed = set(saved.uninformed)
        sim.failed_ranks.update(saved.failed_ranks)
        for rank, draws in saved.draws.items():
            self._streams[rank].exponential(size=draws - self._draws[rank])
            self._draws[rank] = draws
        self._replace_pending_events(
            [(at, place, getattr(self, name), of) for at, place, name, of in saved.pending]
        )
        for rank, known in saved.failed_peers.items():
            found = {peer: PeerFailedError(peer, why, before) for peer, why, before in known}
            sim._mail[rank].failed_peers.update(found)
            for message in saved.notifications[rank]:
                sim._mail[rank].put(message)
        for rank, failures in self.failures.items():
            sim.contexts[rank].incarnation = 0 if self.regroups else failures
            sim.restarts[rank] = failures  # messages to an earlier incarnation may remain
        return self.epoch if self.regroups and self.epoch.number else None

    def begin_after(self, time_ns: int) -> None:
        """Begin at this run time, at which all workers run: delete declared events of before, and
        count times to random failures from it.
        """
        events = list[tuple[int, int, Any, Any]]()
        for at, place, what, own in self._pending_events():
            is_declared = what == self._apply_event
            if not is_declared or at > time_ns:
                events.append((at if is_declared else at + time_ns, place, what, own))
        self._replace_pending_events(events)

    def _replace_pending_events(self, events: Sequence[tuple[int, int, Any, Any]]) -> None:
        """Replace the events of faults that are to come."""
        own = self._pending_events()
        heap = self.sim._heap
        heap[:] = [*(item for item in heap if item not in own), *events]
        heapify(heap)

    # --- a failure and a rejoin

    def _workers_with_model(self) -> set[int]:
        """Return the running workers that have a model."""
        workers = self.sim.contexts[: len(self.cluster.compute)]
        return {
            ctx.rank
            for ctx in workers
            if ctx.rank not in self.sim.failed_ranks and ctx.restart_point is not None
        }

    def fail(self, rank: int, why: str) -> None:
        """Let a running worker fail at this instant."""
        sim, now = self.sim, self.sim.now_ns
        if rank in sim.failed_ranks or self.has_run_ended:
            return
        sim.failed_ranks.add(rank)
        sim.stop_ranks([rank])
        sim.contexts[rank].counter = None
        self.failures[rank] += 1
        sim.observer.emit(WorkerFailed(rank, now, why))
        assert self.cluster.failure_detection_s is not None
        noticed_ns = now + round(self.cluster.failure_detection_s * 1e9)
        if self.regroups:
            assert sim.failed_ns is not None
            sim.failed_ns[rank] = now
            sim.contexts[rank].restart_point = sim.contexts[rank].before_restart_point = None
            sim.collective_queues.abort_with_member(rank)
            self._schedule_ns(noticed_ns, self._notice_failure, rank)
        if not self.has_server and not self._workers_with_model():
            raise AshlError(
                f"worker {rank} failed at {now / 1e9:.6g} s and 0 of {len(self.cluster.compute)}"
                " workers remain that have the model: the run ends here"
            )
        sim._check_pause()
        for peer in () if self.regroups else self.peers_of(rank):
            self._uninformed.add(item := (peer, rank, now, why))
            self._schedule_ns(noticed_ns, self._notify_peer, item)

    def _notice_failure(self, rank: int) -> None:
        """Begin an epoch without a failed worker, unless the present one is without it."""
        if rank in self.sim.failed_ranks and rank in self.epoch.workers:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Begin an epoch with the running workers, unless all of them have ended."""
        sim, n = self.sim, len(self.cluster.compute)
        running = [ctx.rank for ctx in sim.contexts if ctx.rank not in sim.failed_ranks]
        if all(sim._mains[rank].done for rank in running):
            return
        workers = tuple(rank for rank in running if rank < n)
        incarnations = tuple(self.failures[rank] for rank in workers)
        self.epoch = Epoch(self.epoch.number + 1, workers, incarnations)
        sim.begin_epoch(running, partial(self.start, epoch=self.epoch))

    def _notify_peer(self, item: tuple[int, int, int, str]) -> None:
        """Notify a peer of a failure, unless it was notified already."""
        sim, (peer, rank, since_ns, why) = self.sim, item
        if item not in self._uninformed:
            return
        self._uninformed.remove(item)
        failure = PeerFailedError(
            rank, f"{why}, at {since_ns / 1e9:.6g} s", self.failures[rank] - 1
        )
        for task, value in sim._mail[peer].mark_failed(failure, since_ns):
            if task.main:
                task.ctx.time_accounting.attribute_idle(sim.now_ns)
            sim._resume(task, value)

    def rejoin(self, rank: int) -> None:
        """Let a failed worker rejoin, without any state."""
        sim = self.sim
        if rank not in sim.failed_ranks or self.has_run_ended:
            return
        if not self.regroups:
            for item in sorted(item for item in self._uninformed if item[1] == rank):
                self._notify_peer(item)
            for peer in self.peers_of(rank):
                sim._mail[peer].failed_peers.pop(rank, None)
        sim.failed_ranks.remove(rank)
        ctx = sim.contexts[rank]
        ctx.time_accounting.limit_ns = min(other.time_accounting.limit_ns for other in sim.contexts)
        ctx.time_accounting.attribute_until("down", sim.now_ns)
        sim.observer.emit(WorkerRejoined(rank, sim.now_ns))
        if self.regroups:
            return self._begin_epoch()
        ctx.incarnation = self.failures[rank]
        sim.stop_ranks([rank])
        sim.start_joining(rank, partial(self.start, ctx, joins=True))

"""Run the coroutines of one rank on a real process: the kernel for `runtime=local` and
`runtime=torchrun`.

Data flow: the main thread resumes tasks. Listener threads, the compute thread and the threads of
collectives put their results into one inbox, and the main thread takes items from it: messages,
receipts, failures, callbacks. A computation or collective runs inline while no other task of the
rank could run meanwhile; otherwise it runs on the one compute thread, or on the thread of its
process group.

States: before `run` (restored or joining), running (all clocks start together after a barrier,
except those of joining workers), finished (`run_until`, then `close_connections`). A failed peer
arrives as PeerFailedError through the inbox.

Epochs, in a run that regroups: the controller publishes the members of the next epoch after a
failure or a rejoin (`begin_epoch`). The main thread completes the present step of local work
(`RankContext.in_local_work`). It then ends all tasks of the rank and makes a new process group of
gloo with the other members. It starts the program again with the rank's last safe point. If a
collective or a connection of a rank breaks before, the rank waits for the next epoch.

Resume: each rank continues from its part of a checkpoint (`restore`). A worker without a part
joins. If the run regroups, all ranks begin a new epoch for that. Otherwise the servers receive the
worker's failure first (`expect_joins`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ashl.device import HOST
from ashl.learn.learner import Learner
from ashl.runtime import effects as fx
from ashl.runtime.collective_queue import Collective
from ashl.runtime.collectives import Hierarchy
from ashl.runtime.communicator import (
    CollectiveBrokenError,
    Communicator,
    LocalQueue,
    MakeSubgroup,
    Outcome,
)
from ashl.runtime.compute_unit import ComputeOutcome, ComputeUnit
from ashl.runtime.effects import Epoch
from ashl.runtime.kernel import Mailbox, Task, TaskKernel, deadline_ns, describe_wait
from ashl.runtime.rank_checkpoint import (
    PAUSES,
    RankCheckpointWriter,
    SavedRank,
    next_due_ns,
    restore_rank,
)
from ashl.runtime.rank_context import Observer, RankContext
from ashl.runtime.records import Heartbeat
from ashl.runtime.rendezvous import CHECK_S, JOINER, SERVER, synchronize_clocks, world
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import DeliveryReceipt, HostPayloads, PeerConnections, ReceivedMessage

# a rank that is behind its declared pace by less than this counts as on time
ON_TIME_NS = 2_000_000
LINGER_S = 0.01  # seconds between two checks whether the run is over
# Longest time in seconds from a broken collective or connection to the next epoch. While the
# controller evaluates, it looks for no failures, and that time does not count.
FAILURE_WAIT_S = 10.0
T = TypeVar("T")
# returns the process group of the members of an epoch; None if there is one member, or once the
# function that it is given returns True
MakeGroup = Callable[[Epoch, tuple[int, ...], Callable[[], bool]], dist.ProcessGroup | None]
logger = logging.getLogger(__name__)


class TorchKernel(TaskKernel):
    """Drives one rank's coroutines."""

    def __init__(
        self,
        rank: int,
        observer: Observer,
        make_throttle: Callable[[Callable[[], int]], Throttle],
        peers: tuple[int, ...],
        max_bytes: int,
        exact: bool,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        device: str = HOST,
        synchronize: Callable[[], None] | None = None,
        make_subgroup: MakeSubgroup | None = None,
        checkpoint_writer: RankCheckpointWriter | None = None,
        hierarchy: Hierarchy | None = None,
        payload_transport: HostPayloads | None = None,
        make_group: MakeGroup | None = None,
        peers_in: Callable[[Epoch], tuple[int, ...]] = lambda epoch: (),
        num_workers: int = 0,
        num_ranks: int = 0,
    ) -> None:
        """Set up the kernel of a rank. `groups` are the process groups that the plan lists; a sum
        over another part of the ranks works without one.

        On a device that continues a computation after its function has returned, `synchronize`
        waits for it. `make_subgroup` makes process groups that transport tensors on the device, for
        sums over a part of the ranks; without it collectives go through the host's memory.
        `payload_transport` transports payloads of messages; None = gloo does. In a run that
        regroups, `make_group` makes the process group of the members of an epoch. `peers_in`
        returns the ranks with which this rank exchanges messages in an epoch.
        """
        self.observer = observer
        self.worker_states: Learner | None = None
        self.ctx = RankContext(self, rank)
        self._zero = time.monotonic_ns()  # provisional until all ranks have met, see `run`
        self._since_ns = 0  # ns: experiment time at the start, above 0 after a restore
        self._checkpoint_writer = checkpoint_writer
        # by peer: the group that reaches it, if this rank joins while others run
        self._joined: Mapping[int, dist.ProcessGroup] | None = None
        self._inbox = queue.SimpleQueue[Any]()
        self.clock_ns = lambda: time.monotonic_ns() - self._zero
        self.throttle = make_throttle(self.clock_ns)
        self._make_communicator = partial(
            Communicator,
            rank,
            exact=exact,
            throttle=self.throttle,
            clock_ns=self.clock_ns,
            max_bytes=max_bytes,
            synchronize=synchronize,
            make_subgroup=make_subgroup,
            hierarchy=hierarchy,
        )
        self._make_connections = partial(
            PeerConnections,
            inbox=self._inbox,
            clock_ns=self.clock_ns,
            due_ns=self.throttle.schedule_arrival,
            max_bytes=max_bytes,
            device=device,
            payload_transport=payload_transport,
        )
        self._make_group = make_group
        self._peers_in = peers_in
        self._num_workers = num_workers
        self._num_ranks = num_ranks
        self._epoch = self._published = Epoch(0, ())
        self.supervised_s = 0.0  # as in `ControlUpdate`; another thread sets it
        self.ctx.tolerates_failures = make_group is not None
        self._start: Callable[..., Coroutine] | None = None
        self._tasks = set[Task]()
        self._has_left: Callable[[], bool] = lambda: False
        self._communicator: Communicator | None = None
        self._groups = groups
        self._peers = peers
        self._synchronize = synchronize
        # number of the next pause; None = this rank joins, and does not know it yet
        self._pauses: int | None = 0
        self._first_pause: int | None = None  # as in `Heartbeat`
        self._early: list[ReceivedMessage] = []  # sent after the sender's next pause
        every_s = None if checkpoint_writer is None else checkpoint_writer.every_s
        self._next_due_ns = partial(next_due_ns, every_s=every_s)
        self.checkpoint_due_ns = self._next_due_ns(0)
        self._device_busy = False  # True while computations of the main task may run on the device
        self._mail = Mailbox()
        self._connections: PeerConnections | None = None
        self._ready: deque[tuple[Task, Any]] = deque()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._seq = itertools.count()
        self._live = 0  # tasks that have not ended
        self._push_end = 0  # ns: end of the last payload that this rank has sent
        self._main: Task | None = None
        self._unit = ComputeUnit(rank, self.throttle, self._inbox, self._mail)
        self._resumed_ns = time.monotonic_ns()  # host clock: when a task last resumed
        self.finished = False  # True once the main task has ended
        self._is_closing = False  # True once all ranks have ended

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns() - self._zero

    @property
    def has_started(self) -> bool:
        """Return True once all ranks have met and the clock runs."""
        return self._connections is not None

    def save_rank(self, task: Task, save: fx.Save) -> tuple[bool, Any]:
        """Save this rank, and begin another pass of its loop."""
        assert self._pauses is not None
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.save(self.ctx, save, self.throttle.speed, self._pauses)
            self.checkpoint_due_ns = self._next_due_ns(self.now_ns)
        self._mail.discarded.clear()
        self._pauses += 1
        early, self._early = self._early, []
        for received in early:
            self._receive(received)
        return False, None

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T:
        return fn()

    def spawn(self, ctx: RankContext, coro: Coroutine, main: bool = False) -> Task:
        self._live += 1
        self._ready.append((task := Task(ctx, coro, main), None))
        self._tasks.add(task)
        return task

    def restore(self, known: SavedRank | None, time_ns: int, number: int) -> None:
        """Restore the saved state of the rank, with the clock at `time_ns`. Call it before `run`.

        Args: known: None for a worker that has no part of the checkpoint, and joins; number: of the
        next pause.
        """
        self._since_ns = time_ns
        self._epoch = self._published = Epoch(number // PAUSES, ())
        self.checkpoint_due_ns = self._next_due_ns(time_ns)
        if known is None:
            self._pauses = None
            return self.ctx.time_accounting.set_start(time_ns)
        self._pauses = number
        restore_rank(self.ctx, known, time_ns, self.throttle.speed, self.worker_states)
        return self.ctx.safe_point(known.stage, known.state)

    def expect_joins(self, workers: Iterable[int]) -> None:
        """Deliver the failure of workers that have no part of the checkpoint, ahead of their
        requests to join. Call it before `run`.
        """
        for rank in workers:
            # -1: the worker that joins is the first incarnation of the resumed run
            failure = fx.PeerFailedError(rank, "it was not saved", -1)
            self._mail.mark_failed(failure, self._since_ns)
            del self._mail.failed_peers[rank]

    def join_running(self, groups: Mapping[int, dist.ProcessGroup], zero_ns: int) -> None:
        """Prepare to join ranks that are running already, by a group with each peer. Call it before
        `run`. `zero_ns` is the zero of the run's clock.
        """
        self._joined = groups
        self._pauses = None
        self._zero = zero_ns
        self.checkpoint_due_ns = self._next_due_ns(self.now_ns)
        self.ctx.time_accounting.set_start(self.now_ns)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin an epoch that the controller has published, unless this rank knows it already.
        Another thread may call it.
        """
        if epoch.number > self._published.number:
            self._published = epoch
            self._inbox.put(lambda: None)  # wakes the main thread

    def _end_of_epoch(self, number: int) -> Callable[[], bool] | None:
        """Return a function that returns True once a later epoch has been published; None if the
        run does not regroup.
        """
        return None if self._make_group is None else lambda: self._published.number > number

    def connect_peer(self, peer: int, incarnation: int, group: dist.ProcessGroup) -> None:
        """Connect to a worker that joined in this incarnation, by a process group of two. Another
        thread may call it.
        """
        assert self._connections is not None
        connections = self._connections
        connections.mark_failed(peer, "it has rejoined")

        def connect() -> None:
            self._mail.failed_peers.pop(peer, None)
            connections.reconnect(peer, incarnation, group, JOINER)

        self._inbox.put(connect)

    def mark_peer_failed(self, peer: int, why: str) -> None:
        """Count a peer as failed, once it is connected. Another thread may call it."""
        if (connections := self._connections) is not None:
            self._inbox.put(lambda: connections.mark_failed(peer, why))

    def run(self, main: Callable[..., Coroutine]) -> Any:
        """Run `main(ctx)` to its end. Other tasks end with it, once the collectives that this rank
        has posted have ended. The clock starts now on all ranks, except on ranks that join later.
        """
        self._start = main
        if self._joined is None or not self.ctx.tolerates_failures:
            self._connect()
            if self._published is self._epoch:
                self._main = self.spawn(self.ctx, main(self.ctx), main=True)
        self._run_to_end()
        assert self._main is not None
        return self._main.result

    def _connect(self) -> None:
        """Connect to the ranks that are there at the start, or to the running ones as a joining
        worker.
        """
        members: tuple[int, ...] | None = None
        if self._joined is None:
            self._zero = (
                synchronize_clocks() - self._since_ns
            )  # first, because arrivals are timed by it
            routes = {peer: (world(), peer, 0) for peer in self._peers}
        else:
            routes = {peer: (group, SERVER, 0) for peer, group in self._joined.items()}
            members = (self.ctx.rank,)
        self._communicator = self._make_communicator(
            groups=self._groups, members=members, is_over=self._end_of_epoch(self._epoch.number)
        )
        connections = self._make_connections(routes)
        for peer in routes:
            connections.open(peer)
        self._connections = connections

    def _run_to_end(self) -> None:
        """Run the main task to its end, over all epochs; or until all ranks have left."""
        try:
            while self._published is not self._epoch or self._main is None or not self._main.done:
                if self._has_left():
                    return
                if self._published is not self._epoch:
                    self._restart()
                elif self._ready:
                    self._resume(*self._ready.popleft())
                else:
                    self._handle_next(LINGER_S if self.finished else None)
        finally:
            self._unit.close()
        assert self._communicator is not None
        self.ctx.time_accounting.reclassify_as_wait(*self._communicator.close())
        self.ctx.emit_totals()
        self.finished = True

    def _restart(self) -> None:
        """Begin the epoch that the controller has published last: end all tasks, connect to its
        members, and start the program again from the last safe point.

        The program does not start if another epoch is published before all members are connected.
        """
        assert self._make_group is not None
        assert self._start is not None
        epoch, rank = self._published, self.ctx.rank
        self._end_tasks()
        self.ctx.in_local_work = False
        if self._pauses is None:
            self._first_pause = epoch.number * PAUSES
        self._epoch, self._pauses = epoch, epoch.number * PAUSES
        members = (*epoch.workers, *range(self._num_workers, self._num_ranks))
        try:
            group = self._make_group(
                epoch, members, lambda: self._published is not epoch or self._has_left()
            )
        except RuntimeError as error:
            self._main = None  # no task runs until the next epoch
            return self._await_epoch(error)
        if self._published is not epoch or self._has_left():
            return
        routes = dict[int, tuple[dist.ProcessGroup, int]]()
        if group is not None:
            routes = {peer: (group, place) for place, peer in enumerate(members) if peer != rank}
        self._communicator = self._make_communicator(
            groups={} if group is None else {members: group},
            members=members,
            epoch=epoch.number,
            routes=routes,
            is_over=self._end_of_epoch(epoch.number),
        )
        incarnations = dict(zip(epoch.workers, epoch.incarnations, strict=True))
        self._connections = self._make_connections(
            {peer: (*route, incarnations.get(peer, 0)) for peer, route in routes.items()}
        )
        for peer in self._peers_in(epoch):
            self._connections.open(peer)
        saved = self.ctx.restart_point
        if saved is not None:
            saved = saved[0], saved[1].copy_to_restart()
        self._main = self.spawn(
            self.ctx, self._start(self.ctx, saved=saved, epoch=epoch), main=True
        )
        logger.info("begins epoch %d with workers %s", epoch.number, [*epoch.workers])

    def _end_tasks(self) -> None:
        """End all tasks of the rank, where they are blocked."""
        self._unit.finish()
        for task in self._tasks:
            if not task.done:
                task.coro.close()
                task.done = True
        if self._connections is not None:
            self._connections.abandon()
        if self._communicator is not None:
            self._communicator.keep_alive()
        while not self._inbox.empty():
            self._inbox.get()
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self._live = 0
        self._mail.clear()
        self._early = []
        now_ns = self._push_end = self.now_ns
        self.ctx.time_accounting.abort_collectives(now_ns)
        self.ctx.time_accounting.attribute_idle(now_ns)

    def _await_epoch(self, error: Exception) -> None:
        """Wait for the next epoch, because a collective, a connection or the rendezvous of an epoch
        is broken. Raises the error if none has begun after `FAILURE_WAIT_S`.
        """
        epoch, until_s = self._epoch, self.supervised_s + FAILURE_WAIT_S

        def check() -> None:
            if self._published is not epoch:
                return
            if self.supervised_s > until_s:
                raise error.__cause__ or error
            self._set_timer(self.now_ns + round(CHECK_S * 1e9), check)

        check()

    def run_until(self, over: Callable[[], bool]) -> None:
        """Continue with the tasks that remain after the main task, until `over()`."""
        self._has_left = over
        while not over():
            if self._published is not self._epoch:
                self._run_to_end()
            elif self._ready:
                self._resume(*self._ready.popleft())
            else:
                with suppress(queue.Empty):
                    self._handle_item(self._inbox.get(timeout=LINGER_S))

    def close_connections(self, timeout_s: float) -> None:
        """Close the connections, when every rank has ended and starts no new transfer."""
        self._is_closing = True
        for task, _ in self._ready:
            task.coro.close()  # Python would warn about coroutines that have not begun
        if self._connections is not None:
            self._connections.close(timeout_s)

    def heartbeat(self) -> Heartbeat:
        """Return the current state of this rank: what its main task is blocked in (None while it
        computes), and for how long no task has resumed. Another thread may call it.
        """
        effect = self._unit.paused_in or (self._main.waiting if self._main else None)
        blocked = effect is not None and not isinstance(effect, fx.Compute)
        waiting = describe_wait(effect) if blocked else None
        if self._main is not None and self._main.done and not self._is_closing:
            waiting = "has ended and waits for the other ranks"
        idle_s = (time.monotonic_ns() - self._resumed_ns) / 1e9
        return self.ctx.heartbeat()._replace(
            waiting=waiting,
            idle_s=idle_s,
            first_pause=self._first_pause,
        )

    def _handle_next(self, at_most_s: float | None = None) -> None:
        """Wait for the next item of the inbox or the next timer, and handle it."""
        timeout = max(0.0, (self._timers[0][0] - self.now_ns) / 1e9) if self._timers else None
        if at_most_s is not None:
            timeout = at_most_s if timeout is None else min(at_most_s, timeout)
        try:
            self._handle_item(self._inbox.get(timeout=timeout))
        except queue.Empty:
            if self._timers and self._timers[0][0] <= self.now_ns:
                _, _, callback = heapq.heappop(self._timers)
                callback()

    def _handle_item(self, item: Any) -> None:
        if isinstance(item, fx.Message):  # a part of a computation
            self.ctx.time_accounting.record_part(item.start_ns)
            self._deliver_to_self(item)
        elif isinstance(item, ReceivedMessage):
            self._receive(item)
        elif isinstance(item, DeliveryReceipt):
            self._push_end = max(self._push_end, item.end_ns)
            self.ctx.time_accounting.reclassify_as_push(*item)
        elif isinstance(item, fx.PeerFailedError):
            if self.ctx.tolerates_failures:
                return self._await_epoch(item)
            self._unit.mark_peer_failed(item)
            self._ready.extend(self._mail.mark_failed(item, self.now_ns))
        else:
            item()  # the end of a compute or a collective on a thread

    def _receive(self, received: ReceivedMessage) -> None:
        """Deliver a message of a peer, unless it was sent before the last pause. A message that was
        sent after the next pause is kept until then.
        """
        message, pauses = received
        if self._pauses is None:  # this rank has joined: the sender's pauses tell it the next one
            self._pauses = self._first_pause = pauses
        if pauses > self._pauses and message.tag != fx.JOIN:
            self._early.append(received)
            return
        if message.payload is not None:
            self.ctx.time_accounting.record_traffic(message.start_ns, 0, message.payload.nbytes)
        if pauses < self._pauses and message.tag != fx.JOIN:
            return
        if not self._unit.deliver(message) and (task := self._mail.put(message)):
            self._unblock(task, message.start_ns)
            self._ready.append((task, message))

    def _deliver_to_self(self, message: fx.Message) -> None:
        """Deliver a message of this rank to itself, to the computation or the task that
        needs it.
        """
        if not self._unit.deliver(message) and (task := self._mail.put(message)):
            self.wake(task, message)

    def _unblock(self, task: Task, pull_start_ns: int) -> None:
        if task.main:
            self.ctx.time_accounting.attribute_blocked(self.now_ns, self._push_end, pull_start_ns)

    def _resume(self, task: Task, value: Any) -> None:
        """Run a task until it blocks or ends, or until another epoch is to begin."""
        while not task.done and (self._published is self._epoch or self.ctx.in_local_work):
            task.waiting = None
            self._resumed_ns = time.monotonic_ns()
            before = self.ctx.restart_point
            try:
                effect = task.send(value)
            except StopIteration as end:
                return self.end_task(task, end.value)
            task.waiting = effect
            is_amid_step = self.ctx.is_amid_step(before, effect)
            if self._published is not self._epoch and not is_amid_step:
                return None
            if self._device_busy and task.main and not isinstance(effect, fx.Compute):
                self._wait_for_device()
            blocked, value = self._perform(task, effect)
            if blocked:
                return None
        return None

    def _perform(self, task: Task, effect: Any) -> tuple[bool, Any]:
        """Perform an effect. Returns: (True if the task blocks, value of the effect)."""
        if isinstance(effect, fx.Compute):
            if self._live > 1 or self._unit.busy or effect.needs:
                self._compute_on_thread(task, effect)
                return True, None
            return False, self._compute(effect, task.main)
        if isinstance(effect, fx.Send):
            return False, self._send(effect)
        if isinstance(effect, fx.Recv):
            message = self._recv(task, effect)
            return message is None, message
        if isinstance(effect, fx.AllReduce | fx.AllGather):
            assert self._communicator is not None
            local_queue = self._communicator.local_queue(effect)
            if local_queue.pending or (self._live > 1 and not self._emits_parts(effect)):
                self._collect_on_thread(local_queue, task, effect)
                return True, None
            try:
                outcome = local_queue.run_inline(effect, task.main)
            except CollectiveBrokenError as error:
                self._await_epoch(error)
                return True, None
            return False, self._account_collective(outcome, task.main)
        return self.perform_infrequent(task, effect)

    def mail_of(self, task: Task) -> Mailbox:
        return self._mail

    def end_task(self, task: Task, result: Any = None) -> None:
        self._live -= 1
        self._tasks.discard(task)
        super().end_task(task, result)

    def wake(self, task: Task, value: Any) -> None:
        if not task.done:
            if task.main:
                self.ctx.time_accounting.attribute_idle(self.now_ns)
            self._ready.append((task, value))

    def wake_at(self, time_ns: int, task: Task) -> None:
        self._set_timer(time_ns, lambda: self.wake(task, None))

    def _set_timer(self, due_ns: int, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due_ns, next(self._seq), callback))

    def _compute(self, effect: fx.Compute, main: bool) -> Any:
        start = self.ctx.time_accounting.cursor if main else self.now_ns
        outcome = self._unit.run(effect, start)
        if main:
            outcome.attribute_to(self.ctx.time_accounting, start)
            self._device_busy = self._synchronize is not None
        return outcome.value

    def _wait_for_device(self) -> None:
        """Wait until the device has finished the main task's computations, and attribute that time
        to computing.
        """
        assert self._synchronize is not None
        self._synchronize()
        self.ctx.time_accounting.attribute_until("compute", self.now_ns)
        self._device_busy = False

    def _compute_on_thread(self, task: Task, effect: fx.Compute) -> None:
        """Run a computation on the compute thread, so that the rank's other tasks continue."""

        def resume_task(outcome: ComputeOutcome | Exception, start: int) -> None:
            if isinstance(outcome, Exception):
                raise outcome
            if task.main:
                outcome.attribute_to(self.ctx.time_accounting, start)
                self._device_busy = self._synchronize is not None
            if not task.done:
                self._ready.append((task, outcome.value))

        start = self.ctx.time_accounting.cursor if task.main else self.now_ns
        self._unit.post(effect, start, resume_task)

    def _emits_parts(self, effect: Collective) -> bool:
        """Return True if the main task computes parts that are sent in order. Then all tasks wait
        for this collective, and it may run in this thread.
        """
        main = self._main.waiting if self._main else None
        return isinstance(main, fx.Compute) and bool(main.parts) and not (main.needs or effect.key)

    def _collect_on_thread(self, local_queue: LocalQueue, task: Task, effect: Collective) -> None:
        """Run a collective on the thread of its group."""
        epoch = self._epoch

        def resume_task(outcome: Outcome | Exception) -> None:
            if self._epoch != epoch:
                return
            if isinstance(outcome, CollectiveBrokenError):
                return self._await_epoch(outcome)
            if isinstance(outcome, Exception):
                raise outcome
            value = self._account_collective(outcome, task.main)
            if not task.done:
                self._ready.append((task, value))

        local_queue.post(
            effect, task.main, lambda outcome: self._inbox.put(lambda: resume_task(outcome))
        )

    def _account_collective(self, outcome: Outcome, main: bool) -> Any:
        """Attribute the time and bytes of a collective; return its value."""
        time_accounting = self.ctx.time_accounting
        time_accounting.record_traffic(outcome.begin_ns, *outcome.traffic)
        time_accounting.record_collective(outcome.begin_ns, outcome.end_ns, main)
        time_accounting.reclassify_as_wait(*outcome.waited_ns)
        return outcome.value

    def _send(self, effect: fx.Send) -> None:
        nbytes = 0 if effect.payload is None else effect.payload.nbytes
        now = self._declared_now_ns()
        if effect.dst == self.ctx.rank:
            return self._deliver_to_self(
                fx.Message(effect.dst, effect.tag, effect.payload, effect.meta, now)
            )
        if self._mail.has_unread_failure(effect.dst):
            return
        header_ns, body_ns, busy_ns = self.throttle.schedule_departure(effect.dst, nbytes, now)
        if nbytes:
            self.ctx.time_accounting.record_traffic(now, nbytes, 0)
            self._push_end = max(self._push_end, busy_ns)
        assert self._connections is not None
        sent = self._note_sent if nbytes else lambda _: None
        self._connections.post(
            effect.dst,
            effect.tag,
            effect.payload,
            effect.meta,
            (header_ns, body_ns),
            sent,
            self._pauses or 0,
        )

    def _declared_now_ns(self) -> int:
        """Return the declared end of the last span if this machine keeps the pace, else the
        clock.
        """
        cursor = self.ctx.time_accounting.cursor
        now = self.now_ns
        return cursor if now - cursor < ON_TIME_NS else now

    def _note_sent(self, end_ns: int) -> None:
        """Extend the time of pushing until the operating system has the payload. A sender thread
        calls it.
        """
        self._push_end = max(self._push_end, end_ns)

    def _recv(self, task: Task, effect: fx.Recv) -> Any:
        """Return a message, or None if the task is blocked."""
        while not self._inbox.empty():
            self._handle_item(self._inbox.get())
        message = self._mail.receive(effect)
        if message is None and effect.src != fx.ANY and self._connections is not None:
            self._connections.open(effect.src)
        if message is None and effect.before_s <= self.now_ns / 1e9:
            self._ready.append((task, None))
        elif message is None:
            self._mail.waiters.append(task)
            if effect.before_s != math.inf:
                self._set_timer(
                    deadline_ns(effect.before_s), lambda: self._expire_receive(task, effect)
                )
        return message

    def _expire_receive(self, task: Task, effect: fx.Recv) -> None:
        if task.waiting is effect and task in self._mail.waiters:
            self._mail.waiters.remove(task)
            self._unblock(task, self.now_ns)
            self._ready.append((task, None))

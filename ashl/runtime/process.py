"""Run the coroutines of one rank on a real process: the kernel for `runtime=local` and
`runtime=torchrun`.

Data flow: the main thread resumes tasks. Listener threads, the compute thread and the threads of
collectives put their results into one inbox, and the main thread takes items from it: messages,
receipts, failures, callbacks. A computation or collective runs inline while no other task of the
rank could run meanwhile; otherwise it runs on the one compute thread, or on the thread of its
process group.

States: before `run` (restored or joining), running (all clocks start together after a barrier,
except those of joining workers), finished (`run_until`, then `close_connections`). A failed peer
arrives as PeerLostError through the inbox.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from ashl.learn.device import HOST
from ashl.runtime import effects as fx
from ashl.runtime.collective_queue import Collective
from ashl.runtime.collectives import Hierarchy
from ashl.runtime.communicator import Communicator, LocalQueue, Outcome
from ashl.runtime.compute_unit import ComputeUnit, Ran
from ashl.runtime.kernel import Mailbox, Task, deadline_ns, describe_wait, resume_checked
from ashl.runtime.rank_checkpoint import RankCheckpointWriter, Restored, restore_counters
from ashl.runtime.rank_context import Observer, RankContext, WorkerStates
from ashl.runtime.records import Heartbeat, PeerUnreachable
from ashl.runtime.regroup_consensus import RegroupConsensus
from ashl.runtime.rendezvous import MET, NEWCOMER, Entry, common_zero, world
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import Delivered, PayloadTransport, PeerConnections

KEPT_UP_NS = 2_000_000
LINGER_S = 0.01  # between two looks at whether it is over
T = TypeVar("T")


class TorchKernel:
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
        settle: Callable[[], None] | None = None,
        nccl: bool = False,
        checkpoint_writer: RankCheckpointWriter | None = None,
        hierarchy: Hierarchy | None = None,
        consensus: RegroupConsensus | None = None,
        bodies: PayloadTransport | None = None,
    ) -> None:
        """`groups` are those that the plan lists; a sum over any other part of the ranks does
        without. Where a device goes on with a computation when its function has returned, `settle`
        waits until all are done; `nccl`: the groups carry what lies there. `bodies` carry those of
        messages, unless gloo does.
        """
        self.observer = observer
        self.worker_states: WorkerStates | None = None
        self.ctx = RankContext(self, rank)
        self._zero = time.monotonic_ns()  # until all have come, see `run`
        self._since_ns, self._checkpoint_writer = 0, checkpoint_writer
        self._entry: Entry | None = None  # where it comes while others run
        self.throttle = make_throttle(self.clock_ns)
        self._communicator = Communicator(
            rank,
            groups,
            exact,
            self.throttle,
            self.clock_ns,
            max_bytes,
            settle if nccl else None,
            hierarchy,
            consensus,
        )
        self._peers, self._max_bytes, self._device, self._payload_transport = (
            peers,
            max_bytes,
            device,
            bodies,
        )
        self._settle, self._unsettled = settle, False
        self._mail, self._inbox = Mailbox(), queue.SimpleQueue[Any]()
        self._links: PeerConnections | None = None
        self._ready: deque[tuple[Task, Any]] = deque()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._seq = itertools.count()
        self._live, self._push_end = 0, 0
        self._stand = list[
            Task
        ]()  # tasks that stand wherever the main one is at the top of its loop
        self._main: Task | None = None
        self._unit = ComputeUnit(rank, self.throttle, self._inbox, self._mail)
        self._moved = time.monotonic_ns()  # when a task last went on

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns() - self._zero

    @property
    def started(self) -> bool:
        """Whether all have come, and the clock runs."""
        return self._links is not None

    def clock_ns(self) -> int:  # to hand on
        return self.now_ns

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool:
        """The main task is at the top of its loop; kept where that is wanted, and all beside it
        stands, too.
        """
        beside = self._live - 1 - sum(not task.done for task in self._stand)
        return (
            self._checkpoint_writer is not None
            and not beside
            and self._checkpoint_writer.keep(ctx, stage, state, self.throttle)
        )

    def checkpoint_due(self, ctx: RankContext, version: int) -> bool:
        return self._checkpoint_writer is not None and self._checkpoint_writer.due(version)

    def safe_point_wanted(self, ctx: RankContext) -> bool:
        return self._checkpoint_writer is not None and self._checkpoint_writer.wanted is not None

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T:
        return fn()

    def spawn(
        self,
        ctx: RankContext,
        coro: Coroutine,
        main: bool = False,
        is_background_service: bool = False,
    ) -> Task:
        self._live += 1
        self._ready.append((task := Task(ctx, coro, main, is_background_service), None))
        self._stand += [task] * is_background_service
        return task

    def restore(self, known: Restored, time_ns: int) -> None:
        """To be called before `run`: as the rank was kept, with the clock at this moment."""
        restore_counters(self.ctx, known.context)
        if self.worker_states is not None:
            self.worker_states.set_worker_state(self.ctx.rank, known.own)
        self.ctx.time_accounting.attribute_until("wait", time_ns)
        if self.throttle.speed:
            self.throttle.speed.draw_from(self.ctx.rank, known.drawn)
        self._since_ns = time_ns

    def join_running(self, entry: Entry) -> None:
        """To be called before `run`: the others run already."""
        self._entry, self._zero = entry, entry.zero_ns
        self._communicator.add_routes({peer: (group, MET) for peer, group in entry.groups.items()})
        self.ctx.time_accounting.start_at(self.now_ns)

    def connect_peer(self, peer: int, incarnation: int, group: dist.ProcessGroup) -> None:
        """A worker has come (back) in this life, by this group of two. May be called from another
        thread.
        """
        assert self._links is not None
        self._communicator.add_routes({peer: (group, NEWCOMER)})
        self._links.reconnect(
            peer, incarnation, group, NEWCOMER, lambda: self._mail.lost.pop(peer, None)
        )

    def mark_peer_failed(self, peer: int, why: str) -> None:
        """A peer counts as gone. May be called from another thread."""
        if self._links is not None:
            self._links.mark_failed(peer, why)

    def run(self, main: Callable[[RankContext], Coroutine]) -> Any:
        """Run `main(ctx)` to its end; what else was spawned ends with it, once the collectives that
        this rank has posted have ended. The clock starts now, on all ranks, but for who comes
        later.
        """
        if self._entry is None:
            self._zero = (
                common_zero() - self._since_ns
            )  # before anything is listened to, which is timed by it
            pairs = {peer: (world(), peer, 0) for peer in self._peers}
        else:
            pairs = {
                peer: (group, MET, self._entry.incarnations[peer])
                for peer, group in self._entry.groups.items()
            }
            for peer in set(self._peers) - pairs.keys():
                self._inbox.put(fx.PeerFailedError(peer, "it failed before"))
        when = self.clock_ns, self.throttle.schedule_arrival
        self._links = PeerConnections(
            pairs, self._inbox, *when, self._max_bytes, self._device, self._payload_transport
        )
        self._main = self.spawn(self.ctx, main(self.ctx), main=True)
        try:
            while not self._main.done:
                if self._ready:
                    self._resume(*self._ready.popleft())
                else:
                    self._next()
        finally:
            self._unit.close()
        self.ctx.time_accounting.reclassify_as_wait(*self._communicator.close())
        self.ctx.emit_totals()
        return self._main.result

    def run_until(self, over: Callable[[], bool]) -> None:
        """Go on with what the main task has left behind, until it is over."""
        while not over():
            if self._ready:
                self._resume(*self._ready.popleft())
                continue
            with suppress(queue.Empty):
                self._handle_item(self._inbox.get(timeout=LINGER_S))

    def close_connections(self, timeout_s: float) -> None:
        """Second phase of leaving: every rank is done, nothing more is started."""
        for task, _ in self._ready:
            task.coro.close()  # Python would complain of those that have not begun
        if self._links is not None:
            self._links.close(timeout_s)

    def heartbeat(self) -> Heartbeat:
        """How this rank stands: what its main task is blocked in (None while it computes), and
        since when nothing has moved. May be asked from another thread.
        """
        effect = self._unit.paused_in or (self._main.waiting if self._main else None)
        blocked = effect is not None and not isinstance(effect, fx.Compute)
        idle_s = (time.monotonic_ns() - self._moved) / 1e9
        return self.ctx.heartbeat()._replace(
            waiting=describe_wait(effect) if blocked else None, idle_s=idle_s
        )

    def _next(self) -> None:
        """Wait for the world: a message, a result, or a timer."""
        timeout = max(0.0, (self._timers[0][0] - self.now_ns) / 1e9) if self._timers else None
        try:
            self._handle_item(self._inbox.get(timeout=timeout))
        except queue.Empty:
            _, _, callback = heapq.heappop(self._timers)
            callback()

    def _handle_item(self, item: Any) -> None:
        if isinstance(item, fx.Message):
            if item.src == self.ctx.rank:  # a part
                self.ctx.time_accounting.record_part(item.start_ns)
                return self._deliver_to_self(item)
            if item.body is not None:
                self.ctx.time_accounting.record_traffic(item.start_ns, 0, item.body.nbytes)
            if not self._unit.deliver(item) and (task := self._mail.put(item)):
                self._unblock(task, item.start_ns)
                self._ready.append((task, item))
        elif isinstance(item, Delivered):
            self._push_end = max(self._push_end, item.end_ns)
            self.ctx.time_accounting.reclassify_as_push(*item)
        elif isinstance(item, fx.PeerFailedError):
            self.observer.emit(PeerUnreachable(self.ctx.rank, item.rank, item.incarnation))
            self._unit.mark_peer_failed(item)
            self._ready.extend(self._mail.mark_failed(item, self.now_ns))
        else:
            item()  # the end of a compute or a collective on a thread

    def _deliver_to_self(self, message: fx.Message) -> None:
        """A message of this rank to itself: for a compute that needs it, or for a task."""
        if not self._unit.deliver(message) and (task := self._mail.put(message)):
            self._wake(task, message)

    def _unblock(self, task: Task, pull_start_ns: int) -> None:
        if task.main:
            self.ctx.time_accounting.attribute_blocked(self.now_ns, self._push_end, pull_start_ns)

    def _resume(self, task: Task, value: Any) -> None:
        """Run a task until it blocks or ends."""
        while not task.done:
            task.waiting, self._moved = None, time.monotonic_ns()
            effect = resume_checked(task, value)
            if effect is None:
                self._live -= 1
                if task.joiner is not None:
                    self._wake(task.joiner, task.result)
                return
            task.waiting = effect
            if self._unsettled and task.main and not isinstance(effect, fx.Compute):
                self._wait_for_device()
            if isinstance(effect, fx.Compute):
                if self._live > 1 or self._unit.busy or effect.needs:
                    return self._compute_on_thread(task, effect)
                value = self._compute(effect, task.main)
            elif isinstance(effect, fx.Send):
                value = self._send(effect)
            elif isinstance(effect, fx.Recv):
                value = self._recv(task, effect)
                if value is None:
                    return
            elif isinstance(effect, fx.AllReduce | fx.AllGather):
                end = self._communicator.local_queue(effect)
                if end.pending or (self._live > 1 and not self._emits_parts(effect)):
                    return self._collect_on_thread(end, task, effect)
                value = self._account_collective(end.run_inline(effect, task.main), task.main)
            elif isinstance(effect, fx.Sleep):
                self._timer(
                    self.now_ns + round(effect.seconds * 1e9), lambda: self._wake(task, None)
                )
                return
            elif isinstance(effect, fx.Join):
                if not effect.task.done:
                    effect.task.joiner = task
                    return
                value = effect.task.result
            elif isinstance(effect, fx.Cancel):
                value = self._cancel(effect.task)
            elif isinstance(effect, fx.Discard):
                value = self._mail.discard(effect.tags)
            elif isinstance(effect, fx.Regroup):
                value = self._communicator.regroup(effect)
                self.ctx.join_pending = (
                    False  # first: another thread may find meanwhile that somebody does
                )
                if self._communicator.join_pending:
                    self.ctx.join_pending = True
            else:
                raise TypeError(f"{effect!r} is not an effect")

    def _wake(self, task: Task, value: Any) -> None:
        if not task.done:
            if task.main:
                self.ctx.time_accounting.attribute_idle(self.now_ns)
            self._ready.append((task, value))

    def _timer(self, due_ns: int, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due_ns, next(self._seq), callback))

    def _compute(self, effect: fx.Compute, main: bool) -> Any:
        start = self.ctx.time_accounting.cursor if main else self.now_ns
        ran = self._unit.run(effect, start)
        if main:
            ran.attribute_to(self.ctx.time_accounting, start)
            self._unsettled = self._settle is not None
        return ran.value

    def _wait_for_device(self) -> None:
        """What was left of the main task's computations when their functions returned is computing,
        too.
        """
        assert self._settle is not None
        self._settle()
        self.ctx.time_accounting.attribute_until("compute", self.now_ns)
        self._unsettled = False

    def _compute_on_thread(self, task: Task, effect: fx.Compute) -> None:
        """On the compute thread, so that the rank's other tasks go on."""

        def done(ran: Ran | Exception, start: int) -> None:
            if isinstance(ran, Exception):
                raise ran
            if task.main:
                ran.attribute_to(self.ctx.time_accounting, start)
                self._unsettled = self._settle is not None
            if not task.done:
                self._ready.append((task, ran.value))

        self._unit.post(effect, self.ctx.time_accounting.cursor if task.main else self.now_ns, done)

    def _emits_parts(self, effect: Collective) -> bool:
        """Whether the main task computes what leaves in parts, in order: all wait for this, so this
        thread may.
        """
        main = self._main.waiting if self._main else None
        return isinstance(main, fx.Compute) and bool(main.parts) and not (main.needs or effect.key)

    def _collect_on_thread(self, end: LocalQueue, task: Task, effect: Collective) -> None:
        """On the team's thread."""

        def done(outcome: Outcome | Exception) -> None:
            if isinstance(outcome, Exception):
                raise outcome
            value = self._account_collective(outcome, task.main)
            if not task.done:
                self._ready.append((task, value))

        end.post(effect, task.main, lambda outcome: self._inbox.put(lambda: done(outcome)))

    def _account_collective(self, outcome: Outcome, main: bool) -> Any:
        """Enter a collective into the books; returns its value."""
        time_accounting = self.ctx.time_accounting
        time_accounting.record_traffic(outcome.begin_ns, *outcome.moved)
        time_accounting.record_collective(outcome.begin_ns, outcome.end_ns, main)
        time_accounting.reclassify_as_wait(*outcome.waited_ns)
        return outcome.value

    def _send(self, effect: fx.Send) -> None:
        nbytes = 0 if effect.body is None else effect.body.nbytes
        now = self._paced_now()
        if effect.dst == self.ctx.rank:
            return self._deliver_to_self(
                fx.Message(effect.dst, effect.tag, effect.body, effect.meta, now)
            )
        header_ns, body_ns, busy_ns = self.throttle.schedule_departure(effect.dst, nbytes, now)
        if nbytes:
            self.ctx.time_accounting.record_traffic(now, nbytes, 0)
            self._push_end = max(self._push_end, busy_ns)
        assert self._links is not None
        sent = self._note_sent if nbytes else lambda _: None
        self._links.post(
            effect.dst, effect.tag, effect.body, effect.meta, (header_ns, body_ns), sent
        )

    def _paced_now(self) -> int:
        """Where the last span should have ended, as long as the machine keeps up; else the
        clock.
        """
        cursor, now = self.ctx.time_accounting.cursor, self.now_ns
        return cursor if now - cursor < KEPT_UP_NS else now

    def _note_sent(self, end_ns: int) -> None:
        """From a sender thread: the kernel has it."""
        self._push_end = max(self._push_end, end_ns)

    def _recv(self, task: Task, effect: fx.Recv) -> Any:
        """A message, or None when the task is blocked."""
        while not self._inbox.empty():
            self._handle_item(self._inbox.get())
        message = self._mail.receive(effect)
        if message is None and effect.before_s <= self.now_ns / 1e9:
            self._ready.append((task, None))
        elif message is None:
            self._mail.waiters.append(task)
            if effect.before_s != math.inf:
                self._timer(deadline_ns(effect.before_s), lambda: self._expire(task, effect))
        return message

    def _expire(self, task: Task, effect: fx.Recv) -> None:
        if task.waiting is effect and task in self._mail.waiters:
            self._mail.waiters.remove(task)
            self._unblock(task, self.now_ns)
            self._ready.append((task, None))

    def _cancel(self, task: Task) -> None:
        if task.done:
            return
        if task in self._mail.waiters:
            self._mail.waiters.remove(task)
        task.coro.close()
        task.done, self._live = True, self._live - 1
        if task.joiner is not None:
            self._wake(task.joiner, None)

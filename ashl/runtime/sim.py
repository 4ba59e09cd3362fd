"""Run the coroutines of all ranks in exact virtual time: real arithmetic, one thread, no clock of
the host.

Data flow: a heap orders events by virtual time in integer nanoseconds, ties by the order of
posting. An event resumes a task, which runs until its next effect. `Compute` calls its function at
once; the result is returned when the cost has passed, counted from when the rank's compute unit is
free. `Send` asks the network model when the message arrives. A collective starts when all members
have posted it and their collective queue is free. The same plan gives the same parameters and the
same trace, bit for bit, in any process.

States: running; pausing, while some ranks wait to be saved (`Save`). Once all of them wait and
nothing is in flight, the run has one consistent state. It is saved, and all ranks continue at that
instant. Failures of workers are injected by `ashl.runtime.churn`.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Generator,
    Hashable,
    Mapping,
    Sequence,
)
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeVar

from ashl.cluster.network import ExchangeNetwork, NicNetwork
from ashl.cluster.speed import Speed
from ashl.errors import AshlError, DeadlockError
from ashl.learn.allocator import reduce_collections
from ashl.learn.learner import Learner
from ashl.runtime import effects as fx
from ashl.runtime.collective_queue import Collective, CollectiveQueue, CollectiveQueues
from ashl.runtime.effects import (
    COLLECTIVES,
    PEER_FAILED,
    AllGather,
    Compute,
    Epoch,
    Message,
    Recv,
    Save,
    Send,
)
from ashl.runtime.kernel import Mailbox, Task, TaskKernel, deadline_ns
from ashl.runtime.rank_checkpoint import ABSENT, SavedRank, restore_rank
from ashl.runtime.rank_context import Observer, RankContext
from ashl.runtime.sums import PHASES_OF_A_SUM, chunk, concatenate, sum_in_rank_order
from ashl.size_only import SizeOnly

T = TypeVar("T")
# starts all ranks of a run that resumes from a checkpoint
Begin = Callable[["Sim", Callable[..., Coroutine]], None]
END_OF_INSTANT = 2**62  # offset of places in the order of events that come at the end of an instant


class Segment(NamedTuple):
    """One part of a computation: its class of time, its cost in ns, and a message that the rank
    receives from itself at its end.
    """

    kind: str
    cost_ns: int
    emits: Message | None = None


class Segments(NamedTuple):
    """The effect that keeps a rank's compute unit busy with one segment after the other."""

    segments: list[Segment]


class Sim(TaskKernel):
    """Drives the coroutines of all ranks under a virtual clock."""

    def __init__(
        self,
        num_ranks: int,
        speed: Speed,
        network: ExchangeNetwork | NicNetwork,
        observer: Observer,
    ) -> None:
        self.now_ns = 0
        self.events = 0
        self.speed = speed
        self.network = network
        self.observer = observer
        self._exchange = network if isinstance(network, ExchangeNetwork) else None
        self.contexts = [RankContext(self, rank) for rank in range(num_ranks)]
        self._mail = [Mailbox() for _ in range(num_ranks)]
        # ns, by rank: end of the last transfer that the rank has sent
        self._push_end = [0] * num_ranks
        # ns, by rank: end of the last computation that the compute unit was given
        self._unit_free = [0] * num_ranks
        self._heap: list[tuple[int, int, Any, Any]] = []
        self._seq = 0
        self._tasks: set[Task] = set()
        self.collective_queues = CollectiveQueues()
        self._mains: list[Task] = []
        # by rank: the task that waits to be saved, with the effect by which it asked
        self._pausing: dict[int, tuple[Task, Save]] = {}
        self.checkpoint_due_ns: float = math.inf
        # saves all ranks, and returns when the next checkpoint is due (ns)
        self.save: Callable[[Mapping[int, Save]], float] = lambda saves: math.inf
        self.failed_ranks: set[int] = set()
        # rejoining workers that wait to be admitted, with the function that starts them
        self.joining: dict[int, Callable[[], Coroutine]] = {}
        # how often each rank has failed or begun an epoch: a message is dropped when it arrives if
        # its sender or receiver has done so since it was sent
        self.restarts = [0] * num_ranks
        # by rank that completes its local work before the epoch: the function that starts it then
        self._starts_after_work = dict[int, Callable[..., Coroutine]]()
        # ns, by rank: its latest failure; None if no failure begins an epoch
        self.failed_ns: dict[int, int] | None = None
        self.worker_states: Learner | None = None
        # runs a computation, or starts it on another core; None = run it here
        self.begin_compute: Callable[[Compute], Any] | None = None

    def spawn(self, ctx: RankContext, coro: Coroutine, main: bool = False) -> Task:
        task = Task(ctx, coro, main)
        self._tasks.add(task)
        self._schedule(self.now_ns, task, None)
        return task

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T:
        queue = self.collective_queues.get_queue(group, self.now_ns)
        return queue.compute_once(ctx.rank, key, fn)

    def _check_pause(self) -> None:
        """Save all ranks once nothing is in flight, if all of them pause."""
        if self._pausing:
            self._schedule_last(self._drained_ns(), self._save_all, None)

    def _drained_ns(self) -> int:
        """Return when nothing is in flight any more, if all ranks pause until then."""
        in_flight = [
            item[0]
            for item in self._heap
            if self._is_message(item) and self._is_current(*item[3][:3])
        ]
        return max(self.now_ns, *self._unit_free, *in_flight)

    def _is_message(self, item: tuple[int, int, Any, Any]) -> bool:
        """Return True if this event is the arrival of a message."""
        return item[2] in (self._deliver, self._receive_head)

    def _abort_transfers(self) -> None:
        """End the transfers of messages that are dropped when they arrive, and free all NICs."""
        self._heap[:] = [item for item in self._heap if not self._is_message(item)]
        heapify(self._heap)
        self.network.release()
        self._push_end = [min(end_ns, self.now_ns) for end_ns in self._push_end]

    def _save_all(self, _: None) -> None:
        """Save all ranks and let them continue, if all of them pause and nothing is in flight.

        Failed workers are not saved. Workers that wait to be admitted ask again.
        """
        present = len(self.contexts) - len(self.failed_ranks) - len(self.joining)
        if len(self._pausing) < present or not self._pausing:
            return None
        if (later_ns := self._drained_ns()) > self.now_ns:
            return self._schedule_last(later_ns, self._save_all, None)
        self._abort_transfers()
        pausing, self._pausing = sorted(self._pausing.items()), {}
        for rank, (task, effect) in pausing:
            self._mail[rank].reset_after_pause(effect, not any(self.restarts))
            task.ctx.time_accounting.attribute_idle(self.now_ns)
            self._schedule(self.now_ns, task, None)
        for rank, start in sorted(self.joining.items()):
            self.stop_ranks([rank])
            self.start_joining(rank, start)
        self.checkpoint_due_ns = self.save({rank: effect for rank, (_, effect) in pausing})
        return None

    def start_joining(self, rank: int, start: Callable[[], Coroutine]) -> None:
        """Let a worker ask to be admitted; `start` returns its coroutine."""
        self.joining[rank] = start
        self._mains[rank] = self.spawn(self.contexts[rank], start(), main=True)

    def run(
        self, main: Callable[..., Coroutine], tick: Callable[[], None], begin: Begin | None = None
    ) -> list[Any]:
        """Run `main(ctx)` on every rank until all have ended; return their results in rank order.
        To resume from a checkpoint, `begin(sim, main)` starts all ranks by `main(ctx, saved=(stage,
        state))`.

        `tick` is called every 256 events, to draw progress.
        Raises: AshlError on a deadlock, with the ranks that wait, or if only some ranks have posted
        a collective and the others have ended.
        """
        if begin is None:
            self._mains = [self.spawn(ctx, main(ctx), main=True) for ctx in self.contexts]
        else:
            begin(self, main)
        try:
            with reduce_collections():
                self._process_events(tick)
            self._check_end()
        finally:
            for task in self._tasks:
                task.coro.close()
        end_ns = max(
            (
                ctx.time_accounting.cursor
                for ctx in self.contexts
                if ctx.rank not in self.failed_ranks
            ),
            default=0,
        )
        for ctx in self.contexts:
            if ctx.rank in self.failed_ranks:
                ctx.time_accounting.close(end_ns, "down")
            ctx.emit_totals()
        return [task.result for task in self._mains]

    def _check_end(self) -> None:
        if stuck := [task for task in self._mains if not task.done]:
            raise DeadlockError("deadlock: " + "; ".join(task.describe() for task in stuck))
        if waiting := self.collective_queues.list_pending():
            here = ", ".join(map(str, sorted(waiting[0].arrived)))
            raise AshlError(
                f"only rank {here} posted {waiting[0].describe()}, and the run has ended"
            )

    def _process_events(self, tick: Callable[[], None]) -> None:
        """Process events until the heap is empty."""
        heap = self._heap
        while heap:
            self.now_ns, _, target, value = heappop(heap)
            self.events += 1
            if target.__class__ is Task:
                if not target.done:
                    self._resume(target, value)
            else:
                target(value)
            if not self.events & 255:
                tick()

    def _schedule(self, time_ns: int, target: Any, value: Any) -> None:
        self._seq = place = self._seq + 1
        heappush(self._heap, (time_ns, place, target, value))

    def _schedule_last(self, time_ns: int, target: Any, value: Any) -> None:
        """Schedule an event after all other events of that instant."""
        self._seq = place = self._seq + 1
        heappush(self._heap, (time_ns, END_OF_INSTANT + place, target, value))

    def _resume(self, task: Task, value: Any) -> None:
        """Run a task until it blocks or ends."""
        ctx, task.waiting = task.ctx, None
        while True:
            try:
                effect = task.send(value)
            except StopIteration as end:
                return self.end_task(task, end.value)
            kind = effect.__class__
            if kind is Compute:
                blocked, value = self._compute(task, effect)
                if blocked:
                    task.waiting = effect
                    return None
            elif kind is Send:
                value = self._send(ctx, effect)
            elif kind is Recv:
                value = self._mail[ctx.rank].receive(effect)
                if value is None:
                    return self._block_task(task, effect)
            elif kind in COLLECTIVES:
                task.waiting = effect
                return self._post_collective(task, effect)
            else:
                blocked, value = self.perform_infrequent(task, effect)
                if blocked:
                    task.waiting = effect
                    return None

    def _compute(self, task: Task, effect: Compute) -> tuple[bool, Any]:
        """Run a computation.

        Returns: (True if the task blocks, value of the effect). The value of a computation with
        needs is a generator of the effects that remain.
        """
        if effect.needs:
            return False, self._compute_with_needs(task, effect)
        if effect.parts:
            payloads = dict[int, Any]()
            value = effect.fn(payloads.__setitem__)
            start_ns = self._start_compute(task)
            cost_ns = self._cost_ns(task.ctx.rank, effect.kind, effect.work, start_ns)
            segments = self._segments_of(task, effect, payloads, start_ns, cost_ns)
            return self._run_segments(task, segments, value)
        value = effect.fn() if self.begin_compute is None else self.begin_compute(effect)
        end = self._occupy_unit(task, effect)
        if end <= self.now_ns:
            return False, value
        self._schedule(end, task, value)
        return True, None

    def _compute_with_needs(self, task: Task, effect: Compute) -> Generator[Any, Any, Any]:
        """Yield the effects of a computation that pauses until each message that it needs has
        arrived.

        The function runs once all needed messages have arrived. No other task may use the rank's
        compute unit meanwhile.
        """
        start_ns = self._start_compute(task)
        cost_ns = self._cost_ns(task.ctx.rank, effect.kind, effect.work, start_ns)
        needed_payloads, payloads, done_ns = [], dict[int, Any](), 0
        for share, tag in effect.needs:
            until_ns = round(cost_ns * share)
            yield Segments([Segment("compute", until_ns - done_ns)])
            message = yield from Recv((tag,)).__await__()
            needed_payloads.append(message.payload)
            done_ns = until_ns
        value = effect.fn(payloads.__setitem__, needed_payloads.__getitem__)
        start_ns = self.now_ns - done_ns
        yield Segments(self._segments_of(task, effect, payloads, start_ns, cost_ns, done_ns))
        return value

    def _segments_of(
        self,
        task: Task,
        effect: Compute,
        payloads: dict[int, Any],
        start_ns: int,
        cost_ns: int,
        done_ns: int = 0,
    ) -> list[Segment]:
        """Return the segments of a computation that emits these payloads.

        Args: done_ns: the part of its cost that is over.
        """
        rank, segments, encoded_ns = task.ctx.rank, list[Segment](), 0
        for k, (share, tag) in enumerate(effect.parts):
            payload, computed_ns = payloads[k], round(cost_ns * share)
            message = Message(rank, tag, payload, (), 0)
            encode_ns = 0
            if (encoding := effect.encoding) is not None:
                message = message._replace(payload=encoding.fn(k, payload))
                before_ns = encoded_ns
                encoded_ns = self._cost_ns(rank, "compress", encoding.work[k], start_ns)
                encode_ns = encoded_ns - before_ns
            if encode_ns > 0:
                segments.append(Segment("compute", computed_ns - done_ns))
                segments.append(Segment("compress", encode_ns, message))
            else:
                segments.append(Segment("compute", computed_ns - done_ns, message))
            done_ns = computed_ns
        segments.append(Segment(effect.time_class, cost_ns - done_ns))
        return segments

    def _run_segments(self, task: Task, segments: list[Segment], value: Any) -> tuple[bool, Any]:
        """Occupy the rank's compute unit with these segments; the task goes on with `value` after
        the last one. Return whether it blocks, and the value.
        """
        rank, kind = task.ctx.rank, segments[0].kind
        end = max(self._unit_free[rank], self.now_ns)
        for segment in segments:
            if segment.kind != kind and task.main:
                task.ctx.time_accounting.attribute_until(kind, end)
            kind = segment.kind
            end += segment.cost_ns
            if segment.emits is not None:
                self._schedule(end, self._emit_part, (task, segment.emits))
        self._unit_free[rank] = end
        if task.main:
            task.ctx.time_accounting.attribute_until(kind, end)
        if end <= self.now_ns:
            return False, value
        self._schedule(end, task, value)
        return True, None

    def _emit_part(self, item: tuple[Task, Message]) -> None:
        """Deliver a part of a computation to its own rank."""
        task, message = item
        if task.done:
            return
        task.ctx.time_accounting.record_part(self.now_ns)
        message = message._replace(start_ns=self.now_ns)
        self._deliver((message.src, message, 2 * self.restarts[message.src]))

    def _occupy_unit(self, task: Task, effect: Compute) -> int:
        """Return the end, in ns, of a computation on the rank's compute unit, which runs one
        computation after the other.
        """
        rank = task.ctx.rank
        start = self._start_compute(task) if self._unit_free[rank] > self.now_ns else self.now_ns
        cost = self.speed.cost_ns(rank, effect.kind, effect.work, start)
        if cost is None:
            raise undeclared_cost(effect.kind, rank)
        end = self._unit_free[rank] = start + cost
        if cost and task.main:
            task.ctx.time_accounting.attribute_until(effect.time_class, end)
        return end

    def _start_compute(self, task: Task) -> int:
        """Return when the rank's compute unit begins the next computation, in ns."""
        start = max(self._unit_free[task.ctx.rank], self.now_ns)
        if start > self.now_ns and task.main:
            task.ctx.time_accounting.attribute_until("wait", start)
        return start

    def _cost_ns(self, rank: int, kind: str, work: float, start_ns: int) -> int:
        cost = self.speed.cost_ns(rank, kind, work, start_ns)
        if cost is None:
            raise undeclared_cost(kind, rank)
        return cost

    def _send(self, ctx: RankContext, send: Send) -> None:
        dst, tag, payload, meta = send
        nbytes = 0 if payload is None else payload.nbytes
        src, now = ctx.rank, self.now_ns
        restarts = self.restarts[src] + self.restarts[dst]
        if PEER_FAILED in self._mail[src].messages and self._mail[src].has_unread_failure(dst):
            restarts = -1  # for the incarnation that has failed
        if dst == src:
            message = Message(src, tag, payload, meta, now)
            return self._schedule(now, self._deliver, (dst, message, restarts))
        if self._exchange is not None:
            end = (
                now + self._exchange.cost_ns(src, dst, nbytes, now)
                if nbytes or self._exchange.outages
                else now
            )
            message = Message(src, tag, payload, meta, now)
            self._schedule(end, self._deliver, (dst, message, restarts))
        else:
            assert isinstance(self.network, NicNetwork)
            start, head, end = self.network.send_message(src, dst, nbytes, now)
            message = Message(src, tag, payload, meta, start)
            self._schedule(head, self._receive_head, (dst, message, restarts, nbytes, end))
        if nbytes:
            if end > self._push_end[src]:
                self._push_end[src] = end
            ctx.time_accounting.record_traffic(now, nbytes, 0)
            self.contexts[dst].time_accounting.record_traffic(now, 0, nbytes)

    def _receive_head(self, item: tuple[int, Message, int, int, int]) -> None:
        """Schedule the delivery of a message whose head is at the receiver's NIC."""
        dst, message, restarts, nbytes, tail = item
        assert isinstance(self.network, NicNetwork)
        end = self.network.queue_at_receiver(message.src, dst, nbytes, self.now_ns, tail)
        if (
            nbytes
            and end > self._push_end[message.src]
            and self._is_current(dst, message, restarts)
        ):
            self._push_end[message.src] = end
        self._schedule(end, self._deliver, (dst, message, restarts))

    def _is_current(self, dst: int, message: Message, restarts: int) -> bool:
        """Return True if the receiver runs, and neither it nor the sender has failed or begun an
        epoch since the message was sent.
        """
        same = restarts == self.restarts[message.src] + self.restarts[dst]
        return same and dst not in self.failed_ranks

    def _deliver(self, item: tuple[int, Message, int]) -> None:
        dst, message, restarts = item
        if not self._is_current(dst, message, restarts):
            return
        task = self._mail[dst].put(message)
        if task is not None:
            if task.main and message.src == dst:
                task.ctx.time_accounting.attribute_idle(self.now_ns)
            elif task.main:
                task.ctx.time_accounting.attribute_blocked(
                    self.now_ns, self._push_end[dst], message.start_ns
                )
            self._resume(task, message)

    def _block_task(self, task: Task, recv: Recv) -> None:
        task.waiting = recv
        self._mail[task.ctx.rank].waiters.append(task)
        if recv.before_s != math.inf:
            self._schedule(
                max(deadline_ns(recv.before_s), self.now_ns), self._expire_receive, (task, recv)
            )

    def _expire_receive(self, item: tuple[Task, Recv]) -> None:
        task, recv = item
        if task.waiting is recv:
            self._mail[task.ctx.rank].waiters.remove(task)
            if task.main:
                task.ctx.time_accounting.attribute_blocked(
                    self.now_ns, self._push_end[task.ctx.rank], self.now_ns
                )
            self._resume(task, None)

    def end_task(self, task: Task, result: Any = None) -> None:
        self._tasks.discard(task)
        super().end_task(task, result)

    def wake(self, task: Task, value: Any) -> None:
        self._schedule(self.now_ns, self._resume_idle, (task, value))

    def wake_at(self, time_ns: int, task: Task) -> None:
        self._schedule(time_ns, self._resume_idle, (task, None))

    def _resume_idle(self, item: tuple[Task, Any]) -> None:
        task, value = item
        if task.done:
            return
        if task.main:
            task.ctx.time_accounting.attribute_idle(self.now_ns)
        self._resume(task, value)

    def perform_infrequent(self, task: Task, effect: Any) -> tuple[bool, Any]:
        if isinstance(effect, Segments):
            return self._run_segments(task, effect.segments, None)
        return super().perform_infrequent(task, effect)

    def mail_of(self, task: Task) -> Mailbox:
        return self._mail[task.ctx.rank]

    def save_rank(self, task: Task, save: Save) -> tuple[bool, Any]:
        self._pausing[task.ctx.rank] = task, save
        self.joining.pop(task.ctx.rank, None)
        self._check_pause()
        return True, None

    def stop_ranks(self, ranks: Collection[int]) -> None:
        """End all tasks of these ranks at this instant, because they fail or begin an epoch.

        Their messages in flight are dropped when they arrive, and their scheduled results are void
        because their tasks have ended.
        """
        now = self.now_ns
        for task in [task for task in self._tasks if task.ctx.rank in ranks]:
            self.cancel_task(task)
        first_ns = dict.fromkeys(ranks, now)  # begin of the first message that arrives
        for _, _, target, value in self._heap:
            if target == self._deliver and value[0] in first_ns:
                first_ns[value[0]] = min(first_ns[value[0]], value[1].start_ns)
        for rank in ranks:
            time_accounting = self.contexts[rank].time_accounting
            time_accounting.truncate(now, self._push_end[rank], first_ns[rank])
            time_accounting.abort_collectives(now)
            self._unit_free[rank] = self._push_end[rank] = now
            self._mail[rank] = Mailbox()
            self.restarts[rank] += 1
            self._pausing.pop(rank, None)
            self.joining.pop(rank, None)
            self._starts_after_work.pop(rank, None)

    def begin_epoch(self, ranks: Sequence[int], start: Callable[..., Coroutine]) -> None:
        """End the tasks of all ranks, and start these ones by `start(ctx, saved=...)`, with their
        last safe points. A rank in local work reaches its next safe point first.
        """
        working = [rank for rank in ranks if self._is_working(rank)]
        others = [rank for rank in ranks if rank not in working]
        self.stop_ranks(others)
        self._pausing = {}
        self.collective_queues.abort()
        for task in [task for task in self._tasks if task.ctx.rank in working and not task.main]:
            self.cancel_task(task)
        for rank in working:
            self._mail[rank] = Mailbox()
            self.restarts[rank] += 1
            self._starts_after_work[rank] = start
            main = self._mains[rank]
            main.send = partial(self._complete_work, main)
        for rank in others:
            self._start_member(rank, start)

    def _is_working(self, rank: int) -> bool:
        """Return True if this rank computes, and reaches a safe point before it sends or waits."""
        main = self._mains[rank]
        is_computing = isinstance(main.waiting, Compute) and not main.done
        return is_computing and self.contexts[rank].in_local_work

    def _complete_work(self, main: Task, value: Any) -> Compute:
        """Resume a rank in local work up to its next safe point, in place of `Task.send`; return
        the next computation before it.

        At the safe point the rank begins the present epoch, and this task ends.
        Raises: StopIteration, as a coroutine that ends.
        """
        ctx, rank = main.ctx, main.ctx.rank
        before = ctx.restart_point
        effect = main.coro.send(value)
        if ctx.is_amid_step(before, effect):
            return effect
        main.coro.close()
        self._start_member(rank, self._starts_after_work.pop(rank))
        raise StopIteration

    def _start_member(self, rank: int, start: Callable[..., Coroutine]) -> None:
        """Start a rank as a member of an epoch, with its last safe point."""
        ctx = self.contexts[rank]
        ctx.in_local_work = False
        saved = ctx.restart_point
        if saved is not None:
            saved = saved[0], saved[1].copy_to_restart()
        self._mains[rank] = self.spawn(ctx, start(ctx, saved=saved), main=True)

    def _post_collective(self, task: Task, effect: Any) -> None:
        """Post a collective. It begins when its last member has posted it and the queue of its
        group is free.
        """
        collective_queue = self.collective_queues.get_queue(effect.group, self.now_ns)
        collective_queue.post(task, effect)
        if collective_queue.ready and not collective_queue.serve_scheduled:
            self._serve_queue(collective_queue)
        if collective_queue.ready and effect.credit and not collective_queue.commit_scheduled:
            collective_queue.commit_scheduled = True
            self._schedule_last(self.now_ns, self._commit_posted, collective_queue)

    def _commit_posted(self, collective_queue: CollectiveQueue) -> None:
        """Commit collectives at the end of an instant, when all members that post at this instant
        have done so.
        """
        collective_queue.commit_scheduled = False
        collective_queue.commit(self.now_ns)

    def _serve_queue(self, collective_queue: CollectiveQueue) -> None:
        """Begin the next collective of the queue: now, or when the one in flight has ended."""
        if collective_queue.ready and collective_queue.free_ns <= self.now_ns:
            self._begin_collective(collective_queue)
        collective_queue.serve_scheduled = collective_queue.ready > 0
        if collective_queue.serve_scheduled:
            keyed = any(posted.effect.key for posted in collective_queue.pending.values())
            (self._schedule_last if keyed else self._schedule)(
                collective_queue.free_ns, self._serve_queue, collective_queue
            )

    def _begin_collective(self, collective_queue: CollectiveQueue) -> None:
        """Carry out the next collective."""
        posted = collective_queue.pop_next(self.now_ns)
        effect, group = posted.effect, collective_queue.group
        tensors = [posted.arrived[rank][1] for rank in group]
        result, cost, traffic = price_collective(effect, tensors, self.network, self.now_ns)
        start = self.network.occupy_nics(group, cost, self.now_ns)
        collective_queue.free_ns = end = start + cost
        scattered = isinstance(effect, fx.AllReduce) and effect.op == "scatter"
        for place, rank in enumerate(group):
            member, _ = posted.arrived[rank]
            self._record_collective(member, start, end, traffic[place])
            value = chunk(result, len(group), place) if scattered else result
            if self.failed_ns is None:
                self._schedule(end, member, value)
            else:
                self._schedule(end, self._finish_collective, (member, value, group, self.now_ns))

    def _record_collective(
        self, member: Task, start_ns: int, end_ns: int, traffic: tuple[int, int]
    ) -> None:
        """Record the time of a collective for a member, and the bytes that it sent and received."""
        time_accounting = member.ctx.time_accounting
        time_accounting.record_traffic(start_ns, *traffic)
        time_accounting.record_collective(start_ns, end_ns, member.main)

    def _finish_collective(self, item: tuple[Task, Any, tuple[int, ...], int]) -> None:
        """Resume a member of a collective that began at `since_ns`, unless a member has failed
        since: then no member receives the result.
        """
        member, value, group, since_ns = item
        if not (member.done or self._is_broken(group, since_ns)):
            self._resume(member, value)

    def _is_broken(self, group: tuple[int, ...], since_ns: int) -> bool:
        """Return True if a member of this group has failed after `since_ns` and before the present
        instant: a failure is the first event of its instant.
        """
        failed_ns = self.failed_ns
        return bool(failed_ns) and any(
            since_ns < failed_ns.get(rank, -1) < self.now_ns for rank in group
        )


def undeclared_cost(kind: str, rank: int) -> AshlError:
    """Return the error for a cost that the cluster does not declare."""
    return AshlError(
        f"the cost of {kind!r} on rank {rank} is not declared; declare it, or declare 0"
    )


def price_collective(
    effect: Collective, tensors: list[Any], network: ExchangeNetwork | NicNetwork, now_ns: int
) -> tuple[Any, int, list[tuple[int, int]]]:
    """Return (result, cost in ns, (bytes sent, bytes received) of each member)."""
    g = len(tensors)
    group = effect.group
    first = tensors[0]
    # piggybacked bytes count for nothing; a vector of a size only has none
    extra = 0 if isinstance(first, SizeOnly) else effect.piggybacked * first.element_size()
    if isinstance(effect, AllGather):
        # every member's bytes are padded to the length of the longest
        total = g * (max(t.nbytes for t in tensors) - extra)
        moved = total * (g - 1) // g
        return tensors, network.all_gather_ns(group, total, now_ns), [(moved, moved)] * g
    nbytes = first.nbytes - extra
    if effect.op in PHASES_OF_A_SUM:
        gathers = effect.op == "gather"
        result = concatenate(tensors) if gathers else sum_in_rank_order(tensors)
        total = nbytes * g if gathers else -(-nbytes // (4 * g)) * 4 * g
        moved = total * (g - 1) // g
        return result, network.all_gather_ns(group, total, now_ns), [(moved, moved)] * g
    result = sum_in_rank_order(tensors, effect.op)
    cost = network.all_reduce_ns(group, nbytes, now_ns)
    if network.all_reduce_costs is None:
        moved = 2 * (g - 1) * nbytes // g
        return result, cost, [(moved, moved)] * g
    own = network.all_reduce_costs.initial_cost(group, nbytes)
    return result, cost, list(zip(own.sent, own.received, strict=True))


def restore_ranks(
    sim: Sim,
    start: Callable[..., Coroutine],
    ranks: Sequence[SavedRank],
    time_ns: int,
    epoch: Epoch | None = None,
) -> None:
    """Bring a fresh simulation to the moment of a checkpoint, at which nothing was in flight.

    Args: epoch: the members then, if a failure or a rejoin had begun another epoch.
    """
    sim.now_ns = time_ns
    resumed = {} if epoch is None else {"epoch": epoch, "resumes": True}
    for ctx, known in zip(sim.contexts, ranks, strict=True):
        until_ns = 0 if ctx.rank in sim.failed_ranks else time_ns
        restore_rank(ctx, known, until_ns, sim.speed, sim.worker_states)
        if known.stage != ABSENT:
            saved = known.stage, known.state
            ctx.safe_point(known.stage, known.state)
            task = sim.spawn(ctx, start(ctx, saved=saved, **resumed), main=True)
        else:
            task = Task(ctx, start(ctx, joins=True), main=True)
            task.coro.close()
            task.done = True
        sim._mains.append(task)
    for rank, known in enumerate(ranks):
        if known.stage == ABSENT and rank not in sim.failed_ranks:
            sim.start_joining(rank, partial(start, sim.contexts[rank], joins=True))

"""Run the coroutines of all ranks in exact virtual time: real arithmetic, one thread, no clock of
the host.

Data flow: a heap orders events by virtual time in integer nanoseconds, ties by the order of
posting. An event resumes a task, which runs until its next effect. `Compute` calls its function at
once; the result is returned when the cost has passed, counted from when the rank's compute unit is
free. `Send` asks the network model when the message arrives. A collective starts when all members
have posted it and their collective queue is free. The same plan gives the same parameters and the
same trace, bit for bit, in any process.

States: running; saving (`Saving` follows all ranks until each has passed a safe point); replaying a
checkpoint (`Replay`). Failures of workers are injected by `ashl.runtime.churn`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

from ashl.cluster.all_reduce_costs import AllReduceCost
from ashl.cluster.network import Exchange, Ports
from ashl.cluster.speed import Speed
from ashl.errors import AshlError
from ashl.learn.allocator import collecting_seldom
from ashl.learn.device import HOST
from ashl.runtime import effects as fx
from ashl.runtime.collective_queue import (
    Collective,
    CollectiveQueue,
    CollectiveQueues,
    SharedResult,
)
from ashl.runtime.effects import COLLECTIVES, AllReduce, Compute, Message, Recv, Send
from ashl.runtime.kernel import Mailbox, Task, check_context, deadline_ns, resume_task
from ashl.runtime.plain_state import from_plain, to_plain
from ashl.runtime.rank_checkpoint import Restored, counters_of, restore_counters
from ashl.runtime.rank_context import NullObserver, Observer, RankContext, WorkerStates
from ashl.runtime.sums import HALVES_OF_A_SUM, chunk, concatenate, sum_in_rank_order
from ashl.size_only import SizeOnly

T = TypeVar("T")
Begin = Callable[["Sim", Callable[..., Coroutine]], None]
LAST = 2**62  # what the end of an instant adds to a place in the order of events


class Sim:
    """Drives the coroutines of all ranks under a virtual clock."""

    def __init__(
        self, num_ranks: int, speed: Speed, network: Exchange | Ports, observer: Observer
    ) -> None:
        self.now_ns = self.events = 0
        self.speed, self.network, self.observer = speed, network, observer
        self._exchange = network if isinstance(network, Exchange) else None
        self.contexts = [RankContext(self, rank) for rank in range(num_ranks)]
        self._mail = [Mailbox() for _ in range(num_ranks)]
        self._push_end = [0] * num_ranks  # when the last transfer that this rank sent ends
        self._unit_free = [
            0
        ] * num_ranks  # when this rank's compute unit has done all that it was asked
        self._heap: list[tuple[int, int, Any, Any]] = []
        self._seq = 0
        self._tasks: set[Task] = set()
        self.collective_queues = CollectiveQueues()
        self._mains: list[Task] = []
        self.saving: Saving | None = None  # while a checkpoint is being made
        self.gone: set[int] = set()  # ranks that are lost
        self.worker_states: WorkerStates | None = None
        self.begin_compute: Callable[[Compute], Any] | None = (
            None  # runs a computation, or begins it on another core
        )

    def spawn(
        self,
        ctx: RankContext,
        coro: Coroutine,
        main: bool = False,
        is_background_service: bool = False,
    ) -> Task:
        task = Task(ctx, coro, main, is_background_service)
        self._tasks.add(task)
        self._at(self.now_ns, task, None)
        return task

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T:
        collective_queue = self.collective_queues.of(group, self.now_ns)
        if self.saving is not None:
            self.saving.record_request(ctx, collective_queue, key)
        return collective_queue.compute_once(ctx.rank, key, fn)

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool:
        if self.saving is not None:
            self.saving.safe_point(ctx, stage, state)
        return False  # a checkpoint holds what is on its way, too

    def checkpoint_due(self, ctx: RankContext, version: int) -> bool:
        return False

    def safe_point_wanted(self, ctx: RankContext) -> bool:
        return self.saving is not None and ctx.rank not in self.saving.marks

    def save_at(self, time_ns: int, keep: Callable[[dict[str, Any]], int | None]) -> None:
        """Make a checkpoint once all ranks have since been at the top of their loops; `keep` says
        when one is next.
        """
        self._at(time_ns, self._save, keep)

    def _save(self, keep: Callable[[dict[str, Any]], int | None]) -> None:
        if any(task.done for task in self._mains):
            return  # the run is ending
        saving = Saving(self)
        if saving.until_consistent() and (due := keep(saving.document())) is not None:
            self.save_at(max(due, self.now_ns), keep)

    def run(
        self, main: Callable[..., Coroutine], tick: Callable[[], None], begin: Begin | None = None
    ) -> list[Any]:
        """Run `main(ctx)` on every rank until all have ended; returns their results in rank order.
        To go on from a checkpoint, `begin(sim, main)` brings all there: `main(ctx, saved=(stage,
        state))`.

        `tick` is called every few hundred events, to draw progress. Raises AshlError on a deadlock,
        naming who waits, and where some ranks have come to a collective and the others ended
        without.
        """
        if begin is None:
            self._mains = [self.spawn(ctx, main(ctx), main=True) for ctx in self.contexts]
        else:
            begin(self, main)
        try:
            with collecting_seldom():
                self._drain(tick)
            self._check_end()
        finally:
            for task in self._tasks:
                task.coro.close()
        end_ns = max(
            (ctx.time_accounting.cursor for ctx in self.contexts if ctx.rank not in self.gone),
            default=0,
        )
        for ctx in self.contexts:
            if ctx.rank in self.gone:
                ctx.time_accounting.close_at(end_ns, "down")
            ctx.emit_totals()
        return [task.result for task in self._mains]

    def _check_end(self) -> None:
        if stuck := [task for task in self._mains if not task.done]:
            raise AshlError("deadlock: " + "; ".join(task.describe() for task in stuck))
        if waiting := self.collective_queues.waiting():
            here = ", ".join(map(str, sorted(waiting[0].arrived)))
            raise AshlError(
                f"only rank {here} came to {waiting[0].describe()}, and the run has ended"
            )

    def _drain(self, tick: Callable[[], None]) -> None:
        """Let happen what is on the heap, until nothing is left."""
        heap = self._heap
        while heap:
            self.now_ns, _, target, value = heappop(heap)
            self.events += 1
            if target.__class__ is Task:
                if not target.done:
                    self._resume(target, value)
            else:
                target(value)
            check_context()
            if not self.events & 255:
                tick()

    def _at(self, time_ns: int, target: Any, value: Any) -> None:
        self._seq = place = self._seq + 1
        heappush(self._heap, (time_ns, place, target, value))

    def _at_last(self, time_ns: int, target: Any, value: Any) -> None:
        """Once all else has happened that happens at that instant."""
        self._seq = place = self._seq + 1
        heappush(self._heap, (time_ns, LAST + place, target, value))

    def _resume(self, task: Task, value: Any) -> None:
        """Run a task until it blocks or ends."""
        ctx, task.waiting = task.ctx, None
        while True:
            effect = resume_task(task, value)
            kind = effect.__class__
            if kind is Compute:
                if effect.needs:
                    value = self._in_steps(task, effect)
                    continue
                if effect.parts:
                    value, end = self._in_parts(task, effect)
                else:
                    value, end = (
                        effect.fn() if self.begin_compute is None else self.begin_compute(effect),
                        self._computed(task, effect),
                    )
                if end > self.now_ns:
                    task.waiting = effect
                    return self._at(end, task, value)
            elif kind is Send:
                value = self._send(ctx, effect)
            elif kind is Recv:
                value = self._mail[ctx.rank].receive(effect)
                if value is None:
                    return self._block(task, effect)
            elif effect is None:
                return self._end(task)
            elif kind in COLLECTIVES:
                task.waiting = effect
                return self._post(task, effect)
            else:
                blocked, value = self._rare(task, effect)
                if blocked:
                    task.waiting = effect
                    return None

    def _in_parts(self, task: Task, effect: Compute) -> tuple[Any, int]:
        """(result, when it ends); what it hands out is there on the way to its end."""
        bodies = dict[int, Any]()
        value = effect.fn(bodies.__setitem__)
        return value, self._post_parts(task, effect, bodies, *self._started(task, effect))

    def _post_parts(
        self, task: Task, effect: Compute, bodies: dict[int, Any], start: int, cost: int
    ) -> int:
        """When a computation ends that began then; what it hands out is posted."""
        rank, encoding, encoded, before, spans = (
            task.ctx.rank,
            effect.encoding,
            [0] * len(effect.parts),
            0,
            [],
        )
        if encoding is not None:
            bodies = {k: encoding.fn(k, bodies[k]) for k in range(len(effect.parts))}
            encoded = [self._cost_ns(rank, "compress", work, start) for work in encoding.work]
        for k, (share, tag) in enumerate(effect.parts):
            computed = start + round(cost * share)
            due = computed + encoded[k]
            if encoded[k] > before:
                spans += [("compute", computed + before), ("compress", due)]
                before = encoded[k]
            self._at(due, self._hand_out, (task, Message(rank, tag, bodies[k], (), due)))
        end = self._unit_free[rank] = start + cost + before
        if task.main:
            for kind, until in (*spans, ("compute", end)):
                task.ctx.time_accounting.attribute_until(kind, until)
        return end

    def _in_steps(self, task: Task, effect: Compute) -> Generator[Any, Any, Any]:
        """The effects of a computation that needs messages on its way: from one need to the next.
        Once all have come the function is run. Nothing else is to be asked of the rank's compute
        unit meanwhile.
        """
        start, cost = self._started(task, effect)
        needed, bodies = [], dict[int, Any]()
        for share, tag in effect.needs:
            reached = start + round(cost * share)
            if reached > self.now_ns:
                if task.main:
                    task.ctx.time_accounting.attribute_until("compute", reached)
                yield fx.Sleep((reached - self.now_ns) / 1e9)
            needed.append((yield Recv((tag,))).body)
            start += max(0, self.now_ns - reached)  # it has stood still
        value = effect.fn(bodies.__setitem__, needed.__getitem__)
        end = self._post_parts(task, effect, bodies, start, cost)
        if end > self.now_ns:
            yield fx.Sleep((end - self.now_ns) / 1e9)
        return value

    def _hand_out(self, item: tuple[Task, Message]) -> None:
        """A part of what a task computes is there, for its own rank."""
        item[0].ctx.time_accounting.record_part(self.now_ns)
        self._deliver((item[1].src, item[1]))

    def _computed(self, task: Task, effect: Compute) -> int:
        """When the rank's compute unit has done this too: it does one thing after the other."""
        rank, start = task.ctx.rank, self.now_ns
        if self._unit_free[rank] > start:
            start, cost = self._started(task, effect)
        else:  # as mostly
            cost = self.speed.cost_ns(rank, effect.kind, effect.work, start)
            if cost is None:
                raise undeclared_cost(effect.kind, rank)
        end = self._unit_free[rank] = start + cost
        if cost and task.main:
            task.ctx.time_accounting.attribute_until(effect.booked, end)
        return end

    def _started(self, task: Task, effect: Compute) -> tuple[int, int]:
        """(when the rank's compute unit begins this, what it costs)."""
        rank, now = task.ctx.rank, self.now_ns
        start = max(self._unit_free[rank], now)
        if start > now and task.main:
            task.ctx.time_accounting.attribute_until("wait", start)
        return start, self._cost_ns(rank, effect.kind, effect.work, start)

    def _cost_ns(self, rank: int, kind: str, work: float, start_ns: int) -> int:
        cost = self.speed.cost_ns(rank, kind, work, start_ns)
        if cost is None:
            raise undeclared_cost(kind, rank)
        return cost

    def _send(self, ctx: RankContext, send: Send) -> None:
        dst, tag, body, meta = send
        nbytes = 0 if body is None else body.nbytes
        src, now = ctx.rank, self.now_ns
        if dst == src:
            return self._at(now, self._deliver, (dst, Message(src, tag, body, meta, now)))
        if self._exchange is not None:
            end = (
                now + self._exchange.cost_ns(src, dst, nbytes, now)
                if nbytes or self._exchange.outages
                else now
            )
            self._at(end, self._deliver, (dst, Message(src, tag, body, meta, now)))
        else:
            assert isinstance(self.network, Ports)
            start, head, end = self.network.depart(src, dst, nbytes, now)
            self._at(head, self._arrive, (dst, Message(src, tag, body, meta, start), nbytes, end))
        if nbytes:
            if end > self._push_end[src]:
                self._push_end[src] = end
            ctx.time_accounting.record_traffic(now, nbytes, 0)
            self.contexts[dst].time_accounting.record_traffic(now, 0, nbytes)

    def _arrive(self, item: tuple[int, Message, int, int]) -> None:
        """The head of a message is at the receiver's port."""
        dst, message, nbytes, tail = item
        assert isinstance(self.network, Ports)
        end = self.network.arrive(message.src, dst, nbytes, self.now_ns, tail)
        if nbytes and end > self._push_end[message.src]:
            self._push_end[message.src] = end
        self._at(end, self._deliver, (dst, message))

    def _deliver(self, item: tuple[int, Message]) -> None:
        dst, message = item
        task = self._mail[dst].put(message)
        if task is not None:
            if task.main and message.src == dst:
                task.ctx.time_accounting.attribute_idle(self.now_ns)
            elif task.main:
                task.ctx.time_accounting.attribute_blocked(
                    self.now_ns, self._push_end[dst], message.start_ns
                )
            self._resume(task, message)

    def _block(self, task: Task, recv: Recv) -> None:
        task.waiting = recv
        self._mail[task.ctx.rank].waiters.append(task)
        if recv.before_s != math.inf:
            self._at(max(deadline_ns(recv.before_s), self.now_ns), self._expire, (task, recv))

    def _expire(self, item: tuple[Task, Recv]) -> None:
        task, recv = item
        if task.waiting is recv:
            self._mail[task.ctx.rank].waiters.remove(task)
            if task.main:
                task.ctx.time_accounting.attribute_blocked(
                    self.now_ns, self._push_end[task.ctx.rank], self.now_ns
                )
            self._resume(task, None)

    def _end(self, task: Task) -> None:
        self._tasks.discard(task)
        if task.joiner is not None:
            self._wake(task.joiner, task.result)

    def _wake(self, task: Task, value: Any) -> None:
        """Come back later at this same instant, after what was posted before."""
        self._at(self.now_ns, self._awake, (task, value))

    def _awake(self, item: tuple[Task, Any]) -> None:
        task, value = item
        if task.done:
            return
        if task.main:
            task.ctx.time_accounting.attribute_idle(self.now_ns)
        self._resume(task, value)

    def _rare(self, task: Task, effect: Any) -> tuple[bool, Any]:
        """Effects off the hot path: (blocked, value)."""
        if isinstance(effect, fx.Sleep):
            self._at(self.now_ns + round(effect.seconds * 1e9), self._awake, (task, None))
            return True, None
        if isinstance(effect, fx.Join):
            if effect.task.done:
                return False, effect.task.result
            effect.task.joiner = task
            return True, None
        if isinstance(effect, fx.Cancel):
            self._cancel(effect.task)
        elif isinstance(effect, fx.Discard):
            self._mail[task.ctx.rank].discard(effect.tags)
        else:
            raise TypeError(f"{effect!r} is not an effect")
        return False, None

    def _cancel(self, task: Task) -> None:
        if task.done:
            return
        waiters = self._mail[task.ctx.rank].waiters
        if task in waiters:
            waiters.remove(task)
        task.coro.close()
        task.done, task.waiting = True, None
        self._end(task)

    def _post(self, task: Task, effect: Any) -> None:
        """A collective begins when its last member has come and its team's channel is free."""
        collective_queue = self.collective_queues.of(effect.group, self.now_ns)
        collective_queue.post(task, effect)
        if collective_queue.ready and not collective_queue.waking:
            self._serve(collective_queue)
        if collective_queue.ready and effect.credit and not collective_queue.settling:
            collective_queue.settling = True
            self._at_last(self.now_ns, self._settle, collective_queue)

    def _settle(self, collective_queue: CollectiveQueue) -> None:
        """All that is posted at this instant has been: commit what may be."""
        collective_queue.settling = False
        collective_queue.commit(self.now_ns)

    def _serve(self, collective_queue: CollectiveQueue) -> None:
        """Let the channel go on: now, or when what is under way has ended."""
        if collective_queue.free_ns <= self.now_ns:
            self._begin(collective_queue)
        collective_queue.waking = collective_queue.ready > 0
        if collective_queue.waking:
            keyed = any(posted.effect.key for posted in collective_queue.pending.values())
            (self._at_last if keyed else self._at)(
                collective_queue.free_ns, self._serve, collective_queue
            )

    def _begin(self, collective_queue: CollectiveQueue) -> None:
        """Carry out the collective that is next."""
        posted = collective_queue.take(self.now_ns)
        effect, group = posted.effect, collective_queue.group
        tensors = [posted.arrived[rank][1] for rank in group]
        result, cost, moved, own = price_collective(effect, tensors, self.network, self.now_ns)
        start = self.network.hold(group, cost, self.now_ns)
        collective_queue.free_ns = end = start + cost
        scattered = isinstance(effect, fx.AllReduce) and effect.op == "scatter"
        for place, rank in enumerate(group):
            member, time_accounting = posted.arrived[rank][0], self.contexts[rank].time_accounting
            if own is None:
                time_accounting.record_traffic(start, moved, moved)
            else:
                time_accounting.record_traffic(start, own.sent[place], own.received[place])
            time_accounting.record_collective(start, end, member.main)
            self._at(end, member, chunk(result, len(group), place) if scattered else result)


def undeclared_cost(kind: str, rank: int) -> AshlError:
    return AshlError(f"the cost of {kind!r} on rank {rank} is not declared; a cost is never zero")


def price_collective(
    effect: Collective, tensors: list[Any], network: Exchange | Ports, now_ns: int
) -> tuple[Any, int, int, AllReduceCost | None]:
    """(result, cost in ns, bytes that each member of the ring sends and receives, or of a sum by
    another algorithm those of each).
    """
    g, group, size_only = len(tensors), effect.group, isinstance(tensors[0], SizeOnly)
    if isinstance(effect, AllReduce):
        nbytes = tensors[0].nbytes - (
            0 if size_only else effect.piggybacked * tensors[0].element_size()
        )
        if effect.op in HALVES_OF_A_SUM:
            gathers = effect.op == "gather"
            total = nbytes * g if gathers else -(-nbytes // (4 * g)) * 4 * g
            cost, moved = network.all_gather_ns(group, total, now_ns), total * (g - 1) // g
            return (
                concatenate(tensors) if gathers else sum_in_rank_order(tensors),
                cost,
                moved,
                None,
            )
        cost, own = network.all_reduce_ns(group, nbytes, now_ns), None
        if network.summing is not None:
            own = network.summing.known(group, nbytes)
        return sum_in_rank_order(tensors, effect.op), cost, 2 * (g - 1) * nbytes // g, own
    longest = max(t.nbytes for t in tensors) - (
        0 if size_only else effect.piggybacked
    )  # as which all of them travel
    total = g * longest
    return tensors, network.all_gather_ns(group, total, now_ns), total * (g - 1) // g, None


# --- checkpoints
# --------------------------------------------------------------------------------------------------
# Checkpoints of a simulated run, from which it goes on bit for bit.  A coroutine cannot be written
# to a file. At its safe point, the top of its loop, its state holds all that it needs
# (`ctx.safe_point`), and from there on it is deterministic given its messages. So a checkpoint
# holds each rank's state at its last safe point, the messages that it has received since, and those
# in flight. To resume, every rank starts at its safe point and receives the same messages again, at
# the same instants. Until the moment of the checkpoint, everything that it sends, records and pays
# for is thrown away, since the checkpoint has it already. At most one round of each worker is
# computed twice.  Source: Elnozahy et al., "A survey of rollback-recovery protocols in
# message-passing systems", ACM Computing Surveys 2002 (pessimistic message logging), and Chandy and
# Lamport, "Distributed snapshots", ACM TOCS 1985.


MESSAGE, HEAD, RESULT, TURN = "message", "head", "result", "turn"  # what may be on its way
OF_A_CANCELLED_TASK = -1
BEFORE = -(2**40)  # the places of what comes before all else at the instant of a mark


@dataclass
class Mark:
    """One rank since the top of its loop: where it stood, what it has received, the places in the
    order of events that its doings took, how many collectives it has posted, and which of them have
    begun.
    """

    time_ns: int
    stage: int
    state: Any
    mail: list[Any]
    drawn: int
    own: Any = None  # what its module keeps beside the parameters
    came: list[tuple[int, int, str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    posted: int = 0
    begun: list[int] = field(default_factory=list)
    first: int = 0  # the last place taken before the mark
    unit_free: int = 0  # when its compute unit has done what it was asked before the mark


class Saving:
    """Runs the simulation on, with every rank's doings written down, until all have been at the top
    of their loops.
    """

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.marks: dict[int, Mark] = {}
        self._results: dict[
            int, tuple[int, int]
        ] = {}  # by place: of which rank's collective, and which of them
        self._shared_places: set[int] = set()  # those that no rank takes by itself
        self._numbers: dict[Task, int] = {}  # which of its rank's collectives a task waits for
        self._asked = {  # who had asked for what is computed alike, before its mark
            (collective_queue.group, key): set(shared.asked)
            for collective_queue in sim.collective_queues.all()
            for key, shared in collective_queue.shared.items()
        }

    def until_consistent(self) -> bool:
        """False where the run ended first, or some rank cannot be saved."""
        sim, heap = self.sim, self.sim._heap
        sim.saving, sim._post, sim._begin = self, self.post, self.begin  # type: ignore[method-assign]
        try:
            while heap and len(self.marks) < len(sim.contexts):
                time_ns, place, target, value = heappop(heap)
                sim.now_ns = time_ns
                sim.events += 1
                rank, before = self.owner(target, value), sim._seq
                mark = self.marks.get(rank)
                if mark is not None and (what := self.describe_event(place, target, value)):
                    mark.came.append((time_ns, place, *what))
                if target.__class__ is not Task:
                    target(value)
                elif not target.done:
                    sim._resume(target, value)
                if mark := self.marks.get(rank):
                    taken = range(max(before, mark.first) + 1, sim._seq + 1)
                    mark.places += [p for p in taken if p not in self._shared_places]
                self.cut = (time_ns, place)
                if any(task.done for task in sim._mains):
                    return False
            return len(self.marks) == len(sim.contexts)
        finally:
            sim.saving = None
            del sim._post, sim._begin  # type: ignore[method-assign]

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> None:
        """This rank is at the top of its loop; without a state it cannot be saved before it is
        there again.
        """
        sim = self.sim
        if state is None:
            self.marks.clear()  # nor the others: they are on their way to the same end
            self._numbers.clear()
            return
        if any(
            task.ctx is ctx and not (task.main or task.is_background_service) for task in sim._tasks
        ):
            return  # what runs beside it has no top of a loop
        if any(ctx.rank in posted.arrived for posted in sim.collective_queues.waiting()):
            return  # nor has a collective that a cancelled task has left behind
        mail = sim._mail[ctx.rank].undelivered()
        self.marks[ctx.rank] = Mark(
            time_ns=sim.now_ns,
            stage=stage,
            state=to_plain(state),
            mail=to_plain(mail),
            drawn=sim.speed.drawn(ctx.rank),
            own=to_plain(ctx.own_state),
            first=sim._seq,
            unit_free=sim._unit_free[ctx.rank],
        )

    def record_request(
        self, ctx: RankContext, collective_queue: CollectiveQueue, key: Hashable
    ) -> None:
        """A rank asks for what its team computes alike. Once it has a mark, it will ask again."""
        if ctx.rank not in self.marks:
            asked = self._asked.setdefault((collective_queue.group, key), set())
            asked.add(ctx.rank)
            if len(asked) == len(collective_queue.group):
                del self._asked[collective_queue.group, key]

    def post(self, task: Task, effect: Collective) -> None:
        sim, before = self.sim, self.sim._seq
        if mark := self.marks.get(task.ctx.rank):
            self._numbers[task] = mark.posted
            mark.posted += 1
        type(sim)._post(sim, task, effect)
        self._shared_places.update(range(before + 1, sim._seq + 1))

    def begin(self, collective_queue: CollectiveQueue) -> None:
        sim, before = self.sim, self.sim._seq
        waiting = {number: posted.arrived for number, posted in collective_queue.pending.items()}
        type(sim)._begin(sim, collective_queue)
        (begun,) = waiting.keys() - collective_queue.pending.keys()
        for rank, place in zip(
            collective_queue.group, range(before + 1, sim._seq + 1), strict=True
        ):
            number = self._numbers.pop(waiting[begun][rank][0], OF_A_CANCELLED_TASK)
            self._results[place] = rank, number
            if number != OF_A_CANCELLED_TASK:
                self.marks[rank].begun.append(number)

    def owner(self, target: Any, value: Any) -> int:
        """The rank that an event happens to; -1 where it happens in the network."""
        if isinstance(target, Task):
            return target.ctx.rank
        name = target.__name__
        return (
            -1
            if name in ("_arrive", "_serve", "_settle")
            else value[0]
            if name == "_deliver"
            else value[0].ctx.rank
        )

    def describe_event(self, place: int, target: Any, value: Any) -> tuple[str, Any] | None:
        """What came from outside with this event; all else a rank does again by itself."""
        if place in self._results:
            return RESULT, to_plain((*self._results[place], value))
        name = "" if isinstance(target, Task) else target.__name__
        if name == "_serve":
            return TURN, to_plain(value.group)
        return (
            (MESSAGE, to_plain(value))
            if name == "_deliver"
            else (HEAD, to_plain(value))
            if name == "_arrive"
            else None
        )

    def document(self) -> dict[str, Any]:
        """All that the simulation needs to go on."""
        sim = self.sim
        under_way = [
            (time_ns, place, self.describe_event(place, *what))
            for time_ns, place, *what in sorted(sim._heap)
        ]
        return {
            "time_ns": sim.now_ns,
            "cut": self.cut,
            "seq": sim._seq,
            "events": sim.events,
            "marks": [vars(self.marks[rank]) for rank in range(len(sim.contexts))],
            "under_way": [(time_ns, place, *what) for time_ns, place, what in under_way if what],
            "nodes": to_plain([counters_of(ctx) for ctx in sim.contexts]),
            "push_end": list(sim._push_end),
            "ports": to_plain(sim.network.saved()),
            "channels": to_plain(
                {
                    collective_queue.group: collective_queue.free_ns
                    for collective_queue in sim.collective_queues.all()
                }
            ),
            "asked": to_plain(self._asked),
        }


def resume(sim: Sim, start: Callable[..., Coroutine], saved: Mapping[str, Any]) -> None:
    """Bring a fresh simulation to where the checkpoint was made. `start(ctx, saved=(stage, state))`
    is a rank's coroutine; `saved["packages"]` says whose classes a state may be of.
    """
    restored = partial(
        from_plain, packages=tuple(saved["packages"]), device=saved.get("device", HOST)
    )
    marks = [Mark(**mark) for mark in saved["marks"]]
    replay = Replay(sim, marks)
    for group, free_ns in restored(saved["channels"]).items():
        sim.collective_queues.of(group, 0).free_ns = free_ns
    for (group, key), asked in restored(saved["asked"]).items():
        sim.collective_queues.of(group, 0).shared.setdefault(key, SharedResult()).asked.update(
            asked
        )
    heap, cut = sim._heap, tuple(saved["cut"])
    for rank, mark in enumerate(marks):
        ctx = sim.contexts[rank]
        if sim.worker_states is not None:
            sim.worker_states.set_worker_state(rank, restored(mark.own))
        task = Task(ctx, start(ctx, saved=(mark.stage, restored(mark.state))), main=True)
        sim._mains.append(task)
        sim._tasks.add(task)
        sim.speed.draw_from(rank, mark.drawn)
        sim._unit_free[rank] = mark.unit_free
        for message in restored(mark.mail):
            sim._mail[rank].put(message)
        heap.append((mark.time_ns, rank - len(marks), task, None))
    came = [event for mark in marks for event in mark.came]
    for time_ns, place, what, value in (*came, *(tuple(event) for event in saved["under_way"])):
        heap.append((time_ns, place, *replay.event(what, restored(value))))
    heap.sort()  # a sorted list is a heap
    replay.until(cut)
    sim.now_ns, sim._seq, sim.events = saved["time_ns"], saved["seq"], saved["events"]
    sim._push_end[:] = saved["push_end"]
    sim.network.go_on(restored(saved["ports"]))
    for ctx, known in zip(sim.contexts, restored(saved["nodes"]), strict=True):
        restore_counters(ctx, known)


def restore_ranks(
    sim: Sim, start: Callable[..., Coroutine], ranks: Sequence[Restored], time_ns: int
) -> None:
    """Bring a fresh simulation to this moment, with what each rank kept where nothing was on its
    way.
    """
    sim.now_ns = time_ns
    for ctx, known in zip(sim.contexts, ranks, strict=True):
        restore_counters(ctx, known.context)
        if sim.worker_states is not None:
            sim.worker_states.set_worker_state(ctx.rank, known.own)
        ctx.time_accounting.attribute_until("wait", time_ns)
        sim.speed.draw_from(ctx.rank, known.drawn)
        sim._mains.append(sim.spawn(ctx, start(ctx, saved=(known.stage, known.state)), main=True))


class Replay:
    """Until the moment of the checkpoint: events take the places they had, and nothing leaves a
    rank.
    """

    def __init__(self, sim: Sim, marks: list[Mark]) -> None:
        self.sim = sim
        self.places = [deque(mark.places) for mark in marks]
        self.begun = [set(mark.begun) for mark in marks]
        self.posted = [0] * len(marks)
        self.tasks: dict[
            tuple[int, int], Task
        ] = {}  # who waits for a rank's n-th collective since its mark
        self.marked: set[int] = set()  # who is at its mark, or past it
        self.before = count(BEFORE)

    def event(self, what: str, value: Any) -> tuple[Any, Any]:
        """(target, value) of something that comes from outside."""
        if what == TURN:
            collective_queue = self.sim.collective_queues.of(value, 0)
            collective_queue.waking = True
            return self.sim._serve, collective_queue
        return {MESSAGE: self.sim._deliver, HEAD: self.sim._arrive, RESULT: self.result}[
            what
        ], value

    def until(self, cut: tuple[int, int]) -> None:
        sim, heap = self.sim, self.sim._heap
        # records and snapshots were taken the first time; what the ranks see of the monitor is what
        # it says now: they
        # ask right after they have sent it something, so it has not changed since
        observer, sim.observer = (
            sim.observer,
            NullObserver(sim.observer.stopping, sim.observer.scores),
        )
        sim._at, sim._send, sim._post = self.at, self.send, self.post  # type: ignore[method-assign]
        sim.safe_point = self.safe_point  # type: ignore[method-assign]
        try:
            while heap and heap[0][:2] <= cut:
                sim.now_ns, _, target, value = heappop(heap)
                if target.__class__ is not Task:
                    target(value)
                elif not target.done:
                    sim._resume(target, value)
        finally:
            del sim._at, sim._send, sim._post, sim.safe_point  # type: ignore[method-assign]
            sim.observer = observer
        for i, (time_ns, place, target, value) in enumerate(heap):
            if target == self.result and value[:2] in self.tasks:
                heap[i] = (time_ns, place, self.tasks[value[:2]], value[2])

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool:
        self.marked.add(ctx.rank)
        return False

    def at(self, time_ns: int, target: Any, value: Any) -> None:
        rank = (target if isinstance(target, Task) else value[0]).ctx.rank
        place = (
            self.places[rank].popleft() if rank in self.marked else next(self.before)
        )  # what stands beside it
        heappush(self.sim._heap, (time_ns, place, target, value))

    def send(self, ctx: RankContext, send: Any) -> None:
        """It has been sent: it has arrived, or is under way."""
        self.places[ctx.rank].popleft()

    def post(self, task: Task, effect: Collective) -> None:
        rank = task.ctx.rank
        number = self.posted[rank]
        self.posted[rank] += 1
        if number in self.begun[rank]:
            self.tasks[rank, number] = task  # its result is among what came, or under way
        else:
            type(self.sim)._post(self.sim, task, effect)

    def result(self, item: tuple[int, int, Any]) -> None:
        """What a collective gave to the rank that had posted it."""
        rank, number, value = item
        if number != OF_A_CANCELLED_TASK and not (task := self.tasks[rank, number]).done:
            self.sim._resume(task, value)

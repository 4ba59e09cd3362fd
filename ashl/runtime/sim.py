"""The simulator: exact virtual time, real arithmetic, one thread.

A heap orders what happens by virtual time in integer nanoseconds, ties by the order of posting. `Compute` runs the real
function at once and gives its result back when its cost has passed, counted from when the node's compute unit is free;
`Send` asks the network model when the message arrives; collectives go through their team's channel. The same plan gives
the same parameters and the same trace, bit for bit, in any process.
"""

import math
from collections.abc import Callable, Coroutine, Generator, Hashable
from heapq import heappop, heappush
from typing import Any, TypeVar

from ashl.cluster.network import Exchange, Ports
from ashl.cluster.speed import Speed
from ashl.errors import AshlError
from ashl.learn.allocator import collecting_seldom
from ashl.runtime import effects as fx
from ashl.runtime.channel import Channel, Channels
from ashl.runtime.checkpoint import Saving
from ashl.runtime.collected import collected
from ashl.runtime.effects import COLLECTIVES, Compute, Message, Recv, Send
from ashl.runtime.kernel import Mailbox, Task, check_context, deadline_ns, resumed
from ashl.runtime.node import Node, Observer, WorkerStates
from ashl.runtime.sums import chunk

T = TypeVar("T")
Begin = Callable[["Sim", Callable[..., Coroutine]], None]
LAST = 2**62  # what the end of an instant adds to a place in the order of events


class Sim:
    """Drives the coroutines of all ranks under a virtual clock."""

    def __init__(self, num_ranks: int, speed: Speed, network: Exchange | Ports, observer: Observer) -> None:
        self.now_ns = self.events = 0
        self.speed, self.network, self.observer = speed, network, observer
        self._exchange = network if isinstance(network, Exchange) else None
        self.nodes = [Node(self, rank) for rank in range(num_ranks)]
        self._mail = [Mailbox() for _ in range(num_ranks)]
        self._push_end = [0] * num_ranks  # when the last transfer that this rank sent ends
        self._unit_free = [0] * num_ranks  # when this rank's compute unit has done all that it was asked
        self._heap: list[tuple[int, int, Any, Any]] = []
        self._seq = 0
        self._tasks: set[Task] = set()
        self.channels = Channels()
        self._mains: list[Task] = []
        self.saving: Saving | None = None  # while a checkpoint is being made
        self.gone: set[int] = set()  # ranks that are lost
        self.worker_states: WorkerStates | None = None
        self.ahead: Callable[[Compute], Any] | None = None  # runs a computation, or begins it on another core

    def spawn(self, node: Node, coro: Coroutine, main: bool = False, stands: bool = False) -> Task:
        task = Task(node, coro, main, stands)
        self._tasks.add(task)
        self._at(self.now_ns, task, None)
        return task

    def alike(self, node: Node, team: tuple[int, ...], key: Hashable, fn: Callable[[], T]) -> T:
        channel = self.channels.of(team, self.now_ns)
        if self.saving is not None:
            self.saving.asked(node, channel, key)
        return channel.alike(node.rank, key, fn)

    def mark(self, node: Node, stage: int, state: Any) -> bool:
        if self.saving is not None:
            self.saving.mark(node, stage, state)
        return False  # a checkpoint holds what is on its way, too

    def keeps(self, node: Node, version: int) -> bool:
        return False

    def wants_mark(self, node: Node) -> bool:
        return self.saving is not None and node.rank not in self.saving.marks

    def save_at(self, time_ns: int, keep: Callable[[dict[str, Any]], int | None]) -> None:
        """Make a checkpoint once all ranks have since been at the top of their loops; `keep` says when one is next."""
        self._at(time_ns, self._save, keep)

    def _save(self, keep: Callable[[dict[str, Any]], int | None]) -> None:
        if any(task.done for task in self._mains):
            return  # the run is ending
        saving = Saving(self)
        if saving.until_consistent() and (due := keep(saving.document())) is not None:
            self.save_at(max(due, self.now_ns), keep)

    def run(self, main: Callable[..., Coroutine], tick: Callable[[], None], begin: Begin | None = None) -> list[Any]:
        """Run `main(node)` on every rank until all have ended; returns their results in rank order. To go on from a
        checkpoint, `begin(sim, main)` brings all there: `main(node, saved=(stage, state))`.

        `tick` is called every few hundred events, to draw progress. Raises AshlError on a deadlock, naming who waits,
        and where some ranks have come to a collective and the others ended without.
        """
        if begin is None:
            self._mains = [self.spawn(node, main(node), main=True) for node in self.nodes]
        else:
            begin(self, main)
        try:
            with collecting_seldom():
                self._drain(tick)
            self._check_end()
        finally:
            for task in self._tasks:
                task.coro.close()
        end_ns = max((node.ledger.cursor for node in self.nodes if node.rank not in self.gone), default=0)
        for node in self.nodes:
            if node.rank in self.gone:
                node.ledger.close(end_ns, "down")
            node.account()
        return [task.result for task in self._mains]

    def _check_end(self) -> None:
        if stuck := [task for task in self._mains if not task.done]:
            raise AshlError("deadlock: " + "; ".join(task.describe() for task in stuck))
        if waiting := self.channels.waiting():
            here = ", ".join(map(str, sorted(waiting[0].arrived)))
            raise AshlError(f"only rank {here} came to {waiting[0].describe()}, and the run has ended")

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
        node, task.waiting = task.node, None
        while True:
            effect = resumed(task, value)
            kind = effect.__class__
            if kind is Compute:
                if effect.needs:
                    value = self._in_steps(task, effect)
                    continue
                if effect.parts:
                    value, end = self._in_parts(task, effect)
                else:
                    value, end = effect.fn() if self.ahead is None else self.ahead(effect), self._computed(task, effect)
                if end > self.now_ns:
                    task.waiting = effect
                    return self._at(end, task, value)
            elif kind is Send:
                value = self._send(node, effect)
            elif kind is Recv:
                value = self._mail[node.rank].take(effect)
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

    def _post_parts(self, task: Task, effect: Compute, bodies: dict[int, Any], start: int, cost: int) -> int:
        """When a computation ends that began then; what it hands out is posted."""
        rank, encoding, encoded, before, spans = task.node.rank, effect.encoding, [0] * len(effect.parts), 0, []
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
                task.node.ledger.mark(kind, until)
        return end

    def _in_steps(self, task: Task, effect: Compute) -> Generator[Any, Any, Any]:
        """The effects of a computation that needs messages on its way: from one need to the next. Once all have come
        the function is run. Nothing else is to be asked of the node's compute unit meanwhile."""
        start, cost = self._started(task, effect)
        needed, bodies = [], dict[int, Any]()
        for share, tag in effect.needs:
            reached = start + round(cost * share)
            if reached > self.now_ns:
                if task.main:
                    task.node.ledger.mark("compute", reached)
                yield fx.Sleep((reached - self.now_ns) / 1e9)
            needed.append((yield Recv((tag,))).body)
            start += max(0, self.now_ns - reached)  # it has stood still
        value = effect.fn(bodies.__setitem__, needed.__getitem__)
        end = self._post_parts(task, effect, bodies, start, cost)
        if end > self.now_ns:
            yield fx.Sleep((end - self.now_ns) / 1e9)
        return value

    def _hand_out(self, item: tuple[Task, Message]) -> None:
        """A part of what a task computes is there, for its own node."""
        item[0].node.ledger.part(self.now_ns)
        self._deliver((item[1].src, item[1]))

    def _computed(self, task: Task, effect: Compute) -> int:
        """When the node's compute unit has done this too: it does one thing after the other."""
        rank, start = task.node.rank, self.now_ns
        if self._unit_free[rank] > start:
            start, cost = self._started(task, effect)
        else:  # as mostly
            cost = self.speed.cost_ns(rank, effect.kind, effect.work, start)
            if cost is None:
                raise undeclared(effect.kind, rank)
        end = self._unit_free[rank] = start + cost
        if cost and task.main:
            task.node.ledger.mark(effect.booked, end)
        return end

    def _started(self, task: Task, effect: Compute) -> tuple[int, int]:
        """(when the node's compute unit begins this, what it costs)."""
        rank, now = task.node.rank, self.now_ns
        start = max(self._unit_free[rank], now)
        if start > now and task.main:
            task.node.ledger.mark("wait", start)
        return start, self._cost_ns(rank, effect.kind, effect.work, start)

    def _cost_ns(self, rank: int, kind: str, work: float, start_ns: int) -> int:
        cost = self.speed.cost_ns(rank, kind, work, start_ns)
        if cost is None:
            raise undeclared(kind, rank)
        return cost

    def _send(self, node: Node, send: Send) -> None:
        dst, tag, body, meta = send
        nbytes = 0 if body is None else body.nbytes
        src, now = node.rank, self.now_ns
        if dst == src:
            return self._at(now, self._deliver, (dst, Message(src, tag, body, meta, now)))
        if self._exchange is not None:
            end = now + self._exchange.cost_ns(src, dst, nbytes, now) if nbytes or self._exchange.outages else now
            self._at(end, self._deliver, (dst, Message(src, tag, body, meta, now)))
        else:
            assert isinstance(self.network, Ports)
            start, head, end = self.network.depart(src, dst, nbytes, now)
            self._at(head, self._arrive, (dst, Message(src, tag, body, meta, start), nbytes, end))
        if nbytes:
            if end > self._push_end[src]:
                self._push_end[src] = end
            node.ledger.traffic(now, nbytes, 0)
            self.nodes[dst].ledger.traffic(now, 0, nbytes)

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
                task.node.ledger.idle(self.now_ns)
            elif task.main:
                task.node.ledger.blocked(self.now_ns, self._push_end[dst], message.start_ns)
            self._resume(task, message)

    def _block(self, task: Task, recv: Recv) -> None:
        task.waiting = recv
        self._mail[task.node.rank].waiters.append(task)
        if recv.before_s != math.inf:
            self._at(max(deadline_ns(recv.before_s), self.now_ns), self._expire, (task, recv))

    def _expire(self, item: tuple[Task, Recv]) -> None:
        task, recv = item
        if task.waiting is recv:
            self._mail[task.node.rank].waiters.remove(task)
            if task.main:
                task.node.ledger.blocked(self.now_ns, self._push_end[task.node.rank], self.now_ns)
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
            task.node.ledger.idle(self.now_ns)
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
        elif isinstance(effect, fx.Drop):
            self._mail[task.node.rank].drop(effect.tags)
        else:
            raise TypeError(f"{effect!r} is not an effect")
        return False, None

    def _cancel(self, task: Task) -> None:
        if task.done:
            return
        waiters = self._mail[task.node.rank].waiters
        if task in waiters:
            waiters.remove(task)
        task.coro.close()
        task.done, task.waiting = True, None
        self._end(task)

    def _post(self, task: Task, effect: Any) -> None:
        """A collective begins when its last member has come and its team's channel is free."""
        channel = self.channels.of(effect.group, self.now_ns)
        channel.post(task, effect)
        if channel.ready and not channel.waking:
            self._serve(channel)
        if channel.ready and effect.credit and not channel.settling:
            channel.settling = True
            self._at_last(self.now_ns, self._settle, channel)

    def _settle(self, channel: Channel) -> None:
        """All that is posted at this instant has been: commit what may be."""
        channel.settling = False
        channel.commit(self.now_ns)

    def _serve(self, channel: Channel) -> None:
        """Let the channel go on: now, or when what is under way has ended."""
        if channel.free_ns <= self.now_ns:
            self._begin(channel)
        channel.waking = channel.ready > 0
        if channel.waking:
            keyed = any(posted.effect.key for posted in channel.pending.values())
            (self._at_last if keyed else self._at)(channel.free_ns, self._serve, channel)

    def _begin(self, channel: Channel) -> None:
        """Carry out the collective that is next."""
        posted = channel.take(self.now_ns)
        effect, group = posted.effect, channel.team
        tensors = [posted.arrived[rank][1] for rank in group]
        result, cost, moved, own = collected(effect, tensors, self.network, self.now_ns)
        start = self.network.hold(group, cost, self.now_ns)
        channel.free_ns = end = start + cost
        scattered = isinstance(effect, fx.AllReduce) and effect.op == "scatter"
        for place, rank in enumerate(group):
            member, ledger = posted.arrived[rank][0], self.nodes[rank].ledger
            if own is None:
                ledger.traffic(start, moved, moved)
            else:
                ledger.traffic(start, own.sent[place], own.received[place])
            ledger.collective(start, end, member.main)
            self._at(end, member, chunk(result, len(group), place) if scattered else result)


def undeclared(kind: str, rank: int) -> AshlError:
    return AshlError(f"the cost of {kind!r} on rank {rank} is not declared; a cost is never zero")

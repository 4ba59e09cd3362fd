"""The simulator where ranks share a machine that has too few cores for them: what they compute, and what messages and
collectives cost the machine at each end, are tasks on its cores (`ashl.cluster.cores`).

A rank has two lanes, in each of which one thing is done after the other: what it computes, and its messages, which
threads of their own handle. A server has one for both, as one interpreter does either and nothing takes long there.
What has come waits until nothing else does, so that a server answers one before it takes in the next. A message first
costs its sender, then it is on its way for what is left of the time that it takes alone, and then it costs its
receiver. What it costs an end beyond that time comes afterwards, in the same lane. Messages between workers share their
ports (processor sharing), as connections share a link. A collective costs each of its members alike, and then the rest
of its time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from ashl.cluster.cores import Cores, Pair
from ashl.cluster.network import FittedPorts, Port, Ports
from ashl.cluster.spec import Quota, SharedCores
from ashl.cluster.speed import NS, Speed
from ashl.runtime import effects as fx
from ashl.runtime.channel import Channel, Posted
from ashl.runtime.collected import collected
from ashl.runtime.effects import Compute, Message, Recv, Send
from ashl.runtime.kernel import Task
from ashl.runtime.node import Node, Observer
from ashl.runtime.sim import LAST, Sim
from ashl.runtime.sums import chunk

AT_ONCE = 2  # messages that share a server's port, each way: between one after the other and all alike, as TCP's are
Together = tuple[tuple[Cores["Lane"], float], ...]
Span = tuple[float, Callable[[], None]]  # work in ns of a core, and what is called at its end


class OnCores(Compute):
    """A computation of which nobody knows when it ends before it does."""

    __slots__ = ()


class Busy(NamedTuple):
    """Keep the rank's compute unit busy, with one kind of work after the other: (kind, ns of a core, what then)."""

    spans: tuple[tuple[str, float, Callable[[], None] | None], ...]


class SharedNode(Node):
    """A rank on shared cores."""

    __slots__ = ()

    def compute(self, *args: Any, **kwargs: Any) -> OnCores:
        return OnCores(*args, **kwargs)


class Lane:
    """What is done one after the other."""

    __slots__ = ("began_ns", "busy", "cores", "last_ns", "taking_in", "waiting")

    def __init__(self, cores: Cores[Lane] | Pair[Lane]) -> None:
        self.cores, self.busy, self.began_ns = cores, False, 0  # when what it does now began
        self.last_ns = (0, 0)  # when what has ended last began, and had a core
        self.waiting: deque[list[Span]] = deque()
        self.taking_in: deque[list[Span]] = deque()  # messages that have come, for when nothing else waits


class SharedSim(Sim):
    """Drives the coroutines of all ranks under a virtual clock, on machines that ranks share."""

    def __init__(
        self,
        num_ranks: int,
        speed: Speed,
        network: Ports,
        observer: Observer,
        shared: SharedCores,
        both_ways: tuple[float, float] | None = None,
    ) -> None:
        """`both_ways`: by which share of its time what goes into a server and out of it is slower while something goes
        the other way, too."""
        super().__init__(num_ranks, speed, network, observer)
        self.nodes = [SharedNode(self, rank) for rank in range(num_ranks)]
        self._shared = shared
        self._given = [
            count if quota is None else min(count, quota.cores)
            for count, quota in zip_longest(shared.cores, shared.quotas)
        ]
        machines = [
            Cores[Lane](count, math.ceil(count), shared.quantum_s * NS, shared.spread, *limits(quota))
            for count, quota in zip_longest(shared.cores, shared.quotas)
        ]
        self._crowded = [*shared.crowded, *[0.0] * len(machines)][: len(machines)]
        self._computed_ns = [0] * num_ranks  # when each has last computed
        self._home = [shared.machine[min(rank, len(shared.machine) - 1)] for rank in range(num_ranks)]
        self._units, self._movers = ([Lane(machines[home]) for home in self._home] for _ in range(2))
        self._workers = workers = len(speed.cluster.compute)
        self._movers[workers:] = self._units[workers:]
        self._ways = defaultdict[Port, Cores[Lane]](lambda: Cores(1))  # ports that messages under way share
        self._together = dict[Cores[Lane] | Pair[Lane], Together]()  # of cores that slow each other down
        if any(self._crowded):
            self._slow_each_other(*zip(machines, self._crowded, strict=True))
        self._both_ways = both_ways is not None
        if both_ways is not None:
            for rank in range(workers, num_ranks):
                ways = [self._ways[network.port(rank, way, False)] for way in ("in", "out")]
                for way in ways:
                    way.slots = AT_ONCE
                self._slow_each_other(*zip(ways, both_ways, strict=True))

    def _slow_each_other(self, *together: tuple[Cores[Lane], float]) -> None:
        """Each by so much of its work for each core in use of the others."""
        self._together |= dict.fromkeys((cores for cores, _ in together), together)

    def _rare(self, task: Task, effect: Any) -> tuple[bool, Any]:
        if isinstance(effect, Busy):
            return self._keep_busy(task, effect, None)
        if not isinstance(effect, OnCores):
            return super()._rare(task, effect)
        if effect.needs:
            return False, self._in_steps(task, effect)
        bodies = dict[int, Any]()
        if effect.parts:
            value = effect.fn(bodies.__setitem__)
        else:
            value = effect.fn() if self.ahead is None else self.ahead(effect)
        cost = self._whole_ns(task.node.rank, effect) + self._resumed_ns(task.node)
        return self._keep_busy(task, self._spans(task, effect, bodies, cost), value)

    def _whole_ns(self, rank: int, effect: Compute) -> int:
        """What a computation costs with all that it hands out."""
        return self._cost_ns(rank, effect.kind, effect.work, self.now_ns)

    def _resumed_ns(self, node: Node) -> int:
        """What it costs more to compute where the rank has not computed right up to now."""
        if self._computed_ns[node.rank] == self.now_ns or node.rank >= len(self._shared.resumed_s):
            return 0
        return round(self._shared.resumed_s[node.rank] * NS)

    def _spans(self, task: Task, effect: Compute, bodies: dict[int, Any], cost: int, before: float = 0.0) -> Busy:
        """What a computation keeps the unit busy with beyond this share of it."""
        rank, encoding, encoded, spans = task.node.rank, effect.encoding, 0, []
        for k, (share, tag) in enumerate(effect.parts):
            spans.append(("compute", cost * (share - before), None))
            before, body = share, bodies[k]
            if encoding is not None:
                body, since = encoding.fn(k, body), encoded
                encoded = self._cost_ns(rank, "compress", encoding.work[k], self.now_ns)
                spans.append(("compress", encoded - since, None))
            spans[-1] = (*spans[-1][:2], partial(self._part, task, tag, body))
        kind = effect.booked
        return Busy((*spans, (kind, cost * (1 - before), None)))

    def _part(self, task: Task, tag: fx.Tag, body: Any) -> None:
        self._hand_out((task, Message(task.node.rank, tag, body, (), self.now_ns)))

    def _in_steps(self, task: Task, effect: Compute) -> Generator[Any, Any, Any]:
        needed, bodies, before = [], dict[int, Any](), 0.0
        cost = self._whole_ns(task.node.rank, effect)
        for share, tag in effect.needs:
            yield Busy((("compute", cost * (share - before), None),))
            needed.append((yield Recv((tag,))).body)
            before = share
        value = effect.fn(bodies.__setitem__, needed.__getitem__)
        yield self._spans(task, effect, bodies, cost, before)
        return value

    def _keep_busy(self, task: Task, effect: Busy, value: Any) -> tuple[bool, Any]:
        lane = self._units[task.node.rank]
        if not lane.busy and not any(ns or then for _, ns, then in effect.spans):
            return False, value

        def booked(kind: str, then: Callable[[], None] | None, last: bool) -> None:
            rank, ledger, (began_ns, served_ns) = task.node.rank, task.node.ledger, lane.last_ns
            if task.main:
                ledger.mark("wait", began_ns)
                if began_ns > self._computed_ns[rank]:  # it has slept, and sees what has come when it has a core
                    ledger.mark("pull", served_ns)
                ledger.mark(kind, self.now_ns)
            if then is not None:
                then()
            self._computed_ns[rank] = self.now_ns
            if last and not task.done:
                self._resume(task, value)

        count = len(effect.spans)
        self._ask(
            lane, [(ns, partial(booked, kind, then, k + 1 == count)) for k, (kind, ns, then) in enumerate(effect.spans)]
        )
        return True, None

    def _ask(self, lane: Lane, spans: list[Span], among: deque[list[Span]] | None = None) -> None:
        """Have this done in a lane, when what it has been asked before is."""
        (lane.waiting if among is None else among).append(spans)
        if not lane.busy:
            self._go_on(lane)

    def _go_on(self, lane: Lane) -> None:
        """Begin what is next in a lane."""
        if not lane.waiting and lane.taking_in:
            lane.waiting.append(lane.taking_in.popleft())
        lane.busy = bool(lane.waiting)
        if lane.busy:
            lane.began_ns = self.now_ns
            lane.cores.begin(lane, lane.waiting[0][0][0], self.now_ns)
            self._await_next(lane.cores)

    def _await_next(self, cores: Cores[Lane] | Pair[Lane]) -> None:
        self._schedule(cores)
        if self._together and (together := self._together.get(cores)):
            in_use = math.fsum(own.in_use for own, _ in together)
            for own, slowed in together:
                pace = 1 / (1 + slowed * round(in_use - own.in_use, 9))
                if pace != own.pace:
                    own.change_pace(pace, self.now_ns)
                    self._schedule(own)

    def _schedule(self, cores: Cores[Lane] | Pair[Lane]) -> None:
        if (due := cores.next_ns()) is not None:
            self._at(due, self._over, (cores, cores.changes))

    def _over(self, item: tuple[Cores[Lane] | Pair[Lane], int]) -> None:
        """What ends next on some cores has ended, unless something has begun there meanwhile."""
        cores, changes = item
        if changes != cores.changes:
            return
        lane = cores.end(self.now_ns)
        if lane is None:
            return self._await_next(cores)
        lane.last_ns, spans = (lane.began_ns, cores.served_ns), lane.waiting[0]
        _, then = spans.pop(0)
        if not spans:
            lane.waiting.popleft()
        self._go_on(lane)
        then()
        if cores.ended is not None:  # nothing has begun since
            cores.give()
            self._await_next(cores)

    def _send(self, node: Node, send: Send) -> None:
        src, nbytes = node.rank, 0 if send.body is None else send.body.nbytes
        if send.dst == src:
            return super()._send(node, send)
        if nbytes:
            node.ledger.traffic(self.now_ns, nbytes, 0)
            self.nodes[send.dst].ledger.traffic(self.now_ns, 0, nbytes)
        self._handle(src, send.dst, nbytes, partial(self._leave, src, send, nbytes), comes=False)

    def _handle(self, rank: int, other: int, nbytes: int, then: Callable[[], None], *, comes: bool) -> None:
        """What a message costs this end of it, before it goes on and after."""
        between = max(rank, other) < self._workers
        work_ns, lane = self._shared.end_s(rank, nbytes, between) * NS, self._movers[rank]
        spans = [(work_ns * self._shared.before, then), (work_ns * (1 - self._shared.before), lambda: None)]
        self._ask(lane, spans, lane.taking_in if comes else None)

    def _leave(self, src: int, send: Send, nbytes: int) -> None:
        assert isinstance(self.network, Ports)
        if not self.network.factors.outages and (max(src, send.dst) < self._workers or self._both_ways):
            return self._travel(src, send, nbytes)
        _, head, tail = self.network.depart(src, send.dst, nbytes, self.now_ns)
        message = Message(src, send.tag, send.body, send.meta, self.now_ns)  # its header goes, whatever is in the way
        self._at(head, self._arrive, (send.dst, message, nbytes, tail))

    def _travel(self, src: int, send: Send, nbytes: int) -> None:
        """From worker to worker, or by a server's port where what goes each way slows the other: each message has a
        connection of its own, and those that are under way at once share the ports at both ends, a server's in twos. It
        is there when both have let it through. Sums do not wait for it."""
        assert isinstance(self.network, FittedPorts)
        network, dst, now = self.network, send.dst, self.now_ns
        inner, latency = network.inner(src, dst), network.latency_ns(src, dst, nbytes, now)
        item, left = (dst, Message(src, send.tag, send.body, send.meta, now), nbytes), {"out", "in"}

        def passed(way: str) -> None:
            left.discard(way)
            if not left:
                self._there(item)

        def hold(rank: int, other: int, before: list[Span], then: Callable[[], None], *, out: bool) -> None:
            own, crossing = ("out", "in") if out else ("in", "out")
            work_ns = network.service_ns(rank, nbytes, now, inner, out)
            self._ask(Lane(self._ways[network.port(rank, own, inner)]), [*before, (work_ns, then)])
            if rank < self._workers and (crossed_ns := network.crossed_ns(rank, other, nbytes, now, out=out)):
                self._ask(Lane(self._ways[network.port(rank, crossing, inner)]), [(crossed_ns, lambda: None)])

        def enter(_: None) -> None:
            hold(dst, src, [], partial(passed, "in"), out=False)

        def begin() -> None:
            self._at(self.now_ns + latency, enter, None)

        waits = src >= self._workers
        hold(src, dst, [(0.0, begin)] * waits, lambda: self._at(self.now_ns + latency, passed, "out"), out=True)
        if not waits:
            begin()

    def _arrive(self, item: tuple[int, Message, int, int]) -> None:
        dst, message, nbytes, tail = item
        assert isinstance(self.network, Ports)
        end = self.network.arrive(message.src, dst, nbytes, self.now_ns, tail)
        self._at(end, self._there, (dst, message, nbytes))

    def _there(self, item: tuple[int, Message, int]) -> None:
        """The last byte is there."""
        dst, message, nbytes = item
        come_ns = self.now_ns

        def handled() -> None:
            if nbytes:
                end_ns = come_ns if dst < self._workers else self.now_ns  # a server has it when it takes it in
                self._push_end[message.src] = max(self._push_end[message.src], end_ns)
                self.nodes[message.src].ledger.pushed(message.start_ns, end_ns)
            self._deliver((dst, message))

        self._handle(dst, message.src, nbytes, handled, comes=True)

    def _serve(self, channel: Channel) -> None:
        if channel.ready and channel.free_ns <= self.now_ns:
            self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        """It ends when it has cost all of its members what it does, and the rest of its time has passed; no sooner than
        it did, however much is left of a quota."""
        posted, group = channel.take(self.now_ns), channel.team
        tensors = [posted.arrived[rank][1] for rank in group]
        result, cost, moved, own = collected(posted.effect, tensors, self.network, self.now_ns)
        cost += self._start_ns(posted)
        start = self.network.hold(group, cost, self.now_ns)
        work_ns = cost * self._shared.busy_in(len(group))
        there = Counter(self._home[rank] for rank in group)
        rest_ns = max(0, cost - round(work_ns * self._slowed(there)))
        scattered = isinstance(posted.effect, fx.AllReduce) and posted.effect.op == "scatter"
        left, channel.free_ns, apart = set(group), LAST, self._shared.waited_in(len(group))

        def done(rank: int) -> None:
            left.discard(rank)
            if not left:
                self._at(max(start + cost, self.now_ns + rest_ns), ended, None)

        def begin(_: None) -> None:
            for rank in group:
                home = self._home[rank]
                alone_ns = work_ns / (1 + self._crowded[home] * (len(group) - there[home]))
                self._ask(self._movers[rank], [(alone_ns, partial(done, rank))])

        def ended(_: None) -> None:
            channel.free_ns = self.now_ns
            for place, rank in enumerate(group):
                member, ledger = posted.arrived[rank][0], self.nodes[rank].ledger
                ledger.traffic(start, *((moved, moved) if own is None else (own.sent[place], own.received[place])))
                ledger.collective(start + round(apart * (self.now_ns - start)), self.now_ns, member.main)
                self._at(self.now_ns, member, chunk(result, len(group), place) if scattered else result)
            self._at_last(self.now_ns, self._serve, channel)

        self._at(start, begin, None)

    def _start_ns(self, posted: Posted) -> int:
        """What a collective costs more by who has asked for it."""
        return 0

    def _slowed(self, there: Counter[int]) -> float:
        """How many times as long a task of so many members on each machine takes at once as one that is alone and has a
        whole core."""
        return max(1.0, *(many / self._given[home] for home, many in there.items()))


def limits(quota: Quota | None) -> tuple[float, ...]:
    """(what may be used of a machine's cores in a period, that period, what is kept, what is seen late) in ns."""
    if quota is None:
        return ()
    return tuple(NS * time_s for time_s in (quota.cores * quota.period_s, quota.period_s, quota.kept_s, quota.late_s))

"""The torch kernel: the same coroutines on a real process, fed by the real world.

One process per rank. The main task runs in the main thread; a compute runs inline while the node has no other live task
and on one compute thread otherwise. Messages come from listener threads through one queue. Ranks start their clocks
together, after a barrier.
"""

from __future__ import annotations

import heapq
import itertools
import platform
import queue
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.runtime import collectives, subset_sum
from ashl.runtime import effects as fx
from ashl.runtime.kernel import Mailbox, Task, deadline_ns, step, waiting_for
from ashl.runtime.node import Node, Observer
from ashl.runtime.pace import Pace
from ashl.runtime.plane import Links

KEPT_UP_NS = 2_000_000
BATCHED = 64  # unpaced collectives whose waiting is found out together


class TorchKernel:
    """Drives one rank's coroutines."""

    def __init__(
        self,
        rank: int,
        observer: Observer,
        make_pace: Callable[[Callable[[], int]], Pace],
        peers: tuple[int, ...],
        max_bytes: int,
        exact: bool,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        """`groups` are those that the plan lists; a sum over any other part of the ranks does without."""
        self.observer = observer
        self.node = Node(self, rank)
        self._zero = 0
        self._exact, self._groups = exact, groups
        self.pace = make_pace(self.clock_ns)
        self._peers, self._max_bytes = peers, max_bytes
        self._mail = Mailbox()
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._links: Links | None = None
        self._ready: deque[tuple[Task, Any]] = deque()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._seq = itertools.count()
        self._live = 0
        self._push_end = 0
        self._main: Task | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._moved = time.monotonic_ns()  # when a task last went on
        self._starts: list[tuple[int, int]] = []  # of unpaced collectives: (start, end)

    def clock_ns(self) -> int:
        return time.monotonic_ns() - self._zero

    def mark(self, node: Node, stage: int, state: Any) -> None:
        """Checkpoints of real processes are not built yet."""

    def alike(self, team: tuple[int, ...], key: Hashable, fn: Callable[[], Any]) -> Any:
        """Each process computes it for itself."""
        return fn()

    def spawn(self, node: Node, coro: Coroutine, main: bool = False) -> Task:
        task = Task(node, coro, main)
        self._live += 1
        self._ready.append((task, None))
        return task

    def run(self, main: Callable[[Node], Coroutine]) -> Any:
        """Run `main(node)` to its end; what else was spawned ends with it. The clock starts now, on all ranks."""
        self._links = Links(self._peers, self._inbox, self.clock_ns, self.pace.arrival, self._max_bytes)
        self._zero = common_zero()
        self._main = self.spawn(self.node, main(self.node), main=True)
        while not self._main.done:
            if self._ready:
                self._resume(*self._ready.popleft())
            else:
                self._next()
        self._resolve_starts()
        self.node.account()
        return self._main.result

    def goodbye(self, timeout_s: float) -> None:
        """Second phase of leaving: every rank is done, nothing more is started."""
        if self._links is not None:
            self._links.goodbye(timeout_s)

    def beat(self) -> dict[str, Any]:
        """How this rank stands: what its main task is blocked in (None while it computes), and since when nothing has
        moved. May be asked from another thread."""
        effect = self._main.waiting if self._main else None
        blocked = effect is not None and not isinstance(effect, fx.Compute)
        idle_s = (time.monotonic_ns() - self._moved) / 1e9
        return {**self.node.beat(), "waiting": waiting_for(effect) if blocked else None, "idle_s": idle_s}

    def _next(self) -> None:
        """Wait for the world: a message, a result, or a timer."""
        timeout = None
        if self._timers:
            timeout = max(0.0, (self._timers[0][0] - self.clock_ns()) / 1e9)
        try:
            self._take_in(self._inbox.get(timeout=timeout))
        except queue.Empty:
            _, _, callback = heapq.heappop(self._timers)
            callback()

    def _take_in(self, item: Any) -> None:
        if isinstance(item, fx.Message):
            if item.body is not None:
                self.node.ledger.traffic(item.start_ns, 0, item.body.nbytes)
            task = self._mail.put(item)
            if task is not None:
                self._unblock(task, item.start_ns)
                self._ready.append((task, item))
        elif isinstance(item, fx.PeerLostError):
            self._ready.extend((task, item) for task in self._mail.lose(item))
        else:
            item()  # the end of a compute on the thread

    def _unblock(self, task: Task, pull_start_ns: int) -> None:
        if task.main:
            self.node.ledger.blocked(self.clock_ns(), self._push_end, pull_start_ns)

    def _resume(self, task: Task, value: Any) -> None:
        """Run a task until it blocks or ends."""
        while not task.done:
            task.waiting, self._moved = None, time.monotonic_ns()
            effect = step(task, value)
            if effect is None:
                self._live -= 1
                if task.joiner is not None:
                    self._wake(task.joiner, task.result)
                return
            task.waiting = effect
            if isinstance(effect, fx.Compute):
                if self._live > 1:
                    return self._compute_aside(task, effect)
                value = self._compute(effect, task.main)
            elif isinstance(effect, fx.Send):
                value = self._send(effect)
            elif isinstance(effect, fx.Recv):
                value = self._recv(task, effect)
                if value is None:
                    return
            elif isinstance(effect, fx.AllReduce | fx.AllGather):
                value = self._collective(effect, task.main)
            elif isinstance(effect, fx.Sleep):
                self._timer(self.clock_ns() + round(effect.seconds * 1e9), lambda: self._wake(task, None))
                return
            elif isinstance(effect, fx.Join):
                if not effect.task.done:
                    effect.task.joiner = task
                    return
                value = effect.task.result
            elif isinstance(effect, fx.Cancel):
                value = self._cancel(effect.task)
            elif isinstance(effect, fx.Drop):
                value = self._mail.drop(effect.tags)
            else:
                raise TypeError(f"{effect!r} is not an effect")

    def _wake(self, task: Task, value: Any) -> None:
        if not task.done:
            if task.main:
                self.node.ledger.mark("wait", self.clock_ns())
            self._ready.append((task, value))

    def _timer(self, due_ns: int, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due_ns, next(self._seq), callback))

    def _compute(self, effect: fx.Compute, main: bool) -> Any:
        ledger = self.node.ledger
        start = ledger.cursor if main else self.clock_ns()
        value = effect.fn()
        end = self.pace.computed(effect.kind, effect.work, start)
        if main:
            ledger.mark("compress" if effect.kind == "compress" else "compute", end)
        return value

    def _compute_aside(self, task: Task, effect: fx.Compute) -> None:
        """On the compute thread, so that the node's other tasks go on."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="compute")
        start = self.node.ledger.cursor if task.main else self.clock_ns()

        def work() -> None:
            try:
                value, error = effect.fn(), None
            except Exception as raised:
                value, error = None, raised
            end = self.pace.computed(effect.kind, effect.work, start)
            self._inbox.put(lambda: done(value, error, end))

        def done(value: Any, error: Exception | None, end: int) -> None:
            if error is not None:
                raise error
            if task.main:
                self.node.ledger.mark("compress" if effect.kind == "compress" else "compute", end)
            if not task.done:
                self._ready.append((task, value))

        self._thread.submit(work)

    def _send(self, effect: fx.Send) -> None:
        nbytes = 0 if effect.body is None else effect.body.nbytes
        now = self._paced_now()
        header_ns, body_ns, busy_ns = self.pace.departure(effect.dst, nbytes, now)
        if nbytes:
            self.node.ledger.traffic(now, nbytes, 0)
            self._push_end = max(self._push_end, busy_ns)
        assert self._links is not None
        sent = self._sent if nbytes else lambda _: None
        self._links.post(effect.dst, effect.tag, effect.body, effect.meta, (header_ns, body_ns), sent)

    def _paced_now(self) -> int:
        """Where the last span should have ended, as long as the machine keeps up; else the clock."""
        cursor, now = self.node.ledger.cursor, self.clock_ns()
        return cursor if now - cursor < KEPT_UP_NS else now

    def _sent(self, end_ns: int) -> None:
        """From a sender thread."""
        self._push_end = max(self._push_end, end_ns)

    def _recv(self, task: Task, effect: fx.Recv) -> Any:
        """A message, or None when the task is blocked."""
        while not self._inbox.empty():
            self._take_in(self._inbox.get())
        message = self._mail.take(effect)
        if message is None:
            self._mail.waiters.append(task)
            if (due := deadline_ns(effect.before_s)) is not None:
                self._timer(due, lambda: self._expire(task, effect))
        return message

    def _expire(self, task: Task, effect: fx.Recv) -> None:
        if task.waiting is effect and task in self._mail.waiters:
            self._mail.waiters.remove(task)
            self._unblock(task, self.clock_ns())
            self._ready.append((task, None))

    def _cancel(self, task: Task) -> None:
        if task.done:
            return
        if task in self._mail.waiters:
            self._mail.waiters.remove(task)
        task.coro.close()
        task.done = True
        self._live -= 1
        if task.joiner is not None:
            self._wake(task.joiner, None)

    def _collective(self, effect: fx.AllReduce | fx.AllGather, main: bool) -> Any:
        """Blocks this process, as collectives do. Paced, it lasts as declared from the arrival of the last member."""
        ledger, group, tensor = self.node.ledger, effect.group, effect.tensor
        g, world = len(group), dist.get_world_size()
        pg = self._groups.get(group)
        loose = g < world and pg is None  # nobody has made a process group for it
        nbytes = tensor.nbytes - effect.riders * tensor.element_size()
        asked_ns = ledger.cursor
        cost = self.pace.collective_ns(group, nbytes, asked_ns)
        begin = self.clock_ns()
        if cost is not None and g > 1:
            subset_sum.meet(group, self.node.rank) if loose else dist.barrier(pg)
            begin = self.clock_ns()
            if main:
                ledger.mark("wait", begin)
        if isinstance(effect, fx.AllReduce):
            value: Any
            if loose and g > 1:
                assert effect.op == "sum"
                value = subset_sum.all_reduce(tensor, group, self.node.rank)
            else:
                value = collectives.all_reduce(tensor, group, effect.op, pg, self._exact)
            moved = 2 * (g - 1) * nbytes // g
        else:
            assert not loose, "bytes are gathered from all ranks, or from a group that the plan lists"
            value = collectives.all_gather(tensor, group, pg)
            total = sum(t.nbytes for t in value) - g * effect.riders
            moved = total * (g - 1) // g
            if cost is not None:  # a ring that goes round once; how long the others' bytes are is known only now
                cost = (self.pace.collective_ns(group, total, asked_ns) or 0) // 2
        ledger.traffic(begin, moved, moved)
        end = self.clock_ns()
        if cost is not None:
            self.pace.transfers[self.node.rank].told(cost, end - begin)
            if end < begin + cost:
                time.sleep((begin + cost - end) / 1e9)
                end = begin + cost
        if main:
            ledger.mark("push", (begin + end) // 2)
            ledger.mark("pull", end)
            if cost is None and g == world > 1:
                self._starts.append((begin, end))
                if len(self._starts) == BATCHED:
                    self._resolve_starts()
        return value

    def _resolve_starts(self) -> None:
        """Unpaced collectives: nobody knows at the time who came last. Every so often all compare when they came, and
        the time before the last one came is called waiting."""
        if not self._starts:
            return
        begins = torch.tensor([begin for begin, _ in self._starts])
        last: Tensor = begins.clone()
        dist.all_reduce(last, dist.ReduceOp.MAX)
        for (begin, end), latest in zip(self._starts, last.tolist(), strict=True):
            waited = max(0, min(latest, end) - begin)
            self.node.ledger.rebook("push", "wait", waited - waited // 2)
            self.node.ledger.rebook("pull", "wait", waited // 2)
        self._starts = []


def common_zero() -> int:
    """When the clock starts, in this process's monotonic nanoseconds: when all ranks have come. Ranks on the machine of
    rank 0 share its monotonic clock, and so its very start; others start when the barrier lets them go."""
    dist.barrier()
    machine = zlib.crc32(platform.node().encode())
    own = time.monotonic_ns()
    first = torch.tensor([own, machine])
    dist.broadcast(first, 0)
    zero, where = first.tolist()
    return zero if where == machine else own

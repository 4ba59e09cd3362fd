"""Simulate ranks whose computing and collectives slow each other down while both are active.

Every rank has two FIFO queues: one for what it computes, one for its share of collectives. A queue
that is alone makes one nanosecond of progress per nanosecond; while both have work, each progresses
at its own rate, as `Contention` says. A collective ends when the slowest of its members has done
its share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from typing import Any

from ashl.cluster.network import ExchangeNetwork, NicNetwork
from ashl.cluster.spec import ContentionCosts, Measured
from ashl.cluster.speed import NS, Speed
from ashl.runtime import effects as fx
from ashl.runtime.collective_queue import CollectiveQueue, Posted
from ashl.runtime.effects import Compute
from ashl.runtime.kernel import Task
from ashl.runtime.rank_context import Observer
from ashl.runtime.sim import END_OF_INSTANT, Segment, Sim, price_collective
from ashl.runtime.sums import chunk

COMPUTE, COLLECTIVE = 0, 1  # the two queues of a rank
# nanoseconds when alone, and a function that is called at the end of the work with its begin
Work = tuple[float, Callable[[int], None]]


class Contention:
    """The two FIFO queues of one rank, which share its machine."""

    def __init__(self, costs: ContentionCosts) -> None:
        # progress of each queue while both are active
        self.rates = (1 - costs.pace_reduction, 1 / costs.collective_slowdown)
        self.queues: tuple[deque[Work], deque[Work]] = (deque(), deque())
        self.remaining = [0.0, 0.0]  # of the first work of each queue, in nanoseconds when alone
        self.began_ns = [0, 0]  # when the first work of each queue began
        self.changes = 0  # an end that was scheduled before the latest change is void
        self._since_ns = 0

    def without_work(self) -> Contention:
        """Return a copy with empty queues. Work that is scheduled for this object still ends,
        because the other members of a collective wait for it.
        """
        found = copy(self)
        found.queues = (deque(), deque())
        found.remaining = [0.0, 0.0]
        found.began_ns = [0, 0]
        return found

    def add(self, queue: int, work: Work, now_ns: int) -> None:
        """Append work to a queue; it begins at once if the queue is empty."""
        self.queues[queue].append(work)
        if len(self.queues[queue]) == 1:
            self._begin_work(queue, now_ns)

    def _begin_work(self, queue: int, now_ns: int) -> None:
        self._advance(now_ns)
        self.remaining[queue], _ = self.queues[queue][0]
        self.began_ns[queue] = now_ns
        self.changes += 1

    def next_end_ns(self) -> int | None:
        """Return when the next work ends if no other work begins; None if both queues are empty."""
        ends = [
            self.remaining[queue] / self._rate(queue)
            for queue in (COMPUTE, COLLECTIVE)
            if self.queues[queue]
        ]
        return self._since_ns + max(0, round(min(ends))) if ends else None

    def finish(self, now_ns: int) -> tuple[int, Callable[[int], None]]:
        """Remove the work that ends now and begin the next of its queue; return that work's begin
        and its callback.
        """
        self._advance(now_ns)
        active = [queue for queue in (COMPUTE, COLLECTIVE) if self.queues[queue]]
        queue = min(active, key=lambda queue: self.remaining[queue] / self._rate(queue))
        _, callback = self.queues[queue].popleft()
        began_ns = self.began_ns[queue]
        self.changes += 1
        if self.queues[queue]:
            self._begin_work(queue, now_ns)
        return began_ns, callback

    def _advance(self, now_ns: int) -> None:
        rates = self._rate(COMPUTE), self._rate(COLLECTIVE)
        for queue in (COMPUTE, COLLECTIVE):
            if self.queues[queue]:
                self.remaining[queue] -= (now_ns - self._since_ns) * rates[queue]
        self._since_ns = now_ns

    def _rate(self, queue: int) -> float:
        return self.rates[queue] if self.queues[1 - queue] else 1.0


class ContendedSim(Sim):
    """Drives the coroutines of all ranks under a virtual clock, with contention between computing
    and collectives.
    """

    def __init__(
        self,
        num_ranks: int,
        speed: Speed,
        network: ExchangeNetwork | NicNetwork,
        observer: Observer,
        costs: ContentionCosts,
    ) -> None:
        super().__init__(num_ranks, speed, network, observer)
        self._contention = [Contention(costs) for _ in range(num_ranks)]
        self._start_ns = round(costs.start_s * NS)

    def stop_ranks(self, ranks: Collection[int]) -> None:
        super().stop_ranks(ranks)
        for rank in ranks:
            self._contention[rank] = self._contention[rank].without_work()

    def _compute(self, task: Task, effect: Compute) -> tuple[bool, Any]:
        if effect.needs or effect.parts:
            return super()._compute(task, effect)
        value = effect.fn() if self.begin_compute is None else self.begin_compute(effect)
        cost_ns = self._cost_ns(task.ctx.rank, effect.kind, effect.work, self.now_ns)
        return self._run_segments(task, [Segment(effect.time_class, cost_ns)], value)

    def _run_segments(self, task: Task, segments: list[Segment], value: Any) -> tuple[bool, Any]:
        contention = self._contention[task.ctx.rank]
        if not contention.queues[COMPUTE] and not any(own.cost_ns or own.emits for own in segments):
            return False, value
        for place, segment in enumerate(segments):
            last = place + 1 == len(segments)
            work = segment.cost_ns, partial(self._end_segment, task, segment, value, last)
            contention.add(COMPUTE, work, self.now_ns)
        self._schedule_next_end(contention)
        return True, None

    def _end_segment(
        self, task: Task, segment: Segment, value: Any, last: bool, began_ns: int
    ) -> None:
        if task.done:
            return
        if task.main:
            task.ctx.time_accounting.attribute_until("wait", began_ns)
            task.ctx.time_accounting.attribute_until(segment.kind, self.now_ns)
        if segment.emits is not None:
            self._emit_part((task, segment.emits))
        if last:
            self._resume(task, value)

    def _schedule_next_end(self, contention: Contention) -> None:
        """Schedule the end of the work of a rank that ends first, as it is now."""
        if (due := contention.next_end_ns()) is not None:
            self._schedule(due, self._end_work, (contention, contention.changes))

    def _end_work(self, item: tuple[Contention, int]) -> None:
        contention, changes = item
        if changes != contention.changes:
            return
        began_ns, callback = contention.finish(self.now_ns)
        self._schedule_next_end(contention)
        callback(began_ns)

    def _serve_queue(self, collective_queue: CollectiveQueue) -> None:
        if collective_queue.ready and collective_queue.free_ns <= self.now_ns:
            self._begin_collective(collective_queue)

    def _begin_collective(self, collective_queue: CollectiveQueue) -> None:
        """Carry out the next collective; it ends when all of its members have done their share."""
        posted = collective_queue.pop_next(self.now_ns)
        group = collective_queue.group
        tensors = [posted.arrived[rank][1] for rank in group]
        result, cost, traffic = price_collective(posted.effect, tensors, self.network, self.now_ns)
        cost += self._handover_ns(posted)
        start = self.network.occupy_nics(group, cost, self.now_ns)
        scattered = isinstance(posted.effect, fx.AllReduce) and posted.effect.op == "scatter"
        collective_queue.free_ns = END_OF_INSTANT  # not known before the last member has ended
        posted_ns = self.now_ns
        working = set(group)  # members that have not done their share

        def begin_shares(_: None) -> None:
            for rank in group:
                self._contention[rank].add(
                    COLLECTIVE, (cost, partial(end_share, rank)), self.now_ns
                )
                self._schedule_next_end(self._contention[rank])

        def end_share(rank: int, began_ns: int) -> None:
            working.discard(rank)
            if not working:
                self._schedule(max(start + cost, self.now_ns), end_collective, None)

        def end_collective(_: None) -> None:
            collective_queue.free_ns = self.now_ns
            broken = self._is_broken(group, posted_ns)
            for place, rank in enumerate(group):
                member, _ = posted.arrived[rank]
                if member.done or broken:
                    continue
                self._record_collective(member, start, self.now_ns, traffic[place])
                value = chunk(result, len(group), place) if scattered else result
                self._schedule(self.now_ns, member, value)
            self._schedule_last(self.now_ns, self._serve_queue, collective_queue)

        self._schedule(start, begin_shares, None)

    def _handover_ns(self, posted: Posted) -> int:
        """Return the cost of handing a collective to a thread: 0 if the main task of each member
        posted it.
        """
        in_main = all(member.main for member, _ in posted.arrived.values())
        return 0 if in_main else self._start_ns


def simulator(
    num_ranks: int,
    speed: Speed,
    costs: ExchangeNetwork | NicNetwork,
    observer: Observer,
    *,
    overlaps: bool = False,
) -> Sim:
    """Return the simulator for a cluster; `overlaps`: collectives may be in flight while ranks
    compute.
    """
    cluster = speed.cluster
    contention = cluster.contention if overlaps and isinstance(cluster, Measured) else None
    if contention is None or not isinstance(costs, NicNetwork):
        return Sim(num_ranks, speed, costs, observer)
    return ContendedSim(num_ranks, speed, costs, observer, contention)

"""Collectives of one rank on real processes: its local queues, one for each group of ranks.

A collective runs inline, in the calling thread, if no other task of the rank could run meanwhile.
Otherwise it runs on a thread of its group. The rule of `ashl.runtime.collective_queue` holds in
both cases. A committed collective is the next one; without one, the oldest is if its key is 0.
Otherwise members first exchange how many collectives they have posted, and commit. In a paced run
(declared costs) they exchange before every collective, and the same exchange tells them when all
their NICs are free.

A communicator serves one epoch. If a member fails, gloo raises an error at members connected to the
failed one, and others would wait forever. So waiting members check every `CHECK_S` seconds whether
another epoch has begun. Then, or after an error, the collective ends with `CollectiveBrokenError`.
In a run that does not tolerate failures the error of gloo is raised, and a member may wait forever:
the controller ends such a run.

Threads: the main thread posts, and a group's thread removes collectives. Groups are independent of
each other. Threads of an earlier epoch are daemons that nothing ends.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ashl.device import to_device, to_host
from ashl.errors import AshlError
from ashl.runtime import collectives
from ashl.runtime.collective_queue import Collective, choose_committed
from ashl.runtime.collectives import Hierarchy, Subset
from ashl.runtime.effects import AllReduce
from ashl.runtime.kernel import describe_wait
from ashl.runtime.rendezvous import CHECK_S, call_unless_over, world
from ashl.runtime.sums import PHASES_OF_A_SUM
from ashl.runtime.throttle import Throttle

WAITS_PER_EXCHANGE = 64  # unpaced collectives whose waiting times are exchanged together
LINGER_S = 30.0  # longest wait in seconds, at the end of a rank, for its posted collectives
CHECK = timedelta(seconds=CHECK_S)  # time between two checks for another epoch
Ranks = tuple[int, ...]
# makes a process group of some ranks that sums vectors on their devices; each of them calls it
MakeSubgroup = Callable[[Ranks], dist.ProcessGroup]


class CollectiveBrokenError(Exception):
    """A member of this group has failed, or another epoch has begun."""

    def __init__(self, group: Ranks) -> None:
        super().__init__(f"a collective of the ranks {list(group)} is broken")


class Outcome(NamedTuple):
    """The result of a collective: its value, its begin and end on the rank's clock, and the bytes
    that the rank sent and received.

    `waited_ns`: the times that recent collectives, this one included, waited for their last member,
    in the outcome with which they become known.
    """

    value: Any
    begin_ns: int
    end_ns: int
    traffic: tuple[int, int]  # (bytes sent, bytes received)
    waited_ns: list[int]


class Pending(NamedTuple):
    """A collective that this rank has posted and that has not ended."""

    number: int  # its place in the order of posting in the group, from 0
    effect: Collective
    main: bool  # True if the rank's main task has posted it
    # the group's thread calls it with the outcome or the error
    done: Callable[[Outcome | Exception], None]


class CollectiveTiming(NamedTuple):
    """Begin and end of an unpaced collective of all ranks, on the rank's clock."""

    begin_ns: int
    end_ns: int
    main: bool  # True if the rank's main task has posted it


class LocalQueue:
    """This rank's part of the collective queue of a group.

    One thread at a time carries out its collectives: the main thread in `run_inline`, else the
    group's thread. After an error the queue is not used any more.
    """

    def __init__(
        self,
        group: Ranks,
        carry_out: Callable[[LocalQueue], tuple[Pending, Outcome]],
    ) -> None:
        self.group = group
        self._carry_out = carry_out  # carries out the next collective of a queue
        self.posted = 0  # collectives that this rank has posted
        self.pending: list[Pending] = []  # in the order of posting
        # pending collectives that run next, in the same order on all members
        self.committed: list[Pending] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inline = False  # True while the main thread carries out a collective
        self._closing = False
        self._error: Exception | None = None

    def run_inline(self, effect: Collective, main: bool) -> Outcome:
        """Carry out a collective in this thread. Call it only while no collective is pending."""
        with self._changed:
            self._inline = True  # so that the group's thread does not take it
            self._append(effect, main, lambda outcome: None)
        outcome = self._carry_out(self)[1]
        self._inline = False
        return outcome

    def post(
        self, effect: Collective, main: bool, done: Callable[[Outcome | Exception], None]
    ) -> None:
        """Leave a collective to the group's thread."""
        with self._changed:
            self._append(effect, main, done)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop, daemon=True, name=f"collectives-{self.group}"
            )
            self._thread.start()

    def commit(self, common: int) -> None:
        """Commit collectives by key and credit (`choose_committed`).

        Args: common, the number of collectives that all members have posted.
        """
        numbers = {pending.number for pending in self.committed}
        ready = [p for p in self.pending if p.number < common and p.number not in numbers]
        self.committed += choose_committed(ready, len(self.committed))

    def remove(self, pending: Pending) -> None:
        """Remove a collective that has ended."""
        with self._changed:
            self.pending.remove(pending)
        if self.committed:
            self.committed.pop(0)

    def close(self, until_s: float) -> str | None:
        """Accept no more collectives and wait until the pending ones have ended, up to `until_s` of
        the host's monotonic clock.

        Returns: a collective that has not ended, in words, or None. Raises the error that ended the
        thread, if any.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(max(0.0, until_s - time.monotonic()))
            if self._thread.is_alive():
                return describe_wait(self.pending[0].effect)
        if self._error is not None:
            raise self._error
        return None

    def _append(
        self, effect: Collective, main: bool, done: Callable[[Outcome | Exception], None]
    ) -> None:
        """Post a collective: give it the next number of the group."""
        self.pending.append(Pending(self.posted, effect, main, done))
        self.posted += 1

    def _loop(self) -> None:
        """Carry out collectives in the group's thread until the queue closes or one fails."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self.pending and not self._inline) or self._closing)
                if not self.pending:
                    return
            try:
                pending, outcome = self._carry_out(self)
            except Exception as error:
                # a member failed: no later collective of this group can end
                self._error = error
                self.pending[0].done(error)
                return
            pending.done(outcome)


class Communicator:
    """All collectives of this rank, over all its groups."""

    def __init__(
        self,
        rank: int,
        groups: Mapping[Ranks, dist.ProcessGroup],
        exact: bool,
        throttle: Throttle,
        clock_ns: Callable[[], int],
        max_bytes: int,
        synchronize: Callable[[], None] | None = None,
        make_subgroup: MakeSubgroup | None = None,
        hierarchy: Hierarchy | None = None,
        members: Ranks | None = None,
        epoch: int = 0,
        routes: collectives.Routes | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """Set up the collectives of a rank.

        Args: groups, the process groups of `Topology.groups`; a sum over other ranks works without
        one. exact, True for sums with the same bits on every run. throttle, the declared costs.
        clock_ns, returns the run time. max_bytes, the most bytes that a member of an all-gather may
        send. make_subgroup, makes the process group of a sum that has none; None if tensors travel
        in the host's memory. synchronize, waits for a collective of a device; not called without
        `make_subgroup`. hierarchy, the nodes by which sums over all workers go, unless `exact` is
        set. members, all ranks of this epoch; None = those that torch.distributed was initialised
        with. epoch, its number. routes, the process groups by which sums without a process group
        reach each member. is_over, returns True once another epoch has begun; None if the run does
        not tolerate failures.
        """
        self._rank = rank
        self._exact = exact
        self._throttle = throttle
        self._clock = clock_ns
        self._groups = {**groups}
        self._device_groups = dict[Ranks, dist.ProcessGroup]()  # made by `make_subgroup`
        self._max_bytes = max_bytes
        self._make_subgroup = make_subgroup
        self._synchronize = synchronize
        self._hierarchy = None if exact else hierarchy
        self._epoch = epoch
        self._is_over = is_over
        self._queues: dict[Ranks, LocalQueue] = {}
        self._routes = routes or {}
        self._all = tuple(range(dist.get_world_size())) if members is None else members
        # groups without a process group, by the number from which the tags of their messages follow
        self._subsets: dict[int, Ranks] = {}
        # recent unpaced collectives whose waiting times are not known yet
        self._timings: list[CollectiveTiming] = []

    def local_queue(self, effect: Collective) -> LocalQueue:
        """Return this rank's queue of the group of a collective."""
        group = effect.group
        queue = self._queues.get(group)
        if queue is None:
            if self._rank not in group:
                raise AshlError(f"rank {self._rank} is not a member of the group {list(group)}")
            queue = self._queues[group] = LocalQueue(group, self._run_next)
        return queue

    def close(self) -> list[int]:
        """End all queues, and wait up to `LINGER_S` for their collectives.

        Returns: the waiting times in ns of recent collectives that no outcome has reported.
        Raises: AshlError if this rank posted a collective that not all members have posted.
        """
        until_s = time.monotonic() + LINGER_S
        if stuck := [words for queue in self._queues.values() if (words := queue.close(until_s))]:
            raise AshlError(
                f"rank {self._rank} has ended and still {stuck[0]}, which not all of these"
                " ranks have posted"
            )
        try:
            return self._measure_waiting()
        except RuntimeError:  # a rank failed in the last moment
            if self._is_over is None:
                raise
            return []

    def keep_alive(self) -> None:
        """Keep the process groups of this epoch from being deleted, even at the end of the process.

        On deletion gloo waits for a collective that was aborted, forever if a member hangs.
        """
        groups = [*self._groups.values(), *(group for group, _ in self._routes.values())]
        if dist.is_initialized():
            groups += [world(), dist.group.WORLD]
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _run_next(self, queue: LocalQueue) -> tuple[Pending, Outcome]:
        """Carry out the next collective of a queue. Raises CollectiveBrokenError in a run that
        tolerates failures.
        """
        try:
            return self._run_next_of_members(queue)
        except RuntimeError as error:
            if self._is_over is None:
                raise
            raise CollectiveBrokenError(queue.group) from error

    def _run_next_of_members(self, queue: LocalQueue) -> tuple[Pending, Outcome]:
        """Carry out the next collective of a queue. Raises RuntimeError if a member failed."""
        pending = queue.pending[0]
        g = len(queue.group)
        free_ns = 0
        paced = g > 1 and self._throttle.network is not None
        if g > 1 and (paced or (pending.effect.key and not queue.committed)):
            common, free_ns = self._agree_on_order(queue, self._throttle.free_ns(queue.group))
            queue.commit(common)
        if queue.committed:
            pending = queue.committed[0]
        earliest_ns = max(self._clock(), free_ns)
        number = pending.number + (self._epoch << 32)  # unique over all epochs
        tensor = pending.effect.tensor
        by_host = self._make_subgroup is None  # process groups of gloo transport host memory only
        sent = to_host(tensor) if by_host else tensor
        value, traffic, begin, cost = self._transfer(pending.effect, sent, number, earliest_ns)
        if not by_host and self._synchronize is not None:
            self._synchronize()
        elif isinstance(value, torch.Tensor):
            value = to_device(value, str(tensor.device))
        end_ns = self._clock()
        if cost is not None:  # end when the declared cost has passed
            self._throttle.transfers[self._rank].add(cost, end_ns - begin)
            if end_ns < begin + cost:
                time.sleep((begin + cost - end_ns) / 1e9)
                end_ns = begin + cost
        waited = []
        if not paced and g == len(self._all) > 1:
            self._timings.append(CollectiveTiming(begin, end_ns, pending.main))
            waited = self._measure_waiting() if len(self._timings) == WAITS_PER_EXCHANGE else []
        queue.remove(pending)
        return pending, Outcome(value, begin, end_ns, traffic, waited)

    def _agree_on_order(self, queue: LocalQueue, free_ns: int) -> tuple[int, int]:
        """Exchange the number of posted collectives and the time at which the NIC is free.

        Returns: (number of collectives that all members have posted, run time in ns at which the
        NICs of all members are free). The members' clocks show the same run time.
        """
        group = queue.group
        numbers = torch.tensor([-queue.posted, free_ns])  # the maximum of −n gives the minimum of n
        if self._without_process_group(group):
            numbers = self._subset(group).maximum(numbers)
        else:
            numbers = self._all_reduce_max(numbers, group)
        return -int(numbers[0]), int(numbers[1])

    def _all_reduce_max(self, numbers: torch.Tensor, group: Ranks) -> torch.Tensor:
        return collectives.all_reduce(
            numbers, group, "max", self._groups.get(group), self._exact, self._wait
        )

    def _wait(self, work: dist.Work) -> None:
        """Wait until an operation of a process group has ended. Raises RuntimeError if a member
        failed, or another epoch has begun.
        """
        while self._is_over is not None:
            try:
                work.wait(CHECK)
                return
            except RuntimeError:
                if work.is_completed():  # it may have ended right after the timeout
                    break
                if self._is_over():
                    raise
        work.wait()

    def _run_in_epoch(self, call: Callable[[], None]) -> None:
        """Call a function that blocks. Raises RuntimeError if another epoch begins before it
        returns.
        """
        assert self._is_over is not None
        call_unless_over(call, self._is_over)
        if self._is_over():
            raise RuntimeError("another epoch has begun")

    def _transfer(
        self, effect: Collective, tensor: torch.Tensor, number: int, earliest_ns: int
    ) -> tuple[Any, tuple[int, int], int, int | None]:
        """Carry out a collective, from `earliest_ns` of the run's clock on at the earliest.

        Returns: (value in the memory of the transport, (bytes sent, bytes received), begin in ns,
        declared cost in ns or None).
        """
        group, g = effect.group, len(effect.group)
        pg = self._groups.get(group)
        is_subset = self._without_process_group(group)
        if is_subset and g > 1 and self._make_subgroup is not None:
            if group not in self._device_groups:
                self._device_groups[group] = self._make_subgroup(group)
            pg, is_subset = self._device_groups[group], False
        nbytes = tensor.nbytes - effect.piggybacked * tensor.element_size()
        if isinstance(effect, AllReduce) and effect.op not in PHASES_OF_A_SUM:
            begin, cost = self._throttle.schedule_collective(
                group, number, nbytes, earliest_ns, gathers=False
            )
            value = self._sum(effect, tensor, pg, is_subset)
            return value, self._traffic(group, nbytes), begin, cost
        assert not is_subset, "gathering needs all ranks, or a group of `Topology.groups`"
        value: Any
        if isinstance(effect, AllReduce):
            gathers = effect.op == "gather"
            transfer = collectives.gather_equal if gathers else collectives.reduce_scatter
            value = transfer(tensor, g, pg, self._wait)
            total = g * nbytes if gathers else g * value.nbytes
        else:
            value, longest = collectives.all_gather(tensor, group, pg, self._max_bytes, self._wait)
            total = g * (longest - effect.piggybacked)  # known only after the lengths are gathered
        moved = total * (g - 1) // g
        begin, cost = self._throttle.schedule_collective(
            group, number, total, earliest_ns, gathers=True
        )
        return value, (moved, moved), begin, cost

    def _sum(
        self,
        effect: AllReduce,
        tensor: torch.Tensor,
        pg: dist.ProcessGroup | None,
        is_subset: bool,
    ) -> torch.Tensor:
        """Return the sum or the maximum over the group of a collective."""
        group = effect.group
        if is_subset and len(group) > 1:
            assert effect.op == "sum"
            return self._subset(group).sum(tensor)
        if hierarchy := self._hierarchy_of(group):
            return collectives.all_reduce_by_node(
                tensor, effect.op, self._rank, hierarchy, self._groups, self._wait
            )
        return collectives.all_reduce(tensor, group, effect.op, pg, self._exact, self._wait)

    def _hierarchy_of(self, group: Ranks) -> Hierarchy | None:
        """Return the hierarchy by which a sum over this group goes, or None. After a failure its
        process groups no longer exist.
        """
        hierarchy = self._hierarchy
        if hierarchy is None or group != hierarchy.members:
            return None
        return hierarchy if all(ranks in self._groups for ranks in hierarchy.groups) else None

    def _traffic(self, group: Ranks, nbytes: int) -> tuple[int, int]:
        """Return (bytes sent, bytes received) by this rank in a sum, by the cost model if there is
        one.
        """
        network, g = self._throttle.network, len(group)
        if network is not None and network.all_reduce_costs is not None and g > 1:
            known = network.all_reduce_costs.initial_cost(group, nbytes)
            place = group.index(self._rank)
            return known.sent[place], known.received[place]
        if hierarchy := self._hierarchy_of(group):
            return hierarchy.traffic(self._rank, nbytes)
        flat = 2 * (g - 1) * nbytes // g
        return flat, flat

    def _without_process_group(self, group: Ranks) -> bool:
        """Return True if no process group exists for these ranks. All ranks always have one."""
        return len(group) != len(self._all) and group not in self._groups

    def _subset(self, group: Ranks) -> Subset:
        """Return a group without a process group. Raises AshlError if two groups have the same
        number.
        """
        number = zlib.crc32(repr(group).encode()) % collectives.MAX_GROUPS
        if self._subsets.setdefault(number, group) != group:
            raise AshlError(
                f"the groups {group} and {self._subsets[number]} have the same message tags; return"
                " one of them from `groups` of the sync mode, or change cluster.num_workers"
            )
        run = None if self._is_over is None else self._run_in_epoch
        return Subset(group, self._rank, number, self._routes, run)

    def _measure_waiting(self) -> list[int]:
        """Exchange the begins of recent unpaced collectives; return in ns how long each collective
        of the main task waited for its last member.

        No member knows during a collective who is the last. Therefore all members compare their
        begins after every `WAITS_PER_EXCHANGE` collectives.
        """
        timings, self._timings = self._timings, []
        if not timings:
            return []
        begins = torch.tensor([timing.begin_ns for timing in timings])
        last_begins = self._all_reduce_max(begins, self._all)
        return [
            max(0, min(last_ns, timing.end_ns) - timing.begin_ns)
            for timing, last_ns in zip(timings, last_begins.tolist(), strict=True)
            if timing.main
        ]

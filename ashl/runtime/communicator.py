"""Collectives of one rank on real processes: its local queues, one for each process group.

A collective runs inline, in the calling thread, while no other task of the rank could run
meanwhile; otherwise it runs on a thread of its process group. The rule of
`ashl.runtime.collective_queue` holds in both cases, so each member knows what the others have
posted before. Where a key above 0 leaves a choice, members exchange how many collectives they have
posted. In a paced run they exchange when their NICs are free, too; both take one hop together.
`ashl.runtime.regroup_consensus` says what happens when a member fails.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ashl.errors import AshlError
from ashl.learn.device import to_device, to_host
from ashl.learn.staging import in_host
from ashl.runtime import collectives
from ashl.runtime.collective_queue import Collective, choose_committed
from ashl.runtime.collectives import Hierarchy
from ashl.runtime.effects import AllReduce, Formed, Regroup
from ashl.runtime.kernel import describe_wait
from ashl.runtime.regroup_consensus import Groups, RegroupConsensus
from ashl.runtime.rendezvous import world
from ashl.runtime.sums import HALVES_OF_A_SUM
from ashl.runtime.throttle import Throttle

BATCHED = 64  # unpaced collectives whose waiting is found out together
LINGER_S = 30.0  # how long a rank that has ended waits for collectives that it has posted
Team = tuple[int, ...]
Incarnations = tuple[int, ...]  # of its members, where one has come anew to what is no team of all


class Outcome(NamedTuple):
    """What came of a collective: when it began and ended on the rank's clock, the bytes that the
    rank sent and received in it, and what is known now of earlier ones: how long each waited for
    its last member.
    """

    value: Any
    begin_ns: int
    end_ns: int
    moved: tuple[int, int]
    waited_ns: list[int]


class Pending(NamedTuple):
    """One that this rank has posted, the n-th of its team's; `done` is called with what came of it,
    or why nothing did, from the team's thread.
    """

    number: int
    effect: Collective
    main: bool
    done: Callable[[Outcome | Exception], None]


class CollectiveTiming(NamedTuple):
    """An unpaced collective of all ranks, and whether it took the main task's time."""

    begin_ns: int
    end_ns: int
    main: bool


class LocalQueue:
    """This rank's end of one team's channel."""

    def __init__(
        self,
        group: Team,
        incarnations: Incarnations,
        carry_out: Callable[[LocalQueue], tuple[Pending, Outcome]],
    ) -> None:
        self.group, self.incarnations, self._carry_out = group, incarnations, carry_out
        self.posted = 0
        self.pending: list[Pending] = []  # in the order of posting
        self.committed: list[
            Pending
        ] = []  # ... and those of them that are next, alike on all members
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inline = self._closing = False
        self._error: Exception | None = None

    def run_inline(self, effect: Collective, main: bool) -> Outcome:
        """Carry out a collective in this thread; to be called while nothing is pending."""
        with self._changed:
            self._inline = True  # hands off, thread
            self._append(effect, main, lambda outcome: None)
        outcome = self._carry_out(self)[1]
        self._inline = False
        return outcome

    def post(
        self, effect: Collective, main: bool, done: Callable[[Outcome | Exception], None]
    ) -> None:
        """Leave a collective to the team's thread."""
        with self._changed:
            self._append(effect, main, done)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop, daemon=True, name=f"collectives-{self.group}"
            )
            self._thread.start()

    def commit(self, common: int) -> None:
        """Commit what may be, where all members have posted `common` of them."""
        numbers = {pending.number for pending in self.committed}
        ready = [p for p in self.pending if p.number < common and p.number not in numbers]
        self.committed += choose_committed(ready, len(self.committed))

    def remove(self, pending: Pending) -> None:
        """This one is done."""
        with self._changed:
            self.pending.remove(pending)
        if self.committed:
            self.committed.pop(0)

    def close(self, until_s: float) -> str | None:
        """Nothing more will be posted. Waits until what is pending has ended, up to this moment of
        the host's monotonic clock; returns what has not, in words. Raises what ended the thread, if
        something did.
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
        self.pending.append(Pending(self.posted, effect, main, done))
        self.posted += 1

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self.pending and not self._inline) or self._closing)
                if not self.pending:
                    return
            try:
                pending, outcome = self._carry_out(self)
            except Exception as error:  # a peer is gone: nothing of this team will ever end
                self._error = error
                self.pending[0].done(error)
                return
            pending.done(outcome)


def keep_groups_alive(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Also not when the process ends: gloo would wait for a sum that was broken off, and for good
    where one of its members stands still, or its link is cut.
    """
    for group in (*groups, *((world(), dist.group.WORLD) if dist.is_initialized() else ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Communicator:
    """All channels of this rank."""

    def __init__(
        self,
        rank: int,
        groups: Mapping[Team, dist.ProcessGroup],
        exact: bool,
        throttle: Throttle,
        clock_ns: Callable[[], int],
        max_bytes: int,
        settle: Callable[[], None] | None = None,
        hierarchy: Hierarchy | None = None,
        consensus: RegroupConsensus | None = None,
    ) -> None:
        """`groups` are those that the plan lists; a sum over any other part of the ranks does
        without. They carry what lies in the host's memory; with `settle` what lies on the device,
        too, and it waits until that is done. With a `hierarchy` sums over all workers go by it,
        unless they are exact. With an `agreement` a collective that lacks a member comes to
        `CollectiveAborted`.
        """
        self._rank, self._exact, self._throttle, self._clock = rank, exact, throttle, clock_ns
        self._groups: Groups = {**groups}
        self._max_bytes, self._settle, self._hierarchy, self._consensus = (
            max_bytes,
            settle,
            hierarchy,
            consensus,
        )
        self._ends: dict[tuple[Team, Incarnations], LocalQueue] = {}
        self._ways: collectives.Ways = {}
        self._tags: dict[int, Team] = {}  # of teams without a process group
        self._starts: list[CollectiveTiming] = []

    @cached_property
    def _all(self) -> Team:
        """Who is there, for who is there from the start."""
        return tuple(range(dist.get_world_size())) if dist.is_initialized() else ()

    def local_queue(self, effect: Collective) -> LocalQueue:
        """This rank's end of the channel of a team."""
        key = group, incarnations = (
            effect.group,
            effect.incarnations if isinstance(effect, AllReduce) else (),
        )
        end = self._ends.get(key)
        if end is None:
            if self._rank not in group:
                raise AshlError(f"rank {self._rank} is not a member of the group {list(group)}")
            end = self._ends[key] = LocalQueue(group, incarnations, self._run_next)
        return end

    def add_routes(self, ways: collectives.Ways) -> None:
        """From now on sums that no group carries reach these ranks so. May be called from another
        thread.
        """
        self._ways = {**self._ways, **ways}

    def close(self) -> list[int]:
        """The rank has ended; returns how long collectives waited, as far as it was not known.
        Raises AshlError where something was posted that not all members of its team have posted.
        """
        until_s = time.monotonic() + LINGER_S
        if stuck := [words for end in self._ends.values() if (words := end.close(until_s))]:
            raise AshlError(
                f"rank {self._rank} has ended and still {stuck[0]}, to which not all of them came"
            )
        try:
            return self._measure_waiting()
        except RuntimeError:  # somebody is lost in the last moment
            if self._consensus is None:
                raise
            return []

    def regroup(self, asked: Regroup) -> Formed:
        """Agree with all who are there how to go on."""
        assert self._consensus is not None
        formed, groups = self._consensus.regroup(asked, self._clock)
        if groups is not None:
            keep_groups_alive(self._groups.values())
            self._all, self._groups, self._ends, self._starts = formed.ranks, groups, {}, []
        return formed

    @property
    def join_pending(self) -> bool:
        """Whether somebody asks to be let in."""
        return self._consensus is not None and self._consensus.join_pending

    def _run_next(self, end: LocalQueue) -> tuple[Pending, Outcome]:
        """Whatever is next in a team's channel."""
        consensus = self._consensus
        if consensus is None:
            return self._run_next_of_survivors(end)
        try:
            if consensus.lost.intersection(end.group) and not self._without_process_group(
                end.group, end.incarnations
            ):
                raise RuntimeError("a member of the process group has failed")
            return self._run_next_of_survivors(end)
        except RuntimeError as error:
            pending, broken = (
                (end.committed or end.pending)[0],
                consensus.await_failure(end.group, error, end.incarnations),
            )
        end.remove(pending)
        now = self._clock()
        return pending, Outcome(broken, now, now, (0, 0), [])

    def _run_next_of_survivors(self, end: LocalQueue) -> tuple[Pending, Outcome]:
        """The same, where nobody is lost. Raises RuntimeError where somebody is."""
        pending, g, free_ns = end.pending[0], len(end.group), 0
        paced = g > 1 and self._throttle.network is not None
        if g > 1 and (paced or (pending.effect.key and not end.committed)):
            common, free_ns = self._agree_on_order(end, self._throttle.free_ns(end.group))
            end.commit(common)
        if end.committed:
            pending = end.committed[0]
        asked_ns = max(self._clock(), free_ns)
        number = pending.number + (pending.effect.epoch << 32)
        with self._staged(pending.effect) as tensor:
            value, moved, begin, cost = self._transfer(pending.effect, tensor, number, asked_ns)
            if self._settle is not None:
                self._settle()
            elif isinstance(value, torch.Tensor):
                value = to_device(value, str(pending.effect.tensor.device))
        end_ns = self._clock()
        if cost is not None:
            self._throttle.transfers[self._rank].add(cost, end_ns - begin)
            if end_ns < begin + cost:
                time.sleep((begin + cost - end_ns) / 1e9)
                end_ns = begin + cost
        waited = []
        if not paced and g == len(self._all) > 1:
            self._starts.append(CollectiveTiming(begin, end_ns, pending.main))
            waited = self._measure_waiting() if len(self._starts) == BATCHED else []
        end.remove(pending)
        return pending, Outcome(value, begin, end_ns, moved, waited)

    def _agree_on_order(self, end: LocalQueue, free_ns: int) -> tuple[int, int]:
        """(how many collectives all have posted, when the ports of all are free); clocks were
        started together.
        """
        group, numbers = end.group, torch.tensor([-end.posted, free_ns])
        if not self._without_process_group(group, end.incarnations):
            numbers = self._all_reduce_max(numbers, group)
        else:
            try:
                numbers = collectives.all_reduce_subset_max(
                    numbers, *self._subset_arguments(group, end.incarnations)
                )
            except RuntimeError:
                if self._consensus is None:
                    raise  # else the others wait for its part in a sum that comes to nothing
        return -int(numbers[0]), int(numbers[1])

    def _all_reduce_max(self, numbers: torch.Tensor, group: Team) -> torch.Tensor:
        return collectives.all_reduce(
            numbers, group, "max", self._groups.get(group), self._exact, self._wait(group)
        )

    def _wait(self, group: Team) -> collectives.Wait | None:
        return None if self._consensus is None else partial(self._consensus.wait, group)

    @contextmanager
    def _staged(self, effect: Collective) -> Generator[torch.Tensor]:
        """What is to be carried, where the groups carry it."""
        if self._settle is not None or not isinstance(effect, AllReduce):
            yield effect.tensor if self._settle is not None else to_host(effect.tensor)
            return
        with in_host(effect.tensor) as tensor:
            yield tensor

    def _transfer(
        self, effect: Collective, tensor: torch.Tensor, number: int, asked_ns: int
    ) -> tuple[Any, tuple[int, int], int, int | None]:
        """(value where it was carried, bytes sent and received, when it began, declared cost if
        there is one).
        """
        group, g = effect.group, len(effect.group)
        incarnations = effect.incarnations if isinstance(effect, AllReduce) else ()
        pg, loose, wait = (
            self._groups.get(group),
            self._without_process_group(group, incarnations),
            self._wait(group),
        )
        if isinstance(effect, AllReduce):
            nbytes = tensor.nbytes - effect.piggybacked * tensor.element_size()
            if effect.op in HALVES_OF_A_SUM:
                assert not loose, "half a sum is of all ranks, or of a group that the plan lists"
                gathers = effect.op == "gather"
                value = (collectives.gather_equal if gathers else collectives.reduce_scatter)(
                    tensor, g, pg, wait
                )
                total = g * nbytes if gathers else g * value.nbytes
                moved = total * (g - 1) // g
                return (
                    value,
                    (moved, moved),
                    *self._throttle.schedule_all_gather(group, number, total, asked_ns),
                )
            begin, cost = self._throttle.schedule_all_reduce(group, number, nbytes, asked_ns)
            moved = self._moved(group, nbytes)
            if self._hierarchy is not None and self._sums_by_nodes(group) and not loose:
                value = collectives.all_reduce_by_node(
                    tensor, effect.op, self._rank, self._hierarchy, self._groups, wait
                )
            elif loose and g > 1:
                assert effect.op == "sum"
                value = collectives.all_reduce_subset(
                    tensor, *self._subset_arguments(group, incarnations)
                )
            else:
                value = collectives.all_reduce(tensor, group, effect.op, pg, self._exact, wait)
            return value, moved, begin, cost
        assert not loose, "bytes are gathered from all ranks, or from a group that the plan lists"
        parts, longest = collectives.all_gather(tensor, group, pg, self._max_bytes, wait)
        total = g * (longest - effect.piggybacked)  # known only now
        moved = total * (g - 1) // g
        return (
            parts,
            (moved, moved),
            *self._throttle.schedule_all_gather(group, number, total, asked_ns),
        )

    def _sums_by_nodes(self, group: Team) -> bool:
        """Return True if a sum over this group goes by the hierarchy; after a failure its process
        groups are gone.
        """
        hierarchy = self._hierarchy
        if hierarchy is None or self._exact or group != hierarchy.members:
            return False
        return all(group in self._groups for group in hierarchy.teams)

    def _moved(self, group: Team, nbytes: int) -> tuple[int, int]:
        """Return the bytes that this rank sends and receives in a sum: by the model of costs where
        there is one.
        """
        network, g = self._throttle.network, len(group)
        if network is not None and network.summing is not None and g > 1:
            known, place = network.summing.known(group, nbytes), group.index(self._rank)
            return known.sent[place], known.received[place]
        if self._hierarchy is not None and self._sums_by_nodes(group):
            return self._hierarchy.moved(self._rank, nbytes)
        flat = 2 * (g - 1) * nbytes // g
        return flat, flat

    def _without_process_group(self, group: Team, incarnations: Incarnations) -> bool:
        """Whether nobody has made a process group for it, as it is."""
        return bool(incarnations) or (len(group) != len(self._all) and group not in self._groups)

    def _subset_arguments(
        self, group: Team, incarnations: Incarnations
    ) -> tuple[Team, int, int, collectives.Ways, Collection[int]]:
        """What a sum without a process group has to know."""
        lost = (
            self._consensus.lost_of(group, incarnations)
            if self._consensus is not None
            else frozenset[int]()
        )
        if not self._all:  # it came later itself
            lost |= {*group} - {self._rank, *self._ways}
        return group, self._rank, self._tag(group), self._ways, lost

    def _tag(self, group: Team) -> int:
        """What marks the messages of a team without a process group. Raises AshlError where two are
        marked alike.
        """
        tag = zlib.crc32(repr(group).encode()) % collectives.TEAMS
        if self._tags.setdefault(tag, group) != group:
            raise AshlError(
                f"the groups {group} and {self._tags[tag]} cannot be told apart; list one of them"
                " in the plan"
            )
        return tag

    def _measure_waiting(self) -> list[int]:
        """Unpaced collectives: nobody knows at the time who came last. Every so often all compare
        when they came, and the time before the last one came is called waiting; returned for each
        that took the main task's time.
        """
        starts, self._starts = self._starts, []
        if not starts:
            return []
        begun = torch.tensor([start.begin_ns for start in starts])
        last = self._all_reduce_max(begun, self._all)
        return [
            max(0, min(latest, start.end_ns) - start.begin_ns)
            for start, latest in zip(starts, last.tolist(), strict=True)
            if start.main
        ]

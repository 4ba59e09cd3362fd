"""The collective queue of a process group: its collectives run one at a time, in the same order on
all members.

Rule: every member posts the group's collectives in the same order, of the same kinds and with the
same keys and credits. The key is a priority: of the collectives that all members have posted the
lowest key is committed first, of equal keys the one posted first. A collective is committed if
fewer than its `credit` are committed, the one in flight included; with credit 0, if none is.
Committed collectives run in the order of their commits. A member that breaks the rule gets an error
in virtual time. On real processes the ranks that differ hang or mix their data, as with MPI.

The next collective follows from the number of collectives that all members have posted, so real
processes exchange this number (`ashl.runtime.communicator`). The exchange is not needed while a
collective is committed, or if the oldest one has key 0.

Source of the credit: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
Acceleration", SOSP 2019 (ByteScheduler).
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, TypeVar

from ashl.errors import AshlError
from ashl.runtime.effects import AllGather, AllReduce
from ashl.runtime.kernel import Task

T = TypeVar("T")
Collective = AllReduce | AllGather


class Numbered(Protocol):
    """A collective with its place in the order of posting."""

    @property
    def number(self) -> int: ...

    @property
    def effect(self) -> Collective: ...


N = TypeVar("N", bound=Numbered)


def choose_committed(ready: Iterable[N], held: int) -> list[N]:
    """Return the collectives to commit now, in order, from those that all members have posted.

    Args: held: number of collectives that are committed or in flight already.
    """
    chosen: list[N] = []
    for posted in sorted(ready, key=lambda posted: (posted.effect.key, posted.number)):
        if held and held >= posted.effect.credit:
            break
        chosen.append(posted)
        held += 1
    return chosen


class Posted:
    """A pending collective of a group: its place in the order of posting, and the members that have
    posted it.
    """

    __slots__ = ("arrived", "effect", "number", "signature")

    def __init__(self, number: int, effect: Collective) -> None:
        self.number = number
        self.effect = effect
        self.signature = signature_of(effect)
        # by rank: the task that waits for the result, and its tensor
        self.arrived: dict[int, tuple[Task, Any]] = {}

    def describe(self) -> str:
        return (
            f"{type(self.effect).__name__} with key {self.effect.key} of ranks"
            f" {list(self.effect.group)}"
        )


class SharedResult:
    """A value that all members of a group compute identically, kept until all have asked."""

    __slots__ = ("asked", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.asked: set[int] = set()


def signature_of(effect: Collective) -> tuple[Any, ...]:
    """Return the properties of a collective that must be the same on all members."""
    return effect.__class__, effect.key, effect.credit


class CollectiveQueue:
    """The queue of one group in virtual time; one object serves all members."""

    __slots__ = (
        "commit_scheduled",
        "committed",
        "counts",
        "free_ns",
        "group",
        "pending",
        "ready",
        "serve_scheduled",
        "shared",
    )

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.counts = dict.fromkeys(group, 0)  # collectives posted by each member
        self.pending: dict[int, Posted] = {}  # by number: collectives that have not begun
        self.ready = 0  # pending collectives that all members have posted
        self.free_ns = 0  # ns: end of the collective in flight
        self.serve_scheduled = False  # True if an event at `free_ns` will serve the queue
        # True if an event at the end of this instant will commit posted collectives
        self.commit_scheduled = False
        self.committed: list[Posted] = []  # the committed of the pending collectives, in order
        self.shared: dict[Hashable, SharedResult] = {}

    def post(self, task: Task, effect: Collective) -> None:
        """Add a collective that a task posts. Raises AshlError if the member breaks the rule."""
        rank = task.ctx.rank
        number = self.counts.get(rank)
        if number is None:
            raise AshlError(
                f"rank {rank} is not a member of the group of its {Posted(0, effect).describe()}"
            )
        posted = self.pending.get(number)
        if posted is None:
            posted = self.pending[number] = Posted(number, effect)
        elif signature_of(effect) != posted.signature:
            raise AshlError(
                f"the members of a group must post its collectives in the same order: rank {rank}"
                f" posts {Posted(0, effect).describe()} where rank {next(iter(posted.arrived))}"
                f" posted {posted.describe()}"
            )
        self.counts[rank] = number + 1
        posted.arrived[rank] = task, effect.tensor
        self.ready += len(posted.arrived) == len(self.group)

    def commit(self, now_ns: int) -> None:
        """Commit the collectives that may be committed now."""
        members = len(self.group)
        held = (self.free_ns > now_ns) + len(self.committed)
        ready = (
            p
            for p in self.pending.values()
            if len(p.arrived) == members and p not in self.committed
        )
        self.committed += choose_committed(ready, held)

    def pop_next(self, now_ns: int) -> Posted:
        """Remove and return the next collective, which begins now."""
        if len(self.pending) > 1:
            self.commit(now_ns)
            posted = self.committed.pop(0)
        else:
            (posted,) = self.pending.values()
            self.committed.clear()
        del self.pending[posted.number]
        self.ready -= 1
        return posted

    def abort(self) -> None:
        """Discard all collectives that have not begun, because a member failed."""
        self.pending.clear()
        self.committed.clear()
        self.ready = 0

    def is_idle(self, now_ns: int) -> bool:
        """Return True if the queue has no state that must be kept."""
        return not self.pending and not self.shared and self.free_ns <= now_ns

    def compute_once(self, rank: int, key: Hashable, fn: Callable[[], T]) -> T:
        """Return `fn()`, which the first member that asks for this key computes for all."""
        shared = self.shared.get(key)
        if shared is None:
            shared = self.shared[key] = SharedResult(fn())
        shared.asked.add(rank)
        if len(shared.asked) == len(self.group):
            del self.shared[key]
        return shared.value


class CollectiveQueues:
    """The queues of all groups, made at their first use and deleted when they are idle."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, ...], CollectiveQueue] = {}
        self._last = CollectiveQueue(())
        self._max_queues = 64

    def get_queue(self, group: tuple[int, ...], now_ns: int) -> CollectiveQueue:
        last = self._last
        # members of a large group usually ask one after the other, and hashing the group is slow
        if last.group is group:
            return last
        collective_queue = self._queues.get(group)
        if collective_queue is None:
            if len(self._queues) >= self._max_queues:
                self._queues = {
                    known: one for known, one in self._queues.items() if not one.is_idle(now_ns)
                }
                self._max_queues = max(64, 2 * len(self._queues))
            collective_queue = self._queues[group] = CollectiveQueue(group)
        self._last = collective_queue
        return collective_queue

    def abort_with_member(self, rank: int) -> None:
        """Delete the queues of groups with this failed member, and their collectives."""
        for group in [group for group in self._queues if rank in group]:
            self._queues.pop(group).abort()
        self._last = CollectiveQueue(())

    def abort(self) -> None:
        """Discard all collectives that have not begun, and delete all queues."""
        for collective_queue in self._queues.values():
            collective_queue.abort()
        self._queues.clear()
        self._last = CollectiveQueue(())

    def list_pending(self) -> list[Posted]:
        """Return collectives that not all members have posted, or that wait for their turn."""
        return [
            posted
            for collective_queue in self._queues.values()
            for posted in collective_queue.pending.values()
        ]

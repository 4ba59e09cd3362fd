"""The collective queue of a process group: its collectives run one at a time, in the same order on
all members.

Rule: every member posts the group's collectives in the same order, of the same kinds and with the
same keys. Of those that all members have posted, the lowest key is committed first; equal keys go
in the order of posting. A collective is committed while fewer than its `credit` are committed,
including the one in flight; without credit, once none is. Committed collectives run in that order,
and no later one overtakes them. A member that breaks the rule gets an error in virtual time; on
real processes the ranks that differ would hang or mix their data, as in any such library.

Members that know how many collectives all have posted know which one is next; that takes one number
from each member. No exchange is needed while something is committed, or where the oldest collective
has key 0. Real processes exchange the number between two collectives, and without declared costs
only then.

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
UNKNOWN = object()


class Numbered(Protocol):
    """A collective, and its place in the order of posting."""

    @property
    def number(self) -> int: ...

    @property
    def effect(self) -> Collective: ...


N = TypeVar("N", bound=Numbered)


def choose_committed(ready: Iterable[N], held: int) -> list[N]:
    """Those that are committed now of those that all members have posted, where `held`
    already are.
    """
    chosen: list[N] = []
    for posted in sorted(ready, key=lambda posted: (posted.effect.key, posted.number)):
        if held and held >= posted.effect.credit:
            break
        chosen.append(posted)
        held += 1
    return chosen


class Posted:
    """A collective of a team that is to be carried out: its place in the order of posting, and who
    has come to it.
    """

    __slots__ = ("arrived", "effect", "number", "order")

    def __init__(self, number: int, effect: Collective) -> None:
        self.number, self.effect, self.order = number, effect, order_of(effect)
        self.arrived: dict[
            int, tuple[Task, Any]
        ] = {}  # by rank: who waits for the result, and its tensor

    def describe(self) -> str:
        return (
            f"{type(self.effect).__name__} with key {self.effect.key} of ranks"
            f" {list(self.effect.group)}"
        )


class SharedResult:
    """What the members of a team compute alike, until all have asked."""

    __slots__ = ("asked", "value")

    def __init__(self) -> None:
        self.value: Any = UNKNOWN
        self.asked: set[int] = set()


def order_of(effect: Collective) -> tuple[Any, ...]:
    """What all members have to say alike of it."""
    return effect.__class__, effect.key, effect.credit, effect.epoch


class CollectiveQueue:
    """A team in virtual time, where one object stands for the ends of all members."""

    __slots__ = (
        "committed",
        "counts",
        "free_ns",
        "group",
        "pending",
        "ready",
        "settling",
        "shared",
        "waking",
    )

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.counts = dict.fromkeys(group, 0)  # how many each member has posted
        self.pending: dict[int, Posted] = {}  # by number; none of them has begun
        self.ready = 0  # how many of those have all their members
        self.free_ns = 0  # when the one that goes on now will have ended
        self.waking = False  # whether an event will come then
        self.settling = (
            False  # ... and one at the end of this instant, to commit what has been posted
        )
        self.committed: list[Posted] = []  # of those that are pending
        self.shared: dict[Hashable, SharedResult] = {}

    def post(self, task: Task, effect: Collective) -> None:
        """Raises AshlError where a member breaks the rule."""
        rank = task.ctx.rank
        number = self.counts.get(rank)
        if number is None:
            raise AshlError(f"rank {rank} is no member of its {Posted(0, effect).describe()}")
        posted = self.pending.get(number)
        if posted is None:
            posted = self.pending[number] = Posted(number, effect)
        elif order_of(effect) != posted.order:
            raise AshlError(
                f"the members of a team must post its collectives in the same order: rank {rank}"
                f" posts {Posted(0, effect).describe()} where rank {next(iter(posted.arrived))}"
                f" posted {posted.describe()}"
            )
        self.counts[rank] = number + 1
        posted.arrived[rank] = task, effect.tensor
        self.ready += len(posted.arrived) == len(self.group)

    def commit(self, now_ns: int) -> None:
        """Commit what may be."""
        all_here = len(self.group)
        held = (self.free_ns > now_ns) + len(self.committed)
        ready = (
            p
            for p in self.pending.values()
            if len(p.arrived) == all_here and p not in self.committed
        )
        self.committed += choose_committed(ready, held)

    def take(self, now_ns: int) -> Posted:
        """Begin the one that is next."""
        if len(self.pending) > 1:
            self.commit(now_ns)
            posted = self.committed.pop(0)
        else:
            (posted,) = self.pending.values()
            self.committed.clear()
        del self.pending[posted.number]
        self.ready -= 1
        return posted

    def abort(self) -> list[Task]:
        """A member is gone: forget all that has not begun; returns who waits for it."""
        waiting = [task for posted in self.pending.values() for task, _ in posted.arrived.values()]
        self.pending.clear()
        self.committed.clear()
        self.ready = 0
        return waiting

    def idle(self, now_ns: int) -> bool:
        """Whether nothing is lost when the channel is forgotten."""
        return not self.pending and not self.shared and self.free_ns <= now_ns

    def compute_once(self, rank: int, key: Hashable, fn: Callable[[], T]) -> T:
        """`fn()` of whoever asks first."""
        shared = self.shared.get(key)
        if shared is None:
            shared = self.shared[key] = SharedResult()
        if shared.value is UNKNOWN:
            shared.value = fn()
        shared.asked.add(rank)
        if len(shared.asked) == len(self.group):
            del self.shared[key]
        return shared.value


class CollectiveQueues:
    """The channels of all teams, made when they are first asked for and forgotten when nothing goes
    on in them.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], CollectiveQueue] = {}
        self._last = CollectiveQueue(())
        self._most = 64

    def of(self, group: tuple[int, ...], now_ns: int) -> CollectiveQueue:
        last = self._last
        if (
            last.group is group
        ):  # the members of a large team mostly come one after the other, and to hash it takes long
            return last
        collective_queue = self._of.get(group)
        if collective_queue is None:
            if len(self._of) >= self._most:
                self._of = {known: one for known, one in self._of.items() if not one.idle(now_ns)}
                self._most = max(64, 2 * len(self._of))
            collective_queue = self._of[group] = CollectiveQueue(group)
        self._last = collective_queue
        return collective_queue

    def abort_with_member(self, rank: int) -> list[Task]:
        """Forget the channels of teams that have lost this member; returns who waits there."""
        lost = [
            collective_queue
            for collective_queue in self._of.values()
            if rank in collective_queue.group
        ]
        for collective_queue in lost:
            del self._of[collective_queue.group]
        self._last = CollectiveQueue(())
        return [task for collective_queue in lost for task in collective_queue.abort()]

    def all(self) -> list[CollectiveQueue]:
        return list(self._of.values())

    def waiting(self) -> list[Posted]:
        """Collectives to which not all members have come, or that wait for their turn."""
        return [
            posted
            for collective_queue in self._of.values()
            for posted in collective_queue.pending.values()
        ]

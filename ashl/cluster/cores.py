"""The cores of a machine, shared by what is under way on it.

At most `slots` tasks are served at a time, each at min(1, C/k) of a core where k are. The others wait in the order in
which they came. Who has been served for a quantum waits again, behind all that come within as long: so whoever mostly
sleeps, as threads do that handle messages, is served before it, and interrupts nobody. Quanta differ by up to `spread`
of themselves, as systems look at the ticks of a clock who has had enough. Who has something else to do at the end of a
task keeps its core until its quantum is over. With as many slots as tasks, or a quantum of next to nothing, that is
processor sharing, and with an endless one first come, first served. A task's end is known only as long as no other
begins or ends. Work is in nanoseconds of a core that a task has for itself.

Cores may be slower than they are alone, as those of machines are that are one computer's: all work goes on at `pace`
then, while what is used of a quota stays the same.

With a quota they may be used for so much in each period and stand still for the rest of it. Periods follow each other
from the first task on. What is left of one is lost where none is under way then, but for a little that a core keeps,
and otherwise it is there for the next one, too, up to a whole quota. That it is used up may be seen late: then what was
used beyond it is taken from the next ones.

Sources: Kleinrock, "Time-shared systems: a theoretical treatment", Journal of the ACM 1967; Turner, Rao and Rao, "CPU
bandwidth control for CFS", Linux Symposium 2010; Stoica and Abdel-Wahab, "Earliest Eligible Virtual Deadline First",
TR-95-22, Old Dominion University 1995 (as Linux has it: each is due a slice after it came).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
GOLDEN = (math.sqrt(5) - 1) / 2


class Served(NamedTuple, Generic[T]):
    """In the order in which their turns end."""

    until: float  # what it will have had by then, as `Cores` counts it
    number: int
    task: T
    left: float  # of its work then
    more: float  # ... and of its quantum


class Waiting(NamedTuple, Generic[T]):
    """In the order of their turns."""

    since_ns: float
    number: int
    task: T
    left: float
    more: float  # of the quantum that it has begun; nothing = it begins one


class Cores(Generic[T]):
    """Those of one machine. C need not be whole: two that share their caches may do the work of 1.8."""

    def __init__(
        self,
        count: float,
        slots: float = math.inf,
        quantum_ns: float = math.inf,
        spread: float = 0.0,
        quota_ns: float = math.inf,
        period_ns: float = math.inf,
        kept_ns: float = 0.0,
        late_ns: float = 0.0,
    ) -> None:
        self.count, self.slots, self.quantum_ns, self.spread = count, slots, quantum_ns, spread
        self.quota_ns, self.period_ns, self.kept_ns, self.late_ns = quota_ns, period_ns, kept_ns, late_ns
        self.pace = 1.0  # of work
        self._left_ns, self._period_end_ns = quota_ns, -math.inf  # of this period; less than nothing = used beyond it
        self._stand = False  # until the next one
        self._turns, self._quanta = 0, 0
        self.changes = 0  # of what is under way, or at what pace: what was said of ends before is void
        self.ended: T | None = None  # who has ended, until cores are given away
        self._ended_more = 0.0  # of its quantum
        self.served_ns = 0  # when who ended last was first served
        self._first_served_ns: dict[T, int] = {}  # ... of those under way
        self._had = 0.0  # what a task has had that was served ever since the last time that none was
        self._since_ns = 0  # ... up to this moment
        self._served: list[Served[T]] = []  # a heap
        self._waiting: list[Waiting[T]] = []  # a heap

    def begin(self, task: T, work_ns: float, now_ns: int) -> None:
        """One more."""
        self._pass(now_ns)
        if not self._served and now_ns >= self._period_end_ns:
            first = self._period_end_ns == -math.inf  # with which periods begin
            periods, gone_ns = (0.0, 0.0) if first else divmod(now_ns - self._period_end_ns, self.period_ns)
            if self._left_ns < 0:
                self._left_ns = min(0.0, self._left_ns + periods * self.quota_ns)
            self._left_ns = min(self._left_ns, self.kept_ns) + self.quota_ns
            self._period_end_ns = now_ns - gone_ns + self.period_ns
        if task is self.ended and self._ended_more:
            self._wait(task, work_ns, -math.inf, self._ended_more)
        else:
            self._wait(task, work_ns, now_ns)
        self.give()

    def change_pace(self, pace: float, now_ns: int) -> None:
        self._pass(now_ns)
        self.pace = pace
        self.changes += 1

    @property
    def in_use(self) -> float:
        """How many cores are in use."""
        return 0.0 if self._stand or not self._served else len(self._served) * self._share

    def next_ns(self) -> int | None:
        """When the first one ends, or has been served for long enough, or all stand still or go on, unless another
        begins before; None where none is under way."""
        return round(min(self._first_ns(), self._halt_ns())) if self._served else None

    def end(self, now_ns: int) -> T | None:
        """That moment has come, as `next_ns` said; None where a task waits again, or all stand still or go on. Its core
        is free for what it does next, until `begin` or `give`."""
        if self._halt_ns() < self._first_ns():
            self._pass(now_ns)
            if self._stand:
                self._left_ns, self._period_end_ns = self._left_ns + self.quota_ns, self._period_end_ns + self.period_ns
            else:
                self._left_ns = -self.late_ns
            self._stand = self._left_ns <= 0
            self.changes += 1
            return None
        self._pass(now_ns)
        self._had, _, task, left, more = heappop(self._served)
        if left:
            self._wait(task, left, now_ns + self.quantum_ns)
            self.give()
            return None
        self.ended, self._ended_more, self.served_ns = task, more, self._first_served_ns.pop(task)
        return task

    def give(self) -> None:
        """Give cores that are free to those who wait."""
        self.changes += 1
        self.ended = None
        while self._waiting and len(self._served) < self.slots:
            _, _, task, work_ns, more = heappop(self._waiting)
            more = more or self._next_quantum_ns()
            self._first_served_ns.setdefault(task, self._since_ns)
            turn_ns = min(work_ns, more)
            self._turns += 1
            heappush(self._served, Served(self._had + turn_ns, self._turns, task, work_ns - turn_ns, more - turn_ns))

    def _next_quantum_ns(self) -> float:
        """Spread evenly, in an order that no rhythm of the tasks goes with."""
        self._quanta += 1
        return self.quantum_ns * (1 + self.spread * (2 * (self._quanta * GOLDEN % 1) - 1))

    def _wait(self, task: T, work_ns: float, since_ns: float, more: float = 0.0) -> None:
        self._turns += 1
        heappush(self._waiting, Waiting(since_ns, self._turns, task, work_ns, more))

    def _first_ns(self) -> float:
        """When the first one ends, or its turn does."""
        if self._stand:
            return math.inf
        left = self._served[0].until - self._had
        return self._since_ns + max(0, round(left / (self._share * self.pace)))

    def _halt_ns(self) -> float:
        """When all stand still, or go on."""
        if self._stand:
            return math.ceil(self._period_end_ns)
        rate, late = len(self._served) * self._share, self.late_ns
        since, left, end = self._since_ns, self._left_ns, self._period_end_ns
        while since + (left + late) / rate > end:  # it lasts until the next one
            if rate * self.period_ns <= self.quota_ns or end > self._first_ns():
                return math.inf
            since, left, end = end, self._carried_ns(left - (end - since) * rate), end + self.period_ns
        return math.inf if left == math.inf else math.ceil(since + (left + late) / rate)

    def _carried_ns(self, left_ns: float) -> float:
        """What there is in a period that begins with some under way and so much left."""
        return min(left_ns, self.quota_ns) + self.quota_ns

    def _pass(self, now_ns: int) -> None:
        """Up to now all that are served have had their share."""
        if not self._served:
            self._had = 0.0  # what is alone ends to the nanosecond, however long the run
        elif not self._stand:
            self._had += (now_ns - self._since_ns) * self._share * self.pace
            since, rate = self._since_ns, len(self._served) * self._share
            while now_ns > self._period_end_ns:  # periods have ended whose quota was not used up
                used = (self._period_end_ns - since) * rate
                self._left_ns = self._carried_ns(max(-self.late_ns, self._left_ns - used))
                since, self._period_end_ns = self._period_end_ns, self._period_end_ns + self.period_ns
            self._left_ns = max(-self.late_ns, self._left_ns - (now_ns - since) * rate)
        self._since_ns = now_ns

    @property
    def _share(self) -> float:
        return min(1.0, self.count / len(self._served))


class Pair(Generic[T]):
    """Two tasks with cores of their own that still slow each other down, as a rank's computing and its sums do: each
    goes on at its rate while both are under way, and at 1 while it is alone."""

    def __init__(self, rates: Mapping[T, float]) -> None:
        self.rates = rates
        self.changes = 0
        self.ended: T | None = None
        self.served_ns = 0
        self._left: dict[T, float] = {}
        self._first_served_ns: dict[T, int] = {}
        self._since_ns = 0

    def begin(self, task: T, work_ns: float, now_ns: int) -> None:
        self._pass(now_ns)
        self._left[task], self._first_served_ns[task] = work_ns, now_ns
        self.give()

    def next_ns(self) -> int | None:
        """When the first one ends, unless the other begins before; None where none is under way."""
        if not self._left:
            return None
        return self._since_ns + max(0, round(min(left / self._rate(task) for task, left in self._left.items())))

    def end(self, now_ns: int) -> T:
        """That moment has come, as `next_ns` said."""
        self._pass(now_ns)
        task = min(self._left, key=lambda task: self._left[task] / self._rate(task))
        del self._left[task]
        self.ended, self.served_ns = task, self._first_served_ns.pop(task)
        return task

    def give(self) -> None:
        """Nobody waits."""
        self.changes += 1
        self.ended = None

    def _pass(self, now_ns: int) -> None:
        for task in self._left:
            self._left[task] -= (now_ns - self._since_ns) * self._rate(task)
        self._since_ns = now_ns

    def _rate(self, task: T) -> float:
        return self.rates[task] if len(self._left) > 1 else 1.0

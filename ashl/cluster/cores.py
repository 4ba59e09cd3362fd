"""The cores of a machine, shared by what is under way on it.

At most `slots` tasks are served at a time, each at min(1, C/k) of a core where k are, and the others wait in a queue.
Who has been served for a `quantum` goes back to its end. Who comes `first`, as a thread does that mostly sleeps, does
not wait for long turns of others, of which more than a `slice` is left. With as many slots as tasks, or a quantum of
next to nothing, that is processor sharing, and with an endless one first come, first served. A task's end is known only
as long as no other begins or ends. Work is in nanoseconds of a core that a task has for itself.

With a quota they may be used for so much in each period and stand still for the rest of it. A period begins with the
first task after a time without any, and where one ends the next one begins.

Sources: Kleinrock, "Time-shared systems: a theoretical treatment", Journal of the ACM 1967; Turner, Rao and Rao, "CPU
bandwidth control for CFS", Linux Symposium 2010; Stoica and Abdel-Wahab, "Earliest Eligible Virtual Deadline First",
TR-95-22, Old Dominion University 1995 (as Linux has it, who runs is not interrupted within a slice).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Cores(Generic[T]):
    """Those of one machine. C need not be whole: two that share their caches may do the work of 1.8."""

    def __init__(
        self,
        count: float,
        slots: float = math.inf,
        quantum_ns: float = math.inf,
        quota_ns: float = math.inf,
        period_ns: float = math.inf,
        slice_ns: float = 0.0,
    ) -> None:
        self.count, self.slots, self.quantum_ns = count, slots, quantum_ns
        self.quota_ns, self.period_ns, self.slice_ns = quota_ns, period_ns, slice_ns
        self._left_ns, self._period_end_ns = quota_ns, 0.0  # of this period
        self._stand = False  # until the next one
        self._turns = 0
        self.changes = 0  # how often a task has begun or ended: what was said of ends before is void
        self._had = 0.0  # what a task has had that was served ever since the last time that none was
        self._since_ns = 0  # ... up to this moment
        self._served: list[tuple[float, int, T, float]] = []  # a heap, by what each will have had; what is left then
        self._waiting: deque[tuple[T, float]] = deque()

    def begin(self, task: T, work_ns: float, now_ns: int, first: bool = False) -> None:
        """One more; perhaps before all that wait, and instead of the one with most left of its turn if that is more,
        and more than a slice."""
        self._pass(now_ns)
        if not self._served and now_ns >= self._period_end_ns:
            self._left_ns, self._period_end_ns = self.quota_ns, now_ns + self.period_ns
        if first:
            last = max(self._served, default=None)
            least_ns = max(work_ns, self.slice_ns)
            if last is not None and len(self._served) >= self.slots and last[0] - self._had > least_ns:
                until, _, other, left = last
                self._served.remove(last)
                heapify(self._served)
                self._waiting.appendleft((other, left + until - self._had))
            self._waiting.appendleft((task, work_ns))
        else:
            self._waiting.append((task, work_ns))
        self._fill()

    def next_ns(self) -> int | None:
        """When the first one ends, or has been served for long enough, or all stand still or go on, unless another
        begins before; None where none is under way."""
        return round(min(self._first_ns(), self._halt_ns())) if self._served else None

    def end(self, now_ns: int) -> T | None:
        """That moment has come, as `next_ns` said; None where a task goes back to the queue, or all stand still or go
        on."""
        if self._halt_ns() < self._first_ns():
            self._pass(now_ns)
            self._stand = not self._stand
            if not self._stand:
                self._left_ns, self._period_end_ns = self.quota_ns, now_ns + self.period_ns
            self.changes += 1
            return None
        self._pass(now_ns)
        self._had, _, task, left = heappop(self._served)
        if left:
            self._waiting.append((task, left))
        self._fill()
        return None if left else task

    def _first_ns(self) -> float:
        """When the first one ends, or its turn does."""
        return math.inf if self._stand else self._since_ns + round((self._served[0][0] - self._had) / self._share)

    def _halt_ns(self) -> float:
        """When all stand still, or go on."""
        if self._stand:
            return math.ceil(self._period_end_ns)
        rate = len(self._served) * self._share
        since, left = self._since_ns, self._left_ns
        if since + left / rate > self._period_end_ns:  # it lasts until the next one
            since, left = self._period_end_ns, self.quota_ns if rate * self.period_ns > self.quota_ns else math.inf
        return since + left / rate if left == math.inf else math.ceil(since + left / rate)

    def _fill(self) -> None:
        self.changes += 1
        while self._waiting and len(self._served) < self.slots:
            task, work_ns = self._waiting.popleft()
            turn_ns = min(work_ns, self.quantum_ns)
            self._turns += 1
            heappush(self._served, (self._had + turn_ns, self._turns, task, work_ns - turn_ns))

    def _pass(self, now_ns: int) -> None:
        """Up to now all that are served have had their share."""
        if not self._served:
            self._had = 0.0  # what is alone ends to the nanosecond, however long the run
        elif not self._stand:
            self._had += (now_ns - self._since_ns) * self._share
            since, rate = self._since_ns, len(self._served) * self._share
            if now_ns > self._period_end_ns:  # periods have ended whose quota was not used up
                since = now_ns - (now_ns - self._period_end_ns) % self.period_ns
                self._left_ns, self._period_end_ns = self.quota_ns, since + self.period_ns
            self._left_ns = max(0.0, self._left_ns - (now_ns - since) * rate)
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
        self._left: dict[T, float] = {}
        self._since_ns = 0

    def begin(self, task: T, work_ns: float, now_ns: int, first: bool = False) -> None:
        self._pass(now_ns)
        self._left[task] = work_ns
        self.changes += 1

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
        self.changes += 1
        return task

    def _pass(self, now_ns: int) -> None:
        for task in self._left:
            self._left[task] -= (now_ns - self._since_ns) * self._rate(task)
        self._since_ns = now_ns

    def _rate(self, task: T) -> float:
        return self.rates[task] if len(self._left) > 1 else 1.0

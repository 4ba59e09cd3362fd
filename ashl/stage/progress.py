"""Count the progress of a run: steps, samples, commits and staleness, in total and by worker.

`RunProgress` holds the totals that every rank can count; `Progress` adds the counts by worker, as a
server keeps them (without a server, every worker keeps the same ones). A query never changes a
later answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ashl.runtime.records import Counts

# why steps are part of no model
LATE, STAGE_END, RUN_END, FAILURE, DIVERGED = "late", "stage_end", "run_end", "failure", "diverged"
BY_WORKER = (
    "commits",
    "clocks",
    "steps_by",
    "dropped_by",
    "drops",
    "pulled",
    "stale_sum",
    "stale_max",
)


class ProgressMark(NamedTuple):
    """Where something began, or was last done: in commits, samples and seconds of the run."""

    commits: int = 0
    samples: int = 0
    seconds: float = 0.0


RUN_START = ProgressMark()


@dataclass
class RunProgress:
    """How far a run is, all workers together: what every rank can count that knows what each round
    holds.
    """

    num_workers: int
    version: int = 0  # merges so far
    steps: int = 0
    samples: int = 0
    total_commits: int = 0
    loss: float = math.nan  # running mean of the workers' minibatch losses
    diverged: str | None = None
    started: ProgressMark = RUN_START  # where this stage began
    best: tuple[float, int] = (
        math.inf,
        0,
    )  # the lowest running loss of this stage, and at how many commits
    end_ns: int = 0  # when the last stage ended
    now_s: float = 0.0  # the moment that questions are asked at

    def copy(self) -> RunProgress:
        """The same, to count on with."""
        return replace(self)

    def mark_at(self, now_s: float) -> ProgressMark:
        return ProgressMark(self.total_commits, self.samples, now_s)

    def begin(self, now_s: float) -> None:
        """A stage begins: limits are counted from here."""
        self.started, self.now_s = self.mark_at(now_s), now_s
        self.best = (math.inf, self.total_commits)

    def advance(self, steps: int, samples: int, commits: int = 1) -> None:
        """So much more is part of the model."""
        self.steps += steps
        self.samples += samples
        self.total_commits += commits

    def record_loss(self, loss: float, whose: str | int) -> None:
        """A loss, and whose it is: a worker's, or in words."""
        self.loss = (
            loss
            if math.isnan(self.loss)
            else self.loss + (loss - self.loss) / (2 * self.num_workers)
        )
        if not math.isfinite(loss):
            who = f"the loss of worker {whose}" if isinstance(whose, int) else whose
            self.diverged = f"{who} became {loss} near step {self.steps + 1}"
        elif self.loss < 0.99 * self.best[0]:
            self.best = (self.loss, self.total_commits)

    def record_loss_of_all(self, loss: float, whose: str, commits: int) -> None:
        """The same as often as there are workers, with so many commits between one and the next."""
        start = self.total_commits
        for heard in range(self.num_workers):
            if self.loss == loss and self.loss >= 0.99 * self.best[0]:
                break  # it stays as it is
            self.total_commits = start + heard * commits
            self.record_loss(loss, whose)
        self.total_commits = start


@dataclass
class Progress(RunProgress):
    """The same by worker, as a server counts it (without one: as every worker does, alike).

    `commits[w]` pushes of worker w applied, `clocks[w]` those of this stage, `drops[w]` those that
    are part of no model; `pulled[w]` the version of the model that w computes on; `waiting` the
    workers that have pushed and have no reply yet. Every question costs as much as its answer is
    long, however many workers there are.
    """

    commits: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    steps_by: list[int] = field(default_factory=list)
    dropped_by: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    stale_sum: list[int] = field(default_factory=list)
    stale_max: list[int] = field(default_factory=list)
    waiting: dict[int, tuple[int, bool]] = field(
        default_factory=dict
    )  # to (staleness, late) of the push
    max_lead: int = 0
    slowest: int = 0  # min(clocks)
    fastest: int = 0  # max(clocks)
    latest: int = 0  # the worker whose push came last
    gone: set[int] = field(
        default_factory=set
    )  # workers that are lost: nobody waits for them, and no bound is theirs
    groups: list[int] | None = (
        None  # how many each worker has averaged in, where workers meet in groups
    )
    conflicts: int | None = None  # groups that had to wait for another one
    dropped_for: dict[str, int] = field(
        default_factory=dict
    )  # steps of all workers by the reason, as far as known
    _at_clock: dict[int, int] = field(default_factory=dict)  # how many workers have each clock
    _waiting_at: dict[int, dict[int, None]] = field(
        default_factory=dict
    )  # those that wait, by their clock
    _unsorted: dict[int, None] = field(
        default_factory=dict
    )  # ... and have not been found too far ahead yet
    _merged: dict[int, None] = field(
        default_factory=dict
    )  # those whose push no merge has before it any more
    _unmerged: dict[int, None] = field(default_factory=dict)  # ... and those whose push one has

    def __post_init__(self) -> None:
        for name in BY_WORKER:
            setattr(self, name, getattr(self, name) or [0] * self.num_workers)
        self._at_clock = self._at_clock or {0: self.num_workers}

    @property
    def present(self) -> int:
        """How many workers there are now."""
        return self.num_workers - len(self.gone)

    def copy(self) -> Progress:
        """The same, to count on with; of a rank that nobody waits for."""
        twin = copy(self)  # each round makes one: `replace` would go through all fields
        for name in BY_WORKER:
            setattr(twin, name, list(getattr(self, name)))
        twin._at_clock, twin.dropped_for = dict(self._at_clock), dict(self.dropped_for)
        return twin

    def begin(self, now_s: float) -> None:
        """A stage begins: leads and limits are counted from here."""
        super().begin(now_s)
        self.clocks = [0] * self.num_workers
        self._at_clock, self.slowest, self.fastest = {0: self.present}, 0, 0

    def observe(self, worker: int, staleness: int, loss: float) -> None:
        """A push has come: how old the model was that it was computed on, and the loss it saw."""
        self.latest = worker
        self.stale_sum[worker] += staleness
        if staleness > self.stale_max[worker]:
            self.stale_max[worker] = staleness
        self.record_loss(loss, worker)

    def observe_all(self, staleness: int, loss: float, whose: str, commits: int = 0) -> None:
        """A push of every worker has come, all with this loss, and `commits` lie between one and
        the next.
        """
        self.latest = self.num_workers - 1
        if staleness:
            self.stale_sum = [total + staleness for total in self.stale_sum]
            self.stale_max = [max(most, staleness) for most in self.stale_max]
        self.record_loss_of_all(loss, whose, commits)

    def start_waiting(self, worker: int, staleness: int, late: bool) -> None:
        """This worker has pushed, and waits from now on."""
        self.waiting[worker] = (staleness, late)
        self._unsorted[worker] = None
        (self._merged if late or self.pulled[worker] < self.version else self._unmerged)[worker] = (
            None
        )

    def commit(self, worker: int, steps: int, samples: int) -> None:
        """A push of this worker is now part of the model."""
        self.commits[worker] += 1
        self.steps_by[worker] += steps
        self.advance(steps, samples)
        if worker in self.gone:
            return
        clock = self.clocks[worker]
        self.clocks[worker] = clock + 1
        self._at_clock[clock + 1] = self._at_clock.get(clock + 1, 0) + 1
        self._at_clock[clock] -= 1
        if not self._at_clock[clock]:
            del self._at_clock[clock]
            if clock == self.slowest:
                self.slowest = clock + 1
        self.fastest = max(self.fastest, clock + 1)
        if worker in self.waiting and worker not in self._unsorted:
            self._forget_waiting(clock, worker)
            self._unsorted[worker] = None

    def commit_all(self, steps: Sequence[int], samples: int) -> None:
        """A push of every worker is now part of the model, with these steps of each, and samples of
        all.
        """
        assert not self.waiting
        if self.gone:
            return self._commit_present(steps, samples)
        self.clocks = [clock + 1 for clock in self.clocks]
        self.commits = [count + 1 for count in self.commits]
        self.steps_by = [so_far + more for so_far, more in zip(self.steps_by, steps, strict=True)]
        self._at_clock = {clock + 1: workers for clock, workers in self._at_clock.items()}
        self.slowest, self.fastest = self.slowest + 1, self.fastest + 1
        self.advance(sum(steps), samples, self.num_workers)

    def _commit_present(self, steps: Sequence[int], samples: int) -> None:
        """The same without those who are gone."""
        for worker in [worker for worker in range(self.num_workers) if worker not in self.gone]:
            self.clocks[worker] += 1
            self.commits[worker] += 1
            self.steps_by[worker] += steps[worker]
            self.steps += steps[worker]
        self._at_clock = {clock + 1: workers for clock, workers in self._at_clock.items()}
        self.slowest, self.fastest = self.slowest + 1, self.fastest + 1
        self.advance(0, samples, self.present)

    def take_back(self, worker: int, rounds: int, steps: int, samples: int) -> None:
        """So many rounds of a worker that is lost have been counted and are part of no model."""
        self.commits[worker] -= rounds
        self.steps_by[worker] -= steps
        self.advance(-steps, -samples, -rounds)

    def merge(self) -> None:
        """The model is a new version."""
        self.version += 1
        if self._unmerged:
            self._merged.update(self._unmerged)
            self._unmerged.clear()

    def count_dropped(self, worker: int, steps: int, reason: str) -> None:
        """Count work of this worker that is part of no model; without steps there was none."""
        self.dropped_by[worker] += steps
        if steps:
            self.dropped_for[reason] = self.dropped_for.get(reason, 0) + steps
        self.drops[worker] += steps > 0

    def rounds_and_steps_of(self, worker: int) -> tuple[int, int]:
        """(rounds, steps) of a worker, applied or dropped: from where one goes on that comes
        (back).
        """
        return self.commits[worker] + self.drops[worker], self.steps_by[worker] + self.dropped_by[
            worker
        ]

    def remove_worker(self, worker: int) -> None:
        """This worker is gone; the slowest and the fastest are those of the others."""
        if worker in self.waiting:
            self.stop_waiting(worker)
        self.gone.add(worker)
        clock = self.clocks[worker]
        self._at_clock[clock] -= 1
        if not self._at_clock[clock]:
            del self._at_clock[clock]
            self.slowest = min(self._at_clock, default=clock)
            self.fastest = max(self._at_clock, default=clock)

    def join(self, worker: int) -> None:
        """This worker takes part (again), on the current version; one that was gone is as far as
        the slowest is.
        """
        self.pulled[worker] = self.version
        if worker in self.gone:
            self.gone.remove(worker)
            self.clocks[worker] = self.slowest
            self._at_clock[self.slowest] = self._at_clock.get(self.slowest, 0) + 1

    def release(self, worker: int) -> tuple[int, bool]:
        """This worker goes on, on the current version; returns (staleness, late) of its push."""
        lead = self.clocks[worker] - self.slowest
        if lead > self.max_lead:
            self.max_lead = lead
        return self.stop_waiting(worker)

    def stop_waiting(self, worker: int) -> tuple[int, bool]:
        """This worker waits no longer; returns (staleness, late) of its push."""
        self.pulled[worker] = self.version
        if worker in self._unsorted:
            del self._unsorted[worker]
        else:
            self._forget_waiting(self.clocks[worker], worker)
        self._merged.pop(worker, None)
        self._unmerged.pop(worker, None)
        return self.waiting.pop(worker)

    def waiting_without_merge(self) -> Collection[int]:
        """Workers that wait, and for no merge: theirs has been, or they came too late. A barrier
        lets them go.
        """
        return self._merged.keys()

    def within_staleness(self, staleness: float) -> list[int]:
        """Workers that wait and lead the slowest by at most `staleness` commits."""
        bound = self.slowest + staleness
        for worker in [worker for worker in self._unsorted if self.clocks[worker] > bound]:
            del self._unsorted[worker]
            self._waiting_at.setdefault(self.clocks[worker], {})[worker] = None
        if not self._waiting_at:
            return list(self._unsorted)
        freed = [
            worker
            for clock, workers in self._waiting_at.items()
            if clock <= bound
            for worker in workers
        ]
        return [*self._unsorted, *freed]

    def _forget_waiting(self, clock: int, worker: int) -> None:
        workers = self._waiting_at[clock]
        del workers[worker]
        if not workers:
            del self._waiting_at[clock]

    def rounds(self) -> list[int]:
        """Of each worker, applied or dropped."""
        return [
            applied + dropped for applied, dropped in zip(self.commits, self.drops, strict=True)
        ]

    def report(self) -> Counts:
        """The counts that go into records."""
        return Counts(
            steps=self.steps,
            samples=self.samples,
            merges=self.version,
            commits=list(self.commits),
            steps_by=list(self.steps_by),
            dropped_by=list(self.dropped_by),
            stale_sum=list(self.stale_sum),
            stale_max=list(self.stale_max),
            max_lead=self.max_lead,
            groups=self.groups and list(self.groups),
            conflicts=self.conflicts,
            loss=self.loss,
            diverged=self.diverged,
            dropped_for=dict(self.dropped_for),
        )

"""Count the progress of a run, and decide from it when a stage or the run ends.

`RunProgress` holds the totals that every rank can count; `Progress` adds the counts by worker, as a
server keeps them (without a server, every worker keeps the same ones). A query never changes a
later answer. `StopCriteria` are pure functions of the counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ashl.plan.plan import Limits
from ashl.runtime.records import Counts

# reasons why steps are part of no model
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
    "changed_at",
)


class ProgressMark(NamedTuple):
    """A point of a run, in commits, samples and seconds."""

    commits: int = 0
    samples: int = 0
    seconds: float = 0.0


RUN_START = ProgressMark()


@dataclass
class RunProgress:
    """The progress of a run over all workers: counts that every rank can keep that knows the
    content of each round.
    """

    num_workers: int
    version: int = 0  # merges so far
    steps: int = 0
    samples: int = 0
    total_commits: int = 0
    loss: float = math.nan  # running mean of the workers' minibatch losses
    diverged: str | None = None
    started: ProgressMark = RUN_START  # begin of this stage
    # lowest running loss of this stage, and the number of commits by then
    best: tuple[float, int] = (math.inf, 0)
    end_ns: int = 0  # ns: end of the last stage
    now_s: float = 0.0  # seconds: time at which queries are evaluated
    # failed workers: no merge waits for them, and no bound counts them
    failed: set[int] = field(default_factory=set)

    def copy(self) -> RunProgress:
        """Return a copy to continue counting with."""
        return replace(self)

    def current_mark(self, now_s: float) -> ProgressMark:
        """Return the current point of the run."""
        return ProgressMark(self.total_commits, self.samples, now_s)

    def begin(self, now_s: float) -> None:
        """Begin a stage: its limits are counted from here."""
        self.started = self.current_mark(now_s)
        self.now_s = now_s
        self.best = (math.inf, self.total_commits)

    def advance(self, steps: int, samples: int, commits: int = 1) -> None:
        """Count work that is now part of the model."""
        self.steps += steps
        self.samples += samples
        self.total_commits += commits

    def record_loss(self, loss: float, whose: str | int) -> None:
        """Record a loss of a worker; `whose` is its rank, or a description."""
        self.loss = (
            loss
            if math.isnan(self.loss)
            else self.loss + (loss - self.loss) / (2 * self.num_workers)
        )
        if not math.isfinite(loss):
            whose_loss = f"the loss of worker {whose}" if isinstance(whose, int) else whose
            self.diverged = f"{whose_loss} became {loss} near step {self.steps + 1}"
        elif self.loss < 0.99 * self.best[0]:
            self.best = (self.loss, self.total_commits)

    def record_loss_of_all(self, loss: float, whose: str, commits: int) -> None:
        """Record this loss once per worker, advancing the commit count by `commits` each time."""
        start = self.total_commits
        for earlier in range(self.num_workers):
            if self.loss == loss and self.loss >= 0.99 * self.best[0]:
                break  # no further change
            self.total_commits = start + earlier * commits
            self.record_loss(loss, whose)
        self.total_commits = start


@dataclass
class Progress(RunProgress):
    """The progress of a run by worker, as a server counts it; without a server every worker keeps
    identical counts.

    `commits[w]`: applied pushes of worker w; `clocks[w]`: those of this stage; `drops[w]`: those
    that are part of no model; `pulled[w]`: the version of the model on which w computes; `waiting`:
    workers that have pushed and have no reply yet. The cost of a query grows with the length of its
    answer alone, not with the number of workers.
    """

    commits: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    steps_by: list[int] = field(default_factory=list)
    dropped_by: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    stale_sum: list[int] = field(default_factory=list)
    stale_max: list[int] = field(default_factory=list)
    # by worker: one more than the version of the model at which it last failed or rejoined
    changed_at: list[int] = field(default_factory=list)
    # by worker: (staleness, late) of its push
    waiting: dict[int, tuple[int, bool]] = field(default_factory=dict)
    max_lead: int = 0
    slowest: int = 0  # min(clocks)
    fastest: int = 0  # max(clocks)
    latest: int = 0  # worker of the latest push
    # groups that each worker has averaged in, where workers meet in groups
    groups: list[int] | None = None
    conflicts: int | None = None  # groups that had to wait for another one
    # dropped steps of all workers by reason, as far as known
    dropped_for: dict[str, int] = field(default_factory=dict)
    _at_clock: dict[int, int] = field(default_factory=dict)  # number of workers at each clock
    # waiting workers by their clock
    _waiting_at: dict[int, dict[int, None]] = field(default_factory=dict)
    # waiting workers whose push waits for a merge
    _unmerged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in BY_WORKER:
            setattr(self, name, getattr(self, name) or [0] * self.num_workers)
        self._at_clock = self._at_clock or {0: self.num_workers}

    @property
    def num_present(self) -> int:
        """Return the number of workers that have not failed."""
        return self.num_workers - len(self.failed)

    def copy(self) -> Progress:
        """Return a copy to continue counting with, for a rank without waiting workers."""
        copied = copy(self)  # called once per round; `replace` would visit all fields
        for name in BY_WORKER:
            setattr(copied, name, list(getattr(self, name)))
        copied.failed = set(self.failed)
        copied._at_clock = dict(self._at_clock)
        copied.dropped_for = dict(self.dropped_for)
        return copied

    def begin(self, now_s: float) -> None:
        """Begin a stage: its leads and limits are counted from here."""
        super().begin(now_s)
        self.clocks = [0] * self.num_workers
        self._at_clock = {0: self.num_present}
        self.slowest = 0
        self.fastest = 0

    def observe(self, worker: int, staleness: int, loss: float) -> None:
        """Record a push: the staleness of the model on which it was computed, and its loss."""
        self.latest = worker
        self.stale_sum[worker] += staleness
        if staleness > self.stale_max[worker]:
            self.stale_max[worker] = staleness
        self.record_loss(loss, worker)

    def observe_all(self, staleness: int, loss: float, whose: str, commits: int = 0) -> None:
        """Record a push of every worker, all with this loss, and `commits` commits between two of
        them.
        """
        self.latest = self.num_workers - 1
        if staleness:
            self.stale_sum = [total + staleness for total in self.stale_sum]
            self.stale_max = [max(highest, staleness) for highest in self.stale_max]
        self.record_loss_of_all(loss, whose, commits)

    def start_waiting(self, worker: int, staleness: int, late: bool) -> None:
        """Record that this worker has pushed and waits for a reply."""
        self.waiting[worker] = (staleness, late)
        self._waiting_at.setdefault(self.clocks[worker], {})[worker] = None
        if not late and self.pulled[worker] == self.version:
            self._unmerged.add(worker)

    def commit(self, worker: int, steps: int, samples: int) -> None:
        """Count a push of this worker that is now part of the model."""
        self.commits[worker] += 1
        self.steps_by[worker] += steps
        self.advance(steps, samples)
        if worker in self.failed:
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
        if worker in self.waiting:
            self._forget_waiting(clock, worker)
            self._waiting_at.setdefault(clock + 1, {})[worker] = None

    def commit_all(self, steps: Sequence[int], samples: int) -> None:
        """Count a push of every worker that is now part of the model: steps by worker, samples of
        all. A worker without steps has no push.
        """
        assert not self.waiting
        if self.failed or 0 in steps:
            return self._commit_present(steps, samples)
        self.clocks = [clock + 1 for clock in self.clocks]
        self.commits = [count + 1 for count in self.commits]
        self.steps_by = [so_far + more for so_far, more in zip(self.steps_by, steps, strict=True)]
        self._at_clock = {clock + 1: workers for clock, workers in self._at_clock.items()}
        self.slowest, self.fastest = self.slowest + 1, self.fastest + 1
        self.advance(sum(steps), samples, self.num_workers)

    def _commit_present(self, steps: Sequence[int], samples: int) -> None:
        """Count a push of every worker that has not failed and has steps."""
        pushes = 0
        for worker in [worker for worker in range(self.num_workers) if worker not in self.failed]:
            self.clocks[worker] += 1
            self.commits[worker] += steps[worker] > 0
            self.steps_by[worker] += steps[worker]
            self.steps += steps[worker]
            pushes += steps[worker] > 0
        self._at_clock = {clock + 1: workers for clock, workers in self._at_clock.items()}
        self.slowest, self.fastest = self.slowest + 1, self.fastest + 1
        self.advance(0, samples, pushes)

    def subtract_rounds(self, worker: int, rounds: int, steps: int, samples: int) -> None:
        """Subtract rounds of a failed worker that were counted and are part of no model."""
        self.commits[worker] -= rounds
        self.steps_by[worker] -= steps
        self.advance(-steps, -samples, -rounds)

    def merge(self) -> None:
        """Count a new version of the model."""
        self.version += 1
        self._unmerged.clear()

    def count_dropped(self, worker: int, steps: int, reason: str) -> None:
        """Count work of this worker that is part of no model; without steps it had none."""
        self.dropped_by[worker] += steps
        if steps:
            self.dropped_for[reason] = self.dropped_for.get(reason, 0) + steps
        self.drops[worker] += steps > 0

    def rounds_and_steps_of(self, worker: int) -> tuple[int, int]:
        """Return (rounds, steps) of a worker, applied or dropped, from which a rejoining worker
        continues.
        """
        return self.commits[worker] + self.drops[worker], self.steps_by[worker] + self.dropped_by[
            worker
        ]

    def remove_worker(self, worker: int) -> None:
        """Remove a failed worker; slowest and fastest are those of the survivors."""
        if worker in self.waiting:
            self.stop_waiting(worker)
        self.failed.add(worker)
        clock = self.clocks[worker]
        self._at_clock[clock] -= 1
        if not self._at_clock[clock]:
            del self._at_clock[clock]
            self.slowest = min(self._at_clock, default=clock)
            self.fastest = max(self._at_clock, default=clock)

    def join(self, worker: int) -> None:
        """Add a worker on the current version; a rejoining worker starts at the clock of the
        slowest.
        """
        self.pulled[worker] = self.version
        if worker in self.failed:
            self.failed.remove(worker)
            self.clocks[worker] = self.slowest
            self._at_clock[self.slowest] = self._at_clock.get(self.slowest, 0) + 1

    def release(self, worker: int) -> tuple[int, bool]:
        """Release a waiting worker on the current version; return (staleness, late) of its push."""
        lead = self.clocks[worker] - self.slowest
        if lead > self.max_lead:
            self.max_lead = lead
        return self.stop_waiting(worker)

    def stop_waiting(self, worker: int) -> tuple[int, bool]:
        """End the wait of a worker; return (staleness, late) of its push."""
        self.pulled[worker] = self.version
        self._forget_waiting(self.clocks[worker], worker)
        self._unmerged.discard(worker)
        return self.waiting.pop(worker)

    def waiting_without_merge(self) -> Collection[int]:
        """Return waiting workers that need no further merge: their push is merged, or was late. A
        barrier releases them.
        """
        if len(self._unmerged) == len(self.waiting):
            return ()
        return self.waiting.keys() - self._unmerged

    def workers_within_staleness(self, staleness: float) -> list[int]:
        """Return waiting workers that lead the slowest by at most `staleness` commits."""
        bound = self.slowest + staleness
        return [
            worker
            for clock, workers in self._waiting_at.items()
            if clock <= bound
            for worker in workers
        ]

    def _forget_waiting(self, clock: int, worker: int) -> None:
        workers = self._waiting_at[clock]
        del workers[worker]
        if not workers:
            del self._waiting_at[clock]

    def rounds(self) -> list[int]:
        """Return the rounds of each worker, applied or dropped."""
        return [
            applied + dropped for applied, dropped in zip(self.commits, self.drops, strict=True)
        ]

    def report(self) -> Counts:
        """Return the counts for records."""
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


Scores = Mapping[str, float | None]  # scores of an evaluation


class Counting(Protocol):
    """The state of a rank that counts progress."""

    progress: Any
    evaluated: ProgressMark


@dataclass(frozen=True)
class StopCriteria:
    """The limits of the run, and the rule that ends a stage.

    The lead rank alone evaluates them. Limits on counts alone are evaluated by every rank that
    keeps the same counts, with the same answer.
    """

    limits: Limits
    until: Mapping[str, float]
    epoch_samples: int

    @cached_property
    def deadline_s(self) -> float:
        return math.inf if self.limits.seconds is None else self.limits.seconds

    @cached_property
    def deadline_ns(self) -> float:
        return math.inf if self.limits.seconds is None else round(self.limits.seconds * 1e9)

    def remaining_rounds(
        self, steps: int, samples: int, whole: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Return (a, b): a/b rounds of size `whole` remain until the count that ends the run; None
        if no count ends it.
        """
        limits = self.limits
        by_steps = None if limits.steps is None else (limits.steps - steps, whole[0])
        if limits.epochs is None:
            return by_steps
        by_samples = math.ceil(limits.epochs * self.epoch_samples) - samples, whole[1]
        sooner = by_steps is not None and by_steps[0] / by_steps[1] <= by_samples[0] / by_samples[1]
        return by_steps if sooner else by_samples

    def end_reason(self, progress: RunProgress) -> str | None:
        """Return why the run ends, judged from counts alone, or None."""
        return "diverged" if progress.diverged else self.reached_limit(progress)

    def reached_limit(self, progress: RunProgress) -> str | None:
        """Return the limit on counts that is reached, or None. Divergence is ignored, because the
        rank that knows the losses first has to tell the others.
        """
        if self.limits.steps is not None and progress.steps >= self.limits.steps:
            return "steps"
        if (
            self.limits.epochs is not None
            and progress.samples >= self.limits.epochs * self.epoch_samples
        ):
            return "epochs"
        return None

    def stage_end_reason(
        self, progress: RunProgress, now_s: float, scores: Scores | None
    ) -> str | None:
        """Return the rule that ends this stage, and with the last stage the run, or None.

        - loss: the running loss of the workers' minibatches is at most the bound.
        - evaluated_loss, accuracy: as last evaluated.
        - rises: number of evaluations of the whole run with a higher training loss than the
        evaluation before.
        - plateau: commits per worker without a decrease of the running loss by 1 %.
        - epochs, commits (per worker), seconds: counted from the begin of the stage.
        """
        if not self.until:
            return None
        n, start, scores = progress.num_workers, progress.started, scores or {}
        loss, accuracy = scores.get("train_loss"), scores.get("test_accuracy")
        now = {
            "loss": -progress.loss,
            "evaluated_loss": -math.inf if loss is None else -loss,
            "accuracy": -math.inf if accuracy is None else accuracy,
            "rises": scores.get("rises") or 0.0,
            "plateau": (progress.total_commits - progress.best[1]) / n,
            "epochs": (progress.samples - start.samples) / self.epoch_samples,
            "commits": (progress.total_commits - start.commits) / n,
            "seconds": now_s - start.seconds,
        }
        for rule, bound in self.until.items():
            if now[rule] >= (-bound if rule.endswith("loss") else bound):
                return rule
        return None

    def evaluation_due(self, progress: RunProgress, last: ProgressMark, now_s: float) -> bool:
        """Return True if an evaluation is due after the last one: every `eval.every_s` seconds or
        `eval.every_commits` commits of workers, else once per epoch.
        """
        limits = self.limits
        if limits.eval_every_s is not None:
            return now_s // limits.eval_every_s > last.seconds // limits.eval_every_s
        if limits.eval_every_commits is not None:
            return (
                progress.total_commits // limits.eval_every_commits
                > last.commits // limits.eval_every_commits
            )
        return progress.samples // self.epoch_samples > last.samples // self.epoch_samples

    def begin_due_evaluation(self, state: Counting, now_s: float) -> bool:
        """Return True if an evaluation is due, and count the next one from here."""
        if due := self.evaluation_due(state.progress, state.evaluated, now_s):
            state.evaluated = state.progress.current_mark(now_s)
        return due

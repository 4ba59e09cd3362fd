"""The rank context: all that an algorithm knows of its rank, its kernel and the clock.

It makes the effects that the algorithm awaits, and offers calls that take no experiment time: the
clock, safe points, replicated computations, records, snapshots and measures. The same context works
on both kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from typing import Any, Protocol, TypeVar

from ashl.learn.learner import Learner
from ashl.plan.assignments import Members
from ashl.runtime.effects import (
    ANY,
    AllGather,
    AllReduce,
    Cancel,
    Compute,
    Discard,
    Join,
    Recv,
    Save,
    Send,
    Sleep,
    Tag,
)
from ashl.runtime.records import (
    Counts,
    Heartbeat,
    Measured,
    Record,
    Round,
    Rounds,
    Snapshot,
    TimeTotals,
    is_recorded,
)
from ashl.runtime.time_accounting import TimeAccounting
from ashl.size_only import Vector

# characters that file names, MLflow and tables accept
MEASURE = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)

T = TypeVar("T")


class Observer(Protocol):
    """The receiver of records and snapshots: the evaluator and the writer, off the experiment's
    clock.
    """

    @property
    def stop_reason(self) -> str | None:
        """Return why the run should end, or None."""
        ...

    @property
    def scores(self) -> Mapping[str, float | None] | None:
        """Return the result of the last evaluation."""
        ...

    @property
    def rounds(self) -> Rounds:
        """Return which rounds it wants records of."""
        ...

    def emit(self, record: Record) -> None: ...

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None: ...


class ReportsProgress(Protocol):
    """The progress of a run, as counts."""

    def report(self) -> Counts: ...

    def rounds(self) -> list[int]: ...


class Counter(Protocol):
    """The state that counts a run's progress."""

    @property
    def progress(self) -> ReportsProgress: ...


class Kernel(Protocol):
    """The part of a kernel that a rank context calls without awaiting."""

    observer: Observer
    worker_states: Learner | None
    checkpoint_due_ns: float  # time of the next checkpoint; infinity = none

    @property
    def now_ns(self) -> int: ...

    def spawn(self, ctx: RankContext, coro: Coroutine, main: bool = False) -> Any: ...

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T: ...


class RankContext:
    """One rank of the job. An algorithm knows nothing else of where it runs."""

    __slots__ = (
        "at_pause",
        "before_restart_point",
        "counter",
        "in_local_work",
        "incarnation",
        "kernel",
        "loss",
        "measures",
        "members",
        "rank",
        "restart_point",
        "staleness",
        "steps",
        "time_accounting",
        "tolerates_failures",
    )
    members: Members  # workers that take part in the present stage, see `ashl.stage.program`
    # effects to await
    compute = Compute
    send = Send
    all_reduce = AllReduce
    all_gather = AllGather
    sleep = Sleep
    join = Join
    cancel = Cancel
    save = Save

    def __init__(self, kernel: Kernel, rank: int) -> None:
        self.kernel = kernel
        self.rank = rank
        self.time_accounting = TimeAccounting()
        self.counter: Counter | None = None  # at the lead rank only
        self.steps = 0
        self.staleness: int | None = None  # staleness of the last round, in merges
        self.loss: float | None = None  # training loss of the last round
        self.measures: dict[str, Measured] = {}
        self.incarnation = 0  # number of earlier failures of this rank
        # True if a failure of a worker begins another epoch, see `ashl.stage.program`
        self.tolerates_failures = False
        # (stage, copy of the state) of the last safe point, if the run tolerates failures
        self.restart_point: tuple[int, Any] | None = None
        # the last safe point of the round before that one
        self.before_restart_point: tuple[int, Any] | None = None
        self.at_pause = False  # True from a pause to the next safe point
        # True during local work with safe points; an epoch waits for the next safe point
        self.in_local_work = False

    def recv(self, *tags: Tag, src: int = ANY, before_s: float = math.inf) -> Recv:
        return Recv(tags, src, before_s)

    def discard(self, *tags: Tag) -> Discard:
        return Discard(tags)

    def spawn(self, coro: Coroutine) -> Any:
        """Start a task beside the main one. Its time is not the worker's time, because only the
        main task is accounted for.
        """
        return self.kernel.spawn(self, coro)

    def compute_once(self, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]) -> T:
        """Return `fn()`, a value that all members of the group compute identically. `fn` must be
        pure, and no task may change the value.

        In virtual time it runs once for each (group, key), and every member receives the same
        object. On real processes every member runs it. It costs no time. A resumed run may run it
        once more.
        """
        return self.kernel.compute_once(self, group, key, fn)

    def safe_point(self, stage: int, state: Any, before_work: bool = False) -> None:
        """Mark the top of a loop: `state` holds all that the task needs to continue from here in
        this stage. The next epoch of a run that tolerates failures begins here.

        Args: before_work: True if local work follows, up to `end_local_work`. An epoch that begins
        meanwhile waits for the next safe point, so that no step is repeated.
        """
        if self.tolerates_failures:
            self.in_local_work = before_work
            before = self.restart_point
            if before is not None and before[1] is not state and not self.at_pause:
                self.before_restart_point = before
            self.at_pause = False
            self.restart_point = stage, state.copy_to_restart()

    def mark_pause(self, stage: int, state: Any) -> None:
        """Mark a pause as a safe point. The top of the next round marks the same round again, so
        that the point before stays that of the round before.
        """
        self.safe_point(stage, state)
        self.at_pause = True

    def move_safe_point(self, stage: int, state: Any) -> None:
        """Move the safe point to the end of a step of local work, in the same round."""
        if self.tolerates_failures:
            self.restart_point = stage, state.copy_to_restart()

    def end_local_work(self, stage: int, state: Any) -> None:
        """Move the safe point to the end of local work, in the same round."""
        self.in_local_work = False
        self.move_safe_point(stage, state)

    def is_amid_step(self, before: tuple[int, Any] | None, effect: Any) -> bool:
        """Return True if local work computes on with this effect, and has marked no safe point
        since `before`. An epoch waits until then.
        """
        is_unmarked = self.in_local_work and self.restart_point is before
        return is_unmarked and isinstance(effect, Compute)

    @property
    def module_state(self) -> Any:
        """Return the state of this rank's module beside its parameters."""
        states = self.kernel.worker_states
        return None if states is None else states.worker_state(self.rank)

    @property
    def is_checkpoint_due(self) -> bool:
        """Return True if a checkpoint is due by this rank's clock; the lead rank asks."""
        return self.kernel.now_ns >= self.kernel.checkpoint_due_ns

    @property
    def now_ns(self) -> int:
        return self.kernel.now_ns

    @property
    def now(self) -> float:
        """Seconds on the experiment's clock."""
        return self.kernel.now_ns / 1e9

    @property
    def stop_reason(self) -> str | None:
        """Return why the run should end, once that is decided outside the algorithm (a target
        reached, an interrupt).
        """
        return self.kernel.observer.stop_reason

    @property
    def scores(self) -> Mapping[str, float | None] | None:
        """Return the last evaluation that is known here; on real processes it may be some commits
        old.
        """
        return self.kernel.observer.scores

    def emit(self, record: Record) -> None:
        """Send a record to the observer."""
        self.kernel.observer.emit(record)

    def measure(self, name: str, value: float) -> None:
        """Record a value of the user's own metric. Any loop on any rank may call it, any number of
        times.

        The mean over the ranks' latest values is `measure/<name>` in metrics.jsonl and MLflow. The
        last value and the mean over the run are in summary.json, and the leaderboard has a column
        for it.
        Raises: ValueError for a name with other characters than letters, digits, `_`, `-`, `.` and
        single slashes.
        """
        value = float(value)
        known = self.measures.get(name)
        if known is not None:
            self.measures[name] = Measured(value, known.total + value, known.count + 1)
        elif MEASURE.fullmatch(name):
            self.measures[name] = Measured(value, value, 1)
        else:
            raise ValueError(
                f"measure {name!r}: invalid name; use letters, digits, '_', '-', '.' and '/'"
            )

    def record_round(
        self,
        stage: int,
        round: int,
        steps: int,
        staleness: int,
        *,
        dropped: bool,
        loss: float | None,
        group: list[int] | None = None,
    ) -> None:
        """Close a round of this worker: the time from its last merge to now."""
        self.steps += steps
        self.staleness = staleness
        self.loss = loss
        spans, start_ns, end_ns = self.time_accounting.end_round()
        parts, messages = self.time_accounting.take_overlapped()
        if is_recorded(self.kernel.observer.rounds, round):
            self.emit(
                Round(
                    rank=self.rank,
                    stage=stage,
                    round=round,
                    steps=steps,
                    staleness=staleness,
                    dropped=dropped,
                    loss=loss,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    spans_ns=spans,
                    group=group,
                    parts_ns=parts or None,
                    messages_ns=messages or None,
                )
            )

    def add_totals(self, before: Heartbeat | None) -> None:
        """Add the totals of the earlier incarnation of this worker, before this one begins.

        Time since the run's zero that no total accounts for counts as down.
        Args: before, None if the earlier incarnation failed before its first heartbeat.
        """
        account = self.time_accounting
        if before is not None:
            self.steps += before.steps
            self.measures = dict(before.measures)
            account.totals = dict(before.totals_ns)
            account.bytes_up += before.bytes_up
            account.bytes_down += before.bytes_down
            account.collective_ns += before.collective_ns
        account.totals["down"] += max(0, account.cursor - sum(account.totals.values()))

    def heartbeat(self) -> Heartbeat:
        """Return the current state of this rank for the monitor. Another thread may call it."""
        # read before the clock, because they may not reach past it
        totals_ns = self.time_accounting.current_totals()
        bytes_up, bytes_down = self.time_accounting.bytes_so_far()
        return Heartbeat(
            rank=self.rank,
            time_ns=self.now_ns,
            steps=self.steps,
            staleness=self.staleness,
            loss=self.loss,
            totals_ns=totals_ns,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            counts=self.counter.progress.report() if self.counter else None,
            measures=dict(self.measures),
            collective_ns=self.time_accounting.collective_ns,
        )

    def emit_totals(self) -> None:
        """Emit the totals of this rank's time, bytes and measures once it has ended."""
        account = self.time_accounting
        account.fold_pending()
        self.emit(
            TimeTotals(
                rank=self.rank,
                totals_ns=account.totals,
                bytes_up=account.bytes_up,
                bytes_down=account.bytes_down,
                measures=self.measures,
                collective_ns=account.collective_ns,
            )
        )

    def snapshot(
        self,
        params: Vector | None,
        *,
        tick: int | None = None,
        final: bool = False,
        counts: Counts | None = None,
        time_ns: int | None = None,
        without: Collection[int] = (),
    ) -> None:
        """Send the model to the evaluator, from the lead rank together with the counts; costs no
        experiment time.

        If every worker has its own model, models with the same `tick` form one evaluation, and
        `without` lists the workers that have none among them. A model later than the budget
        of seconds is not evaluated, unless it is the final one.
        """
        at_ns = self.now_ns if time_ns is None else time_ns
        if at_ns > self.time_accounting.limit_ns and not final:
            return
        record = Snapshot(self.rank, at_ns, tick, final, counts, without=tuple(sorted(without)))
        self.kernel.observer.snapshot(record, params)

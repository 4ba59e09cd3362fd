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

from ashl.runtime.effects import (
    ANY,
    AllGather,
    AllReduce,
    Cancel,
    Compute,
    Discard,
    Join,
    Recv,
    Regroup,
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
    UpdateShown,
    is_recorded,
)
from ashl.runtime.time_accounting import TimeAccounting
from ashl.size_only import Vector

MEASURE = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)  # what files, MLflow and tables can bear

T = TypeVar("T")


class Observer(Protocol):
    """Where records and snapshots go: the evaluator and the writer, off the experiment's clock."""

    @property
    def stopping(self) -> str | None:
        """Why the run should end."""
        ...

    @property
    def scores(self) -> Mapping[str, float | None] | None:
        """Of the last evaluation."""
        ...

    @property
    def rounds(self) -> Rounds:
        """Which rounds it wants records of."""
        ...

    def emit(self, record: Record) -> None: ...

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None: ...


class NullObserver:
    """An observer that keeps nothing, and says what it was given."""

    rounds: Rounds = "none"

    def __init__(
        self, stopping: str | None = None, scores: Mapping[str, float | None] | None = None
    ) -> None:
        self.stopping, self.scores = stopping, scores

    def emit(self, record: Record) -> None:
        pass

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        pass


class ReportsProgress(Protocol):
    """A run's progress."""

    def report(self) -> Counts: ...

    def rounds(self) -> list[int]: ...


class Counter(Protocol):
    """What counts a run's progress."""

    @property
    def progress(self) -> ReportsProgress: ...


class WorkerStates(Protocol):
    """Keeps, for each worker, what forward passes change of the module beside its parameters. None
    is the first one.
    """

    def worker_state(self, worker: int) -> Any: ...

    def set_worker_state(self, worker: int, state: Any) -> None: ...


class Kernel(Protocol):
    """The part of a kernel that a rank context calls without awaiting."""

    observer: Observer
    worker_states: WorkerStates | None

    @property
    def now_ns(self) -> int: ...

    def spawn(
        self,
        ctx: RankContext,
        coro: Coroutine,
        main: bool = False,
        is_background_service: bool = False,
    ) -> Any: ...

    def compute_once(
        self, ctx: RankContext, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]
    ) -> T: ...

    def safe_point(self, ctx: RankContext, stage: int, state: Any) -> bool: ...

    def checkpoint_due(self, ctx: RankContext, version: int) -> bool: ...

    def safe_point_wanted(self, ctx: RankContext) -> bool: ...


class RankContext:
    """One rank of the job. Algorithms know this and nothing else of where they run."""

    __slots__ = (
        "counter",
        "incarnation",
        "join_pending",
        "kernel",
        "loss",
        "measures",
        "rank",
        "staleness",
        "steps",
        "time_accounting",
    )
    compute, send, regroup, sleep, join, cancel = (
        Compute,
        Send,
        Regroup,
        Sleep,
        Join,
        Cancel,
    )  # to be awaited

    def __init__(self, kernel: Kernel, rank: int) -> None:
        self.kernel = kernel
        self.rank = rank
        self.time_accounting = TimeAccounting()
        self.counter: Counter | None = None  # at the home rank: what counts the run's progress
        self.steps = 0
        self.staleness: int | None = None  # of its last round, like `loss`
        self.loss: float | None = None
        self.measures: dict[str, Measured] = {}
        self.join_pending = False  # whether a worker has come and asks to be let in
        self.incarnation = 0  # how often this rank has been lost before

    def recv(self, *tags: Tag, src: int = ANY, before_s: float = math.inf) -> Recv:
        return Recv(tags, src, before_s)

    def discard(self, *tags: Tag) -> Discard:
        return Discard(tags)

    def all_reduce(
        self,
        tensor: Any,
        group: tuple[int, ...],
        op: str = "sum",
        piggybacked: int = 0,
        key: int = 0,
        credit: int = 0,
        epoch: int = 0,
        incarnations: tuple[int, ...] = (),
    ) -> AllReduce:
        assert key >= 0, "keys of collectives count from 0"
        return AllReduce(tensor, group, op, piggybacked, key, credit, epoch, incarnations)

    def all_gather(
        self,
        tensor: Any,
        group: tuple[int, ...],
        piggybacked: int = 0,
        key: int = 0,
        epoch: int = 0,
    ) -> AllGather:
        assert key >= 0, "keys of collectives count from 0"
        return AllGather(tensor, group, piggybacked, key, 0, epoch)

    def spawn(self, coro: Coroutine, is_background_service: bool = False) -> Any:
        """Start a task beside the main one. Its time is not the worker's time: only the main task
        is accounted for.

        One that `stands` is at the top of a loop of its own whenever another is, and keeps nothing
        there: where the run goes on from a checkpoint, the main task starts it anew before its
        mark.
        """
        return self.kernel.spawn(self, coro, is_background_service=is_background_service)

    def compute_once(self, group: tuple[int, ...], key: Hashable, fn: Callable[[], T]) -> T:
        """What all members of a team compute alike: `fn()`, which must be pure and whose value
        nobody changes.

        In virtual time it runs once for each (team, key), and every member gets the same object; on
        real processes it just runs. It costs no time. A run that goes on from a checkpoint may run
        it once more.
        """
        return self.kernel.compute_once(self, group, key, fn)

    def safe_point(self, stage: int, state: Any) -> bool:
        """Here is the top of a loop: `state` holds all that is needed to go on from here, in this
        stage. None = what follows hangs on when the run ends, and it may go on with another end: no
        checkpoint holds it.

        Returns whether a checkpoint has it without what others do at this moment, so that what
        follows is not in it.
        """
        return self.kernel.safe_point(self, stage, state)

    @property
    def own_state(self) -> Any:
        """What this rank's module keeps beside its parameters."""
        states = self.kernel.worker_states
        return None if states is None else states.worker_state(self.rank)

    def checkpoint_due(self, version: int) -> bool:
        """Whether such a checkpoint would have this rank at a mark of this version, as of now."""
        return self.kernel.checkpoint_due(self, version)

    @property
    def safe_point_wanted(self) -> bool:
        """Whether a checkpoint waits for this rank to be at the top of a loop, with nothing going
        on beside it.
        """
        return self.kernel.safe_point_wanted(self)

    @property
    def now_ns(self) -> int:
        return self.kernel.now_ns

    @property
    def now(self) -> float:
        """Seconds on the experiment's clock."""
        return self.kernel.now_ns / 1e9

    @property
    def stopping(self) -> str | None:
        """Why the run should end, once someone outside has decided so (a target reached, an
        interrupt).
        """
        return self.kernel.observer.stopping

    @property
    def scores(self) -> Mapping[str, float | None] | None:
        """The last evaluation that is known here; on real processes it may be some commits old."""
        return self.kernel.observer.scores

    def emit(self, record: Record) -> None:
        """Say something of the run, to whoever keeps its records."""
        self.kernel.observer.emit(record)

    def measure(self, name: str, value: float) -> None:
        """A value of a metric of one's own, from any loop, on any rank, as often as one likes.

        The mean over the ranks' latest values stands as `measure/<name>` in metrics.jsonl and
        MLflow; its end and the mean over the run are in summary.json, and the leaderboard has a
        column of it. Raises ValueError for a name that is more than words, digits, `_`, `-`, `.`
        and single slashes.
        """
        value = float(value)
        known = self.measures.get(name)
        if known is not None:
            self.measures[name] = Measured(value, known.total + value, known.count + 1)
        elif MEASURE.fullmatch(name):
            self.measures[name] = Measured(value, value, 1)
        else:
            raise ValueError(
                f"a measure cannot be called {name!r}; take letters, digits, '_', '-', '.' and '/'"
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
        """Close a round of this worker: from its last merge to now."""
        self.steps += steps
        self.staleness, self.loss = staleness, loss
        spans, start_ns, end_ns = self.time_accounting.end_round()
        parts, messages = self.time_accounting.take_overlapped()
        if is_recorded(self.kernel.observer.rounds, round):
            what = (
                self.rank,
                stage,
                round,
                steps,
                staleness,
                dropped,
                loss,
                start_ns,
                end_ns,
                spans,
                group,
            )
            self.kernel.observer.emit(Round(*what, parts or None, messages or None))

    def heartbeat(self) -> Heartbeat:
        """How this rank stands, for whoever watches; may be read from another thread."""
        totals_ns = (
            self.time_accounting.current_totals()
        )  # before the clock is read, which is as far as they may reach
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
        """Hand in what this rank's time went into, once it has ended."""
        time_accounting = self.time_accounting
        time_accounting.fold_pending()
        totals = (time_accounting.totals, time_accounting.bytes_up, time_accounting.bytes_down)
        self.emit(TimeTotals(self.rank, *totals, self.measures, time_accounting.collective_ns))

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
        """Hand the model to the evaluator, at the home rank with the counts; costs the experiment
        nothing. Where every worker has a model of its own, `tick` says which ones belong together,
        and `without` who has none among them.
        """
        at_ns = self.now_ns if time_ns is None else time_ns
        shown = Snapshot(self.rank, at_ns, tick, final, counts, without=tuple(sorted(without)))
        self.kernel.observer.snapshot(shown, params)

    def show_update(self, x: Vector, *, of: int | None, tick: int, weight: float = 1.0) -> None:
        """Hand an update to the monitor, which compares what compression makes of the workers'
        mean: before compression with its worker and weight, or (`of` None) what the merge made of
        them all.
        """
        self.kernel.observer.snapshot(UpdateShown(self.rank, of, tick, weight), x)

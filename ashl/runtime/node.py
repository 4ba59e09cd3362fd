"""What an algorithm sees of the world: its rank, the experiment's clock and the effects it may await."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Protocol, TypeVar

from ashl.runtime.effects import (
    ANY,
    AllGather,
    AllReduce,
    Cancel,
    Compute,
    Drop,
    Join,
    Recv,
    Send,
    Sleep,
    Tag,
)
from ashl.runtime.ledger import Ledger

T = TypeVar("T")


class Observer(Protocol):
    """Where records and snapshots go: the evaluator and the writer, off the experiment's clock."""

    stopping: str | None
    scores: dict[str, float | None] | None  # of the last evaluation
    rounds: bool  # whether it wants a record of every round

    def emit(self, record: dict) -> None: ...

    def snapshot(self, record: dict, params: Any) -> None: ...


class Counts(Protocol):
    """A run's progress."""

    def report(self) -> dict[str, Any]: ...


class Counter(Protocol):
    """What counts a run's progress."""

    @property
    def tally(self) -> Counts: ...


class Kernel(Protocol):
    """The part of a kernel that a node calls without awaiting."""

    observer: Observer

    def clock_ns(self) -> int: ...

    def spawn(self, node: Node, coro: Coroutine) -> Any: ...

    def alike(self, node: Node, team: tuple[int, ...], key: Hashable, fn: Callable[[], T]) -> T: ...

    def mark(self, node: Node, stage: int, state: Any) -> None: ...


class Node:
    """One rank of the job. Algorithms know this and nothing else of where they run."""

    __slots__ = ("_last", "_steps", "counter", "kernel", "ledger", "rank")

    def __init__(self, kernel: Kernel, rank: int) -> None:
        self.kernel = kernel
        self.rank = rank
        self.ledger = Ledger()
        self.counter: Counter | None = None  # at the home rank: what counts the run's progress
        self._steps = 0
        self._last: dict[str, Any] = {}

    def compute(self, fn: Callable[[], Any], work: float, kind: str = "compute") -> Compute:
        return Compute(fn, work, kind)

    def send(self, dst: int, tag: Tag, body: Any = None, meta: tuple[float, ...] = ()) -> Send:
        return Send(dst, tag, body, meta)

    def recv(self, *tags: Tag, src: int = ANY, before_s: float = math.inf) -> Recv:
        return Recv(tags, src, before_s)

    def drop(self, *tags: Tag) -> Drop:
        return Drop(tags)

    def all_reduce(
        self, tensor: Any, group: tuple[int, ...], op: str = "sum", riders: int = 0, key: int = 0
    ) -> AllReduce:
        return AllReduce(tensor, group, op, riders, key)

    def all_gather(self, tensor: Any, group: tuple[int, ...], riders: int = 0, key: int = 0) -> AllGather:
        return AllGather(tensor, group, riders, key)

    def sleep(self, seconds: float) -> Sleep:
        return Sleep(seconds)

    def join(self, task: Any) -> Join:
        return Join(task)

    def cancel(self, task: Any) -> Cancel:
        return Cancel(task)

    def spawn(self, coro: Coroutine) -> Any:
        """Start a task beside the main one. Its time is not the worker's time: only the main task is accounted for."""
        return self.kernel.spawn(self, coro)

    def alike(self, team: tuple[int, ...], key: Hashable, fn: Callable[[], T]) -> T:
        """What all members of a team compute alike: `fn()`, which must be pure and whose value nobody changes.

        In virtual time it runs once for each (team, key), and every member gets the same object; on real processes it
        just runs. It costs no time. A run that goes on from a checkpoint may run it once more.
        """
        return self.kernel.alike(self, team, key, fn)

    def mark(self, stage: int, state: Any) -> None:
        """Here is the top of a loop: `state` holds all that is needed to go on from here, in this stage."""
        self.kernel.mark(self, stage, state)

    @property
    def now_ns(self) -> int:
        return self.kernel.clock_ns()

    @property
    def now(self) -> float:
        """Seconds on the experiment's clock."""
        return self.kernel.clock_ns() / 1e9

    @property
    def stopping(self) -> str | None:
        """Why the run should end, once someone outside has decided so (a target reached, an interrupt)."""
        return self.kernel.observer.stopping

    @property
    def scores(self) -> dict[str, float | None] | None:
        """The last evaluation that is known here; on real processes it may be some commits old."""
        return self.kernel.observer.scores

    def emit(self, kind: str, **fields: Any) -> None:
        self.kernel.observer.emit({"kind": kind, "rank": self.rank, **fields})

    def round(self, **fields: Any) -> None:
        """Close a round of this worker: from its last merge to now. Takes at least `steps`, `staleness` and `loss`."""
        self._steps += fields["steps"]
        self._last = fields
        spans, start_ns, end_ns = self.ledger.cut()
        if self.kernel.observer.rounds:
            times = {"start_ns": start_ns, "end_ns": end_ns, "spans_ns": spans}
            self.kernel.observer.emit({"kind": "round", "rank": self.rank, **fields, **times})

    def beat(self) -> dict[str, Any]:
        """How this rank stands, for whoever watches; may be read from another thread."""
        bytes_up, bytes_down = self.ledger.sent()
        return {
            "kind": "beat",
            "rank": self.rank,
            "time_ns": self.now_ns,
            "steps": self._steps,
            "staleness": self._last.get("staleness"),
            "loss": self._last.get("loss"),
            "totals_ns": self.ledger.live(),
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "counts": self.counter.tally.report() if self.counter else None,
        }

    def account(self) -> None:
        """Hand in what this rank's time went into, once it has ended."""
        ledger = self.ledger
        ledger.settle()
        self.emit("ledger", totals_ns=ledger.totals, bytes_up=ledger.bytes_up, bytes_down=ledger.bytes_down)

    def snapshot(self, params: Any, **fields: Any) -> None:
        """Hand the model to the evaluator. Costs the experiment nothing."""
        self.kernel.observer.snapshot({"rank": self.rank, "time_ns": self.now_ns, **fields}, params)

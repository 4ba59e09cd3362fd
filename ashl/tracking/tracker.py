"""Define the seam between the records of a run and the trackers that show copies of them.

The run folder is the truth. A tracker receives a copy, which `ashl.tracking.copying` makes in a
thread; each tracker is one file.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MAX_WORKERS = 16  # workers whose share of waiting is a metric


class Point(NamedTuple):
    """A value of a metric."""

    name: str
    value: float
    step: int
    host_s: float  # host seconds since the start of the run


@dataclass(frozen=True)
class TrackedRun:
    """A run or a sweep, as trackers show it."""

    folder: Path  # absolute
    name: str
    experiment: str
    params: Mapping[str, str] = field(default_factory=dict)
    kind: str = "run"  # or "sweep"
    note: str = ""  # Markdown
    tags: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None  # identifier of the sweep's run in the tracker


class Tracker(Protocol):
    """The copy of one run. Every method may raise, and is then called again later."""

    def has(self, run: TrackedRun, outcome: str) -> bool:
        """Return True if the tracker has a whole copy of the run, with this hash of its summary."""
        ...

    def open(self, run: TrackedRun) -> str:
        """Begin a run with its parameters in place of an incomplete copy; return its identifier."""
        ...

    def log_metrics(self, points: Sequence[Point]) -> None: ...

    def log_artifact(self, path: Path) -> None: ...

    def close(self, summary: Mapping[str, Any], outcome: str) -> str:
        """End the run with its summary; return the command or the address that shows it."""
        ...


def shell_command(*words: object) -> str:
    """Return a command for the user; paths below the current folder are relative to it."""
    here = Path.cwd()
    return shlex.join(
        str(word.relative_to(here) if isinstance(word, Path) and here in word.parents else word)
        for word in words
    )

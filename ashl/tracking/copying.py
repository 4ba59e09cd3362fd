"""Copy run folders to a tracker, in a daemon thread.

The thread reads `metrics.jsonl` as it grows, so that this file is the queue: nothing that the run
records is dropped, and nothing waits in memory. A tracker that fails is tried again after seconds.
It never delays the run, except for a bounded time at its end.
"""

import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ashl.config.flat import flat_config, setting_text
from ashl.config.identity import config_hash
from ashl.tracking import jsonl
from ashl.tracking.mlflow import MlflowTracker, set_environment
from ashl.tracking.recorder import METRICS, SUMMARY, TRACE
from ashl.tracking.tensorboard import TensorboardTracker
from ashl.tracking.tracker import MAX_WORKERS, Point, TrackedRun, Tracker, shell_command
from ashl.tracking.wandb import WandbTracker

PERIOD_S = 1.0  # least seconds between two readings of metrics.jsonl
MAX_PAUSE_S = 10.0  # most seconds between them
# A reading takes at most this share of the thread's time, because a run in virtual time shares the
# interpreter with it.
SHARE = 0.05
MAX_REASON = 300  # characters
ARTIFACTS = (
    *(SUMMARY, "config.yaml", "overrides.yaml", "profile.json", "plan.json", TRACE, "report.html"),
    "sweep.json",
)
ENDED_SWEEP = {"status": "finished"}  # a sweep has no summary
UNFINISHED = {"status": "failed", "exit_reason": "the run's process ended without a summary"}


def tracker_maker(sink: str, store: Path) -> Callable[[], Tracker]:
    """Return a function that makes a tracker for one run, and imports its library.

    Call it in the main thread, because it sets environment variables. Call what it returns in
    another thread, because libraries of trackers take a second to import.
    Args: store is the folder of MLflow's store.
    """
    if sink == "tensorboard":
        return TensorboardTracker
    if sink == "wandb":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        return WandbTracker
    set_environment(store)
    return partial(MlflowTracker, store)


def describe_run(
    folder: Path, name: str, experiment: str, config: Mapping[str, Any], command: str
) -> TrackedRun:
    """Return what trackers show of a run: its parameters, its command, and its hash.

    Args: config is the resolved configuration; command is the typed one, "" if it is unknown.
    """
    return TrackedRun(
        folder.absolute(),
        name,
        experiment,
        params_of(config),
        note=f"`{command}`" if command else "",
        tags={"ashl.config_hash": config_hash(config)},
    )


class RunCopy:
    """The copy of one run folder; a method that failed may be called again."""

    def __init__(self, tracker: Tracker, run: TrackedRun) -> None:
        self.tracker = tracker
        self.run = run
        self.identifier: str | None = None
        self._copied = 0  # bytes of metrics.jsonl

    def advance(self) -> None:
        """Begin the run if there is none, then copy the new metrics."""
        if self.identifier is None:
            self.identifier = self.tracker.open(self.run)
        rows, end = jsonl.tail(self.run.folder / METRICS, self._copied)
        self.tracker.log_metrics([point for row in rows for point in metric_points(row)])
        self._copied = end

    def close(self) -> str:
        """Copy the outcome and the files; return the command or the address that shows the run."""
        absent = ENDED_SWEEP if self.run.kind == "sweep" else UNFINISHED
        summary = jsonl.read_json(self.run.folder / SUMMARY) or absent
        # Six digits, so that a cell of MLflow's table shows the whole number.
        ends = [
            Point(f"final/{name}", float(f"{value:.6g}"), 0, 0.0)
            for name, value in summary_numbers(summary)
        ]
        self.tracker.log_metrics(ends)
        try:
            for path in filter(Path.exists, (self.run.folder / name for name in ARTIFACTS)):
                self.tracker.log_artifact(path)
        finally:
            shown = self.tracker.close(summary, summary_hash(self.run.folder))
        return shown


def copy_missing(tracker: Tracker, run: TrackedRun) -> None:
    """Copy a run that has ended, unless the tracker has a whole copy of it."""
    if not tracker.has(run, summary_hash(run.folder)):
        copy = RunCopy(tracker, run)
        copy.advance()
        copy.close()


class Copier:
    """A daemon thread that copies a run while it runs, or a sweep while its runs end.

    Args: make returns a tracker for one run (see `tracker_maker`); only the thread calls it.
    """

    def __init__(self, make: Callable[[], Tracker], title: str, run: TrackedRun) -> None:
        self.run = run
        self.title = title
        self._make = make
        self._children = deque[TrackedRun]()  # runs of a sweep that have ended
        self._over = threading.Event()
        self._shown: str | None = None
        self._failure: str | None = None  # what the last attempt failed with
        self._thread = threading.Thread(target=self._copy_until_over, daemon=True, name="tracking")
        self._thread.start()

    def add(self, run: TrackedRun) -> None:
        """Copy a run of this sweep, which has ended."""
        self._children.append(run)

    def finish(self, wait_s: float) -> tuple[str | None, str | None]:
        """Copy the end of the run; return what shows the copy and a warning, each may be None.

        Call it after `Recorder.close`: without a summary the run counts as failed.
        """
        self._over.set()
        self._thread.join(wait_s)
        reason = self._failure or (f"{wait_s:g} s were not enough" if self._shown is None else None)
        return self._shown, reason and (
            f"{self.title} did not take all of this {self.run.kind} ({reason}); its records are"
            f" whole in {self.run.folder}{self._explain_remedy()}"
        )

    def _explain_remedy(self) -> str:
        """Return how to copy the rest later, if a command does that."""
        if self.run.kind == "sweep":
            return ", and the same command copies the rest"
        command = shell_command("ashl", "ui", self.run.folder)
        return f", and `{command}` copies them again" if self.title == "MLflow" else ""

    def _copy_until_over(self) -> None:
        """Copy until the run is over; try again after each failure."""
        own: RunCopy | None = None
        over = False
        pause_s = PERIOD_S
        while not over:
            over = self._over.wait(pause_s)
            began_s = time.monotonic()
            try:
                own = own or RunCopy(self._make(), self.run)
                own.advance()
                while self._children:
                    run = replace(self._children[0], parent=own.identifier)
                    copy_missing(self._make(), run)
                    self._children.popleft()
                if over:
                    self._shown = own.close()
                self._failure = None
            except Exception as error:  # trackers and their stores fail in too many ways
                self._failure = find_cause(str(error) or type(error).__name__)
            pause_s = min(MAX_PAUSE_S, max(PERIOD_S, (time.monotonic() - began_s) / SHARE))


def summary_hash(folder: Path) -> str:
    """Return a hash of a run's summary, or "" without one: an equal copy need not be repeated."""
    try:
        return hashlib.sha256((folder / SUMMARY).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def find_cause(text: str) -> str:
    """Find the cause in an error text, without user names and passwords.

    It is the first sentence of the last line that names an error: SQLAlchemy has lines before and
    after it. An address that does not answer is reported as such.
    """
    text = re.sub(r"//[^/@\s]+@", "//", text)
    address = re.search(r"https?://[^/\s]+", text)
    if address and "Max retries exceeded" in text:
        return f"{address[0]} does not answer"
    lines = text.strip().splitlines() or [""]
    line = next((line for line in reversed(lines) if "Error" in line), lines[0])
    return line.split(". ")[0].rstrip(".")[:MAX_REASON]


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the configuration as trackers show it: dotted names, and each group with its option.

    >>> params_of({"choices": {"sync": "mine"}, "seed": 0, "sync": {"_target_": "a.b.C", "lag": 3}})
    {'sync': 'mine', 'seed': '0', 'sync.lag': '3'}
    """
    return {key: setting_text(value) for key, value in flat_config(config).items()}


def metric_points(row: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the metrics in a line of metrics.jsonl: values of names with a slash.

    A null, for example a loss that is no number, is left out. `test/acc` comes first, because
    MLflow makes the first metric the key metric.
    """
    for name in sorted(row, key=lambda name: name != "test/acc"):
        if "/" in name and row[name] is not None:
            yield Point(name, float(row[name]), int(row["step"]), float(row.get("host_s") or 0.0))


def summary_numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary by name: `test_accuracy`, `best_time_s`, `wait_share_w0`."""
    for key, value in summary.items():
        if key in ("final", "best"):
            prefix = "" if key == "final" else "best_"
            yield from ((prefix + name, number) for name, number in summary_numbers(value or {}))
        elif key == "measures":
            yield from ((f"measure/{name}", found["last"]) for name, found in (value or {}).items())
        elif key not in ("schema", "seed") and type(value) in (int, float):
            yield key, float(value)
    if time_s := summary.get("time_s"):
        for rank, worker in enumerate((summary.get("workers") or ())[:MAX_WORKERS]):
            yield f"wait_share_w{rank}", worker["wait_s"] / time_s

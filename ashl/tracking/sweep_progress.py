"""Show the progress of a sweep while it runs.

A terminal shows a live table of the runs in progress; a pipe gets a line for each run that ended.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, seconds
from ashl.tracking.deadline import Deadline

MAX_LINES = 12
BAR = 20  # columns
BESIDE = 30  # columns for the score, the time and the gaps


class Running(NamedTuple):
    """A run in progress: its name, the share that is done, and the score of its last evaluation."""

    label: str
    done: float | None = None
    score: str = ""


class Reading:
    """A reader of the metrics of a run that may still be writing them."""

    def __init__(self, metrics: Path, limits: Mapping[str, Any], predicted_s: float | None) -> None:
        self.metrics, self.limits, self.predicted_s = metrics, limits, predicted_s
        self._read, self._last = 0, dict[str, Any]()

    def running(self, label: str) -> Running:
        """Read the new metrics and return the progress of the run, named `label`."""
        rows, self._read = jsonl.tail(self.metrics, self._read)
        self._last = rows[-1] if rows else self._last
        row, limits = self._last, self.limits
        if not row:
            return Running(label, 0.0)
        now_s, wholes = row["time_s"], (self.predicted_s, limits.get("seconds"))
        shares = [now_s / whole_s for whole_s in wholes if whole_s]
        if limits.get("steps") and row.get("step") is not None:
            shares.append(row["step"] / limits["steps"])
        loss = row.get("test/loss") if row.get("train/loss") is None else row["train/loss"]
        score = (
            percent(row["test/acc"]) if row.get("test/acc") is not None else f"loss {number(loss)}"
        )
        return Running(label, min(1.0, max(shares)) if shares else None, score)


class SweepProgress:
    """The progress of several runs: a live table on a terminal, lines in a pipe, nothing if quiet.

    Args: deadline is the time limit of all runs together; phase names the runs in front of the
    counters, for example "tuning" if a command has several such counters one after the other.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        *,
        quiet: bool,
        deadline: Deadline | None = None,
        phase: str = "",
    ) -> None:
        self.console, self.total, self.quiet, self.deadline = console, total, quiet, deadline
        self.phase = phase
        self.done = self.failed = 0
        self._began = time.monotonic()
        self._since: dict[str, float] = {}
        self._running: Sequence[Running] = ()
        live = not quiet and console.is_terminal
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._drawn)
            if live
            else None
        )
        if self._live:
            self._live.start()

    def ended(self, label: str, summary: dict[str, Any]) -> None:
        """Count a run that has ended, and print how."""
        self.done += 1
        self.failed += summary["status"] == "failed"
        counter = f"{self.phase} {self.done}/{self.total}".lstrip()
        self.say(f"[{counter}] {label}  {ending(summary)}")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, running: Sequence[Running]) -> None:
        """Set the runs in progress."""
        now = time.monotonic()
        self._since = {one.label: self._since.get(one.label, now) for one in running}
        self._running = running

    def _drawn(self) -> Group:
        """Return the live table: the progress of all runs together and of each run in progress."""
        now, deadline = time.monotonic(), self.deadline
        spent_s = now - self._began
        left = (
            f", about {seconds(spent_s / self.done * (self.total - self.done))} left"
            if self.done
            else ""
        )
        began = f"{len(self._running)} running" if self._running or self.done else "starting"
        phase = f"{self.phase}: " if self.phase else ""
        head = Text(
            f"{phase}{self.done} of {self.total} runs, {began}, {seconds(spent_s)}{left}",
            no_wrap=True,
        )
        bars = Table.grid()  # a bar outside a table does not end its line
        if deadline:
            bars.add_row(ProgressBar(deadline.budget_s, deadline.spent_s, width=2 * BAR))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(4):
            table.add_column(no_wrap=True)
        room = max(BAR, self.console.width - BAR - BESIDE)
        for one in self._running[:MAX_LINES]:
            bar = "" if one.done is None else ProgressBar(1.0, one.done, width=BAR)
            name = Text(one.label)
            name.truncate(room, overflow="ellipsis")
            table.add_row(name, bar, one.score or "-", seconds(now - self._since[one.label]))
        more = len(self._running) - MAX_LINES
        rest = [Text(f"and {more} more", style="dim")] if more > 0 else []
        return Group(head, *[bars] * bool(deadline), table, *rest)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def ending(summary: dict[str, Any]) -> str:
    """Return how a run ended, in a few words."""
    if summary["status"] in ("failed", "diverged"):
        return f"{summary['status']}: {summary['exit_reason']}"
    final, reached = summary.get("final") or {}, summary.get("time_to_target_s")
    words = [f"{summary['status']} after {seconds(summary['time_s'])}"]
    if final.get("test_accuracy") is not None:
        words.append(percent(final["test_accuracy"]))
    elif final.get("test_metric") is not None:
        words.append(f"{summary['metric']} {number(final['test_metric'])}")
    elif final.get("train_loss") is not None:
        words.append(f"loss {final['train_loss']:.4g}")
    if reached is not None:
        words.append(f"target at {seconds(reached)}")
    return ", ".join(words)

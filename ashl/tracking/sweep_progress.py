"""Show the progress of a sweep while it runs.

A terminal shows bars of all runs together and of each run in progress; a pipe gets a line for each
run that ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from ashl.tracking.console import number, percent, print_line, seconds

MAX_LINES = 12  # runs in progress that are shown
BAR = 20  # characters


class Running(NamedTuple):
    """A run in progress: its name, the share that is done, and the score of its last evaluation."""

    label: str
    done: float | None = None
    score: str = ""


def progress_of(
    label: str, row: Mapping[str, Any], limits: Mapping[str, Any], predicted_s: float | None
) -> Running:
    """Return the progress of a run by its latest metrics, which are empty before the first."""
    if not row:
        return Running(label, 0.0)
    ends = (predicted_s, limits.get("seconds"))
    shares = [row["time_s"] / end_s for end_s in ends if end_s]
    if limits.get("steps") and row.get("step") is not None:
        shares.append(row["step"] / limits["steps"])
    loss = row.get("test/loss") if row.get("train/loss") is None else row["train/loss"]
    accuracy = row.get("test/acc")
    score = f"loss {number(loss)}" if accuracy is None else percent(accuracy)
    return Running(label, min(1.0, max(shares)) if shares else None, score)


class SweepProgress:
    """The progress of several runs: bars on a terminal, lines in a pipe, nothing if quiet.

    Args: phase names the runs in front of the counters, for example "tuning" if a command has
    several such counters one after the other.
    """

    def __init__(self, console: Console, total: int, *, quiet: bool, phase: str = "") -> None:
        self.console = console
        self.total = total
        self.quiet = quiet
        self.phase = phase
        self.done = 0
        name_column = Column(ratio=1, no_wrap=True)  # as wide as the other columns allow
        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=name_column),
            BarColumn(BAR),
            TextColumn("{task.fields[score]}", markup=False, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            expand=True,
            disable=quiet or not console.is_terminal,
        )
        self._all = self.bars.add_task("", total=total, score="")
        self._tasks = dict[str, TaskID]()  # of the runs in progress, by label
        self.show([])
        self.bars.start()

    def count_ended(self, label: str, summary: dict[str, Any]) -> None:
        """Count a run that has ended, and print how."""
        self.done += 1
        self._count(self._running)
        phase = f"{self.phase}: " if self.phase else ""
        counter = f"[{phase}{self.done}/{self.total}]"
        self.print_line(f"{counter} {label}  {describe_end(summary)}")

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            print_line(self.console, line)

    def show(self, running: Sequence[Running]) -> None:
        """Set the runs in progress."""
        shown = {run.label: run for run in running[:MAX_LINES]}
        for label in self._tasks.keys() - shown.keys():
            self.bars.remove_task(self._tasks.pop(label))
        for label, run in shown.items():
            if label not in self._tasks:
                self._tasks[label] = self.bars.add_task(label, total=None, score="-")
            total = None if run.done is None else 1.0
            self.bars.update(
                self._tasks[label], total=total, completed=run.done or 0.0, score=run.score or "-"
            )
        self._count(len(running))

    def _count(self, running: int) -> None:
        """Show how many runs have ended and how many are in progress."""
        self._running = running
        phase = f"{self.phase}: " if self.phase else ""
        state = f"{running} running" if running or self.done else "starting"
        hidden = f", {running - MAX_LINES} not shown" if running > MAX_LINES else ""
        text = f"{phase}{self.done} of {self.total} runs, {state}{hidden}"
        self.bars.update(self._all, completed=self.done, description=text)

    def close(self) -> None:
        """Remove the bars. May be called twice."""
        self.bars.stop()


def describe_end(summary: dict[str, Any]) -> str:
    """Describe how a run ended, in a few words."""
    if summary["status"] in ("failed", "diverged"):
        return f"{summary['status']}: {summary['exit_reason']}"
    final = summary.get("final") or {}
    words = [f"{summary['status']} after {seconds(summary['time_s'])}"]
    if final.get("test_accuracy") is not None:
        words.append(percent(final["test_accuracy"]))
    elif final.get("test_metric") is not None:
        words.append(f"{summary['metric']} {number(final['test_metric'])}")
    elif final.get("train_loss") is not None:
        words.append(f"loss {final['train_loss']:.4g}")
    if summary.get("time_to_target_s") is not None:
        words.append(f"target at {seconds(summary['time_to_target_s'])}")
    return ", ".join(words)

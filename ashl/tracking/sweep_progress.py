"""What a person sees of a sweep while it runs: how far it is and what runs now; in a pipe, a line for each end."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ashl.tracking.console import number, percent, seconds
from ashl.tracking.deadline import Deadline

MAX_LINES = 12


class SweepProgress:
    """Draws on a terminal, prints lines in a pipe, and nothing at all when quiet. `deadline`: what all may take."""

    def __init__(self, console: Console, total: int, *, quiet: bool, deadline: Deadline | None = None) -> None:
        self.console, self.total, self.quiet, self.deadline = console, total, quiet, deadline
        self.done = self.failed = 0
        self._began = time.monotonic()
        self._seen: dict[str, float] = {}
        self._recent: list[str] = []
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if not quiet and console.is_terminal else None
        )
        if self._live:
            self._live.start()

    def ended(self, label: str, summary: dict[str, Any]) -> None:
        """A run has ended."""
        self.done += 1
        self.failed += summary["status"] == "failed"
        self.say(f"[{self.done}/{self.total}] {label}  {ending(summary)}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, running: Sequence[str]) -> None:
        """These run now."""
        now = time.monotonic()
        self._seen = {label: self._seen.get(label, now) for label in running}
        if self._live:
            table, deadline = self._table(now), self.deadline
            bars = [ProgressBar(deadline.budget_s, deadline.spent_s, width=40)] if deadline else []
            self._live.update(Group(*bars, table))

    def _table(self, now: float) -> Table:
        spent = now - self._began
        left = spent / self.done * (self.total - self.done) if self.done else None
        head = f"{self.done} of {self.total} runs, {len(self._seen)} running, {seconds(spent)}"
        table = Table(title=head + (f", about {seconds(left)} left" if left else ""), box=None, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(justify="right")
        for label, since in list(self._seen.items())[:MAX_LINES]:
            table.add_row(label, seconds(now - since))
        return table

    def close(self) -> None:
        if self._live:
            self._live.stop()


def ending(summary: dict[str, Any]) -> str:
    """How a run ended, in a few words."""
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

"""Show a run to the user: a live table on a terminal, lines in a pipe, the outcome at the end.

Only this module prints, and only in the process that leads the run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from rich import box
from rich.align import Align
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ashl.runtime.time_accounting import KINDS
from ashl.tracking import stages
from ashl.tracking.straggler import describe_straggler

FRAME_S = 0.25  # seconds between two drawings of the table; 16 rows take 6 ms
LINE_S = 2.0  # seconds between two lines in a pipe
MAX_ROWS = 16
TITLE, NAME = 15, 24  # characters: of a line of a title; of a name before it is wrapped
MAX_FAILED = 4  # failed workers that the outcome lists one by one
# The outcome reports a machine that was slower than declared by more than this share.
SLOWER = 0.02
# style of each status; all others are red
STYLE = {"finished": "bold green", "interrupted": "bold yellow"}
# Columns of the outcome that a narrow terminal leaves out, in this order.
LEAST_IMPORTANT = ("max", "staleness", "compress", "down", "pull", "push")


class WorkerFrame(NamedTuple):
    """The state of a worker; None is shown as a dash."""

    rank: int
    step: int
    samples_per_s: float | None
    wait_share: float | None
    staleness: float | None
    loss: float | None
    down: bool = False  # True if it has failed and not rejoined


class Frame(NamedTuple):
    """The state of a run; None is left out or shown as a dash."""

    time_s: float
    host_s: float
    stage: str
    steps: int
    commits: int
    loss: float | None
    accuracy: float | None
    # name and value of the task's own metric, if it has no accuracy
    metric: tuple[str, float] | None
    samples_per_s: float | None
    wait_share: float | None
    progress: float | None  # 0 to 1
    eta_host_s: float | None
    workers: Sequence[WorkerFrame]
    straggler: str = ""  # the sure verdict on a straggler, as a sentence


class Progress:
    """The changing display of a run; `close` restores the terminal.

    On a terminal it is a table of the workers, drawn at most every 0.25 s and removed at the end.
    In a pipe it is a line every 2 s. With `quiet` it is nothing. Times are those of the frames'
    `host_s`; no clock is read.
    """

    def __init__(
        self,
        console: Console,
        *,
        name: str,
        quiet: bool = False,
        target_accuracy: float | None = None,
    ):
        self._console = console
        self._name = name
        self._quiet = quiet
        self._target = target_accuracy
        self._due_s = 0.0
        self._live = None
        if console.is_interactive and not quiet:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    @property
    def has_table(self) -> bool:
        """True if it is a table, which shows the latest frame."""
        return self._live is not None

    def due(self, host_s: float) -> bool:
        """Return True if a frame of this time would be shown, so that no other is made."""
        return not self._quiet and host_s >= self._due_s

    def update(self, frame: Frame) -> None:
        """Show a frame, unless the last one is recent.

        In a pipe, no line is printed before the first commit, nor at the end, where the outcome
        follows.
        """
        if not self.due(frame.host_s):
            return
        line = not self._live and frame.commits > 0 and frame.progress != 1.0
        self._due_s = frame.host_s + (LINE_S if line else FRAME_S)
        if self._live:
            self._live.update(self._draw(frame), refresh=True)
        elif line:
            facts = describe_progress(frame) | self._describe_quality(frame)
            self.print_line("  ".join(f"{label} {value}" for label, value in facts.items()))

    def print_line(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if not self._quiet:
            print_line(self._console, text)

    def close(self) -> None:
        """Remove the table. May be called twice."""
        if self._live:
            self._live.stop()

    def _describe_quality(self, frame: Frame) -> dict[str, str]:
        """Describe scores, throughput and waiting of a frame as label and text."""
        facts = dict[str, str]()
        if frame.accuracy is not None:
            aim = f" of {percent(self._target)}" if self._target else ""
            facts["accuracy"] = percent(frame.accuracy) + aim
        if frame.metric is not None:
            facts[frame.metric[0]] = number(frame.metric[1])
        facts["loss"] = number(frame.loss if frame.steps else None)
        facts["samples/s"] = number(frame.samples_per_s)
        facts["waiting"] = percent(frame.wait_share)
        return facts

    def _draw(self, frame: Frame) -> Group:
        title = Text.assemble((self._name, "bold"), "  ", frame.stage, "   ")
        workers = frame.workers
        table = table_of(
            {
                "worker": [str(own.rank) for own in workers],
                "step": [number(own.step) for own in workers],
                "samples/s": [number(own.samples_per_s) for own in workers],
                "waiting": ["down" if own.down else percent(own.wait_share) for own in workers],
                "staleness": [number(own.staleness) for own in workers],
                "loss": [number(own.loss) for own in workers],
            }
        )
        parts: list[Any] = [
            title + fact_line(describe_progress(frame)),
            fact_line(self._describe_quality(frame)),
            table,
        ]
        if frame.straggler:
            parts.append(Text(frame.straggler, style="yellow"))
        if len(workers) > MAX_ROWS:
            parts.append(Text(f"and {len(workers) - MAX_ROWS} more workers", style="dim"))
        if frame.progress is not None:
            parts.append(ProgressBar(total=1.0, completed=min(1.0, frame.progress), width=60))
        return Group(*parts)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text as it is: wrapped on a terminal, and as one line in a pipe."""
    console.print(Text(text, style), soft_wrap=not console.is_terminal)


def describe_progress(frame: Frame) -> dict[str, str]:
    """Describe the times and steps of a frame as label and text."""
    facts = {"time": seconds(frame.time_s), "steps": number(frame.steps)}
    return facts | ({} if frame.eta_host_s is None else {"ETA": seconds(frame.eta_host_s)})


def fact_line(facts: Mapping[str, str]) -> Text:
    """Return facts in one line, their labels dimmed."""
    return Text("   ").join(
        Text.assemble((label, "dim"), " ", value) for label, value in facts.items()
    )


def table_of(
    columns: Mapping[str, Sequence[str]], words: Collection[str] = (), most: int = MAX_ROWS
) -> Table:
    """Return a table of the first `most` rows of these columns.

    Args: words has the titles of the columns of text, which are aligned to the left and may be
    wrapped; the cells of other columns are never cut.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in columns:
        justify = "left" if title in words else "right"
        header = Align(fill(title, TITLE), justify, vertical="bottom")
        table.add_column(header, justify=justify, no_wrap=title not in words)
    for row in islice(zip(*columns.values(), strict=True), most):
        table.add_row(*map(Text, row))
    return table


def drop_columns(
    columns: dict[str, Sequence[str]], least: Iterable[str], width: int, words: Collection[str] = ()
) -> list[str]:
    """Remove columns, least important first, until the rest fits, and return their titles.

    Args: columns that `least` lacks stay; words as in `table_of`.
    """

    def width_of(title: str) -> int:
        longest = max(map(len, (*fill(title, TITLE).split("\n"), *columns[title])))
        return 2 + (min(longest, NAME) if title in words else longest)

    absent = []
    for title in least:
        if title in columns and sum(map(width_of, columns)) > width:
            del columns[title]
            absent.append(title)
    return absent


def plain_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str],
    gap: int = 2,
    title: str | None = None,
) -> Table:
    """Return a table without lines.

    Args: left has the titles of the columns that are aligned to the left; gap is the number of
    characters between two columns.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_unwrapped(console: Console, *lines: str, style: str = "") -> None:
    """Print lines as they are: not wrapped, so that a command can be copied, and without markup."""
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def print_outcome(
    console: Console, summary: dict, run_dir: Path, shown: Mapping[str, str | None]
) -> None:
    """Print how the run ended: totals, a table of the workers, the run folder, and its copies.

    Args: summary is that of `summary.json`; values that a failed run does not have are shown as a
    dash. shown is the command or the address that shows a copy, by the tracker's title.
    """
    status, reason = summary["status"], summary.get("exit_reason")
    title = Text.assemble((summary.get("name") or "run", "bold"), " ")
    title.append(status, style=STYLE.get(status, "bold red"))
    title.append("" if reason in (None, status) else f": {reason}")
    console.print(title, soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    for label, value in describe_totals(summary).items():
        if value:
            grid.add_row(Text(label, style="dim"), Text(value))
    console.print(grid)
    idle = summary.get("stages_not_begun") or ()
    if len(summary.get("stages") or ()) + len(idle) > 1:
        # The blank line below it is that of the next table.
        console.print(Padding(stage_table(summary), (1, 0, 0, 1)))
    if idle:
        print_line(console, stages.explain_missing_stages(idle), style="yellow")
    if summary.get("workers"):
        console.print(worker_table(console, summary))
    for label, value in {"run folder": str(run_dir), **shown}.items():
        if value:  # not wrapped, so that it can be copied or clicked
            console.print(Text.assemble((f"{label:<10}", "dim"), "  ", value), soft_wrap=True)


def describe_totals(summary: Mapping[str, Any]) -> dict[str, str]:
    """Describe the totals of a run as label and text; "" where there is nothing to say."""
    final = summary.get("final") or {}
    rates = f"{number(summary.get('steps_per_s'))} steps/s, {number(summary.get('samples_per_s'))}"
    dropped = summary.get("dropped_steps")
    middle = f", {number(dropped)} dropped" if dropped else ""
    facts = {
        "time": describe_duration(summary),
        "steps": f"{number(summary.get('steps'))}{middle}, {rates} samples/s",
        "dropped": stages.explain_drops(summary),
        **(
            describe_score(summary, "accuracy", "test_accuracy", percent)
            or describe_score(summary, str(summary.get("metric")), "test_metric", number)
        ),
        "target": describe_target(summary),
        "loss": f"train {number(final.get('train_loss'))}, test {number(final.get('test_loss'))}",
        "waiting": describe_waiting(summary),
        "straggler": describe_straggler(summary.get("straggler")),
    }
    if failed := summary.get("failed_workers"):
        hidden = len(failed) - MAX_FAILED
        more = [f"and {hidden} more, in summary.json"] if hidden > 0 else []
        facts["failed"] = "; ".join([*map(describe_failure, failed[:MAX_FAILED]), *more])
        if (goodput := summary.get("goodput")) is not None:
            facts["goodput"] = f"{percent(goodput)} of the steps/s planned without failures"
    if (share := summary.get("comm_hidden_share")) is not None:
        facts["hidden"] = f"{percent(share)} of the collectives' time behind other work"
    facts["pace"] = describe_pace(summary.get("pace") or {})
    sent = f"{megabytes(summary.get('bytes_up'))} up, {megabytes(summary.get('bytes_down'))} down"
    facts["traffic"] = sent
    facts["messages"] = describe_messages(summary.get("compression") or {})
    measures = (summary.get("measures") or {}).items()
    facts["measures"] = ", ".join(f"{name} {number(found['last'])}" for name, found in measures)
    return facts


def describe_duration(summary: Mapping[str, Any]) -> str:
    """Describe the run's time on its own clock, and its time in all on this machine."""
    time_s, host_s = seconds(summary.get("time_s")), seconds(summary.get("host_s"))
    if summary.get("time_kind") == "virtual":
        return f"{time_s} of virtual time, computed in {host_s}"
    return f"{time_s} of training, {host_s} in all with start and evaluations"


def describe_score(
    summary: Mapping[str, Any], label: str, key: str, text: Callable[[float | None], str]
) -> dict[str, str]:
    """Describe the last and the best value of a score, if the run has it."""
    final, best = summary.get("final") or {}, summary.get("best") or {}
    if final.get(key) is None:
        return {}
    top = f", best {text(best.get(key))} after {seconds(best.get('time_s'))}" if best else ""
    return {label: text(final[key]) + top}


def describe_target(summary: Mapping[str, Any]) -> str:
    """Describe the targets of a run, and when it reached one; "" without a target."""
    accuracy, loss, metric = (
        summary.get(f"target_{what}") for what in ("accuracy", "loss", "metric")
    )
    aims = [percent(accuracy)] * (accuracy is not None)
    aims += [f"a loss of {number(loss)}"] * (loss is not None)
    aims += [f"{summary.get('metric')} {number(metric)}"] * (metric is not None)
    reached = summary.get("time_to_target_s")
    end = " not reached" if reached is None else f" reached after {seconds(reached)}"
    return " or ".join(aims) + end if aims else ""


def describe_waiting(summary: Mapping[str, Any]) -> str:
    """Describe how long the workers waited, and the largest lead of one."""
    training = stages.training_wait_share(summary)
    apart = "" if training is None else f"; without profiling {percent(training)}"
    lead = "" if summary.get("max_lead") is None else f", largest lead {summary['max_lead']}"
    return f"{percent(summary.get('wait_share'))} of the workers' time{apart}{lead}"


def describe_failure(failed: Mapping[str, Any]) -> str:
    """Describe a row of `failed_workers`: when and why a worker failed, and when it rejoined."""
    back = "" if failed["rejoined_s"] is None else f", rejoined at {seconds(failed['rejoined_s'])}"
    return f"worker {failed['worker']} at {seconds(failed['time_s'])} ({failed['reason']}){back}"


def describe_pace(stats: Mapping[str, Any]) -> str:
    """Describe how much longer than declared parts of a paced run took; "" if they kept pace."""
    if stats.get("slower_by", 0.0) <= SLOWER:
        return ""
    late = percent(stats["slower_by"])
    return f"{late} longer than declared: this machine is too slow for this cluster"


def describe_messages(stats: Mapping[str, Any]) -> str:
    """Describe the compression of the last messages that the workers reported."""
    names = [name for name in ("relative_error", "cosine") if stats.get(name) is not None]
    parts = [f"{number(stats['bits'])} bits per element"] if stats else []
    return ", ".join(parts + [f"{name.replace('_', ' ')} {number(stats[name])}" for name in names])


def worker_table(console: Console, summary: Mapping[str, Any]) -> Table:
    """Return a table of the workers' time, in the columns that fit the terminal."""
    workers = summary["workers"]
    time_s = summary.get("time_s") or 0.0

    def shares(spent_s: Sequence[float]) -> list[str]:
        """Format times as shares of the run, which lasts 0 s if it ends at once."""
        return [percent(own_s / time_s if time_s else None, 0) for own_s in spent_s]

    columns: dict[str, Sequence[str]] = {"worker": [str(rank) for rank in range(len(workers))]}
    columns["steps"] = [number(worker.get("steps")) for worker in workers]
    # Waiting during profiling has a column of its own.
    _, profiled = stages.measure_profiling(summary)
    for part in KINDS:
        spent_s = [worker.get(f"{part}_s") or 0.0 for worker in workers]
        if part == "wait" and profiled:
            spent_s = [max(0.0, own - other) for own, other in zip(spent_s, profiled, strict=True)]
        if any(worker.get(f"{part}_s") for worker in workers):
            columns[part] = shares(spent_s)
    if profiled:
        columns["profiling"] = shares(profiled)
    columns["staleness"] = [number(worker.get("staleness_mean")) for worker in workers]
    columns["max"] = [number(worker.get("staleness_max")) for worker in workers]
    columns["up"] = [megabytes(worker.get("bytes_up")) for worker in workers]
    absent = drop_columns(columns, LEAST_IMPORTANT, console.width)
    captions = [f"no room for {', '.join(absent)}; see summary.json"] * bool(absent)
    hidden = len(workers) - MAX_ROWS
    captions += [f"and {hidden} more workers, in summary.json"] * (hidden > 0)
    table = table_of(columns)
    table.caption = "\n".join(captions) or None
    return table


def stage_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the stages, without blank lines around it: their times, steps and waiting,
    and why they ended.
    """
    own = summary["stages"]
    reason = "ended because"
    columns = {
        "stage": [stage["name"] for stage in own],
        "from": [seconds(stage["start_s"]) for stage in own],
        "to": [seconds(stage["end_s"]) for stage in own],
        "steps": [number(stage["steps"]) for stage in own],
        "waiting": [percent(stage.get("wait_share")) for stage in own],
        reason: [stages.explain_end(stage) for stage in own],
    }
    table = table_of(columns, words=(reason,))
    table.show_edge = False
    return table


def number(value: float | None) -> str:
    """Format whole numbers in full, others with three digits: 12,345 and 0.0123."""
    if value is None:
        return "-"
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.3g}"


def milliseconds(cost: float) -> str:
    """Format seconds in ms; values below the resolution of clocks become "<0.001"."""
    return "<0.001" if 0 < cost < 1e-6 else number(1e3 * cost)


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share as 97.3 %."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Format a duration as 0.25 s, 12.3 s, 2 min 05 s or 3 h 07 min."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours = f"{minutes // 60} h {minutes % 60:02} min"
    return hours if minutes >= 60 else f"{minutes} min {rest:02} s"


def megabytes(size: float | None) -> str:
    """Format a number of bytes in MB of 10^6 bytes."""
    if size is None:
        return "-"
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e6:,.0f} MB"

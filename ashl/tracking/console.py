"""Show a run to the user: a live table on a terminal, lines in a pipe, the outcome at the end.

Only this module prints, and only in the process that leads the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ashl.config.override import command_text
from ashl.tracking import stages

FRAME_S = 0.25  # seconds between two drawings of the table; 16 rows take 6 ms
LINE_S = 2.0  # seconds between two lines in a pipe
MAX_ROWS = 16
MAX_FAILED = 4  # failed workers that the outcome lists one by one
# The outcome reports a machine that was slower than declared by more than this share.
SLOWER = 0.02
# style of each status; all others are red
STYLE = {"finished": "bold green", "interrupted": "bold yellow"}
# Columns of the outcome that a narrow terminal leaves out, in this order.
LEAST_IMPORTANT = ("max", "staleness", "compress", "down", "pull", "push")
# Parts of a worker's time, named as in summary.json.
SHARES = ("compute", "compress", "push", "pull", "wait", "down")


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


class Progress:
    """The changing display of a run, as a context manager that always restores the terminal.

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

    def due(self, host_s: float) -> bool:
        """Return True if an update at this time would be shown, so that no frame is made for
        nothing.
        """
        return not self._quiet and host_s >= self._due_s

    def update(self, frame: Frame) -> None:
        """Show a frame, unless the last one is recent.

        In a pipe, no line is printed before the first commit, nor at the end, where the outcome
        follows.
        """
        if not self.due(frame.host_s):
            return
        if not self._live and (frame.commits == 0 or frame.progress == 1.0):
            self._due_s = frame.host_s + FRAME_S
            return
        self._due_s = frame.host_s + (FRAME_S if self._live else LINE_S)
        if self._live:
            self._live.update(self._drawn(frame), refresh=True)
        else:
            facts = [*_clock(frame), *self._quality(frame)]
            line = "  ".join(f"{label} {value}" for label, value in facts)
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the table. May be called twice."""
        if self._live:
            self._live.stop()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _quality(self, frame: Frame) -> Iterator[tuple[str, str]]:
        if frame.accuracy is not None:
            yield (
                "accuracy",
                percent(frame.accuracy) + (f" of {percent(self._target)}" if self._target else ""),
            )
        if frame.metric is not None:
            yield frame.metric[0], number(frame.metric[1])
        yield "loss", number(frame.loss if frame.steps else None)
        yield "samples/s", number(frame.samples_per_s)
        yield "waiting", percent(frame.wait_share)

    def _drawn(self, frame: Frame) -> Group:
        title = Text.assemble((self._name, "bold"), "  ", frame.stage)
        table = _table("worker", "step", "samples/s", "waiting", "staleness", "loss")
        for rank, step, rate, waiting, staleness, loss, down in frame.workers[:MAX_ROWS]:
            shown = [
                number(rate),
                "down" if down else percent(waiting),
                number(staleness),
                number(loss),
            ]
            table.add_row(str(rank), number(step), *shown)
        clock, quality = _texts(_clock(frame)), _texts(self._quality(frame))
        parts = [Text("   ").join([title, *clock]), Text("   ").join(quality), table]
        if len(frame.workers) > MAX_ROWS:
            parts.append(Text(f"and {len(frame.workers) - MAX_ROWS} more workers", style="dim"))
        if frame.progress is not None:
            parts.append(ProgressBar(total=1.0, completed=min(1.0, frame.progress), width=60))
        return Group(*parts)


def outcome(
    console: Console, summary: dict, run_dir: Path, shown: Mapping[str, str | None]
) -> None:
    """Print how the run ended: totals, a table of the workers, the run folder, and its copies.

    Args: summary is that of `summary.json`; values that a failed run does not have are shown as a
    dash. shown is the command or the address that shows a copy, by the tracker's title.
    """
    status = Text(summary["status"], style=STYLE.get(summary["status"], "bold red"))
    reason = (
        f": {summary['exit_reason']}"
        if summary.get("exit_reason") not in (None, summary["status"])
        else ""
    )
    console.print(
        Text.assemble((summary.get("name") or "run", "bold"), " ", status, reason), soft_wrap=True
    )
    grid = Table.grid(padding=(0, 2))
    for label, value in _totals(summary):
        grid.add_row(Text(label, style="dim"), Text(value))
    console.print(grid)
    if len(summary.get("stages") or ()) + len(summary.get("stages_not_begun") or ()) > 1:
        console.print(_stages(summary))
    if idle := summary.get("stages_not_begun"):
        console.print(Text(stages.never_began(idle), style="yellow"), soft_wrap=True)
    if summary.get("workers"):
        console.print(_workers(summary, console.width))
    report = command_text("compare", run_dir) if summary["status"] == "finished" else None
    for label, value in {"run folder": str(run_dir), "report": report, **shown}.items():
        if value:  # not wrapped, so that it can be copied or clicked
            console.print(Text.assemble((f"{label:<10}", "dim"), "  ", value), soft_wrap=True)


def _totals(summary: dict) -> Iterator[tuple[str, str]]:
    """Yield the totals of a run as label and text."""
    yield "time", duration(summary)
    yield from _steps(summary)
    yield from _scores(summary)
    yield from _costs(summary)
    yield from _measurements(summary)


def duration(summary: Mapping[str, Any]) -> str:
    """Return the run's time on its own clock, and its time in all on this machine."""
    time_s, host_s = seconds(summary.get("time_s")), seconds(summary.get("host_s"))
    if summary.get("time_kind") == "virtual":
        return f"{time_s} of virtual time, computed in {host_s}"
    return f"{time_s} of training, {host_s} in all with start and evaluations"


def _steps(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    dropped = (
        f", {number(summary['dropped_steps'])} dropped" if summary.get("dropped_steps") else ""
    )
    why = stages.why_dropped(summary)
    rates = (
        f"{number(summary.get('steps_per_s'))} steps/s, {number(summary.get('samples_per_s'))}"
        " samples/s"
    )
    yield "steps", f"{number(summary.get('steps'))}{dropped}, {rates}"
    if why:
        yield "dropped", why


def _scores(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    final, best = summary.get("final") or {}, summary.get("best") or {}
    if final.get("test_accuracy") is not None:
        top = (
            f", best {percent(best.get('test_accuracy'))} after {seconds(best.get('time_s'))}"
            if best
            else ""
        )
        yield "accuracy", percent(final["test_accuracy"]) + top
    elif final.get("test_metric") is not None:
        top = (
            f", best {number(best.get('test_metric'))} after {seconds(best.get('time_s'))}"
            if best
            else ""
        )
        yield str(summary["metric"]), number(final["test_metric"]) + top
    if aims := _aims(summary):
        reached = summary.get("time_to_target_s")
        yield (
            "target",
            aims + (" not reached" if reached is None else f" reached after {seconds(reached)}"),
        )
    yield "loss", f"train {number(final.get('train_loss'))}, test {number(final.get('test_loss'))}"


def _costs(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lead = "" if summary.get("max_lead") is None else f", largest lead {summary['max_lead']}"
    waited, training = percent(summary.get("wait_share")), stages.training_wait_share(summary)
    apart = "" if training is None else f"; without profiling {percent(training)}"
    yield "waiting", f"{waited} of the workers' time{apart}{lead}"
    if failed := summary.get("failed_workers"):
        more = (
            f"; and {len(failed) - MAX_FAILED} more, in summary.json"
            if len(failed) > MAX_FAILED
            else ""
        )
        yield "failed", "; ".join(map(_failure, failed[:MAX_FAILED])) + more
        if (goodput := summary.get("goodput")) is not None:
            yield "goodput", f"{percent(goodput)} of the steps/s planned without failures"
    if (hidden := summary.get("comm_hidden_share")) is not None:
        yield "hidden", f"{percent(hidden)} of the collectives' time behind other work"
    pace = summary.get("pace") or {}
    if pace.get("slower_by", 0.0) > SLOWER:
        parts = [(kind, pace[f"{kind}_slower_by"]) for kind in ("steps", "transfers", "encodings")]
        late = ", ".join(f"{kind} {percent(slower)}" for kind, slower in parts if slower)
        yield "pace", f"{late} longer than declared: this machine is too slow for this cluster"
    yield (
        "traffic",
        f"{megabytes(summary.get('bytes_up'))} up, {megabytes(summary.get('bytes_down'))} down",
    )


def _measurements(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if stats := summary.get("compression"):  # of the last messages that the workers reported
        parts = [f"{number(stats['bits'])} bits per element"]
        parts += [
            f"{name.replace('_', ' ')} {number(stats[name])}"
            for name in ("relative_error", "cosine")
            if stats.get(name) is not None
        ]
        yield "messages", ", ".join(parts)
    if measures := summary.get("measures"):
        yield (
            "measures",
            ", ".join(f"{name} {number(found['last'])}" for name, found in measures.items()),
        )


def _aims(summary: Mapping[str, Any]) -> str:
    """Return the targets of a run in words; "" without one."""
    accuracy, loss, metric = (
        summary.get(f"target_{what}") for what in ("accuracy", "loss", "metric")
    )
    return " or ".join(
        [percent(accuracy)] * (accuracy is not None)
        + [f"a loss of {number(loss)}"] * (loss is not None)
        + [f"{summary.get('metric')} {number(metric)}"] * (metric is not None)
    )


def _failure(failed: dict) -> str:
    back = "" if failed["rejoined_s"] is None else f", rejoined at {seconds(failed['rejoined_s'])}"
    return f"worker {failed['worker']} at {seconds(failed['time_s'])} ({failed['reason']}){back}"


def _workers(summary: dict, width: int) -> Table:
    workers = summary.get("workers") or []
    time_s = summary.get("time_s") or 0.0
    parts = [part for part in SHARES if any(worker.get(f"{part}_s") for worker in workers)]
    _, profiled = stages.profiling(summary)  # waiting during profiling has a column of its own
    titles = ["worker", "steps", *parts, *["profiling"] * bool(profiled), "staleness", "max", "up"]
    rows = []
    for rank, worker in enumerate(workers[:MAX_ROWS]):
        spent = {part: worker.get(f"{part}_s") or 0.0 for part in parts}
        if profiled:
            spent |= {
                "wait": max(0.0, worker["wait_s"] - profiled[rank]),
                "profiling": profiled[rank],
            }
        shares = [percent(own_s / time_s if time_s else None, 0) for own_s in spent.values()]
        staleness = [number(worker.get(key)) for key in ("staleness_mean", "staleness_max")]
        up = megabytes(worker.get("bytes_up"))
        rows.append([str(rank), number(worker.get("steps")), *shares, *staleness, up])
    absent = columns_without_room(titles, rows, width)
    shown = [title not in absent for title in titles]
    table = _table(*compress(titles, shown))
    for row in rows:
        table.add_row(*compress(row, shown))
    captions = [f"no room for {', '.join(absent)}; see summary.json"] * bool(absent)
    captions += [f"and {len(workers) - MAX_ROWS} more workers, in summary.json"] * (
        len(workers) > MAX_ROWS
    )
    table.caption = "\n".join(captions) or None
    return table


def columns_without_room(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[str]:
    """Return the titles of columns that do not fit into `width` characters, the least important
    first.
    """
    widths = {
        title: 2 + max(map(len, cells)) for title, *cells in zip(titles, titles, *rows, strict=True)
    }
    absent = []
    for title in LEAST_IMPORTANT:
        if sum(widths.values()) <= width:
            break
        if widths.pop(title, None):
            absent.append(title)
    return absent


def _stages(summary: dict) -> Table:
    table = _table("stage", "from", "to", "steps", "waiting")
    table.add_column("ended because")
    for stage in summary["stages"]:
        times = [seconds(stage["start_s"]), seconds(stage["end_s"])]
        shares = [number(stage["steps"]), percent(stage.get("wait_share"))]
        table.add_row(stage["name"], *times, *shares, stages.why_ended(stage))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _clock(frame: Frame) -> Iterator[tuple[str, str]]:
    yield "time", seconds(frame.time_s)
    yield "steps", number(frame.steps)
    if frame.eta_host_s is not None:
        yield "ETA", seconds(frame.eta_host_s)


def _texts(facts: Iterator[tuple[str, str]]) -> list[Text]:
    return [Text.assemble((label, "dim"), " ", value) for label, value in facts]


def number(value: float | None) -> str:
    """Format whole numbers in full, others with three digits: 12,345 and 0.0123."""
    if value is None:
        return "-"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
    return (
        f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    )


def megabytes(size: float | None) -> str:
    """Format a number of bytes in MB of 10^6 bytes."""
    return (
        "-" if size is None else f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e6:,.0f} MB"
    )

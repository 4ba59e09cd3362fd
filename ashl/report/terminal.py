"""Print the leaderboard on the terminal."""

import math
from collections.abc import Callable, Sequence
from textwrap import fill

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.phrases import answer, number_of
from ashl.report.records import LeftOut
from ashl.tracking.console import number, percent

MAX_NAMED = 10  # runs that ended badly and are listed

TITLE, NAME = 14, 24  # characters: of a line of a title; of a name before it is wrapped
# Columns that are dropped first on a narrow terminal, in this order.
RARE = ("consensus distance", "best", "loss", "between", "MB down", "steps/s", "MB up")
# Columns that are dropped last, after those that the runs measured themselves.
USUAL = ("accuracy", "hidden", "goodput", "waiting", "reached", "seeds", "against")

Column = tuple[str, Callable[[Row], str]]


def show(
    console: Console, board: Leaderboard, *, rows: Sequence[Row] | None = None, top: int = 20
) -> None:
    """Print the answer in words, the leaderboard and the runs that ended badly.

    Args: rows is another order than the board's own; top is the number of rows printed.
    """
    answered = answer(board)
    console.print(Text(answered.headline, style="bold"))
    for sentence in answered.sentences:
        console.print(Text(sentence))
    shown = board.rows if rows is None else rows
    columns = [
        column
        for column in columns_of(board)
        if any(column[1](row) not in ("-", "") for row in shown)
    ]
    columns, absent = fitting(
        columns, shown[:top], console.width, [title for title, _ in measured(board)]
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, _ in columns:
        words = title in ("setting", "where")
        table.add_column(
            fill(title, TITLE),
            justify="left" if words else "right",
            no_wrap=not words,
            vertical="bottom",
        )
    for row in shown[:top]:
        table.add_row(
            *(Text(cell(row)) for _, cell in columns),
            style="bold" if board.rank(row) == "1" else "",
        )
    if board.common:
        console.print(Text(f"All: {board.common}", style="dim"))
    console.print(table)
    if absent:
        console.print(Text(f"no room for {', '.join(absent)}; the report has them", style="dim"))
    if len(shown) > top:
        console.print(Text(f"and {len(shown) - top} more settings; --top shows them", style="dim"))
    console.print(Text(method(board), style="dim"))
    _list(console, "ended badly", board.ended_badly)


def fitting(
    columns: Sequence[Column], rows: Sequence[Row], width: int, measures: Sequence[str]
) -> tuple[list[Column], list[str]]:
    """Return the columns that fit into the width, and the titles of the dropped ones, least
    needed first.
    """
    wide: dict[str, int] = {}
    for title, cell in columns:
        longest = max(map(len, (*fill(title, TITLE).split("\n"), *map(cell, rows))))
        wide[title] = 2 + (min(longest, NAME) if title in ("setting", "where") else longest)
    absent: list[str] = []
    for title in (*RARE, *measures, *USUAL):
        if sum(wide.values()) <= width:
            break
        if wide.pop(title, None):
            absent.append(title)
    return [column for column in columns if column[0] in wide], absent


def columns_of(board: Leaderboard) -> list[Column]:
    measure = board.measure
    bases = {row.environment: row for row in board.rows if row.is_baseline}

    def around(row: Row) -> str:
        if row.spread.count == 1 or row.spread.low == row.spread.high:
            return ""
        low, high = measure.text(row.spread.low), measure.text(row.spread.high)
        value, _, unit = low.partition(" ")
        return (  # the unit is printed once
            f"{value if high.partition(' ')[2] == unit else low} .. {high}"
        )

    def against(row: Row) -> str:
        if row.is_baseline:
            return "baseline"
        found, base = row.against, bases.get(row.environment)
        better = None if base is None else measure.gain(row.spread.middle, base.spread.middle)
        if better is None:
            return "-"
        unit = "x" if measure.ratio else ""
        if found is None or found.middle is None or found.low is None or found.high is None:
            return number_of(better, measure.ratio) + unit
        # The interval is that of the mean over paired seeds, which may exclude the gain by medians.
        mean, low, high = (
            number_of(value, found.ratio) for value in (found.middle, found.low, found.high)
        )
        return f"{mean}{unit} ({low} .. {high})"

    def reached(row: Row) -> str:
        return f"{row.reached} of {len(row.values)}" if measure.is_time else f"{len(row.values)}"

    return [
        ("", board.rank),
        ("setting", lambda row: row.label),
        ("where", lambda row: row.environment),
        (measure.title, lambda row: measure.text(row.spread.middle, row.bound)),
        ("between", around),
        ("reached" if measure.is_time else "seeds", reached),
        ("against", against),
        ("pace lost", lambda row: "" if row.late is None else percent(row.late, 0)),
        ("accuracy", accuracy),
        *own_metrics(board),
        ("best", lambda row: percent(row.best)),
        ("loss", lambda row: number(row.loss) if row.accuracy is None else "-"),
        ("steps/s", lambda row: number(row.steps_per_s)),
        ("waiting", lambda row: percent(row.wait_share)),
        ("hidden", lambda row: percent(row.hidden)),
        ("goodput", lambda row: percent(row.goodput)),
        ("MB up", lambda row: number(row.mb_up)),
        ("MB down", lambda row: number(row.mb_down)),
        ("consensus distance", lambda row: number(row.consensus)),
        *measured(board),
    ]


def measured(board: Leaderboard) -> list[Column]:
    """Return a column for each measure that the runs recorded themselves (`ctx.measure`)."""
    names = dict.fromkeys(name for row in board.rows for name in row.measures)
    return [
        (f"measure {name}", lambda row, name=name: number(row.measures.get(name))) for name in names
    ]


def own_metrics(board: Leaderboard) -> list[Column]:
    """Return a column for each metric of tasks without accuracy: final mean and deviation over
    seeds.
    """

    def cell(row: Row, name: str) -> str:
        if row.metric is None or row.metric[0] != name:
            return "-"
        _, mean, deviation = row.metric
        return number(mean) + (f" ± {number(deviation)}" if len(row.values) > 1 else "")

    names = dict.fromkeys(row.metric[0] for row in board.rows if row.metric)
    return [(name, lambda row, name=name: cell(row, name)) for name in names]


def accuracy(row: Row) -> str:
    """Return the final accuracy: mean and standard deviation over the seeds."""
    if row.accuracy is None:
        return "-"
    mean, deviation = row.accuracy
    return f"{100 * mean:.1f} ± {100 * deviation:.1f} %" if len(row.values) > 1 else percent(mean)


def method(board: Leaderboard) -> str:
    """Return sentences that explain the columns."""
    covered = {row.spread.count: row.spread.coverage for row in board.rows if row.spread.count > 1}
    parts = [f"{percent(coverage, 0)} for {count}" for count, coverage in sorted(covered.items())]
    sentences = (
        [f"Median over seeds; 'between' covers it with probability {', '.join(parts)} seeds."]
        if parts
        else []
    )
    if any(row.against and row.against.low is not None for row in board.rows):
        sentences.append(
            "'Against' the baseline: the mean over paired seeds, with its 95 % interval in brackets"
            " (Student's t); without brackets, by the medians."
        )
    if any(math.isinf(row.spread.high) for row in board.rows):
        sentences.append("A run that did not reach the target counts as later than all that did.")
    return " ".join(sentences)


def _list(console: Console, title: str, found: Sequence[LeftOut]) -> None:
    for out in found[:MAX_NAMED]:
        console.print(Text(f"{title}: {out.name} {out.reason}", style="yellow"), soft_wrap=True)
    if len(found) > MAX_NAMED:
        console.print(Text(f"and {len(found) - MAX_NAMED} more", style="yellow"))

"""Make tables of a leaderboard for the terminal and as JSON."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ashl.report.answer import answer_of, gain_number
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import Measure
from ashl.tracking.console import drop_columns, number, percent, table_of

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_NAMED = 10  # runs that ended badly and are listed
MAX_ROWS = 200  # rows of a file
WORDS = ("setting", "where")  # columns of text, which are aligned to the left
# Columns that are dropped first on a narrow terminal, in this order.
RARE = ("consensus distance", "best", "loss", "MB down", "steps/s", "MB up")
# Columns that are dropped last, after those that the runs measured themselves.
USUAL = ("accuracy", "hidden", "goodput", "waiting", "between", "reached", "seeds", "against")


def interval_cell(row: Row, measure: Measure) -> str:
    """Return the interval around the median, with its unit once."""
    if row.spread.count == 1 or row.spread.low == row.spread.high:
        return ""
    low, high = measure.text(row.spread.low), measure.text(row.spread.high)
    value, _, unit = low.partition(" ")
    return f"{value if high.partition(' ')[2] == unit else low} .. {high}"


def effect_cell(row: Row, base: Row | None, measure: Measure) -> str:
    """Return the effect relative to the baseline, with its interval if there is one."""
    if row.is_baseline:
        return "baseline"
    found = row.against
    better = None if base is None else measure.gain(row.spread.middle, base.spread.middle)
    if better is None:
        return "-"
    unit = "x" if measure.ratio else ""
    if found is None or found.middle is None or found.low is None or found.high is None:
        return gain_number(better, measure.ratio) + unit
    # The interval is that of the mean over paired seeds, which may exclude the gain by medians.
    ends = [gain_number(value, found.ratio) for value in (found.low, found.high)]
    interval = " .. ".join(ends) if ends[0] != ends[1] else "all equal"
    return f"{gain_number(found.middle, found.ratio)}{unit} ({interval})"


def leaderboard_table(board: Leaderboard) -> "DataFrame":
    """Return the leaderboard as text: a row for each setting, without columns that are empty in all
    of them.
    """
    from pandas import DataFrame

    runs = [run for row in board.rows for run in row.runs]
    metrics = [*dict.fromkeys(run.metric[0] for run in runs if run.metric)]
    bases = {row.environment: row for row in board.rows if row.is_baseline}
    rows = [cells(board, row, bases.get(row.environment), metrics) for row in board.rows]
    found = DataFrame(rows).fillna("-")
    return found.loc[:, ~found.isin(["-", ""]).all()]


def cells(board: Leaderboard, row: Row, base: Row | None, metrics: Sequence[str]) -> dict[str, str]:
    """Return the texts of a setting by title; "-" and "" are empty.

    Args: base is the baseline of its environment; metrics are the tasks' own metrics of all rows.
    """
    measure, means = board.measure, row.means

    def mean(key: str, scale: float = 1) -> str:
        return number(scale * means[key]) if key in means else "-"

    reached = f"{row.num_reached} of " * measure.is_time + str(len(row.values))
    accuracy = with_deviation(row, "final.test_accuracy", lambda value: f"{100 * value:.1f}", " %")
    own = {run.metric and run.metric[0] for run in row.runs}
    failed = any(run.summary.get("failed_workers") for run in row.runs)
    found = {
        "": board.rank(row),
        "setting": row.label,
        "where": row.environment,
        measure.title: measure.text(row.spread.middle, row.spread.bound),
        "between": interval_cell(row, measure),
        "reached" if measure.is_time else "seeds": reached,
        "against": effect_cell(row, base, measure),
        "pace lost": "" if row.pace_excess is None else percent(row.pace_excess, 0),
        "accuracy": accuracy,
    }
    for name in metrics:
        found[name] = with_deviation(row, "final.test_metric", number) if own == {name} else "-"
    found |= {
        "best": percent(row.best_accuracy),
        "loss": mean("final.train_loss") if accuracy == "-" else "-",
        "steps/s": mean("steps_per_s"),
        "waiting": percent(means.get("wait_share")),
        "hidden": percent(means.get("comm_hidden_share")),
        "goodput": percent(means.get("goodput")) if failed else "-",
        "MB up": mean("bytes_up", 1e-6),
        "MB down": mean("bytes_down", 1e-6),
        "consensus distance": mean("final.consensus_distance"),
    }
    measured = [key for key in means if key.startswith("measures.") and key.endswith(".last")]
    return found | {f"measure {key[9:-5]}": mean(key) for key in measured}


def number_table(board: Leaderboard) -> "DataFrame":
    """Return the leaderboard as numbers: a row for each setting, with units in the titles.

    A setting's ratio is relative to the best of its environment; settings that are compared by
    accuracy have a difference in points instead. A median that is not known is missing, and `low`
    is then its lower bound.
    """
    from pandas import DataFrame

    measure = board.measure
    scale, unit = (1, measure.unit) if measure.ratio else (100, "%")
    title = f"{measure.title}, {unit}" if unit else measure.title
    behind = "ratio to the best" if measure.ratio else "points behind the best"
    rows = []
    for part in board.environments:
        best = part.rows[0].spread.middle
        for row in part.rows:
            found, gain = row.spread, measure.gain(best, row.spread.middle)
            cells: dict[str, Any] = {
                "setting": row.label,
                "where": row.environment or None,
                "runs": len(row.values),
                "reached": row.num_reached if measure.is_time else None,
                title: scale * found.middle,
                "low": scale * min(found.low, found.bound),
                "high": scale * found.high,
                behind: None if gain is None else scale * gain,
                "accuracy, %": 100 * row.means.get("final.test_accuracy", math.nan),
            }
            if metric := row.runs[0].metric:
                cells[metric[0]] = row.means.get("final.test_metric")
            rows.append(cells)
    table = DataFrame(rows).replace([math.inf, -math.inf], math.nan)
    # The measure stays where no setting has it: it names what `low` bounds.
    return table.loc[:, table.notna().any() | (table.columns == title)]


def table_file(board: Leaderboard, suffix: str) -> str:
    """Return the leaderboard as the text of a file: .csv, .md or .tex (with booktabs)."""
    table = number_table(board)
    if suffix == ".csv":
        return table.to_csv(index=False, lineterminator="\n")
    texts = table.map(lambda value: number(value) if isinstance(value, float) else value)
    texts = texts.astype(str).where(table.notna(), "-")
    sides = ["l" if title in WORDS else "r" for title in texts]
    if suffix == ".tex":
        return texts.to_latex(index=False, escape=True, column_format="".join(sides))
    rules = [":--" if side == "l" else "--:" for side in sides]
    lines = [[*texts], rules, *texts.to_numpy().tolist()]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_deviation(row: Row, key: str, show: Callable[[float], str], unit: str = "") -> str:
    """Return mean and standard deviation of a value over the seeds."""
    if key not in row.means:
        return "-"
    deviation = f" ± {show(row.deviations[key])}" if len(row.values) > 1 else ""
    return show(row.means[key]) + deviation + unit


def explain_columns(board: Leaderboard, shown: Collection[str]) -> str:
    """Return sentences that explain the columns that are shown."""
    covered = {row.spread.count: row.spread.coverage for row in board.rows if row.spread.count > 1}
    parts = [f"{percent(coverage, 0)} for {count}" for count, coverage in sorted(covered.items())]
    sentences = []
    if any(interval_cell(row, board.measure) for row in board.rows):
        between = f"; 'between' covers it with probability {', '.join(parts)} seeds"
        sentences.append(f"Median over seeds{between if 'between' in shown else ''}.")
    if "against" in shown and any(
        row.against and row.against.low is not None for row in board.rows
    ):
        sentences.append(
            "'Against' the baseline: the mean over paired seeds, with its 95 % interval in brackets"
            " (Student's t); without brackets, by the medians."
        )
    if board.measure.is_time and any(row.num_reached < len(row.values) for row in board.rows):
        sentences.append(
            "A run that did not reach the target counts as censored at its end: medians are Kaplan"
            " and Meier's, and '>' is a lower bound."
        )
    return " ".join(sentences)


def print_leaderboard(console: Console, board: Leaderboard, *, top: int = 20) -> None:
    """Print the answer in words, the leaderboard and the runs that ended badly.

    Args: top is the number of rows printed; with several environments each has an equal part of
    them.
    """
    answered = answer_of(board)
    console.print(Text(answered.headline, style="bold"))
    for sentence in answered.sentences:
        console.print(Text(sentence))
    if board.common:
        console.print(Text(f"All: {board.common}", style="dim"))
    parts = board.environments
    each = top if len(board.rows) <= top else max(1, top // max(1, len(parts)))
    shown = [row for part in parts for row in part.rows[:each]][:top]
    more = len(board.rows) - len(shown)
    texts = leaderboard_table(board).iloc[[board.rows.index(row) for row in shown]]
    columns = texts.to_dict("list")
    measured = [title for title in columns if title.startswith("measure ")]
    absent = drop_columns(columns, (*RARE, *measured, *USUAL), console.width, WORDS)
    drawn = table_of(columns, WORDS, top)
    for line, place in zip(drawn.rows, columns[""], strict=True):
        line.style = "bold" if place == "1" else ""
    console.print(drawn)
    notes = [
        f"no room for {', '.join(absent)}; the report has them" if absent else "",
        f"and {more} more {'setting' if more == 1 else 'settings'}; --top shows more rows"
        if more > 0
        else "",
        explain_columns(board, columns),
    ]
    for note in filter(None, notes):
        console.print(Text(note, style="dim"))
    for out in board.study.ended_badly[:MAX_NAMED]:
        console.print(Text(f"ended badly: {out.name} {out.reason}", "yellow"), soft_wrap=True)
    if len(board.study.ended_badly) > MAX_NAMED:
        others = f"and {len(board.study.ended_badly) - MAX_NAMED} more"
        console.print(Text(others, "yellow"))


def document(board: Leaderboard) -> dict[str, Any]:
    """Return the answer and the leaderboard as plain values, for programs."""
    answered = answer_of(board)
    return {
        # answer in words: its first sentence, and the others
        "headline": answered.headline,
        "sentences": answered.sentences,
        # measure by which the settings are ranked
        "measure": board.measure.title,
        # settings that all runs share, in words
        "common": board.common,
        # a row for each setting, see below
        "settings": [
            row_document(board, part, row) for part in board.environments for row in part.rows
        ],
        # runs that failed, diverged or were interrupted: `name`, `reason`
        "ended_badly": [asdict(out) for out in board.study.ended_badly],
        # folders that could not be read: `name`, `reason`
        "left_out": [asdict(out) for out in board.left_out],
        # runs that a race stopped: `name`, `reason`
        "dropped": [asdict(out) for out in board.study.dropped],
    }


def row_document(board: Leaderboard, part: Leaderboard, row: Row) -> dict[str, Any]:
    """Return a row of the leaderboard as plain values.

    Args: part is the leaderboard of its environment.
    """
    behind = {other: found for other, found, _ in part.comparisons}.get(row)
    return {
        # rank as text; "-" if the setting is not ranked
        "rank": board.rank(row),
        # name; with `environment`, the cluster, data set and model if they vary
        "setting": row.label,
        "environment": row.environment,
        # values of the keys that vary
        "axes": row.setting.axes,
        # run folders
        "folders": [str(run.folder) for run in row.runs],
        # number of runs, and how many of them reached the target (without one: have a value)
        "seeds": len(row.values),
        "reached": row.num_reached,
        # `middle` (median), its interval `low` to `high`, which covers the true median with
        # probability `coverage`, `count` (runs), and `bound` (lower bound of a median that is null)
        "value": asdict(row.spread),
        # true for the setting with which the others are compared
        "is_baseline": row.is_baseline,
        # effect relative to the baseline, see below; null for it and without a common seed
        "against_baseline": None if row.against is None else asdict(row.against),
        # effect of the first setting relative to this one, see below; null for the first, without
        # a rank and without a common seed
        "first_against_it": None if behind is None else asdict(behind),
        # true if the setting may be as good as the first, at a level of 5 % by Holm's correction. A
        # difference below the time between this setting's evaluation at the target and the one
        # before counts as none
        "indistinguishable_from_first": row in part.indistinguishable_rows,
        # means and standard deviations over seeds of the values of `summary.json`
        "means": row.means,
        "deviations": row.deviations,
    }

"""Put a leaderboard into sentences: winner, lead, certainty, runner-up, and what would give
certainty.
"""

import math
from dataclasses import dataclass, replace
from statistics import median

from ashl.report.crossover import statement, terrain
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import Measure
from ashl.report.stats import LEVEL, MAX_SEEDS, Effect, Spread, seeds_needed
from ashl.tracking.console import percent, seconds

MAX_ENVIRONMENTS = 8


@dataclass(frozen=True)
class Answer:
    """A headline, and the sentences that qualify it."""

    headline: str
    sentences: tuple[str, ...]


def answer(board: Leaderboard) -> Answer:
    """Return the answer of a leaderboard with its uncertainty; of several environments, one for
    each.
    """
    if ground := terrain(board):
        first, *rest = statement(ground)
        return Answer(first, (*rest, *board.notes))
    parts = board.environments
    if len(parts) == 1:
        return _answer(board)
    answers = {
        part.rows[0].environment: _answer(replace(part, notes=()))
        for part in parts[:MAX_ENVIRONMENTS]
    }
    leaders = dict.fromkeys(part.rows[0].label for part in parts)
    headline = f"Over {len(parts)} environments, first is " + " or ".join(leaders) + "."
    more = (
        [f"{len(parts) - len(answers)} more environments are in the table."]
        if len(parts) > len(answers)
        else []
    )
    return Answer(
        headline,
        (*(f"{name}: {one.headline}" for name, one in answers.items()), *more, *board.notes),
    )


def _answer(board: Leaderboard) -> Answer:
    board = replace(board, rows=board.ranked)
    measure, first = board.measure, board.rows[0]
    if len(board.rows) == 1 and board.dropped:
        return Answer(
            f"{first.label} is the only setting that the race has not dropped:"
            f" {measure.title} {_of(first, measure)}.",
            board.notes,
        )
    if len(board.rows) == 1:
        text = f"There is one setting, {first.label}: {measure.title} {_of(first, measure)}."
        return Answer(text, (*board.notes, "Name further runs for a comparison."))
    if not math.isfinite(first.spread.middle):
        return Answer(
            f"No setting has an answer: in none did most seeds reach the target ({measure.title}).",
            _nobody(board),
        )
    headline = standing(board, "leads" if unsure(board) else "is first")
    return Answer(
        headline, tuple(filter(None, (_second(board), unsure(board), _needed(board), *board.notes)))
    )


def standing(board: Leaderboard, place: str = "") -> str:
    """Return the result of the first setting and its lead over the baseline."""
    first, measure = board.ranked[0], board.measure
    named = f"{first.label} {place}" if place else first.label
    return f"{named}: {measure.title} {_of(first, measure)}{_against(board, first)}."


def _of(row: Row, measure: Measure) -> str:
    return f"{measure.text(row.spread.middle, row.bound)} ({interval(row.spread, measure)})"


def interval(found: Spread, measure: Measure) -> str:
    """Return the interval around a median with its right name: few seeds have a range, no 95 %
    interval.
    """
    if found.count == 1:
        return "one seed"
    name = f"median of {found.count} seeds, " + (
        f"{100 * LEVEL:.0f} % interval" if found.coverage >= LEVEL else "range"
    )
    low, high = measure.text(found.low), measure.text(found.high)
    return f"{name} {low} to {high}" if low != high else f"median of {found.count} seeds, all equal"


def _against(board: Leaderboard, row: Row) -> str:
    if board.baseline is None:
        return ""
    if row is board.baseline:
        return ", and is itself the baseline"
    if row.against is None:
        return f"; the baseline {board.baseline.label} has no seed in common with it"
    better = gain(row, board.baseline, board.measure)
    if better is None:
        return (
            f"; the baseline {board.baseline.label} reached the target in {most(board.baseline)}"
            f" ({certainty(row.against)})"
        )
    return f", {better} the baseline {board.baseline.label} ({certainty(row.against)})"


def most(row: Row) -> str:
    """Return in how many of its seeds a setting reached the target, for one that did not in
    most.
    """
    return (
        f"{row.reached or 'none'} of its"
        f" {'seeds' if row.reached == 0 else f'{len(row.values)} seeds'}"
    )


def gain(row: Row, other: Row, measure: Measure) -> str | None:
    """Return "1.8 times as fast as" or "2.3 points better than", by medians; None without two."""
    better = measure.gain(row.spread.middle, other.spread.middle)
    if better is None:
        return None
    if measure.ratio:
        than = "as" if measure.better.endswith("fast") else "than"
        return f"{better:.2f} {measure.better} {than}"
    return f"{round(100 * better, 1):.1f} {measure.better} than"


def number_of(value: float, ratio: bool) -> str:
    return f"{value:.2f}" if ratio else f"{100 * value:+.1f}"


def certainty(found: Effect) -> str:
    """Return the interval of an effect's mean over paired seeds, and in how many of them it was
    better.
    """
    better = f"better in {found.wins} of {found.pairs} paired seeds"
    if found.middle is None or found.low is None or found.high is None:
        return better
    mean, low, high = (
        number_of(value, found.ratio) for value in (found.middle, found.low, found.high)
    )
    return f"paired mean {mean}, {100 * LEVEL:.0f} % interval {low} to {high}, {better}"


def _second(board: Leaderboard) -> str:
    second, found = board.rows[1], board.second
    begin = f"Second is {second.label} with {_of(second, board.measure)}"
    if found is None:
        return f"{begin}; the two have no seed in common."
    better = gain(board.rows[0], second, board.measure)
    if better is None:
        return f"{begin}; it reached the target in {most(second)} ({certainty(found)})."
    return f"{begin}; {board.rows[0].label} is {better} it ({certainty(found)})."


def unsure(board: Leaderboard) -> str:
    """Return why the winner is not certain; "" if it is."""
    found = board.second
    if found is None:
        return "The first two are not separated: no seed was run with both."
    if found.pairs == 1:
        return (
            "The first two are not separated: one seed says nothing about the variation between"
            " seeds."
        )
    if found.low is None and not found.ahead:
        return (
            "The first two are not separated: some runs have no number, so there is no"
            f" interval, and {found.wins} of {found.pairs} pairs may be chance (sign test, p ="
            f" {found.chance:.2g})."
        )
    if not found.ahead:
        return "The first two are not separated: the interval includes equality."
    if _too_coarse(board):
        return (
            "The first two are not separated: they differ by less than the distance between two"
            f" evaluations, {seconds(board.resolution_s)}."
        )
    return ""


def _too_coarse(board: Leaderboard) -> bool:
    first, second = board.rows[:2]
    gap_s = abs(second.spread.middle - first.spread.middle)
    return board.measure.is_time and board.resolution_s is not None and gap_s < board.resolution_s


def _needed(board: Leaderboard) -> str:
    """Return what would make the answer certain."""
    found, count = board.second, board.rows[0].spread.count
    if not unsure(board):
        return (
            f"The first two are separated: in {found.wins} of {found.pairs} seeds the winner was"
            " ahead."
            if found
            else ""
        )
    more = f"seed={','.join(map(str, range(5)))}"
    if found is None or found.pairs == 1:
        return f"For certainty, run both with several common seeds, for example {more}."
    if found.low is None and not found.ahead:
        return "For certainty, allow longer runs, or choose a lower target (--target)."
    if found.ahead:
        return "For certainty, evaluate more often (eval.every_s), or choose a higher target."
    needed = seeds_needed(found)
    if needed is None:
        return f"More than {MAX_SEEDS} seeds would be needed to separate them: use either."
    coarse = " and more frequent evaluations (eval.every_s)" if _too_coarse(board) else ""
    return (
        f"Certainty would need about {needed} seeds (now {count}){coarse}, if the spread stays the"
        " same."
    )


def _nobody(board: Leaderboard) -> tuple[str, ...]:
    nearest = max(board.rows, key=lambda row: row.best or 0.0)
    seen = [row.reached for row in board.rows]
    lines = [f"{sum(seen)} of {sum(len(row.values) for row in board.rows)} runs reached it."]
    if nearest.best is not None:
        typical = median(row.best for row in board.rows if row.best is not None)
        lines.append(
            f"{nearest.label} came closest, with {percent(nearest.best)} at best; half of the"
            f" settings stayed below {percent(typical)}."
        )
    lines.append("For an answer, allow longer runs, or choose a lower target (--target).")
    return (*lines, *board.notes)

"""Put a leaderboard into sentences: winner, lead, certainty, and what would give certainty."""

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import Measure
from ashl.report.sensitivity import find_winners, winners_text
from ashl.report.statistics import LEVEL, MAX_SEEDS, Effect, Spread, seeds_needed
from ashl.tracking.console import percent, seconds

MAX_ENVIRONMENTS, MAX_NAMED = 8, 6


@dataclass(frozen=True)
class Answer:
    """A headline, and the sentences that qualify it."""

    headline: str
    sentences: tuple[str, ...]


class TextTable(NamedTuple):
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class CommandAnswer(NamedTuple):
    """A command's own answer, labelled lines and tables, shown with the leaderboard."""

    answer: Answer
    lines: tuple[tuple[str, str], ...] = ()
    tables: tuple[TextTable, ...] = ()


def answer_of(board: Leaderboard) -> Answer:
    """Return the answer of a leaderboard; of several environments, one for each."""
    if winners := find_winners(board):
        first, *rest = winners_text(winners)
        return Answer(first, (*rest, *board.notes))
    parts = board.environments
    if len(parts) == 1:
        return _answer_environment(board)
    leaders = dict.fromkeys(part.rows[0].label for part in parts)
    sentences = [
        f"{part.rows[0].environment}: {_answer_environment(replace(part, notes=())).headline}"
        for part in parts[:MAX_ENVIRONMENTS]
    ]
    if len(parts) > MAX_ENVIRONMENTS:
        sentences.append(f"{len(parts) - MAX_ENVIRONMENTS} more environments are in the table.")
    headline = f"Over {len(parts)} environments, first is {' or '.join(leaders)}."
    return Answer(headline, (*sentences, *board.notes))


def _answer_environment(board: Leaderboard) -> Answer:
    board = replace(board, rows=board.ranked_rows)
    measure, first = board.measure, board.rows[0]
    outcome = f"{measure.title} {_value_text(first, measure)}"
    if len(board.rows) == 1 and board.study.dropped:
        only = "is the only setting that the race has not dropped"
        return Answer(f"{first.label} {only}: {outcome}.", board.notes)
    if len(board.rows) == 1:
        sentences = (*board.notes, "Name further runs for a comparison.")
        return Answer(f"There is one setting, {first.label}: {outcome}.", sentences)
    if not math.isfinite(first.spread.middle):
        most = f"in none did most seeds reach the target ({measure.title})"
        return Answer(f"No setting has an answer: {most}.", _describe_missed_target(board))
    headline = result_and_lead(board, "leads" if board.indistinguishable_rows else "is first")
    second, others = _describe_second(board), _describe_indistinguishable(board)
    return Answer(headline, (second, others, *describe_doubt(board), *board.notes))


def result_and_lead(board: Leaderboard, place: str = "") -> str:
    """Return the result of the first setting and its lead over the baseline."""
    first, measure = board.ranked_rows[0], board.measure
    named = f"{first.label} {place}" if place else first.label
    value, compared = _value_text(first, measure), _compare_with_baseline(board, first)
    return f"{named}: {measure.title} {value}{compared}."


def _value_text(row: Row, measure: Measure) -> str:
    value = measure.text(row.spread.middle, row.spread.bound)
    return f"{value} ({interval_text(row.spread, measure)})"


def interval_text(found: Spread, measure: Measure) -> str:
    """Return the interval around a median; few seeds have a range, and no 95 % interval."""
    if found.count == 1:
        return "one seed"
    low, high = measure.text(found.low), measure.text(found.high)
    if low == high:
        return f"median of {found.count} seeds, all equal"
    kind = f"{percent(LEVEL, 0)} interval" if found.coverage >= LEVEL else "range"
    return f"median of {found.count} seeds, {kind} {low} to {high}"


def _compare_with_baseline(board: Leaderboard, row: Row) -> str:
    base = board.baseline
    if base is None:
        return ""
    if row is base:
        return ", and is itself the baseline"
    if row.against is None:
        return f"; the baseline {base.label} has no seed in common with it"
    better, sure = gain_text(row, base, board.measure), certainty_text(row.against)
    if better is None:
        return f"; the baseline {base.label} {without_ratio_text(base, board.measure)} ({sure})"
    return f", {better} the baseline {base.label} ({sure})"


def without_ratio_text(row: Row, measure: Measure) -> str:
    """Return the result of a setting that has no ratio to another: a median that is infinite, since
    runs did not reach the target, or a value such as R², which may be negative.
    """
    if math.isfinite(row.spread.middle):
        return f"has {measure.text(row.spread.middle)}"
    return f"reached the target in {reached_text(row)}"


def reached_text(row: Row) -> str:
    """Return in how many of its seeds a setting reached the target, if not in most."""
    if row.num_reached == 0:
        return "none of its seeds"
    return f"{row.num_reached} of its {len(row.values)} seeds"


def gain_text(row: Row, other: Row, measure: Measure) -> str | None:
    """Return how much better a row is than another by medians, in words; None without two."""
    better = measure.gain(row.spread.middle, other.spread.middle)
    return None if better is None else measure.gain_text(better)


def gain_number(value: float, ratio: bool) -> str:
    return f"{value:.2f}" if ratio else f"{100 * value:+.1f}"


def certainty_text(found: Effect) -> str:
    """Return the interval of an effect's mean over paired seeds, and in how many it was better."""
    better = f"better in {found.wins} of {found.pairs} paired seeds"
    if found.middle is None or found.low is None or found.high is None:
        return better
    mean, low, high = (
        gain_number(value, found.ratio) for value in (found.middle, found.low, found.high)
    )
    if low == high:
        return f"{mean} in each of {found.pairs} paired seeds"
    return f"paired mean {mean}, {percent(LEVEL, 0)} interval {low} to {high}, {better}"


def _describe_second(board: Leaderboard) -> str:
    second, found = board.rows[1], board.effect_over_second
    begin = f"Second is {second.label} with {_value_text(second, board.measure)}"
    if found is None:
        return f"{begin}; the two have no seed in common."
    better = gain_text(board.rows[0], second, board.measure)
    if better is None:
        if math.isfinite(second.spread.middle):  # the sentence begins with the value
            return f"{begin} ({certainty_text(found)})."
        return f"{begin}; it {without_ratio_text(second, board.measure)} ({certainty_text(found)})."
    return f"{begin}; {board.rows[0].label} is {better} it ({certainty_text(found)})."


def _describe_indistinguishable(board: Leaderboard) -> str:
    """Return which settings may be as good as the first."""
    others = [row.label for row in board.indistinguishable_rows]
    if not others:
        return (
            f"{'All others are' if len(board.rows) > 2 else 'The second is'} worse with"
            f" {percent(LEVEL, 0)} confidence{_correction_note(board)}."
        )
    more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    named = ", ".join(others[:MAX_NAMED]) + more
    return f"Indistinguishable from the best{_correction_note(board)}: {named}."


def _correction_note(board: Leaderboard) -> str:
    count = len(board.rows)
    return f" (Holm's correction for picking the best of {count})" if count > 2 else ""


def describe_doubt(board: Leaderboard) -> tuple[str, ...]:
    """Return why the first may not be better than the second, and what would separate them.

    Returns () if the first is better.
    """
    if len(board.ranked_rows) < 2 or board.ranked_rows[1] not in board.indistinguishable_rows:
        return ()
    _, found, p_value = board.comparisons[0]
    begin = "The first two are not separated:"
    more = "For certainty, run both with several common seeds, for example seed=0,1,2,3,4."
    if found is None:
        return f"{begin} no seed was run with both.", more
    if found.pairs == 1:
        return f"{begin} one seed says nothing about the variation between seeds.", more
    if p_value > 1 - LEVEL:
        test = "paired t test" if found.low is not None else "log-rank test"
        result = f"p = {found.p_value:.2g}" if found.is_better else "the second is better by means"
        if found.is_better and p_value != found.p_value:
            result += f", after Holm's correction {p_value:.2g}"
        why = f"{begin} the difference may be chance ({test}, {result})."
        need = _describe_seeds(board, found)
    else:
        apart = seconds(board.resolution_s(board.ranked_rows[1]))
        why = (
            f"{begin} they differ by less than the time between two evaluations of the second,"
            f" {apart}."
        )
        need = (
            "For certainty, evaluate more often (eval.every_s; at most once per merge), or choose a"
            " higher target."
        )
    if found.low is None:
        need = "For certainty, allow longer runs, more seeds, or a lower target (--target)."
    return why, need


def _describe_seeds(board: Leaderboard, found: Effect) -> str:
    """Return how many seeds would separate the first two."""
    second = board.ranked_rows[1]
    needed = seeds_needed(found, math.comb(len(board.ranked_rows), 2))
    if needed is None:
        return f"More than {MAX_SEEDS} seeds would be needed to separate them: use either."
    close = board.is_too_close(second)
    often = " and more frequent evaluations (eval.every_s)" if close else ""
    return (
        f"Certainty would need about {needed} common seeds (now {found.pairs}){often}, if the"
        " spread stays the same."
    )


def _describe_missed_target(board: Leaderboard) -> tuple[str, ...]:
    nearest = max(board.rows, key=lambda row: row.best_accuracy or 0.0)
    reached, runs = (
        sum(row.num_reached for row in board.rows),
        sum(len(row.values) for row in board.rows),
    )
    lines = [f"{reached} of {runs} runs reached it."]
    if nearest.best_accuracy is not None:
        typical = median(row.best_accuracy for row in board.rows if row.best_accuracy is not None)
        lines.append(
            f"{nearest.label} came closest, with {percent(nearest.best_accuracy)} at best; half of"
            f" the settings stayed below {percent(typical)}."
        )
    lines.append("For an answer, allow longer runs, or choose a lower target (--target).")
    return (*lines, *board.notes)

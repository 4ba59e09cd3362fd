"""Judge whether enough runs ended for an answer, and which budget would be enough."""

import math
from dataclasses import dataclass

from ashl.advice.contest import TUNING, RaceContext
from ashl.advice.scale import RACING, RATES, SEEDS, Load, Scale
from ashl.report.leaderboard import Leaderboard
from ashl.report.measure import Target, describe
from ashl.report.records import SWEEP
from ashl.study.jobs import read_summary
from ashl.tracking import jsonl
from ashl.tracking.console import percent

RAN = 0.5  # least share of the candidates that must have run for an answer
MARGIN = 1.25  # factor on the predicted host seconds of a race, for the recommended budget


@dataclass(frozen=True)
class Evidence:
    """The evidence of an answer; it is enough if `missing` is empty."""

    missing: tuple[str, ...]  # clauses: what an answer needs and is not there
    never_ran: tuple[str, ...]  # candidates
    enough_ran: bool  # True if the share of the candidates that an answer needs ran
    budget_s: float | None  # seconds that would be enough; None if nothing is missing

    def notes(self, context: RaceContext) -> list[str]:
        """Count and name the candidates that never ran."""
        if not self.never_ran:
            return []
        count = len(context.selection.candidates)
        counted = f"{len(self.never_ran)} of {count} candidates never ran"
        return [f"{counted}, because the budget ended before: {', '.join(self.never_ran)}."]

    def sentence(self) -> str:
        """Return what is missing and which budget would be enough."""
        needs = f"An answer needs more: {'; '.join(self.missing)}."
        return f"{needs} --budget {self.budget_s:.0f} should be enough."


def labels_that_ran(context: RaceContext) -> set[str]:
    """Return the candidates with a run that was not cut off, by name."""
    return {
        entry["label"]
        for folder in (context.folder, context.folder / TUNING)
        for entry in (jsonl.read_json(folder / SWEEP) or {}).get("settings", ())
        if read_summary(folder / entry["folder"]) is not None
    }


def judge_evidence(
    board: Leaderboard, unreached: Target | None, scale: Scale, load: Load, context: RaceContext
) -> Evidence:
    """Judge the evidence of a race.

    Args: unreached is the requested target if no setting reached it, else None.
    """
    ran, candidates = labels_that_ran(context), context.selection.candidates
    never_ran = tuple(own.name for own in candidates if own.name not in ran)
    missing = list[str]()
    if unreached is not None:
        within = f" in {percent(scale.length, 0)} of the steps" if scale.length < 1 else ""
        missing.append(
            f"none reached {describe(unreached)}{within}, so the ranking is by"
            f" {board.measure.title}"
        )
    counts = [row.spread.count for row in board.ranked_rows[:2]]
    if len(counts) < 2:
        missing.append("only one candidate has finished")
    elif min(counts) < SEEDS:
        missing.append(f"the first two have {counts[0]} and {counts[1]} of at least {SEEDS} seeds")
    least = math.ceil(RAN * len(candidates))
    count = len(candidates) - len(never_ran)
    if count < least:
        missing.append(f"{count} of {len(candidates)} candidates ran, of at least {least}")
    if not missing:
        return Evidence((), never_ran, count >= least, None)
    length = 1.0 if unreached is not None else scale.length
    tries = len(RATES) if context.tunes and length > scale.length else len(scale.rates)
    budget_s = enough_s(load, length, tries, context.deadline.budget_s)
    return Evidence(tuple(missing), never_ran, count >= least, budget_s)


def enough_s(load: Load, length: float, tries: int, budget_s: float) -> float:
    """Return a budget in seconds that is enough for a race, given that `budget_s` was not."""
    enough = max((load.began_s + MARGIN * load.race_s(length, tries)) / RACING, 1.5 * budget_s)
    unit = 10.0 ** max(0, math.floor(math.log10(enough)) - 1)  # round up to two digits
    return unit * math.ceil(enough / unit)

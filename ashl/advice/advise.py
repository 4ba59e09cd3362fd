"""Run `ashl advise`: recommend a combination for a cluster and a task, with its certainty.

The steps of the command:
- `candidates`: plan the candidates,
- `contest`: tune learning rates and race the best candidates in virtual time,
- `leave_out`: answer whether training is faster without the slowest worker,
- this module: print and save the answer.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from ashl.advice.candidates import RATE, Candidate, Selection, select_candidates
from ashl.advice.contest import (
    RATES,
    SEEDS,
    TUNING,
    RaceContext,
    run_rounds,
    time_on_cluster,
    tune_rates,
)
from ashl.advice.leave_out import LeaveOut, Racer, leave_out_of
from ashl.config.compose import compose
from ashl.config.cores import usable_cores
from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import TARGETS
from ashl.report import tables
from ashl.report.answer import answer_of
from ashl.report.compare import write_report
from ashl.report.leaderboard import Leaderboard, Row
from ashl.run.profile import profile as measure
from ashl.run.train import TRACKING_S, is_virtual
from ashl.study.jobs import read_summary
from ashl.study.sweep import SWEEP, copy_to_tracker, lock_folder
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, plain_table
from ashl.tracking.counting import Counting

ADVICE = Path("runs/advice")
FILE = "advice.json"
# typed keys of group runtime that also apply in virtual time
KEPT = ("runtime.device", "runtime.threads")
# keys that the answer sets, or that belong to one run
OWN = (RATE, "seed", "run.dir")
# Latest ends of the tuning, of the race and of the runs without a worker, as shares of the budget.
TUNED, RACED, ANSWERED = 0.55, 0.88, 0.97
# Default number of consecutive evaluations at the target: one lucky evaluation does not count.
HOLD = 2
# Most and least number of evaluations of the fastest candidate's whole run. Between them,
# evaluations of a run that is twice as long cost about as much as its steps.
READINGS, LEAST = 200, 40
PREDICTED = 5  # at most so many candidates have their times predicted without a worker


@dataclass(frozen=True)
class Advice:
    """The answer of `ashl advise`, or the candidates of a dry run.

    `board` is the race's leaderboard, and `enough` is True if enough runs ended for an answer.
    `next` is the command that runs the winner.
    """

    selection: Selection
    context: RaceContext
    board: Leaderboard | None = None
    enough: bool = False
    without: LeaveOut | None = None
    next: str = ""

    @property
    def headline(self) -> str:
        assert self.board is not None
        begin = "" if self.enough else "not enough budget for an answer; so far "
        return begin + answer_of(self.board).headline

    @property
    def notes(self) -> list[str]:
        """The sentences after the headline."""
        assert self.board is not None
        notes = [*answer_of(self.board).sentences]
        if never := never_ran(self.selection, self.context):
            counted = f"{len(never)} of {len(self.selection.candidates)} candidates never ran"
            notes.append(f"{counted}, because the budget ended before: {', '.join(never)}.")
        if not self.enough:
            notes.append(
                f"An answer needs {SEEDS} seeds of two candidates: increase --budget"
                f" {self.context.budget_s:g}, and the same command continues."
            )
        if self.without:
            notes.append(f"{self.without.sentence()}.")
        return notes

    def show(self, console: Console) -> None:
        """Print the answer; of a dry run, the candidates and the other rules."""
        if self.board is None:
            rows = [(own.name, number(own.rate), own.reason) for own in self.selection.candidates]
            titles = ("candidate", "steps/s", "because")
            console.print(plain_table(titles, rows, left=(titles[0], titles[2])))
            left_out = [(out.name, out.reason) for out in self.selection.left_out]
            console.print(plain_table(("left out", "because"), left_out, left=("left out",)))
            return
        console.print(Text(self.headline, style="bold"), soft_wrap=True)
        for note in (*self.notes, f"The report and advice.json are in {self.context.folder}."):
            console.print(note, markup=False, soft_wrap=True)

    def document(self) -> dict[str, Any]:
        """Return the record that advice.json holds; of a dry run, the candidates."""
        found: dict[str, Any] = {
            "folder": str(self.context.folder),
            "every_s": self.context.every_s,
            "candidates": [
                {"name": own.name, "steps_per_s": own.rate, "reason": own.reason}
                for own in self.selection.candidates
            ],
            "left_out": [asdict(out) for out in self.selection.left_out],
        }
        if self.board is None:
            return found
        first = self.board.ranked_rows[0]
        return {
            **tables.document(self.board),
            **found,
            "headline": self.headline,
            "sentences": self.notes,
            "enough": self.enough,
            "winner": {"name": first.runs[0].label, RATE: first.runs[0].config[RATE]},
            "leave_out": self.without and self.without.record(),
            "spent_s": self.context.spent_s,
            "command": self.next,
        }


def advise(
    overrides: Sequence[str],
    config_dir: Path | None,
    console: Console,
    *,
    command: CommandLine,
    target: float | None,
    budget_s: float,
    slots: int | None,
    dry_run: bool,
    quiet: bool,
) -> Advice:
    """Build the candidates, race them in virtual time, and write the answer to the folder.

    Args: console shows the progress. Returns: the answer, or the candidates of a dry run.
    Raises: UsageError and DataMissingError if the request is invalid; AshlError if the race has no
    answer.
    """
    began_s = time.monotonic()
    typed = {key_of(text): text for text in with_target(overrides, target)}
    rates = (1.0,) if RATE in typed else RATES
    fixed, real = overrides_for_virtual_time(tuple(typed.values()), config_dir, console)
    with Counting("planning candidates", quiet=quiet) as counting:
        selection = select_candidates(fixed, config_dir, counting.update)
    context = RaceContext(
        folder_of(selection, rates),
        command,
        fixed,
        slots or usable_cores(),
        budget_s,
        rates,
        evaluation_interval_s(selection),
        console,
        quiet,
        began_s,
    )
    if dry_run:
        return Advice(selection, context)
    config, folder = selection.candidates[0].config, context.folder
    with lock_folder(folder):
        if not quiet:
            console.print(
                f"{len(selection.candidates)} candidates; folder {folder}", soft_wrap=True
            )
        tries = tune_rates(selection, context, TUNED * budget_s)
        # The copy to the tracker has its own time limit, which does not depend on the budget.
        with copy_to_tracker(config, folder, str(command), console, TRACKING_S) as to_tracker:
            board = run_rounds(selection, tries, context, RACED * budget_s, to_tracker)
            found = answer_race(selection, context, board, real)
            jsonl.write_json(folder / FILE, {"schema": 1, **found.document()})
            assert found.board is not None
            write_report(found.board, folder=folder, command=str(command))
    return found


def with_target(overrides: Sequence[str], target: float | None) -> list[str]:
    """Return the overrides with the target and the default number of evaluations that must reach
    it.

    Raises: UsageError if `target` is not in (0, 1].
    """
    found = list(overrides)
    if target is not None:
        if not 0 < target <= 1:
            raise UsageError(
                f"--target {target:g} is not an accuracy; give a share from 0 to 1, for example"
                " --target 0.9"
            )
        found.append(f"stop.target_accuracy={target:g}")
    keys = {key_of(text) for text in found}
    if (
        keys & {f"stop.{target}" for target in TARGETS}
        and "stop.target_consecutive_evals" not in keys
    ):
        found.append(f"stop.target_consecutive_evals={HOLD}")
    return found


def overrides_for_virtual_time(
    typed: tuple[str, ...], config_dir: Path | None, console: Console
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the overrides for virtual time, and those of the real run.

    For `cluster=real` without a profile, the processes of this machine are measured first.

    Raises: UsageError and AshlError.
    """
    config = compose(typed, config_dir)
    if is_virtual(config):
        return typed, typed
    fixed = [
        text
        for text in typed
        if key_of(text).partition(".")[0] != "runtime" or key_of(text) in KEPT
    ]
    if config["choices"]["cluster"] == "real":
        if config["profile"] is None:
            folder = ADVICE / f"profile-{config_hash(config)}"
            if not (folder / "profile.json").exists():
                console.print(
                    f"measuring what steps and exchanges cost here, into {folder}", soft_wrap=True
                )
                shutil.rmtree(folder, ignore_errors=True)
                measure(
                    {**config, "run": {**config["run"], "dir": str(folder)}},
                    list(typed),
                    quiet=True,
                )
            typed = (*typed, f"profile={folder / 'profile.json'}")
        fixed = [text for text in fixed if key_of(text) not in ("cluster", "profile")]
        fixed += ["cluster=profile", *(text for text in typed if key_of(text) == "profile")]
    return (*fixed, "runtime=sim"), typed


def folder_of(selection: Selection, rates: Sequence[float]) -> Path:
    """Return the folder of the study; its name depends on the candidates and not on the budget."""
    first = selection.candidates[0].config
    if first["run"]["dir"]:
        return Path(first["run"]["dir"]).expanduser()
    texts = sorted(config_hash(own.config) for own in selection.candidates)
    digest = hashlib.sha256("".join([*texts, str(rates)]).encode()).hexdigest()[:8]
    return ADVICE / f"{first['name'] or 'advice'}-{digest}"


def evaluation_interval_s(selection: Selection) -> float | None:
    """Return the experiment seconds between two evaluations; None if a key of eval.* was typed, or
    a candidate has no predicted time.
    """
    times = [own.plan.predicted_s for own in selection.candidates]
    typed = any(value is not None for value in selection.candidates[0].config["eval"].values())
    known = [time_s for time_s in times if time_s]
    if typed or len(known) < len(times):
        return None
    passes = 3 * selection.samples() / (2 * len(selection.data.test))
    return float(f"{min(known) / min(READINGS, max(LEAST, passes)):.2g}")


def never_ran(selection: Selection, context: RaceContext) -> list[str]:
    """Return the names of the candidates without a run that was not cut off."""
    ran = {
        entry["label"]
        for folder in (context.folder, context.folder / TUNING)
        for entry in (jsonl.read_json(folder / SWEEP) or {}).get("settings", ())
        if read_summary(folder / entry["folder"]) is not None
    }
    return [own.name for own in selection.candidates if own.name not in ran]


def answer_race(
    selection: Selection, context: RaceContext, board: Leaderboard | None, real: Sequence[str]
) -> Advice:
    """Return the answer of a race.

    Args: board is None if no run ended; real has the overrides of a run on processes.
    Raises: AshlError if no run ended or none reached the target.
    """
    budget = f"--budget {context.budget_s:g}"
    if board is None:
        raise AshlError(
            f"not enough budget for an answer: no run ended; increase {budget}: the same command"
            " continues"
        )
    first = board.ranked_rows[0]
    if not math.isfinite(first.spread.middle):
        nearest = max(board.rows, key=lambda row: row.best_accuracy or 0.0)
        raise AshlError(
            f"no candidate had a result by {board.measure.title}; {nearest.label} came closest,"
            f" with an accuracy of {percent(nearest.best_accuracy)}; lower the target, allow longer"
            f" runs (stop.epochs), or increase {budget}: the same command continues"
        )
    own = candidate_of(selection, first)
    evaluated = [] if context.every_s is None else [f"eval.every_s={context.every_s:g}"]
    kept = [text for text in real if key_of(text) not in OWN]
    rate = f"{RATE}={first.runs[0].config[RATE]:g}"
    racers = [racer_of(row, candidate_of(selection, row), board) for row in board.ranked_rows]
    racers = [racer for racer in racers if racer is not None][:PREDICTED]
    race_on = partial(time_on_cluster, context=context, until_s=ANSWERED * context.budget_s)
    return Advice(
        selection,
        context,
        board,
        enough=[row.spread.count >= SEEDS for row in board.ranked_rows[:2]] == [True, True],
        without=leave_out_of(racers, context.is_over, race_on) if racers else None,
        next=context.command.follow_up("train", *kept, *evaluated, *own.overrides, rate),
    )


def candidate_of(selection: Selection, row: Row) -> Candidate:
    """Return the candidate of a row."""
    return next(own for own in selection.candidates if own.name == row.runs[0].label)


def racer_of(row: Row, own: Candidate, board: Leaderboard) -> Racer | None:
    """Return the row as a racer, with the mean seconds of its stages until the target over the runs
    that reached it; None if settings are not ranked by time, or if no run did.
    """
    runs = [(run, board.measure.value(run)) for run in row.runs]
    runs = [(run, at_s) for run, at_s in runs if math.isfinite(at_s) and run.summary.get("stages")]
    if not board.measure.is_time or not runs or not math.isfinite(row.spread.middle):
        return None
    stages_s = []
    for k in range(len(own.plan.stages)):
        spent_s = [
            max(0.0, min(at_s, stage["end_s"]) - stage["start_s"])
            for run, at_s in runs
            for stage in run.summary["stages"][k : k + 1]
        ]
        stages_s.append(fmean(spent_s) if spent_s else 0.0)
    rate, seeds = row.runs[0].config[RATE], tuple(run.seed for run in row.runs)
    return Racer(own, row.spread.middle, tuple(stages_s), rate, seeds)

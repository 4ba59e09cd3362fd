"""Put the outcome of a race into words, tables and a record."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from ashl.advice.candidates import Candidate, Selection, dropped_notes
from ashl.advice.contest import RaceContext, TunedCandidate, time_on_cluster
from ashl.advice.evidence import Evidence
from ashl.advice.leave_out import FEWEST_WORKERS, Racer, leave_out_of
from ashl.advice.scale import SEEDS, Load, Scale
from ashl.config.catalog import own_folder
from ashl.config.compose import compose
from ashl.config.override import CommandLine, group_of, key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import parts_of
from ashl.report.answer import (
    Answer,
    CommandAnswer,
    TextTable,
    answer_of,
    describe_doubt,
    interval_text,
    result_and_lead,
)
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import Target, describe
from ashl.report.records import REPORT
from ashl.runtime.time_accounting import KINDS
from ashl.study.grid import check_point
from ashl.tracking.console import megabytes, number, percent, plain_table, print_unwrapped, seconds
from ashl.tracking.deadline import Deadline
from ashl.tracking.recorder import SUMMARY

PREDICTED = 5  # at most so many candidates have their times predicted without a worker
HOSTS = "hosts.txt"
OWN = ("optimizer.lr", "seed", "run.dir")  # keys that the answer sets, or that belong to one run
WORDS = ("candidate", "rule", "because")  # columns of text, which are aligned to the left
# Predicting ends when this many seconds of the budget remain, or a twentieth of the budget.
LEAST_S = 3.0


@dataclass(frozen=True)
class RaceAnswer:
    """The answer: leaderboard, what is shown with it, the winner's plan and the record."""

    board: Leaderboard
    shown: CommandAnswer
    plan: Plan
    record: dict[str, Any]


@dataclass(frozen=True)
class NextCommands:
    """The commands that the answer recommends.

    Args: command is the typed command; virtual has the overrides for a run in virtual time, and
    real those for a run on processes, which are equal if virtual time was typed; hosts is the host
    file for `ashl launch`.
    """

    command: CommandLine
    virtual: Sequence[str]
    real: Sequence[str]
    hosts: Path

    def commands_here(self, chosen: Sequence[str]) -> list[tuple[str, str]]:
        """Return where each run on this machine takes place, in words, and its command.

        A declared cluster runs in virtual time first, as in the race, unless a runtime was typed.
        """
        virtual, real = ("here, in virtual time", self.virtual), ("here, emulated", self.real)
        if "cluster=real" in self.real:
            runs = [("here", self.real)]
        elif self.virtual == self.real:
            runs = [virtual]
        elif any(key_of(text) == "runtime" for text in self.real):
            runs = [real]
        else:
            runs = [virtual, real]
        return [(where, self._train(texts, chosen)) for where, texts in runs]

    def _train(self, texts: Sequence[str], chosen: Sequence[str]) -> str:
        kept = [text for text in texts if key_of(text) not in OWN]
        return self.command.follow_up("train", *self._with_effect((*kept, *chosen)))

    def command_on_hosts(self, chosen: Sequence[str], num_workers: int) -> str:
        """Return the command for several machines, without the declared cluster and without a
        profile measured on this machine.
        """
        typed = [text for text in self.command.words if "=" in text and key_of(text) == "profile"]
        rest = [text for text in self.real if key_of(text) not in (*OWN, "profile")]
        rest = [text for text in rest if group_of(text) not in ("cluster", "runtime")]
        before = ("ashl", "launch", "--hosts", str(self.hosts), "--")
        line = CommandLine(("train",), self.command.config_dir, before)
        there = ("cluster=real", f"cluster.num_workers={num_workers}")
        kept = self._with_effect((*typed, *rest, *chosen, *there))
        return line.follow_up("train", *(text for text in kept if text != "cluster=real"))

    def _with_effect(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the overrides without those that have no effect together with the others, because
        `ashl train` refuses them.
        """
        try:
            return check_point(
                texts, partial(compose, config_dir=own_folder(self.command.config_dir)), {}
            )[0]
        # for example a file of another machine: the command itself reports what is missing
        except UsageError:
            return texts


def hosts_of(plan: Plan) -> str:
    """Return a host file with as many slots on this machine as the run has ranks, for the user to
    edit.
    """
    return (
        "# A line for each machine, as ssh knows it: `node1`, or `node1 slots=2` for two ranks on"
        f" it.\nlocalhost slots={plan.num_ranks}\n"
    )


def show_candidates(console: Console, selection: Selection) -> None:
    """Print the candidates and why they compete, and the other rules and why they do not."""
    for table in candidate_tables(selection):
        console.print(Text(table.title, style="bold"))
        console.print(plain_table(table.columns, table.rows, left=WORDS))
    print_unwrapped(console, *dropped_notes(selection.candidates))


def candidate_tables(selection: Selection) -> list[TextTable]:
    taken = tuple((own.name, number(own.rate), own.reason) for own in selection.candidates)
    reasons = dict.fromkeys(out.reason for out in selection.left_out)
    others = tuple(
        (", ".join(out.name for out in selection.left_out if out.reason == reason), reason)
        for reason in reasons
    )
    tables = [TextTable("Candidates", ("candidate", "steps/s", "because"), taken)]
    return tables + ([TextTable("Left out", ("rule", "because"), others)] if others else [])


def announce(scale: Scale, context: RaceContext) -> None:
    """Print what will run, before anything runs."""
    selection = context.selection
    rest = f"{len(selection.left_out)} left out (the report gives the reasons)"
    rates = (
        f"up to {len(scale.rates)} learning rates for the best of them"
        if len(scale.rates) > 1
        else "one learning rate for each"
    )
    print_unwrapped(
        context.console,
        f"{len(selection.candidates)} candidates, {rest}; {rates}; folder {context.folder}",
        *notes_of(scale),
        *dropped_notes(selection.candidates),
    )


def show_forecast(console: Console, load: Load, scale: Scale, context: RaceContext) -> None:
    """Print the predicted cost of the race, from a few steps and an evaluation that were timed."""
    race_s, run_s = load.race_s(scale.length, len(scale.rates)), load.run_s(scale.length)
    ended = sum(1 for _ in context.folder.rglob(SUMMARY))
    again = f" {ended} runs have already ended, in {context.folder}." if ended else ""
    console.print(Text("The race", style="bold"))
    print_unwrapped(
        console,
        f"About {seconds(race_s)} on this machine, {context.slots} runs at a time; a run takes up"
        f" to {seconds(run_s)}. The race ends with --budget {context.deadline.budget_s:g} s at the"
        f" latest.{again}",
        *notes_of(scale),
    )


def notes_of(scale: Scale) -> list[str]:
    """Return a sentence for each way in which the budget limits the answer."""
    notes = []
    if scale.length < 1:
        notes.append(
            f"The budget is too small for whole runs: each has {percent(scale.length, 0)} of the"
            " steps."
        )
    if scale.target is not None:
        notes.append(
            "The target is the best accuracy that all candidates reached in the tuning:"
            f" {percent(scale.target)}."
        )
    if len(scale.rates) == 1:
        notes.append(
            "No learning rate was tuned: each candidate has one rate, which may suit some better"
            " than others."
        )
    return notes


def rates_notes(tries: Sequence[TunedCandidate], scale: Scale) -> list[str]:
    """Return a sentence on the learning rates that ran, if several were to be tried."""
    if len(scale.rates) == 1:
        return []
    tuned = [own.candidate.name for own in tries if own.tried > 1]
    if not tuned:
        return [
            "No learning rate was tuned, because the budget ended before: each candidate has one"
            " rate, which may suit some better than others."
        ]
    most = max(own.tried for own in tries)
    others = "; the others have the configured one" if len(tuned) < len(tries) else ""
    return [
        f"Up to {most} learning rates ran for {len(tuned)} of {len(tries)} candidates"
        f" ({', '.join(tuned)}){others}."
    ]


def server_link_notes(own: Candidate) -> list[str]:
    """Return a sentence if workers' links have a limit and the server's NIC has none."""
    cluster = own.config["cluster"]
    limit = cluster.get("bandwidth_mbit_s")
    others = (cluster.get(key) for key in ("exchange_s", "server_bandwidth_mbit_s"))
    if limit is None or any(other is not None for other in others):
        return []
    if not parts_of(own.plan).stages[0].topology.has_server:
        return []
    return [
        f"The server's NIC is unlimited here, while a worker's link has {limit:g} Mbit/s. The"
        " workers share the bandwidth of a real server:"
        f" for one with a worker's link, add cluster.server_bandwidth_mbit_s={limit:g}."
    ]


def answer_race(
    tries: Sequence[TunedCandidate],
    scale: Scale,
    board: Leaderboard,
    unreached: Target | None,
    known: Evidence,
    real: Sequence[str],
    context: RaceContext,
) -> RaceAnswer:
    """Put the outcome of the race into words, after runs without the slowest worker.

    Args: unreached is the requested target if no setting reached it, else None; real has the
    overrides for a run on processes.
    Raises: AshlError if no setting reached the target although whole runs of enough candidates
    ended.
    """
    selection, deadline = context.selection, context.deadline
    first, *others = board.ranked_rows
    if unreached is not None and scale.length == 1 and known.enough_ran:
        raise AshlError(no_result_message(board, describe(unreached), deadline))
    if not math.isfinite(first.spread.middle):
        raise AshlError(
            no_result_message(
                board, describe(board.target) if board.target else board.measure.title, deadline
            )
        )
    own, rate = candidate_of(selection, first), first.runs[0].config["optimizer.lr"]
    evaluated = [] if scale.every_s is None else [f"eval.every_s={scale.every_s:g}"]
    chosen = [*evaluated, *own.overrides, f"optimizer.lr={rate:g}"]
    follows = NextCommands(context.command, context.fixed, real, context.folder / HOSTS)
    here = follows.commands_here(chosen)
    launch = follows.command_on_hosts(chosen, own.plan.num_workers)
    plan = compile_plan(
        {**own.config, "optimizer": {**own.config["optimizer"], "lr": rate}}, None, []
    )
    racers = [] if known.missing else racers_of(selection, board)

    def is_over() -> bool:
        return deadline.left_s < max(LEAST_S, deadline.budget_s / 20)

    race_on = partial(time_on_cluster, scale=scale, context=context)
    apart_s = board.resolution_s(first) or 0.0
    without = leave_out_of(racers, is_over, race_on, apart_s) if racers else None
    notes = [
        *notes_of(scale),
        *rates_notes(tries, scale),
        *dropped_notes(selection.candidates),
        *known.notes(context),
        *server_link_notes(own),
    ]
    words = race_text(board, known, notes)
    effect = board.effect_over_second
    sure = effect.probability if effect else None
    up, down = (first.means.get(key) for key in ("bytes_up", "bytes_down"))
    value = board.measure.text(first.spread.middle)
    interval = interval_text(first.spread, board.measure)
    sent = f"{megabytes(up)} up and {megabytes(down)} down"
    lines = list[tuple[str, str]]()
    if sure is not None and not known.missing:
        better = f"{first.label} is better than {others[0].label} on average"
        lines.append(("sure", f"{percent(sure)} that {better}"))
    if known.missing and own.plan.num_workers >= FEWEST_WORKERS:
        lines.append(
            ("workers", "undecided whether to leave one out, as long as there is no answer")
        )
    if without:
        lines.append(("workers", without.sentence()))
        if not without.runs:
            lines.append(("", "if learning needs the same number of steps without the worker"))
    lines += [
        ("expect", f"{board.measure.title}: {value} ({interval}); {sent}"),
        *(
            ("" if k else "run it", f"{where}: {command}")
            for k, (where, command) in enumerate((*here, ("on your machines", launch)))
        ),
    ]
    record = {
        "winner": row_record(first),
        "runner_up": row_record(others[0]) if others else None,
        "baseline": row_record(board.baseline) if board.baseline else None,
        "measure": board.measure.title,
        "headline": words.headline,
        "separated": not known.missing and (not others or not describe_doubt(board)),
        "missing": list(known.missing),
        "never_ran": list(known.never_ran),
        "needed_budget_s": known.budget_s,
        "probability": sure,
        "leave_out": without and without.record(),
        "notes": notes,
        "command": here[0][1],
        "launch": launch,
        "expected": {"value": first.spread.middle, "bytes_up": up, "bytes_down": down},
        "spent_s": deadline.spent_s,
        "budget_s": deadline.budget_s,
        "candidates": [candidate_record(own, board) for own in tries],
        "left_out": [asdict(out) for out in selection.left_out],
    }
    shown = CommandAnswer(words, tuple(lines), tuple(candidate_tables(selection)))
    return RaceAnswer(board, shown, plan, record)


def race_text(board: Leaderboard, known: Evidence, notes: Sequence[str]) -> Answer:
    """Return the answer; if the evidence is not enough, what is missing comes first."""
    words = answer_of(board)
    if not known.missing:
        return Answer(words.headline, (*words.sentences, *notes))
    more = words.sentences if len(board.ranked_rows) > 1 else board.notes
    return Answer(
        f"not enough budget for an answer; so far {result_and_lead(board)}",
        (known.sentence(), *more, *notes),
    )


def candidate_of(selection: Selection, row: Row) -> Candidate:
    """Return the candidate of a row."""
    return next(own for own in selection.candidates if own.name == row.runs[0].label)


def racers_of(selection: Selection, board: Leaderboard) -> list[Racer]:
    """Return the first racers with enough seeds and the baseline, if settings are ranked by time to
    a target; else nothing.
    """
    if not board.measure.is_time:
        return []
    rows = [row for row in board.ranked_rows if len(row.runs) >= SEEDS]
    found = (racer_of(row, candidate_of(selection, row), board) for row in rows)
    racers = [racer for racer in found if racer is not None]
    base = [racer for racer in racers if racer.candidate is selection.candidates[0]]
    return list(dict.fromkeys([*racers[:PREDICTED], *base]))


def row_record(row: Row) -> dict[str, Any]:
    run, against, shares = row.runs[0], row.against, row.time_shares
    return {
        "name": run.label,
        "optimizer.lr": run.config.get("optimizer.lr"),
        "value": row.spread.middle if math.isfinite(row.spread.middle) else None,
        "seeds": row.spread.count,
        "against_baseline": (
            against and {"mean": against.middle, "low": against.low, "high": against.high}
        ),
        "steps_per_s": row.means.get("steps_per_s"),
        "shares": (
            {kind: fmean(worker[kind] for worker in shares) for kind in KINDS} if shares else None
        ),
    }


def candidate_record(own: TunedCandidate, board: Leaderboard) -> dict[str, Any]:
    """Return a record of a candidate: its overrides, its tuning and its final result."""
    curve = own.curve
    rows = [row for row in board.rows if row.runs[0].label == own.candidate.name]
    return {
        "name": own.candidate.name,
        "overrides": list(own.candidate.overrides),
        "reason": own.candidate.reason,
        "predicted_steps_per_s": own.candidate.rate,
        "optimizer.lr": own.rate,
        "tuning": (
            None
            if curve is None
            else {"reached_s": curve.reached_s, "seen_s": curve.now_s, "rates": own.tried}
        ),
        "final": row_record(rows[0]) if rows else None,
    }


def racer_of(row: Row, own: Candidate, board: Leaderboard) -> Racer | None:
    """Return the row as a racer, with the shares of its stages in the time to the target, over the
    runs that reached it; None if no run did.
    """
    runs = [(run, board.measure.value(run)) for run in row.runs]
    runs = [(run, at_s) for run, at_s in runs if math.isfinite(at_s) and run.summary.get("stages")]
    if not runs or not math.isfinite(row.spread.middle):
        return None
    spent_s = [0.0 for _ in own.plan.stages]
    for run, at_s in runs:
        for k, stage in enumerate(run.summary["stages"]):
            spent_s[k] += max(0.0, min(at_s, stage["end_s"]) - stage["start_s"])
    if not any(spent_s):
        return None
    shares = tuple(stage_s / sum(spent_s) for stage_s in spent_s)
    rate = row.runs[0].config["optimizer.lr"]
    seeds = tuple(run.seed for run in row.runs)
    return Racer(own, row.spread.middle, shares, rate, seeds)


def no_result_message(board: Leaderboard, what: str, deadline: Deadline) -> str:
    """Return the message that no candidate reached the target, with the closest candidate."""
    nearest = max(board.rows, key=lambda row: row.best_accuracy or 0.0)
    far = f"; {nearest.label} came closest"
    if nearest.best_accuracy is not None:
        far += f", with {percent(nearest.best_accuracy)}"
    elif (loss := nearest.means.get("final.train_loss")) is not None:
        far += f", with a training loss of {loss:.3g}"
    return (
        f"no candidate reached {what} in {seconds(deadline.spent_s)} on this machine{far}; lower"
        " the target, allow longer runs (stop.epochs), or increase --budget: the same command"
        " continues"
    )


def show_answer(console: Console, result: RaceAnswer, folder: Path) -> None:
    """Print the answer, and the paths of the plan, the record and the report."""
    words = result.shown.answer
    print_unwrapped(console, words.headline, style="bold")
    print_unwrapped(console, *words.sentences, "")
    places = (
        ("plan", f"{folder / 'plan.json'}; all else in {folder / 'advice.json'}"),
        ("report", folder / REPORT),
    )
    print_unwrapped(console, *(f"{key:<7} {text}" for key, text in (*result.shown.lines, *places)))

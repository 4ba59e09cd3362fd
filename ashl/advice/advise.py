"""Run `ashl advise`: recommend a combination for a cluster and a task, with its certainty.

The steps of the command, each in the module of that name:
- `candidates`: plan the candidates,
- `scale`: choose the size of the race from the budget,
- `contest`: tune learning rates and race the best candidates in virtual time,
- `evidence`: judge whether enough runs ended,
- `leave_out`: answer whether training is faster without the slowest worker,
- `answer`: print and save the answer.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ashl.advice.answer import (
    HOSTS,
    RaceAnswer,
    announce,
    answer_race,
    hosts_of,
    show_answer,
    show_candidates,
    show_forecast,
)
from ashl.advice.candidates import RATE, select_candidates
from ashl.advice.contest import (
    RaceContext,
    leave_out_slow,
    run_rounds,
    tune_rates,
    with_reachable_target,
)
from ashl.advice.evidence import enough_s, judge_evidence
from ashl.advice.scale import RACING, Load, Scale, load_of, scale_of
from ashl.config.compose import compose
from ashl.config.cores import usable_cores
from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, group_of, index_by_key, key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import TARGETS
from ashl.report.compare import write_report
from ashl.report.records import REPORT
from ashl.run.profile import profile_once
from ashl.run.train import TRACKING_S, is_virtual
from ashl.study.sweep import copy_to_tracker, folder_of, lock_folder
from ashl.tracking import jsonl
from ashl.tracking.console import print_unwrapped
from ashl.tracking.counting import Counting
from ashl.tracking.deadline import Deadline

ADVICE = Path("runs/advice")
FILE = "advice.json"
# typed keys of group runtime that also apply in virtual time
KEPT = ("runtime.device", "runtime.threads")
# Default number of consecutive evaluations at the target: one lucky evaluation does not count.
HOLD = 2


@dataclass(frozen=True)
class Advice:
    """The answer of `ashl advise`, or the candidates and the cost of the race of a dry run."""

    context: RaceContext
    load: Load
    scale: Scale
    result: RaceAnswer | None = None

    def show(self, console: Console) -> None:
        """Print the answer, or the candidates and the cost of the race."""
        if self.result is not None:
            show_answer(console, self.result, self.context.folder)
            return
        show_candidates(console, self.context.selection)
        show_forecast(console, self.load, self.scale, self.context)

    def document(self) -> dict[str, Any]:
        """Return the record that advice.json holds; of a dry run, the candidates."""
        folder = {"folder": str(self.context.folder), "scale": asdict(self.scale)}
        if self.result is not None:
            return {**folder, **self.result.record}
        return {
            **folder,
            "race_s": self.load.race_s(self.scale.length, len(self.scale.rates)),
            "candidates": [
                {"name": own.name, "steps_per_s": own.rate, "reason": own.reason}
                for own in self.context.selection.candidates
            ],
            "left_out": [asdict(out) for out in self.context.selection.left_out],
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
    deadline = Deadline(budget_s)
    typed = index_by_key(with_target(overrides, target))
    fixed, real = overrides_for_virtual_time(tuple(typed.values()), config_dir, console)
    with Counting("planning candidates", quiet=quiet) as counting:
        selection = select_candidates(fixed, config_dir, counting.update)
    hashes = [config_hash(own.config) for own in selection.candidates]
    one_rate = ["one rate"] * (RATE in typed)
    first = selection.candidates[0].config
    folder = folder_of([*hashes, *one_rate], first, ADVICE, "advice")
    slots = slots or usable_cores()
    context = RaceContext(selection, folder, command, fixed, slots, deadline, console, quiet)
    load = load_of(selection, slots, deadline.spent_s)
    if dry_run:
        return Advice(context, load, choose_scale(load, context))
    with lock_folder(folder, FILE):
        scale = choose_and_save_scale(load, context)
        if not quiet:
            announce(scale, context)
        context = leave_out_slow(scale, context)
        tries = tune_rates(scale, context)
        scale = with_reachable_target(scale, context)
        # The copy to the tracker has its own time limit, which does not depend on the budget.
        with copy_to_tracker(first, folder, str(command), console, TRACKING_S) as to_tracker:
            board, unreached = run_rounds(tries, scale, context, to_tracker)
            if board is None:
                needed_s = enough_s(load, scale.length, len(scale.rates), budget_s)
                raise AshlError(
                    f"not enough budget for an answer: no run ended in {budget_s:g} s; give"
                    f" --budget {needed_s:.0f}: the same command continues"
                )
            known = judge_evidence(board, unreached, scale, load, context)
            result = answer_race(tries, scale, board, unreached, known, real, context)
            write_answer(folder, result, scale, command)
    return Advice(context, load, scale, result)


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
    fixed = [text for text in typed if group_of(text) != "runtime" or key_of(text) in KEPT]
    if config["choices"]["cluster"] == "real":
        if config["profile"] is None:
            folder = ADVICE / f"profile-{config_hash(config)}"
            if not (folder / "profile.json").exists():
                print_unwrapped(
                    console, f"measuring what steps and exchanges cost here, into {folder}"
                )
            typed = (*typed, f"profile={profile_once(config, list(typed), folder)}")
        fixed = [text for text in fixed if key_of(text) not in ("cluster", "profile")]
        fixed += ["cluster=profile", *(text for text in typed if key_of(text) == "profile")]
    return (*fixed, "runtime=sim"), typed


def choose_and_save_scale(load: Load, context: RaceContext) -> Scale:
    """Choose the size of the race, and write it to the folder for the same command."""
    scale, path = choose_scale(load, context), context.folder / FILE
    before = jsonl.read_json(path) or {}  # an earlier answer stays until there is another
    jsonl.write_json(path, {**before, "schema": 1, "scale": asdict(scale)})
    return scale


def choose_scale(load: Load, context: RaceContext) -> Scale:
    """Return the size of the race.

    A resumed race keeps its size, unless the budget now allows a larger one.

    Raises: UsageError if not even one run fits into the budget.
    """
    before, known = None, (jsonl.read_json(context.folder / FILE) or {}).get("scale")
    if known:
        rates = tuple(known["rates"])
        before = Scale(known["length"], rates, known["every_s"], known["target"])
    deadline = context.deadline
    left_s = RACING * deadline.budget_s - deadline.spent_s
    try:
        scale = scale_of(load, tunes=context.tunes, left_s=left_s, budget_s=deadline.budget_s)
    except UsageError:
        if before is None:
            raise
        return before
    if before and (before.length, len(before.rates)) >= (scale.length, len(scale.rates)):
        return before
    return scale


def write_answer(folder: Path, result: RaceAnswer, scale: Scale, command: CommandLine) -> None:
    """Write the winner's plan, a host file to fill in, the record of the answer, and the report."""
    (folder / "plan.json").write_text(result.plan.to_json(), encoding="utf-8")
    if not (folder / HOSTS).exists():  # the user may have filled it in
        (folder / HOSTS).write_text(hosts_of(result.plan), encoding="utf-8")
    jsonl.write_json(folder / FILE, {"schema": 1, "scale": asdict(scale), **result.record})
    report = folder / REPORT
    write_report(result.board, out=report, command=str(command), command_answer=result.shown)

"""`ashl advise`: from a cluster and a task to the combination to take, how sure that is, and what
would change it.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ashl.advice.answer import (
    HOSTS,
    Answered,
    Follows,
    Forecast,
    announce,
    answered,
    hosts_of,
    report,
    show,
    show_field,
    show_forecast,
)
from ashl.advice.candidates import Asked, Field, asked, field_of
from ashl.advice.contest import Place, final, judged, race_grid, run_count, tuned
from ashl.advice.evidence import enough_s, evidence
from ashl.advice.scale import RACING, Load, Scale, load_of, scale_of
from ashl.config.compose import compose
from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import TARGETS
from ashl.run.profile import profile as measure
from ashl.run.rank import step_here_s
from ashl.run.train import MLFLOW_S, is_virtual
from ashl.study.sweep import copied_to_mlflow, locked
from ashl.tracking import jsonl
from ashl.tracking.counting import Counting
from ashl.tracking.deadline import Deadline
from ashl.tracking.recorder import SUMMARY

ADVICE = Path("runs/advice")
FILE = "advice.json"
KEPT = ("runtime.device", "runtime.threads")  # of what was typed of the runtime, in virtual time
TUNING = 0.55  # of the budget, at the latest, for learning rates
HOLD = 2  # evaluations in a row at the target, where nothing is said: a lucky one does not count


def advise(
    overrides: Sequence[str],
    config_dir: Path | None,
    console: Console,
    *,
    command: CommandLine,
    target: float | None,
    budget_s: float,
    slots: int | None,
    explain: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Build the candidates, race them in virtual time, print the answer and keep it.

    Raises UsageError and DataMissingError for what cannot be asked, and AshlError where no
    candidate has an answer.
    """
    deadline = Deadline(budget_s)
    typed = with_target(overrides, target)
    wanted, real = virtual(asked(typed, config_dir), config_dir, console)
    with Counting("planning candidates", quiet=quiet) as counting:
        field = field_of(wanted, config_dir, counting.update)
    folder = folder_of(field, wanted)
    place = Place(
        folder,
        command,
        wanted.fixed,
        slots or len(os.sched_getaffinity(0)),
        deadline,
        console,
        quiet,
    )
    if dry_run:
        show_field(console, field)
        load = loaded(field, place)
        show_forecast(console, forecast(load, chosen_scale(load, wanted, place), place))
        return
    with locked(folder):
        began_s, load = deadline.spent_s, loaded(field, place)
        scale = scaled(load, wanted, place)
        if not quiet:
            announce(console, field, scale, folder)
        tries = tuned(field, scale, place, TUNING * budget_s)
        scale = judged(field, scale, place)
        grid = race_grid(field, tries, scale, place)
        with copied_to_mlflow(
            grid, folder, str(command), console, MLFLOW_S
        ) as to_mlflow:  # whatever the budget has left
            found, unreached = final(field, tries, scale, place, RACING * budget_s, to_mlflow)
            if found is None:
                needed_s = enough_s(load, scale.length, len(scale.rates), began_s, budget_s)
                raise AshlError(
                    f"not enough budget for an answer: no run came to its end in {budget_s:g} s;"
                    f" --budget {needed_s:.0f} would do, and the same command continues"
                )
            known = evidence(
                field, found.board, unreached, scale, load, wanted.rates, place, began_s
            )
            follows = Follows(command, real, folder / HOSTS)
            result = answered(field, tries, scale, found, unreached, known, follows, deadline)
            keep(folder, result, scale, known.slower)
            report(folder, str(command), field, found, result)
    show(console, field, result, folder, explain=explain)


def with_target(overrides: Sequence[str], target: float | None) -> list[str]:
    """What was typed with the target, which has to hold. Raises UsageError."""
    found = list(overrides)
    if target is not None:
        if not 0 < target <= 1:
            raise UsageError(
                f"--target {target:g} is no accuracy; give a share, as in --target 0.9"
            )
        found.append(f"stop.target_accuracy={target:g}")
    keys = {key_of(text) for text in found}
    if (
        keys & {f"stop.{target}" for target in TARGETS}
        and "stop.target_consecutive_evals" not in keys
    ):
        found.append(f"stop.target_consecutive_evals={HOLD}")
    return found


def virtual(
    wanted: Asked, config_dir: Path | None, console: Console
) -> tuple[Asked, tuple[str, ...]]:
    """What was typed, as it is in virtual time, and as it is for the real run: processes that are
    there are measured first, where no profile of them is given. Raises UsageError and AshlError.
    """
    config, typed = compose(wanted.fixed, config_dir), wanted.fixed
    if is_virtual(config):
        return wanted, typed
    fixed = [
        text
        for text in typed
        if key_of(text).partition(".")[0] != "runtime" or key_of(text) in KEPT
    ]
    if config["choices"]["cluster"] == "real":
        if config["profile"] is None:
            place = ADVICE / f"profile-{config_hash(config)}"
            if not (place / "profile.json").exists():
                console.print(
                    f"measuring what steps and exchanges cost here, into {place}", soft_wrap=True
                )
                shutil.rmtree(place, ignore_errors=True)
                measure(
                    {**config, "run": {**config["run"], "dir": str(place)}}, list(typed), quiet=True
                )
            typed = (*typed, f"profile={place / 'profile.json'}")
        fixed = [text for text in fixed if key_of(text) not in ("cluster", "profile")]
        fixed += ["cluster=profile", *(text for text in typed if key_of(text) == "profile")]
    return wanted._replace(fixed=(*fixed, "runtime=sim")), typed


def folder_of(field: Field, wanted: Asked) -> Path:
    """Where the study lies: named by what competes, whatever the budget."""
    first = field.candidates[0].config
    if first["run"]["dir"]:
        return Path(first["run"]["dir"]).expanduser()
    digests = sorted(config_hash(own.config) for own in field.candidates)
    digest = hashlib.sha256("".join([*digests, *map(str, wanted.rates)]).encode()).hexdigest()[:8]
    return ADVICE / f"{first['name'] or 'advice'}-{digest}"


def loaded(field: Field, place: Place) -> Load:
    """What a race costs here; by what an earlier one in this folder has measured, where there was
    one.
    """
    limits, evaluation = (field.candidates[0].config[key] for key in ("stop", "eval"))
    return load_of(
        field,
        step_here_s(*field.host),
        place.slots,
        target=any(limits.get(key) is not None for key in TARGETS),
        evaluates=any(value is not None for value in evaluation.values()),
        slower=(jsonl.whole(place.folder / FILE) or {}).get("slower") or 1.0,
    )


def scaled(load: Load, wanted: Asked, place: Place) -> Scale:
    """Choose the size of the race, and keep it for the same command again."""
    scale = chosen_scale(load, wanted, place)
    if scale != scale_before(place.folder):
        jsonl.write_json(
            place.folder / FILE, {"schema": 1, "scale": asdict(scale), "slower": load.slower}
        )
    return scale


def scale_before(folder: Path) -> Scale | None:
    """Return the size of a race that has begun in a folder; None if none has."""
    with suppress(TypeError, KeyError):
        known = (jsonl.whole(folder / FILE) or {})["scale"]
        return Scale(known["length"], tuple(known["rates"]), known["every_s"], known["target"])
    return None


def chosen_scale(load: Load, wanted: Asked, place: Place) -> Scale:
    """Return the size of the race. A resumed race keeps its size, unless the budget now allows a
    larger one.

    Raises UsageError if not even one run fits into the budget.
    """
    before, deadline = scale_before(place.folder), place.deadline
    try:
        scale = scale_of(
            load, wanted.rates, RACING * deadline.budget_s - deadline.spent_s, deadline.budget_s
        )
    except UsageError:
        if before is None:
            raise
        return before
    if before is not None and (before.length, len(before.rates)) >= (
        scale.length,
        len(scale.rates),
    ):
        return before
    return scale


def forecast(load: Load, scale: Scale, place: Place) -> Forecast:
    """Return what the race takes on this machine, as far as that can be said before it."""
    tries = len(scale.rates)
    return Forecast(
        scale=scale,
        count=run_count(load.candidates, tries),
        ended=sum(1 for _ in place.folder.rglob(SUMMARY)),
        folder=place.folder,
        run_s=load.run_s(scale.length),
        race_s=load.race_s(scale.length, tries),
        slots=load.slots,
        spent_s=place.deadline.spent_s,
        budget_s=place.deadline.budget_s,
        ends_early=load.ends_early,
    )


def keep(folder: Path, result: Answered, scale: Scale, slower: float) -> None:
    """Write the plan of the winner, a file of hosts to fill in, and all that was printed, for
    machines.
    """
    (folder / "plan.json").write_text(result.plan.to_json(), encoding="utf-8")
    if not (folder / HOSTS).exists():  # it may be filled in
        (folder / HOSTS).write_text(hosts_of(result.plan), encoding="utf-8")
    jsonl.write_json(
        folder / FILE, {"schema": 1, "scale": asdict(scale), "slower": slower, **result.record}
    )

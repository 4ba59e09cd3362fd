"""`ashl replay`: a real run in virtual time, on the steps and transfers that it measured, as it was and with a change.

Both replays take the same steps in the same order, so that what differs is the change alone; how far the first is from
the run itself is what the replay leaves out.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ashl.calibration.spans import Record, profile_of, read_run
from ashl.config.compose import compose
from ashl.config.override import key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.files import read_profile
from ashl.plan.profile import Profile
from ashl.planning.build import Options
from ashl.run.train import run
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, seconds

REPLAYS = Path("runs/replays")
CHANGES = ("sync", "topology", "aggregate", "outer", "compression", "optimizer", "seed")
LEFT = ("runtime", "cluster", "profile", "plan", "run", "tracking", "stop", "eval", "name")  # of what the run typed
BOOKED = ("compute", "push", "pull", "wait")
COUNTED = "eval.every_commits=1000000000"  # no evaluation in between


def replay(
    folder: Path, overrides: Sequence[str], config_dir: Path | None, console: Console, *, gradients: bool, quiet: bool
) -> None:
    """Raises UsageError for what cannot be replayed."""
    record = read_run(folder)
    changes, profile = sorted_out(overrides)
    known = read_profile(str(profile)) if profile else None
    before = composed(record, (), config_dir, None, gradients)
    after = composed(record, changes, config_dir, None, gradients)
    refuse_unmeasured(record, before, after, known)
    place = REPLAYS / f"{folder.resolve().name}-{digest(folder, changes, known)}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "profile.json").write_text(profile_of(record, known).to_json(), encoding="utf-8")
    found = {"measured": dict(record.summary), "replayed": played(record, (), config_dir, place, gradients)}
    if changes:
        found["changed"] = played(record, changes, config_dir, place, gradients)
    rows = {name: in_short(summary) for name, summary in found.items()}
    record_of = {"schema": 1, "run": str(folder), "changes": changes, "kept_steps": record.kept, **rows}
    jsonl.write_json(place / "replay.json", record_of)
    if not quiet:
        show(console, record, changes, rows, place)


def sorted_out(overrides: Sequence[str]) -> tuple[list[str], Path | None]:
    """(what is changed, a profile of the same cluster). Raises UsageError for a change that no replay can make."""
    changes, profile = list[str](), None
    for text in overrides:
        group = key_of(text).partition(".")[0]
        if group == "profile":
            profile = Path(text.partition("=")[2])
        elif group in CHANGES:
            changes.append(text)
        else:
            raise UsageError(
                f"{text} is not replayed: a run measured its own model on its own cluster; changed may be "
                f"{', '.join(CHANGES)}, with profile=FILE of the same cluster where that says more"
            )
    return changes, profile


def composed(
    record: Record, changes: Sequence[str], config_dir: Path | None, place: Path | None, gradients: bool
) -> dict[str, Any]:
    """The configuration of a replay."""
    typed = [text for text in record.overrides if key_of(text).partition(".")[0] not in LEFT]
    chosen = {key_of(text) for text in changes}
    typed = [text for text in typed if not any(key_of(text).startswith(f"{group}.") for group in chosen)]
    own = ["runtime=sim", f"runtime.gradients={str(gradients).lower()}", "tracking=none", COUNTED]
    own += [f"stop.steps={record.summary['steps']}"]
    if place is not None:
        own += ["cluster=profile", f"profile={place / 'profile.json'}"]
    return compose([*{key_of(text): text for text in (*typed, *own, *changes)}.values()], config_dir)


def refuse_unmeasured(
    record: Record, before: Mapping[str, Any], after: Mapping[str, Any], known: Profile | None
) -> None:
    """Raises UsageError where a change needs costs that neither the run nor a profile has."""
    full = known.full if known else None
    (was, had), (topology, has) = ((c["choices"]["topology"], c["topology"].get("algorithm")) for c in (before, after))
    if (topology, has) != (was, had):
        then, now = (f"topology={was}", f"topology={topology}")
        if topology == was:
            then, now = (f"topology.algorithm={'null' if own is None else own}" for own in (had, has))
        raise UsageError(
            f"the run exchanged by {then}, and {now} needs what it did not measure; compare them in virtual time, by "
            "`ashl sweep runtime=sim cluster=profile profile=FILE`"
        )
    if after["compression"] == before["compression"]:
        return
    codec = Options(after["allow_targets"]).of("compression", after["compression"])
    name = after["choices"]["compression"]
    if full is None:
        raise UsageError(
            f"compression={name} sends other bytes than the run did, which knows transfers of one size; give "
            f"profile=FILE of this cluster, from `ashl profile --full compression={name}`"
        )
    if not codec.flags.lossless and full.coding(after["compression"]["_target_"]) is None:
        raise UsageError(
            f"the profile has not timed compression={name}; measure it with `ashl profile --full compression={name}`"
        )
    if not record.server:
        raise UsageError(
            f"compression={name} changes how the workers of an all-reduce exchange, which the run did not measure; "
            "compare them in virtual time, by `ashl sweep runtime=sim cluster=profile profile=FILE`"
        )


def digest(folder: Path, changes: Sequence[str], known: Profile | None) -> str:
    text = "\n".join([str(folder.resolve()), *changes, known.digest if known else ""])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def played(
    record: Record, changes: Sequence[str], config_dir: Path | None, place: Path, gradients: bool
) -> dict[str, Any]:
    """The summary of one replay."""
    config = composed(record, changes, config_dir, place, gradients)
    folder = place / ("changed" if changes else "replayed")
    ran = run({**config, "run": {**config["run"], "dir": str(folder)}}, list(changes), quiet=True, silent=True)
    if ran.summary is None:
        raise AshlError("a replay runs by itself, and not in a job; start it without torchrun")
    return ran.summary


def in_short(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """What is compared."""
    steps = summary["steps"] or 1
    booked = {kind: sum(w[f"{kind}_s"] for w in summary["workers"]) / steps for kind in BOOKED}
    return {
        "time_s": summary["time_s"],
        "steps_per_s": summary["steps_per_s"],
        "wait_share": summary["wait_share"],
        "test_accuracy": (summary["final"] or {}).get("test_accuracy"),
        **{f"{kind}_s": value for kind, value in booked.items()},
    }


def show(
    console: Console, record: Record, changes: Sequence[str], rows: Mapping[str, Mapping[str, Any]], place: Path
) -> None:
    """The run, the replay, and what the change alone brings."""
    titles = {"measured": "as it was", "replayed": "replayed", "changed": " ".join(changes)}
    table = Table("", "time", "steps/s", "waiting", "accuracy", box=None, padding=(0, 2, 0, 0))
    for name, row in rows.items():
        cells = (seconds(row["time_s"]), number(row["steps_per_s"]), percent(row["wait_share"]))
        table.add_row(titles[name], *cells, percent(row["test_accuracy"]))
    console.print(table)
    measured, replayed = rows["measured"], rows["replayed"]
    off, wait = replayed["time_s"] / measured["time_s"] - 1, replayed["wait_share"] - measured["wait_share"]
    console.print(f"The replay is off by {off:+.1%} in time and {wait:+.3f} in wait share.", soft_wrap=True)
    if "changed" in rows:
        share = rows["changed"]["time_s"] / replayed["time_s"] - 1
        what = "as long" if abs(share) < 5e-4 else f"{percent(abs(share))} {'longer' if share > 0 else 'shorter'}"
        console.print(
            f"On the same steps and transfers, {' '.join(changes)} alone would have been {what} for "
            f"{record.summary['steps']:,} steps.",
            soft_wrap=True,
        )
    if record.kept < record.summary["steps"]:
        console.print(
            f"note: {record.kept:,} of {record.summary['steps']:,} steps were kept, and they start over; "
            "tracking.events=all keeps them all",
            soft_wrap=True,
        )
    console.print(f"folder  {place}", soft_wrap=True, markup=False)

"""`ashl calibrate`: short real runs and the same in virtual time from the cluster's profile, compared; what they have
in common and the error beyond it are stored with the profile, and every later prediction from it has both."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from ashl.calibration.combinations import LeftOut, Pair, chosen, codec_names, codecs_of, pairs_of, tasks_of, usual
from ashl.calibration.compared import Compared, Verdict, compared, verdict
from ashl.calibration.page import page
from ashl.calibration.sentences import announce, show, show_pairs
from ashl.cluster.spec import Cluster
from ashl.config.compose import alternatives, compose
from ashl.config.identity import config_hash
from ashl.config.override import key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.calibration import Calibration
from ashl.plan.files import read_profile
from ashl.plan.profile import Profile
from ashl.planning.build import Options
from ashl.run.measured import load, now, versions
from ashl.run.on_hosts import fetch, job_size, run_job, size_there
from ashl.run.profile import profile as measure
from ashl.run.ssh import Launch
from ashl.run.train import is_virtual
from ashl.study.grid import Grid, Setting, alone
from ashl.study.slots import here, on_hosts, run_all
from ashl.study.sweep import RunJobs, begun, clear, ended, fill, locked
from ashl.tracking import jsonl
from ashl.tracking.deadline import Deadline
from ashl.tracking.sweep_progress import SweepProgress

CALIBRATIONS = Path("runs/calibrations")
FILE, PAGE = "calibration.json", "calibration.html"
SCHEMA = 1
WORKERS = "cluster.num_workers=4"  # of processes that are there, where nothing is said


@dataclass(frozen=True)
class Place:
    """Where and with what means it is done."""

    folder: Path
    typed: tuple[str, ...]
    config_dir: Path | None
    seconds: float  # of each run
    deadline: Deadline
    console: Console
    quiet: bool
    where: Launch | None  # the hosts of its real runs; None = they start here


def calibrate(
    overrides: Sequence[str],
    config_dir: Path | None,
    console: Console,
    *,
    seconds: float,
    budget_s: float,
    dry_run: bool,
    quiet: bool,
    where: Launch | None = None,
) -> None:
    """Raises UsageError and DataMissingError for what cannot be calibrated, AshlError where nothing can be compared."""
    typed, by_model = sorted_out(overrides, config_dir, where)
    tasks, first = tasks_of(typed), {}
    for task in tasks:
        config = compose([*usual(typed), *task, *next(iter(chosen(typed).values()))], config_dir)
        first[config["choices"]["model"]] = task, config
    if strangers := by_model.keys() - first.keys():
        raise UsageError(
            f"profile={by_model[min(strangers)]} is of the model {min(strangers)}, and what is calibrated is "
            f"{' and '.join(first)}; say model= and dataset= as it was profiled with, or give another profile"
        )
    place = Place(
        folder_of(first, by_model),
        tuple(typed),
        config_dir,
        seconds,
        Deadline(budget_s),
        console,
        quiet,
        where,
    )
    if dry_run:
        show_pairs(console, first, chosen(typed), seconds, place.folder)
        return
    with locked(place.folder):
        before = load()
        profiles = {name: by_model.get(name) or profiled(name, *first[name], place) for name in first}
        record = taken_up(place, profiles, before)
        bare = {name: uncalibrated(name, path, place.folder) for name, path in profiles.items()}
        pairs, left_out = planned(place, bare, {name: task for name, (task, _) in first.items()})
        if not quiet:
            announce(console, pairs, left_out, place.folder, budget_s, before)
        run_pairs(pairs, place)
        rows = concluded(pairs, left_out, place, profiles)
        result = verdict(rows)
        stored = store(result, profiles)
        document = {**record, "status": "whole" if len(rows) == len(pairs) else "part", **as_record(result, left_out)}
        jsonl.write_json(place.folder / FILE, {**document, "load": {"before": before, "after": load()}})
        (place.folder / PAGE).write_text(page(result, left_out, document, " ".join(["ashl calibrate", *overrides])))
    show(console, result, left_out, stored, place.folder / PAGE, len(pairs))


def sorted_out(
    overrides: Sequence[str], config_dir: Path | None, where: Launch | None
) -> tuple[list[str], dict[str, Path]]:
    """(what holds for every run, profiles by their models). Raises UsageError."""
    typed, by_model = list[str](), dict[str, Path]()
    for text in {key_of(text): text for text in overrides}.values():
        values = alternatives(text, config_dir)
        if key_of(text) == "profile":
            for value in values:
                path = Path(value.partition("=")[2])
                by_model[read_profile(str(path)).model] = path
        elif len(values) > 1:
            raise UsageError(f"{text} gives several values, and all runs of a calibration have one; give one")
        elif key_of(text) == "stop" or key_of(text).startswith("stop."):
            raise UsageError(f"{text}: how long runs are follows from --seconds; drop it")
        else:
            typed.append(text)
    config = compose(typed, config_dir)
    kind = config["runtime"]["_target_"]
    if is_virtual(config) or not kind.endswith("TorchrunRuntime" if where else "LocalRuntime"):
        own = "torchrun, as `ashl launch` understands it" if where else "local"
        raise UsageError(
            f"a calibration compares virtual time with real runs that it starts itself; take runtime={own}"
        )
    keys = {key_of(text) for text in typed}
    if "cluster" not in keys:
        typed.append("cluster=real")
    if "cluster=real" in typed and not keys & {"cluster.num_workers", "cluster.hosts"}:
        found = {str(path): read_profile(str(path)).num_workers for path in by_model.values()}
        typed.append(f"cluster.num_workers={next(iter(found.values()))}" if found else WORKERS)
    return typed, by_model


def folder_of(first: dict[str, tuple[tuple[str, ...], dict[str, Any]]], by_model: dict[str, Path]) -> Path:
    """Where it lies: named by the task, the cluster, and the profiles that were given."""
    configs = [config for _, config in first.values()]
    if configs[0]["run"]["dir"]:
        return Path(configs[0]["run"]["dir"]).expanduser()
    text = "".join([*map(config_hash, configs), *sorted(map(str, by_model.values()))])
    return CALIBRATIONS / f"{configs[0]['name'] or 'calibration'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def profiled(name: str, task: Sequence[str], config: dict[str, Any], place: Place) -> Path:
    """The profile of this model, measured in full unless an earlier call has; of a declared cluster, as it declares."""
    folder = place.folder / f"profile-{name}"
    if (folder / "profile.json").exists():
        return folder / "profile.json"
    shutil.rmtree(folder, ignore_errors=True)
    cluster = Options(config["allow_targets"]).of("cluster", config["cluster"])
    if isinstance(cluster, Cluster) and not cluster.missing():
        virtual = compose([*usual(place.typed), *task, "runtime=sim"], place.config_dir)
        measure({**virtual, "run": {**virtual["run"], "dir": str(folder)}}, [], quiet=True)
        return folder / "profile.json"
    if not place.quiet:
        place.console.print(f"measuring what {name} costs here in full, into {folder}", soft_wrap=True)
    found = chosen(place.typed)
    if place.where is None:
        codecs = codecs_of(found, place.typed, place.config_dir)
        measure({**config, "run": {**config["run"], "dir": str(folder)}}, [], quiet=True, full=True, codecs=codecs)
    else:
        measured_there([*usual(place.typed), *task, *next(iter(found.values()))], config, folder, place.where, place)
    return folder / "profile.json"


def uncalibrated(name: str, path: Path, folder: Path) -> Path:
    """The profile as it was measured, whatever another calibration has made of it."""
    bare = folder / f"uncalibrated-{name}.json"
    jsonl.write_json(bare, asdict(replace(read_profile(str(path)), calibration=None)))
    return bare


def measured_there(texts: Sequence[str], config: dict[str, Any], folder: Path, where: Launch, place: Place) -> None:
    """The same by `ashl launch`; the first host has the file. Raises AshlError."""
    codecs = [f"--codec={name}" for name in codec_names(chosen(place.typed))]
    options = ["--full", "--quiet", *codecs, *(["--config-dir", str(place.config_dir)] if place.config_dir else [])]
    code = run_job(where, job_size(config, where), ["profile", *options, *texts, f"run.dir={folder}"])
    folder.mkdir(parents=True, exist_ok=True)
    if code or not ((folder / "profile.json").exists() or fetch(where, folder)):
        raise AshlError(f"the hosts could not be measured: `ashl launch -- profile --full` ended with exit code {code}")


def taken_up(place: Place, profiles: dict[str, Path], before: dict[str, float]) -> dict[str, Any]:
    """The record of this calibration, begun or gone on with. Raises UsageError where what has run is of other
    profiles."""
    of = {name: {"file": str(path), "digest": read_profile(str(path)).digest} for name, path in profiles.items()}
    known = jsonl.whole(place.folder / FILE)
    for name, own in ((known or {}).get("profiles") or {}).items():
        if name in of and own.get("digest") != of[name]["digest"]:
            raise UsageError(
                f"the calibration in {place.folder} is older than profile={of[name]['file']}, which was measured anew "
                "since; delete that folder, or give another run.dir"
            )
    record = {"schema": SCHEMA, "made": now(), "versions": versions(), "profiles": of, "typed": list(place.typed)}
    jsonl.write_json(place.folder / FILE, {**record, "status": "running", "load": {"before": before}})
    return record


def planned(
    place: Place, profiles: dict[str, Path], tasks: dict[str, tuple[str, ...]]
) -> tuple[list[Pair], list[LeftOut]]:
    pairs, left_out = list[Pair](), list[LeftOut]()
    processes = alone if place.where is None else partial(size_there, where=place.where)
    with place.console.status("planning") as status:
        for name, path in profiles.items():

            def show_progress(what: str, name: str = name) -> None:
                status.update(f"planning {name}: {what}")

            found, out = pairs_of(
                tasks[name], place.typed, path, place.seconds, place.config_dir, show_progress, processes
            )
            pairs += found
            left_out += [LeftOut(f"{name}: {own.name}", own.reason) for own in out]
    if len(pairs) < 2:
        why = f" ({left_out[0].name}: {left_out[0].reason})" if left_out else ""
        raise UsageError(f"fewer than two combinations are left to compare{why}; drop some of what was typed")
    return pairs, left_out


def run_pairs(pairs: Sequence[Pair], place: Place) -> None:
    """All that has not ended yet: virtual runs on all cores, and then the real ones, one at a time."""
    virtual, cores = [pair.virtual for pair in pairs], len(os.sched_getaffinity(0))
    run(virtual, place.folder / "virtual", place, partial(run_all, cores), quiet=True)
    one = here if place.where is None else partial(on_hosts, where=place.where, config_dir=place.config_dir)
    run([pair.real for pair in pairs], place.folder / "real", place, partial(run_all, 1, run=one), quiet=place.quiet)


def run(settings: Sequence[Setting], folder: Path, place: Place, run_jobs: RunJobs, *, quiet: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [own for own in settings if not ended(folder / own.hash, rerun_failed=True)]
    if not waiting or place.deadline.left_s <= 0:
        return
    grid = Grid({}, tuple(settings), (), {}, 0)
    record = begun(grid, place.typed, folder, keep_dropped=False)
    progress = SweepProgress(place.console, len(waiting), quiet=quiet, deadline=place.deadline)
    fill(grid, record, folder, waiting, run_jobs, progress, over=lambda: place.deadline.left_s <= 0)
    for own in waiting:
        if not ended(folder / own.hash, rerun_failed=False):
            clear(folder / own.hash)  # cut off by the budget: the same command runs it again


def concluded(
    pairs: Sequence[Pair], left_out: list[LeftOut], place: Place, profiles: dict[str, Path]
) -> list[Compared]:
    """Those that can be compared; the others are left out with the reason. Raises AshlError for fewer than two."""
    known = {name: read_profile(str(path)) for name, path in profiles.items()}
    rows = list[Compared]()
    for pair in pairs:
        row = compared(pair, place.folder / "real", place.folder / "virtual", known[pair.model])
        if isinstance(row, Compared):
            rows.append(row)
        else:
            left_out.append(LeftOut(pair.label, row))
    if len(rows) < 2:
        raise AshlError(
            f"fewer than two combinations have ended in {place.deadline.budget_s:g} s ({left_out[-1].name}: "
            f"{left_out[-1].reason}); give --budget more: the same command goes on"
        )
    return rows


def store(result: Verdict, profiles: dict[str, Path]) -> dict[str, Profile]:
    """The profiles with the error of their model, written where they were."""
    stored = {}
    for name, path in profiles.items():
        known = read_profile(str(path))
        own = result.models.get(name)
        if own is None:
            continue
        calibration = Calibration(
            made=now(),
            of=known.digest,
            model=own,
            overall=result.overall,
            inside=result.held_back.inside,
            held_back=len(result.held_back.off),
        )
        stored[name] = replace(known, calibration=calibration)
        jsonl.write_json(path, asdict(stored[name]))
    return stored


def as_record(result: Verdict, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """For machines."""
    return {
        "combinations": [row.record for row in result.rows],
        "left_out": [own._asdict() for own in left_out],
        "measured_over_predicted": {of: result.spread(of) for of in ("steps_per_s", "step_bytes", "round_s")},
        "wait_share_difference": result.spread("wait_share"),
        "median_error": result.median_error,
        "worst": {"name": f"{result.worst.model}: {result.worst.name}", "ratio": result.worst.ratio},
        "component": result.weakest,
        "errors": {"overall": asdict(result.overall), **{model: asdict(own) for model, own in result.models.items()}},
        "held_back": {
            "inside": result.held_back.inside,
            "of": len(result.held_back.off),
            "median_error": median(result.held_back.off) if result.held_back.off else None,
            "worst": max(result.held_back.off, default=None),
        },
    }

"""Read run folders and sweep folders; what is missing, unfinished or broken is left out by name."""

import math
import os
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ashl.config.flat import flat_config
from ashl.config.identity import WHERE, config_hash
from ashl.config.override import group_of, key_of
from ashl.config.recorded import CONFIG, read_yaml, typed_command, typed_settings
from ashl.errors import UsageError
from ashl.plan.plan import TARGETS
from ashl.tracking import jsonl
from ashl.tracking.killed import close_killed
from ashl.tracking.recorder import SWEEP

SUMMARY, REPORT = "summary.json", "report.html"
STATUSES = ("finished", "diverged", "failed", "interrupted")
NUMBERS = ("time_s", "time_to_target_s", *TARGETS, "steps_per_s", "samples_per_s", "wait_share")
NUMBERS += ("comm_hidden_share", "goodput", "bytes_up", "bytes_down", "num_workers")
RESULTS = ("train_loss", "test_loss", "test_accuracy")  # of an evaluation, in summary.json
MAX_FOLDERS = 10_000  # maximum number of folders that are searched for runs
SCORES = ("test/acc", "test/loss", "train/loss", "bytes_up", "bytes_down")

Child = tuple[Path, str, dict[str, str], str]  # of a sweep: folder, hash, axes, label


class BrokenRecordError(Exception):
    """The folder is no run that can be read; the message gives the reason."""


@dataclass(frozen=True)
class LeftOut:
    """A named folder, or a setting of a sweep, that no figure shows, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder.

    `config` is flat: dotted keys, and each group's option by its name. Evaluations are read on
    demand.
    """

    folder: Path
    hash: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)  # values of the sweep's axes
    label: str = ""  # label of its line of the sweep
    dropped: bool = False  # True if a race stopped it before its end

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    @property
    def has_known_outcome(self) -> bool:
        """True if the outcome is known: a run that crashed or was interrupted might have reached
        the target.
        """
        reached = self.summary.get("time_to_target_s") is not None
        return self.summary["status"] in ("finished", "diverged") or reached or self.dropped

    @property
    def observed_s(self) -> float:
        """Seconds for which it was observed; infinite if it diverged, as it cannot go on."""
        diverged = self.summary["status"] == "diverged"
        return math.inf if diverged else self.summary.get("time_s") or 0.0

    @property
    def metric(self) -> tuple[str, bool] | None:
        """The task's own metric and True if higher is better; None if it is an accuracy."""
        name, higher = self.summary.get("metric"), self.summary.get("higher_is_better")
        return (
            (name, higher)
            if isinstance(name, str) and name != "accuracy" and isinstance(higher, bool)
            else None
        )

    @cached_property
    def typed_values(self) -> Mapping[str, str]:
        """Typed keys and their values, as written; empty if `overrides.yaml` is missing."""
        try:
            return {key_of(text): text.partition("=")[2] for text in typed_settings(self.folder)}
        except UsageError:
            return {}

    @cached_property
    def command(self) -> str:
        """The command that repeats the run, quoted for a shell; "" if it is unknown.

        It is the typed command, or that of its sweep with the run's own overrides.
        """
        if typed := typed_command(self.folder):
            return typed
        train = (jsonl.read_json(self.folder.parent / SWEEP) or {}).get("train")
        own = [
            f"{key}={value}"
            for key, value in self.typed_values.items()
            if key not in ("run.dir", "sweep")
        ]
        return f"{train} {shlex.join(own)}" if train else ""

    @cached_property
    def metrics(self) -> tuple[Mapping[str, Any], ...]:
        """The evaluations, in order of time. Raises BrokenRecordError."""
        try:
            rows = tuple(jsonl.read(self.folder / "metrics.jsonl"))
            if all(math.isfinite(row["time_s"]) and are_numbers(row, SCORES) for row in rows):
                return rows
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        raise BrokenRecordError("metrics.jsonl is missing or broken")


@dataclass(frozen=True)
class Study:
    """The runs that were read.

    `sweep` is the content of `sweep.json`, if one sweep and nothing else was named.
    """

    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]
    skipped: tuple[LeftOut, ...]  # points of the grid that cannot run
    dropped: tuple[LeftOut, ...]  # runs that racing dropped before their end
    sweep: Mapping[str, Any] | None
    folder: Path | None  # folder of the sweep

    @cached_property
    def ended_badly(self) -> tuple[LeftOut, ...]:
        """The runs that failed, diverged or were interrupted, except by a race."""
        found = []
        for run in self.runs:
            status, why = run.summary["status"], str(run.summary.get("exit_reason") or "")
            if status != "finished" and not run.dropped:
                reason = ": ".join(filter(None, [status, " ".join(why.split())]))
                found.append(LeftOut(str(run.folder), reason))
        return tuple(found)


def read_study(paths: Sequence[Path]) -> Study:
    """Return the runs in these folders.

    Raises: UsageError if a folder does not exist, or no folder has a run.
    """
    for path in paths:
        if not path.is_dir():
            raise UsageError(
                f"{path} is no folder; name the folder of a run or of a sweep, for"
                " example runs/sweeps/NAME."
            )
    runs: dict[Path, Run] = {}
    left_out: list[LeftOut] = []
    skipped: list[LeftOut] = []
    dropped: list[LeftOut] = []
    sweep = None
    paths = [folder for path in paths for folder in find_folders(path)]
    for path in paths:
        children: list[Child] = [(path, "", {}, "")]
        reasons: dict[str, str] = {}  # why a race dropped a setting, by the hash of the setting
        if (path / SWEEP).exists():
            try:
                sweep, children, reasons, skipped_points = read_sweep(path)
            except BrokenRecordError as error:
                left_out.append(LeftOut(str(path), str(error)))
                continue
            skipped += skipped_points
        for folder, digest, axes, label in children:
            if digest in reasons:
                point = " ".join(f"{key}={value}" for key, value in axes.items())
                named = ": ".join(filter(None, (label, point)))
                dropped.append(LeftOut(f"{named} ({digest})", reasons[digest]))
            try:
                run = read_run(folder, digest, axes, label)
                runs[folder.resolve()] = replace(
                    run, dropped=digest in reasons and run.summary["status"] == "interrupted"
                )
            except BrokenRecordError as error:
                left_out += [] if digest in reasons else [LeftOut(str(folder), str(error))]
    if not runs:
        why = "; ".join(f"{out.name}: {out.reason}" for out in left_out[:3]) or "the sweep has none"
        raise UsageError(
            f"There is no finished run to read ({why}); run `ashl train` or `ashl sweep`."
        )
    is_one_sweep = len(paths) == 1 and sweep is not None
    return Study(
        runs=tuple(runs.values()),
        left_out=tuple(left_out),
        skipped=tuple(skipped),
        dropped=tuple(dropped),
        sweep=sweep if is_one_sweep else None,
        folder=paths[0] if is_one_sweep else None,
    )


def leave_out_repeats(study: Study) -> Study:
    """Leave out the runs in virtual time that repeat an earlier one: same configuration, seed
    included, and same result. They are no further evidence.
    """
    found: dict[Any, Run] = {}
    runs, left_out = [], list(study.left_out)
    for run in study.runs:
        # `hash` does not have the names of options, and two names may stand for equal values.
        config = sorted((key, str(value)) for key, value in run.config.items())
        causes = tuple(pair for pair in config if group_of(pair[0]) not in WHERE)
        result = causes, run.summary.get("params_sha256"), run.summary.get("time_s")
        first = found.setdefault(result, run)
        if first is run or run.summary.get("time_kind") != "virtual":
            runs.append(run)
            continue
        why = f"is the run {first.folder} again: virtual time repeats a run exactly"
        left_out.append(LeftOut(str(run.folder), why))
    return replace(study, runs=tuple(runs), left_out=tuple(left_out))


def find_folders(path: Path) -> list[Path]:
    """Return the runs and sweeps inside a folder; the folder itself if it is one or contains none.

    MLflow's own folders are ignored.
    Raises: UsageError if too many other folders are there, for example in `/`.
    """
    found = []
    others = 0
    for place, folders, files in os.walk(path):
        if not {SWEEP, SUMMARY, CONFIG}.isdisjoint(files):
            found.append(Path(place))
            folders.clear()
        else:
            others += 1
        if others > MAX_FOLDERS:
            raise UsageError(
                f"{path} has more than {MAX_FOLDERS:,} folders without a run; name a folder nearer"
                " to the runs, for example runs"
            )
        folders[:] = sorted(
            folder for folder in folders if folder != "artifacts" and not folder.startswith(".")
        )
    return found or [path]


def read_sweep(path: Path) -> tuple[dict[str, Any], list[Child], dict[str, str], list[LeftOut]]:
    """Return `sweep.json`, its settings, the reasons of dropped settings by hash, and the skipped
    points.

    Raises: BrokenRecordError.
    """
    sweep = read_json(path / SWEEP)
    try:
        children: list[Child] = []
        for setting in sweep.get("settings") or ():
            place = str(setting.get("folder") or setting["hash"])
            axes = {str(key): str(value) for key, value in (setting.get("axes") or {}).items()}
            label = str(setting.get("label") or "")
            children.append((path / place, str(setting.get("hash") or place), axes, label))
        reasons = {str(drop["hash"]): _drop_reason(drop) for drop in sweep.get("dropped") or ()}
        skipped = group_skipped(
            [
                (point.get("overrides") or (), str(point.get("reason")))
                for point in sweep.get("skipped") or ()
            ],
            sweep.get("axes") or {},
        )
    except (TypeError, ValueError, AttributeError, KeyError):
        raise BrokenRecordError("sweep.json is broken") from None
    return sweep, children, reasons, skipped


def group_skipped(
    points: Iterable[tuple[Sequence[str], str]], axes: Container[str]
) -> list[LeftOut]:
    """Return skipped points of a grid with their reasons: one entry for those that differ in their
    seed only, named by the keys that vary in the grid.

    Args: points has the overrides of each point, and its reason; axes are the keys that vary.
    """
    counts: dict[LeftOut, int] = {}
    for overrides, reason in points:
        varied = [text for text in overrides if key_of(text) in axes and key_of(text) != "seed"]
        out = LeftOut(" ".join(varied or overrides), reason)
        counts[out] = counts.get(out, 0) + 1
    return [
        replace(out, name=f"{out.name} ({count} seeds)" if count > 1 else out.name)
        for out, count in counts.items()
    ]


def _drop_reason(drop: Mapping[str, Any]) -> str:
    if drop["at_s"] == 0:
        return f"before it began, because of another seed: {drop['reason']}"
    return f"after {drop['at_s']:.3g} s, {drop['reason']}"


def read_run(
    folder: Path, digest: str = "", axes: Mapping[str, str] | None = None, label: str = ""
) -> Run:
    """Return the run of a folder. Raises BrokenRecordError."""
    if not folder.is_dir():
        raise BrokenRecordError("has not run")
    if not (folder / SUMMARY).exists() and not (
        (folder / CONFIG).exists() and close_killed(folder)
    ):
        known = (folder / CONFIG).exists()
        raise BrokenRecordError(
            "no summary.json: it has not ended" if known else "is no run folder"
        )
    summary = read_json(folder / SUMMARY)
    if not is_summary(summary):
        raise BrokenRecordError("summary.json is broken")
    if summary.get("exit_reason") == "profiled":
        raise BrokenRecordError("is a profile, in which nothing was learned")
    try:
        config = read_yaml(folder, CONFIG)
        return Run(
            folder, digest or config_hash(config), flat_config(config), summary, axes or {}, label
        )
    except (UsageError, ValueError, TypeError, KeyError, AttributeError):
        raise BrokenRecordError("config.yaml is missing or broken") from None


def is_summary(summary: Mapping[str, Any]) -> bool:
    """Return True if the values that are read from a summary have the right types."""
    if summary.get("status") not in STATUSES or type(summary.get("seed")) is not int:
        return False
    workers, measures = summary.get("workers") or [], summary.get("measures") or {}
    if not isinstance(workers, list) or not isinstance(measures, dict):
        return False
    checked: list[tuple[Any, Sequence[str]]] = [(summary, NUMBERS)]
    checked += [(summary.get(part) or {}, RESULTS) for part in ("final", "best")]
    checked += [(found, ("last", "mean")) for found in measures.values()]
    checked += [(worker, [*worker] if isinstance(worker, dict) else ()) for worker in workers]
    return all(isinstance(part, dict) and are_numbers(part, keys) for part, keys in checked)


def are_numbers(record: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Return True if the values of these keys are numbers or missing."""
    return all(record.get(key) is None or type(record[key]) in (int, float) for key in keys)


def read_json(path: Path) -> dict[str, Any]:
    """Return one JSON object. Raises BrokenRecordError."""
    if (content := jsonl.read_json(path)) is None:
        raise BrokenRecordError(f"{path.name} is broken")
    return content

"""Compose and check a grid of settings as a whole, before anything runs."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ashl.config.compose import alternatives, compose
from ashl.config.identity import config_hash
from ashl.config.override import index_by_key, key_of
from ashl.errors import DataMissingError, NoEffectError, UnusedKeyError, UsageError
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import compile_plan

MAX_POINTS = 10_000

# Returns the number of processes of the job that will run this configuration. None = there is no
# job, and a run starts its processes itself.
Processes = Callable[[dict[str, Any]], int | None]


class Line(NamedTuple):
    """A grid: the product of the alternatives of each override.

    `label` names its settings in tables.
    """

    alternatives: Sequence[Sequence[str]]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the grid: its overrides and the configuration that they compose."""

    hash: str  # of the configuration; it names the run's folder
    overrides: tuple[str, ...]
    axes: dict[str, str]  # the value of each key that varies over the settings
    config: dict[str, Any]
    # seconds on the experiment's clock; None if the plan has no prediction
    predicted_s: float | None
    label: str = ""  # name in tables and figures, if the line of the grid has one
    # The plan is shared by settings that differ in their seed only.
    plan: Plan | None = field(default=None, repr=False, compare=False)


def label(setting: Setting, without: str = "") -> str:
    """Return the text that distinguishes this setting from the others of its grid.

    It is empty if the settings differ by the key `without` alone.
    """
    values = [f"{key}={value}" for key, value in setting.axes.items() if key != without]
    found = ": ".join(filter(None, [setting.label, " ".join(values)]))
    return found or ("" if without else setting.hash)


class Skipped(NamedTuple):
    """A point that cannot run, and why."""

    overrides: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Grid:
    """The checked grid.

    `unused` counts, by key, the points from which a key was removed, because the chosen option
    lacks it or it has no effect. `reasons` gives, for one point of each such key, why it has no
    effect. `merged` counts points with the same configuration as an earlier point.
    """

    axes: dict[str, list[str]]
    settings: tuple[Setting, ...]
    skipped: tuple[Skipped, ...]
    unused: dict[str, int]
    merged: int
    reasons: dict[str, str] = field(default_factory=dict)


def grid_lines(overrides: Sequence[str], config_dir: Path | None) -> list[Line]:
    """Return the grid of the overrides, or one grid for each line of the `sweep` list of a preset.

    A line may have a `label`. A key of the command line applies to every line.
    """
    last = index_by_key(overrides)
    typed = [alternatives(text, config_dir) for text in last.values()]
    keys = last.keys()
    preset = next((s for s in typed if key_of(s[0]) == "experiment"), None)
    lines = compose([preset[0]], config_dir)["sweep"] if preset and len(preset) == 1 else None
    if lines is None:
        return [Line(typed)]
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise UsageError("sweep must be a list of lines like `- {sync: bsp, optimizer.lr: 0.1}`.")
    if any("allow_targets" in line for line in lines):
        raise UsageError(
            "sweep: a file cannot allow code to be imported; type allow_targets on the command"
            " line."
        )
    found = []
    for line in lines:
        own = {key: value for key, value in line.items() if key not in {"label", *keys}}
        texts = [f"{key}={'null' if value is None else value}" for key, value in own.items()]
        singles = [alternatives(text, config_dir) for text in texts]
        found.append(Line([*singles, *typed], " ".join(str(line.get("label", "")).split())))
    return found


def points(lines: Sequence[Line]) -> dict[tuple[str, ...], str]:
    """Return every combination of each line's alternatives with the label of its line, in order.

    Raises: UsageError for no combination or too many.
    """
    size = sum(math.prod(map(len, line.alternatives)) for line in lines)
    if size > MAX_POINTS:
        raise UsageError(
            f"this grid has {size:,} points, and {MAX_POINTS:,} is the most that a sweep takes;"
            " drop values or axes, or search it with --search 20"
        )
    if not size:
        raise UsageError(
            "this grid is empty; give at least one setting, as in `ashl sweep sync=bsp,ssp"
            " seed=0,1,2`"
        )
    found: dict[tuple[str, ...], str] = {}
    for line in lines:
        for point in itertools.product(*line.alternatives):
            found.setdefault(point, line.label)
    return found


def axes_of(lines: Sequence[Line]) -> dict[str, list[str]]:
    """Return the keys that vary over the lines, with their values in the order of writing."""
    values: dict[str, list[str]] = {}
    for line in lines:
        for singles in line.alternatives:
            for single in singles:
                values.setdefault(key_of(single), []).append(single.partition("=")[2])
    everywhere = {
        key
        for key in values
        if all(any(key == key_of(a[0]) for a in line.alternatives) for line in lines)
    }
    found = {key: list(dict.fromkeys(options)) for key, options in values.items()}
    return {
        key: options for key, options in found.items() if len(options) > 1 or key not in everywhere
    }


def make_grid(
    lines: Sequence[Line],
    config_dir: Path | None = None,
    *,
    strict: bool = False,
    progress: Callable[[int, int], None] = lambda done, size: None,
    processes: Processes = lambda config: None,
) -> Grid:
    """Compose and plan every point; a point that cannot run is skipped with its reason.

    A key that the chosen option lacks is removed from a point if another chosen option has it, and
    a key without effect is removed as well. Points that become equal are merged.

    Args: strict makes a point that cannot run an error.
    Raises: UsageError and DataMissingError for faults of the whole grid.
    """
    wanted, axes = points(lines), axes_of(lines)
    compose_once = cache_across_seeds(config_dir)
    settings: dict[str, Setting] = {}
    skipped: list[Skipped] = []
    plans: dict[str, Plan | UsageError] = {}
    used: set[str] = set()
    unused: dict[str, int] = {}
    reasons: dict[str, str] = {}
    first: UsageError | None = None
    merged = 0
    for number, (point, label) in enumerate(wanted.items()):
        progress(number, len(wanted))
        try:
            kept, config, plan = check_point(point, compose_once, plans, processes, reasons)
        except UsageError as error:
            if strict:
                raise UsageError(f"{' '.join(point)}: {error}") from error
            first = first or error
            skipped.append(Skipped(point, str(error)))
            continue
        chosen = {key_of(single): single.partition("=")[2] for single in kept}
        used |= chosen.keys()
        for key in {key_of(single) for single in point} - chosen.keys():
            unused[key] = unused.get(key, 0) + 1
        digest = config_hash(config)
        if digest in settings:
            merged += 1
            continue
        settings[digest] = Setting(
            hash=digest,
            overrides=kept,
            axes={key: chosen[key] for key in axes if key in chosen},
            config=config,
            predicted_s=plan.predicted_s,
            label=label,
            plan=plan,
        )
    if not settings:
        assert first is not None
        if len(wanted) == 1:
            raise first
        raise UsageError(f"no setting of this sweep can be run; the first: {first}")
    for key in unused.keys() - used - reasons.keys():
        raise UsageError(
            f"no option that this sweep chooses has the key {key}; `ashl list` shows what there is"
        )
    found = settings.values()
    # An axis that has one value left, as all points with another one are skipped, names no setting.
    alike = {key for key in axes if len({setting.axes.get(key) for setting in found}) == 1}
    named = tuple(
        replace(setting, axes={key: own for key, own in setting.axes.items() if key not in alike})
        for setting in found
    )
    return Grid(axes, named, tuple(skipped), unused, merged, reasons)


def cache_across_seeds(config_dir: Path | None) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return `compose` with a cache: settings that differ in their seed only are composed once.

    No other value depends on the seed.
    """
    composed: dict[tuple[str, ...], dict[str, Any]] = {}

    def compose_once(point: Sequence[str]) -> dict[str, Any]:
        seeds = [single.removeprefix("seed=") for single in point if single.startswith("seed=")]
        if len(seeds) != 1 or not seeds[0].isdecimal():
            return compose(point, config_dir)
        rest = tuple(single for single in point if not single.startswith("seed="))
        if rest not in composed:
            composed[rest] = compose(rest, config_dir)
        return {**composed[rest], "seed": int(seeds[0])}

    return compose_once


def check_point(
    point: tuple[str, ...],
    compose: Callable[[Sequence[str]], dict[str, Any]],
    plans: dict[str, Plan | UsageError],
    processes: Processes = lambda config: None,
    reasons: dict[str, str] | None = None,
    drops: type[UnusedKeyError] = UnusedKeyError,
) -> tuple[tuple[str, ...], dict[str, Any], Plan]:
    """Return a point without the keys that have no effect in it, its configuration and its plan.

    Points that differ in their seed only share a plan, so that one of them is checked. If the seed
    also draws the cluster, each is checked.

    Args: plans is the cache of plans by configuration; reasons receives, by key, why a key of the
    chosen option has no effect; drops is UnusedKeyError to remove also keys that the chosen option
    lacks, and NoEffectError to refuse them.
    """
    while True:
        try:
            config = compose(point)
            shared = config_hash(
                config if config["cluster"].get("compute_spread") else {**config, "seed": 0}
            )
            if shared not in plans:
                plans[shared] = plan_point(config, point, processes)
            plan = plans[shared]
            if isinstance(plan, UsageError):
                raise plan
            return point, config, plan
        except UnusedKeyError as error:
            rest = tuple(single for single in point if key_of(single) != error.key)
            if len(rest) == len(point) or not isinstance(error, drops):
                raise
            if isinstance(error, NoEffectError) and reasons is not None:
                reasons.setdefault(error.key, str(error))
            point = rest


def plan_point(
    config: dict[str, Any], point: Sequence[str], processes: Processes
) -> Plan | UsageError:
    """Return the plan, or the error of a point without one; missing data is an error for every
    point.
    """
    try:
        return compile_plan(config, processes(config), point, strict=True)
    except DataMissingError:
        raise
    except UsageError as error:
        return error

"""Rank settings: the leaderboard as data, each setting against the baseline, with notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from statistics import fmean, median, stdev
from typing import Any

from ashl.config.override import command_text
from ashl.errors import UsageError
from ashl.planning import uncontended_link_note
from ashl.report.measure import (
    Measure,
    Target,
    at_equal_time,
    best_that_all_reach,
    describe,
    kinds_of_time,
    measurable,
    own_target,
    reached_at,
    target_of,
    time_to,
)
from ashl.report.records import LeftOut, Run, Study
from ashl.report.replicates import Replicates, common_to, label, settings_of
from ashl.report.stats import Effect, Key, Spread, spread
from ashl.tracking.console import percent

# Keys of the environment, as are `cluster.*`: settings compete within an environment.
ENVIRONMENT = ("cluster", "dataset", "model")
MAX_NAMED = 8  # settings that an error message lists
LATE = 0.05  # Settings whose runs were slower than declared by more than this share are not ranked.


@dataclass(frozen=True, eq=False)
class Row:
    """One setting of the leaderboard; means are over its seeds.

    `environment` is the cluster, data set and model, if the study varies them. `label` names
    everything else, which is what competes. `against` is the effect relative to the baseline.
    """

    label: str
    environment: str
    setting: Replicates
    order: int  # position in the grid, as written
    values: Mapping[Key, float]  # the measure's value by seed
    spread: Spread
    is_baseline: bool
    against: Effect | None
    accuracy: tuple[float, float] | None  # final mean and standard deviation
    best: float | None
    # The metric of a task without accuracy: name, final mean and standard deviation.
    metric: tuple[str, float, float] | None
    loss: float | None
    steps_per_s: float | None
    wait_share: float | None
    hidden: float | None  # share of communication time that computation hides; None without overlap
    # steps/s divided by those planned without failures; None unless a worker of some run failed
    goodput: float | None
    mb_up: float | None
    mb_down: float | None
    consensus: float | None  # distance of the workers' models from their mean, if each has its own
    # Largest share by which a run was slower than the cluster declares; None if at most `LATE`.
    late: float | None
    measures: Mapping[str, float]  # final values of what the runs measured themselves

    @property
    def bound(self) -> float | None:
        """Lower bound of the median time to the target, if a race stopped runs before they
        reached it.
        """
        runs = self.setting.by_seed()
        if not any(run.dropped for run in runs.values()):
            return None
        ends = {
            key: runs[key].summary.get("time_s") or 0.0 for key in self.values if runs[key].dropped
        }
        return median(min(value, ends.get(key, math.inf)) for key, value in self.values.items())

    @property
    def reached(self) -> int:
        return sum(map(math.isfinite, self.values.values()))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self.setting.by_seed().values())


@dataclass(frozen=True)
class Leaderboard:
    """The ranked settings, by environment and from the best to the worst.

    `ended_badly` are the runs that failed, diverged or were interrupted.
    """

    measure: Measure
    target: Target | None
    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    ended_badly: tuple[LeftOut, ...]
    dropped: tuple[LeftOut, ...]  # runs that racing dropped
    common: str  # settings that all runs share

    @property
    def ranked(self) -> tuple[Row, ...]:
        """The rows that are ranked: those whose runs kept the declared speed, or all if none
        did.
        """
        return tuple(row for row in self.rows if row.late is None) or self.rows

    def rank(self, row: Row) -> str:
        """Return the rank within the row's environment, from 1; a dash if the row is not ranked."""
        found = [other for other in self.ranked if other.environment == row.environment]
        return str(found.index(row) + 1) if row in found else "-"

    @property
    def environments(self) -> tuple[Leaderboard, ...]:
        """The leaderboard of each environment."""
        names = dict.fromkeys(row.environment for row in self.rows)
        return tuple(
            replace(self, rows=tuple(r for r in self.rows if r.environment == name))
            for name in names
        )

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.is_baseline), None)

    @property
    def second(self) -> Effect | None:
        """The effect of the first relative to the second; None without a second or a common
        seed.
        """
        if len(self.ranked) < 2:
            return None
        return self.measure.effect(self.ranked[0].values, self.ranked[1].values)

    @property
    def resolution_s(self) -> float | None:
        """Resolution of the winner's time to target: mean seconds between the two evaluations
        around it.
        """
        if self.target is None:
            return None
        found = [reached_at(run, self.target) for run in measurable(self.rows[0].runs)[0]]
        gaps = [at_s - before_s for at_s, before_s in found if math.isfinite(at_s)]
        return fmean(gaps) if gaps else None


# Sort keys of `--sort`: the smallest value comes first.
SORTS: dict[str, Callable[[Row], float | None]] = {
    "setting": lambda row: 0.0,
    "accuracy": lambda row: -row.accuracy[0] if row.accuracy else None,
    "best": lambda row: None if row.best is None else -row.best,
    "loss": lambda row: row.loss,
    "steps": lambda row: None if row.steps_per_s is None else -row.steps_per_s,
    "wait": lambda row: row.wait_share,
    "goodput": lambda row: None if row.goodput is None else -row.goodput,
    "up": lambda row: row.mb_up,
    "down": lambda row: row.mb_down,
}


def rank(
    study: Study,
    *,
    target: float | None = None,
    hold: int | None = None,
    baseline: str | None = None,
    own_target: bool = True,
) -> Leaderboard:
    """Rank the settings by time to a target, or by their state at an equal time if there is none.

    The target is the requested one, else that of the runs, else the best accuracy that all settings
    reach.

    Args: own_target=False ignores the target of the runs themselves.
    Raises: UsageError for runs with different targets, an unknown baseline, and if no run has
    ended.
    """
    axes, settings = settings_of(study)
    counted = [run for setting in settings for run in setting.by_seed().values()]
    badly = tuple(_ended(run) for setting in settings for run in setting.runs if not good(run))
    if not counted:
        raise UsageError(f"no run has finished; the first: {badly[0].name}: {badly[0].reason}.")
    asked = target_of(counted, target, hold) if own_target else None
    recomputed = target is not None or hold is not None
    left_out = study.left_out
    if asked is None or recomputed:
        counted, unreadable = measurable(counted)
        left_out += tuple(unreadable)
        if not counted:
            where = unreadable[0]
            raise UsageError(
                f"There are no evaluations to compare; the first: {where.name}: {where.reason}."
            )
    usable, own = set(counted), None
    if asked is None:
        own = best_that_all_reach(
            [[run for run in s.by_seed().values() if run in usable] for s in settings]
        )
        asked, recomputed = (own[0], True) if own else (None, False)
    measure = time_to(asked, recomputed) if asked else at_equal_time(counted)
    values = {
        s: {k: measure.value(run) for k, run in s.by_seed().items() if run in usable}
        for s in settings
    }
    settings = tuple(setting for setting in settings if values[setting])
    rows = _rows(axes, settings, values, measure, baseline)
    target_note = _target_note(study, *own) if own and own_target else []
    notes = (
        *target_note,
        *_race_note(study),
        *_clock_note(counted),
        *_stopped_note(counted, None if target is None else asked),
        *_pace_note(rows),
    )
    notes += tuple(uncontended_link_note.note_comparison(run.config for run in counted))
    return Leaderboard(
        measure, asked, axes, rows, notes, left_out, badly, study.dropped, common_to(study)
    )


def _rows(
    axes: Sequence[str],
    settings: Sequence[Replicates],
    values: Mapping[Replicates, Mapping[Key, float]],
    measure: Measure,
    baseline: str | None,
) -> tuple[Row, ...]:
    """Return the rows, each setting compared with the baseline of its own environment."""
    around = [axis for axis in axes if axis in ENVIRONMENT or axis.startswith("cluster.")]
    if len(around) == len(axes):
        around = []  # only environments vary: then they are compared
    parts = {setting: _parts(setting, around) for setting in settings}
    # Lines of a grid that name no environment get one of their own.
    if len({environment for environment, _ in parts.values()}) > 1:
        parts = {
            setting: (environment or "elsewhere", name)
            for setting, (environment, name) in parts.items()
        }
    ranked = sorted(settings, key=lambda s: (late(s) is not None, *_order(measure, s, values[s])))
    chosen = _baseline(
        [s for s in ranked if parts[s][0] == parts[settings[0]][0]],
        settings,
        parts,
        values,
        baseline,
    )
    bases = {parts[s][0]: s for s in settings if parts[s][1] == chosen}
    places = list(dict.fromkeys(parts[s][0] for s in settings))
    rows = []
    for setting in sorted(ranked, key=lambda s: places.index(parts[s][0])):
        environment, name = parts[setting]
        base = bases.get(environment)
        against = None if base in (None, setting) else measure.effect(values[setting], values[base])
        head = {
            "label": name,
            "environment": environment,
            "setting": setting,
            "order": settings.index(setting),
        }
        alone = len(settings) == 1
        rows.append(_row(head, values[setting], setting is base and not alone, against))
    return tuple(rows)


def _parts(setting: Replicates, around: Sequence[str]) -> tuple[str, str]:
    """Return the names of a setting's environment and of what competes in it."""
    there = {key: value for key, value in setting.axes.items() if key in around}
    return label(there), setting.name(around) or setting.label


def good(run: Run) -> bool:
    """Return True if the run finished, or if a race stopped it."""
    return run.summary["status"] == "finished" or run.dropped


def ordering(key: str | None) -> Callable[[Leaderboard], tuple[Row, ...]]:
    """Return the function that sorts the rows of a leaderboard; None keeps their order.

    Raises: UsageError for an unknown key.
    """
    if key is not None and key not in SORTS:
        near = get_close_matches(key, SORTS, n=1)
        raise UsageError(
            f"--sort {key}: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(SORTS)}.")
        )
    if key is None:
        return lambda board: board.rows
    if key == "setting":
        return lambda board: tuple(sorted(board.rows, key=lambda row: row.label))
    by = SORTS[key]
    return lambda board: tuple(
        sorted(board.rows, key=lambda row: math.inf if (found := by(row)) is None else found)
    )


def _order(
    measure: Measure, setting: Replicates, values: Mapping[Key, float]
) -> tuple[float, float, float]:
    """Return the sort key of a setting: its median, the share that reached the target, the best
    accuracy.
    """
    finite = [value for value in values.values() if math.isfinite(value)]
    best = [(run.summary.get("best") or {}).get("test_accuracy") or 0.0 for run in setting.runs]
    return (
        measure.order(spread(list(values.values())).middle),
        -len(finite) / len(values),
        -fmean(best),
    )


def _baseline(
    ranked: Sequence[Replicates],
    grid: Sequence[Replicates],
    parts: Mapping[Replicates, tuple[str, str]],
    values: Mapping[Replicates, Mapping[Key, float]],
    name: str | None,
) -> str:
    """Return the baseline's name: the requested one, else the grid's first BSP, preferably
    uncompressed.

    Without BSP it is the slowest setting of the first environment that reached the target.
    """
    if name is not None:
        return named({parts[setting][1]: setting.axes for setting in grid}, name)
    place = usual_baseline([setting.runs[0].config for setting in grid])
    there = [s for s in ranked if any(map(math.isfinite, values[s].values()))]
    return parts[(there or ranked)[-1] if place is None else grid[place]][1]


def usual_baseline(grid: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the setting that others are compared with if none is named.

    It is the first BSP, without compression if there is one.

    Args: grid has the options of each setting by group.

    >>> usual_baseline([{"sync": "asp"}, {"sync": "bsp", "compression": "topk"}, {"sync": "bsp"}])
    2
    """
    bsp = [
        (options.get("compression", "none") != "none", place)
        for place, options in enumerate(grid)
        if options.get("sync") == "bsp" and options.get("schedule", "single") == "single"
    ]
    return min(bsp)[1] if bsp else None


def named(settings: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return the label that a name means: the label itself, or the only label that has these parts.

    Raises: UsageError if no label or several match.
    """
    if name in settings:
        return name
    wanted = set(name.replace(",", " ").split())
    found = []
    for known, axes in settings.items():
        written = {
            f"{part}={value}"
            for key, value in axes.items()
            for part in (key, key.rpartition(".")[2])
        }
        if wanted <= {*known.split(), *axes.values(), *written}:
            found.append(known)
    if len(found) == 1:
        return found[0]
    labels = found or list(settings)
    listed = "; ".join(labels[:MAX_NAMED]) + ("; ..." if len(labels) > MAX_NAMED else "")
    problem = f"is the name of {len(found)} settings" if found else "is no setting"
    raise UsageError(f'--baseline "{name}" {problem}; name one of: {listed}.')


def _row(
    head: Mapping[str, Any], values: Mapping[Key, float], is_baseline: bool, against: Effect | None
) -> Row:
    runs = head["setting"].by_seed().values()
    final = _known((run.summary.get("final") or {}).get("test_accuracy") for run in runs)

    def mean(key: str, part: str | None = None) -> float | None:
        found = _known(
            (run.summary if part is None else run.summary.get(part) or {}).get(key) for run in runs
        )
        return fmean(found) if found else None

    up, down = mean("bytes_up"), mean("bytes_down")
    return Row(
        **head,
        values=values,
        spread=spread(list(values.values())),
        is_baseline=is_baseline,
        against=against,
        accuracy=(fmean(final), stdev(final) if len(final) > 1 else 0.0) if final else None,
        best=mean("test_accuracy", "best"),
        metric=_metric(runs),
        loss=mean("train_loss", "final"),
        steps_per_s=mean("steps_per_s"),
        wait_share=mean("wait_share"),
        hidden=mean("comm_hidden_share"),
        goodput=mean("goodput") if any(run.summary.get("failed_workers") for run in runs) else None,
        mb_up=None if up is None else up / 1e6,
        mb_down=None if down is None else down / 1e6,
        consensus=mean("consensus_distance", "final"),
        late=late(head["setting"]),
        measures=_measures(runs),
    )


def _metric(runs: Iterable[Run]) -> tuple[str, float, float] | None:
    names = {run.metric[0] if run.metric else "" for run in runs}
    found = _known((run.summary.get("final") or {}).get("test_metric") for run in runs)
    if len(names) > 1 or names == {""} or not found:
        return None
    return names.pop(), fmean(found), stdev(found) if len(found) > 1 else 0.0


def _measures(runs: Iterable[Run]) -> dict[str, float]:
    """Return the mean of each measure over the runs that have it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, values in (run.summary.get("measures") or {}).items():
            found.setdefault(name, []).extend(_known([values.get("last")]))
    return {name: fmean(values) for name, values in found.items() if values}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ended(run: Run) -> LeftOut:
    reason = " ".join(str(run.summary.get("exit_reason") or "").split())
    return LeftOut(str(run.folder), f"{run.summary['status']}" + (f": {reason}" if reason else ""))


def late(setting: Replicates) -> float | None:
    """Return by which share the slowest run was slower than declared; None if at most `LATE`."""
    worst = max(
        (run.summary.get("pace") or {}).get("slower_by") or 0.0
        for run in setting.by_seed().values()
    )
    return worst if worst > LATE else None


def _pace_note(rows: Sequence[Row]) -> list[str]:
    slow = [row for row in rows if row.late is not None]
    if not slow:
        return []
    worst = percent(max(row.late or 0.0 for row in slow), 0)
    effect = (
        "they are not ranked"
        if len(slow) < len(rows)
        else "they show what this machine could do, not that cluster"
    )
    return [
        f"{len(slow)} of {len(rows)} settings did not keep the declared pace (up to {worst}"
        f" slower): {effect}."
    ]


def _target_note(study: Study, target: Target, behind: int) -> list[str]:
    most = f"all but {behind} of the settings reach" if behind else "all reach"
    other = ("--target", f"{target.accuracy:g}")
    another = command_text("compare", study.folder, *other) if study.folder else " ".join(other)
    return [
        f"These runs had no target: this one is the best that {most}; for another one: {another}"
    ]


def _race_note(study: Study) -> list[str]:
    if not study.dropped:
        return []
    last = study.dropped[-1]
    return [
        f"Racing dropped {len(study.dropped)} runs on the way, the last of them {last.name}:"
        f" {last.reason}."
    ]


def _clock_note(runs: Sequence[Run]) -> list[str]:
    kinds = kinds_of_time(runs)
    if len(kinds) == 1:
        return []
    counts = " and ".join(f"{count} with {kind} time" for kind, count in kinds.items())
    return [
        f"The runs have different clocks: {counts}. They are comparable only if the real runs"
        " kept the declared pace."
    ]


def _stopped_note(runs: Sequence[Run], asked: Target | None) -> list[str]:
    """Return the note on runs that ended at an easier target of their own.

    They had no chance to reach the requested one.
    """
    if asked is None:
        return []
    once = asked._replace(hold=1)
    ended = [run for run in runs if run.summary.get("time_to_target_s") is not None]
    early = [run for run in ended if math.isinf(reached_at(run, once)[0])]
    if not early:
        return []
    own = describe(own_target(early[0]))
    return [
        f"{len(early)} of {len(runs)} runs ended at their own target ({own}, for example"
        f" {early[0].name}), below {describe(once)}: they count as not reached, although their"
        " settings might reach it."
    ]

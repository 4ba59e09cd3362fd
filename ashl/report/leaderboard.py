"""Rank settings: the leaderboard as data, each setting against the baseline, with notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from ashl.config.flat import flat_items
from ashl.config.override import command_text
from ashl.errors import UsageError
from ashl.planning import uncontended_link_note
from ashl.report.measure import (
    Measure,
    Target,
    best_that_all_reach,
    describe,
    own_target,
    split_readable,
    target_of,
    time_reached,
    time_to_target,
    value_at_equal_time,
)
from ashl.report.records import LeftOut, Run, Study, leave_out_repeats
from ashl.report.settings import (
    Setting,
    common_settings,
    find_label,
    label_of,
    settings_of,
    usual_baseline,
)
from ashl.report.statistics import LEVEL, Effect, Key, Spread, adjust_p_values, effect, spread
from ashl.runtime.time_accounting import KINDS
from ashl.tracking.console import percent

# Keys of the environment, as are `cluster.*`: settings compete within an environment.
ENVIRONMENT = ("cluster", "dataset", "model")
LATE = 0.05  # Settings whose runs were slower than declared by more than this share are not ranked.


@dataclass(frozen=True, eq=False)
class Row:
    """One setting of the leaderboard.

    `environment` is the cluster, data set and model, if the study varies them. `label` names
    everything else, which is what competes. `against` is the effect relative to the baseline.
    """

    label: str
    environment: str
    setting: Setting
    order: int  # position in the grid, as written
    values: Mapping[Key, float]  # the measure's value by seed
    ends: Mapping[Key, float]  # seconds for which runs that did not reach the target were observed
    spread: Spread
    means: Mapping[str, float]  # means over seeds of the values of the summaries, by dotted key
    deviations: Mapping[str, float]  # their standard deviations; 0 for one seed
    is_baseline: bool = False
    against: Effect | None = None

    @property
    def num_reached(self) -> int:
        return sum(map(math.isfinite, self.values.values()))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self.setting.by_seed().values())

    @property
    def best_accuracy(self) -> float | None:
        return self.means.get("best.test_accuracy")

    @property
    def was_dropped(self) -> bool:
        """True if a race dropped one of its runs."""
        return any(run.dropped for run in self.runs)

    @property
    def pace_excess(self) -> float | None:
        """The share by which the slowest run was slower than declared; None if at most `LATE`."""
        paces = [(run.summary.get("pace") or {}).get("slower_by") or 0.0 for run in self.runs]
        return max(paces) if max(paces) > LATE else None

    @property
    def time_shares(self) -> list[dict[str, float]]:
        """The share of each kind of time by worker, as a mean over the seeds."""
        from pandas import DataFrame, concat

        found = []
        for run in self.runs:
            workers, time_s = run.summary.get("workers"), run.summary.get("time_s")
            if workers and time_s:
                spent = DataFrame(workers).reindex(columns=[f"{kind}_s" for kind in KINDS])
                spent = spent.set_axis(KINDS, axis="columns").astype(float).fillna(0.0)
                # Measured parts may add up to a little more than the run's time.
                whole_s = spent.sum(axis="columns").clip(lower=time_s)
                found.append(spent.div(whole_s, axis="index"))
        return concat(found).groupby(level=0).mean().to_dict("records") if found else []


@dataclass(frozen=True)
class Leaderboard:
    """The ranked settings of a study, by environment and from the best to the worst."""

    study: Study
    measure: Measure
    target: Target | None
    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]  # from the study, and runs whose evaluations cannot be read

    @cached_property
    def common(self) -> str:
        """The settings that all runs share."""
        return common_settings(self.study)

    @property
    def ranked_rows(self) -> tuple[Row, ...]:
        """The rows whose runs kept the declared speed, or all rows if none did."""
        return tuple(row for row in self.rows if row.pace_excess is None) or self.rows

    def rank(self, row: Row) -> str:
        """Return the rank within the row's environment, from 1; a dash if the row is not ranked."""
        found = [other for other in self.ranked_rows if other.environment == row.environment]
        return str(found.index(row) + 1) if row in found else "-"

    @cached_property
    def environments(self) -> tuple[Leaderboard, ...]:
        """The leaderboard of each environment."""
        names = dict.fromkeys(row.environment for row in self.rows)
        return tuple(
            replace(self, rows=tuple(row for row in self.rows if row.environment == name))
            for name in names
        )

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.is_baseline), None)

    @cached_property
    def comparisons(self) -> tuple[tuple[Row, Effect | None, float], ...]:
        """The effect of the first row relative to each other ranked one, and its adjusted p-value.

        The p-values are adjusted by Holm's method over all pairs of settings, because the first row
        was chosen by the same runs. A pair without a common seed has a p-value of 1.
        """
        first, *others = self.ranked_rows
        effects = [effect_of(self.measure, first, other) for other in others]
        p_values = [found.p_value if found and found.is_better else 1.0 for found in effects]
        adjusted = adjust_p_values(p_values, math.comb(len(self.ranked_rows), 2))
        return tuple(zip(others, effects, adjusted, strict=True))

    @property
    def effect_over_second(self) -> Effect | None:
        """The effect of the first relative to the second; None without a common seed."""
        return self.comparisons[0][1] if len(self.ranked_rows) > 1 else None

    @cached_property
    def indistinguishable_rows(self) -> tuple[Row, ...]:
        """The rows that may be as good as the first, at a level of 5 % for all of them together.

        They include rows that may have reached the target as early as the first, see
        `is_too_close`.
        """
        return tuple(
            row
            for row, _, p_value in self.comparisons
            if p_value > 1 - LEVEL or self.is_too_close(row)
        )

    def is_too_close(self, row: Row) -> bool:
        """Return True if a row differs from the first by less than the time between its own
        evaluations: it may have reached the target before the first did, and was not evaluated.
        """
        resolution_s = self.resolution_s(row)
        gap_s = abs(row.spread.middle - self.ranked_rows[0].spread.middle)
        return resolution_s is not None and gap_s < resolution_s

    def resolution_s(self, row: Row) -> float | None:
        """Return the mean seconds between the evaluation at which a row reached the target and the
        evaluation before it.
        """
        if self.target is None:
            return None
        found = [time_reached(run, self.target) for run in split_readable(row.runs)[0]]
        gaps = [at_s - before_s for at_s, before_s in found if math.isfinite(at_s)]
        return fmean(gaps) if gaps else None


def effect_of(measure: Measure, own: Row, base: Row) -> Effect | None:
    """Return the effect of one row relative to another; None without a common seed."""
    known = {"ratio": measure.ratio, "lower_is_better": measure.lower_is_better}
    return effect(own.values, base.values, **known, ends=(own.ends, base.ends))


def rank(
    study: Study,
    *,
    target: float | None = None,
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
    study = leave_out_repeats(study)
    axes, settings = settings_of(study)
    counted = [run for setting in settings for run in setting.by_seed().values()]
    if not counted:
        first = study.ended_badly[0]
        raise UsageError(f"no run has finished; the first: {first.name}: {first.reason}.")
    asked = target_of(counted, target) if own_target else None
    recomputed = target is not None
    left_out, notes = study.left_out, list[str]()
    if asked is None or recomputed:
        counted, unreadable = split_readable(counted)
        left_out += tuple(unreadable)
        if not counted:
            where = f"{unreadable[0].name}: {unreadable[0].reason}"
            raise UsageError(f"There are no evaluations to compare; the first: {where}.")
    unasked = asked is None
    if unasked:
        usable = [[run for run in s.by_seed().values() if run in counted] for s in settings]
        if own := best_that_all_reach(usable):
            (asked, behind), recomputed = own, True
            notes += [_target_note(study, asked, behind)] if own_target else []
    measure = time_to_target(asked, recomputed) if asked else value_at_equal_time(counted)
    # Settings that a race dropped have no part in a target that the user did not name, and cannot
    # win by it.
    found = _rows(axes, settings, set(counted), measure)
    rows = _with_baseline(found, measure, baseline, dropped_last=unasked)
    if study.dropped:
        last = f"{study.dropped[-1].name}: {study.dropped[-1].reason}"
        count = len(study.dropped)
        runs = "1 run," if count == 1 else f"{count} runs, the last of them"
        notes.append(f"Racing dropped {runs} {last}.")
    notes += [
        *_clock_note(counted),
        *_stopped_note(counted, None if target is None else asked),
        *_pace_note(rows),
        *uncontended_link_note.note_comparison(run.config for run in counted),
    ]
    return Leaderboard(study, measure, asked, axes, rows, tuple(notes), left_out)


def _rows(
    axes: Sequence[str], settings: Sequence[Setting], counted: set[Run], measure: Measure
) -> list[Row]:
    """Return a row for each setting with a value, in the order of the grid."""
    from pandas import DataFrame, to_numeric

    around = [axis for axis in axes if axis in ENVIRONMENT or axis.startswith("cluster.")]
    if len(around) == len(axes):
        around = []  # only environments vary: then they are compared
    runs = {s: {key: r for key, r in s.by_seed().items() if r in counted} for s in settings}
    runs = {setting: by_seed for setting, by_seed in runs.items() if by_seed}
    records = [dict(flat_items(run.summary)) for s in runs for run in s.by_seed().values()]
    summaries = DataFrame(records).apply(to_numeric, errors="coerce")
    groups = summaries.groupby([index for index, s in enumerate(runs) for _ in s.by_seed()])
    means, deviations = groups.mean(), groups.std(ddof=1).fillna(0.0)
    rows = []
    for order, (setting, by_seed) in enumerate(runs.items()):
        values = {key: measure.value(run) for key, run in by_seed.items()}
        ends = {key: run.observed_s for key, run in by_seed.items() if measure.is_time}
        there = {key: value for key, value in setting.axes.items() if key in around}
        rows.append(
            Row(
                setting.name(around) or setting.label,
                label_of(there),
                setting,
                order,
                values,
                ends,
                spread([*values.values()], [ends.get(key, math.inf) for key in values]),
                means.loc[order].dropna().to_dict(),
                deviations.loc[order].to_dict(),
            )
        )
    # Lines of a grid that name no environment get one of their own.
    several = len({row.environment for row in rows}) > 1
    return [replace(row, environment=row.environment or "elsewhere" * several) for row in rows]


def _with_baseline(
    grid: Sequence[Row], measure: Measure, name: str | None, dropped_last: bool
) -> tuple[Row, ...]:
    """Return the rows ranked by environment, each compared with the baseline of its environment.

    The baseline is the requested one, else the best BSP of the first environment, preferably
    uncompressed, so that it is tuned as the others are. Without BSP it is the slowest setting of
    the first environment that reached the target.
    """

    def order(row: Row) -> tuple[bool, bool, float, float, float]:
        best = row.best_accuracy or 0.0
        middle = measure.order(row.spread.middle)
        last = dropped_last and row.was_dropped
        return row.pace_excess is not None, last, middle, -row.num_reached / len(row.values), -best

    ranked = sorted(grid, key=order)
    here = [row for row in ranked if row.environment == grid[0].environment]
    place = usual_baseline([row.setting.runs[0].config for row in here])
    if name is not None:
        chosen = find_label({row.label: row.setting.axes for row in grid}, name)
    elif place is not None:
        chosen = here[place].label
    else:
        chosen = ([row for row in here if row.num_reached] or here)[-1].label
    bases = {row.environment: row for row in grid if row.label == chosen}
    environments = list(dict.fromkeys(row.environment for row in grid))
    rows = []
    for row in sorted(ranked, key=lambda row: environments.index(row.environment)):
        base = bases.get(row.environment)
        against = None if base in (None, row) else effect_of(measure, row, base)
        is_baseline = row is base and len(grid) > 1
        rows.append(replace(row, is_baseline=is_baseline, against=against))
    return tuple(rows)


def _pace_note(rows: Sequence[Row]) -> Iterable[str]:
    slow = [row.pace_excess for row in rows if row.pace_excess is not None]
    if slow:
        effect = "they show what this machine could do, not that cluster"
        yield (
            f"{len(slow)} of {len(rows)} settings did not keep the declared pace (up to"
            f" {percent(max(slow), 0)} slower):"
            f" {'they are not ranked' if len(slow) < len(rows) else effect}."
        )


def _target_note(study: Study, target: Target, behind: int) -> str:
    most = f"all but {behind} of the settings reach" if behind else "all reach"
    other = ("--target", f"{target.accuracy:g}")
    another = command_text("compare", study.folder, *other) if study.folder else " ".join(other)
    return (
        f"These runs had no target: this one is the best that {most}; give one by --target, as in"
        f" {another}"
    )


def _clock_note(runs: Sequence[Run]) -> Iterable[str]:
    kinds = [str(run.summary.get("time_kind") or "unknown") for run in runs]
    if len(set(kinds)) > 1:
        counts = " and ".join(
            f"{kinds.count(kind)} with {kind} time" for kind in dict.fromkeys(kinds)
        )
        yield (
            f"The runs have different clocks: {counts}. They are comparable only if the real runs"
            " kept the declared pace."
        )


def _stopped_note(runs: Sequence[Run], asked: Target | None) -> Iterable[str]:
    """Yield the note on runs that ended at an easier target of their own."""
    if asked is None:
        return
    ended = [run for run in runs if run.summary.get("time_to_target_s") is not None]
    early = [run for run in ended if math.isinf(time_reached(run, asked)[0])]
    if early:
        own = describe(own_target(early[0]))
        yield (
            f"{len(early)} of {len(runs)} runs ended at their own target ({own}, for example"
            f" {early[0].name}), below {describe(asked)}: they count as censored at their end."
        )

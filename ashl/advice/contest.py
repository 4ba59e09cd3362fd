"""Run the race: tune learning rates with one seed, then compare the best candidates over several
seeds.

Data flow: `leave_out_slow` leaves out candidates that are predicted to be too slow, once others
have reached the target; `tune_rates` returns each candidate at its best learning rate;
`with_reachable_target` sets the target that all can reach if none was typed; `run_rounds` runs the
best candidates with seeds of their own, and gives the first two more seeds until they are separated
or the budget ends.
`time_on_cluster` runs racers again on a cluster without one of its workers.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ashl.advice.candidates import RATE, Candidate, Selection
from ashl.advice.leave_out import Racer, Spec
from ashl.advice.scale import RACING, SEEDS, Scale
from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, key_of
from ashl.config.workers import LISTS
from ashl.errors import UsageError
from ashl.plan.plan import TARGETS
from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.measure import Target
from ashl.report.records import SWEEP, LeftOut, read_study
from ashl.study.grid import Grid, Setting, Skipped, label
from ashl.study.jobs import clear_remains, has_ended, local_pool
from ashl.study.race import TWICE, CurveReader, LearningCurve, Race
from ashl.study.sweep import begin_record, run_missing
from ashl.tracking import jsonl
from ashl.tracking.console import seconds
from ashl.tracking.deadline import Deadline
from ashl.tracking.sweep_progress import SweepProgress

# folders, inside the study, of the sweep that chose the learning rates and of the runs without a
# worker
TUNING, WITHOUT = "tuning", "without"
# Latest end of the tuning and of the runs without a worker, as shares of the budget.
TUNED, ANSWERED = 0.55, 0.97
# Candidates that try the other learning rates, and candidates that go on to the seeds, the baseline
# not counted: at least this many, and this share of all candidates.
RATED, FRONT = (4, 1 / 3), (3, 1 / 5)
# Seeds per candidate. The counts after the first are for the first two candidates alone, until they
# are separated.
ROUNDS = (SEEDS, 5, 8)


class TunedCandidate(NamedTuple):
    """A candidate with the best learning rate of the tuning, and the progress of that run.

    `tried` is the number of learning rates with which it ran in the tuning.
    """

    candidate: Candidate
    rate: float
    curve: LearningCurve | None  # None if it has not begun
    tried: int = 0


class RaceContext(NamedTuple):
    """The candidates, the folder, the command and the means of a race."""

    selection: Selection
    folder: Path
    command: CommandLine
    fixed: Sequence[str]  # overrides of all runs
    slots: int
    deadline: Deadline
    console: Console
    quiet: bool

    @property
    def tunes(self) -> bool:
        """True if no learning rate was typed, which all candidates would use."""
        return RATE not in map(key_of, self.fixed)


def setting_of(
    own: Candidate, context: RaceContext, scale: Scale, rate: float, seed: int, axes: Sequence[str]
) -> Setting:
    """Return one run of a candidate; those of its rate and its seed that are in `axes` become part
    of its name.
    """
    config, limits = own.config, dict(own.config["stop"])
    texts = {RATE: f"{rate:g}", "seed": str(seed)}
    changes = {"seed": seed, "optimizer": {**config["optimizer"], "lr": rate}}
    if scale.every_s is not None:
        texts["eval.every_s"] = f"{scale.every_s:g}"
        changes["eval"] = {**config["eval"], "every_s": scale.every_s}
    if scale.length < 1:
        bounds = {
            key: limits[key] * scale.length
            for key in ("epochs", "seconds")
            if limits[key] is not None
        }
        if limits["steps"] is not None:
            bounds["steps"] = math.ceil(limits["steps"] * scale.length)
        limits |= bounds or {"epochs": config["dataset"]["epochs"] * scale.length}
    if scale.target is not None:
        limits["target_accuracy"] = scale.target
    changed = {key: value for key, value in limits.items() if value != config["stop"][key]}
    texts |= {
        f"stop.{key}": "null" if value is None else str(value) for key, value in changed.items()
    }
    kept = (*(text for text in context.fixed if text not in own.dropped), *own.overrides)
    typed = [text for text in kept if key_of(text) not in texts]
    config = {**config, **changes, "stop": limits}
    return Setting(
        hash=config_hash(config),
        overrides=(*typed, *(f"{key}={value}" for key, value in texts.items())),
        axes={key: texts[key] for key in axes},
        config=config,
        predicted_s=None if own.plan.predicted_s is None else own.plan.predicted_s * scale.length,
        label=own.name,
    )


def grid_of(settings: Sequence[Setting], left_out: Sequence[LeftOut]) -> Grid:
    keys = dict.fromkeys(key for setting in settings for key in setting.axes)
    axes = {key: list(dict.fromkeys(setting.axes[key] for setting in settings)) for key in keys}
    return Grid(
        axes, tuple(settings), tuple(Skipped((out.name,), out.reason) for out in left_out), {}, 0
    )


def run_grid(
    grid: Grid,
    folder: Path,
    context: RaceContext,
    share: float,
    phase: str,
    to_tracker: Callable[[Setting], None] = lambda setting: None,
    seeds: int = 1,
) -> None:
    """Run the missing runs of a grid in its folder, until this share of the budget is spent.

    Args: phase is the part of the race that the progress lines name; seeds is the number of seeds
    that each setting will have. With more than one, no run is dropped for a difference that may be
    chance, and the baseline may be dropped, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = begin_record(grid, context.fixed, folder, keep_dropped=True, command=context.command)
    waiting = [setting for setting in grid.settings if is_missing(folder, setting, record)]

    def must_stop() -> bool:
        return context.deadline.spent_s >= share * context.deadline.budget_s

    if not waiting or must_stop():
        return
    progress = SweepProgress(context.console, len(waiting), quiet=context.quiet, phase=phase)
    protected = label(grid.settings[0], without="seed") if seeds == 1 else ""
    race = Race(grid.settings, folder, record, protected, progress.print_line, seeds)
    pool = local_pool(context.slots)
    run_missing(grid.settings, folder, waiting, pool, progress, to_tracker, race, must_stop)
    for setting in waiting:
        if is_missing(folder, setting, record):
            clear_remains(
                folder / setting.hash
            )  # the budget ended it; the same command runs it again


def is_missing(folder: Path, setting: Setting, record: Mapping[str, Any]) -> bool:
    """Return True if a setting has neither ended nor been dropped."""
    dropped = any(entry["hash"] == setting.hash for entry in record["dropped"])
    return not dropped and not has_ended(folder / setting.hash)


def read_curve(folder: Path, setting: Setting) -> LearningCurve | None:
    """Return the progress of a run in this folder; None if it has not begun."""
    return CurveReader(folder / setting.hash, setting.config).read_curve()


def with_reachable_target(scale: Scale, context: RaceContext) -> Scale:
    """Return the size of the race after the tuning.

    If no target was typed, the target is the best accuracy that all candidates reached in the
    tuning.
    """
    limits = context.selection.candidates[0].config["stop"]
    own = any(limits.get(target) is not None for target in TARGETS)
    if own or scale.target is not None or len(scale.rates) == 1:
        return scale
    with suppress(UsageError):  # no run has ended
        found = rank(read_study([context.folder / TUNING])).target
        return replace(scale, target=found[0] if found else None)
    return scale


def leave_out_slow(scale: Scale, context: RaceContext) -> RaceContext:
    """Run the candidates that are predicted to be fast, and return the context without those that
    `find_slow` names. The baseline stays. With a single rate, nothing is run.
    """
    selection, folder = context.selection, context.folder / TUNING
    base, scale = selection.candidates[0], replace(scale, target=None)
    predicted = {own: own.plan.predicted_s for own in selection.candidates if own.plan.predicted_s}
    if len(scale.rates) == 1 or not predicted:
        return context
    limit_s = TWICE * min(predicted.values())
    first = [own for own, time_s in predicted.items() if own is base or time_s <= limit_s]
    runs = [
        setting_of(own, context, scale, rates_of(own, scale)[0], base.config["seed"], (RATE,))
        for own in first
    ]
    phase = "tuning, predicted fastest"
    run_grid(grid_of(runs, selection.left_out), folder, context, TUNED, phase, seeds=2)
    times = dict[Candidate, float]()
    for own, run in zip(first, runs, strict=True):
        curve = read_curve(folder, run)
        if curve is not None and curve.reached_s is not None:
            times[own] = curve.reached_s
    slow = find_slow(predicted, times, spared=first)
    kept = tuple(own for own in selection.candidates if own not in slow)
    found = Selection(kept, (*selection.left_out, *slow.values()), selection.costs)
    return context._replace(selection=found)


def find_slow(
    predicted: Mapping[Candidate, float],
    times: Mapping[Candidate, float],
    spared: Collection[Candidate],
) -> dict[Candidate, LeftOut]:
    """Return the candidates that are predicted to be far too slow, with the reason.

    Rule: each candidate that reached the target needed a share of its predicted whole run. A
    candidate is named if the least of these shares, taken of its own run, is longer than `TWICE`
    the shortest time. It could be the fastest only with less than half the steps of each of them.
    Args: predicted, seconds of each whole run; times, seconds to the target of those that reached
    it; spared are never named.
    """
    if not times:
        return {}
    best = min(times, key=times.__getitem__)
    shares = {own: time_s / predicted[own] for own, time_s in times.items()}
    sparing = min(shares, key=shares.__getitem__)
    slow = dict[Candidate, LeftOut]()
    for own, time_s in predicted.items():
        least_s = shares[sparing] * time_s
        if own not in spared and least_s > TWICE * times[best]:
            needs = f"it would need {seconds(least_s)} even with as few steps as {sparing.name}"
            took = f"the fastest so far, {best.name}, took {seconds(times[best])}"
            slow[own] = LeftOut(own.name, f"{needs}; {took}.")
    return slow


def tune_rates(scale: Scale, context: RaceContext) -> list[TunedCandidate]:
    """Return each candidate at its best learning rate, the best candidate first.

    All candidates try the first rate. The baseline and the best candidates try the others in turn,
    until one is better than the first: if twice the rate is, half of it is not tried.
    Candidates that go on to the seeds try their two best rates with another seed.
    With a single rate, nothing is run.
    """
    selection, folder = context.selection, context.folder / TUNING
    base, scale = selection.candidates[0], replace(scale, target=None)
    seed = base.config["seed"]
    rates = {own: rates_of(own, scale) for own in selection.candidates}
    runs = {
        own: [setting_of(own, context, scale, rate, seed, (RATE,)) for rate in rates[own]]
        for own in selection.candidates
    }
    if len(scale.rates) == 1:
        return [TunedCandidate(own, rates[own][0], None) for own in selection.candidates]
    order = [runs[own][0] for own in selection.candidates]
    phase = "tuning, other candidates"
    run_grid(grid_of(order, selection.left_out), folder, context, TUNED, phase, seeds=2)

    def rank_rates(own: Candidate, count: int | None = None) -> list[TunedCandidate]:
        """Return the runs of a candidate at its first `count` rates, the best one first."""
        pairs = zip(rates[own][:count], runs[own], strict=False)
        return rank_tuned(
            [TunedCandidate(own, rate, read_curve(folder, run)) for rate, run in pairs]
        )

    def rank_candidates(count: int | None = None) -> list[TunedCandidate]:
        """Return all candidates, each at the best of its first `count` rates."""
        return rank_tuned([rank_rates(own, count)[0] for own in selection.candidates])

    near = [own.candidate for own in rank_candidates(1)][: count_of(RATED, selection)]
    several = dict.fromkeys((base, *near))
    for k in range(1, len(scale.rates)):
        order += [runs[own][k] for own in several if rank_rates(own, k)[0].rate == rates[own][0]]
        phase = f"tuning, learning rate × {scale.rates[k]:g}"
        run_grid(grid_of(order, selection.left_out), folder, context, TUNED, phase, seeds=2)
    found = rank_candidates()
    other_seed = seed + 1 + ROUNDS[-1]  # one that the race does not use
    again = dict[Candidate, list[tuple[TunedCandidate, Setting]]]()
    for own in front_runners(found, base, count_of(FRONT, selection)):
        again[own.candidate] = [
            (two, setting_of(two.candidate, context, scale, two.rate, other_seed, (RATE,)))
            for two in rank_rates(own.candidate)[:2]
        ]
    order += [run for pairs in again.values() for _, run in pairs]
    phase = "tuning, second seed"
    run_grid(grid_of(order, selection.left_out), folder, context, TUNED, phase, seeds=3)

    def count_tried(own: Candidate) -> int:
        return sum(read_curve(folder, run) is not None for run in runs[own])

    return [
        steadier_rate(
            own, [(two, read_curve(folder, run)) for two, run in again.get(own.candidate, ())]
        )._replace(tried=count_tried(own.candidate))
        for own in found
    ]


def steadier_rate(
    own: TunedCandidate, pairs: Sequence[tuple[TunedCandidate, LearningCurve | None]]
) -> TunedCandidate:
    """Return the rate with the smaller total time to the target over two runs.

    Args: pairs has the run of each rate and the curve of its second run. Returns `own` if a second
    run is missing.
    """

    def total_s(pair: tuple[TunedCandidate, LearningCurve | None]) -> float:
        reached = [curve and curve.reached_s for curve in (pair[0].curve, pair[1])]
        return math.fsum(math.inf if time_s is None else time_s for time_s in reached)

    if not pairs or any(second is None for _, second in pairs):
        return own
    return min(pairs, key=total_s)[0]


def count_of(bounds: tuple[int, float], selection: Selection) -> int:
    least, share = bounds
    return max(least, math.ceil(len(selection.candidates) * share))


def rates_of(own: Candidate, scale: Scale) -> list[float]:
    """Return the learning rates that a candidate tries."""
    return [float(f"{own.config['optimizer']['lr'] * factor:.6g}") for factor in scale.rates]


def rank_tuned(tries: Sequence[TunedCandidate]) -> list[TunedCandidate]:
    """Sort by time to the target, then by loss at the latest time that all of them have reached."""
    running = [own.curve for own in tries if own.curve and own.curve.times and not own.curve.failed]
    at_s = min((course.now_s for course in running), default=0.0)

    def order(own: TunedCandidate) -> tuple[int, float]:
        course = own.curve
        if course is None:
            return 3, 0.0
        if course.reached_s is not None:
            return 0, course.reached_s
        state = course.state_at_time(at_s)
        return (2, 0.0) if state is None or course.failed else (1, state.loss)

    return sorted(tries, key=order)


def front_runners(
    tries: Sequence[TunedCandidate], base: Candidate, count: int
) -> list[TunedCandidate]:
    """Return the baseline and the best `count` other candidates; all candidates if nothing was
    tuned.
    """
    if all(own.curve is None for own in tries):
        return list(tries)
    others = [
        own
        for own in tries
        if own.candidate is not base and own.curve is not None and not own.curve.failed
    ]
    whole = [own for own in others if own.curve is not None and own.curve.ended]
    return [own for own in tries if own.candidate is base] + (
        whole if len(whole) > 1 else others[:2]
    )[:count]


def race_grid(
    tries: Sequence[TunedCandidate], scale: Scale, context: RaceContext, counts: Mapping[str, int]
) -> Grid:
    """Return the grid of the best candidates over several seeds.

    The number of seeds is `counts` by name, and else that of the first round.
    """
    selection, settings = context.selection, list[Setting]()
    base = selection.candidates[0]
    for own in front_runners(tries, base, count_of(FRONT, selection)):
        for k in range(counts.get(own.candidate.name, ROUNDS[0])):
            seed = base.config["seed"] + 1 + k
            settings.append(setting_of(own.candidate, context, scale, own.rate, seed, ("seed",)))
    return grid_of(settings, selection.left_out)


def run_rounds(
    tries: Sequence[TunedCandidate],
    scale: Scale,
    context: RaceContext,
    to_tracker: Callable[[Setting], None],
) -> tuple[Leaderboard | None, Target | None]:
    """Race the best candidates over several seeds; the first two get more until they are separated
    or the budget is used up.

    Returns: the leaderboard of the last round, or of the tuning if no run of the rounds ended, or
    None if no run ended at all; and the requested target if no setting reached it.
    """
    counts = dict[str, int]()
    for further in (*ROUNDS[1:], 0):
        began_s = context.deadline.spent_s
        grid = race_grid(tries, scale, context, counts)
        phase = f"race, up to {max(counts.values())} seeds" if counts else "race"
        run_grid(grid, context.folder, context, RACING, phase, to_tracker)
        now_s, (found, unreached) = context.deadline.spent_s, rank_outcome(context)
        second = found.effect_over_second if found else None
        if (
            found is None
            or second is None
            or second.is_better_with_confidence
            or now_s + (now_s - began_s) / 2 > RACING * context.deadline.budget_s
        ):
            break
        counts |= {row.runs[0].label: further for row in found.ranked_rows[:2]}
    return found, unreached


def time_on_cluster(
    racers: Sequence[Racer], cluster: Spec, scale: Scale, context: RaceContext
) -> float | None:
    """Run racers on another cluster, with their rates and seeds.

    Returns: the shortest median time to the target; None if a run has not ended.
    """
    folder, lists = context.folder / WITHOUT, [key for key in LISTS if cluster.get(key)]
    changed = {f"cluster.{key}": cluster[key] for key in (*lists, "num_workers")}
    # A profile is of all workers; its costs are in the cluster.
    fixed = [text for text in context.fixed if key_of(text) not in (*changed, "profile")]
    typed = [f"{key}={value}".replace(" ", "") for key, value in changed.items()]
    there, settings = context._replace(folder=folder, fixed=(*fixed, *typed)), list[Setting]()
    for racer in racers:
        config = {**racer.candidate.config, "cluster": cluster, "profile": None}
        own = replace(racer.candidate, config=config)
        settings += [
            setting_of(own, there, scale, racer.rate, seed, ("seed",)) for seed in racer.seeds
        ]
    run_grid(grid_of(settings, ()), folder, there, ANSWERED, "without a worker", seeds=2)
    record = jsonl.read_json(folder / SWEEP)
    if record is None or any(is_missing(folder, setting, record) for setting in settings):
        return None
    with suppress(UsageError):
        return rank(read_study([folder])).ranked_rows[0].spread.middle
    return None


def rank_outcome(context: RaceContext) -> tuple[Leaderboard | None, Target | None]:
    """Return the leaderboard of the last round, or of the tuning if that compares more settings.

    It ranks by the requested target if a setting has reached it. Else it ranks by a target that all
    settings reached, and returns the requested target, too.
    """
    outcomes = list[tuple[Leaderboard, Target | None]]()
    for folder in (context.folder, context.folder / TUNING):
        with suppress(UsageError):
            found, target = rank(read_study([folder])), None
            if found.target is not None and not math.isfinite(found.ranked_rows[0].spread.middle):
                target = found.target
                found = rank(read_study([folder]), own_target=False)
            outcomes.append((found, target))
    several = (outcome for outcome in outcomes if len(outcome[0].ranked_rows) > 1)
    return next(several, outcomes[-1] if outcomes else (None, None))

"""Search: Optuna chooses the next setting by the costs of the trials before.

A trial is a setting with each of the requested seeds. Its cost, which is minimised, is a mean over
these runs: the time to the target, or the final loss if there is no target. The folder of a search
is a sweep's folder, with Optuna's journal. A resumed search first repeats the settings that were
interrupted, and no run that has ended.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ashl.config.compose import Axis, alternatives, axis_of
from ashl.config.override import CommandLine, index_by_key
from ashl.errors import UsageError
from ashl.plan.plan import TARGETS
from ashl.report.records import SWEEP
from ashl.study import sweep
from ashl.study.grid import Grid, Line, Setting, Skipped, make_grid
from ashl.study.jobs import Pool, has_ended, read_summary
from ashl.tracking import jsonl
from ashl.tracking.console import print_unwrapped
from ashl.tracking.sweep_progress import SweepProgress

if TYPE_CHECKING:
    from optuna import Study, Trial

JOURNAL = "search.log"
# The cost of a run that diverges or misses the target is above that of every other run.
NEVER = 1e9


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of a search: fixed overrides, the values of each axis, and every seed."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]
    seeds: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        return [*(axis.key for axis in self.axes), *(["seed"] if len(self.seeds) > 1 else [])]

    def line(self, singles: Sequence[str]) -> Line:
        """Return the grid of one trial."""
        return Line([*([single] for single in (*self.fixed, *singles)), self.seeds])

    def corners(self) -> list[Line]:
        """Return grids that contain every alternative once, with the first ones of all other axes.

        They are checked before the search.
        Raises: UsageError if no key varies.
        """
        if not self.axes:
            raise UsageError(
                "a search needs something to choose, as in 'optimizer.lr=interval(0.01,0.5)'"
                " sync=bsp,ssp"
            )
        fixed = [[single] for single in (*self.fixed, self.seeds[0])]
        firsts = [axis.singles[:1] for axis in self.axes]
        return [
            Line([*fixed, *firsts[:k], axis.singles, *firsts[k + 1 :]])
            for k, axis in enumerate(self.axes)
        ]


def space_of(typed: Sequence[str], config_dir: Path | None) -> SearchSpace:
    """Return the space of typed overrides; of a key that is typed twice the last value counts.

    Seeds are no axis: each trial runs all of them, so that no lucky seed wins.
    """
    last = index_by_key(typed)
    seeds = tuple(alternatives(last.pop("seed", "seed=0"), config_dir))
    axes = [axis_of(text, config_dir) for text in last.values()]
    return SearchSpace(
        fixed=tuple(axis.singles[0] for axis in axes if len(axis.singles) == 1),
        axes=tuple(axis for axis in axes if len(axis.singles) > 1),
        seeds=seeds,
    )


def search(
    typed: Sequence[str],
    config_dir: Path | None,
    trials: int,
    command: CommandLine,
    *,
    slots: int | None,
    quiet: bool,
    silent: bool,
    make_pool: Callable[[Path, int], Pool],
) -> sweep.SweepOutcome:
    """Try settings until there are `trials` of them, and return the outcome.

    Args: make_pool returns the pool for a folder and a number of runs at a time; the others are
    those of `sweep`.
    Raises: UsageError for a preset with a grid; KeyboardInterrupt. Runs that have ended by then are
    kept.
    """
    asked = space_of(typed, config_dir)
    corners = make_grid(asked.corners(), config_dir)
    config = corners.settings[0].config
    if config["sweep"]:
        raise UsageError(
            "a preset that is a grid of its own cannot be searched; run it without --search"
        )
    folder, slots = sweep.folder_of(typed, config), slots or sweep.slots_for(corners)
    with sweep.lock_folder(folder, JOURNAL):
        study = open_study(folder)
        console = Console(highlight=False, quiet=silent)
        if not quiet:
            print_unwrapped(console, f"{folder.name} {trials} trials; folder {folder}")
        progress = SweepProgress(console, trials * len(asked.seeds), quiet=quiet)
        tried = SearchRecord(asked, study, folder, config_dir, progress, typed, command)
        with sweep.copy_to_tracker(config, folder, str(command), console) as to_tracker:
            pool = make_pool(folder, slots)
            pool = pool._replace(at_once=min(pool.at_once, slots))
            for _ in sweep.run_settings(folder, tried.choose(trials), pool, progress, to_tracker):
                tried.tell_costs()
            return sweep.conclude(folder, [*tried.settings.values()], command, console)


def open_study(folder: Path) -> "Study":
    """Return Optuna's study in a folder, with the interrupted trials of an earlier search enqueued.

    Raises: UsageError if Optuna is not installed.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UsageError("--search needs a package: pip install 'ashl[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
    # a resumed search draws other numbers than before
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


@dataclass
class SearchRecord:
    """The settings that this search and earlier ones in this folder tried, as in `sweep.json`."""

    asked: SearchSpace
    study: "Study"
    folder: Path
    config_dir: Path | None
    progress: SweepProgress
    typed: Sequence[str]
    command: CommandLine
    settings: dict[str, Setting] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    # the settings of trials without a result, by number
    unfinished: dict[int, tuple[Setting, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before = jsonl.read_json(self.folder / SWEEP) or {}
        for entry in before.get("settings", []):
            known = {key: entry[key] for key in ("hash", "overrides", "axes", "predicted_s")}
            self.settings[entry["hash"]] = Setting(**known, config={})
        self.write()

    def choose(self, trials: int) -> Iterator[Setting]:
        """Yield the settings of the next trials that have not ended, until there are `trials`."""
        from optuna.trial import TrialState

        told = (TrialState.COMPLETE, TrialState.PRUNED)
        begun = set[str]()
        while (
            len(self.study.get_trials(deepcopy=False, states=told)) + len(self.unfinished) < trials
        ):
            trial = self.study.ask()
            point = [suggest_override(trial, axis) for axis in self.asked.axes]
            try:
                settings = make_grid([self.asked.line(point)], self.config_dir).settings
            except UsageError as error:
                self.skipped[" ".join(point)] = Skipped(tuple(point), str(error))
                self.progress.print_line(f"skipped: {' '.join(point)}: {error}")
                self.study.tell(trial, state=TrialState.PRUNED)
                continue
            settings = tuple(self.with_search_axes(setting) for setting in settings)
            self.settings |= {setting.hash: setting for setting in settings}
            self.unfinished[trial.number] = settings
            self.write()
            for setting in settings:
                # another trial may have chosen the same
                if setting.hash not in begun and not has_ended(self.folder / setting.hash):
                    begun.add(setting.hash)
                    yield setting
            self.tell_costs()

    def with_search_axes(self, setting: Setting) -> Setting:
        """Return a setting that is named by all keys of the search, not by those of its trial."""
        chosen = dict(text.split("=", 1) for text in setting.overrides)
        axes = {key: chosen[key] for key in self.asked.keys if key in chosen}
        return replace(setting, axes=axes, plan=None)

    def tell_costs(self) -> None:
        """Tell Optuna the cost of each trial whose runs have ended."""
        for number, settings in list(self.unfinished.items()):
            places = [self.folder / setting.hash for setting in settings]
            if all(map(has_ended, places)):
                pairs = zip(places, settings, strict=True)
                found = [cost_of(read_summary(path), s.config["stop"]) for path, s in pairs]
                self.study.tell(number, statistics.fmean(found))
                del self.unfinished[number]

    def write(self) -> None:
        settings = tuple(self.settings.values())
        axes = {
            key: list(dict.fromkeys(s.axes[key] for s in settings if key in s.axes))
            for key in self.asked.keys
        }
        grid = Grid(axes, settings, tuple(self.skipped.values()), {}, 0)
        record = sweep.document(grid, self.typed, self.folder.name, [], self.command)
        jsonl.write_json(self.folder / SWEEP, record)


def suggest_override(trial: "Trial", axis: Axis) -> str:
    """Return the override of an axis that Optuna chooses; a number has four significant digits.

    Raises: UsageError if an earlier search in this folder had other values.
    """
    try:
        if axis.ends is None and axis.ordered:
            return axis.singles[trial.suggest_int(axis.key, 0, len(axis.singles) - 1)]
        if axis.ends is None:
            return trial.suggest_categorical(axis.key, axis.singles)
        low, high = axis.ends
        if isinstance(low, int) and isinstance(high, int):
            return f"{axis.key}={trial.suggest_int(axis.key, low, high, log=axis.log)}"
        return f"{axis.key}={trial.suggest_float(axis.key, low, high, log=axis.log):.4g}"
    except ValueError:
        raise UsageError(
            f"{axis.key}: an earlier search in this folder had other values; choose another run.dir"
        ) from None


def cost_of(summary: Mapping[str, Any] | None, stop: Mapping[str, Any]) -> float:
    """Return the cost of a run that has ended, which the search minimises.

    A run that misses the target costs more than every run that reaches it; among such runs the loss
    decides.

    Args: summary is None for a run without one; stop has the run's limits and targets.
    """
    missed = NEVER if any(stop.get(target) is not None for target in TARGETS) else 0.0
    if summary is None or summary["status"] in ("diverged", "failed"):
        return NEVER + missed
    if summary["time_to_target_s"] is not None:
        return summary["time_to_target_s"]
    loss = summary["final"]["test_loss" if stop["target_loss"] is None else "train_loss"]
    return min(NEVER if loss is None else loss, NEVER) + missed

"""`python -m tests.benchmarks.race [STUDIES [SEED [FOLDER]]]`: does a race keep the best setting of
the full grid, and at what share of the grid's cost?

Each study is a grid on digits with three seeds of its own, in virtual time. The full grid is run
once, into FOLDER if there is one, which a second call reads again. Then each rule decides on these
records, as if one run after the other: the race's rule (`ashl.study.race`) and two pruners of
Optuna. Cost is in steps. Successive halving sees each run as a trial, and drops a setting with its
first run that it prunes. Wilcoxon's test sees each setting as a trial, and pairs losses by seed and
time; it compares with the best setting that is complete, so it runs setting by setting. A run that
has reached the target reports a loss below all others, lower if it was earlier.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import optuna
from optuna.pruners import BasePruner, SuccessiveHalvingPruner, WilcoxonPruner
from rich.console import Console
from rich.table import Table

from ashl.config.override import command_line
from ashl.study.grid import Setting, grid_lines, make_grid
from ashl.study.race import LearningCurve, RunState, comparison_times, rank_of, settings_to_drop
from ashl.study.sweep import sweep
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS

SEEDS = 3
TARGET = 0.95
ALL = ["runtime=sim", "stop.epochs=8", "eval.every_s=0.1", "tracking=none", "tracking.events=none"]
GRIDS = {
    "modes and rates": ["sync=bsp,ssp,asp,local_sgd", "optimizer.lr=0.02,0.1,0.4"],
    "modes and codecs": [
        "cluster=one_slow",
        "sync=bsp,ssp,asp,local_sgd",
        "compression=none,topk,qsgd",
    ],
    "gossip and rates": [
        "cluster=mixed",
        "topology=gossip",
        "sync=d_psgd,ad_psgd",
        "optimizer.lr=0.02,0.05,0.1,0.2,0.4",
    ],
}


class Recorded(NamedTuple):
    """A run of the full grid, up to the target or its end."""

    course: LearningCurve
    steps_per_s: float

    @property
    def end(self) -> RunState:
        return RunState(self.course.losses[-1], self.course.reached_s)

    def until(self, count: int) -> LearningCurve:
        """Return the course as it was after the first `count` evaluations."""
        whole = self.course
        ended = count == len(whole.times)
        return LearningCurve(
            whole.times[:count], whole.losses[:count], whole.reached_s if ended else None, ended
        )

    def steps(self, at_s: float = math.inf) -> float:
        return min(at_s, self.course.now_s) * self.steps_per_s


Teams = dict[str, dict[int, Recorded]]  # of each setting, the runs by seed
Raced = tuple[set[str], float]  # settings that were dropped, and the steps that the race took


def recorded_run(folder: Path) -> Recorded:
    lines = list(jsonl.read(folder / METRICS))
    reached_s = next((line["time_s"] for line in lines if (line["test/acc"] or 0) >= TARGET), None)
    seen = [line for line in lines if reached_s is None or line["time_s"] <= reached_s]
    losses = [math.inf if line["test/loss"] is None else line["test/loss"] for line in seen]
    course = LearningCurve([line["time_s"] for line in seen], losses, reached_s, ended=True)
    return Recorded(course, lines[-1]["step"] / lines[-1]["time_s"])


def first_named(teams: Teams) -> str:
    """Return the baseline: BSP, or the first setting."""
    return next((name for name in teams if "bsp" in name.split("=")), next(iter(teams)))


def by_verdicts(teams: Teams, horizon_s: float) -> Raced:
    """Race by the rule of `ashl sweep --race`."""
    baseline, seeds = first_named(teams), list(next(iter(teams.values())))
    field: dict[str, dict[int, LearningCurve]] = {
        name: {} for name in sorted(teams, key=lambda name: name != baseline)
    }
    gone, cost = set[str](), 0.0
    for seed in seeds:
        for name in [name for name in field if name not in gone]:
            run = teams[name][seed]
            for count in range(1, len(run.course.times) + 1):
                field[name][seed] = run.until(count)
                stays = field.keys() - {name} | {baseline}
                gone |= settings_to_drop(field, horizon_s, len(seeds), stays).keys()
                if name in gone:
                    break
            cost += run.steps(field[name][seed].now_s)
    return gone, cost


def value(found: RunState, horizon_s: float) -> float:
    """Return what a run reports to a pruner; lower is better."""
    return found.loss if found.reached_s is None else found.reached_s / horizon_s - 1


def by_halving(make: Callable[[], BasePruner], teams: Teams, horizon_s: float) -> Raced:
    """Race by a pruner that compares runs at equal times."""
    baseline, study = first_named(teams), optuna.create_study(pruner=make())
    gone, cost = set[str](), 0.0
    for seed in next(iter(teams.values())):
        for name in sorted(teams, key=lambda name: name != baseline):
            if name in gone:
                continue
            run, trial = teams[name][seed], study.ask()
            pruned_s = math.inf
            for number, at_s in enumerate(comparison_times(horizon_s)):
                found = run.course.state_at_time(at_s)
                if found is None:
                    continue
                trial.report(value(found, horizon_s), number)
                if name != baseline and found.reached_s is None and trial.should_prune():
                    pruned_s = at_s
                    gone.add(name)
                    break
            cost += run.steps(pruned_s)
            if name in gone:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, value(run.end, horizon_s))
    return gone, cost


def by_wilcoxon(make: Callable[[], BasePruner], teams: Teams, horizon_s: float) -> Raced:
    """Race by a pruner that compares settings over pairs of equal seed and time."""
    baseline, study = first_named(teams), optuna.create_study(pruner=make())
    gone, cost, times = set[str](), 0.0, comparison_times(horizon_s)
    for name in sorted(teams, key=lambda name: name != baseline):
        trial = study.ask()
        for order, run in enumerate(teams[name].values()):
            pruned_s = math.inf
            for number, at_s in enumerate(times):
                if (found := run.course.state_at_time(at_s)) is None:
                    continue
                trial.report(value(found, horizon_s), order * len(times) + number)
                if name != baseline and trial.should_prune():
                    pruned_s = at_s
                    gone.add(name)
                    break
            cost += run.steps(pruned_s)
            if name in gone:
                break
        if name in gone:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            values = [value(run.end, horizon_s) for run in teams[name].values()]
            study.tell(trial, statistics.fmean(values))
    return gone, cost


RULES: dict[str, Callable[[Teams, float], Raced]] = {
    "race": by_verdicts,
    **{
        f"SuccessiveHalvingPruner, factor {factor}": partial(
            by_halving, partial(SuccessiveHalvingPruner, reduction_factor=factor)
        )
        for factor in (2, 3, 4)
    },
    **{
        f"WilcoxonPruner, p < {p}": partial(by_wilcoxon, partial(WilcoxonPruner, p_threshold=p))
        for p in (0.3, 0.1, 0.01)
    },
}


def name_of(setting: Setting) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.axes.items() if key != "seed")


def recorded(
    overrides: list[str], studies: int, first: int, folder: Path
) -> tuple[list[Teams], float]:
    """Run the full grid, unless the folder has it, and return its studies and the longest time."""
    seeds = f"seed=range({first},{first + SEEDS * studies})"
    overrides = [*ALL, *overrides, seeds, f"run.dir={folder}"]
    grid = make_grid(grid_lines(overrides, None))
    command = command_line("sweep", overrides)
    sweep(
        grid, overrides, slots=None, rerun_failed=False, race=False, quiet=True,
        silent=True, command=command,
    )  # fmt: skip
    teams: list[Teams] = [{} for _ in range(studies)]
    for setting in grid.settings:
        seed = setting.config["seed"]
        run = recorded_run(folder / setting.hash)
        teams[(seed - first) // SEEDS].setdefault(name_of(setting), {})[seed] = run
    return teams, max(setting.predicted_s or 0.0 for setting in grid.settings)


def order_of(runs: dict[int, Recorded]) -> tuple[float, float]:
    return rank_of([run.end for run in runs.values()])


def median_s(runs: dict[int, Recorded]) -> float:
    return statistics.median(run.end.reached_s or math.inf for run in runs.values())


def judged(
    rule: Callable[[Teams, float], Raced], studies: list[Teams], horizon_s: float
) -> tuple[int, int, float, float]:
    """Return how good a rule is over the studies.

    Returns: the number of studies in which the best setting remains; the number in which the
    winner's median lies within the range of the best setting; the largest ratio of their medians;
    the mean share of the grid's cost.
    """
    remains, inside, ratios, costs = 0, 0, [], []
    for teams in studies:
        best = min(teams, key=lambda name: order_of(teams[name]))
        gone, cost = rule(teams, horizon_s)
        winner = min(teams.keys() - gone, key=lambda name: order_of(teams[name]))
        latest_s = max(run.end.reached_s or math.inf for run in teams[best].values())
        remains += best not in gone
        inside += median_s(teams[winner]) <= latest_s
        ratios.append(median_s(teams[winner]) / median_s(teams[best]))
        full = sum(run.steps() for runs in teams.values() for run in runs.values())
        costs.append(cost / full)
    return remains, inside, max(ratios), statistics.fmean(costs)


def main(studies: int, first: int, place: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")  # WilcoxonPruner is experimental
    table = Table("grid", "rule", "best remains", "winner inside", "worst ratio", "cost")
    for title, overrides in GRIDS.items():
        folder = place / title.replace(" ", "-")
        found, horizon_s = recorded(overrides, studies, first, folder)
        for name, rule in RULES.items():
            remains, inside, worst, cost = judged(rule, found, horizon_s)
            counts = (f"{remains} of {studies}", f"{inside} of {studies}")
            table.add_row(title, name, *counts, f"{worst:.2f}", f"{cost:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:3]]
    with TemporaryDirectory() as temporary:
        own = Path(sys.argv[3] if len(sys.argv) > 3 else temporary)
        main(*numbers, *(10, 0)[len(numbers) :], place=own)

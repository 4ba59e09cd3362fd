"""`python -m tests.benchmarks.race [STUDIES [SEED]]`: does a race find the winner, and at what
share of the full cost?

Each study is a grid of sync modes and learning rates on digits with three seeds of its own, in
virtual time. The full grid is run once; the race is then decided on its records by the rules of
`ashl.study.race`, one run after the other: what `ashl sweep --race --jobs 1` does
(`tests/cli/test_sweep.py`), without the part that nobody needed. Cost is in steps.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from ashl.config.compose import compose
from ashl.study.grid import Setting, grid_lines, make_grid
from ashl.study.race import Course, Standing, rank_of, verdicts
from ashl.study.sweep import read_summary, sweep
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS

SEEDS = 3
TARGET = 0.95
GRID = [
    "sync=bsp,ssp,asp,local_sgd",
    "optimizer.lr=0.02,0.1,0.4",
    "runtime=sim",
    "stop.epochs=8",
    "eval.every_s=0.1",
    "tracking=none",
    "tracking.events=none",
]


def curve(folder: Path) -> list[dict]:
    return list(jsonl.read(folder / METRICS))


def standing(lines: list[dict], at_s: float) -> Standing:
    """Where the run stood at this moment; it stops at the target."""
    reached = next((line["time_s"] for line in lines if (line["test/acc"] or 0) >= TARGET), None)
    seen = [line for line in lines if line["time_s"] <= at_s]
    loss = (seen or lines)[-1 if seen else 0]["test/loss"]
    return Standing(
        float("inf") if loss is None else loss,
        reached if reached is not None and reached <= at_s else None,
    )


def steps(lines: list[dict], at_s: float) -> float:
    """Steps until this moment, the target or the end."""
    found = standing(lines, at_s).reached_s
    end = min(at_s, lines[-1]["time_s"] if found is None else found)
    return end * lines[-1]["step"] / lines[-1]["time_s"]


def course(lines: list[dict], at_s: float) -> Course:
    """Return the run's records until this time."""
    end = standing(lines, math.inf).reached_s
    seen = [line for line in lines if line["time_s"] <= min(at_s, math.inf if end is None else end)]
    ended = not seen or seen[-1] is lines[-1] or seen[-1]["time_s"] == end
    losses = [math.inf if line["test/loss"] is None else line["test/loss"] for line in seen]
    return Course([line["time_s"] for line in seen], losses, end if ended else None, ended)


def raced(teams: dict[str, dict[int, list[dict]]], horizon_s: float) -> tuple[str, float]:
    """(winner, steps that the race took): seed by seed, and each run as far as the
    verdicts let it.
    """
    baseline, seeds = (
        next(name for name in teams if "bsp" in name),
        list(next(iter(teams.values()))),
    )
    field: dict[str, dict[int, Course]] = {
        name: {} for name in sorted(teams, key=lambda name: name != baseline)
    }
    gone, cost = set[str](), 0.0
    for seed in seeds:
        for name in [name for name in field if name not in gone]:
            lines = teams[name][seed]
            for line in lines:
                field[name][seed] = course(lines, line["time_s"])
                gone |= {name} & verdicts(field, horizon_s, len(seeds), {baseline, *gone}).keys()
                if name in gone or field[name][seed].ended:
                    break
            cost += steps(lines, field[name][seed].now_s)
    left = [name for name in field if name not in gone]
    ends = {name: [standing(lines, math.inf) for lines in teams[name].values()] for name in left}
    return min(ends, key=lambda name: rank_of(ends[name])), cost


def times(team: dict[int, list[dict]]) -> list[float]:
    return [standing(lines, float("inf")).reached_s or float("inf") for lines in team.values()]


def name_of(setting: Setting) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.axes.items() if key != "seed")


def main(studies: int, first: int) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        overrides = [*GRID, f"seed=range({first},{first + SEEDS * studies})"]
        grid = make_grid(grid_lines(overrides, None), compose)
        sweep(grid, overrides, folder, slots=None, rerun_failed=False, race=False, quiet=True)
        report(grid.settings, folder, studies, first)


def report(settings: tuple[Setting, ...], folder: Path, studies: int, first: int) -> None:
    teams: dict[int, dict[str, dict[int, list[dict]]]] = {}
    for setting in settings:
        seed = setting.config["seed"]
        assert read_summary(folder / setting.hash) is not None
        lines = curve(folder / setting.hash)
        teams.setdefault((seed - first) // SEEDS, {}).setdefault(name_of(setting), {})[seed] = lines
    horizon_s = max(setting.predicted_s or 0.0 for setting in settings)
    table = Table(
        "study",
        "winner of the full grid",
        "its times",
        "winner of the race",
        "its median",
        "inside",
        "cost",
    )
    hits, costs = 0, []
    for study in range(studies):
        team = teams[study]
        whole = min(
            team,
            key=lambda n: rank_of([standing(lines, float("inf")) for lines in team[n].values()]),
        )
        found, cost = raced(team, horizon_s)
        full = sum(steps(lines, float("inf")) for runs in team.values() for lines in runs.values())
        span, median = times(team[whole]), statistics.median(times(team[found]))
        inside = min(span) <= median <= max(span)
        hits, costs = hits + inside, [*costs, cost / full]
        shown = f"{min(span):.2f} .. {max(span):.2f} s"
        table.add_row(
            str(study),
            whole,
            shown,
            found,
            f"{median:.2f} s",
            "yes" if inside else "no",
            f"{cost / full:.2f}",
        )
    Console(width=140).print(table)
    print(
        f"inside the interval: {hits} of {studies}; cost of a race / of the full grid:"
        f" {statistics.mean(costs):.2f}"
    )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*given, *(10, 0)[len(given) :])

"""`python -m tests.benchmarks.advise [CLUSTER...] [KEY=VALUE...]`: is the advice as good as the
best of the full grid, at what cost?

For each cluster preset, mlp on digits to 95 % unless something else is typed: first the advice,
then every candidate at every learning rate with the seeds of the race. The grid's winner is the
best median; the advice is inside if the median that its winner and rate have in the grid lies
within the range of the grid's winner. Cost is the runs' own host seconds, their steps and their
number.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from ashl.advice.advise import advise
from ashl.advice.candidates import Field, asked, field_of
from ashl.advice.contest import Place, grid_of, rates_of, setting_of
from ashl.advice.scale import RATES, Scale
from ashl.config.override import command_line, key_of
from ashl.study.jobs import local_pool, read_summary
from ashl.study.sweep import begin_record, fill
from ashl.tracking import jsonl
from ashl.tracking.deadline import Deadline
from ashl.tracking.sweep_progress import SweepProgress

CLUSTERS = ("one_slow", "ashl_paper", "homogeneous", "mixed", "four_nodes")
SEEDS, SLOTS, BUDGET_S = (1, 2, 3), 2, 1500.0
TASK = ["runtime=sim", "tracking=none", "tracking.events=none", "stop.epochs=30"]
TARGET = ["stop.target_accuracy=0.95", "stop.target_consecutive_evals=2"]
LINE = command_line("advise", TASK)

Times = dict[tuple[str, str], list[float]]  # by candidate and learning rate: seconds to the target


def cost(folder: Path) -> tuple[float, int, int]:
    """Host seconds and steps of all runs below, and how many there are."""
    found = [jsonl.whole(path) or {} for path in folder.rglob("summary.json")]
    host_s, steps = (sum(summary.get(key) or 0 for summary in found) for key in ("host_s", "steps"))
    return host_s, steps, len(found)


def whole_grid(field: Field, fixed: list[str], every_s: float | None, folder: Path) -> Times:
    """Every candidate at every rate, each run to its end."""
    folder.mkdir()
    place = Place(folder, LINE, fixed, SLOTS, Deadline(math.inf), Console(quiet=True), True)
    scale = Scale(1.0, RATES, every_s)
    pairs = [
        (own, rate, seed)
        for own in field.candidates
        for rate in rates_of(own, scale)
        for seed in SEEDS
    ]
    settings = [
        setting_of(own, place, scale, rate, seed, ("optimizer.lr", "seed"))
        for own, rate, seed in pairs
    ]
    grid = grid_of(settings, ())
    progress = SweepProgress(place.console, len(settings), quiet=True)
    record = begin_record(grid, fixed, folder, keep_dropped=False, command=place.command)
    fill(grid, record, folder, settings, local_pool(SLOTS), progress)
    times: Times = {}
    for setting in settings:
        reached_s = (read_summary(folder / setting.hash) or {}).get("time_to_target_s")
        key = setting.label, setting.axes["optimizer.lr"]
        times.setdefault(key, []).append(math.inf if reached_s is None else reached_s)
    return times


def main(clusters: list[str], typed: list[str]) -> None:
    console = Console(width=170)
    table = Table(
        "cluster",
        "candidates",
        "grid's winner",
        "its times",
        "advised",
        "in the grid",
        "inside",
        "host s",
        "runs",
    )
    for cluster in clusters:
        with TemporaryDirectory() as place:
            folder, fixed = Path(place), [f"cluster={cluster}", *TASK, *TARGET, *typed]
            fixed = list({key_of(text): text for text in fixed}.values())
            how = {
                "target": None,
                "budget_s": BUDGET_S,
                "slots": SLOTS,
                "explain": True,
                "dry_run": False,
            }
            advise(
                [*fixed, f"run.dir={folder}/advice"], None, console, command=LINE, **how, quiet=True
            )
            record = jsonl.whole(folder / "advice" / "advice.json") or {}
            field = field_of(asked(fixed, None), None, lambda done, size, name: None)
            times = whole_grid(field, fixed, record["scale"]["every_s"], folder / "grid")
            best = min(times, key=lambda key: median(times[key]))
            name, rate = record["winner"]["name"], f"{record['winner']['optimizer.lr']:g}"
            own_s, low_s, high_s = median(times[name, rate]), min(times[best]), max(times[best])
            both = zip(cost(folder / "advice"), cost(folder / "grid"), strict=True)
            table.add_row(
                cluster,
                str(len(field.candidates)),
                f"{best[0]} at {best[1]}",
                f"{low_s:.3g} .. {median(times[best]):.3g} .. {high_s:.3g} s",
                f"{name} at {rate}",
                f"{own_s:.3g} s",
                "yes" if own_s <= high_s else "no",
                *(f"{own:.0f} / {whole:.0f} = {own / whole:.2f}" for own, whole in both),
            )
            console.print(f"{cluster}: spent {record['spent_s']:.0f} s, {record['headline']}")
            console.print(table)


if __name__ == "__main__":
    typed = [text for text in sys.argv[1:] if "=" in text]
    main([text for text in sys.argv[1:] if "=" not in text] or list(CLUSTERS), typed)

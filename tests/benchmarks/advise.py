"""`python -m tests.benchmarks.advise [CLUSTER...] [KEY=VALUE...]`: is the advice as good as the
best of the full grid, at what cost? A number N instead of a preset draws N clusters at random.

For each cluster, mlp on digits to 95 % unless something else is typed: first the advice, then every
candidate at every learning rate with the seeds of the race. The grid's winner is the best median;
the advice is inside if the median that its winner and rate have in the grid lies within the range
of the grid's winner. Cost is the runs' own host seconds, their steps and their number.

The best of many medians of three seeds is partly luck. So both, the winner and the advised one, run
again with seeds that neither has used.

The advice to leave a worker out is compared with runs without that worker: the `CONTENDERS` best of
the grid at their rates, with the same seeds.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from ashl.advice.advise import advise
from ashl.advice.candidates import Selection, select_candidates
from ashl.advice.contest import RaceContext, rates_of, setting_of
from ashl.advice.scale import RATES, Scale
from ashl.config.override import command_line, key_of
from ashl.study.jobs import local_pool, read_summary
from ashl.study.sweep import run_missing
from ashl.tracking import jsonl
from ashl.tracking.deadline import Deadline
from ashl.tracking.sweep_progress import SweepProgress

CLUSTERS = ("one_slow", "ashl_paper", "homogeneous", "mixed", "four_nodes")
SEEDS, SLOTS, BUDGET_S = (1, 2, 3), 2, 1500.0
FRESH_SEEDS = (11, 12, 13, 14, 15)  # used neither by the grid nor by the advice
TASK = ["runtime=sim", "tracking=none", "tracking.events=none", "stop.epochs=30"]
TARGET = ["stop.target_accuracy=0.95", "stop.target_consecutive_evals=2"]
LINE = command_line("advise", TASK)

Times = dict[tuple[str, str], list[float]]  # by candidate and learning rate: seconds to the target
DRAWN_SEED = 20261127
CONTENDERS = 3
LISTED = ("cluster.compute=", "cluster.link=")  # have an entry for each worker


def drawn_clusters(count: int) -> list[list[str]]:
    """Draw clusters: 3 to 8 workers with unequal speeds, links of 5 to 1,000 Mbit/s per NIC, and 0.2
    to 20 ms of latency; on half of them a straggler, on a third unequal links.
    """
    found = []
    for number in range(count):
        rng = random.Random(DRAWN_SEED + number)
        n = rng.randint(3, 8)
        compute = [round(math.exp(rng.gauss(0, 0.3)), 2) for _ in range(n)]
        if rng.random() < 1 / 2:
            compute[-1] = round(rng.uniform(2.5, 8), 2)
        link = [round(math.exp(abs(rng.gauss(0, 0.7))), 2) for _ in range(n)]
        unequal = [f"cluster.link={link}"] if rng.random() < 1 / 3 else []
        mbit_s = 10 ** rng.uniform(math.log10(5), 3)
        latency_s = 10 ** rng.uniform(math.log10(2e-4), math.log10(0.02))
        found.append(
            [
                "cluster=homogeneous",
                f"cluster.compute={compute}",
                *unequal,
                "cluster.exchange_s=null",
                f"cluster.bandwidth_mbit_s={mbit_s:.3g}",
                f"cluster.server_bandwidth_mbit_s={mbit_s * rng.choice([1, 4]):.3g}",
                f"cluster.latency_s={latency_s:.2g}",
                f"cluster.jitter={rng.choice([0.0, 0.1, 0.3])}",
            ]
        )
    return [[text.replace(" ", "") for text in one] for one in found]


def cost(folder: Path) -> tuple[float, int, int]:
    """Host seconds and steps of all runs below, and how many there are."""
    found = [jsonl.read_json(path) or {} for path in folder.rglob("summary.json")]
    host_s, steps = (sum(summary.get(key) or 0 for summary in found) for key in ("host_s", "steps"))
    return host_s, steps, len(found)


def whole_grid(
    selection: Selection,
    fixed: list[str],
    every_s: float | None,
    folder: Path,
    among: Collection[tuple[str, str]] | None = None,
    seeds: Sequence[int] = SEEDS,
) -> Times:
    """Run every candidate at every rate, or those in `among`, each to its end."""
    folder.mkdir()
    place = RaceContext(
        selection, folder, LINE, fixed, SLOTS, Deadline(math.inf), Console(quiet=True), True
    )
    scale = Scale(1.0, RATES, every_s)
    pairs = [
        (own, rate, seed)
        for own in selection.candidates
        for rate in rates_of(own, scale)
        for seed in seeds
        if among is None or (own.name, f"{rate:g}") in among
    ]
    settings = [
        setting_of(own, place, scale, rate, seed, ("optimizer.lr", "seed"))
        for own, rate, seed in pairs
    ]
    progress = SweepProgress(place.console, len(settings), quiet=True)
    run_missing(settings, folder, settings, local_pool(SLOTS), progress)
    times: Times = {}
    for setting in settings:
        reached_s = (read_summary(folder / setting.hash) or {}).get("time_to_target_s")
        key = setting.label, setting.axes["optimizer.lr"]
        times.setdefault(key, []).append(math.inf if reached_s is None else reached_s)
    return times


def judge_left_out(
    record: dict, times: Times, selection: Selection, fixed: list[str], folder: Path
) -> tuple[str, str]:
    """Return what the advice says about leaving a worker out, and what runs without it show."""
    if (said := record.get("leave_out")) is None:
        return "nothing", ""
    worker, n = said["worker"], selection.candidates[0].plan.num_workers
    without = [without_entry(text, worker) for text in fixed] + [f"cluster.num_workers={n - 1}"]
    own = select_candidates(tuple(without), None, lambda done, size, name: None)
    best = sorted(times, key=lambda key: median(times[key]))
    known = {candidate.name for candidate in own.candidates}  # a name may hold a planned H
    among = [key for key in best if key[0] in known][:CONTENDERS]
    there = whole_grid(own, without, record["scale"]["every_s"], folder, among)
    with_s, without_s = median(times[best[0]]), min(map(median, there.values()))
    advised = "undecided" if said["undecided"] else "leave out" if said["leave_out"] else "keep"
    right = said["leave_out"] == (without_s < with_s) or abs(without_s / with_s - 1) <= 0.1
    return (
        f"{advised} {worker}: {said['with_s']:.3g} .. {said['without_s']:.3g} s",
        f"{with_s:.3g} .. {without_s:.3g} s, {'right' if right else 'wrong'}",
    )


def without_entry(text: str, worker: int) -> str:
    """Return an override without a worker's entry of its list."""
    key, _, value = text.partition("=")
    if f"{key}=" not in LISTED:
        return text
    entries = value.strip("[]").split(",")
    return f"{key}=[{','.join(entries[:worker] + entries[worker + 1 :])}]"


def main(clusters: list[list[str]], typed: list[str]) -> None:
    console = Console(width=400)
    table = Table(
        "cluster",
        "candidates",
        "grid's winner",
        "its times",
        "advised",
        "in the grid",
        "inside",
        "fresh seeds",
        "host s",
        "runs",
        "leave out, predicted",
        "measured",
    )
    for cluster in clusters:
        with TemporaryDirectory() as place:
            folder, fixed = Path(place), [*cluster, *TASK, *TARGET, *typed]
            fixed = list({key_of(text): text for text in fixed}.values())
            how = {
                "target": None,
                "budget_s": BUDGET_S,
                "slots": SLOTS,
                "dry_run": False,
            }
            advise(
                [*fixed, f"run.dir={folder}/advice"], None, console, command=LINE, **how, quiet=True
            )
            record = jsonl.read_json(folder / "advice" / "advice.json") or {}
            selection = select_candidates(tuple(fixed), None, lambda done, size, name: None)
            times = whole_grid(selection, fixed, record["scale"]["every_s"], folder / "grid")
            best = min(times, key=lambda key: median(times[key]))
            name, rate = record["winner"]["name"], f"{record['winner']['optimizer.lr']:g}"
            own_s, low_s, high_s = median(times[name, rate]), min(times[best]), max(times[best])
            both = zip(cost(folder / "advice"), cost(folder / "grid"), strict=True)
            ratios = [f"{own:.0f} / {whole:.0f} = {own / whole:.2f}" for own, whole in both]
            both_again = {best, (name, rate)}
            again = whole_grid(
                selection,
                fixed,
                record["scale"]["every_s"],
                folder / "again",
                both_again,
                FRESH_SEEDS,
            )
            best_s, advised_s = median(again[best]), median(again[name, rate])
            table.add_row(
                " ".join(cluster).replace("cluster.", ""),
                str(len(selection.candidates)),
                f"{best[0]} at {best[1]}",
                f"{low_s:.3g} .. {median(times[best]):.3g} .. {high_s:.3g} s",
                f"{name} at {rate}",
                f"{own_s:.3g} s",
                "yes" if own_s <= high_s else "no",
                f"{advised_s:.3g} / {best_s:.3g} s = {advised_s / best_s:.3f}",
                ratios[0],
                ratios[2],
                *judge_left_out(record, times, selection, fixed, folder / "without"),
            )
            console.print(f"{cluster}: spent {record['spent_s']:.0f} s, {record['headline']}")
            console.print(table)


if __name__ == "__main__":
    words = [text for text in sys.argv[1:] if "=" not in text] or list(CLUSTERS)
    drawn = drawn_clusters(int(words[0])) if words[0].isdigit() else None
    typed = [text for text in sys.argv[1:] if "=" in text]
    main(drawn or [[f"cluster={name}"] for name in words], typed)

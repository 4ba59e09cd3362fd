"""Run the commands of docs/how-to/choose_a_method.md beside BSP on the same cluster.

`python -m tests.benchmarks.guide [--out FILE]` prints a CSV file: for each command its best learning
rate on seed 0, then the time to the target with three other seeds, and the factor to BSP. The
factors are paired by seed. It takes some minutes.
"""

import argparse
import csv
import re
import shlex
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import ashl
from tests.pages import DOCS

RATES = (0.05, 0.1, 0.2)
SEEDS = (1, 2, 3)
COMMON = (
    "tracking=none",
    "stop.target_accuracy=0.95",
    "stop.target_consecutive_evals=2",
    "eval.every_s=0.2",
    "stop.epochs=40",
)
HEAD = ("take", "cluster", "rate", "seconds to 95 %", "times as fast as BSP", "MB up")


def read_commands(text: str) -> list[tuple[str, list[str]]]:
    """Return each method of the guide's table with the settings of its command."""
    rows = re.findall(r"^\|(?:[^|]*\|){4} ([^|]+) \| `ashl train ([^`|]+)` \|$", text, re.M)
    return [(method, shlex.split(settings)) for method, settings in rows]


def run(settings: list[str], rate: float, seed: int, folder: str) -> tuple[float | None, float]:
    """Return seconds to the target, or None, and megabytes sent."""
    place = f"run.dir={folder}/{abs(hash((*settings, rate, seed)))}"
    found = ashl.train(*settings, *COMMON, f"optimizer.lr={rate}", f"seed={seed}", place)
    return found["time_to_target_s"], found["bytes_up"] / 1e6


def measure(settings: list[str], folder: str) -> tuple[float, list[float | None], float] | None:
    """Return the best rate on seed 0, the seconds by seed, and the megabytes; None if no rate
    reached the target.
    """
    tried = {rate: run(settings, rate, 0, folder)[0] for rate in RATES}
    reached = {rate: seconds for rate, seconds in tried.items() if seconds is not None}
    if not reached:
        return None
    best = min(reached, key=reached.__getitem__)
    runs = [run(settings, best, seed, folder) for seed in SEEDS]
    return best, [seconds for seconds, _ in runs], median(sent for _, sent in runs)


def rows(folder: str) -> list[tuple[str, ...]]:
    """Return the row of BSP on each cluster, then that of each command."""
    text = (DOCS / "how-to/choose_a_method.md").read_text(encoding="utf-8")
    commands = [
        (method, settings)
        for method, settings in read_commands(text)
        if not any("churn" in word for word in settings)
    ]
    clusters = dict.fromkeys(
        word for _, settings in commands for word in settings if word.startswith("cluster=")
    )
    baselines = {c: measure(["runtime=sim", c, "sync=bsp"], folder) for c in clusters}
    found = [row("BSP", cluster, base, base) for cluster, base in baselines.items()]
    for method, settings in commands:
        cluster = next(word for word in settings if word.startswith("cluster="))
        found.append(row(method, cluster, measure(settings, folder), baselines[cluster]))
        print(", ".join(found[-1]), file=sys.stderr)
    return found


def row(method: str, cluster: str, own: tuple | None, base: tuple | None) -> tuple[str, ...]:
    if own is None or base is None or None in own[1] or None in base[1]:
        return (method, cluster, "", "not reached", "", "")
    rate, seconds, sent = own
    factors = [there / here for here, there in zip(seconds, base[1], strict=True)]
    return (
        method,
        cluster,
        f"{rate:g}",
        f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        f"{median(factors):.2f} ({min(factors):.2f} to {max(factors):.2f})",
        f"{sent:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        lines = [HEAD, *rows(folder)]
    out = given.out.open("w", encoding="utf-8", newline="") if given.out else sys.stdout
    csv.writer(out, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()

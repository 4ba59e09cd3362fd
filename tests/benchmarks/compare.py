"""The cost of `ashl compare`: `python -m tests.benchmarks.compare`.

It makes a sweep of 200 finished runs: 25 settings of 8 seeds, 16 workers, about 50 evaluations and
9,600 rounds a run. A process of its own compares it, timed from the command to the written report.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.run_folders import write_sweep

SYNCS = ("bsp", "ssp", "asp", "local_sgd", "backup")
BATCHES = ("16", "32", "64", "128", "256")
SEEDS = 8
RUN = {"workers": 16, "rounds": 600, "every_s": 1 / 30}
TURNS = 3


def study(folder: Path) -> Path:
    """200 runs, of which one in ten never reaches its target."""
    draw = random.Random(0)
    settings = []
    for i, sync in enumerate(SYNCS):
        for j, batch in enumerate(BATCHES):
            for seed in range(SEEDS):
                reach_s = (
                    None
                    if draw.random() < 0.1
                    else (1 + 0.3 * i + 0.2 * abs(j - 2)) * draw.uniform(0.9, 1.1)
                )
                settings.append(
                    ({"sync": sync, "dataset.batch_size": batch, "seed": str(seed)}, reach_s)
                )
    return write_sweep(folder, settings, RUN)


def main() -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folder = study(Path(place) / "study")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        times = []
        for _ in range(TURNS):
            start = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "ashl.cli", "compare", str(folder)],
                check=True,
                capture_output=True,
            )
            times.append(time.monotonic() - start)
        report = (folder / "report.html").stat().st_size
    console.print(
        f"{len(SYNCS) * len(BATCHES) * SEEDS} runs, {size / 1e6:.0f} MB of records,"
        f" {os.cpu_count()} cores"
    )
    console.print(
        f"ashl compare  {min(times):.2f} s, the best of {TURNS} (the slowest {max(times):.2f} s)"
    )
    console.print(f"report.html   {report / 1e6:.3f} MB")


if __name__ == "__main__":
    main()

"""Compute utilisation over bandwidth and H on real links: `python -m tests.benchmarks.utilisation`.

Needs root. Each worker runs in a network namespace behind a link that is shaped both ways. Its steps
are paced (`cluster.step_s`), its messages travel as fast as the link allows. For each number of
workers and each bandwidth, `ashl profile` measures once. Then `ashl train` runs local SGD by
all-reduce for each H, and three numbers are compared: the measured utilisation, that of the same run
in virtual time on the profiled cluster, and the formula of the literature.

Utilisation is the share of time in which workers compute: steps per second and worker, times the
seconds of a step. The formula is H·t / (H·t + 2·(n−1)/n·bytes/bandwidth), as in DiLoCo's papers.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.benchmarks.table import show, write_csv
from tests.engines import free_port
from tests.namespaces import job, machines, missing

STEP_S = 0.01
MODEL = ("model=mlp", "model.hidden=[1024,900]")  # 4.0 MB
BASE = (
    "runtime=torchrun",
    "sync=local_sgd",
    "cluster=homogeneous",
    f"cluster.step_s={STEP_S}",
    "cluster.exchange_s=null",
    "tracking=none",
    "tracking.events=none",
    "eval.every_commits=1000000000",
    "optimizer.lr=0.001",
    *MODEL,
)
LEAST_S = 6.0  # seconds of a run by the formula, so that it has several rounds
MIN_ROUNDS = 5
HEAD = ("workers", "Mbit/s", "H", "measured", "predicted", "formula", "error", "of formula")


@dataclass(frozen=True)
class Cell:
    """One cell of the grid; utilisations are shares from 0 to 1."""

    workers: int
    mbit_s: float
    local_steps: int
    measured: float
    predicted: float
    formula: float

    def error(self, value: float) -> float:
        """Return how far a value is from the measured one, relative to it."""
        return value / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit-s", type=float, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--local-steps", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--csv", type=Path, help="file to write the cells to")
    asked = parser.parse_args()
    if why := missing():
        sys.exit(f"not run: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    cells = []
    for workers in asked.workers:
        for mbit_s in asked.mbit_s:
            cells += measure_row(workers, mbit_s, asked.local_steps)
            if asked.csv:
                write_csv(asked.csv, HEAD, rows_of(cells))
    show_cells(cells)


def measure_row(workers: int, mbit_s: float, local_steps: list[int]) -> list[Cell]:
    """Return the cells of one number of workers and one bandwidth."""
    given = [*BASE, f"cluster.num_workers={workers}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        machines(*[mbit_s] * workers) as names,
    ):
        # A profile measures links to a server, which here is one more rank on the first machine.
        with_server = [*names, names[0]]
        place = Path(folder) / "profile"
        profile = run_ashl(with_server, place, "profile", *given) / "profile.json"
        dense_bytes = json.loads(profile.read_text())["dense_bytes"]
        cells = []
        for steps in local_steps:
            sum_s = 2 * (workers - 1) / workers * dense_bytes * 8 / (mbit_s * 1e6)
            round_s = steps * STEP_S + sum_s
            rounds = max(MIN_ROUNDS, round(LEAST_S / round_s))
            own = (
                f"sync.local_steps={steps}",
                f"stop.steps={rounds * steps * workers}",
                f"profile={profile}",
                "topology=all_reduce",
            )
            run = run_ashl(names, Path(folder) / str(steps), "train", *given, *own)
            measured = utilisation_of(run, workers)
            predicted = utilisation_of(simulate(Path(folder) / f"sim-{steps}", *own), workers)
            formula = steps * STEP_S / round_s
            cells.append(Cell(workers, mbit_s, steps, measured, predicted, formula))
    return cells


def run_ashl(names: list[str], folder: Path, *command: str) -> Path:
    """Run a command with one rank on each machine; return its run folder, which rank 0 wrote."""
    job(
        names,
        free_port(),
        [sys.executable, "-m", "ashl.cli", *command, "run.dir=run", "-q"],
        folder,
    )
    return next(folder.glob("*/run"))


def simulate(run: Path, *overrides: str) -> Path:
    """Simulate a run on the profiled cluster, without gradients; return its run folder."""
    setting = [
        *(given for given in BASE if given.startswith(("sync", "model", "tracking", "eval"))),
        *("runtime=sim", "runtime.gradients=false", "cluster=profile", *overrides),
    ]
    command = [sys.executable, "-m", "ashl", "train", *setting, f"run.dir={run}", "-q"]
    subprocess.run(command, check=True, capture_output=True)
    return run


def utilisation_of(run: Path, workers: int) -> float:
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps_per_s"] * STEP_S / workers


def rows_of(cells: list[Cell]) -> list[list[str]]:
    """Return a row of words for each cell; shares and errors in percent."""
    rows = []
    for cell in cells:
        shares = (f"{100 * value:.3g}" for value in astuple(cell)[3:])
        errors = (f"{100 * cell.error(value):+.1f}" for value in (cell.predicted, cell.formula))
        rows.append(
            [f"{cell.workers}", f"{cell.mbit_s:g}", f"{cell.local_steps}", *shares, *errors]
        )
    return rows


def show_cells(cells: list[Cell]) -> None:
    ours = sorted(abs(100 * cell.error(cell.predicted)) for cell in cells)
    theirs = sorted(abs(100 * cell.error(cell.formula)) for cell in cells)
    show(
        f"compute utilisation in %, steps of {1000 * STEP_S:g} ms, local SGD by all-reduce",
        list(HEAD),
        rows_of(cells),
        f"errors in % of the measured value; of the prediction: median {statistics.median(ours):.1f},"
        f" largest {ours[-1]:.1f}; of the formula: median {statistics.median(theirs):.1f}, largest"
        f" {theirs[-1]:.1f}",
    )


if __name__ == "__main__":
    main()

"""Run `ashl calibrate`: compare predicted and measured times of combinations.

Rule: each combination runs on real processes, one run at a time, and in virtual time. Virtual time
uses the declared cluster, or the profile of a real one. That profile is measured first, unless
`profile=FILE` is given. The error of a combination is measured / predicted time − 1. The median of
|error| over the combinations has a 95 % bootstrap interval.

Limits: on a real cluster, a combination with more ranks than this host has cores is left out,
because its ranks would slow each other down. The nodes of a cluster do not. The result is not
stored with the profile.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from ashl.cluster.spec import Cluster
from ashl.config.compose import alternatives, compose, specs_of
from ashl.config.identity import config_hash
from ashl.config.override import key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.files import read_profile
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import OptionFactory
from ashl.run.profile import profile as measure
from ashl.run.train import is_virtual
from ashl.study.jobs import Job, local_pool, read_summary, run_all
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, seconds
from ashl.tracking.deadline import Deadline
from ashl.tracking.sweep_progress import Running, SweepProgress

CALIBRATIONS = Path("runs/calibrations")
FILE = "calibration.json"
SERVER, RING = "topology=parameter_server", "topology=all_reduce"
COMBINATIONS = {
    "BSP": f"sync=bsp {SERVER} compression=none",
    "BSP Top-K": f"sync=bsp {SERVER} compression=topk",
    "BSP QSGD": f"sync=bsp {SERVER} compression=qsgd",
    "local SGD 4": f"sync=local_sgd sync.local_steps=4 {SERVER} compression=none",
    "SSP": f"sync=ssp {SERVER} compression=none",
    "ASP": f"sync=asp {SERVER} compression=none",
    "ASP 4": f"sync=asp sync.local_steps=4 {SERVER} compression=none",
    "ASP Top-K": f"sync=asp {SERVER} compression=topk",
    "BSP ring": f"sync=bsp {RING} compression=none",
    "BSP ring Top-K": f"sync=bsp {RING} compression=topk",
    "local SGD 4 ring": f"sync=local_sgd sync.local_steps=4 {RING} compression=none",
    "D-PSGD": "sync=d_psgd topology=gossip compression=none",
    "Ripples random": "sync=ripples_random topology=partial_all_reduce compression=none",
}
# Defaults for all runs; evaluations are disabled.
DEFAULTS = ("schedule=single", "optimizer.lr=0.01", "eval.every_commits=1000000000")
REAL_CLUSTER = ("cluster=real", "cluster.num_workers=2")
LEAST_ROUNDS = 12  # rounds of every worker in one run
MOST_STEPS = 50_000  # steps of one run, unless `LEAST_ROUNDS` needs more
TOO_MANY = (
    "its {ranks} ranks are more than this host's {cores} cores, so that its times are not those of"
    " a cluster"
)


@dataclass(frozen=True)
class Pair:
    """A combination as a real run and as a run in virtual time."""

    name: str
    real: Job
    virtual: Job


@dataclass(frozen=True)
class Compared:
    """The predicted and the measured times of a combination."""

    name: str
    steps: int
    predicted_s: float
    measured_s: float
    predicted_wait_share: float
    measured_wait_share: float

    @property
    def error(self) -> float:
        return self.measured_s / self.predicted_s - 1


@dataclass(frozen=True)
class Calibrated:
    """Predicted beside measured times; or, of a dry run, the combinations that would run.

    `lines` are the settings of the chosen combinations and `left_out` why others are not run.
    `rows` is empty in a dry run. `profile` is the file that predicted a real cluster.
    """

    lines: dict[str, str]
    left_out: dict[str, str]
    folder: Path
    rows: Sequence[Compared] = ()
    count: int = 0
    profile: Path | None = None

    def show(self, console: Console) -> None:
        """Print the errors of the predictions, or the combinations."""
        if self.rows:
            show(console, self.rows, self.left_out, self.count, self.folder)
            return
        for name, line in self.lines.items():
            console.print(f"{name}: {line}", markup=False)
        show_left_out(console, self.left_out)

    def document(self) -> dict[str, Any]:
        """Return the record that calibration.json holds; of a dry run, the combinations."""
        if not self.rows:
            return {"combinations": self.lines, "left_out": self.left_out}
        return {
            "combinations": [{**asdict(row), "error": row.error} for row in self.rows],
            "left_out": self.left_out,
            "median_error": median_error(self.rows),
            "interval": interval(self.rows),
        }


def calibrate(
    overrides: Sequence[str],
    config_dir: Path | None,
    console: Console,
    *,
    run_s: float,
    budget_s: float,
    dry_run: bool,
    quiet: bool,
) -> Calibrated:
    """Run the combinations that are missing, write the errors of their predictions, and return
    them.

    Args: console shows the progress; run_s is the seconds that each run should take; budget_s
    limits all runs together.
    Raises: UsageError if the request cannot be calibrated; AshlError if fewer than two combinations
    ended.
    """
    typed = checked(overrides, config_dir)
    chosen, deadline = combinations_of(typed), Deadline(budget_s)
    base = compose([*typed, *next(iter(chosen.values())).split()], config_dir)
    folder = Path(
        base["run"]["dir"]
        or CALIBRATIONS / hashlib.sha256(config_hash(base).encode()).hexdigest()[:8]
    )
    if base["profile"]:
        read_profile(base["profile"])
    chosen, left_out = within_cores(chosen, typed, config_dir)
    if dry_run:
        return Calibrated(chosen, left_out, folder)
    if len(chosen) < 2:
        name, reason = next(iter(left_out.items()))
        raise UsageError(
            f"fewer than two combinations are left to compare ({name}: {reason}); calibrate on a"
            " host with a core for each rank, or declare a cluster (its workers are throttled)"
        )
    profile = profile_for(base, chosen, typed, config_dir, folder)
    pairs = [*pairs_of(chosen, typed, config_dir, folder, profile, run_s)]
    run_pairs(pairs, console, deadline, quiet=quiet)
    rows = [row for pair in pairs if (row := compared(pair)) is not None]
    if len(rows) < 2:
        raise AshlError(
            f"fewer than two combinations have ended in {budget_s:g} s; give --budget more: the"
            f" same command continues, and {folder} has the logs of what failed"
        )
    found = Calibrated(chosen, left_out, folder, rows, len(pairs), profile)
    jsonl.write_json(folder / FILE, found.document())
    return found


def checked(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the overrides of all runs, with defaults for keys that were not typed.

    Raises: UsageError for several values, for stop.* and for virtual time.
    """
    typed = {key_of(text): text for text in overrides}
    for key, text in typed.items():
        if len(alternatives(text, config_dir)) > 1:
            raise UsageError(
                f"{text} gives several values, and all runs of a calibration have one; give one"
            )
        if key == "stop" or key.startswith("stop."):
            raise UsageError(f"{text}: how long runs are follows from --seconds; drop it")
    if not any(key == "cluster" or key.startswith("cluster.") for key in typed):
        typed = {key_of(text): text for text in REAL_CLUSTER} | typed
    typed = {key_of(text): text for text in DEFAULTS} | typed
    config = compose([*typed.values()], config_dir)
    if is_virtual(config) or not config["runtime"]["_target_"].endswith("LocalRuntime"):
        raise UsageError(
            "a calibration compares virtual time with real processes here; take runtime=local"
        )
    return [*typed.values()]


def combinations_of(typed: Sequence[str]) -> dict[str, str]:
    """Return the combinations that agree with the typed overrides.

    Raises: UsageError if fewer than two do.
    """
    by_key = {key_of(text): text for text in typed}
    found = {
        name: line
        for name, line in COMBINATIONS.items()
        if all(by_key.get(key_of(text), text) == text for text in line.split())
    }
    if len(found) < 2:
        left = f"only {next(iter(found))}" if found else "none"
        raise UsageError(
            f"{left} of the calibrated combinations agrees with {' '.join(typed)}; remove"
            " some overrides"
        )
    return found


def within_cores(
    chosen: dict[str, str], typed: Sequence[str], config_dir: Path | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the combinations for which this host has enough cores, and why the others are left
    out.

    Ranks of a declared cluster are throttled and mostly sleep, so they need no core each.
    """
    found, left_out, cores = dict[str, str](), dict[str, str](), len(os.sched_getaffinity(0))
    for name, line in chosen.items():
        config = compose([*typed, *line.split()], config_dir)
        try:
            ranks = compile_plan(config).num_ranks
        except UsageError as error:
            left_out[name] = str(error)
            continue
        if ranks > cores and not is_paced(config):
            left_out[name] = TOO_MANY.format(ranks=ranks, cores=cores)
        else:
            found[name] = line
    return found, left_out


def is_paced(config: dict[str, Any]) -> bool:
    return isinstance(
        OptionFactory(config["allow_targets"]).of("cluster", config["cluster"]), Cluster
    )


def profile_for(
    base: dict[str, Any],
    chosen: dict[str, str],
    typed: Sequence[str],
    config_dir: Path | None,
    folder: Path,
) -> Path | None:
    """Return the profile of a real cluster, measured unless given; None if the cluster's costs
    are declared.
    """
    if base["profile"]:
        return Path(base["profile"])
    if is_paced(base):
        return None
    path = folder / "profile" / "profile.json"
    if not path.exists():
        names = dict.fromkeys(
            text.partition("=")[2] for line in chosen.values() for text in line.split()[-1:]
        )
        codecs = specs_of("compression", [*names], typed, config_dir)
        measure(
            {**base, "run": {**base["run"], "dir": str(path.parent)}}, [], quiet=True, codecs=codecs
        )
    return path


def pairs_of(
    chosen: dict[str, str],
    typed: Sequence[str],
    config_dir: Path | None,
    folder: Path,
    profile: Path | None,
    run_s: float,
) -> Iterator[Pair]:
    """Yield each combination as a pair of runs that should take about `run_s` seconds each."""
    for name, line in chosen.items():
        texts = [text for text in (*typed, *line.split()) if key_of(text) != "profile"]
        virtual = [
            text for text in texts if profile is None or key_of(text).partition(".")[0] != "cluster"
        ]
        virtual = [text for text in virtual if key_of(text).partition(".")[0] != "runtime"]
        virtual += ["runtime=sim", "runtime.gradients=false"]
        virtual += [] if profile is None else ["cluster=profile", f"profile={profile}"]
        plan = compile_plan(compose(virtual, config_dir))
        rate = plan.stages[0].predicted_steps_per_s or 1.0
        a_round = sum(worker.local_steps for worker in plan.stages[0].workers)
        steps = a_round * max(LEAST_ROUNDS, min(MOST_STEPS, round(rate * run_s)) // a_round)
        yield Pair(
            name,
            real=job(texts, steps, config_dir, folder / "real"),
            virtual=job(virtual, steps, config_dir, folder / "virtual"),
        )


def job(texts: Sequence[str], steps: int, config_dir: Path | None, folder: Path) -> Job:
    overrides = (*texts, f"stop.steps={steps}", "tracking=none")
    config = compose(overrides, config_dir)
    place = folder / config_hash(config)
    return Job(
        place,
        {**config, "run": {**config["run"], "dir": str(place), "save_weights": False}},
        overrides,
    )


def run_pairs(pairs: Sequence[Pair], console: Console, deadline: Deadline, *, quiet: bool) -> None:
    """Run the jobs that have not ended yet, one at a time, until the budget is spent."""
    names = {own.folder: f"{pair.name}, {way}" for pair in pairs for way, own in sides(pair)}
    waiting = [own for pair in pairs for _, own in sides(pair) if read_summary(own.folder) is None]
    progress = SweepProgress(console, len(waiting), quiet=quiet, deadline=deadline)
    try:
        for done in run_all(
            local_pool(1),
            iter(waiting),
            lambda running: progress.show([Running(names[own.folder]) for own in running]),
            unwanted=lambda _: deadline.left_s <= 0,
        ):
            if (summary := read_summary(done.folder)) is not None:
                progress.ended(names[done.folder], summary)
    finally:
        progress.close()


def sides(pair: Pair) -> tuple[tuple[str, Job], tuple[str, Job]]:
    return ("virtual", pair.virtual), ("real", pair.real)


def compared(pair: Pair) -> Compared | None:
    """Return the times of a combination; None unless both runs have finished."""
    real, virtual = (read_summary(own.folder) for own in (pair.real, pair.virtual))
    if any(own is None or own["status"] != "finished" for own in (real, virtual)):
        return None
    assert real is not None
    assert virtual is not None
    return Compared(
        pair.name,
        real["steps"],
        predicted_s=virtual["time_s"] / virtual["steps"] * real["steps"],
        measured_s=real["time_s"],
        predicted_wait_share=virtual["wait_share"],
        measured_wait_share=real["wait_share"],
    )


def median_error(rows: Sequence[Compared]) -> float:
    return median(abs(row.error) for row in rows)


def interval(rows: Sequence[Compared]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median error; equal rows give equal
    intervals.
    """
    errors = [abs(row.error) for row in rows]
    found = stats.bootstrap((errors,), np.median, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def show_left_out(console: Console, left_out: dict[str, str]) -> None:
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", soft_wrap=True, markup=False)


def show(
    console: Console, rows: Sequence[Compared], left_out: dict[str, str], count: int, folder: Path
) -> None:
    """Print predicted and measured times, the errors, and the interval of their median."""
    columns = ("steps", "predicted", "measured", "error", "waiting predicted", "measured")
    table = Table("combination", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        waits = percent(row.predicted_wait_share), percent(row.measured_wait_share)
        times = seconds(row.predicted_s), seconds(row.measured_s)
        table.add_row(row.name, number(row.steps), *times, f"{row.error:+.1%}", *waits)
    console.print(table)
    show_left_out(console, left_out)
    low, high = interval(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    console.print(
        f"Predicted times are off by {percent(median_error(rows))} in the median (95 % interval"
        f" {percent(low)} to {percent(high)} over {len(rows)} combinations), by"
        f" {percent(abs(worst.error))} at worst ({worst.name}).",
        soft_wrap=True,
    )
    if len(rows) < count:
        console.print(f"{count - len(rows)} of {count} are missing: the same command runs them.")
    console.print(f"folder  {folder}", soft_wrap=True, markup=False)

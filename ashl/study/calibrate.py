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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from ashl.config.compose import compose, specs_of
from ashl.config.cores import usable_cores
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
from ashl.tracking.console import number, percent, plain_table, seconds
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


Row = dict[str, Any]  # the predicted and the measured times of a combination, and the error


@dataclass(frozen=True)
class Calibrated:
    """Predicted beside measured times; of a dry run, the combinations that would run.

    `combinations` are their settings by name, and `left_out` why others are not run. `rows` is
    empty in a dry run. `profile` is the file that predicted a real cluster.
    """

    combinations: dict[str, str]
    left_out: dict[str, str]
    folder: Path
    rows: Sequence[Row] = ()
    profile: Path | None = None

    def show(self, console: Console) -> None:
        """Print the errors of the predictions, or the combinations."""
        if self.rows:
            console.print(table_of(self.rows))
        for name, line in () if self.rows else self.combinations.items():
            console.print(f"{name}: {line}", markup=False)
        for name, reason in self.left_out.items():
            console.print(f"left out: {name}: {reason}", soft_wrap=True, markup=False)
        if not self.rows:
            return
        found, worst = self.document(), max(self.rows, key=lambda row: abs(row["error"]))
        low, high = found["interval"]
        console.print(
            f"Predicted times are off by {percent(found['median_error'])} in the median (95 %"
            f" interval {percent(low)} to {percent(high)} over {len(self.rows)} combinations), by"
            f" {percent(abs(worst['error']))} at worst ({worst['name']}).",
            soft_wrap=True,
        )
        if missing := len(self.combinations) - len(self.rows):
            total = len(self.combinations)
            console.print(f"{missing} of {total} have not finished: the same command runs them.")
        console.print(f"folder  {self.folder}", soft_wrap=True, markup=False)

    def document(self) -> dict[str, Any]:
        """Return the record that calibration.json holds; of a dry run, the combinations."""
        document = {"combinations": self.rows or self.combinations, "left_out": self.left_out}
        if self.rows:
            errors = [abs(row["error"]) for row in self.rows]
            document |= {"median_error": median(errors), "interval": interval(errors)}
        return document


def calibrate(
    overrides: Sequence[str],
    config_dir: Path | None,
    console: Console,
    *,
    run_s: float,
    dry_run: bool,
    quiet: bool,
) -> Calibrated:
    """Run the combinations that are missing, write the errors of their predictions, and return
    them.

    Args: console shows the progress; run_s is the seconds that each run should take.
    Raises: UsageError if the request cannot be calibrated; AshlError if fewer than two combinations
    finished.
    """
    typed = checked(overrides, config_dir)
    chosen = combinations_of(typed)
    base = compose([*typed, *next(iter(chosen.values())).split()], config_dir)
    digest = hashlib.sha256(config_hash(base).encode()).hexdigest()[:8]
    folder = Path(base["run"]["dir"] or CALIBRATIONS / digest)
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
    pairs = {
        name: jobs_of((*typed, *line.split()), config_dir, folder, profile, run_s)
        for name, line in chosen.items()
    }
    run_missing(pairs, console, quiet=quiet)
    rows = [row for name, pair in pairs.items() if (row := compared(name, *pair)) is not None]
    if len(rows) < 2:
        raise AshlError(f"fewer than two combinations have finished; {folder} has the logs")
    found = Calibrated(chosen, left_out, folder, rows, profile)
    jsonl.write_json(folder / FILE, found.document())
    return found


def checked(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the overrides of all runs, with defaults for keys that were not typed.

    Raises: UsageError for stop.* and for virtual time.
    """
    typed = {key_of(text): text for text in overrides}
    for key, text in typed.items():
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
    found, left_out, cores = dict[str, str](), dict[str, str](), usable_cores()
    for name, line in chosen.items():
        config = compose([*typed, *line.split()], config_dir)
        try:
            ranks = compile_plan(config).num_ranks
        except UsageError as error:
            left_out[name] = str(error)
            continue
        if ranks > cores and not is_paced(config):
            left_out[name] = (
                f"its {ranks} ranks are more than this host's {cores} cores, so that its times are"
                " not those of a cluster"
            )
        else:
            found[name] = line
    return found, left_out


def is_paced(config: Mapping[str, Any]) -> bool:
    return OptionFactory(config["allow_targets"]).of("cluster", config["cluster"]).paced


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
        names = dict.fromkeys(line.rpartition("compression=")[2] for line in chosen.values())
        codecs = specs_of("compression", [*names], typed, config_dir)
        measure(
            {**base, "run": {**base["run"], "dir": str(path.parent)}}, [], quiet=True, codecs=codecs
        )
    return path


def jobs_of(
    texts: Sequence[str], config_dir: Path | None, folder: Path, profile: Path | None, run_s: float
) -> tuple[Job, Job]:
    """Return a run in virtual time and on processes, which should take about `run_s` seconds."""
    texts = [text for text in texts if key_of(text) != "profile"]
    replaced = {"runtime"} if profile is None else {"runtime", "cluster"}
    virtual = [text for text in texts if key_of(text).partition(".")[0] not in replaced]
    virtual += ["runtime=sim", "runtime.gradients=false"]
    virtual += [] if profile is None else ["cluster=profile", f"profile={profile}"]
    stage = compile_plan(compose(virtual, config_dir)).stages[0]
    a_round = sum(worker.local_steps for worker in stage.workers)
    wanted = min(MOST_STEPS, round((stage.predicted_steps_per_s or 1.0) * run_s))
    limits = (f"stop.steps={a_round * max(LEAST_ROUNDS, wanted // a_round)}", "tracking=none")

    def job(own: Sequence[str], place: Path) -> Job:
        config = compose([*own, *limits], config_dir)
        path = place / config_hash(config)
        run = {**config["run"], "dir": str(path), "save_weights": False}
        return Job(path, {**config, "run": run}, (*own, *limits))

    return job(virtual, folder / "virtual"), job(texts, folder / "real")


def run_missing(pairs: Mapping[str, tuple[Job, Job]], console: Console, *, quiet: bool) -> None:
    """Run the jobs that have not ended yet, one at a time."""
    names = dict[Path, str]()
    for name, (virtual, real) in pairs.items():
        names |= {virtual.folder: f"{name}, virtual", real.folder: f"{name}, real"}
    waiting = [own for pair in pairs.values() for own in pair if read_summary(own.folder) is None]
    progress = SweepProgress(console, len(waiting), quiet=quiet)

    def show(running: Sequence[Job]) -> None:
        progress.show([Running(names[own.folder]) for own in running])

    try:
        for done in run_all(local_pool(1), iter(waiting), show):
            if (summary := read_summary(done.folder)) is not None:
                progress.ended(names[done.folder], summary)
    finally:
        progress.close()


def compared(name: str, virtual: Job, real: Job) -> Row | None:
    """Return the times of a combination; None unless both runs have finished."""
    predicted, measured = (read_summary(own.folder) for own in (virtual, real))
    if predicted is None or measured is None:
        return None
    if predicted["status"] != "finished" or measured["status"] != "finished":
        return None
    predicted_s = predicted["time_s"] / predicted["steps"] * measured["steps"]
    return {
        "name": name,
        "steps": measured["steps"],
        "predicted_s": predicted_s,
        "measured_s": measured["time_s"],
        "predicted_wait_share": predicted["wait_share"],
        "measured_wait_share": measured["wait_share"],
        "error": measured["time_s"] / predicted_s - 1,
    }


def interval(errors: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median error; equal errors give equal
    intervals.
    """
    found = stats.bootstrap((errors,), np.median, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def table_of(rows: Sequence[Row]) -> Table:
    """Return predicted beside measured times, the largest error first."""
    cells = [
        (
            row["name"],
            number(row["steps"]),
            seconds(row["predicted_s"]),
            seconds(row["measured_s"]),
            f"{row['error']:+.1%}",
            percent(row["predicted_wait_share"]),
            percent(row["measured_wait_share"]),
        )
        for row in sorted(rows, key=lambda row: -abs(row["error"]))
    ]
    titles = ("steps", "predicted", "measured", "error", "waiting predicted", "measured")
    return plain_table(("combination", *titles), cells, left=("combination",))

"""Run `ashl calibrate`: compare predicted and measured times of combinations.

Rule: each combination runs on real processes, one run at a time, and in virtual time. Virtual time
uses the declared cluster, or the profile of a real one. That profile is measured first, unless
`profile=FILE` is given. The error of a combination is measured / predicted time − 1. The median of
|error| over the combinations has a 95 % bootstrap interval.

Limits: on a real cluster, a combination with more ranks than this host has cores is left out,
because its ranks would slow each other down. The nodes of a cluster do not. The result is not
stored with the profile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from ashl.config.override import group_of, index_by_key, key_of, path_of
from ashl.errors import AshlError, UsageError
from ashl.plan.files import read_profile
from ashl.planning.instantiate import OptionFactory
from ashl.run.profile import profile_once
from ashl.run.train import is_virtual
from ashl.study.grid import Grid, Line, Setting, make_grid
from ashl.study.jobs import has_ended, local_pool, read_summary
from ashl.study.sweep import run_settings
from ashl.tracking import jsonl
from ashl.tracking.console import number, percent, plain_table, print_unwrapped, seconds
from ashl.tracking.sweep_progress import SweepProgress

CALIBRATIONS = Path("runs/calibrations")
FILE = "calibration.json"
SERVER, RING = "topology=parameter_server", "topology=all_reduce"
COMBINATIONS = {
    "BSP": f"sync=bsp {SERVER} compression=none",
    "BSP Top-K": f"sync=bsp {SERVER} compression=topk",
    "BSP QSGD": f"sync=bsp {SERVER} compression=qsgd",
    "local SGD H=4": f"sync=local_sgd sync.local_steps=4 {SERVER} compression=none",
    "SSP": f"sync=ssp {SERVER} compression=none",
    "ASP": f"sync=asp {SERVER} compression=none",
    "ASP 4": f"sync=asp sync.local_steps=4 {SERVER} compression=none",
    "ASP Top-K": f"sync=asp {SERVER} compression=topk",
    "BSP ring": f"sync=bsp {RING} compression=none",
    "BSP ring Top-K": f"sync=bsp {RING} compression=topk",
    "local SGD H=4 ring": f"sync=local_sgd sync.local_steps=4 {RING} compression=none",
    "D-PSGD": "sync=d_psgd topology=gossip compression=none",
    "Ripples random": "sync=ripples_random topology=partial_all_reduce compression=none",
}
# Defaults for all runs; evaluations are disabled.
DEFAULTS = ("schedule=single", "optimizer.lr=0.01", "eval.every_commits=1000000000")
REAL_CLUSTER = ("cluster=real", "cluster.num_workers=2")
LEAST_ROUNDS = 12  # rounds of every worker in one run

Row = dict[str, Any]  # the predicted and the measured times of a combination, and the error


@dataclass(frozen=True)
class Calibrated:
    """Predicted beside measured times; of a dry run, the combinations that would run.

    `combinations` are their settings by name, and `left_out` why others are not run. `rows` has
    the largest error first, and is empty in a dry run. `profile` is the file that predicted a real
    cluster.
    """

    combinations: dict[str, str]
    left_out: dict[str, str]
    folder: Path
    rows: Sequence[Row] = ()
    profile: Path | None = None

    def show(self, console: Console) -> None:
        """Print the errors of the predictions, or the combinations."""
        left_out = [f"left out: {name}: {reason}" for name, reason in self.left_out.items()]
        print_unwrapped(console, *left_out)
        if not self.rows:
            print_unwrapped(
                console, *(f"{name}: {line}" for name, line in self.combinations.items())
            )
            return
        console.print(table_of(self.rows))
        found, worst = self.document(), self.rows[0]
        low, high = found["interval"]
        print_unwrapped(
            console,
            f"Predicted times are off by {percent(found['median_error'])} in the median (95 %"
            f" interval {percent(low)} to {percent(high)} over {len(self.rows)} of"
            f" {len(self.combinations)} combinations), by {percent(abs(worst['error']))} at worst"
            f" ({worst['name']}).",
            f"folder  {self.folder}",
        )

    def document(self) -> dict[str, Any]:
        """Return the record that calibration.json holds; of a dry run, the combinations."""
        document = {"combinations": self.rows or self.combinations, "left_out": self.left_out}
        if self.rows:
            errors = [abs(row["error"]) for row in self.rows]
            document |= {"median_error": median(errors), "interval": bootstrap_interval(errors)}
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
    typed, base = complete_overrides(overrides, config_dir)
    folder = path_of(str(base["run"]["dir"] or CALIBRATIONS / config_hash(base)))
    if base["profile"]:
        read_profile(base["profile"])
    lines = lines_of(typed)
    left_out = lines_left_out(lines, config_dir) if lines else {}
    lines = {name: line for name, line in lines.items() if name not in left_out}
    chosen = {name: COMBINATIONS[name] for name in lines}
    if dry_run:
        return Calibrated(chosen, left_out, folder)
    if len(chosen) < 2:
        why = next((f" ({name}: {reason})" for name, reason in left_out.items()), "")
        raise UsageError(
            f"fewer than two combinations are left to compare{why}; remove some overrides,"
            " calibrate on a host with a core for each rank, or declare a cluster (its workers are"
            " throttled)"
        )
    profile = profile_for(lines, config_dir, folder)
    pairs = pairs_of(lines, config_dir, profile, run_s)
    missing = [own for pair in pairs.values() for own in pair if not has_ended(folder / own.hash)]
    progress = SweepProgress(console, len(missing), quiet=quiet)
    for _ in run_settings(folder, missing, local_pool(1), progress):
        pass
    rows = [row for name, pair in pairs.items() if (row := compare_runs(name, folder, *pair))]
    rows.sort(key=lambda row: -abs(row["error"]))
    if len(rows) < 2:
        raise AshlError(f"fewer than two combinations have finished; {folder} has the logs")
    found = Calibrated(chosen, left_out, folder, rows, profile)
    jsonl.write_json(folder / FILE, found.document())
    return found


def complete_overrides(
    overrides: Sequence[str], config_dir: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides of all runs, with defaults for keys that were not typed, and their
    configuration.

    Raises: UsageError for stop.* and for virtual time.
    """
    for text in overrides:
        if group_of(text) == "stop":
            raise UsageError(f"{text}: how long runs are follows from --seconds; drop it")
    cluster = () if "cluster" in map(group_of, overrides) else REAL_CLUSTER
    typed = [*index_by_key((*DEFAULTS, *cluster, *overrides)).values()]
    config = compose(typed, config_dir)
    if is_virtual(config) or not config["runtime"]["_target_"].endswith("LocalRuntime"):
        raise UsageError(
            "a calibration compares virtual time with real processes here; take runtime=local"
        )
    return typed, config


def lines_of(typed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each combination that agrees with the typed ones."""
    chosen = index_by_key(typed)
    return {
        name: (*(text for text in typed if text not in line.split()), *line.split())
        for name, line in COMBINATIONS.items()
        if all(chosen.get(key_of(text), text) == text for text in line.split())
    }


def lines_left_out(lines: Mapping[str, Sequence[str]], config_dir: Path | None) -> dict[str, str]:
    """Return which combinations cannot run, or have more ranks than this host has cores, and why.

    Ranks of a declared cluster are throttled and mostly sleep, so they need no core each.
    """
    grid, cores = grid_of(lines, config_dir, strict=False), usable_cores()
    names = {tuple(line): name for name, line in lines.items()}
    found = {names[skipped.overrides]: skipped.reason for skipped in grid.skipped}
    for setting in grid.settings:
        ranks = 0 if setting.plan is None or is_paced(setting.config) else setting.plan.num_ranks
        if ranks > cores:
            found[setting.label] = (
                f"its {ranks} ranks are more than this host's {cores} cores, so that its times are"
                " not those of a cluster"
            )
    return found


def grid_of(
    lines: Mapping[str, Sequence[str]], config_dir: Path | None, *, strict: bool = True
) -> Grid:
    """Return the grid that has each combination as a line."""
    found = [Line([[text] for text in line], name) for name, line in lines.items()]
    return make_grid(found, config_dir, strict=strict)


def is_paced(config: Mapping[str, Any]) -> bool:
    return OptionFactory(config["allow_targets"]).get_option("cluster", config["cluster"]).paced


def profile_for(
    lines: Mapping[str, Sequence[str]], config_dir: Path | None, folder: Path
) -> Path | None:
    """Return the profile of a real cluster, measured unless given; None if the cluster's costs
    are declared.
    """
    first, *_ = lines.values()
    base = compose(first, config_dir)
    if base["profile"]:
        return Path(base["profile"])
    if is_paced(base):
        return None
    names = dict.fromkeys(line[-1].removeprefix("compression=") for line in lines.values())
    codecs = specs_of("compression", [*names], first, config_dir)
    return profile_once(base, [], folder / "profile", codecs)


def pairs_of(
    lines: Mapping[str, Sequence[str]], config_dir: Path | None, profile: Path | None, run_s: float
) -> dict[str, list[Setting]]:
    """Return each combination's run in virtual time and on processes, of about `run_s` seconds."""
    replaced = ("runtime", "profile") if profile is None else ("runtime", "profile", "cluster")
    sim = ["runtime=sim", "runtime.gradients=false"]
    sim += [] if profile is None else ["cluster=profile", f"profile={profile}"]
    virtual, real = dict[str, list[str]](), dict[str, list[str]]()
    for name, line in lines.items():
        kept = [text for text in line if group_of(text) not in replaced]
        virtual[name], real[name] = [*kept, *sim], [t for t in line if key_of(t) != "profile"]
    for setting in grid_of(virtual, config_dir).settings:
        assert setting.plan is not None
        stage = setting.plan.stages[0]
        a_round = sum(worker.local_steps for worker in stage.workers)
        wanted = round((stage.predicted_steps_per_s or 1.0) * run_s)
        limit = f"stop.steps={a_round * max(LEAST_ROUNDS, wanted // a_round)}"
        virtual[setting.label].append(limit)
        real[setting.label].append(limit)
    pairs = dict[str, list[Setting]]()
    for kind, texts in (("virtual", virtual), ("real", real)):
        for setting in grid_of(texts, config_dir).settings:
            shown = replace(setting, label=f"{setting.label}, {kind}", axes={})
            pairs.setdefault(setting.label, []).append(shown)
    return pairs


def compare_runs(name: str, folder: Path, virtual: Setting, real: Setting) -> Row | None:
    """Return the times of a combination; None unless both runs have finished."""
    predicted, measured = (read_summary(folder / own.hash) or {} for own in (virtual, real))
    if {predicted.get("status"), measured.get("status")} != {"finished"}:
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


def bootstrap_interval(errors: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median error; equal errors give equal
    intervals.
    """
    found = stats.bootstrap((errors,), np.median, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def table_of(rows: Sequence[Row]) -> Table:
    """Return predicted beside measured times."""
    titles = ("combination", "steps", "predicted", "measured", "error")
    titles += ("waiting predicted", "waiting measured")
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
        for row in rows
    ]
    return plain_table(titles, cells, left=("combination",))

"""Write the summary of a killed run from its other records."""

import math
from pathlib import Path
from typing import Any

from ashl.plan.plan import TARGETS
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS, SUMMARY

PLAN = "plan.json"
REASON = "its process was killed; what is here is from its records"
SCORES = {"train_loss": "train/loss", "test_loss": "test/loss", "test_accuracy": "test/acc"}


def close_killed(run_dir: Path) -> bool:
    """Write the summary of a killed run; return True if it was missing and could be written.

    A run in progress holds a lock on its records and is not touched.
    """
    if (run_dir / SUMMARY).exists() or not (run_dir / METRICS).exists():
        return False
    try:
        with jsonl.hold_lock(run_dir / METRICS):
            rows, plan = list(jsonl.read(run_dir / METRICS)), jsonl.read_json(run_dir / PLAN)
            if plan is None:
                return False
            jsonl.write_json(run_dir / SUMMARY, summary_of(plan, rows))
    # A run in progress, a read-only folder, or damaged records.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def summary_of(plan: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a summary with the values of the last evaluation."""
    last: dict[str, Any] = rows[-1] if rows else {}
    virtual = str(plan["runtime"]["_target_"]).endswith("SimRuntime")
    time_s, steps = last.get("time_s", 0.0), last.get("step", 0)
    whole = [row for row in rows if is_finite(row.get("test/loss"))]
    best = max(whole, key=lambda row: (row.get("test/acc") or 0.0, -row["test/loss"]), default=None)
    return {
        "schema": 1,
        "name": plan["name"],
        "runtime": "sim" if virtual else "local",
        "seed": plan["seed"],
        "status": "interrupted",
        "exit_reason": REASON,
        "time_s": time_s,
        "host_s": last.get("host_s", 0.0),
        "time_kind": "virtual" if virtual else "wall",
        "num_workers": plan["num_workers"],
        "steps": steps,
        "commits": last.get("commits", 0),
        "samples": last.get("samples", 0),
        "steps_per_s": steps / time_s if time_s else None,
        "samples_per_s": last.get("perf/samples_per_s"),
        "bytes_up": last.get("bytes_up", 0),
        "bytes_down": last.get("bytes_down", 0),
        "wait_share": last.get("perf/wait_share"),
        "workers": [],
        "stages": [],
        "final": {name: last.get(key) for name, key in SCORES.items()},
        "best": best
        and {**{name: best.get(key) for name, key in SCORES.items()}, "time_s": best["time_s"]},
        **{target: plan["limits"].get(target) for target in TARGETS},
        "time_to_target_s": None,
        "params_sha256": None,
    }


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

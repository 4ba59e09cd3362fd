"""Run folders and sweep folders without a run: what the tests and the benchmark of `ashl compare`
read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from ashl.runtime.time_accounting import KINDS
from ashl.tracking.mlflow import client_of, set_environment


def adds_up(summary: Mapping[str, Any]) -> bool:
    """Return True if the time classes of each worker add up to the time of the run."""
    return all(
        sum(worker[f"{kind}_s"] for kind in KINDS) == pytest.approx(summary["time_s"], abs=1e-6)
        for worker in summary["workers"]
    )


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    reach_s: float | None = 1.0,
    target: float | None = 0.9,
    end_s: float = 2.0,
    every_s: float = 0.1,
    choices: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
    rounds: int = 20,
    workers: int = 2,
    **summary: Any,
) -> Path:
    """Write a run whose accuracy reaches the target at `reach_s`, where it ends (None: never; it
    ends at `end_s`).

    The accuracy is 1 - 0.1^(t / reach_s), so 0.9 at `reach_s`. `values` are dotted keys of
    config.yaml.
    """
    folder.mkdir(parents=True)
    last_s = end_s if reach_s is None or target is None else reach_s
    config: dict[str, Any] = {
        "choices": {"sync": "bsp", "schedule": "single", **(choices or {})},
        "seed": seed,
        "stop": {"target_accuracy": target, "target_consecutive_evals": 1},
        "sync": {"_target_": "ashl.sync.bsp.BSP"},
        "run": {"dir": str(folder)},
    }
    for key, value in (values or {}).items():
        group, _, rest = key.partition(".")
        config.setdefault(group, {})[rest] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([f"seed={seed}"]))
    count = max(1, round(last_s / every_s))
    times = [last_s * (k + 1) / count for k in range(count)]
    scale_s = reach_s or 4 * end_s
    rows = [metric(time_s, 1 - 0.1 ** (time_s / scale_s), workers) for time_s in times]
    lines(folder / "metrics.jsonl", rows)
    lines(
        folder / "events.jsonl", [event(rank, k) for k in range(rounds) for rank in range(workers)]
    )
    done = {
        "schema": 1,
        "name": "a run",
        "runtime": "sim",
        "seed": seed,
        "status": "finished",
        "exit_reason": "target_accuracy" if reach_s else "epochs",
        "time_s": last_s,
        "host_s": 0.1,
        "time_kind": "virtual",
        "num_workers": workers,
        "steps": 100,
        "steps_per_s": 100 / last_s,
        "samples_per_s": 3200 / last_s,
        "bytes_up": 4_000_000,
        "bytes_down": 2_000_000,
        "workers": [{"rank": rank, **shares(rank, last_s)} for rank in range(workers)],
        "wait_share": 0.25,
        "final": {"train_loss": 0.3, "test_loss": 0.4, "test_accuracy": rows[-1]["test/acc"]},
        "best": {
            "train_loss": 0.3,
            "test_loss": 0.4,
            "test_accuracy": rows[-1]["test/acc"],
            "time_s": last_s,
        },
        "target_accuracy": target,
        "target_loss": None,
        "time_to_target_s": reach_s if target is not None else None,
        "stages": [],
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(done))
    return folder


def metric(time_s: float, accuracy: float, workers: int) -> dict:
    sent = round(2e6 * time_s)
    waits = {f"wait/w{rank}": 0.1 * rank for rank in range(workers)}
    scores = {
        "test/acc": accuracy,
        "test/loss": -math.log(accuracy),
        "train/loss": -math.log(accuracy),
    }
    return {
        "time_s": time_s,
        "step": round(100 * time_s),
        "bytes_up": sent,
        "bytes_down": sent // 2,
        **scores,
        **waits,
    }


def event(rank: int, number: int) -> dict:
    start_s = 0.1 * number
    spans = [["compute", start_s, start_s + 0.05], ["push", start_s + 0.05, start_s + 0.06]]
    spans.append(["wait", start_s + 0.06, start_s + 0.1])
    known = {
        "kind": "round",
        "rank": rank,
        "round": number,
        "steps": 1,
        "staleness": number % 3,
        "dropped": False,
    }
    return {**known, "start_s": start_s, "end_s": start_s + 0.1, "spans": spans}


def shares(rank: int, time_s: float) -> dict:
    parts = (0.5 + 0.1 * (rank % 3), 0.05, 0.1, 0.1, 0.25 - 0.1 * (rank % 3), 0.0)
    return {f"{kind}_s": part * time_s for kind, part in zip(KINDS, parts, strict=True)} | {
        "steps": 50
    }


def lines(file: Path, records: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_sweep(
    folder: Path,
    settings: Sequence[tuple[dict[str, str], float | None]],
    run: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A sweep with one run for each (axes, time to target); the axes include the seed.

    `run` goes to `write_run`, `more` into sweep.json.
    """
    rows, axes = [], {}
    for index, (values, reach_s) in enumerate(settings):
        digest = f"{index:08x}"
        choices = {key: value for key, value in values.items() if "." not in key and key != "seed"}
        dotted = {key: yaml.safe_load(value) for key, value in values.items() if "." in key}
        own = {
            "seed": int(values.get("seed", 0)),
            "reach_s": reach_s,
            "choices": choices,
            "values": dotted,
        }
        write_run(folder / digest, **own, **(run or {}))
        overrides = [f"{key}={value}" for key, value in values.items()]
        rows.append(
            {
                "hash": digest,
                "folder": digest,
                "overrides": overrides,
                "axes": values,
                "predicted_s": None,
            }
        )
        for key, value in values.items():
            axes[key] = [*axes.get(key, []), *([] if value in axes.get(key, []) else [value])]
    typed = [f"{key}={','.join(values)}" for key, values in axes.items()]
    study = {
        "schema": 1,
        "name": "study",
        "overrides": typed,
        "command": " ".join(["ashl sweep", *typed]),
        "axes": axes,
        "settings": rows,
        "skipped": [],
        **more,
    }
    (folder / "sweep.json").write_text(json.dumps(study))
    return folder


@cache
def empty_database() -> bytes:
    """Return MLflow's database without runs; its schema takes seconds to make."""
    with TemporaryDirectory() as folder:
        set_environment(Path(folder))
        client_of(Path(folder))
        return (Path(folder) / "mlflow.db").read_bytes()

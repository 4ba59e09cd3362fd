"""Records of failed workers."""

import gzip
import json
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.run_folders import adds_up

RUN = "runtime=sim tracking=none cluster=homogeneous sync=bsp stop.steps=60 runtime.gradients=false"
LOST = (
    "cluster.events=[{time_s: 0.1, worker: 2, fail: true}, {time_s: 0.2, worker: 2, rejoin: true}, "
)
LOST += "{time_s: 0.3, worker: 1, fail: true}, {time_s: 1000, worker: 0, fail: true}]"


def test_a_run_with_failed_workers_ends_well_and_names_them(workplace, capsys) -> None:
    assert main(["train", *RUN.split(), "run.dir=run", LOST]) == 0
    output = capsys.readouterr().out
    assert (
        "worker 2 at 0.1 s (declared), rejoined at 0.2 s; worker 1 at 0.3 s (declared)"
        in " ".join(output.split())
    )
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["failed_workers"] == [
        {"worker": 2, "time_s": 0.1, "reason": "declared", "rejoined_s": 0.2},
        {"worker": 1, "time_s": 0.3, "reason": "declared", "rejoined_s": None},
    ]
    time_s, workers = summary["time_s"], summary["workers"]
    assert [worker["down_s"] for worker in workers] == pytest.approx([0, time_s - 0.3, 0.1, 0])
    assert adds_up(summary)
    planned = json.loads(Path("run/plan.json").read_text())["stages"][0]["predicted_steps_per_s"]
    assert summary["goodput"] == pytest.approx(summary["steps_per_s"] / planned)
    assert 0.5 < summary["goodput"] < 0.95
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [
        (e["kind"], e["rank"]) for e in events if e["kind"] in ("worker_failed", "worker_rejoined")
    ] == [
        ("worker_failed", 2),
        ("worker_rejoined", 2),
        ("worker_failed", 1),
    ]
    trace = json.loads(gzip.decompress(Path("run/trace.json.gz").read_bytes()))["traceEvents"]
    down = [(e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in trace if e["name"] == "down"]
    assert down == [(2, 0.1, pytest.approx(0.1)), (1, 0.3, pytest.approx(time_s - 0.3))]

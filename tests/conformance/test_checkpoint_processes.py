"""Real runs in lockstep that go on from a checkpoint: bit for bit the run that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.support import simulated

BASE = "cluster.compute=[1,2] cluster.link=null cluster.step_s=0.008 cluster.exchange_s=0.002 tracking.events=all"
LINE = [*BASE.split(), "eval.every_commits=100", "stop.steps=400"]
RUNS = {
    "by a server, Top-K and momentum": "sync=bsp compression=topk compression.ratio=0.2",
    "all-reduce in parts": "topology=all_reduce sync=bsp overlap=merged",
    "under the next forward pass": "topology=all_reduce sync=bsp overlap=dear overlap.plan=layers",
    "local steps, momentum outside": "sync=local_sgd sync.local_steps=2 outer=nesterov",
    "QSGD, all-reduce": "topology=all_reduce sync=bsp compression=qsgd optimizer=adam optimizer.lr=0.001",
}
FIRST = next(iter(RUNS))


def checked(run: Path, expected: str) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["params_sha256"]) == ("finished", 400, expected)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rounds = [(event["rank"], event["round"]) for event in events if event["kind"] == "round"]
    assert len(rounds) == len(set(rounds)) == max(k for _, k in rounds) * 2 + 2
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(steps[0], 401, steps[0]), 400]  # each evaluation once, and the end
    assert steps[0] in (100, 200)  # every hundred commits, of one step or two
    for worker in summary["workers"]:
        spent = sum(worker[f"{kind}_s"] for kind in ("compute", "compress", "push", "pull", "wait", "down"))
        assert spent == pytest.approx(summary["time_s"], abs=1e-6)


def test_a_run_goes_on_where_it_was(workplace: Path) -> None:
    line = [*LINE, *RUNS[FIRST].split()]
    own = ["runtime=local", "tracking=none", "run.dir=run", "-q"]
    assert main(["train", *line, *own, "run.checkpoint_s=0.6", "stop.steps=300"]) == 0
    assert main(["train", "--resume", "run", "-q", "stop.steps=400"]) == 0
    checked(workplace / "run", simulated(*line).sha256)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed(name: str, workplace: Path) -> None:
    line = [*LINE, *RUNS[name].split()]
    command = ["train", *line, "runtime=local", "tracking=none", "run.dir=run", "-q", "run.checkpoint_s=0.6"]
    with subprocess.Popen([sys.executable, "-m", "ashl.cli", *command], start_new_session=True) as process:
        until = time.monotonic() + 60
        while len([*Path("run").glob("checkpoint/*/manifest.json")]) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert not Path("run/summary.json").exists()
    assert main(["train", "--resume", "run", "-q"]) == 0
    checked(workplace / "run", simulated(*line).sha256)

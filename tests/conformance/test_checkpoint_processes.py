"""Real runs in lockstep that go on from a checkpoint, also in virtual time and back: bit for bit the run that was
never stopped."""

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
    "a model that comes back in parts": "sync=bsp overlap=tictac cluster.exchange_s=null "
    "cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005",
    "local steps, momentum outside": "sync=local_sgd sync.local_steps=2 outer=nesterov",
    "a ring": "topology=gossip sync=d_psgd topology.graph=ring optimizer.momentum=0.9",
    "CHOCO": "topology=gossip sync=choco compression=topk compression.ratio=0.2",
    "QSGD, all-reduce": "topology=all_reduce sync=bsp compression=qsgd optimizer=adam optimizer.lr=0.001",
}
OWN_PACE = {
    "a bound and Top-K": "sync=ssp compression=topk compression.ratio=0.2",
    "nobody waits, QSGD": "sync=asp compression=qsgd optimizer.lr=0.02",
    "averages in groups": "topology=partial_all_reduce sync=ripples_random sync.group_size=2",
    "stages, the first of which measures": "schedule=ashl",
}
FIRST = next(iter(RUNS))
REPLICAS = ("a ring", "CHOCO")  # each worker has a model of its own: these go on where they began


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FIRST)) for name in RUNS if name not in REPLICAS]
)
def test_a_run_goes_on_in_virtual_time_on_processes_and_back(name: str, workplace: Path) -> None:
    line = [*LINE, *RUNS[name].split()]
    own = ["runtime=sim", "tracking=none", "run.dir=run", "-q"]
    assert main(["train", *line, *own, "run.checkpoint_s=0.6", "stop.steps=120"]) == 0
    assert main(["train", "--resume", "run", "-q", "runtime=local", "stop.steps=300"]) == 0
    assert (workplace / "run/rank0.log").exists()
    assert main(["train", "--resume", "run", "-q", "runtime=sim", "stop.steps=400"]) == 0
    checked(workplace / "run", simulated(*line).sha256)


def killed(line: list[str]) -> None:
    """A run that is killed as a whole once it has two checkpoints."""
    command = ["train", *line, "runtime=local", "tracking=none", "run.dir=run", "-q", "run.checkpoint_s=0.6"]
    with subprocess.Popen([sys.executable, "-m", "ashl.cli", *command], start_new_session=True) as process:
        until = time.monotonic() + 60
        while len([*Path("run").glob("checkpoint/*/manifest.json")]) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert not Path("run/summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed(name: str, workplace: Path) -> None:
    line = [*LINE, *RUNS[name].split()]
    killed(line)
    assert main(["train", "--resume", "run", "-q"]) == 0
    checked(workplace / "run", simulated(*line).sha256)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PACE)
def test_workers_that_go_at_their_own_pace_come_anew(name: str, workplace: Path) -> None:
    killed([*LINE, *OWN_PACE[name].split(), "stop.steps=1200"])
    newest = max(Path("run/checkpoint").glob("*/manifest.json"), key=lambda path: int(path.parent.name))
    manifest = json.loads(newest.read_text())
    assert manifest["how"] == ("each" if "groups" in name else "server")
    assert main(["train", "--resume", "run", "-q"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["final"]["test_accuracy"] > 0.8
    assert 1200 <= summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) < 1300
    assert summary["commits"] > manifest["version"]
    assert summary["time_s"] > manifest["time_ns"] / 1e9
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    rounds = [(event["rank"], event["round"]) for event in events if event["kind"] == "round"]
    assert len(rounds) == len(set(rounds))
    for worker in summary["workers"]:
        spent = sum(worker[f"{kind}_s"] for kind in ("compute", "compress", "push", "pull", "wait", "down"))
        assert spent == pytest.approx(summary["time_s"], abs=1e-6)

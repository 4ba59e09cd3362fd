"""Real runs in lockstep resume from a checkpoint with the bits of an uninterrupted run, on both
kernels.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.run_folders import adds_up
from tests.support import simulated, slow_unless

BASE = (
    "cluster.compute=[1,2] cluster.link=null cluster.step_s=0.008 cluster.exchange_s=0.002"
    " tracking.events=all"
)
LINE = [*BASE.split(), "eval.every_commits=100", "stop.steps=400"]
RUNS = {  # every row of the golden set resumes in virtual time
    "by a server, Top-K and momentum": "sync=bsp compression=topk compression.ratio=0.2",
    "under the next forward pass": "topology=all_reduce sync=bsp overlap=dear overlap.plan=layers",
    "a model that comes back in parts": (
        "sync=bsp overlap=tictac cluster.exchange_s=null "
        "cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005"
    ),
    "CHOCO": "topology=gossip sync=choco compression=topk compression.ratio=0.2",
    "push-sum, two rounds late": (
        "topology=gossip sync=sgp sync.overlap=2 topology.graph=ring optimizer.momentum=0.9"
    ),
    "pieces on two servers": (
        "topology=sharded_server topology.servers=2 sync=bsp compression=topk compression.ratio=0.2"
        " cluster.exchange_s=null cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005"
    ),
    "one exchange late, all-reduce": (
        "topology=all_reduce sync=bsp overlap=delayed optimizer.momentum=0.9"
    ),
    "fragments beside steps": (
        "topology=all_reduce sync=local_sgd sync.local_steps=2 overlap=streaming overlap.delay=1 "
        "outer=nesterov compression=topk compression.ratio=0.2"
    ),
}
OWN_PACE = {
    "a bound and Top-K": "sync=ssp compression=topk compression.ratio=0.2",
    "averages in groups": "topology=partial_all_reduce sync=ripples_random sync.group_size=2",
    "stages, the first of which measures": "schedule=ashl",
    "a bound, pieces on two servers": (
        "topology=sharded_server topology.servers=2 sync=ssp compression=topk compression.ratio=0.2"
        " cluster.exchange_s=null cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005"
    ),
    "local steps, one exchange late": "sync=async_local_sgd sync.local_steps=2 overlap=delayed",
    "a table of gradients": "sync=ringleader compression=topk compression.ratio=0.2",
    "pairs": "topology=gossip sync=ad_psgd topology.graph=ring",
    "duals, some late": (
        "topology=gossip sync=d_admm topology.graph=ring sync.delay=2 sync.barrier=1 sync.rho=0.02 "
        "optimizer.lr=0.02 optimizer.momentum=0"
    ),
}
FIRST = next(iter(RUNS))
# nobody has the whole model there: these go on where they began


def checked(run: Path, expected: str, count: int = 400) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["params_sha256"]) == (
        "finished",
        count,
        expected,
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rounds = [(event["rank"], event["round"]) for event in events if event["kind"] == "round"]
    assert len(rounds) == len(set(rounds)) == max(k for _, k in rounds) * 2 + 2
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [
        *range(steps[0], count + 1, steps[0]),
        count,
    ]  # each evaluation once, and the end
    assert steps[0] in (100, 200)  # every hundred commits, of one step or two
    assert adds_up(summary)


def killed(line: list[str], every_s: float = 0.1, checkpoints: int = 2) -> None:
    """Kill all processes of a run once it has so many checkpoints."""
    own = ("runtime=local", "tracking=none", "run.dir=run", f"run.checkpoint_s={every_s}")
    killed_once(
        [*line, *own],
        lambda: len([*Path("run").glob("checkpoint/*/manifest.json")]) >= checkpoints,
    )


def killed_once(command: list[str], reached: Callable[[], bool]) -> None:
    argv = [sys.executable, "-m", "ashl.cli", "train", *command, "-q"]
    with subprocess.Popen(argv, start_new_session=True) as process:
        until = time.monotonic() + 60
        while not reached() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert not Path("run/summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [RUNS[FIRST], OWN_PACE["pairs"]])
def test_a_run_that_was_killed_again_before_its_next_checkpoint(mode: str, workplace: Path) -> None:
    """Its records had been taken back to the checkpoint by then, and are again.

    The next checkpoint is so far away that none is taken before the kills.
    """
    killed([*LINE, *mode.split(), "stop.steps=1200"], every_s=2, checkpoints=1)
    newest = max(
        Path("run/checkpoint").glob("*/manifest.json"), key=lambda path: int(path.parent.name)
    )
    for _ in range(2):
        killed_once(["--resume", "run"], new_rounds(Path("run/events.jsonl")))
        assert newest == max(
            Path("run/checkpoint").glob("*/manifest.json"), key=lambda path: int(path.parent.name)
        )
    assert main(["train", "--resume", "run", "-q"]) == 0
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    rounds = [(event["rank"], event["round"]) for event in events if event["kind"] == "round"]
    assert len(rounds) == len(set(rounds))
    assert json.loads(Path("run/summary.json").read_text())["steps"] >= 1200


def new_rounds(path: Path) -> Callable[[], bool]:
    """Return True if a resumed run has taken these records back and then added new ones."""
    sizes = [path.stat().st_size]

    def reached() -> bool:
        sizes.append(path.stat().st_size)
        return sizes[-1] > min(sizes)

    return reached


@pytest.mark.parametrize("name", slow_unless([FIRST], RUNS))
def test_a_run_that_was_killed(name: str, workplace: Path) -> None:
    line = [*LINE, *RUNS[name].split()]
    killed(line)
    assert main(["train", "--resume", "run", "-q"]) == 0
    checked(workplace / "run", simulated(*line).sha256)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PACE)
def test_asynchronous_workers_rejoin(name: str, workplace: Path) -> None:
    killed([*LINE, *OWN_PACE[name].split(), "stop.steps=1200"])
    newest = max(
        Path("run/checkpoint").glob("*/manifest.json"), key=lambda path: int(path.parent.name)
    )
    manifest = json.loads(newest.read_text())
    assert main(["train", "--resume", "run", "-q"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["final"]["test_accuracy"] > 0.8
    assert 1200 <= summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) < 1300
    assert summary["time_s"] > manifest["time_ns"] / 1e9
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    for rank, worker in enumerate(summary["workers"]):
        rounds = [event for event in events if event["kind"] == "round" and event["rank"] == rank]
        assert [event["round"] for event in rounds] == [*range(len(rounds))]
        assert sum(event["steps"] for event in rounds if not event["dropped"]) == worker["steps"]
    assert adds_up(summary)

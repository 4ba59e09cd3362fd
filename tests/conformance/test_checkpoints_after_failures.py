"""A run on processes takes checkpoints after a worker has failed, and is resumed from them: the
worker without a part rejoins.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ashl.cli.app import main
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.tracking import jsonl
from tests.disturbed import ranks_of
from tests.run_folders import adds_up

STEPS = 1000
LINE = [
    "cluster.compute=[1,1.5,2]",
    "cluster.link=null",
    "cluster.step_s=0.008",
    "cluster.exchange_s=0.002",
    "tracking.events=all",
    "tracking=none",
    "eval.every_commits=300",
    "run.dir=run",
    "run.checkpoint_s=0.3",
]
PIECES = (
    "topology=sharded_server topology.servers=2 cluster.exchange_s=null"
    " cluster.bandwidth_mbit_s=200 cluster.latency_s=0.0005"
)
MODES = {
    "all-reduce": "topology=all_reduce sync=bsp optimizer.momentum=0.9",
    "all-reduce, one exchange late": "topology=all_reduce sync=bsp overlap=delayed",
    "all-reduce by fragments": (
        "topology=all_reduce sync=local_sgd sync.local_steps=2 overlap=streaming outer=nesterov"
    ),
    "server, a barrier": "sync=bsp compression=topk compression.ratio=0.2",
    "server, a bound": "sync=ssp",
    "server, no bound, exchanges late": "sync=asp overlap=delayed optimizer.lr=0.02",
    "server, state by worker": "sync=ringleader",
    "regions": "topology=halos topology.regions=[0,0,1] topology.updates=4 sync=asp optimizer.lr=0.02",
    "two servers": f"sync=ssp compression=topk compression.ratio=0.2 {PIECES}",
    "ring in rounds": "topology=gossip sync=d_psgd topology.graph=ring",
    "push-sum, two rounds late": "topology=gossip sync=sgp sync.overlap=2 topology.graph=ring",
    "pairs": "topology=gossip sync=ad_psgd topology.graph=ring",
    "groups": "topology=partial_all_reduce sync=ripples_random sync.group_size=2",
    "stages": "schedule=ashl",
}


def manifest() -> dict:
    """Return the manifest of the newest checkpoint."""
    number = list_checkpoints(Path("run"))[-1]
    return json.loads(Path(f"run/checkpoint/{number}/manifest.json").read_text())


def has_checkpoint(absent: tuple[int, ...] = ()) -> bool:
    """Return True if the newest checkpoint has parts of all ranks except these."""
    if not list_checkpoints(Path("run")):
        return False
    return manifest()["absent"] == [*absent]


def started(*command: str, **options: Any) -> subprocess.Popen:
    argv = [sys.executable, "-m", "ashl.cli", "train", *command, "-q"]
    return subprocess.Popen(argv, start_new_session=True, **options)


def wait_for(process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, f"the run ended with {process.returncode}"
        assert time.monotonic() < until
        time.sleep(0.02)


def kill_everything(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while ranks_of(Path("run")):
        time.sleep(0.02)
    assert not Path("run/summary.json").exists()


def check_resumed() -> dict:
    """Resume the run and check its records; return its summary."""
    saved = manifest()
    assert main(["train", "--resume", "run", "-q"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == sum(one["steps"] for one in summary["workers"]) >= STEPS
    late = [
        (event["rank"], event["round"])
        for event in jsonl.read(Path("run/events.jsonl"))
        if event["kind"] == "round" and event["end_s"] > saved["time_ns"] / 1e9
    ]
    assert len(late) == len(set(late))
    assert {rank for rank, _ in late} == {0, 1, 2}
    assert adds_up(summary)
    assert ranks_of(Path("run")) == {}
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_run_resumes_after_a_failure(name: str, workplace: Path) -> None:
    process = started(*LINE, *MODES[name].split(), f"stop.steps={STEPS}", "runtime=local")
    wait_for(process, has_checkpoint)
    os.kill(ranks_of(Path("run"))[1], signal.SIGKILL)
    wait_for(process, lambda: has_checkpoint(absent=(1,)))
    kill_everything(process)
    rejoined_s = manifest()["time_ns"] / 1e9
    (failure,) = check_resumed()["failed_workers"]
    assert (failure["worker"], failure["rejoined_s"]) == (1, pytest.approx(rejoined_s))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all-reduce", "server, a bound"])
def test_a_run_resumes_after_a_rejoin(name: str, workplace: Path) -> None:
    """The lead rank of all-reduce fails twice, and the second time it rejoins by the resume."""
    line = [*LINE, *MODES[name].split(), f"stop.steps={STEPS}", "runtime=local"]
    process = started(*line, "runtime.max_restarts=1")
    for absent in ((), (0,)):
        wait_for(process, has_checkpoint)
        os.kill(ranks_of(Path("run"))[0], signal.SIGKILL)
        wait_for(process, lambda absent=absent: rejoins() == 1 and has_checkpoint(absent))
    kill_everything(process)
    failures = check_resumed()["failed_workers"]
    assert [failure["worker"] for failure in failures] == [0, 0]
    assert failures[0]["rejoined_s"] < failures[1]["time_s"] < failures[1]["rejoined_s"]


def rejoins() -> int:
    """Return how many rejoins the records have."""
    return Path("run/events.jsonl").read_text().count('"worker_rejoined"')


OTHERS = ("all-reduce", "server, a bound", "two servers", "push-sum, two rounds late", "pairs")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS, "groups", "regions"])
def test_a_run_resumes_with_other_workers_after_a_failure(name: str, workplace: Path) -> None:
    process = started(*LINE, *MODES[name].split(), f"stop.steps={STEPS}", "runtime=local")
    wait_for(process, has_checkpoint)
    os.kill(ranks_of(Path("run"))[0], signal.SIGKILL)
    wait_for(process, lambda: has_checkpoint(absent=(0,)))
    kill_everything(process)
    two = ["cluster.num_workers=2", "run.dir=two"]
    two += ["topology.regions=[0,1]"] if name == "regions" else []
    assert main(["train", "--resume", "run", *two, "-q"]) == 0
    summary = json.loads(Path("two/summary.json").read_text())
    assert (summary["status"], len(summary["workers"])) == ("finished", 2)
    assert summary["steps"] == sum(one["steps"] for one in summary["workers"]) >= STEPS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["topology=all_reduce sync=bsp", "sync=ssp"])
def test_a_worker_killed_before_the_ranks_are_connected_ends_the_run(
    mode: str, workplace: Path
) -> None:
    """The run ends in one sentence and without an orphan, and can be resumed again."""
    process = started(*LINE, *mode.split(), f"stop.steps={STEPS}", "runtime=local")
    wait_for(process, has_checkpoint)
    kill_everything(process)
    again = started("--resume", "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(again, lambda: 1 in ranks_of(Path("run")))
    os.kill(ranks_of(Path("run"))[1], signal.SIGKILL)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 1
    assert err == "ashl: worker 1 was killed by SIGKILL; its log is run/rank1.log\n"
    assert "resume with `ashl train --resume run`" in out
    assert ranks_of(Path("run")) == {}
    check_resumed()

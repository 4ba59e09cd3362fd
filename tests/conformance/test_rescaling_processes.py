"""Runs that go on with another number of workers, in virtual time, on processes, and in jobs of
others.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.conformance.test_checkpoint_jobs import ended, torchrun, until_saved, worker_of
from tests.conformance.test_checkpoint_processes import killed
from tests.test_rescaling import NICS, model, summary, train

pytestmark = pytest.mark.slow
# Epochs of 16 rounds of 64 samples
EPOCHS = (
    "dataset=quadratic",
    "dataset.num_samples=1024",
    "dataset.partition=interleaved",
    "model=linear",
)
PACED = ("cluster=homogeneous", "cluster.step_s=0.01", "cluster.exchange_s=0.002", "tracking=none")
OWN_PACE = [
    "sync=asp compression=topk optimizer.lr=0.02",
    "sync=ssp",
    "schedule=ashl optimizer.lr=0.05",
    "topology=gossip sync=d_psgd topology.graph=complete optimizer.lr=0.02",
    "topology=gossip sync=ad_psgd topology.graph=ring optimizer.lr=0.02",
    "topology=partial_all_reduce sync=ripples_random sync.group_size=2 optimizer.lr=0.02",
    f"topology=sharded_server topology.servers=2 sync=ssp optimizer.lr=0.02 {NICS}",
    "topology=halos topology.regions=[0,1] topology.updates=4 sync=asp optimizer.lr=0.02",
]


@pytest.mark.parametrize("runtime", ["sim", "local"])
@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_two_workers_four_and_one_take_one_trajectory(
    topology: str, runtime: str, workplace: Path
) -> None:
    """Rounds have the same samples, however many workers share them."""
    own = (
        *PACED,
        *EPOCHS,
        f"topology={topology}",
        "sync=bsp",
        "optimizer.lr=0.002",
        "optimizer.momentum=0.9",
    )
    two = (f"runtime={runtime}", *own, "cluster.num_workers=2", "dataset.batch_size=32")
    train("runtime=sim", *two[1:], "run.dir=whole", "stop.epochs=50")
    train(*two, "run.dir=two", "stop.epochs=10", "run.checkpoint_s=0.5")
    four = ("cluster.num_workers=4", "dataset.batch_size=16", "run.dir=four")
    train("--resume", "two", *four, "stop.epochs=30")
    train("--resume", "four", "stop.epochs=45")
    one = ("cluster.num_workers=1", "dataset.batch_size=64", "run.dir=one")
    train("--resume", "four", *one, "stop.epochs=50")
    assert [*Path("four/checkpoint").glob("[1-9]*")]
    assert (model("one") - model("whole")).abs().max() < 1e-5
    assert summary("one")["samples"] == summary("whole")["samples"] == 50 * 1024


@pytest.mark.parametrize("mode", OWN_PACE)
def test_workers_at_their_own_pace(mode: str, workplace: Path) -> None:
    own = (*PACED, *mode.split(), "run.checkpoint_s=0.3")
    train("runtime=local", *own, "cluster.num_workers=2", "run.dir=two", "stop.steps=300")
    three = ["cluster.num_workers=3", "run.dir=three", "stop.steps=600"]
    three += ["topology.regions=[0,1,1]"] if "regions=" in mode else []
    train("--resume", "two", *three)
    train("--resume", "three", "stop.steps=700")
    found = summary("three")
    assert found["status"] == "finished"
    assert found["steps"] >= 700
    assert sum(worker["steps"] for worker in found["workers"]) == found["steps"]
    assert found["final"]["train_loss"] < summary("two")["final"]["train_loss"]


def test_what_was_measured_of_others_is_not_taken_for_these(workplace: Path, capsys) -> None:
    line = [
        "schedule=ashl",
        "cluster=real",
        "cluster.num_workers=2",
        "tracking=none",
        "model.hidden=[8]",
    ]
    train(*line, "run.dir=two", "run.checkpoint_s=0.3", "stop.seconds=5")
    assert main(["train", "--resume", "two", "cluster.num_workers=3", "run.dir=three", "-q"]) == 2
    said = capsys.readouterr().err
    assert "two is planned from measurements of its 2 workers" in said
    assert said.rstrip().endswith("run.start_from=two")
    assert not Path("three").exists()


def test_a_run_that_was_killed(workplace: Path) -> None:
    killed(["sync=bsp", "compression=topk", *PACED, "cluster.compute=[1,2]", "stop.steps=1200"])
    train("--resume", "run", "cluster.compute=[1,1,1]", "run.dir=three", "stop.steps=600")
    train("--resume", "run", "stop.steps=800")  # which is as it was
    assert summary("three")["num_workers"] == 3
    assert 600 <= summary("three")["steps"] < 603
    assert (summary("run")["num_workers"], summary("run")["steps"]) == (2, 800)


def test_jobs_of_another_size(workplace: Path) -> None:
    """A job of another size is an error without a number of workers.

    With one it resumes, and a restart by torchrun resumes from there.
    """
    own = (
        "sync=bsp",
        "cluster=real",
        "tracking=none",
        "runtime=torchrun",
        "run.checkpoint_s=0.3",
        "model.hidden=[8]",
    )
    job = torchrun(3, *own, "run.dir=run", "stop.seconds=60", "-q")
    until_saved(Path("run"), job)
    os.killpg(job.pid, signal.SIGKILL)
    ended(job)
    unasked = torchrun(4, "--resume", "run", "-q")
    (said,) = ended(unasked)
    assert "run has 2 workers, and this job has 3; add cluster.num_workers=3" in said
    line = ("--resume", "run", "cluster.num_workers=3", "run.dir=three", "stop.seconds=8", "-q")
    more = torchrun(4, *line, restarts=1)
    until_saved(Path("three"), more)
    os.kill(worker_of(more), signal.SIGKILL)
    (said,) = ended(more)
    assert more.returncode == 0, said
    assert "restarted: the run in three resumes from its last checkpoint" in said
    assert (
        summary("three")["num_workers"],
        json.loads(Path("three/plan.json").read_text())["num_workers"],
    ) == (3, 3)

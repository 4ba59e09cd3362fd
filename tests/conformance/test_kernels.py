"""Sync modes on four gloo processes: invariants of asynchronous ones, and the predicted rate.

Synchronous modes give the simulator's bits: these are rows of the golden set.
"""

import json

import psutil
import pytest
from torch.distributed import HashStore

from ashl.cluster.spec import RealCluster
from ashl.config.compose import compose
from ashl.run import train as run
from ashl.runtime.process import TorchKernel
from ashl.runtime.throttle import Throttle
from tests.kernels import Quiet

QUICK = (
    "cluster.step_s=0.006",
    "cluster.exchange_s=0.004",
    "stop.steps=96",
    "optimizer.momentum=0.9",
    "model.hidden=[16]",
)


def real(folder, *overrides):
    """Run on real processes; returns the summary."""
    return trained(folder, "runtime=local", *overrides)


def trained(folder, *overrides):
    """Run as the command line does; returns the summary."""
    chosen = ["tracking=none", f"run.dir={folder}", *overrides]
    assert run.run(compose(chosen, None), chosen, quiet=True).code == 0
    return json.loads((folder / "summary.json").read_text())


def adds_up(summary):
    keys = [f"{kind}_s" for kind in ("compute", "compress", "push", "pull", "wait", "down")]
    return all(
        sum(w[key] for key in keys) == pytest.approx(summary["time_s"], abs=1e-9)
        for w in summary["workers"]
    )


@pytest.mark.parametrize(
    "mode", [["sync=ssp", "sync.staleness=1"], ["sync=asp"], ["sync=backup"]], ids=lambda m: m[0]
)
def test_the_others_keep_their_invariants(mode, tmp_path):
    summary = real(tmp_path / "run", *QUICK, *mode)
    commits = [worker["commits"] for worker in summary["workers"]]
    assert adds_up(summary)
    assert summary["steps"] == sum(w["steps"] for w in summary["workers"])
    assert summary["commits"] == sum(commits)
    assert summary["final"]["test_accuracy"] > 0.5
    if mode[0] == "sync=ssp":
        assert summary["max_lead"] <= 1
        assert max(commits) - min(commits) <= 2
    if mode[0] == "sync=asp":
        assert commits[0] > commits[3]
    if mode[0] == "sync=backup":
        assert summary["dropped_steps"] > 0
        assert summary["workers"][3]["dropped"] > summary["workers"][0]["dropped"]


@pytest.mark.slow
def test_servers_by_region_end_a_stage_on_processes(tmp_path):
    four = (
        "topology.regions=[0,0,1,1]",
        "schedule=ashl",
        "compression=none",
        "schedule.profile_steps=0",
    )
    chosen = (
        *QUICK[:2],
        "stop.seconds=3",
        *four,
        "schedule.loss=running",
        "schedule.loss_switch=2.2",
    )
    summary = real(tmp_path / "run", *chosen, "topology=halos", "topology.updates=2")
    assert adds_up(summary)
    assert summary["steps"] == sum(w["steps"] for w in summary["workers"])
    assert summary["commits"] == sum(w["commits"] for w in summary["workers"])
    assert len(summary["stages"]) == 2
    assert min(stage["steps"] for stage in summary["stages"]) > 0
    assert summary["time_s"] == 3


def test_one_process_on_a_real_cluster_learns(tmp_path):
    summary = real(
        tmp_path / "run", "cluster=real", "cluster.num_workers=1", "sync=bsp", "stop.epochs=3"
    )
    assert summary["time_kind"] == "wall"
    assert summary["final"]["test_accuracy"] > 0.85
    assert (
        json.loads((tmp_path / "run" / "plan.json").read_text())["stages"][0][
            "predicted_steps_per_s"
        ]
        is None
    )


def test_a_target_stops_the_run_through_replies(tmp_path):
    summary = real(
        tmp_path / "run", *QUICK[:2], "sync=asp", "stop.target_accuracy=0.5", "eval.every_commits=8"
    )
    assert summary["exit_reason"] == "target_accuracy"
    assert 0 < summary["time_to_target_s"] <= summary["time_s"]
    assert summary["best"]["test_accuracy"] >= 0.5


def test_nothing_is_left_behind(tmp_path):
    real(tmp_path / "run", *QUICK, "sync=asp", "stop.steps=8")
    server = psutil.Process()  # the fork server stays, for the next run; what it forked is gone
    assert not [child for child in server.children(recursive=True) if child.ppid() != server.pid]
    assert not list((tmp_path / "run").glob(".snapshot*"))


def test_a_clock_runs_from_when_all_have_come() -> None:
    """Not from when a process has made its kernel: what is declared for a moment of the run would
    come too early.
    """
    real = RealCluster(num_workers=2, hosts=None, server_host=None)
    kernel = TorchKernel(
        0, Quiet(), lambda clock: Throttle(real, 0, 1, 0, 4, clock, HashStore()), (1,), 8, True, {}
    )
    assert not kernel.started

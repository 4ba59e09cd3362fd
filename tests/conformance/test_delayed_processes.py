"""Exchanges that go on while the next piece is computed, on two processes: the simulator's bits, in
rounds.
"""

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.conformance.test_stage_processes import COMMON, of_two
from tests.support import simulated

TWO = (
    *QUICK,
    "cluster=homogeneous",
    "cluster.num_workers=2",
    "cluster.exchange_s=0.004",
    "stop.steps=48",
)
UNEQUAL = (
    "cluster.compute=[1,2]",
    "sync=local_sgd",
    "sync.local_steps=plan",
    "schedule.h_preset=[2]",
)
MODES = [
    ["topology=all_reduce", "sync=bsp", "optimizer.momentum=0.9", "overlap=delayed"],
    [
        "topology=all_reduce",
        "sync=local_sgd",
        "sync.local_steps=3",
        "compression=topk",
        "overlap=overlap_local_sgd",
    ],
    ["sync=local_sgd", "sync.local_steps=3", "outer=nesterov", "overlap=eager"],
    [
        "topology=all_reduce",
        "sync=local_sgd",
        "overlap=streaming",
        "overlap.fragments=2",
        "compression=topk",
    ],
    ["topology=all_reduce", "overlap=loscar", *UNEQUAL],
    pytest.param(
        [
            "sync=local_sgd",
            "overlap=streaming",
            "outer=nesterov",
            "compression=topk",
            "topology.pull_ratio=0.3",
        ],
        marks=pytest.mark.slow,
    ),
    [
        "sync=decoupled",
        "sync.local_steps=3",
        "sync.grace_s=0.1",
        "outer=nesterov",
        "overlap=delayed",
    ],
]


@pytest.mark.parametrize(
    "mode", MODES, ids=["sums", "anchor", "server", "fragments", "drawn", "through", "quorum"]
)
def test_delayed_exchanges_give_the_simulators_parameters(mode, tmp_path) -> None:
    summary, sim = real(tmp_path / "run", *TWO, *mode), simulated(*TWO, *mode)
    assert summary["params_sha256"] == sim.sha256
    assert summary["steps"] == sim.end["steps"] == 48
    assert summary["status"] == "finished"
    assert summary["bytes_up"] == sum(r["bytes_up"] for r in sim.of("TimeTotals") if r["rank"] < 2)
    assert adds_up(summary)


def test_a_stage_boundary_and_a_budget_leave_no_hang(tmp_path) -> None:
    """Two stages of a mode in which nobody waits, ended by the clock."""
    (tmp_path / "plan.json").write_text(of_two(("sync=asp", "overlap=delayed"), {}, 1).to_json())
    chosen = ("sync=asp", "overlap=delayed", "stop.seconds=0.4", f"plan={tmp_path / 'plan.json'}")
    summary = real(tmp_path / "run", *COMMON[:-1], "stop.steps=9999", *chosen)
    assert summary["status"] == "finished"
    assert [stage["exit_reason"] for stage in summary["stages"]] == ["commits", "seconds"]
    assert summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) > 0
    assert adds_up(summary)

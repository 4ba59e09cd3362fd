"""AsyLPG's two kinds of pushes on real processes."""

import pytest

from tests.conformance.test_kernels import adds_up, real
from tests.support import simulated

QUICK = (
    "cluster=homogeneous",
    "cluster.compute=[1,1]",
    "cluster.step_s=0.001",
    "cluster.exchange_s=0.002",
)


def test_asylpg_learns_on_processes(tmp_path):
    chosen = (
        *QUICK,
        "sync=asylpg",
        "model=linear",
        "compression=grid",
        "optimizer.momentum=0",
        "optimizer.lr=0.1",
    )
    summary, sim = (
        real(tmp_path / "run", *chosen, "stop.epochs=12"),
        simulated(*chosen, "stop.epochs=12"),
    )
    assert summary["final"]["test_accuracy"] > 0.9
    assert summary["steps"] == pytest.approx(sim.end["steps"], rel=0.05)
    assert summary["bytes_down"] < 0.8 * summary["steps"] * 4 * 650
    assert adds_up(summary)

"""Lazy uploads, of which some are of no bytes, and AsyLPG's two kinds of pushes, on real
processes.
"""

import pytest

from tests.conformance.test_kernels import adds_up, real
from tests.support import simulated

QUICK = (
    "cluster=homogeneous",
    "cluster.compute=[1,1]",
    "cluster.step_s=0.001",
    "cluster.exchange_s=0.002",
)
LAZY = (
    "sync=bsp",
    "model=linear",
    "compression=laq",
    "compression.bits=4",
    "optimizer.momentum=0",
    "optimizer.lr=0.5",
    "stop.epochs=30",
)


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_lazy_uploads_give_the_simulators_parameters(topology, tmp_path):
    chosen = (*QUICK, *LAZY, f"topology={topology}")
    summary, sim = real(tmp_path / "run", *chosen), simulated(*chosen)
    assert summary["params_sha256"] == sim.sha256
    assert summary["bytes_up"] == sum(
        record["bytes_up"] for record in sim.of("TimeTotals") if record["rank"] < 2
    )
    assert 0 < summary["bytes_up"] < 0.7 * 60 * (24 + 650 / 2), "some were skipped"
    assert adds_up(summary)


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


def test_block_coordinate_descent_sums_its_means_on_processes(tmp_path):
    chosen = (
        *QUICK,
        "sync=bsp",
        "topology=all_reduce",
        "optimizer=bcd",
        "model.hidden=[16]",
        "stop.epochs=4",
    )
    summary, sim = real(tmp_path / "run", *chosen), simulated(*chosen)
    assert summary["params_sha256"] == sim.sha256
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in sim.of("TimeTotals"))

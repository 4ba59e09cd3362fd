"""Sums by messages of our own between processes: the simulator's model and bytes."""

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")


def check(folder, workers, node, *chosen):
    machines = (f"cluster.compute={[1] * workers}", f"cluster.node={node}", "cluster.inner_bandwidth_mbit_s=1000")
    mode = (*QUICK, *LINKS, *machines, "topology=all_reduce", *chosen)
    summary, sim = real(folder, *mode), simulated(*mode)
    assert summary["params_sha256"] == sim.sha256
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in sim.of("ledger"))
    assert adds_up(summary)


@pytest.mark.slow
def test_a_hierarchy_of_two_machines(tmp_path) -> None:
    check(tmp_path / "run", 3, [0, 0, 1], "sync=bsp", "topology.algorithm=hierarchical", "stop.steps=24")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "halving", "tree", "hierarchical", "auto"])
def test_every_algorithm(algorithm, tmp_path) -> None:
    check(tmp_path / "run", 4, [0, 0, 1, 1], "sync=bsp", f"topology.algorithm={algorithm}", "overlap=wfbp")


@pytest.mark.slow
def test_native_sums_without_declared_costs(tmp_path) -> None:
    """What travels is what the algorithm moves, up to what a vector is filled up with."""
    chosen = ("cluster=real", "cluster.num_workers=3", "topology=all_reduce", "sync=bsp", "stop.steps=24")
    chosen += ("model.hidden=[16]", "topology.algorithm=ring")
    native, exact = (real(tmp_path / sums, *chosen, f"runtime.sums={sums}") for sums in ("native", "exact"))
    assert native["bytes_up"] < exact["bytes_up"]

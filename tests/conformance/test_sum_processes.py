"""Sums by messages of our own between processes: the simulator's model and bytes."""

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")


def check(folder, workers, node, *chosen):
    machines = (f"cluster.compute={[1] * workers}",)
    if node is not None:
        machines += (f"cluster.node={node}", "cluster.inner_bandwidth_mbit_s=1000")
    quick = [key for key in QUICK if not ("optimizer=adam" in chosen and key.startswith("optimizer.momentum"))]
    mode = (*quick, *LINKS, *machines, "topology=all_reduce", *chosen)
    summary, sim = real(folder, *mode), simulated(*mode)
    assert summary["params_sha256"] == sim.sha256
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in sim.of("ledger"))
    assert adds_up(summary)


@pytest.mark.slow
def test_a_hierarchy_of_two_machines(tmp_path) -> None:
    check(tmp_path / "run", 3, [0, 0, 1], "sync=bsp", "topology.algorithm=hierarchical", "stop.steps=24")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "halving", "tree", "star", "hierarchical", "auto"])
def test_every_algorithm(algorithm, tmp_path) -> None:
    check(tmp_path / "run", 4, [0, 0, 1, 1], "sync=bsp", f"topology.algorithm={algorithm}", "overlap=wfbp")


@pytest.mark.slow
def test_a_codec_through_the_first_worker(tmp_path) -> None:
    """TernGrad's ternaries, which three workers sum in few bits."""
    chosen = ("compression=terngrad", "compression.shared_scale=true", "optimizer.momentum=0", "stop.steps=24")
    check(tmp_path / "run", 3, None, "sync=bsp", "topology.algorithm=star", *chosen)


@pytest.mark.slow
def test_whole_gradients_then_momenta_in_bits_then_local_steps(tmp_path) -> None:
    """0/1 Adam through all that its counts say: every second step whole, the variance frozen, H of 1, 2 and 4."""
    counts = ("sync.freeze_step=6", "sync.update_scaler=2", "sync.local_step_scaler=2", "sync.local_step_clipper=4")
    chosen = ("sync=zero_one_adam", "optimizer=adam", "compression=one_bit", "optimizer.lr=0.01", "stop.steps=80")
    check(tmp_path / "run", 3, None, *chosen, *counts)


@pytest.mark.slow
def test_native_sums_without_declared_costs(tmp_path) -> None:
    """What travels is what the algorithm moves, up to what a vector is filled up with."""
    chosen = ("cluster=real", "cluster.num_workers=3", "topology=all_reduce", "sync=bsp", "stop.steps=24")
    chosen += ("model.hidden=[16]", "topology.algorithm=ring")
    native, exact = (real(tmp_path / sums, *chosen, f"runtime.sums={sums}") for sums in ("native", "exact"))
    assert native["bytes_up"] < exact["bytes_up"]

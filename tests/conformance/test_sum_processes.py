"""Sums between processes, flat and by nodes: the simulator's model and bytes."""

import pytest
import torch

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")


def check(folder, workers, node, *chosen):
    machines = (f"cluster.compute={[1] * workers}",)
    if node is not None:
        machines += (f"cluster.node={node}", "cluster.intra_node_bandwidth_mbit_s=1000")
    quick = [
        key
        for key in QUICK
        if not ("optimizer=adam" in chosen and key.startswith("optimizer.momentum"))
    ]
    mode = (*quick, *LINKS, *machines, "topology=all_reduce", *chosen)
    summary, sim = real(folder, *mode), simulated(*mode)
    assert summary["params_sha256"] == sim.sha256
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in sim.of("TimeTotals"))
    assert adds_up(summary)


@pytest.mark.slow
def test_a_hierarchy_of_two_machines(tmp_path) -> None:
    check(
        tmp_path / "run",
        3,
        [0, 0, 1],
        "sync=bsp",
        "topology.algorithm=hierarchical",
        "stop.steps=24",
    )


@pytest.mark.slow
def test_whole_gradients_then_momenta_in_bits_then_local_steps(tmp_path) -> None:
    """0/1 Adam through all that its counts say: every second step whole, the variance frozen, H of
    1, 2 and 4.
    """
    counts = (
        "sync.freeze_step=6",
        "sync.update_scaler=2",
        "sync.local_step_scaler=2",
        "sync.local_step_clipper=4",
    )
    chosen = (
        "sync=zero_one_adam",
        "optimizer=adam",
        "compression=one_bit",
        "optimizer.lr=0.01",
        "stop.steps=80",
    )
    check(tmp_path / "run", 3, None, *chosen, *counts)


@pytest.mark.slow
def test_backend_sums_by_nodes_are_the_flat_ones_to_rounding(tmp_path) -> None:
    """Three workers on two nodes: a reduce inside the first one, a sum across, a broadcast
    inside.
    """
    chosen = (
        "topology=all_reduce",
        "sync=bsp",
        "stop.steps=24",
        "model.hidden=[16]",
        "runtime.reduction=backend",
    )
    chosen += (
        *LINKS,
        "cluster.compute=[1,1,1]",
        "cluster.node=[0,0,1]",
        "cluster.intra_node_bandwidth_mbit_s=1000",
    )
    real(tmp_path / "flat", *chosen)
    real(tmp_path / "nodes", *chosen, "topology.algorithm=hierarchical")
    flat, nodes = (
        torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("flat", "nodes")
    )
    for name in flat:
        torch.testing.assert_close(nodes[name], flat[name], rtol=1e-5, atol=1e-6)

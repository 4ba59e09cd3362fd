"""Sums of the backend between processes, flat and by nodes."""

import pytest
import torch

from tests.conformance.test_kernels import real

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")


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

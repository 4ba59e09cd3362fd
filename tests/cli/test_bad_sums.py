"""Algorithms of sums asked for wrongly: one sentence with the way out, exit code 2."""

import pytest

SUMS = "topology=all_reduce sync=bsp topology.algorithm="
PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
HOSTLESS = "runtime=local cluster=real cluster.num_workers=2"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            f"{SUMS}hierarchical",
            "cluster.node is not set; give the node of each worker",
        ),
        (f"{SUMS}hierarchical {HOSTLESS}", "cluster.hosts is not set; give the node"),
        (
            f"{SUMS}auto {HOSTLESS}",
            "supported in virtual time only, gloo or NCCL chooses the algorithm",
        ),
        (
            f"{SUMS}ring runtime=local {PORTS}",
            "take runtime=sim, topology.algorithm=hierarchical, or remove",
        ),
        (
            f"{SUMS}tree overlap=dear {PORTS}",
            "splits an all-reduce into two halves of a ring; take overlap=priority",
        ),
        (f"{SUMS}tree compression=topk", "gathered on a ring; take compression=none"),
        (f"{SUMS}mesh", "topology.algorithm"),
        ("sync=bsp topology.algorithm=tree", "algorithm"),
        (
            f"{SUMS}hierarchical cluster.node=[0,0,1,1] runtime=local {PORTS}",
            "intra_node_bandwidth_mbit_s",
        ),
    ],
)
def test_a_wrong_algorithm(overrides, says, said) -> None:
    code, sentence = said(*overrides.split())
    assert code == 2
    assert says in sentence

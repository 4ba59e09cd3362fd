"""Several servers asked for wrongly: one sentence with the way out, exit code 2."""

from dataclasses import replace

import pytest

from ashl.run.rank import role_name
from tests.support import planned

PORTS = (
    "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
    " topology=sharded_server"
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "sync=bsp topology=sharded_server",
            "no effect with cluster.exchange_s, where no NIC is ever busy; set",
        ),
        (f"sync=bsp {PORTS} topology.servers=0", "topology.servers"),
        (
            f"sync=bsp {PORTS} topology.servers=9 topology.partition_by=layers",
            "take at most as many servers, or topology.partition_by",
        ),
        (
            f"sync=bsp {PORTS} optimizer=muon",
            "steps on whole layers, and a server has a shard",
        ),
        (f"sync=easgd {PORTS}", "has its own loop, messages or step; take sync=bsp"),
        (
            f"sync=local_sgd {PORTS} outer=heloco",
            "outer=heloco, which steps on whole layers; take outer=nesterov",
        ),
        (
            f"sync=bsp {PORTS} cluster.node=[0,0,1,1] cluster.intra_node_bandwidth_mbit_s=9",
            "take cluster.node=null, or",
        ),
        (f"sync=bsp {PORTS} overlap=wfbp", "overlap=wfbp: not supported"),
        (
            f"sync=bsp {PORTS} cluster.churn={{mtbf_s:9,mttr_s:1}}",
            "a failed worker cannot rejoin; take topology=parameter_server",
        ),
    ],
)
def test_a_wrong_server(overrides, says, said) -> None:
    code, sentence = said(*overrides.split())
    assert code == 2
    assert says in sentence


def test_a_failed_server_is_named_as_a_server() -> None:
    for topology, called in (
        ("sharded_server", "the server"),
        ("halos", "the server"),
        ("gossip", "the coordinator"),
    ):
        plan = planned("topology=parameter_server")
        stage = replace(plan.stages[0], topology={"_target_": f"ashl.topology.{topology}.Any"})
        assert role_name(replace(plan, stages=(stage,)), 5) == f"{called} (rank 5)"

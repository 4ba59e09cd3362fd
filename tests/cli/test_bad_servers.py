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
        (f"sync=bsp {PORTS} topology.servers=0", "topology.servers"),
        (
            f"sync=bsp {PORTS} topology.servers=9 topology.partition_by=layers",
            "take at most as many servers, or topology.partition_by",
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

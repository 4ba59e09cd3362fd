"""A model on several servers between processes: the simulator's parameters where all wait
for all.
"""

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")
TWO = (*QUICK, *LINKS, "cluster=homogeneous", "cluster.num_workers=2", "topology=sharded_server")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["sync=bsp compression=cast", "schedule=post_local schedule.switch_epochs=0.05"]
)
def test_two_servers_are_one(mode, tmp_path) -> None:
    own = mode.split()
    summary, one = (
        real(tmp_path / "run", *TWO, *own),
        simulated(*TWO, *own, "topology=parameter_server"),
    )
    assert summary["params_sha256"] == one.sha256
    assert summary["status"] == "finished"
    assert adds_up(summary)


@pytest.mark.slow
def test_where_nobody_waits_all_come_to_an_end(tmp_path) -> None:
    summary = real(
        tmp_path / "run",
        *TWO,
        "sync=asp",
        "topology.servers=3",
        "stop.seconds=1.5",
        "stop.steps=null",
    )
    assert summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) > 20
    assert summary["status"] == "finished"
    assert adds_up(summary)

"""A model on several servers between processes. Where all wait for all it is a row of the golden
set.
"""

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real

LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.0005")
TWO = (*QUICK, *LINKS, "cluster=homogeneous", "cluster.num_workers=2", "topology=sharded_server")


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

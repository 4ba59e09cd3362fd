"""Asynchronous gossip on four gloo processes: consistent accounting, a drained end, and the rates.

Rounds are rows of the golden set.
"""

import pytest

from ashl.compression.modulo import payload_nbytes
from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

AT_WILL = [
    ["sync=ad_psgd"],
    pytest.param(
        ["sync=ad_psgd", "sync.overlap=false", "stop.steps=null", "stop.seconds=0.5"],
        marks=pytest.mark.slow,
    ),
    ["sync=hop"],
]


@pytest.mark.parametrize("mode", AT_WILL, ids=lambda mode: "-".join(mode))
def test_the_others_keep_their_books_and_drain(mode, tmp_path):
    summary = real(tmp_path / "run", *QUICK, "topology=gossip", *mode)
    commits = [worker["commits"] for worker in summary["workers"]]
    assert summary["status"] == "finished"
    assert adds_up(summary)
    assert summary["steps"] == sum(worker["steps"] for worker in summary["workers"])
    assert summary["commits"] == sum(commits)
    assert summary["max_lead"] is None
    assert summary["final"]["test_accuracy"] > 0.5
    if "sync=ad_psgd" in mode:
        assert commits[0] > commits[3]
    else:
        assert max(commits) - min(commits) <= 2 * (
            2 + 1
        )  # s + 1 over each of the two edges between ranks 0 and 2


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_models_in_few_bits_are_read_and_as_long_as_in_virtual_time(overlap, tmp_path):
    """Each message is a model in 8 bits an element, or a whole one, as a worker's first is."""
    three = (
        "cluster=homogeneous",
        "cluster.num_workers=3",
        "topology=gossip",
        "topology.graph=complete",
    )
    mode = (
        *QUICK,
        *three,
        "sync=swarm",
        "sync.local_steps=3",
        "sync.bits=8",
        f"sync.overlap={overlap}",
    )
    summary, sim = real(tmp_path / "run", *mode), simulated(*mode)
    d, n = sim.plan.num_params, 3
    small = payload_nbytes(d, 8)
    for sent, commits in (
        (summary["bytes_up"], summary["commits"]),
        (sum(r["bytes_up"] for r in sim.of("TimeTotals")), sum(sim.end["commits"])),
    ):
        wholes = [
            divmod(sent - (2 * commits + more) * small, 4 * d - small)
            for more in range(-2 * n, 2 * n + 1)
        ]
        (whole,) = [count for count, rest in wholes if rest == 0]
        assert n <= whole < commits, "of an ask and an answer each"
    assert adds_up(summary)
    assert (summary["status"], summary["exit_reason"]) == ("finished", "steps")
    assert summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) >= 96
    assert summary["final"]["test_accuracy"] > 0.5

"""Runs whose sums go by another algorithm: the same model, in another time and with other bytes."""

import pytest

from tests.support import planned, simulated

LINKS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.002",
    "cluster.step_s=0.03",
)
MACHINES = (
    *LINKS,
    "cluster.compute=[1,1,1,1,1,1]",
    "cluster.node=[0,0,0,1,1,1]",
    "cluster.intra_node_bandwidth_mbit_s=200",
)
BASE = (
    "cluster=homogeneous",
    "topology=all_reduce",
    "sync=bsp",
    "stop.steps=12",
    "model.hidden=[8]",
    *MACHINES,
)
S = 4 * (64 * 8 + 8 + 8 * 10 + 10)
S_NS = S * 400  # at 20 Mbit/s


@pytest.mark.limit("topology=all_reduce")
@pytest.mark.parametrize(
    ("algorithm", "rounds", "moved", "port_ns"),
    [
        ("ring", None, [5 * S // 3] * 6, None),  # as when nobody asks
        (
            "tree",
            6,
            [3 * S, S, 2 * S, S, 2 * S, S],
            2 * (1 + 0.1 + 1) * S_NS,
        ),  # 3 → 2 and 4 → 0 between machines
        ("star", 2, [5 * S, S, S, S, S, S], 2 * 3 * S_NS),  # three of them are on the other machine
        ("hierarchical", 6, [5 * S // 3] * 6, S_NS + 4 * S_NS // 3 // 10),
    ],
)
def test_the_same_model_as_any_other_sum(algorithm, rounds, moved, port_ns) -> None:
    flat, ran = simulated(*BASE), simulated(*BASE, f"topology.algorithm={algorithm}")
    assert ran.sha256 == flat.sha256
    ledgers = [record for record in ran.of("TimeTotals") if record["rank"] < 6]
    sent = [record["bytes_up"] for record in ledgers]
    assert sent == pytest.approx([2 * bytes_of_one for bytes_of_one in moved], abs=10)
    if rounds is None:
        assert ran.time_ns == flat.time_ns
        return
    assert ran.time_ns == pytest.approx(2 * (30e6 + rounds * 2e6 + port_ns), abs=10_000)


def test_terngrad_through_a_server_is_terngrad() -> None:
    """Workers send ternaries to it, the sums return in as few bits as possible, and each worker has
    its own model.
    """
    apart = ("cluster.node=null", "cluster.intra_node_bandwidth_mbit_s=null")
    ternary = (
        *apart,
        "compression=terngrad",
        "compression.shared_scale=true",
        "optimizer.momentum=0",
    )
    ran = simulated(*BASE, *ternary, "topology.algorithm=star")
    assert ran.sha256 == simulated(*BASE, *ternary).sha256
    sent, (d, n, bits) = [record["bytes_up"] for record in ran.of("TimeTotals")], (S // 4, 6, 4)
    words = 2 * 4 * -(-d * bits // 32)
    assert sent[0] - sent[1] == (n - 2) * words
    assert words < sent[1] < 1.3 * words, "and four scales, which are gathered"


def test_the_plan_says_what_auto_picks() -> None:
    plan = planned(*BASE, "topology.algorithm=auto")
    (note,) = [note for note in plan.notes if "topology.algorithm" in note]
    assert note.startswith("topology.algorithm=auto picks hierarchical: an all-reduce of ")
    explicit = planned(*BASE, "topology.algorithm=hierarchical")
    assert plan.predicted_s == explicit.predicted_s < planned(*BASE).predicted_s
    assert not [note for note in planned(*BASE).notes if "topology.algorithm" in note]

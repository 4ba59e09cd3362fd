"""D-ADMM: duals add up to zero in any order of events, and it finds the optimum that averaging
after local steps misses.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ashl.data.quadratic import optimum
from ashl.planning.instantiate import assemble_job
from ashl.sync import d_admm
from ashl.topology.graph import edge
from tests.support import simulated

LATE = ("sync.delay=2", "sync.barrier=1")
EXACT = (  # every worker's gradient is that of its whole shard
    "dataset=quadratic",
    "model=linear",
    "dataset.batch_size=240",
    "dataset.partition=interleaved",
    "optimizer.lr=0.1",
    "optimizer.weight_decay=0",
    "schedule=single",
    "topology=gossip",
)


@pytest.mark.parametrize("form", [(), LATE], ids=["synchronous", "asynchronous"])
def test_duals_add_up_to_zero(form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    opened, kept = d_admm.open_edges, []
    monkeypatch.setattr(d_admm, "open_edges", lambda *args: kept.append(opened(*args)) or kept[-1])
    base = (
        "schedule=single",
        "topology=gossip",
        "sync=d_admm",
        "model.hidden=[16]",
        "cluster.jitter=0.3",
    )
    ran = simulated(*base, "topology.graph=complete", "stop.steps=160", *form)
    everyone = kept[-4:]  # those before were of the forecast
    assert all(float(edges.dual.norm()) > 0.01 for edges in everyone)
    total = sum(edges.dual for edges in everyone)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-5)
    for i, edges in enumerate(everyone):
        assert all(edges.matched[j] == everyone[j].matched[i] for j in edges.models), (
            "both ends of an edge agree"
        )
    assert max(ran.end["stale_max"]) <= (2 if form else 0)


def test_it_finds_the_optimum_where_d_psgd_does_not() -> None:
    admm = simulated(*EXACT, "sync=d_admm", "stop.steps=3200")
    psgd = simulated(*EXACT, "sync=d_psgd", "sync.local_steps=4", "stop.steps=3200")
    best, _ = optimum(assemble_job(admm.plan, "cpu").data)
    assert float((admm.params - best).norm()) < 1e-3
    assert admm.snapshots[-1][0]["consensus_distance"] < 1e-6
    assert psgd.snapshots[-1][0]["consensus_distance"] > 1e-4, (
        "local steps pull its models apart for ever"
    )


def test_a_partial_barrier_does_not_go_in_step_with_the_slowest() -> None:
    base = (
        "schedule=single",
        "topology=gossip",
        "sync=d_admm",
        "runtime.gradients=false",
        "stop.steps=800",
    )
    whole, partial = simulated(*base), simulated(*base, "sync.delay=4", "sync.barrier=1")
    assert partial.steps_per_s > 1.5 * whole.steps_per_s


@given(n=st.integers(2, 12), data=st.data())
def test_neighbours_have_different_colours(n: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    edges = {edge(*pair) for pair in data.draw(st.lists(pairs))} | {
        edge(*pair) for pair in pairwise(range(n))
    }
    colours = d_admm.choose_colours(tuple(sorted(edges)), n)
    assert all(colours[i] != colours[j] for i, j in edges)

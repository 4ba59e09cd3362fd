"""Gradients that travel in parts: the same model as one sent in one piece, in the time of the
closed form.
"""

from dataclasses import replace

import pytest

from ashl.config.construct import construct
from ashl.plan.plan import Plan
from ashl.planning.instantiate import layer_groups
from ashl.planning.step_timelines import make_timeline
from tests.benchmarks.simulator import simulation
from tests.support import planned

LINKS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.002",
    "cluster.step_s=0.03",
)
SUMS = ("topology=all_reduce", "sync=bsp", *LINKS)
UNEQUAL = ("cluster.compute=[1,1,3]", "cluster.link=[1,2,1]")


def four_layers(overlap: str, **spec: object) -> Plan:
    """The chain of the literature on two workers: a third of 15 s is forward, backward takes 3, 1,
    2 and 4, and sums 5, 1, 1 and 6 s.
    """
    links = (
        "cluster.exchange_s=null",
        "cluster.bandwidth_mbit_s=0.008",
        "cluster.latency_s=0",
        "cluster.step_s=15",
    )
    plan = planned(
        "topology=all_reduce",
        "sync=bsp",
        "runtime.gradients=false",
        "stop.steps=20",
        "cluster.compute=[1,1]",
        "cluster.link=null",
        *links,
    )
    layers = tuple(
        (f"layer{k}", (250 * c,)) for k, c in enumerate((5, 1, 1, 6))
    )  # 1,000 bytes a second
    stage = replace(plan.stages[0], overlap={"_target_": f"ashl.overlap.{overlap}", **spec})
    return replace(plan, layers=layers, num_params=250 * 13, work=(3, 1, 2, 4), stages=(stage,))


@pytest.mark.parametrize(
    ("overlap", "spec", "seconds", "hidden"),
    [
        ("none.Serial", {}, 28, None),
        ("wfbp.WFBP", {}, 22, 6 / 13),
        ("merged.Merged", {"plan": [1, 1, 1, 1]}, 22, 6 / 13),
        ("merged.Merged", {"plan": [1, 2, 1]}, 22, 6 / 13),
        ("merged.Merged", {"plan": [2, 2]}, 24, 4 / 13),  # 11 + 7 = 18, then 6
        ("merged.Merged", {"plan": [4]}, 28, 0.0),
    ],
)
def test_the_chain_of_the_literature_to_the_nanosecond(overlap, spec, seconds, hidden) -> None:
    sim = simulation(four_layers(overlap, **spec))()
    assert sim.now_ns == 10 * seconds * 10**9
    if hidden is not None:
        for ledger in (ctx.time_accounting for ctx in sim.contexts):
            exposed = ledger.totals["push"] + ledger.totals["pull"]
            assert ledger.totals["compute"] == 150 * 10**9
            assert 1 - exposed / ledger.collective_ns == pytest.approx(hidden)
            assert ledger.totals["wait"] == 0


@pytest.mark.parametrize(
    ("overlap", "spec", "latency_s", "seconds", "last"),
    [
        ("priority.Priority", {"slice": 250, "credit": 1}, 0, 20, 22),
        (
            "priority.Priority",
            {"plan": "layers", "slice": 250, "credit": 4},
            0,
            22,
            22,
        ),  # a large credit gives priority away
        ("priority.Priority", {"slice": 1500, "credit": 1}, 0, 20, 22),
        (
            "priority.Priority",
            {"plan": "layers", "slice": 250, "credit": 1},
            0.1,
            21.6,
            24.6,
        ),  # twice on its way round the ring
        ("priority.Priority", {"slice": 750, "credit": 1}, 0.1, 23.2, 23.2),
        ("dear.DeAR", {"plan": "layers"}, 0, 21, 24),
        ("dear.DeAR", {"plan": [4]}, 0, 28, 28),
    ],
)
def test_the_chain_of_the_literature_across_the_barrier(
    overlap, spec, latency_s, seconds, last
) -> None:
    """Each step takes that long but the last, which takes until all is in."""
    plan = four_layers(overlap, **{"plan": "layers", **spec})
    plan = replace(plan, cluster={**plan.cluster, "latency_s": latency_s})
    chain = make_timeline(plan.stages[0], construct(plan.cluster, "cluster"), layer_groups(plan))
    assert construct(plan.stages[0].overlap, "overlap").step_ns(chain) == round(seconds * 10**9)
    sim = simulation(plan)()
    assert sim.now_ns == round((9 * seconds + last) * 10**9)
    for ledger in (ctx.time_accounting for ctx in sim.contexts):
        assert ledger.totals["compute"] == 150 * 10**9
        assert ledger.totals["wait"] == 0
        assert sum(ledger.totals.values()) == sim.now_ns

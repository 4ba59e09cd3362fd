"""Servers by region: the parameter server where there is one, the rule above it, and books that add
up.
"""

import math
from functools import partial

import pytest
import torch

from ashl.errors import UsageError
from ashl.planning.instantiate import assemble_job
from ashl.runtime.effects import ANY
from ashl.runtime.rank_context import RankContext
from ashl.stage.progress import Progress
from ashl.topology.halos import GlobalServerState, apply_region_update
from tests.support import simulated

BASE = (
    "optimizer.lr=0.02",
    "model.hidden=[8]",
    "sync=async_local_sgd",
    "sync.local_steps=2",
    "sync.max_staleness=null",
)
LINKS = (
    "cluster.exchange_s=null",
    "cluster.latency_s=0.002",
    "cluster.intra_node_latency_s=0.0001",
)
PORTS = ("cluster.bandwidth_mbit_s=20", "cluster.intra_node_bandwidth_mbit_s=1000")
run = partial(simulated, *BASE)
tree = partial(
    run, *LINKS, *PORTS, "topology=halos", "cluster.node=[0,0,1,1]", "topology.updates=4"
)


def test_a_region_alone_whose_every_push_goes_up_goes_as_the_server_goes() -> None:
    """α = γ = 1 and no momentum: a region receives the model that it sent. A worker alone has
    weight 1 in its region.
    """
    at = ("cluster.compute=[1,40]", "cluster.link=null", "stop.steps=24", "aggregate=uniform")
    alone = (
        "topology=halos",
        "topology.regions=[0,1]",
        "topology.updates=1",
        "topology.mixing=1",
        "topology.lr=1",
    )
    torch.testing.assert_close(
        run(*at, *alone, "topology.beta=0").params,
        run(*at, "aggregate.scale=2").params,
        rtol=1e-4,
        atol=1e-6,
    )
    every_third = run(*at, *alone, "topology.updates=3", "runtime.gradients=false").end
    assert (every_third["merges"], every_third["commits"]) == (4, [12, 0])


def test_the_global_server_steps_as_its_rule_says() -> None:
    plan = tree(
        "topology.lr=0.5", "topology.beta=0.25", "stop.steps=8", "runtime.gradients=false"
    ).plan
    stage = assemble_job(plan, "cpu").stages[0]
    one, two, three, four = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    state = GlobalServerState(torch.zeros(5), (), Progress(4))
    for difference in (one, two, three, four):
        apply_region_update(stage, state, difference)
    first = 0.5 * (one + two)
    second = 0.25 * first + 0.5 * (three + four)
    torch.testing.assert_close(
        state.params, 0.5 * (one + two + three + four) + 0.25 * (first + second)
    )
    assert state.progress.version == 4


def test_what_a_region_does_reaches_the_other_by_mixing_alone() -> None:
    def losses(*more: str) -> list[float]:
        ran = tree("stop.seconds=0.6", "stop.epochs=null", "dataset.partition=iid", *more)
        return [r["loss"] for r in ran.of("Round") if r["rank"] == 0]

    fast, slow = "cluster.compute=[1,2,3,4]", "cluster.compute=[1,2,3,9]"
    apart, mixed = (
        [losses(f"topology.mixing={share}", speeds) for speeds in (fast, slow)]
        for share in (0, 0.5)
    )
    assert len(apart[0]) > 8
    assert apart[0] == apart[1]
    assert mixed[0] != mixed[1]


@pytest.mark.parametrize("limit", [("stop.steps=96",), ("stop.seconds=0.7", "stop.epochs=null")])
def test_computed_work_is_applied_dropped_or_in_flight(limit: tuple[str, ...]) -> None:
    ran = tree(*limit)
    end, done = ran.end, [0] * 4
    for record in ran.of("Round"):
        done[record["rank"]] += record["steps"]
    assert end["steps"] == sum(end["steps_by"]) == 2 * sum(end["commits"]) > 0
    assert end["samples"] == 32 * end["steps"]
    assert sum(end["dropped_by"]) > 0, "what had not been handed in"
    for rank in range(4):
        assert done[rank] - end["steps_by"][rank] - end["dropped_by"][rank] in (0, 2)
    if end["reason"] == "seconds":
        assert ran.time_ns == 700_000_000
    else:
        assert end["steps"] >= 96
    assert {sum(ledger["totals_ns"].values()) for ledger in ran.of("TimeTotals")} == {ran.time_ns}


def test_a_stage_boundary_counts_all_work_in_flight() -> None:
    chosen = (
        "schedule=ashl",
        "compression=none",
        "schedule.profile_steps=0",
        "schedule.loss=running",
    )
    stages = simulated(
        *chosen,
        "schedule.loss_switch=2.2",
        "model.hidden=[8]",
        *LINKS,
        *PORTS,
        "topology=halos",
        "cluster.node=[0,0,1,1]",
        "topology.updates=2",
        "stop.epochs=8",
    )
    border = stages.of("StageEnd")[0]
    assert border["reason"] == "loss"
    assert sum(border["dropped_by"]) == 0
    assert border["steps"] == sum(r["steps"] for r in stages.of("Round") if r["stage"] == 0) > 0
    assert stages.end["stage"] == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("topology.regions=[0,1] sync=asp", "has 2 entries for 4 workers; give the region of each"),
        (
            "topology.regions=[0,1,0,1] cluster.node=[0,0,1,1]",
            "and cluster.node differs; set cluster.node",
        ),
        (
            "topology.regions=[0,0,1,1] schedule=ashl schedule.profile_steps=0 planner=online",
            "needs a planner that does not replan",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        simulated("topology=halos", *overrides.split())


def test_regions_that_reach_the_budget_first_end_the_run(monkeypatch) -> None:
    """The global server may have messages to read until all regions have closed, on processes."""
    receive = RankContext.recv

    def receive_without_budget(ctx, *tags, src=ANY, before_s=math.inf):
        return receive(ctx, *tags, src=src, before_s=math.inf if ctx.rank == 4 else before_s)

    monkeypatch.setattr(RankContext, "recv", receive_without_budget)
    assert tree("cluster.compute=[1,1,2,2]", "stop.seconds=0.5").end["reason"] == "seconds"

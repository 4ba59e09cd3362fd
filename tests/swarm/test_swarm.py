"""Many small random runs of each kind: all end, lose no message, and their accounting balances.

A planted worker that leaves early, and a planted message that nobody receives, are detected.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from ashl.errors import AshlError
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.effects import Compute
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import StageConfig
from ashl.stage.program import run_stages
from ashl.sync.bsp import BSP
from ashl.sync.d_psgd import DPSGD
from ashl.sync.local_sgd import LocalSGD
from ashl.sync.ssp import SSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.gossip import Gossip
from ashl.topology.parameter_server import ParameterServer
from tests.swarm import (
    checkpoints,
    churn,
    churn_parts,
    gossip,
    groups,
    one_stage,
    overlap,
    protocols,
    stages,
    teams,
)
from tests.swarm.drawn import each, run
from tests.swarm.one_stage import plain

CHUNK = 50  # seeds of one test: enough tests to name the seed that fails, few enough to be quick


class Swarm(NamedTuple):
    """A kind of random runs: how a seed is checked, what it draws, and its seeds."""

    check: Callable[[int], None]
    drawn: Callable[[int], Any]
    seeds: range
    more: range = range(0)  # with -m slow
    found: tuple[int, ...] = ()  # seeds that have found a fault


def resumed(drawn: Callable[[int], Any], more: range) -> Swarm:
    return Swarm(partial(checkpoints.check_resumed, drawn), drawn, range(20), more)


def in_parts(kind: str) -> Swarm:
    check, drawn = (partial(own, kind) for own in (churn_parts.check, churn_parts.drawn))
    return Swarm(check, drawn, range(60_000, 60_060), range(60_060, 65_000))


SWARMS = {
    "one stage": Swarm(one_stage.check, one_stage.drawn, range(200), range(200, 500)),
    "stages": Swarm(stages.check, stages.drawn, range(100), range(100, 200)),
    "overlap": Swarm(overlap.check, overlap.drawn, range(100), range(100, 200)),
    "protocols": Swarm(protocols.check, protocols.drawn, range(150), range(150, 300)),
    "gossip": Swarm(gossip.check, gossip.drawn, range(100), range(10_000, 13_000)),
    "groups": Swarm(groups.check, groups.drawn, range(150), range(150, 4100)),
    "failures at a server": Swarm(
        churn.check, churn.drawn, range(20_000, 20_060), range(20_060, 30_000)
    ),
    "failures by all-reduce": Swarm(
        teams.check_ring,
        teams.drawn_rings,
        range(40_000, 40_060),
        range(40_060, 42_000),
        (40_161, 40_972, 41_099, 52_085),
    ),
    "failures in groups": Swarm(
        teams.check_groups,
        teams.drawn_groups,
        range(40_000, 40_060),
        range(40_060, 42_000),
        (40_097, 40_157, 40_185),
    ),
    "failures with parts": in_parts("parts"),
    "failures with shards": in_parts("shards"),
    "resumed gossip": resumed(gossip.drawn, range(20, 1000)),
    "resumed after failures at a server": resumed(churn.drawn, range(20, 1000)),
    "resumed after failures by all-reduce": resumed(teams.drawn_rings, range(20, 1000)),
    "resumed after failures in groups": resumed(teams.drawn_groups, range(20, 1000)),
    "resumed after failures in gossip": resumed(checkpoints.drawn_gossip, range(20, 1000)),
}


def cut(name: str, seeds: range, size: int, *marks: pytest.MarkDecorator) -> Iterable[Any]:
    for first in range(0, len(seeds), size):
        part = seeds[first : first + size]
        yield pytest.param(name, part, id=f"{name}-{part[0]}", marks=marks)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *(case for name, swarm in SWARMS.items() for case in cut(name, swarm.seeds, CHUNK)),
        *(
            pytest.param(name, own.found, id=f"{name}-found")
            for name, own in SWARMS.items()
            if own.found
        ),
        *(
            case
            for name, own in SWARMS.items()
            for case in cut(name, own.more, 250, pytest.mark.slow)
        ),
    ],
)
def test_a_swarm(name: str, seeds: Iterable[int]) -> None:
    each(seeds, SWARMS[name].check, SWARMS[name].drawn)


def deserting(stage: StageConfig, rank: int, rounds: int):
    """The program of all ranks, but this one leaves without a word in its round so-and-so."""

    async def main(ctx: RankContext) -> None:
        role = run_stages(ctx, (stage,))
        if ctx.rank != rank:
            return await role
        awaited, value = 0, None
        with suppress(StopIteration):
            while True:
                effect = role.send(value)
                awaited += isinstance(effect, Compute)
                if awaited > rounds:
                    return None
                value = await effect
        return None

    return main


@pytest.mark.parametrize(
    "sync", [BSP(exchange="gradient"), SSP(staleness=1, local_steps=1)], ids=lambda s: str(s)[:3]
)
def test_a_worker_that_leaves_early_is_a_deadlock_with_names(sync: Any) -> None:
    cluster, stage = plain(sync, ParameterServer(pull_ratio=None))
    with pytest.raises(AshlError) as caught:
        run(cluster, (stage,), main=deserting(stage, rank=1, rounds=2))
    said = str(caught.value)
    assert said.startswith("deadlock: ")
    assert "rank 0 waits for 'pull' (stage 0, iteration 0)" in said
    assert "rank 2 waits for 'pull' (stage 0, iteration 0)" in said
    assert "rank 3 waits for 'push' (stage 0, iteration 0) from anyone" in said
    assert "rank 1" not in said, "it has left and waits for nothing"


def test_a_member_that_leaves_an_all_reduce_is_a_deadlock_with_names() -> None:
    cluster, stage = plain(LocalSGD(local_steps=1), AllReduce())
    with pytest.raises(
        AshlError, match=r"deadlock: rank 0 is in AllReduce with ranks \[0, 1, 2\]; rank 2 is in "
    ):
        run(cluster, (stage,), main=deserting(stage, rank=1, rounds=2))


def test_a_message_that_nobody_receives_is_found() -> None:
    """The check of the swarm, checked."""
    cluster, stage = plain(
        BSP(exchange="gradient"), ParameterServer(pull_ratio=None), replace(NO_LIMITS, steps=6)
    )

    async def main(ctx: RankContext) -> None:
        if ctx.rank == 0:
            await ctx.send(1, ("stray", 0, 0))
        await run_stages(ctx, (stage,))

    sim, _ = run(cluster, (stage,), main=main)
    assert list(sim._mail[1].messages) == [("stray", 0, 0)]


def test_a_stage_ends_by_what_rank_0_alone_knows() -> None:
    """The stop decision holds after the round by which all ranks have read it: no rank waits, and
    none continues.
    """
    cluster, stage = plain(DPSGD(local_steps=1, order="awc"), Gossip(graph="ring", degree=2))
    cluster = replace(cluster, num_workers=None, compute=(1.0,) * 7)
    plan = replace(stage.plan, workers=(stage.plan.workers[0],) * 7)
    stage = replace(stage, plan=plan, limits=replace(NO_LIMITS, seconds=0.5, eval_every_s=0.125))
    _, seen = run(cluster, (stage,))
    end = seen.of("StageEnd")[-1]
    assert end["reason"] == "seconds"
    assert (
        end["commits"] == [50] * 7
    )  # round 50 ends at 0.5 s, and what comes later does not count:
    assert end["dropped_by"] == [3] * 7  # the far side of a ring of 7 is three rounds away
    assert end["end_ns"] == 500_000_000
    ticks = Counter(record["tick"] for record in seen.commits if not record.get("final"))
    assert set(ticks.values()) == {7}
    assert len(ticks) == 3  # the fourth falls due with the end

"""Random gossip runs: every run is drained and ends, loses no message, and its accounting balances.

A planted worker that exits early is detected.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ashl.cluster.spec import Cluster
from ashl.errors import UsageError
from ashl.planning.predict import WITHOUT
from ashl.stage.contract import StageConfig
from ashl.sync.ad_psgd import ADPSGD
from ashl.sync.choco import Choco
from ashl.sync.d_admm import DADMM
from ashl.sync.d_psgd import DPSGD
from ashl.sync.hop import Hop
from ashl.sync.matcha import Matcha
from ashl.sync.noloco import NoLoCo
from ashl.sync.relay_sum import RelaySum
from ashl.sync.sgp import SGP
from ashl.sync.swarm import Swarm
from ashl.topology.gossip import Gossip, graph_of
from ashl.topology.graph import NAMES
from tests.conf_option import conf_option
from tests.swarm.drawn import (
    Seen,
    bound,
    check_mail,
    check_repeat,
    check_time,
    drawn_cluster,
    drawn_limits,
    each,
    run,
)
from tests.swarm.test_swarm import plain

SEEDS = 200
CHUNK = 50


def drawn_mode(rng: random.Random) -> Any:
    h = rng.randint(1, 4)
    return rng.choice(
        [
            DPSGD(local_steps=h, order=rng.choice(["awc", "atc"])),
            SGP(local_steps=h, overlap=rng.choice([0, 1, 3])),
            Matcha(local_steps=h, budget=rng.choice([0.2, 0.7, 1.0])),
            Choco(local_steps=h, gamma=0.5),
            RelaySum(local_steps=h),
            NoLoCo(local_steps=h, alpha=0.5, beta=0.7, gamma=0.9),
            *[ADPSGD(local_steps=h, overlap=overlap) for overlap in (True, False)],
            *[Swarm(local_steps=h, overlap=overlap, bits=None) for overlap in (True, False)],
            Hop(
                local_steps=h,
                staleness=rng.choice([0, 1, 3]),
                backups=rng.choice([0, 1]),
                max_lead=4,
                skip_lead=rng.choice([None, 1]),
            ),
            DADMM(
                local_steps=h,
                rho=0.1,
                delay=rng.choice([0, 1, 3]),
                barrier=rng.choice([None, 1, 2]),
            ),
        ]
    )


def drawn_stages(rng: random.Random, n: int) -> list[StageConfig]:
    """One stage, or two of the same kind (with a coordinator, or without)."""
    limits = drawn_limits(rng)
    graph = Gossip(graph=rng.choice(NAMES), degree=2)
    first = drawn_mode(rng)
    modes = [first]
    if rng.random() < 0.3:
        other = drawn_mode(rng)
        modes += (
            [other]
            if getattr(other, "coordinated", False) == getattr(first, "coordinated", False)
            else []
        )
    stages = []
    for index, mode in enumerate(modes):
        stage = bound(rng, mode, graph, n, limits)
        if isinstance(mode, Choco) and rng.random() < 0.5:
            topk = conf_option("compression", "topk", ratio=0.3, error_feedback=False)
            stage = replace(stage, codec=topk)
        until = {"commits": rng.randint(1, 6)} if index + 1 < len(modes) else {}
        plan = replace(stage.plan, until=until)
        stages.append(replace(stage, index=index, plan=plan, following=index + 1 < len(modes)))
    return stages


def drawn(seed: int) -> tuple[Cluster, list[StageConfig]] | None:
    """None where the mode cannot keep to the graph."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    stages = drawn_stages(rng, cluster.num_workers)
    try:
        for stage in stages:
            stage.topology.check(stage.sync, cluster.num_workers, stage.seed)
    except UsageError:
        return None
    return cluster, stages


def check_counts(seen: Seen, stages: list[StageConfig]) -> None:
    """Computed work was merged or dropped; every sent message was received."""
    end, n = seen.of("StageEnd")[-1], stages[0].num_workers
    done, applied = Counter(), Counter()
    for record in seen.of("Round"):
        done[record["rank"]] += record["steps"]
        applied[record["rank"]] += 0 if record["dropped"] else record["steps"]
    assert end["steps"] == sum(end["steps_by"])
    for rank in range(n):
        assert end["steps_by"][rank] + end["dropped_by"][rank] == done[rank]
        if stages[0].lead_rank:
            assert end["steps_by"][rank] == applied[rank]
        elif (
            end["end_ns"] != stages[0].stop_criteria.deadline_ns
        ):  # then rank 0 counts, by its own clock
            assert end["steps_by"][rank] <= applied[rank]
    if stages[0].lead_rank == 0:
        assert len(set(end["commits"])) == 1
        assert end["reason"] == "seconds" or sum(end["dropped_by"]) == 0
    sync = stages[-1].sync
    if (
        isinstance(sync, Hop) and len(stages) == 1 and not sync.skip_lead
    ):  # a jump is over rounds that nobody counts
        apart = 1 + (sync.max_lead if sync.backups else sync.staleness)
        assert all(
            abs(end["commits"][i] - end["commits"][j]) <= apart
            for i, j in graph_of(stages[0], stages[0].workers).places
        )
    if end["reason"] == "steps":
        assert end["steps"] >= stages[0].limits.steps
    ledgers = [record for record in seen.of("TimeTotals") if record["rank"] < n]
    assert sum(r["bytes_up"] for r in ledgers) == sum(r["bytes_down"] for r in ledgers)
    assert [r["bytes_up"] for r in seen.of("TimeTotals") if r["rank"] == n] in ([], [0])


def check(seed: int) -> None:
    if (chosen := drawn(seed)) is None:
        return
    cluster, stages = chosen
    sim, seen = run(cluster, stages, seed)
    end = seen.of("StageEnd")[-1]
    check_mail(sim)
    check_time(seen, cluster.num_workers, end["end_ns"])
    check_counts(seen, stages)
    check_repeat(seed, seen, lambda: run(cluster, stages, seed)[1])


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_swarm(first: int) -> None:
    each(range(first, first + CHUNK), check, drawn)


@pytest.mark.slow
def test_thousands_of_clusters() -> None:
    for seed in range(10_000, 13_000):
        check(seed)


def test_a_stage_ends_by_what_rank_0_alone_knows() -> None:
    """The stop decision holds after the round by which all ranks have read it: no rank waits, and
    none continues.
    """
    cluster, stage = plain(DPSGD(local_steps=1, order="awc"), Gossip(graph="ring", degree=2))
    cluster = replace(cluster, num_workers=None, compute=(1.0,) * 7)
    plan = replace(stage.plan, workers=(stage.plan.workers[0],) * 7)
    stage = replace(stage, plan=plan, limits=replace(WITHOUT, seconds=0.5, eval_every_s=0.125))
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

"""Random gossip runs: every run is drained and ends, loses no message, and its accounting balances.

A planted worker that exits early is detected.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.errors import UsageError
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
    run,
)


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
    return (cluster, stages) if fit_graph(stages, cluster.num_workers) else None


def fit_graph(stages: Sequence[StageConfig], num_workers: int) -> bool:
    """Return True if every sync mode can keep to its graph."""
    try:
        for stage in stages:
            stage.topology.check(stage.sync, num_workers, stage.seed)
    except UsageError:
        return False
    return True


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

"""Many small random clusters, each through one stage in virtual time without gradients.

In every case the run ends, loses no message, keeps its bounds, and its accounting balances to the
nanosecond, the step and the byte.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.plan.plan import Limits
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.sim import Sim
from ashl.stage.contract import StageConfig
from ashl.sync.asp import ASP
from ashl.sync.backup import Backup
from ashl.sync.bsp import BSP
from ashl.sync.local_sgd import LocalSGD
from ashl.sync.ssp import SSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer
from tests.swarm.drawn import (
    BATCH,
    Seen,
    bound,
    check_mail,
    check_repeat,
    check_time,
    drawn_cluster,
    drawn_limits,
    run,
)


def drawn_stage(rng: random.Random, n: int) -> StageConfig:
    """A sync mode with its parameters on a topology that it knows, and an end by steps, by seconds
    or by both.
    """
    local_steps = rng.randint(1, 5)
    sync = rng.choice(
        [
            BSP(exchange=rng.choice(["gradient", "difference"])),
            LocalSGD(local_steps=local_steps),
            ASP(local_steps=local_steps),
            SSP(staleness=rng.choice([0, 1, 2, 5]), local_steps=local_steps),
            SSP(staleness=None, local_steps=local_steps),
            Backup(backups=rng.randrange(n), exchange=rng.choice(["gradient", "difference"])),
        ]
    )
    topologies = (ParameterServer(pull_ratio=None), AllReduce())
    topology = rng.choice([t for t in topologies if isinstance(sync, t.policy_type)])
    return bound(rng, sync, topology, n, drawn_limits(rng))


def drawn(seed: int) -> tuple[Cluster, StageConfig]:
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    return cluster, drawn_stage(rng, cluster.num_workers)


def played(seed: int) -> tuple[Sim, Seen, StageConfig]:
    cluster, stage = drawn(seed)
    return *run(cluster, (stage,), seed), stage


def check_counts(seen: Seen, stage: StageConfig, end: dict) -> None:
    """Computed work was applied or dropped, or was in flight at the end."""
    n = stage.num_workers
    assert end["steps"] == sum(end["steps_by"])
    steps_each = [
        1 if stage.sync.exchange == "gradient" else worker.local_steps
        for worker in stage.plan.workers
    ]
    cut = stage.sync.in_rounds and (
        stage.limits.steps is not None or stage.limits.epochs is not None
    )
    for taken, c, h in zip(end["steps_by"], end["commits"], steps_each, strict=True):
        assert taken == c * h or (cut and (c - 1) * h < taken < c * h), "the last round may be cut"
    samples = [
        s * worker.batch for s, worker in zip(end["steps_by"], stage.plan.workers, strict=True)
    ]
    assert end["samples"] == sum(samples)
    assert sum(end["commits"]) == end["merges"] * (stage.quorum if stage.topology.has_server else n)
    done = Counter()
    for record in seen.of("Round"):
        done[record["rank"]] += record["steps"]
    for rank in range(n):
        assert end["steps_by"][rank] + end["dropped_by"][rank] <= done[rank]
        under_way = done[rank] - end["steps_by"][rank] - end["dropped_by"][rank]
        assert under_way in (0, steps_each[rank]) or (cut and under_way < steps_each[rank])
    if end["reason"] == "steps":
        assert end["steps"] >= stage.limits.steps
        last = (
            seen.commits[-2]["steps"] if len(seen.commits) > 1 else 0
        )  # the last is the final snapshot
        assert not seen.commits[:-2] or seen.commits[-3]["steps"] < stage.limits.steps, (
            "the end comes at once"
        )
        assert last <= end["steps"]


def check_bounds(seen: Seen, stage: StageConfig, end: dict) -> None:
    """The lead of SSP at every commit, and how old what a barrier merges may be."""
    s = getattr(stage.sync, "staleness", None)
    if s is not None:
        assert end["max_lead"] <= s
        assert all(max(r["commits"]) - min(r["commits"]) <= s + 1 for r in seen.commits)
        # while a worker computes, each other one can go from s behind it to s + 1 ahead of it
        assert max(end["stale_max"]) <= (stage.num_workers - 1) * (2 * s + 1)
    if isinstance(stage.sync, BSP | LocalSGD):
        assert max(end["stale_max"]) == 0
        assert len(set(end["commits"])) == 1


def check_bytes(seen: Seen, stage: StageConfig, end: dict) -> None:
    """Every exchange moves the dense model, and what one end sends the other end gets."""
    n, dense = stage.num_workers, stage.trainer.dense_bytes
    ledgers = {record["rank"]: record for record in seen.of("TimeTotals")}
    if not stage.topology.has_server:
        each = 2 * (n - 1) * dense // n
        moved = end["merges"] * each
        begun = {0, each} if end["reason"] == "seconds" else {0}  # in time, and paid
        assert {(r["bytes_up"], r["bytes_down"]) for r in ledgers.values()} <= {
            (moved + late,) * 2 for late in begun
        }
        return
    workers = [ledgers[rank] for rank in range(n)]
    assert sum(r["bytes_up"] for r in workers) == ledgers[n]["bytes_down"]
    assert sum(r["bytes_down"] for r in workers) == ledgers[n]["bytes_up"]
    for rank, record in enumerate(workers):
        assert record["bytes_up"] % dense == record["bytes_down"] % dense == 0
        assert record["bytes_up"] >= end["commits"][rank] * dense
        assert 0 <= record["bytes_up"] - record["bytes_down"] <= dense


def check(seed: int) -> None:
    sim, seen, stage = played(seed)
    (end,) = seen.of("StageEnd")
    check_mail(sim)
    assert end["end_ns"] <= sim.now_ns
    if end["reason"] == "seconds":
        assert end["end_ns"] == round(stage.limits.seconds * 1e9), (
            "a budget is one on every topology"
        )
    check_time(seen, stage.num_workers, end["end_ns"])
    check_counts(seen, stage, end)
    check_bounds(seen, stage, end)
    check_bytes(seen, stage, end)
    check_repeat(seed, seen, lambda: played(seed)[1])


def plain(
    sync: Any, topology: Any, limits: Limits = NO_LIMITS, n: int = 3
) -> tuple[Cluster, StageConfig]:
    """A small cluster and stage without any chance in it."""
    cluster, stage = drawn(0)
    none = dict.fromkeys(
        ("link", "bandwidth_mbit_s", "latency_s", "server_bandwidth_mbit_s", "node")
    )
    costs = {
        "step_s": 0.01,
        "exchange_s": 0.01,
        "server_step_s": 0.0,
        "intra_node_bandwidth_mbit_s": None,
    }
    cluster = replace(
        cluster,
        num_workers=None,
        compute=(1.0, 2.0, 3.0)[:n],
        jitter=0.0,
        events=(),
        **none,
        **costs,
    )
    workers = (replace(stage.plan.workers[0], local_steps=1, batch=BATCH),) * n
    stage = replace(
        stage,
        sync=sync,
        topology=topology,
        limits=limits,
        plan=replace(stage.plan, workers=workers),
    )
    return cluster, stage

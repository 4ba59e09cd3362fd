"""Many small clusters drawn at random, each through one stage in virtual time without gradients: whatever is drawn, the
run ends, loses no message, keeps its bounds, and its books balance to the nanosecond, the step and the byte."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from ashl.aggregate.mean import Mean
from ashl.cluster.network import network
from ashl.cluster.spec import Cluster, Event
from ashl.cluster.speed import Speed
from ashl.compression.none import Dense
from ashl.errors import AshlError
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.predict import WITHOUT
from ashl.program import program
from ashl.runtime.effects import Compute
from ashl.runtime.node import Node
from ashl.runtime.sim import Sim
from ashl.stage import Stage
from ashl.sync.asp import ASP
from ashl.sync.backup import Backup
from ashl.sync.bsp import BSP
from ashl.sync.local_sgd import LocalSGD
from ashl.sync.ssp import SSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer
from ashl.trainer import HollowTrainer

SEEDS = 1000
CHUNK = 50  # seeds of one test: enough tests to name the seed that fails, few enough to be quick
BATCH = 8
WHAT = ("compute", "link")
MOST_EVENTS = 50_000  # of one run: many times what the longest needs


@dataclass
class Seen:
    """An observer that keeps everything."""

    rounds: bool = True
    stopping: str | None = None
    scores: dict | None = None

    def __post_init__(self) -> None:
        self.records: list[dict] = []
        self.commits: list[dict] = []  # the counts after each commit

    def emit(self, record: dict) -> None:
        self.records.append(record)

    def snapshot(self, record: dict, params: Any) -> None:
        self.commits.append(record)

    def of(self, kind: str) -> list[dict]:
        return [record for record in self.records if record["kind"] == kind]


GUARDS = {"discount": None, "clip_norm": None, "max_delay": None}


def drawn_cluster(rng: random.Random) -> Cluster:
    """One to eight workers with any costs, behind declared exchange times or links with ports."""
    n = rng.randint(1, 8)
    equal = rng.random() < 0.25  # ties everywhere
    declared = rng.random() < 0.5
    nodes = not declared and rng.random() < 0.4
    events = [
        Event(time_s=rng.uniform(0, 2), worker=rng.randrange(n), **{rng.choice(WHAT): rng.uniform(0.3, 9)})
        for _ in range(rng.choice([0, 0, 1, 4]))
    ]
    return Cluster(
        compute=tuple(1.0 if equal else rng.uniform(0.5, 8) for _ in range(n)),
        link=None if rng.random() < 0.3 else tuple(1.0 if equal else rng.uniform(0.5, 8) for _ in range(n)),
        step_s=rng.choice([1e-9, 0.001, 0.02]),
        exchange_s=rng.choice([0.0, 1e-9, 0.01, 0.3]) if declared else None,
        bandwidth_mbit_s=None if declared else rng.choice([1.0, 100.0]),
        latency_s=None if declared else rng.choice([0.0, 0.001, 0.05]),
        server_bandwidth_mbit_s=None if declared else rng.choice([None, 1.0, 1000.0]),
        compress_s=0.0,
        server_step_s=rng.choice([0.0, 0.0, 0.003]),
        node=tuple(rng.randrange(3) for _ in range(n)) if nodes else None,
        inner_bandwidth_mbit_s=1000.0 if nodes else None,
        jitter=rng.choice([0.0, 0.0, 0.2, 1.5]),
        events=tuple(events),
    )


def drawn_stage(rng: random.Random, n: int) -> Stage:
    """A sync mode with its parameters on a topology that it knows, and an end by steps, by seconds or by both."""
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
    topology = rng.choice(
        [t for t in (ParameterServer(pull_ratio=None), AllReduce()) if type(t).__module__.endswith(sync.topologies)]
    )
    workers = [
        WorkerPlan(
            local_steps=sync.local_steps if rng.random() < 0.7 or sync.local_steps == 1 else rng.randint(1, 5),
            batch=BATCH if rng.random() < 0.7 else rng.randint(1, 16),
            data_share=rng.uniform(0.1, 1),
            compression_ratio=1.0,
            predicted_cycle_s=None,
        )
        for _ in range(n)
    ]
    specs = {key: {} for key in ("sync", "topology", "aggregate", "compression", "optimizer")}
    limits = replace(
        WITHOUT,
        steps=rng.choice([None, 1, rng.randint(2, 150)]),
        seconds=rng.choice([None, 1e-9, rng.uniform(0, 2)]),
        eval_every_commits=1,
    )
    if limits.seconds is None or limits.seconds > 1e-3:  # an end that comes, and soon, also where steps cost nothing
        limits = replace(limits, steps=limits.steps or rng.randint(2, 150))
    if not topology.has_server:  # see test_seconds_end_an_all_reduce
        limits = replace(limits, steps=limits.steps or 20, seconds=None)
    return Stage(
        index=0,
        plan=StagePlan(name="swarm", until={}, workers=tuple(workers), **specs),
        topology=topology,
        sync=sync,
        aggregate=Mean(scale=rng.choice([1.0, 2.5]), weights=rng.choice(["samples", "data_share"]), **GUARDS),
        codec=Dense(),
        trainer=HollowTrainer(rng.choice([1, 1000, 25_000]), 100),
        limits=limits,
        epoch_samples=100,
    )


def drawn(seed: int) -> tuple[Cluster, Stage, int]:
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    stage = drawn_stage(rng, cluster.num_workers)
    return cluster, stage, cluster.num_workers + stage.topology.has_server


def played(seed: int) -> tuple[Sim, Seen, Stage]:
    cluster, stage, num_ranks = drawn(seed)
    return *run(cluster, stage, num_ranks, seed), stage


def run(cluster: Cluster, stage: Stage, num_ranks: int, seed: int = 0, main=None) -> tuple[Sim, Seen]:
    seen = Seen()
    speed = Speed(cluster, BATCH, seed)
    sim = Sim(num_ranks, speed, network(cluster, stage.trainer.dense_bytes), seen)

    def tick() -> None:
        assert sim.events < MOST_EVENTS, f"no end in sight after {sim.now / 1e9} s on the clock"

    sim.run(main or partial(program, stages=(stage,)), tick)
    return sim, seen


def check_time(seen: Seen, n: int, end_ns: int) -> None:
    """Every instant of every worker has one class, and the rounds of a worker follow each other without a gap.

    Only the round before the last may have been recorded as longer than the run: the worker did not know yet.
    """
    for ledger in seen.of("ledger"):
        assert sum(ledger["totals_ns"].values()) == end_ns
        assert min(ledger["totals_ns"].values()) >= 0
    cursor = dict.fromkeys(range(n), 0)
    for record in seen.of("round"):
        assert record["start_ns"] == min(cursor[record["rank"]], end_ns)
        cursor[record["rank"]] = record["start_ns"]
        for _, start, end in record["spans_ns"]:
            assert start == cursor[record["rank"]] < end
            cursor[record["rank"]] = end
        assert record["end_ns"] == cursor[record["rank"]]
    assert set(cursor.values()) == {end_ns}


def check_counts(seen: Seen, stage: Stage, end: dict) -> None:
    """What was computed was applied or dropped, or was under way at the end."""
    n = stage.num_workers
    assert end["steps"] == sum(end["steps_by"])
    steps_each = [1 if stage.sync.exchange == "gradient" else worker.local_steps for worker in stage.plan.workers]
    assert end["steps_by"] == [c * h for c, h in zip(end["commits"], steps_each, strict=True)]
    samples = [s * worker.batch for s, worker in zip(end["steps_by"], stage.plan.workers, strict=True)]
    assert end["samples"] == sum(samples)
    assert sum(end["commits"]) == end["merges"] * (stage.quorum if stage.topology.has_server else n)
    done = Counter()
    for record in seen.of("round"):
        done[record["rank"]] += record["steps"]
    for rank in range(n):
        assert end["steps_by"][rank] + end["dropped_by"][rank] <= done[rank]
        assert done[rank] - end["steps_by"][rank] - end["dropped_by"][rank] in (0, steps_each[rank])
    if end["reason"] == "steps":
        assert end["steps"] >= stage.limits.steps
        last = seen.commits[-2]["steps"] if len(seen.commits) > 1 else 0  # the last is the final snapshot
        assert not seen.commits[:-2] or seen.commits[-3]["steps"] < stage.limits.steps, "the end comes at once"
        assert last <= end["steps"]


def check_bounds(seen: Seen, stage: Stage, end: dict) -> None:
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


def check_bytes(seen: Seen, stage: Stage, end: dict) -> None:
    """Every exchange moves the dense model, and what one end sends the other end gets."""
    n, dense = stage.num_workers, stage.trainer.dense_bytes
    ledgers = {record["rank"]: record for record in seen.of("ledger")}
    if not stage.topology.has_server:
        moved = end["merges"] * (2 * (n - 1) * dense // n)
        assert all((r["bytes_up"], r["bytes_down"]) == (moved, moved) for r in ledgers.values())
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
    (end,) = seen.of("stage")
    for mail in sim._mail:
        assert not mail.messages
        assert not mail.waiters
    assert not sim._collectives
    assert end["end_ns"] <= sim.now
    if end["reason"] == "seconds" and stage.topology.has_server:
        assert end["end_ns"] >= round(stage.limits.seconds * 1e9)
    check_time(seen, stage.num_workers, end["end_ns"])
    check_counts(seen, stage, end)
    check_bounds(seen, stage, end)
    check_bytes(seen, stage, end)
    _, again, _ = played(seed)
    assert (again.records, again.commits) == (seen.records, seen.commits)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_swarm(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: {drawn(seed)[:2]}")
            raise


def plain(sync: Any, topology: Any, limits: Limits = WITHOUT, n: int = 3) -> tuple[Cluster, Stage, int]:
    """A small cluster and stage without any chance in it."""
    cluster, stage, _ = drawn(0)
    none = dict.fromkeys(("link", "bandwidth_mbit_s", "latency_s", "server_bandwidth_mbit_s", "node"))
    costs = {"step_s": 0.01, "exchange_s": 0.01, "server_step_s": 0.0, "inner_bandwidth_mbit_s": None}
    cluster = replace(cluster, compute=(1.0, 2.0, 3.0)[:n], jitter=0.0, events=(), **none, **costs)
    workers = (replace(stage.plan.workers[0], local_steps=1, batch=BATCH),) * n
    stage = replace(stage, sync=sync, topology=topology, limits=limits, plan=replace(stage.plan, workers=workers))
    return cluster, stage, n + topology.has_server


def deserting(stage: Stage, rank: int, rounds: int):
    """The program of all ranks, but this one leaves without a word in its round so-and-so."""

    async def main(node: Node) -> None:
        role = program(node, (stage,))
        if node.rank != rank:
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


@pytest.mark.parametrize("sync", [BSP(exchange="gradient"), SSP(staleness=1, local_steps=1)], ids=lambda s: str(s)[:3])
def test_a_worker_that_leaves_early_is_a_deadlock_with_names(sync: Any) -> None:
    cluster, stage, num_ranks = plain(sync, ParameterServer(pull_ratio=None))
    with pytest.raises(AshlError) as caught:
        run(cluster, stage, num_ranks, main=deserting(stage, rank=1, rounds=2))
    said = str(caught.value)
    assert said.startswith("deadlock: ")
    assert "rank 0 waits for 'pull' (stage 0, iteration 0)" in said
    assert "rank 2 waits for 'pull' (stage 0, iteration 0)" in said
    assert "rank 3 waits for 'push' (stage 0, iteration 0) from anyone" in said
    assert "rank 1" not in said, "it has left and waits for nothing"


def test_a_member_that_leaves_an_all_reduce_is_a_deadlock_with_names() -> None:
    cluster, stage, num_ranks = plain(LocalSGD(local_steps=1), AllReduce())
    with pytest.raises(AshlError, match=r"deadlock: rank 0 is in AllReduce with ranks \[0, 1, 2\]; rank 2 is in "):
        run(cluster, stage, num_ranks, main=deserting(stage, rank=1, rounds=2))


def test_a_message_that_nobody_receives_is_found() -> None:
    """The check of the swarm, checked."""
    cluster, stage, num_ranks = plain(
        BSP(exchange="gradient"), ParameterServer(pull_ratio=None), replace(WITHOUT, steps=6)
    )

    async def main(node: Node) -> None:
        if node.rank == 0:
            await node.send(1, ("stray", 0, 0))
        await program(node, (stage,))

    sim, _ = run(cluster, stage, num_ranks, main=main)
    assert list(sim._mail[1].messages) == [("stray", 0, 0)]


@pytest.mark.xfail(strict=True, reason="the word of rank 0 rides on a vector, and without gradients there is none")
def test_seconds_end_an_all_reduce() -> None:
    cluster, stage, num_ranks = plain(BSP(exchange="gradient"), AllReduce(), replace(WITHOUT, seconds=0.5))
    _, seen = run(cluster, stage, num_ranks)
    assert seen.of("stage")[0]["reason"] == "seconds"

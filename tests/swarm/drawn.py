"""Shared by the swarms: clusters drawn at random, a run on one that remembers everything, and the
books of time.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ashl.aggregate.mean import Mean
from ashl.cluster.network import make_network
from ashl.cluster.spec import Churn, Cluster, Event
from ashl.cluster.speed import Speed
from ashl.compression.none import Dense
from ashl.learn.trainer import SizeOnlyTrainer
from ashl.outer.average import Average
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.records import Record, Rounds, Snapshot
from ashl.runtime.sim import Sim
from ashl.size_only import Vector
from ashl.stage.contract import StageConfig, extra_ranks
from tests.support import befallen, flat

BATCH = 8
WHAT = ("compute", "link")
REPEATED = 8  # one seed in so many is played twice
MOST_EVENTS = 50_000  # of one run: many times what the longest needs


def each(seeds: Iterable[int], check: Callable[[int], None], drawn: Callable[[int], Any]) -> None:
    """Check every seed; a failure says which one it was, and what it draws."""
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: {drawn(seed)}")
            raise


@dataclass
class Seen:
    """An observer that keeps everything."""

    rounds: Rounds = "all"
    stop_reason: str | None = None
    scores: dict | None = None

    def __post_init__(self) -> None:
        self.records: list[dict] = []
        self.commits: list[dict] = []  # the counts after each commit
        self.models: dict[int, Any] = {}  # each rank's last

    def emit(self, record: Record) -> None:
        self.records.append(flat(record))

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        self.commits.append(flat(record))
        self.models[record.rank] = vector

    def of(self, kind: str) -> list[dict]:
        return [record for record in self.records if record["kind"] == kind]


GUARDS = {"staleness_discount": None, "clip_norm": None, "max_staleness": None}


def drawn_cluster(rng: random.Random) -> Cluster:
    """One to eight workers with any costs, behind declared exchange times or links with ports."""
    n = rng.randint(1, 8)
    equal = rng.random() < 0.25  # ties everywhere
    declared = rng.random() < 0.5
    nodes = not declared and rng.random() < 0.4
    events = [
        Event(
            time_s=rng.uniform(0, 2),
            worker=rng.randrange(n),
            **{rng.choice(WHAT): rng.uniform(0.3, 9)},
        )
        for _ in range(rng.choice([0, 0, 1, 4]))
    ]
    return Cluster(
        num_workers=None,
        compute_spread=0.0,
        compute=tuple(1.0 if equal else rng.uniform(0.5, 8) for _ in range(n)),
        link=None
        if rng.random() < 0.3
        else tuple(1.0 if equal else rng.uniform(0.5, 8) for _ in range(n)),
        step_s=rng.choice([2e-9, 0.001, 0.02]),
        exchange_s=rng.choice([0.0, 1e-9, 0.01, 0.3]) if declared else None,
        bandwidth_mbit_s=None if declared else rng.choice([1.0, 100.0]),
        latency_s=None if declared else rng.choice([0.0, 0.001, 0.05]),
        server_bandwidth_mbit_s=None if declared else rng.choice([None, 1.0, 1000.0]),
        compress_s=0.0,
        server_step_s=rng.choice([0.0, 0.0, 0.003]),
        node=tuple(rng.randrange(3) for _ in range(n)) if nodes else None,
        intra_node_bandwidth_mbit_s=1000.0 if nodes else None,
        intra_node_latency_s=None,
        jitter=rng.choice([0.0, 0.0, 0.2, 1.5]),
        events=tuple(events),
        churn=None,
        failure_detection_s=0.02,
    )


def drawn_events(rng: random.Random, n: int, until_s: float) -> list[Event]:
    """Draw failures and rejoins of each worker, and times at which its link is down."""
    events = []
    for worker in range(n):
        time_s, there = 0.0, True
        while rng.random() < 0.6:
            time_s += rng.choice([0.0, 0.001, rng.expovariate(2 / until_s)])
            events.append(Event(time_s=time_s, worker=worker, fail=there, rejoin=not there))
            there = not there
        for _ in range(rng.choice([0, 0, 1, 2])):
            down_s = rng.choice([1e-9, 0.005, rng.uniform(0, until_s)])
            events.append(Event(time_s=rng.uniform(0, until_s), worker=worker, link_down=down_s))
    return events


def befallen_cluster(rng: random.Random) -> Cluster:
    cluster = drawn_cluster(rng)
    until_s = rng.choice([0.05, 0.5, 3.0])
    churn = (
        Churn(mtbf_s=rng.uniform(0.1, 3), mttr_s=rng.uniform(0.01, 1))
        if rng.random() < 0.4
        else None
    )
    events = sorted(
        (*cluster.events, *drawn_events(rng, cluster.num_workers, until_s)),
        key=lambda event: event.time_s,
    )
    failure_detection_s, step_s = rng.choice([0.0, 0.02, 0.3]), max(0.001, cluster.step_s or 0.0)
    return replace(
        cluster,
        step_s=step_s,
        events=tuple(events),
        churn=churn,
        failure_detection_s=failure_detection_s,
    )


def drawn_limits(rng: random.Random) -> Limits:
    """An end that comes, and soon, also where steps cost next to nothing."""
    steps, seconds = (
        rng.choice([None, 1, rng.randint(2, 150)]),
        rng.choice([None, 1e-9, rng.uniform(0, 2)]),
    )
    if seconds is None or seconds > 1e-3:
        steps = steps or rng.randint(2, 150)
    return replace(NO_LIMITS, steps=steps, seconds=seconds, eval_every_commits=1)


def bound(rng: random.Random, sync: Any, topology: Any, n: int, limits: Limits) -> StageConfig:
    """Draw a stage of this sync mode; its workers mostly have equal settings."""
    local_steps = sync.local_steps if isinstance(sync.local_steps, int) else 4
    workers = [
        WorkerPlan(
            local_steps=local_steps
            if rng.random() < 0.7 or local_steps == 1
            else rng.randint(1, 5),
            batch=BATCH if rng.random() < 0.7 else rng.randint(1, 16),
            data_share=rng.uniform(0.1, 1),
            compression_ratio=1.0,
            predicted_cycle_s=None,
        )
        for _ in range(n)
    ]
    groups = "sync", "topology", "aggregate", "outer", "compression", "overlap", "optimizer"
    specs = {key: {} for key in groups}
    return StageConfig(
        index=0,
        plan=StagePlan(name="swarm", until={}, workers=tuple(workers), **specs),
        topology=topology,
        sync=sync,
        aggregate=Mean(
            scale=rng.choice([1.0, 2.5]), weights=rng.choice(["samples", "data_share"]), **GUARDS
        ),
        outer=Average(),
        codec=Dense(),
        trainer=SizeOnlyTrainer(rng.choice([1, 1000, 25_000]), 100),
        limits=limits,
        epoch_samples=100,
    )


def chained(stages: list[StageConfig]) -> list[StageConfig]:
    """Return the stages as those of one run: the last one ends by the limits alone."""
    last = stages[-1]
    last = replace(last, plan=replace(last.plan, until={}))
    return [*(replace(stage, following=True) for stage in stages[:-1]), last]


def run(
    cluster: Cluster, stages: Sequence[StageConfig], seed: int = 0, main: Callable | None = None
) -> tuple[Sim, Seen]:
    """Play the stages, or `main`, on all ranks. Fails where no end is in sight."""
    seen, first = Seen(), stages[0]
    num_ranks = cluster.num_workers + extra_ranks(first.topology, first.sync, first.nodes)
    sim = Sim(
        num_ranks,
        Speed(cluster, BATCH, seed),
        make_network(cluster, first.trainer.dense_bytes),
        seen,
    )

    def tick() -> None:
        assert sim.events < MOST_EVENTS, f"no end in sight after {sim.now_ns / 1e9} s on the clock"

    sim.run(main or befallen(sim, cluster, seed, tuple(stages)), tick)
    return sim, seen


def check_time(seen: Seen, n: int, end_ns: int) -> None:
    """The books of workers that are all there until the end."""
    assert set(check_books(seen, n, end_ns).values()) == {end_ns}


def check_books(
    seen: Seen, n: int, end_ns: int, missing: int = 1, goes_back: bool = False
) -> dict[int, int]:
    """Check the time classes and rounds of every worker; return the end of each worker's last
    round.

    Every instant of every worker has one class, also while it is failed, and its rounds follow each
    other without a gap. Round numbers do so, too, with exceptions at each rejoin. One number may be
    missing (merged before its worker could record it) or repeated (its report was lost in transit).
    With collectives two may be `missing`, since work in flight at the failure counts as dropped.
    With `goes_back` a failure lets a rank repeat its last round, which has one more record then.

    Only the round before the last may have been recorded as longer than the run, since the worker
    did not know the end yet.
    """
    for ledger in seen.of("TimeTotals"):
        assert sum(ledger["totals_ns"].values()) == end_ns, ledger
        assert min(ledger["totals_ns"].values()) >= 0
    cursor, following = dict.fromkeys(range(n), 0), dict.fromkeys(range(n), 0)
    failures = len(seen.of("WorkerFailed")) if goes_back else 0
    repeats = dict.fromkeys(range(n), failures)
    returns = Counter(
        rank for record in seen.of("WorkerRejoined") for rank in [record["rank"]] * missing
    )
    for record in seen.of("Round"):
        ahead = record["round"] - following[record["rank"]]
        if ahead == -1 and repeats[record["rank"]]:
            repeats[record["rank"]] -= 1
        else:
            returns[record["rank"]] -= abs(ahead)
        assert returns[record["rank"]] >= 0, record
        following[record["rank"]] = record["round"] + 1
        assert record["start_ns"] == min(cursor[record["rank"]], end_ns)
        cursor[record["rank"]] = record["start_ns"]
        for _, start, end in record["spans_ns"]:
            assert start == cursor[record["rank"]] < end
            cursor[record["rank"]] = end
        assert record["end_ns"] == cursor[record["rank"]]
    return cursor


def check_repeat(seed: int, seen: Seen, play: Callable[[], Seen]) -> None:
    """Check that a run of the same seed has equal records."""
    if seed % REPEATED == 0:
        again = play()
        assert (again.records, again.commits) == (seen.records, seen.commits)


def check_mail(sim: Sim) -> None:
    """Nothing was lost on the way: no message lies about, and nobody waits for one."""
    assert not [mail.messages for mail in sim._mail if mail.messages]
    assert not [mail.waiters for mail in sim._mail if mail.waiters]
    assert not sim.collective_queues.list_pending()

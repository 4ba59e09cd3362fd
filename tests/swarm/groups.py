"""Many small random clusters through partial all-reduce, without gradients.

No worker waits for ever, no message is lost, every worker is drained, and the accounting balances
to the nanosecond, the step and the byte. A planted early exit is detected.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.planning.predict import NO_LIMITS
from ashl.stage.contract import StageConfig
from ashl.sync.ripples_smart import RipplesSmart
from ashl.topology.partial_all_reduce import PartialAllReduce
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
from tests.swarm.stages import check_borders


def drawn_sync(rng: random.Random, n: int) -> Any:
    scheduler = rng.choice(["random", "smart", "static", "first_come"]) if n > 1 else "static"
    fields: dict[str, Any] = {"local_steps": rng.randint(1, 4)}
    if scheduler != "static":
        fields["group_size"] = rng.randint(2, n)
    if scheduler == "smart":
        fields |= {"threshold": rng.randint(1, 6), "inter_intra": rng.random() < 0.5}
    return conf_option("sync", f"ripples_{scheduler}", **fields)


def drawn(seed: int) -> tuple[Cluster, list[StageConfig]]:
    """One to three schedulers after each other."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    n = cluster.num_workers
    topology = PartialAllReduce(workers_per_node=rng.choice([None, 1, 2, 3]))
    first = bound(rng, drawn_sync(rng, n), topology, n, drawn_limits(rng))
    stages = [replace(first, seed=seed, nodes=cluster.node)]
    if rng.random() < 0.5:
        limits = replace(
            NO_LIMITS, steps=rng.randint(20, 300), eval_every_commits=rng.choice([1, 4])
        )
        stages = [
            replace(
                stages[0],
                index=index,
                sync=drawn_sync(rng, n),
                plan=replace(first.plan, until={"commits": rng.uniform(0, 8)}),
                limits=limits,
            )
            for index in range(rng.randint(2, 3))
        ]
    return cluster, [replace(stage, following=stage is not stages[-1]) for stage in stages]


def check_counts(seen: Seen, stage: StageConfig, end: dict) -> None:
    """Computed work was averaged or dropped, or was in flight at the end."""
    n = stage.num_workers
    steps_each = [worker.local_steps for worker in stage.plan.workers]
    assert end["steps"] == sum(end["steps_by"])
    assert end["steps_by"] == [c * h for c, h in zip(end["commits"], steps_each, strict=True)]
    done, met = Counter(), Counter()
    for record in seen.of("Round"):
        done[record["rank"]] += record["steps"]
        met[record["rank"]] += len(record["group"]) > 1 and not record["dropped"]
    for rank in range(n):
        assert done[rank] - end["steps_by"][rank] - end["dropped_by"][rank] in (0, steps_each[rank])
        assert met[rank] == end["groups"][rank] <= end["commits"][rank]
    if end["reason"] == "steps":
        assert end["steps"] >= stage.limits.steps


def check_groups(seen: Seen, stage: StageConfig) -> None:
    """Every member of a group was in it, and at the same point of the order."""
    meetings = Counter()
    for record in seen.of("Round"):
        if len(record["group"]) > 1 and not record["dropped"]:
            assert record["rank"] in record["group"]
            meetings[tuple(record["group"])] += 1
    assert all(count % len(group) == 0 for group, count in meetings.items())
    size = stage.sync.group_size
    if size and not (isinstance(stage.sync, RipplesSmart) and stage.sync.inter_intra):
        assert all(len(group) <= size for group in meetings)


def check(seed: int) -> None:
    """Every worker's work counts at a stage boundary, and the clock adds up for all; a plan reaches
    its last stage.
    """
    cluster, stages = drawn(seed)
    n = cluster.num_workers
    sim, seen = run(cluster, stages, seed)
    ends = seen.of("StageEnd")
    check_mail(sim)
    check_borders(seen, stages, n)
    check_time(seen, n, ends[-1]["end_ns"])
    check_counts(seen, stages[0], ends[-1])
    if len(stages) == 1:
        check_groups(seen, stages[0])
    assert not any(
        record["dropped"] for record in seen.of("Round") if record["stage"] + 1 < len(ends)
    )
    for end, stage in zip(ends[:-1], stages, strict=False):
        assert end["reason"] == "commits"
        assert sum(end["dropped_by"]) == 0
        assert sum(end["commits"]) >= n * stage.plan.until["commits"]
    ledgers = [record for record in seen.of("TimeTotals") if record["rank"] < n]
    assert sum(r["bytes_up"] for r in ledgers) == sum(r["bytes_down"] for r in ledgers)
    check_repeat(seed, seen, lambda: run(cluster, stages, seed)[1])

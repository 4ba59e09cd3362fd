"""The swarm through gossip with workers that fail and rejoin: whatever graph and mode are drawn, the
run ends, nobody waits for the dead, books balance, and what is counted was merged."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from ashl.cluster.spec import Churn, Cluster, Event
from ashl.compression.none import Dense
from ashl.errors import AshlError, UsageError
from ashl.planning.legal import carried_by
from ashl.stage.rule import CHURN
from ashl.stage.stage import Stage
from ashl.sync.gossip_pga import GossipPGA
from ashl.topology.gossip import RoamingRule
from ashl.topology.graph import NAMES
from tests.swarm.drawn import check_books, drawn_cluster, each, run
from tests.swarm.test_swarm_churn import drawn_events
from tests.swarm.test_swarm_gossip import drawn_stages

SEEDS, MANY = 90, 6_000
FIRST = 40_000


def drawn(seed: int) -> tuple[Cluster, list[Stage]] | None:
    """None where a mode does not go on, or cannot keep to the graph."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    n, until_s = cluster.num_workers, rng.choice([0.05, 0.5, 3.0])
    stages = drawn_stages(rng, n)
    while any(CHURN not in carried_by(stage.topology, stage.sync) for stage in stages):
        stages = drawn_stages(rng, n)
    other = random.Random(f"{seed} averages")
    if all(stage.sync.in_rounds for stage in stages) and other.random() < 0.5:
        stages = [with_averages(other, stage) for stage in stages]
    churn = Churn(mtbf_s=rng.uniform(0.3, 3), mttr_s=rng.uniform(0.01, 1)) if rng.random() < 0.4 else None
    events = drawn_events(rng, n, until_s)
    if not all(isinstance(stage.sync, RoamingRule) and stage.sync.comes_back for stage in stages):
        churn, left = None, {event.worker: event for event in reversed(by_time(events)) if event.fail}
        events = [event for event in events if not event.join and (not event.fail or left[event.worker] is event)]
    return struck(rng, cluster, stages, events, churn, reshards=seed % 2 == 0)


def with_averages(rng: random.Random, stage: Stage) -> Stage:
    """The same with averages of all, now and then."""
    mode = GossipPGA(local_steps=rng.randint(1, 4), period=rng.choice([None, 1, 2, 5]))
    return replace(stage, sync=mode, codec=Dense(), topology=replace(stage.topology, graph=rng.choice(NAMES)))


def by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time_s)


def struck(
    rng: random.Random,
    cluster: Cluster,
    stages: Sequence[Stage],
    events: Iterable[Event],
    churn: Churn | None,
    reshards: bool,
) -> tuple[Cluster, list[Stage]] | None:
    """The cluster with that to befall it, and the stages on it, with an end; None where a mode cannot keep to the
    graph."""
    step_s, detect_s = max(0.001, cluster.step_s or 0.0), rng.choice([0.0, 0.02, 0.3])
    events = tuple(by_time((*cluster.events, *events)))
    cluster = replace(cluster, step_s=step_s, events=events, churn=churn, detect_s=detect_s)
    try:
        for stage in stages:
            stage.topology.check(stage.sync, cluster.num_workers, stage.seed)
    except UsageError:
        return None
    steps, seconds = rng.randint(2, 150), rng.choice([0.5, 5.0, 5.0 if churn else None])
    common = {
        "limits": replace(stages[0].limits, steps=steps, seconds=seconds),
        "trainer": stages[0].trainer,
        "min_workers": 1 if rng.random() < 0.8 else rng.randint(1, cluster.num_workers),
        "joins": cluster.joins,
        "reshards": reshards,
        "elastic": cluster.loses,
    }
    return cluster, [replace(stage, **common) for stage in stages]


def check(seed: int) -> None:
    if (chosen := drawn(seed)) is None:
        return
    cluster, stages = chosen
    try:
        _, seen = run(cluster, stages, seed)
    except AshlError as error:
        if not any(said in str(error) for said in ("workers are left", "left falls apart")):
            raise
        return
    end, n = seen.of("stage")[-1], cluster.num_workers
    check_books(seen, n, end["end_ns"])
    assert end["steps"] == sum(end["steps_by"])
    applied, lives = Counter(), Counter(record["rank"] for record in seen.of("joined"))
    for record in seen.of("round"):
        applied[record["rank"]] += 0 if record["dropped"] else record["steps"]
    for rank in range(n):
        most = max((stage.worker(rank).local_steps for stage in stages), default=0)
        counted = end["steps_by"][rank]
        if stages[0].home < n:  # of the lost, a message of its last round may have come; of a budget, one clock says
            assert counted <= applied[rank] + most or end["end_ns"] == stages[0].judge.deadline_ns
            continue
        assert counted <= applied[rank] <= counted + most * (1 + lives[rank]), "a report that was on its way"
    if end["reason"] == "steps":
        assert end["steps"] >= stages[0].limits.steps


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, 30))
def test_a_swarm(first: int) -> None:
    each(range(first, first + 30), check, drawn)


@pytest.mark.parametrize("seed", [43_452, 44_730])
def test_the_home_rank_is_lost_in_the_last_round(seed: int) -> None:
    """The others are through as it is, and do not know of it: one of them records the end."""
    each(range(seed, seed + 1), check, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, FIRST + MANY, 500))
def test_a_large_swarm(first: int) -> None:
    each(range(first, first + 500), check, drawn)

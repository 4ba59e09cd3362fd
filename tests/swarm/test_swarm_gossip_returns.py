"""The swarm through gossip in rounds with workers that fail and come back, as often as they like: the run ends, nobody
waits for one that is not there, books balance, all who work in a round agree on who is in it, and what they mix has
weights that add up to 1 both ways."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from ashl.cluster.spec import Churn, Cluster
from ashl.errors import AshlError
from ashl.learn.trainer import SizeOnlyTrainer
from ashl.planning.legal import carried_by
from ashl.stage.rule import CHURN
from ashl.stage.stage import Stage
from ashl.topology import gossip
from ashl.topology.gossip import RoundRule
from tests.swarm.drawn import check_books, drawn_cluster, each, run
from tests.swarm.test_swarm_churn import drawn_events
from tests.swarm.test_swarm_gossip import drawn_stages
from tests.swarm.test_swarm_gossip_churn import struck

SEEDS, MANY = 60, 6_000
FIRST = 60_000


def drawn_churn(rng: random.Random, cluster: Cluster) -> Churn:
    """Workers that are there for some rounds: who fails sooner than others have heard of the last one gets nowhere."""
    a_way = 0.5 / cluster.bandwidth_mbit_s if cluster.bandwidth_mbit_s else cluster.exchange_s or 0.0
    round_s = (
        10 * max(cluster.compute) * (cluster.step_s or 0.0)
        + 2 * cluster.num_workers * max(cluster.link or (1,)) * a_way
    )
    mtbf_s = rng.uniform(3, 30) * cluster.num_workers * max(round_s, 0.05)
    return Churn(mtbf_s=mtbf_s, mttr_s=rng.uniform(0.01, 0.5) * mtbf_s)


def drawn(seed: int) -> tuple[Cluster, list[Stage]] | None:
    """None where a mode cannot keep to the graph."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    n, until_s = cluster.num_workers, rng.choice([0.05, 0.5, 3.0])
    stages = drawn_stages(rng, n)
    while not all(isinstance(own.sync, RoundRule) and CHURN in carried_by(own.topology, own.sync) for own in stages):
        stages = drawn_stages(rng, n)
    churn = drawn_churn(rng, cluster) if rng.random() < 0.4 else None
    chosen = struck(rng, cluster, stages, drawn_events(rng, n, until_s), churn, reshards=seed % 2 == 0)
    if chosen is None:
        return None
    limits = replace(chosen[1][0].limits, eval_every_s=rng.choice([None, 0.05]))
    trainer = SizeOnlyTrainer(25_000, 100) if churn else stages[0].trainer  # what is said of it is less than that
    return chosen[0], [replace(stage, limits=limits, trainer=trainer) for stage in chosen[1]]


class Members:
    """Who takes part, as each of those who work in a round sees it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[int, int], dict[tuple[int, int], Stage]] = defaultdict(dict)  # by round, rank and life
        self.heard: list[tuple[tuple[int, int], tuple[int, int], int]] = []  # round, by whom and whom
        last = dict[tuple[int, int], tuple[int, int]]()
        work, hear = gossip.local_work, gossip.hear

        async def noted(node: Any, stage: Stage, state: Any) -> Any:
            now, who = (stage.index, state.k), (node.rank, node.life)
            assert now > last.get(who, (-1, -1)), "a round that somebody begins twice"
            self.seen[now][who], last[who] = stage, now
            return await work(node, stage, state)

        async def noting(node: Any, stage: Stage, state: Any, k: int) -> Any:
            messages = await hear(node, stage, state, k)
            self.heard += [((stage.index, k), (node.rank, node.life), rank) for rank in messages]
            return messages

        patch.setattr(gossip, "local_work", noted)
        patch.setattr(gossip, "hear", noting)

    def check(self, losses: Counter[int]) -> None:
        """Rounds of a life that has ended, of which nobody has heard, others may begin without it."""
        for now, stages in self.seen.items():
            stay = {stage.workers for (rank, life), stage in stages.items() if losses[rank] <= life}
            assert len(stay) <= 1, f"stage and round {now}: {stay}"
            for (rank, _), stage in stages.items():
                assert rank in stage.workers
                if stage.gone:
                    check_weights(stage)
        for now, who, whom in self.heard:
            there = self.seen[now][who].workers
            assert any(stage.workers == there for (rank, _), stage in self.seen[now].items() if rank == whom), (
                now,
                whom,
            )


def check_weights(stage: Stage) -> None:
    """They add up to 1 over who is there: at everyone, and of everyone."""
    for each_round in stage.once(gossip.rounds_in):
        columns = Counter[int]()
        for rank in stage.workers:
            row = each_round.rows[rank]
            assert set(row) <= set(stage.workers)
            assert min(row.values()) >= 0
            assert stage.sync.columns or abs(sum(row.values()) - 1) < 1e-9
            columns.update(row)
        assert all(abs(columns[rank] - 1) < 1e-9 for rank in stage.workers)


def check(seed: int) -> None:
    if (chosen := drawn(seed)) is None:
        return
    cluster, stages = chosen
    with pytest.MonkeyPatch.context() as patch:
        members = Members(patch)
        try:
            _, seen = run(cluster, stages, seed)
        except AshlError as error:
            if not any(said in str(error) for said in ("workers are left", "left falls apart")):
                raise
            return
    members.check(Counter(record["rank"] for record in seen.of("lost")))
    end, n = seen.of("stage")[-1], cluster.num_workers
    check_books(seen, n, end["end_ns"], unheard=True)
    assert end["steps"] == sum(end["steps_by"])
    applied, lives = Counter(), Counter(record["rank"] for record in seen.of("joined"))
    for record in seen.of("round"):
        applied[record["rank"]] += 0 if record["dropped"] else record["steps"]
    for rank in range(n):  # of each life, a message of its last round may have come; of a budget, one clock says
        most = max(stage.worker(rank).local_steps for stage in stages) * (1 + lives[rank])
        assert end["steps_by"][rank] <= applied[rank] + most or end["end_ns"] == stages[0].judge.deadline_ns
    if end["reason"] == "steps":
        assert end["steps"] >= stages[0].limits.steps


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, 30))
def test_a_swarm(first: int) -> None:
    each(range(first, first + 30), check, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, FIRST + MANY, 500))
def test_a_large_swarm(first: int) -> None:
    each(range(first, first + 500), check, drawn)

"""Random gossip runs are resumed from a checkpoint at a random moment.

A resumed run has the same messages to the end, for every graph and mode.
"""

import math
import random
from collections.abc import Mapping
from functools import partial

import pytest

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Speed
from ashl.runtime.effects import Save
from ashl.runtime.plain_state import decode, encode, to_plain
from ashl.runtime.rank_checkpoint import saved_rank
from ashl.runtime.sim import Sim, restore_ranks
from ashl.stage.contract import StageConfig, extra_ranks
from ashl.stage.program import program
from tests.swarm.drawn import BATCH, Seen, each
from tests.swarm.test_swarm_gossip import drawn

Checkpoints = list[tuple[bytes, int, int]]  # each with its moment, and how much had been said


def play(
    cluster: Cluster,
    stages: list[StageConfig],
    seen: Seen,
    at_ns: float,
    file: bytes = b"",
    since: int = 0,
) -> Checkpoints:
    """Run from the beginning or from a checkpoint; return the checkpoint that it makes."""
    first, kept = stages[0], Checkpoints()
    num_ranks = cluster.num_workers + extra_ranks(first.topology, first.sync, first.nodes)
    speed = Speed(cluster, BATCH, 0)
    sim = Sim(num_ranks, speed, network(cluster, first.trainer.dense_bytes), seen)

    def keep(saves: Mapping[int, Save]) -> float:
        ranks = [saved_rank(sim.contexts[rank], save, speed) for rank, save in saves.items()]
        kept.append((encode(to_plain(ranks)), sim.now_ns, len(seen.records)))
        return math.inf

    sim.save, sim.checkpoint_due_ns = keep, at_ns
    begin = file and partial(restore_ranks, ranks=decode(file), time_ns=since)
    sim.run(partial(program, stages=tuple(stages)), lambda: None, begin or None)
    return kept


def check(seed: int) -> None:
    if (chosen := drawn(seed)) is None:
        return
    cluster, stages = chosen
    unpaused, whole = Seen(), Seen()
    play(cluster, stages, unpaused, math.inf)
    moment = random.Random(seed).uniform(0, unpaused.of("StageEnd")[-1]["end_ns"])
    for file, since, said in play(cluster, stages, whole, moment):
        again = Seen()
        again.records = whole.records[:said]
        play(cluster, stages, again, math.inf, file, since)
        assert repr(again.records) == repr(whole.records)


def test_a_swarm() -> None:
    each(range(16), check, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_a_large_swarm(first: int) -> None:
    each(range(first, first + 250), check, drawn)

"""Random gossip runs are resumed from a checkpoint at a random moment.

A checkpoint changes nothing, and a resumed run has the same messages to the end, for every graph
and mode.
"""

import io
import random
from functools import partial

import pytest
import torch

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Speed
from ashl.runtime.sim import Sim, resume
from ashl.stage.program import program
from ashl.stage.stage import Stage, extra_ranks
from tests.swarm.drawn import BATCH, Seen, each
from tests.swarm.test_swarm_gossip import drawn

CheckpointPartSaved = list[tuple[bytes, int]]  # each checkpoint, and how much had been said


def play(
    cluster: Cluster,
    stages: list[Stage],
    seen: Seen,
    save_at_ns: int | None = None,
    file: bytes = b"",
) -> CheckpointPartSaved:
    """Run from the beginning or from a checkpoint; return the checkpoint that it makes."""
    first, kept = stages[0], CheckpointPartSaved()
    num_ranks = cluster.num_workers + extra_ranks(first.topology, first.sync, first.nodes)
    sim = Sim(
        num_ranks, Speed(cluster, BATCH, 0), network(cluster, first.trainer.dense_bytes), seen
    )

    def keep(document: dict) -> None:
        written = io.BytesIO()
        torch.save(document, written)
        kept.append((written.getvalue(), len(seen.records)))

    if save_at_ns is not None:
        sim.save_at(save_at_ns, keep)
    saved = file and {**torch.load(io.BytesIO(file), weights_only=True), "packages": ("ashl",)}
    begin = partial(resume, saved=saved) if saved else None
    sim.run(partial(program, stages=tuple(stages)), lambda: None, begin)
    return kept


def check(seed: int) -> None:
    if (chosen := drawn(seed)) is None:
        return
    cluster, stages = chosen
    whole, seen = Seen(), Seen()
    play(cluster, stages, whole)
    moment = int(random.Random(seed).uniform(0, whole.of("stage")[-1]["end_ns"]))
    kept = play(cluster, stages, seen, save_at_ns=moment)
    assert repr(seen.records) == repr(whole.records)
    for file, said in kept:
        again = Seen()
        again.records = whole.records[:said]
        play(cluster, stages, again, file=file)
        assert repr(again.records) == repr(whole.records)


def test_a_swarm() -> None:
    each(range(16), check, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_a_large_swarm(first: int) -> None:
    each(range(first, first + 250), check, drawn)

"""Random runs are resumed from checkpoints at random moments, also with workers that fail and rejoin.

A resumed run has the same records to the end: of every topology, graph and mode.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import Speed
from ashl.errors import AshlError
from ashl.runtime.churn import Churn
from ashl.runtime.effects import Save
from ashl.runtime.plain_state import decode, encode
from ashl.runtime.rank_checkpoint import capture_rank, next_due_ns
from ashl.runtime.sim import Sim, restore_ranks
from ashl.stage.contract import StageConfig, extra_ranks
from ashl.stage.program import peers_of, run_stages
from tests.swarm.drawn import BATCH, Seen, befallen_cluster
from tests.swarm.gossip import drawn_stages, fit_graph

Checkpoints = list[tuple[tuple[bytes, bytes], int, int]]  # files, its moment, records until then
Drawn = Callable[[int], tuple[Cluster, list[StageConfig]] | None]
# In a run that needs more epochs, no round ends before the next failure.
MOST_EPOCHS, NO_PROGRESS = 300, "no round ends"


def play(
    drawn_run: tuple[Cluster, list[StageConfig]],
    seed: int,
    seen: Seen,
    every_s: float | None,
    files: tuple[bytes, bytes] | None = None,
    since: int = 0,
) -> tuple[Checkpoints, str]:
    """Run from the beginning or from a checkpoint; return the checkpoints, and why it failed."""
    cluster, stages = drawn_run
    first, kept = stages[0], Checkpoints()
    num_ranks = cluster.num_workers + extra_ranks(first.topology, first.sync, first.nodes)
    speed = Speed(cluster, BATCH, 0)
    sim = Sim(num_ranks, speed, make_network(cluster, first.trainer.dense_bytes), seen)
    start, peers = partial(run_stages, stages=tuple(stages)), partial(peers_of, stages)
    churn = Churn(sim, cluster, seed, first.min_workers, peers, start, first.topology.regroups)

    def keep(saves: Mapping[int, Save]) -> float:
        ranks = [capture_rank(ctx, saves.get(ctx.rank), speed) for ctx in sim.contexts]
        content = encode(ranks), encode(churn.save_state())
        kept.append((content, sim.now_ns, len(seen.records)))
        return next_due_ns(sim.now_ns, every_s)

    def check_progress() -> None:
        if churn.epoch.number > MOST_EPOCHS:
            raise AshlError(NO_PROGRESS)

    sim.save, sim.checkpoint_due_ns, begin = keep, next_due_ns(since, every_s), None
    if files is not None:
        ranks, epoch = decode(files[0]), churn.restore(decode(files[1]))
        begin = partial(restore_ranks, ranks=ranks, time_ns=since, epoch=epoch)
    try:
        sim.run(start, check_progress, begin)
    except AshlError as error:
        if "deadlock" in str(error):
            raise
        return kept, str(error)
    return kept, ""


def check_resumed(drawn_by: Drawn, seed: int) -> None:
    if (chosen := drawn_by(seed)) is None:
        return
    unpaused, whole = Seen(), Seen()
    play(chosen, seed, unpaused, None)
    times_ns = [0, *(record.get("end_ns", 0) for record in unpaused.records)]
    every_s = max(1e-6, random.Random(seed).uniform(0.3, 1) * max(times_ns) / 1e9)
    checkpoints, failure = play(chosen, seed, whole, every_s)
    if failure == NO_PROGRESS:
        return
    for files, since, said in checkpoints:
        again = Seen()
        again.records = whole.records[:said]
        assert play(chosen, seed, again, every_s, files, since)[1] == failure
        assert repr(again.records) == repr(whole.records)


def drawn_gossip(seed: int) -> tuple[Cluster, list[StageConfig]] | None:
    """Gossip with failures; None where the mode cannot keep to the graph."""
    rng = random.Random(seed)
    cluster = befallen_cluster(rng)
    stages = drawn_stages(rng, cluster.num_workers)
    if not fit_graph(stages, cluster.num_workers):
        return None
    if any(stage.topology.has_fixed_size for stage in stages):
        return None
    return cluster, [replace(stage, elastic=True, joins=True) for stage in stages]

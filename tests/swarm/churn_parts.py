"""The swarm with workers that fail and rejoin where servers receive parts: buckets of a gradient,
fragments of the model, or shards at several servers. The run ends, books balance, and no push is
counted twice or forgotten.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ashl.cluster.spec import Cluster
from ashl.compression.contract import Layer
from ashl.compression.wrappers import wrap_codec
from ashl.overlap.priority import Priority
from ashl.overlap.slices import Slices
from ashl.overlap.tictac import TicTac
from ashl.overlap.wfbp import WFBP
from ashl.planning.predict import NO_LIMITS
from ashl.stage.contract import StageConfig
from ashl.stage.fragment import Fragment
from ashl.topology.parameter_server import ParameterServer
from ashl.topology.sharded_server import ShardedServer
from tests.conf_option import conf_option
from tests.swarm.churn import play_counted
from tests.swarm.drawn import befallen_cluster, bound, chained, check_books
from tests.swarm.overlap import drawn_parts
from tests.swarm.stages import drawn_sync, plain


def fragments(stage: StageConfig, cuts: Sequence[int]) -> tuple[Fragment, ...]:
    return tuple(
        Fragment(((start, stop),), (Layer("", (stop - start,)),), stage.codec, stage.outer, first=k)
        for k, (start, stop) in enumerate(pairwise(cuts))
    )


def in_buckets(rng: random.Random, stage: StageConfig) -> StageConfig:
    """Gradients in buckets, merged as a whole or one by one."""
    size = stage.trainer.num_params
    slices = rng.randint(max(1, size // 20), size)
    overlaps: list[object] = [WFBP(), TicTac(plan="layers")]
    if stage.sync.in_rounds and stage.quorum == stage.num_workers:
        credit = rng.randint(1, 5)
        alone = Slices(slice=slices), Priority(plan="layers", slice=slices, credit=credit)
        overlaps = [*overlaps, *alone, *alone]
    return replace(stage, overlap=rng.choice(overlaps), layer_groups=drawn_parts(rng, size))


def in_fragments(rng: random.Random, stage: StageConfig) -> StageConfig:
    """Local steps, while fragments of the model are exchanged in turn."""
    size = stage.trainer.num_params
    cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randint(0, 3)))})
    stage = replace(stage, fragments=fragments(stage, cuts))
    own = {"fragments": len(stage.fragments), "delay": rng.randint(0, 2)}
    return replace(stage, overlap=conf_option("overlap", "streaming", **own))


def drawn_in_parts(rng: random.Random, n: int) -> StageConfig:
    """A stage of a sync mode whose updates travel in parts to one server."""
    modes = {
        "bsp": {"exchange": "gradient"},
        "lb_bsp": {},
        "cr_psgd": {},
        "backup": {"backups": rng.randrange(n), "exchange": "gradient"},
        "rennala": {"batch": rng.randint(1, 2 * n)},
        "local_sgd": {"local_steps": rng.randint(3, 5)},
    }
    name = rng.choice([*modes])
    sync = conf_option("sync", name, **modes[name])
    return bound(rng, sync, ParameterServer(pull_ratio=None), n, NO_LIMITS)


def drawn_on_shards(rng: random.Random, n: int, servers: int) -> StageConfig:
    """A stage of any sync mode with several servers."""
    topology = ShardedServer(servers=servers, partition_by="bytes")
    sync = drawn_sync(rng, ParameterServer(pull_ratio=None), n)
    stage = bound(rng, sync, topology, n, NO_LIMITS)
    if plain(sync) and rng.random() < 0.3:
        stage = replace(stage, codec=wrap_codec(conf_option("compression", "topk", ratio=0.1), ()))
    return stage


def drawn(kind: str, seed: int) -> tuple[Cluster, list[StageConfig]]:
    rng = random.Random(f"{kind} {seed}")
    cluster = befallen_cluster(rng)
    n, servers = cluster.num_workers, rng.randint(1, 4)
    seconds = rng.choice([0.5, 5.0, 5.0 if cluster.churn else None])
    limits = replace(NO_LIMITS, steps=rng.randint(1, 200), seconds=seconds, eval_every_commits=1)
    stages = list[StageConfig]()
    count = rng.choice([1, 1, 2, 3])
    for index in range(count):
        stage = drawn_in_parts(rng, n) if kind == "parts" else drawn_on_shards(rng, n, servers)
        trainer = stages[0].trainer if stages else stage.trainer
        stage = replace(
            stage,
            index=index,
            limits=limits,
            plan=replace(
                stage.plan, until={rng.choice(["commits", "seconds", "epochs"]): rng.uniform(0, 2)}
            ),
            trainer=trainer,
            min_workers=1 if rng.random() < 0.8 else rng.randint(1, n),
            joins=cluster.workers_rejoin,
        )
        if kind == "shards":
            size = trainer.num_params
            cuts = [size * k // servers for k in range(servers + 1)]
            stage = replace(stage, fragments=fragments(stage, cuts))
        elif stage.sync.exchange == "gradient":
            stage = in_buckets(rng, stage)
        elif count == 1:  # fragments over several stages are not implemented
            stage = in_fragments(rng, stage)
        stages.append(stage)
    return cluster, chained(stages)


def check(kind: str, seed: int) -> None:
    cluster, stages = drawn(kind, seed)
    n, servers = cluster.num_workers, stages[0].topology.servers
    if (played := play_counted(cluster, stages, seed)) is None:
        return
    sim, seen, counted = played
    end = seen.of("StageEnd")[-1]
    # the other servers merge beyond the end, until they have as many merges as the first one
    seen.records = [record for record in seen.records if record.get("rank", 0) <= n]
    check_books(seen, n, end["end_ns"])
    assert end["steps"] == sum(end["steps_by"])
    for rank in range(n):
        incarnations = 1 + sum(record["rank"] == rank for record in seen.of("WorkerRejoined"))
        in_flight = counted.settled[rank] - counted.came[rank]
        assert 0 <= in_flight <= incarnations * servers, "a push in flight at the end"
    for mail in sim._mail[n:]:
        assert {tag[0] for tag in mail.messages} <= {"failed"}, "no part waits for others"

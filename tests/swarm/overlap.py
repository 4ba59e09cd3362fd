"""Gradients in buckets, on small random clusters.

Every run ends with its counts without overlap, loses no message, and its accounting balances.
"""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

from ashl.cluster.spec import Cluster
from ashl.compression.contract import Layer
from ashl.compression.wrappers import wrap_codec
from ashl.overlap.dear import DeAR
from ashl.overlap.layerwise import Layerwise
from ashl.overlap.none import Serial
from ashl.overlap.priority import Priority
from ashl.overlap.slices import Slices
from ashl.overlap.tictac import TicTac
from ashl.overlap.timeline import FORWARD, Bucket
from ashl.overlap.wfbp import WFBP
from ashl.planning.instantiate import link_of
from ashl.stage.contract import StageConfig
from ashl.sync.bsp import BSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer
from tests.conf_option import conf_option
from tests.swarm.drawn import (
    bound,
    check_mail,
    check_repeat,
    check_time,
    drawn_cluster,
    drawn_limits,
    run,
)
from tests.swarm.one_stage import check_bounds, check_counts


def drawn_parts(rng: random.Random, size: int) -> tuple[Bucket, ...]:
    """Layer groups of any sizes and costs, the last one first."""
    cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randint(0, 6)))})
    shares = [rng.choice([0.0, rng.random()]) for _ in cuts[1:]]
    total = sum(shares) or 1.0
    done = [FORWARD + (1 - FORWARD) * part / total for part in accumulate(reversed(shares))]
    done[-1] = 1.0
    pieces = zip(reversed(list(pairwise(cuts))), done, strict=True)
    return tuple(
        Bucket(start, stop, ready, (1 - ready) * FORWARD / (1 - FORWARD))
        for (start, stop), ready in pieces
    )


def drawn(seed: int) -> tuple[Cluster, StageConfig]:
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    topology = AllReduce() if rng.random() < 0.7 else ParameterServer(pull_ratio=None)
    stage = bound(rng, BSP(exchange="gradient"), topology, cluster.num_workers, drawn_limits(rng))
    size = stage.trainer.num_params
    if topology.has_server:
        slices = rng.randint(max(1, size // 20), size)
        priority = Priority(plan="layers", slice=slices, credit=rng.randint(1, 5))
        overlap = rng.choice([WFBP(), TicTac(plan="layers"), Slices(slice=slices), priority])
        return cluster, replace(stage, overlap=overlap, layer_groups=drawn_parts(rng, size))
    slices, plan = rng.randint(max(1, size // 20), size), rng.choice(["layers", "bytes"])
    priority = Priority(plan=plan, slice=slices, credit=rng.randint(1, 5))
    overlap = rng.choice([WFBP(), DeAR(plan=plan), priority, None])
    stage = replace(stage, overlap=overlap, layer_groups=drawn_parts(rng, size))
    return cluster, stage if overlap else encoded_by_bucket(rng, stage)


def encoded_by_bucket(rng: random.Random, stage: StageConfig) -> StageConfig:
    """Return the stage with a codec that encodes each layer group by itself."""
    groups = stage.layer_groups
    layout = tuple(Layer(str(part.start), (part.stop - part.start,)) for part in reversed(groups))
    ratios = tuple(rng.choice([0.01, 0.3]) for _ in groups)
    codec = conf_option("compression", rng.choice(["topk", "random_mask", "qsgd"]))
    return replace(
        stage,
        overlap=Layerwise(plan="none", ratio=ratios, max_ratio=1.0),
        pipelines=tuple(link_of(codec, layout, part.start, part.stop) for part in groups),
        layout=layout,
        codec=wrap_codec(codec, layout),
    )


def check(seed: int) -> None:
    cluster, stage = drawn(seed)
    sim, seen = run(cluster, (stage,), seed)
    (end,) = seen.of("StageEnd")
    check_mail(sim)
    assert end["end_ns"] <= sim.now_ns
    check_time(seen, stage.num_workers, end["end_ns"])
    check_counts(seen, stage, end)
    check_bounds(seen, stage, end)
    check_repeat(seed, seen, lambda: run(cluster, (stage,), seed)[1])
    if stage.limits.seconds is None:
        alone = replace(stage, overlap=Serial(), layer_groups=(), pipelines=())
        (serial,) = run(cluster, (alone,), seed)[1].of("StageEnd")
        assert [end[name] for name in ("steps_by", "commits", "reason")] == [
            serial[name] for name in ("steps_by", "commits", "reason")
        ]
    elif end["reason"] == "seconds":
        assert end["end_ns"] == round(stage.limits.seconds * 1e9)

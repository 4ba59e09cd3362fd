"""Gradients in buckets, on small random clusters.

Every run ends with its counts without overlap, loses no message, and its accounting balances.
"""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

from ashl.cluster.spec import Cluster
from ashl.overlap.dear import DeAR
from ashl.overlap.none import Serial
from ashl.overlap.priority import Priority
from ashl.overlap.slices import Slices
from ashl.overlap.tictac import TicTac
from ashl.overlap.timeline import FORWARD, Bucket
from ashl.overlap.wfbp import WFBP
from ashl.stage.contract import StageConfig
from ashl.sync.bsp import BSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer
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
    overlap = rng.choice([WFBP(), DeAR(plan=plan), priority])
    return cluster, replace(stage, overlap=overlap, layer_groups=drawn_parts(rng, size))


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
        (serial,) = run(cluster, (replace(stage, overlap=Serial(), layer_groups=()),), seed)[1].of(
            "StageEnd"
        )
        assert [end[name] for name in ("steps_by", "commits", "reason")] == [
            serial[name] for name in ("steps_by", "commits", "reason")
        ]
    elif end["reason"] == "seconds":
        assert end["end_ns"] == round(stage.limits.seconds * 1e9)

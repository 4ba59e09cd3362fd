"""Random runs with codecs whose payloads are summed, gathered or sent along a tree.

All workers end together, no message is lost, and the accounting balances to the nanosecond and the
byte.
"""

import random
from dataclasses import replace
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.compression.contract import Layer, size_of
from ashl.compression.gtopk import bits_bytes
from ashl.compression.wrappers import wrap_codec
from ashl.learn.trainer import SizeOnlyTrainer
from ashl.stage.contract import StageConfig
from ashl.sync.bsp import BSP
from ashl.sync.local_sgd import LocalSGD
from ashl.topology.all_reduce import AllReduce
from tests.conf_option import conf_option
from tests.swarm.drawn import bound, check_mail, check_time, drawn_cluster, drawn_limits, run

LAYOUT = (Layer("a", (40, 30)), Layer("b", (40,)), Layer("c", (10, 40)))
D = size_of(LAYOUT)
OPTIONS = {
    "power_sgd": {"rank": 2},
    "gtopk": {"ratio": 0.05},
    "sketch_sgd": {},
    "fetch_sgd": {},
    "topk": {"ratio": 0.05},
}


def drawn(seed: int) -> tuple[Cluster, StageConfig, str]:
    rng = random.Random(seed)
    cluster, name = drawn_cluster(rng), rng.choice(list(OPTIONS))
    sync: Any = rng.choice([BSP(exchange="gradient"), LocalSGD(local_steps=rng.randint(1, 5))])
    stage = bound(rng, sync, AllReduce(), cluster.num_workers, drawn_limits(rng))
    codec = wrap_codec(conf_option("compression", name, **OPTIONS[name]), LAYOUT)
    workers = tuple(replace(worker, compression_ratio=0.05) for worker in stage.plan.workers)
    plan = replace(stage.plan, workers=workers)
    return cluster, replace(stage, plan=plan, codec=codec, trainer=SizeOnlyTrainer(D, 100)), name


def moved(name: str, n: int) -> int:
    """Bytes that all workers together send in a round, as the papers count them."""
    around = 2 * (n - 1)  # of a vector that all have summed
    if name == "power_sgd":
        return n * (around * 4 * (2 * 40 + 2 * 10 + 40) // n) + n * (
            around * 4 * (2 * 30 + 2 * 40) // n
        )
    k, size = round(0.05 * D), 20 + 4 * 82 + -(-82 * 11 // 8)
    assert (D, k) == (1640, 82)
    if name == "gtopk":
        return (n - 1) * (2 * size + bits_bytes(k))
    if name == "topk":
        return n * (n * size * (n - 1) // n)
    cells, asked = 5 * round(0.2 * D / 5), 4 * round(0.02 * D)
    return n * (around * 4 * cells // n) + (
        n * (around * 4 * asked // n) if name == "sketch_sgd" else 0
    )


def check(seed: int) -> None:
    cluster, stage, name = drawn(seed)
    sim, seen = run(cluster, (stage,), seed)
    end, n = seen.of("StageEnd")[-1], stage.num_workers
    check_mail(sim)
    check_time(seen, n, end["end_ns"])
    assert len(set(end["commits"])) == 1
    assert end["stale_max"] == [0] * n
    ledgers = seen.of("TimeTotals")
    up, down = sum(r["bytes_up"] for r in ledgers), sum(r["bytes_down"] for r in ledgers)
    seconds = stage.limits.seconds
    if seconds is not None and end["end_ns"] == round(
        seconds * 1e9
    ):  # what began in time is paid, even if it ended late
        done = end["merges"] - (
            name == "gtopk"
        )  # rank 0 is the root of the tree, and ends before its leaves
        assert (
            done * moved(name, n)
            <= min(up, down)
            <= max(up, down)
            <= (end["merges"] + 1) * moved(name, n)
        )
    else:
        assert up == down == end["merges"] * moved(name, n)

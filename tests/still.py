"""Gossip without learning: vectors that nobody steps on, another one on each worker, to see what
mixing does.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ashl.learn.trainer import SizeOnlyTrainer
from ashl.plan.plan import Limits
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import STOP, StageConfig
from ashl.stage.members import members_of
from ashl.stage.program import select_loop
from ashl.topology.gossip import Gossip
from tests.conf_option import conf_option
from tests.swarm.drawn import Seen, bound, drawn_cluster, run

D = 33


class Still(SizeOnlyTrainer):
    """Steps that lead nowhere."""

    def init(self) -> tuple[Tensor, Any]:
        return torch.zeros(D), ()

    def local_step(self, params: Tensor, moments: Any, *_: Any) -> tuple[float, Any, Tensor]:
        return 0.0, (), params


def start_of(rank: int) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(rank))


def gossip(**fields: Any) -> Gossip:
    return conf_option("topology", "gossip", **fields)


def stage_of(
    sync: Any, topology: Any, n: int, limits: Limits = NO_LIMITS, **fields: Any
) -> StageConfig:
    """Equal workers that do not learn."""
    stage = bound(random.Random(0), sync, topology, n, limits)
    worker = replace(stage.plan.workers[0], local_steps=1, batch=8)
    plan = replace(stage.plan, workers=(worker,) * n)
    return replace(stage, plan=plan, trainer=Still(D, 100), **fields)


def mixed(
    sync: Any, topology: Any, n: int, rounds: int, seed: int = 0, **fields: Any
) -> tuple[Tensor, Tensor, Seen]:
    """(models before [n, D], models after so many rounds [n, D], what was said), on a cluster drawn
    with the seed.
    """
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    while cluster.num_workers != n:
        cluster = drawn_cluster(rng)
    stage = stage_of(sync, topology, n, replace(NO_LIMITS, steps=rounds * n), seed=seed, **fields)

    async def main(ctx: RankContext) -> None:
        state = topology.begin(stage, ctx.rank)
        if ctx.rank < n:
            state.params = start_of(ctx.rank)
        ctx.members = members_of(stage)
        assert await select_loop(stage, ctx.rank)(ctx, stage, state) == STOP
        ctx.snapshot(state.params, final=True)

    _, seen = run(cluster, (stage,), seed, main)
    before = torch.stack([start_of(rank) for rank in range(n)])
    return before, torch.stack([seen.models[rank] for rank in range(n)]), seen


def spread(models: Tensor) -> float:
    """Consensus distance."""
    return float((models - models.mean(0)).square().sum(1).mean())

"""Partial all-reduce: one average is a symmetric, doubly stochastic, idempotent matrix; no
sequence of them moves the mean.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ashl.learn.trainer import Moments, SizeOnlyTrainer
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.rank_context import RankContext
from ashl.topology.partial_all_reduce import PartialAllReduce, average_group
from tests.conf_option import conf_option
from tests.swarm.drawn import run
from tests.swarm.one_stage import plain

SCHEDULERS = ["random", "smart", "static", "first_come"]


class Standing(SizeOnlyTrainer):
    """Nothing is learned, and worker i begins with the i-th unit vector: models are rows of the
    product of all W.
    """

    def __init__(self, n: int) -> None:
        super().__init__(num_params=n, epoch_samples=100)
        self.made = itertools.count()

    def init(self) -> tuple[Tensor, Moments]:
        return torch.eye(self.num_params)[next(self.made) % self.num_params], ()

    def local_step(self, params: Any, moments: Moments, *where: Any) -> tuple[float, Moments, Any]:
        return 0.0, moments, params


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_averages_alone_keep_the_mean_and_forget_where_they_began(scheduler: str) -> None:
    n = 8
    cluster, stage = plain(
        conf_option("sync", f"ripples_{scheduler}"), PartialAllReduce(workers_per_node=4)
    )
    # prime costs, so that first-come groups are not always the same
    cluster = replace(
        cluster, num_workers=None, compute=(2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0)
    )
    plan = replace(stage.plan, workers=stage.plan.workers[:1] * n)
    stage = replace(stage, trainer=Standing(n), plan=plan, limits=replace(NO_LIMITS, steps=400))
    _, seen = run(cluster, (stage,))
    rows = torch.stack([seen.models[rank] for rank in range(n)])
    torch.testing.assert_close(rows.sum(dim=0), torch.ones(n))
    torch.testing.assert_close(rows.sum(dim=1), torch.ones(n))
    assert rows.min() >= 0
    assert (rows - 1 / n).abs().max() < 0.2, "everybody has heard of everybody"


@pytest.mark.parametrize("members", [(1, 3, 4), (0, 2), (0, 1, 2, 3, 4)])
def test_one_average_is_symmetric_doubly_stochastic_and_idempotent(
    members: tuple[int, ...],
) -> None:
    n, rows = 5, {}
    cluster, stage = plain(
        conf_option("sync", "ripples_random"), PartialAllReduce(workers_per_node=4)
    )

    async def main(ctx: RankContext) -> None:
        own = torch.eye(n)[ctx.rank] if ctx.rank < n else None
        if ctx.rank not in members:
            rows[ctx.rank] = own
            return
        zero = torch.zeros(n)
        rows[ctx.rank] = await average_group(ctx, own, zero, members, common=False)
        again = await average_group(ctx, rows[ctx.rank], zero, members, common=False)
        torch.testing.assert_close(again, rows[ctx.rank])

    plan = replace(stage.plan, workers=stage.plan.workers[:1] * n)
    run(
        replace(cluster, num_workers=None, compute=(1.0,) * n),
        (replace(stage, plan=plan),),
        main=main,
    )
    w = torch.stack([rows[rank] for rank in range(n)])
    torch.testing.assert_close(w, w.T)
    torch.testing.assert_close(w @ w, w)
    torch.testing.assert_close(w.sum(dim=0), torch.ones(n))
    assert all(float(w[i, j]) == pytest.approx(1 / len(members)) for i in members for j in members)

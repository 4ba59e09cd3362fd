"""A codec's protocol among workers in virtual time, without a run around it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import Collective, EncodeContext, Layer
from ashl.compression.kernels import largest_indices
from ashl.compression.wrappers import WrappedCodec, wrap_codec
from ashl.learn.trainer import SizeOnlyTrainer
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of
from ashl.stage.process_group import ProcessGroup
from ashl.sync.bsp import BSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.local_work import WorkerState
from tests.laws.codecs import vector
from tests.laws.machines import cluster
from tests.swarm.drawn import Seen, bound, check_mail, run


@dataclass
class Round:
    """The outcome of a round at one worker: the vector that its codec encoded, the update, the
    residual, and the piggybacked values.
    """

    x_sent: Any
    update: Any
    sender: Any
    loss: float
    signal: int

    @property
    def error(self) -> Tensor:
        return self.sender.error


def together(
    option: Any,
    rounds: Sequence[Sequence[Any]],
    weights: Sequence[float],
    shapes: Sequence[tuple[int, ...]] = (),
) -> tuple[list[list[Round]], Seen]:
    """Give each worker its vector of each round, [round][worker]; what came of it by round and
    worker.
    """
    n, x = len(weights), rounds[0][0]
    d = x.nbytes // 4
    layout = tuple(Layer(str(i), shape) for i, shape in enumerate(shapes or [(d,)]))
    stage = bound(random.Random(0), BSP(exchange="gradient"), AllReduce(), n, NO_LIMITS)
    stage = replace(
        stage, codec=wrap_codec(option, layout), layout=layout, trainer=SizeOnlyTrainer(d, 100)
    )
    came: list[list[Any]] = [[None] * n for _ in rounds]
    sim, seen = run(
        cluster(n, step_s=0.001, latency_s=0.001, compress_s=0.002),
        (stage,),
        main=partial(worker, stage=stage, rounds=rounds, weights=weights, came=came),
    )
    check_mail(sim)
    return came, seen


async def worker(
    ctx: RankContext,
    stage: StageConfig,
    rounds: Sequence[Sequence[Any]],
    weights: Sequence[float],
    came: list[list[Any]],
) -> None:
    state, rank, pipeline = WorkerState(None, None), ctx.rank, stage.pipeline
    team = ProcessGroup(ctx, stage, stage.workers, list(weights), members_of(stage).planned)
    for number, vectors in enumerate(rounds):
        x, context = vectors[rank], EncodeContext(seed=3, worker=rank, round=number)
        x_sent, sender = x, state.codec_state.sender
        if isinstance(pipeline.codec, WrappedCodec) and not isinstance(x, SizeOnly):
            x_sent = pipeline.codec.prepare_encoding(sender, x, context)[2].x
        team.begin(rank + 1.0, 5 if rank == 0 else 0)
        if isinstance(pipeline.inner_codec, Collective):
            update = await pipeline.run_protocol(state.codec_state, team, x, context)
        else:
            body = pipeline.encode(CodecState(), x * weights[rank], context)
            update = pipeline.decode_sum(
                state.codec_state, body, await team.all_reduce(pipeline.summand(body, context))
            )
        came[number][rank] = Round(
            x_sent, update, state.codec_state.sender, team.loss, int(team.signal)
        )


def whole(d: int, n: int, seed: int = 0) -> list[Tensor]:
    """Return vectors of small integers; their sums are exact."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(-50, 51, d).astype(np.float32)) for _ in range(n)]


def drawn(d: int, n: int, rounds: int) -> list[list[Tensor]]:
    return [[vector("normal", d, 10 * t + rank) for rank in range(n)] for t in range(rounds)]


def weighted(vectors: list[Tensor], weights: list[float]) -> Tensor:
    return sum_in_rank_order([x * w for x, w in zip(vectors, weights, strict=True)])


def top(x: Tensor, k: int) -> Tensor:
    y, places = torch.zeros_like(x), largest_indices(x, k)
    y[places] = x[places]
    return y

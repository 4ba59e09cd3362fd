"""Time how long codecs take to encode the whole model and to decode one payload.

Rule: one repetition is a local step, an exchange with the server, an encoding and a decoding, so
that the codec finds the caches as in a training run. The medians over the repetitions count,
without the first one, which allocates memory. Each worker times its own encoding; the cost of a
decoding is the median over the workers.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from ashl.compression.contract import EncodeContext
from ashl.plan.profile import CodecCost
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import StageConfig
from ashl.sync.timing.exchanges import BOTH, collect_answers, send_order, time_exchange, time_step
from ashl.topology.local_work import WorkerState

CODEC = -7  # an order, with the index of the codec in `StageConfig.timed_codecs`
REPEATS = (6, 1_000)  # smallest and largest number of repetitions
CODEC_S = 1.0  # seconds for each codec, after which no further repetition begins


async def time_codec(
    ctx: RankContext, stage: StageConfig, state: WorkerState, k: int
) -> torch.Tensor:
    """Return (seconds of an encoding, seconds of a decoding) of the k-th codec at this worker.

    Raises: RunEndedError.
    """
    _, link = stage.timed_codecs[k]
    batch = stage.worker(ctx.rank).batch
    rows: list[tuple[float, float]] = []
    end_s = ctx.now + CODEC_S
    sender, receiver = CodecState(), CodecState()
    context = EncodeContext(link.codec.ratio or 1.0, stage.seed, ctx.rank, round=1)
    vector = state.params if isinstance(state.params, SizeOnly) else state.params[: link.d]
    while len(rows) < REPEATS[0] or (len(rows) < REPEATS[1] and ctx.now < end_s):
        await ctx.compute(partial(time_step, ctx, stage, state, len(rows), batch), work=batch)
        await time_exchange(ctx, stage, BOTH)
        start = ctx.now
        payload = await ctx.compute(
            partial(link.encode, sender, vector, context), work=1, kind="compress"
        )
        encoded = ctx.now
        decode = partial(link.merge, receiver, [payload], [1.0], (ctx.rank,))
        await ctx.compute(decode, work=1, kind="decode")
        rows.append((encoded - start, ctx.now - encoded))
        if ctx.stop_reason or ctx.now_ns >= stage.stop_criteria.deadline_ns:
            break
    medians = [statistics.median(column) for column in zip(*(rows[1:] or rows), strict=True)]
    return torch.tensor(medians, dtype=torch.float64)


async def measure_codecs(ctx: RankContext, stage: StageConfig) -> tuple[CodecCost, ...]:
    """Return the costs of all codecs to be timed; all workers time each one at the same time.

    Raises: RunEndedError.
    """
    costs = []
    for k, (name, _) in enumerate(stage.timed_codecs):
        await send_order(ctx, stage, stage.workers, CODEC, k)
        found = await collect_answers(ctx, stage, stage.workers)
        encode_s = tuple(found[rank][0] for rank in stage.workers)
        decode_s = statistics.median(found[rank][1] for rank in stage.workers)
        costs.append(CodecCost(codec=name, encode_s=encode_s, decode_s=decode_s))
    return tuple(costs)

"""What sums and computing cost each other while both go on, which a plan of overlap has to know.

Rule: all workers sum the whole model so many times in a row, then take steps, and then both at
once, three times over, or fewer where that takes long. Computing has lost the share by which steps
were slower then, and a sum is slowed by as many times as it took longer: the mean over the workers,
and of the three the median. That holds for whatever they share, cores, caches or the system's own
work for a link, in which no process is seen to be at work.

Both shares are where they are used: `ashl.overlap.timeline` weighs plans by them.

Limits: forward is taken for as easily disturbed as backward, and a short message for as disturbing
as a long one.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

from ashl.cluster.spec import ContentionCosts
from ashl.plan.alpha_beta import AlphaBeta
from ashl.runtime.rank_context import RankContext
from ashl.stage.stage import Stage
from ashl.sync.timing.exchanges import collect_answers, empty_payload, instruct, time_step
from ashl.topology.local_work import WorkerState

BESIDE = -12  # an order, with bytes and how many sums
ROUNDS = 3
LEAST_S, STEPS, SUMS = 0.05, 4, 4  # of which each takes at least so long, or so many
MOST_S = 20.0  # after which no other round begins


async def time_beside(
    ctx: RankContext, stage: Stage, state: WorkerState, nbytes: int, count: int
) -> tuple[float, ...]:
    """Seconds of a sum of so many bytes, of which so many go in a row, and of a step: each alone,
    and both at once.
    """
    batch, body = stage.worker(ctx.rank).batch, empty_payload(stage, nbytes)
    step, begun = partial(time_step, ctx, stage, state, 0, batch), math.inf

    async def sums() -> float:
        await ctx.all_reduce(empty_payload(stage, 4), stage.workers)  # till all are here
        nonlocal begun
        begun = ctx.now
        for _ in range(count):
            await ctx.all_reduce(body, stage.workers)
        return (ctx.now - begun) / count

    alone_s = await sums()
    steps, start = 0, ctx.now
    while steps < STEPS or ctx.now - start < LEAST_S:
        await ctx.compute(step, work=batch)
        steps += 1
    step_s = (ctx.now - start) / steps
    begun, times = math.inf, list[float]()
    task = ctx.spawn(sums())
    while not task.done:
        start = ctx.now
        await ctx.compute(step, work=batch)
        if start >= begun:  # others may come to it later
            times.append(ctx.now - start)
    return alone_s, step_s, await ctx.join(task), statistics.fmean(times[:-1] or times or [step_s])


async def measure_beside(
    ctx: RankContext, stage: Stage, step_s: float, line: AlphaBeta
) -> ContentionCosts | None:
    """At the server; None where they cost each other nothing. Raises OverError."""
    dense = stage.trainer.dense_bytes
    count = max(SUMS, math.ceil(max(LEAST_S, STEPS * step_s) / max(line.seconds(dense), 1e-4)))
    lost, slowed, end_s = list[float](), list[float](), ctx.now + MOST_S
    while not lost or (len(lost) < ROUNDS and ctx.now < end_s):
        await instruct(ctx, stage, stage.workers, BESIDE, dense, count)
        found = (await collect_answers(ctx, stage, stage.workers)).values()
        sum_s, step_s, both_s, beside_s = map(statistics.fmean, zip(*found, strict=True))
        lost.append(1 - step_s / max(step_s, beside_s))
        slowed.append(max(both_s, sum_s) / sum_s if sum_s else 1.0)
    beside = ContentionCosts(
        pace_reduction=statistics.median(lost), collective_slowdown=statistics.median(slowed)
    )
    return beside if beside.pace_reduction > 1e-6 or beside.collective_slowdown > 1 + 1e-6 else None

"""Time how much sums and computing slow each other down while both are active.

Rule: all workers sum the whole model several times in a row, then take steps, and then do both at
once. This is repeated three times, or less often if it takes long. Computing loses the fraction of
its speed by which steps were slower, and a sum is slowed by the factor by which it took longer.
Sums of a single number are timed in the same way. The time by which they are longer than the factor
says is the extra cost of a sum that a thread executes. Each message of a gradient except the last
has this cost. Each number is the mean over the workers, then the median over the repetitions. The
cause may be any shared resource: cores, caches, or the operating system's work for a link.

`ashl.overlap.timeline` uses these numbers to plan messages.

Limits: forward is assumed to be slowed as much as backward, and a short message to slow computing
as much as a long one.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

from ashl.cluster.spec import ContentionCosts
from ashl.plan.alpha_beta import AlphaBeta
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import StageConfig
from ashl.sync.timing.exchanges import collect_answers, empty_payload, send_order, time_step
from ashl.topology.local_work import WorkerState

CONTENTION = -12  # an order, with the bytes and the number of sums
ROUNDS = 3  # largest number of repetitions
LEAST_S = 0.05  # shortest time of the sums, and of the steps, in seconds
STEPS, SUMS = 4, 4  # smallest number of each
NUMBER, NUMBERS = 4, 16  # bytes and count of the sums of a single number
MOST_S = 20.0  # seconds after which no further repetition begins


async def time_contention(
    ctx: RankContext, stage: StageConfig, state: WorkerState, nbytes: int, count: int
) -> tuple[float, ...]:
    """Return the seconds of a sum alone, of a step alone, of a sum during steps, and of a step
    during sums.

    Args: `count` sums of `nbytes` bytes in a row.
    """
    batch, payload = stage.worker(ctx.rank).batch, empty_payload(stage, nbytes)
    step, begun = partial(time_step, ctx, stage, state, 0, batch), math.inf

    async def sums() -> float:
        # wait until all workers have reached this point
        await ctx.all_reduce(empty_payload(stage, 4), stage.workers)
        nonlocal begun
        begun = ctx.now
        for _ in range(count):
            await ctx.all_reduce(payload, stage.workers)
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
        if start >= begun:  # other workers may begin their sums later
            times.append(ctx.now - start)
    return alone_s, step_s, await ctx.join(task), statistics.fmean(times[:-1] or times or [step_s])


async def measure_contention(
    ctx: RankContext, stage: StageConfig, step_s: float, line: AlphaBeta
) -> ContentionCosts | None:
    """Measure the contention at the server, with the workers. Returns: None if there is none.

    Args: `step_s` is the longest step of a worker, `line` the costs of sums. Raises: RunEndedError.
    """
    dense = stage.trainer.dense_bytes
    count = max(SUMS, math.ceil(max(LEAST_S, STEPS * step_s) / max(line.seconds(dense), 1e-4)))
    rows = list[tuple[float, float, float]]()
    end_s = ctx.now + MOST_S
    while not rows or (len(rows) < ROUNDS and ctx.now < end_s):
        means = []
        for nbytes, sums in ((dense, count), (NUMBER, NUMBERS)):
            await send_order(ctx, stage, stage.workers, CONTENTION, nbytes, sums)
            answers = (await collect_answers(ctx, stage, stage.workers)).values()
            means.append([statistics.fmean(column) for column in zip(*answers, strict=True)])
        (alone_s, step_s, overlapped_s, slowed_s), (number_s, _, number_overlapped_s, _) = means
        rows.append(
            (
                1 - step_s / max(step_s, slowed_s),
                *slowdown_and_start(alone_s, overlapped_s, number_s, number_overlapped_s),
            )
        )
    pace_reduction, slowdown, start_s = map(statistics.median, zip(*rows, strict=True))
    slows = pace_reduction > 1e-6 or slowdown > 1 + 1e-6 or start_s > 1e-6
    if not slows:
        return None
    return ContentionCosts(
        pace_reduction=pace_reduction, collective_slowdown=slowdown, start_s=start_s
    )


def slowdown_and_start(
    alone_s: float, overlapped_s: float, number_s: float, number_overlapped_s: float
) -> tuple[float, float]:
    """Return (factor on the time of a sum during computing, extra seconds of such a sum).

    Both solve: seconds beside computing = factor · (seconds alone + extra), for a sum of the model
    and for one of a single number.
    """
    start_s = 0.0
    if overlapped_s > number_overlapped_s:
        start_s = (alone_s * number_overlapped_s - number_s * overlapped_s) / (
            overlapped_s - number_overlapped_s
        )
    start_s = max(0.0, min(start_s, number_overlapped_s - number_s))
    longest_s = alone_s + start_s
    return max(1.0, overlapped_s / longest_s if longest_s else 1.0), start_s

"""Time what a gradient in several messages costs, beyond the contention of its sums and computing.

Rule: all workers take a step with one message, with two, and with one per layer group. For each
message they sum a single number, in the way in which a run sums the message; this is repeated.
Steps with several messages take longer than `ashl.overlap.timeline` predicts from the step with
one. The difference gives the extra cost of a step and of each message. Sums that a thread executes
take longer than a direct sum, from the arrival of the last worker; that gives the extra cost of
each sum except the last. The medians of all repetitions count.

Limits: costs are assumed to be spread evenly over a step, and equal for all messages and workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ashl.cluster.spec import ContentionCosts, MessageCosts
from ashl.cluster.speed import NS
from ashl.device import read_scalars
from ashl.overlap.timeline import StepTimeline, merge_buckets
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.confidence import estimate
from ashl.plan.profile import WorkerProfile, ready_shares
from ashl.runtime.effects import Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import StageConfig
from ashl.sync.timing.exchanges import collect_answers, send_order, time_sum
from ashl.topology.local_work import WorkerState

PARTS = -13  # an order, with the number of the repetition
NUMBER = 4  # bytes of each sum
ROUNDS = (5, 60)  # smallest and largest number of repetitions
MOST_S = 10.0  # seconds after which no further repetition begins
NARROW = 0.005  # half-width of a narrow interval of the extra cost, as a fraction of a step


def bucket_plans(groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the number of layer groups in each message, for the three steps that are timed."""
    return (groups,), (groups - groups // 2, groups // 2), (1,) * groups


async def time_parts(
    ctx: RankContext, stage: StageConfig, state: WorkerState, number: int
) -> torch.Tensor:
    """Return the seconds of a step by each plan, then of the sums during the last one."""
    await time_sum(ctx, stage, NUMBER)  # wait until all workers have reached this point
    took_s: list[float] = []
    beside_s: list[float] = []
    for plan in bucket_plans(len(stage.layer_groups)):
        start = ctx.now
        beside_s = await step_with_sums(ctx, stage, state, number, plan)
        took_s.append(ctx.now - start)
    return torch.tensor([*took_s, *beside_s], dtype=torch.float64)


async def step_with_sums(
    ctx: RankContext, stage: StageConfig, state: WorkerState, number: int, plan: Sequence[int]
) -> list[float]:
    """Take a step with a sum per message. Returns: the seconds of each sum except the last."""
    batch, parts = stage.worker(ctx.rank).batch, merge_buckets(stage.layer_groups, plan)
    what = state.params, ctx.rank, number, range(number * batch, (number + 1) * batch)
    found = list[float]()
    if len(plan) == 1:
        await ctx.compute(lambda: read_scalars([stage.trainer.gradient(*what)[0]]), work=batch)
    else:
        ready = tuple((part.ready, stage.tag("timed", k)) for k, part in enumerate(parts))
        *tags, last = (tag for _, tag in ready)
        others = ctx.spawn(time_sums(ctx, stage, tags))
        compute = partial(
            stage.trainer.gradient_in_parts, *what, [(part.start, part.stop) for part in parts]
        )
        await ctx.compute(compute, work=batch, parts=ready)
        found = await ctx.join(others)
        await ctx.recv(last)
    await time_sum(ctx, stage, NUMBER)
    return found


async def time_sums(ctx: RankContext, stage: StageConfig, tags: Sequence[Tag]) -> list[float]:
    """Return the seconds of a sum for each message, from the time at which it is ready."""
    found = []
    for tag in tags:
        await ctx.recv(tag)
        found.append(await time_sum(ctx, stage, NUMBER))
    return found


async def with_layer_group_costs(
    ctx: RankContext,
    stage: StageConfig,
    workers: Sequence[WorkerProfile],
    line: AlphaBeta,
    known: ContentionCosts | None,
) -> ContentionCosts | None:
    """Measure the extra costs at the server and add them to the known contention.

    Returns: None if nothing costs anything. Raises: RunEndedError.
    """
    groups, end_s, rows = len(stage.layer_groups), ctx.now + MOST_S, list[tuple[float, ...]]()
    if groups < 2:
        return known
    while len(rows) < ROUNDS[0] or (
        len(rows) < ROUNDS[1] and ctx.now < end_s and not all_narrow(rows)
    ):
        await send_order(ctx, stage, stage.workers, PARTS, len(rows))
        found = (await collect_answers(ctx, stage, stage.workers)).values()
        steps_s = map(statistics.fmean, zip(*(own[:3] for own in found), strict=True))
        rows.append(
            (*steps_s, statistics.fmean(map(min, zip(*(own[3:] for own in found), strict=True))))
        )
    known = known or ContentionCosts(pace_reduction=0.0, collective_slowdown=1.0)
    dense_s = line.seconds(stage.trainer.dense_bytes)
    sum_s = handover_s(
        dense_s,
        line.seconds(NUMBER),
        statistics.median(row[3] for row in rows) / known.collective_slowdown,
    )
    known = replace(
        known, collective_slowdown=max(1.0, known.collective_slowdown * dense_s / (dense_s + sum_s))
    )
    timeline = StepTimeline((), (NUMBER,) * groups, lambda nbytes: round(line.seconds(nbytes) * NS))
    timeline = replace(
        timeline,
        pace_reduction=known.pace_reduction,
        collective_slowdown=known.collective_slowdown,
        start_ns=sum_s * NS,
    )
    shares = ready_shares(workers)
    more = zip(*(extra_seconds(row, timeline, shares) for row in rows), strict=True)
    two_s, each_s = map(statistics.median, more)
    part_s = max(0.0, each_s - two_s) / (groups - 2) if groups > 2 else 0.0
    parts = MessageCosts(step_s=max(0.0, two_s - 2 * part_s), part_s=part_s, sum_s=sum_s)
    if max(parts.step_s, parts.part_s, parts.sum_s) > 1e-6:
        known = replace(known, parts=parts)
    return (
        known
        if known.parts or known.pace_reduction > 1e-6 or known.collective_slowdown > 1 + 1e-6
        else None
    )


def handover_s(dense_s: float, alone_s: float, beside_s: float) -> float:
    """Return the extra seconds of a sum that a thread executes.

    A sum of one number takes `alone_s` directly, and `beside_s` by a thread during computing,
    divided by the slowdown of sums of the whole model. A thread executed those too, so a part of
    their slowdown is this extra cost.
    """
    if dense_s <= beside_s:
        return max(0.0, beside_s - alone_s)
    return max(0.0, dense_s * (beside_s - alone_s) / (dense_s - beside_s))


def extra_seconds(
    row: Sequence[float], timeline: StepTimeline, shares: Sequence[float]
) -> list[float]:
    """Return by how many seconds the steps with several messages took longer than the timeline
    predicts from the step with one.
    """
    whole, *others = bucket_plans(len(shares))
    step_ns = row[0] * NS - timeline.cost(0, len(shares))
    own = replace(timeline, ready_ns=tuple(max(0, round(step_ns * share)) for share in shares))
    hidden_s = [(own.end_ns(whole) - own.end_ns(plan)) / NS for plan in others]
    return [took_s - row[0] + less_s for took_s, less_s in zip(row[1:3], hidden_s, strict=True)]


def all_narrow(rows: Sequence[Sequence[float]]) -> bool:
    """Return True if the interval of each extra cost is narrow."""
    whole_s = statistics.median(row[0] for row in rows)
    return all(
        estimate([row[k] - row[0] for row in rows]).noise <= NARROW * whole_s for k in (1, 2)
    )

"""Profiling as a stage on the run's counters: what a step, a push, a pull and an encoding cost each
worker.

Rule: all workers time local steps at once, `steps` of them after one to warm up (the model stays as
it is). Then they take turns to exchange with the server, alone: nothing, the dense model up, the
dense model down; at last all at once, which is a figure of its own. A transfer is timed until its
receipt is there, less the way of the receipt. Each cost is a median of as many repetitions as its
95 % interval takes to be narrow, up to a bound; workers whose intervals overlap count as equal. The
server makes the profile, plans the stages that follow, and sends everyone the plan.

With `per_layer_group` they also time both passes by layer group, and then messages of several
sizes: each worker alone to the server and from there, and all workers in a sum, which counts from
when the last one has come. Of each, latency and seconds per byte are fitted
(`ashl.plan.alpha_beta`); sizes go up for as long as there is time. What sums and steps cost each
other is `ashl.sync.timing.beside`'s to measure, that a gradient leaves in parts
`ashl.sync.timing.parts`', and what encoding and decoding cost by the chosen codec and by `codecs`
`ashl.sync.timing.codecs`'.

`stop.seconds` and an interrupt end it at once, without a profile.

Source: Shen et al., "ASHL", IEEE TC 2024, section on profiling (there: ten epochs, off the reported
tally).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ashl.cluster.spec import ContentionCosts
from ashl.cluster.speed import LEVELS
from ashl.compression.contract import EncodeContext
from ashl.learn.device import numbers
from ashl.option import Natural, option
from ashl.overlap.timeline import end_shares
from ashl.plan.alpha_beta import LARGE, SMALL, AlphaBeta, fit_line
from ashl.plan.confidence import equalize_costs, estimate, is_narrow, quantiles, trimmed_deviation
from ashl.plan.plan import WorkerPlan
from ashl.plan.profile import TICK_S, CodecCost, WorkerProfile
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import PlanMade, ProfileMeasured
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.stage import GO, NEXT, STOP, Loop, Stage
from ashl.sync.timing.beside import BESIDE, measure_beside, time_beside
from ashl.sync.timing.codecs import CODEC, measure_codecs, time_codec
from ashl.sync.timing.exchanges import (
    DOWN,
    EMPTY,
    LINK,
    RESULT,
    SUM,
    UP,
    OverError,
    collect_answers,
    instruct,
    repeat_timing,
    time_apply,
    time_exchange,
    time_sum,
)
from ashl.sync.timing.parts import PARTS, time_parts, with_layer_group_costs
from ashl.topology.ending import end_time_ns, leave_stage, record_end
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import BarrierRule, ServerState

REPEATS = 3  # of an exchange at least
MOST = 20  # times as many repetitions at most
SLOWED = 1.1  # a push among others that takes so many times as long shows the server's port
DISTRIBUTION, DISTRIBUTION_S = (
    2_000,
    4.0,
)  # steps for their quantiles at most, and seconds after which none begins
COSTS = (
    5  # numbers of a worker's first answer: a step, its noise and spread, an encoding and its noise
)
LINES_S = (
    2.0  # for the messages of several sizes to and from all workers, and as long again for sums
)


@option
class Profiling(BarrierRule):
    """Its loops stand in for the topology's: nothing is learned here."""

    steps: Natural
    per_layer_group: bool
    codecs: tuple[dict[str, Any], ...]

    def loop(self, stage: Stage, rank: int) -> Loop:
        return server if rank == stage.server else worker


async def worker(ctx: RankContext, stage: Stage, state: WorkerState) -> int:
    """Measure, and again whenever the server says so; take over the plan that it sends at
    the end.
    """
    assert isinstance(stage.sync, Profiling)
    before = stage.trainer.worker_state(ctx.rank)
    times = await time_steps(
        ctx, stage, state, max(1, stage.sync.steps), distribution=stage.sync.per_layer_group
    )
    compress_s = await repeat_timing(partial(time_encoding, ctx, stage, state), REPEATS, REPEATS)
    found: tuple[float, ...] = (*estimate(times), trimmed_deviation(times), *estimate(compress_s))
    passes = None
    if stage.sync.per_layer_group:
        own = await time_passes(ctx, stage, state, min(len(times), MOST * max(1, stage.sync.steps)))
        passes = torch.cat([torch.tensor(quantiles(times), dtype=torch.float64), own])
    try:
        while True:
            await ctx.send(stage.server, stage.tag("ask"), passes, (RESULT, *found))
            order = await ctx.recv(stage.tag("order"))
            signal, end_ns, *more = (int(value) for value in order.meta)
            passes, found = None, ()
            if signal == SUM:
                found = (await time_sum(ctx, stage, end_ns),)
            elif signal == BESIDE:
                found = await time_beside(ctx, stage, state, end_ns, more[0])
            elif signal == PARTS:
                passes = await time_parts(ctx, stage, state, end_ns)
            elif signal == LINK:
                found = (
                    await time_exchange(ctx, stage, UP, end_ns),
                    await time_exchange(ctx, stage, DOWN, end_ns),
                )
            elif signal == GO:
                found = (await time_exchange(ctx, stage, EMPTY),)
                found += await time_exchange(ctx, stage, UP), await time_exchange(ctx, stage, DOWN)
            elif signal == CODEC:
                passes = await time_codec(ctx, stage, state, end_ns)
            elif signal in (NEXT, STOP):
                break
            else:
                raise AssertionError(f"{signal} is not an order")
    except OverError as over:
        (order,) = over.order
        signal, end_ns, *_ = (int(value) for value in order.meta)
    state.assigned = None if order.body is None else (stage.index + 1, order.body)
    stage.trainer.set_worker_state(ctx.rank, before)  # steps that are only timed teach nothing
    leave_stage(ctx, stage, signal, end_ns)
    ctx.record_round(stage.index, state.round, 0, 0, dropped=False, loss=None)
    state.round += 1
    return signal


async def time_steps(
    ctx: RankContext, stage: Stage, state: WorkerState, steps: int, *, distribution: bool = False
) -> list[float]:
    """Return the seconds of local steps, the first left out; at least one, and many for a
    distribution.
    """
    trainer, batch = stage.trainer, stage.worker(ctx.rank).batch
    count = 0

    async def step() -> float | None:
        nonlocal count
        if count > 1 and (ctx.stopping or ctx.now_ns >= stage.stop_criteria.deadline_ns):
            return None
        start = ctx.now
        args = (state.params, state.moments, ctx.rank, state.step + count, 0.0)
        await ctx.compute(
            lambda: numbers([trainer.local_step(*args)[0]]), work=batch
        )  # till its loss is there
        count += 1
        return ctx.now - start

    await step()
    if not distribution:
        return await repeat_timing(step, steps, MOST * steps)
    end_s, times = ctx.now + DISTRIBUTION_S, await repeat_timing(step, steps, MOST * steps)
    while len(times) < DISTRIBUTION and ctx.now < end_s and (taken_s := await step()) is not None:
        times.append(taken_s)
    return times


async def time_encoding(ctx: RankContext, stage: Stage, state: WorkerState) -> float:
    """Seconds of encoding a dense vector."""
    context = EncodeContext(
        min(worker.compression_ratio for worker in stage.plan.workers), stage.seed, ctx.rank
    )
    start = ctx.now
    await ctx.compute(
        partial(stage.link.encode, CodecState(), state.params, context), work=1, kind="compress"
    )
    return ctx.now - start


async def time_passes(
    ctx: RankContext, stage: Stage, state: WorkerState, times: int
) -> torch.Tensor:
    """Seconds of forward of each layer group, and of backward, the last layers first: medians of so
    many steps.
    """
    count, step = len(stage.parts), state.step
    tags = [stage.tag("passed", k) for k in range(2 * count)]
    ready = tuple(zip(end_shares(stage.parts), tags, strict=True))
    slices = [(part.start, part.stop) for part in stage.parts]
    rows = []
    for k in range(times):
        start = ctx.now_ns
        passes = partial(stage.trainer.passes_in_parts, state.params, ctx.rank, step + k, slices)
        await ctx.compute(passes, work=stage.worker(ctx.rank).batch, parts=ready)
        ends = [start, *[(await ctx.recv(tag)).start_ns for tag in tags]]
        rows.append([max(0, end - begin) / 1e9 for begin, end in pairwise(ends)])
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return torch.tensor([*middle[:count][::-1], *middle[count:]], dtype=torch.float64)


async def server(ctx: RankContext, stage: Stage, state: ServerState) -> int:
    """Say whose turn it is, answer every exchange, plan; send everyone the plan, or that the run
    ends before.
    """
    state.progress.begin(ctx.now)
    assigned, signal, reason = None, STOP, "profiled"
    try:
        costs = await measure_all(ctx, stage, state)
        assert stage.replan is not None
        state.profile, stages = stage.replan(*costs)
        rows = [[row_of(worker) for worker in planned.workers] for planned in stages]
        assigned = torch.tensor(rows, dtype=torch.float64).flatten() if rows else None
        state.assigned = None if assigned is None else (stage.index + 1, assigned)
        ctx.emit(ProfileMeasured(ctx.rank, state.profile.to_json()))
        ctx.emit(PlanMade(ctx.rank, stage.index + 1, rows))
        signal = NEXT if stage.following else STOP
    except OverError:
        reason = ctx.stopping or "seconds"
    state.progress.end_ns = end_time_ns(stage, ctx.now_ns)
    record_end(ctx, stage, state.progress, reason)
    for rank in stage.workers:
        state.progress.drops[rank] += 1  # a round that is part of no model
        await ctx.send(rank, stage.tag("order"), assigned, (signal, state.progress.end_ns, 0))
    if signal == STOP:
        ctx.time_accounting.close_at(state.progress.end_ns)
    return signal


async def measure_all(
    ctx: RankContext, stage: Stage, state: ServerState
) -> tuple[
    tuple[WorkerProfile, ...],
    float,
    float | None,
    AlphaBeta | None,
    ContentionCosts | None,
    tuple[CodecCost, ...],
]:
    """Return (workers, seconds of applying a push, bytes per second of the server's NIC, what
    all-reduces cost, what they and computing cost each other, what codecs cost). Raises OverError.
    """
    members = stage.workers
    times: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in members}
    steps = await collect_answers(ctx, stage, members)
    while not all(
        timed_enough(rows) for rows in times.values()
    ):  # in turn, so that all see the same weather
        for rank in members:
            await instruct(ctx, stage, (rank,), GO)
            times[rank].append((await collect_answers(ctx, stage, (rank,)))[rank])
    loaded = []
    for _ in range(REPEATS if len(members) > 1 else 0):
        await instruct(ctx, stage, members, GO)
        loaded.append(await collect_answers(ctx, stage, members))
    workers, noises = [], {"latency_s": list[float](), "compress_s": list[float]()}
    for rank in members:
        together = [row[rank] for row in loaded]
        workers.append(worker_profile(stage, rank, steps[rank], times[rank], together))
        noises["latency_s"].append(estimate([empty_s for empty_s, *_ in times[rank]]).noise / 2)
        noises["compress_s"].append(steps[rank][COSTS - 1])
    sums = beside = None
    if stage.sync.per_layer_group:
        workers = [
            await add_lines(ctx, stage, worker, rank)
            for rank, worker in zip(members, workers, strict=True)
        ]
        if len(members) > 1:
            (sums,) = await measure_line(ctx, stage, SUM, members, LINES_S)
            beside = await measure_beside(ctx, stage, max(row[0] for row in steps.values()), sums)
            beside = await with_layer_group_costs(ctx, stage, workers, sums, beside)
    server_bytes_s = nic_bytes_per_s(workers, stage.trainer.dense_bytes)
    apply_s = await time_apply(ctx, stage, state)
    codecs = await measure_codecs(ctx, stage)
    return equalize_costs(workers, noises), apply_s, server_bytes_s, sums, beside, codecs


async def add_lines(
    ctx: RankContext, stage: Stage, worker: WorkerProfile, rank: int
) -> WorkerProfile:
    """... and what messages between this worker and the server cost by their bytes."""
    up, down = await measure_line(ctx, stage, LINK, (rank,), LINES_S / stage.num_workers)
    back_s = worker.latency_s  # of the receipt
    up, down = (replace(way, latency_s=max(0.0, way.latency_s - back_s)) for way in (up, down))
    return replace(worker, push_line=up, pull_line=down)


async def measure_line(
    ctx: RankContext, stage: Stage, what: int, members: Sequence[int], budget_s: float
) -> list[AlphaBeta]:
    """What these workers find of messages of several sizes: those of every kind that they time, the
    least over the workers. In rounds until all are narrow, and as time allows; two large sizes at
    least. Raises OverError.
    """
    times: dict[int, list[tuple[float, ...]]] = {}
    end_s, sizes = ctx.now + budget_s, (*SMALL, *LARGE)
    while not times or (ctx.now < end_s and not all(map(timed_enough, times.values()))):
        for nbytes in sizes:
            start = ctx.now
            await instruct(ctx, stage, members, what, nbytes)
            found = (await collect_answers(ctx, stage, members)).values()
            kinds = 1 if what == SUM else 2
            times.setdefault(nbytes, []).append(
                tuple(min(own[kind] for own in found) for kind in range(kinds))
            )
            if (
                nbytes >= LARGE[1] and 3 * ctx.now - 2 * start > end_s
            ):  # the next size takes twice as long
                sizes = tuple(size for size in sizes if size <= nbytes)
                break
    kinds = range(len(times[LARGE[0]][0]))
    return [
        fit_line({nbytes: [row[kind] for row in rows] for nbytes, rows in times.items()})
        for kind in kinds
    ]


def timed_enough(rows: Sequence[Sequence[float]]) -> bool:
    """Whether each kind of exchange has been timed often enough."""
    return len(rows) >= REPEATS and (
        len(rows) >= MOST * REPEATS or all(map(is_narrow, zip(*rows, strict=True)))
    )


def row_of(worker: WorkerPlan) -> list[float]:
    """A worker's part of the plan, as it travels."""
    return [
        worker.local_steps,
        worker.data_share,
        worker.compression_ratio,
        worker.predicted_cycle_s or 0.0,
    ]


def worker_profile(
    stage: Stage,
    rank: int,
    steps: tuple[float, ...],
    alone: Sequence[tuple[float, ...]],
    together: Sequence[tuple[float, ...]],
) -> WorkerProfile:
    """Of what was timed: steps with an encoding, and rows of an exchange of nothing, of a push and
    of a pull.
    """
    (step_s, step_noise_s, spread_s, compress_s, _), more = steps[:COSTS], steps[COSTS:]
    step_times_s, passes = more[: len(LEVELS)], more[len(LEVELS) :]
    empty, up, down = (estimate(times) for times in zip(*alone, strict=True))
    latency_s = empty.median / 2  # an exchange of nothing crosses the link twice
    push_s, pull_s = (max(way.median - latency_s, latency_s, TICK_S) for way in (up, down))
    loaded = [
        max(statistics.median(times) - latency_s, TICK_S) for times in zip(*together, strict=True)
    ]
    _, push_loaded_s, pull_loaded_s = loaded or (None, None, None)
    beyond = (way_s - latency_s for way_s in (push_s, pull_s))
    push_bytes_s, pull_bytes_s = (
        stage.trainer.dense_bytes / way_s if way_s > 0 else None for way_s in beyond
    )
    return WorkerProfile(
        step_s=step_s,
        step_spread_s=spread_s,
        step_noise_s=step_noise_s,
        batch=stage.worker(rank).batch,
        push_s=push_s,
        push_noise_s=up.noise,
        push_loaded_s=push_loaded_s,
        pull_s=pull_s,
        pull_noise_s=down.noise,
        pull_loaded_s=pull_loaded_s,
        latency_s=latency_s,
        push_bytes_s=push_bytes_s,
        pull_bytes_s=pull_bytes_s,
        compress_s=compress_s,
        forward_s=passes[: len(passes) // 2],
        backward_s=passes[len(passes) // 2 :],
        step_times_s=step_times_s,
    )


def nic_bytes_per_s(workers: Sequence[WorkerProfile], dense_bytes: int) -> float | None:
    """Bytes per second through the server's port: what had come by the time at which each of the
    pushes was there that began together; None where nobody was slowed down.
    """
    loaded = [
        (w.push_loaded_s - w.latency_s, w.push_s) for w in workers if w.push_loaded_s is not None
    ]
    if not any(taken_s > SLOWED * alone_s for taken_s, alone_s in loaded):
        return None
    return max(
        (k + 1) * dense_bytes / taken_s
        for k, (taken_s, _) in enumerate(sorted(loaded))
        if taken_s > 0
    )

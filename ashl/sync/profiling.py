"""Profiling, a stage on the run's clock that measures the costs of each worker: steps, pushes,
pulls and encodings.

Use when: never by itself: `ashl profile` and schedules run it before other stages.
Avoid when: a model is to be trained: it learns nothing.
Alternatives: a profile from a file, `profile=FILE`.

Rule: all workers time local steps at the same time, `steps` of them after a warm-up step; the model
does not change. Then they exchange with the server one by one: an empty message, the dense model
up, the dense model down. At last all exchange at once, which measures the server's NIC. A transfer
is timed until its receipt has arrived, minus the time of the receipt. Each cost is a median; it is
repeated until its 95 % interval is narrow, up to a limit of repetitions and of time. Workers with
overlapping intervals get equal costs. The server makes the profile, plans the stages that follow,
and sends the plan to all workers.

With `per_layer_group` the workers also time both passes by layer group, and messages of several
sizes. Each worker exchanges them with the server alone; then all workers sum them, timed from the
arrival of the last worker. `ashl.plan.alpha_beta` fits latency and seconds per byte, with larger
sizes as long as time permits. `ashl.sync.timing` measures the rest: compute–communication
contention (`contention`), and encoding and decoding by the chosen codec and by `codecs`
(`codecs`).

`stop.seconds` and an interrupt end the stage at once, without a profile.

Source: Shen et al., "ASHL", IEEE TC 2024, section on profiling.
Differs: the paper profiles for ten epochs, which its reported times do not contain.

Family: stages of ASHL.
Status: internal.
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
from ashl.device import read_scalars
from ashl.option import Natural, option
from ashl.overlap.timeline import end_shares
from ashl.plan.alpha_beta import LARGE, SMALL, AlphaBeta, fit_line
from ashl.plan.confidence import equalize_costs, estimate, is_narrow, quantiles, trimmed_deviation
from ashl.plan.plan import WorkerPlan
from ashl.plan.profile import TICK_S, CodecCost, WorkerProfile
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import PlanMade, ProfileMeasured
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import GO, NEXT, STOP, Loop, StageConfig
from ashl.sync.timing.codecs import CODEC, measure_codecs, time_codec
from ashl.sync.timing.contention import CONTENTION, measure_contention, time_contention
from ashl.sync.timing.exchanges import (
    DOWN,
    EMPTY,
    LINK,
    RESULT,
    SUM,
    UP,
    RunEndedError,
    collect_answers,
    repeat_timing,
    send_order,
    time_apply,
    time_exchange,
    time_sum,
)
from ashl.topology.ending import end_time_ns, leave_stage, record_end
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import BarrierRule, ServerState

REPEATS = 3  # smallest number of repetitions of an exchange
MOST = 20  # largest number of repetitions, as a multiple of the smallest
# Seconds after which no further repetition begins, beyond the smallest number: of steps, and of
# exchanges of all workers one by one.
REPEATS_S = 60.0
SLOWED = 1.1  # factor by which concurrent pushes must be slower to reveal the server's NIC
DISTRIBUTION = 2_000  # largest number of steps for a distribution
DISTRIBUTION_S = 4.0  # seconds after which no further step for a distribution begins
# numbers in a worker's first answer: a step, its noise and spread, an encoding and its noise
COSTS = 5
# seconds for messages of several sizes between the server and all workers, and again for sums
LINES_S = 2.0


@option
class Profiling(BarrierRule):
    """A stage whose loops replace the topology's, and in which no model is learned."""

    steps: Natural
    per_layer_group: bool
    codecs: tuple[dict[str, Any], ...]

    def loop(self, stage: StageConfig, rank: int) -> Loop:
        return server if rank == stage.server else worker


async def worker(ctx: RankContext, stage: StageConfig, state: WorkerState) -> int:
    """Measure costs at the server's orders, then receive the plan. Returns: the final signal."""
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
            if signal in (NEXT, STOP):
                break
            found, passes = await execute_order(ctx, stage, state, signal, end_ns, *more)
    except RunEndedError as over:
        (order,) = over.order
        signal, end_ns, *_ = (int(value) for value in order.meta)
    state.assigned = None if order.payload is None else (stage.index + 1, order.payload)
    stage.trainer.set_worker_state(ctx.rank, before)  # timed steps must leave no effect
    leave_stage(ctx, stage, signal, end_ns)
    ctx.record_round(stage.index, state.round, 0, 0, dropped=False, loss=None)
    state.round += 1
    return signal


async def execute_order(
    ctx: RankContext, stage: StageConfig, state: WorkerState, order: int, value: int, count: int
) -> tuple[tuple[float, ...], torch.Tensor | None]:
    """Measure what the server orders. Returns: (seconds, further seconds as a tensor or None).

    Raises: RunEndedError.
    """
    if order == SUM:
        return (await time_sum(ctx, stage, value),), None
    if order == CONTENTION:
        return await time_contention(ctx, stage, state, value, count), None
    if order == CODEC:
        return (), await time_codec(ctx, stage, state, value)
    if order == LINK:
        up_s = await time_exchange(ctx, stage, UP, value)
        return (up_s, await time_exchange(ctx, stage, DOWN, value)), None
    assert order == GO, f"{order} is not an order"
    empty_s = await time_exchange(ctx, stage, EMPTY)
    up_s = await time_exchange(ctx, stage, UP)
    return (empty_s, up_s, await time_exchange(ctx, stage, DOWN)), None


async def time_steps(
    ctx: RankContext,
    stage: StageConfig,
    state: WorkerState,
    steps: int,
    *,
    distribution: bool = False,
) -> list[float]:
    """Return the seconds of at least one local step, after a warm-up step; of many for a
    distribution.
    """
    trainer, batch = stage.trainer, stage.worker(ctx.rank).batch
    count = 0

    repeats_end_s = ctx.now + REPEATS_S

    async def step() -> float | None:
        nonlocal count
        if count > 1 and (ctx.stop_reason or ctx.now_ns >= stage.stop_criteria.deadline_ns):
            return None
        if count > steps and ctx.now >= repeats_end_s:
            return None
        start = ctx.now
        args = (state.params, state.moments, ctx.rank, state.step + count, 0.0)
        # reading the loss waits until a device has finished the step
        await ctx.compute(lambda: read_scalars([trainer.local_step(*args)[0]]), work=batch)
        count += 1
        return ctx.now - start

    await step()
    if not distribution:
        return await repeat_timing(step, steps, MOST * steps)
    end_s = ctx.now + DISTRIBUTION_S
    times = await repeat_timing(step, steps, MOST * steps)
    while len(times) < DISTRIBUTION and ctx.now < end_s and (taken_s := await step()) is not None:
        times.append(taken_s)
    return times


async def time_encoding(ctx: RankContext, stage: StageConfig, state: WorkerState) -> float:
    """Return the seconds of encoding a dense vector."""
    context = EncodeContext(
        min(worker.compression_ratio for worker in stage.plan.workers), stage.seed, ctx.rank
    )
    start = ctx.now
    await ctx.compute(
        partial(stage.pipeline.encode, CodecState(), state.params, context), work=1, kind="compress"
    )
    return ctx.now - start


async def time_passes(
    ctx: RankContext, stage: StageConfig, state: WorkerState, times: int
) -> torch.Tensor:
    """Return the seconds of forward of each layer group, then of backward, both in backward order.

    Each is the median of `times` steps.
    """
    count, step = len(stage.layer_groups), state.step
    tags = [stage.tag("passed", k) for k in range(2 * count)]
    ready = tuple(zip(end_shares(stage.layer_groups), tags, strict=True))
    slices = [(part.start, part.stop) for part in stage.layer_groups]
    rows = []
    for k in range(times):
        start = ctx.now_ns
        passes = partial(stage.trainer.passes_in_parts, state.params, ctx.rank, step + k, slices)
        await ctx.compute(passes, work=stage.worker(ctx.rank).batch, parts=ready)
        ends = [start, *[(await ctx.recv(tag)).start_ns for tag in tags]]
        rows.append([max(0, end - begin) / 1e9 for begin, end in pairwise(ends)])
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return torch.tensor([*middle[:count][::-1], *middle[count:]], dtype=torch.float64)


async def server(ctx: RankContext, stage: StageConfig, state: ServerState) -> int:
    """Order all measurements, make the profile and the plan, and send the plan to all workers.

    Returns: the final signal, STOP if the run ends before all is measured.
    """
    state.progress.begin(ctx.now)
    assigned = None
    signal, reason = STOP, "profiled"
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
    except RunEndedError:
        reason = ctx.stop_reason or "seconds"
    state.progress.end_ns = end_time_ns(stage, ctx.now_ns)
    record_end(ctx, stage, state.progress, reason)
    for rank in stage.workers:
        state.progress.drops[rank] += 1  # this round is part of no model
        await ctx.send(rank, stage.tag("order"), assigned, (signal, state.progress.end_ns, 0))
    if signal == STOP:
        ctx.time_accounting.close(state.progress.end_ns)
    return signal


async def measure_all(
    ctx: RankContext, stage: StageConfig, state: ServerState
) -> tuple[
    tuple[WorkerProfile, ...],
    float,
    float | None,
    AlphaBeta | None,
    ContentionCosts | None,
    tuple[CodecCost, ...],
]:
    """Measure everything that a profile holds.

    Returns: (worker profiles, seconds of applying a push, bytes per second of the server's NIC,
    costs of all-reduces, contention of sums and computing, costs of codecs). Raises: RunEndedError.
    """
    members = stage.workers
    times: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in members}
    steps = await collect_answers(ctx, stage, members)
    end_s = ctx.now + REPEATS_S
    while not all(has_enough_repetitions(rows, over=ctx.now >= end_s) for rows in times.values()):
        for rank in members:  # interleaved, so that other load affects all workers equally
            await send_order(ctx, stage, (rank,), GO)
            times[rank].append((await collect_answers(ctx, stage, (rank,)))[rank])
    loaded = []
    for _ in range(REPEATS if len(members) > 1 else 0):
        await send_order(ctx, stage, members, GO)
        loaded.append(await collect_answers(ctx, stage, members))
    workers = []
    noises: dict[str, list[float]] = {"latency_s": [], "compress_s": []}
    for rank in members:
        together = [row[rank] for row in loaded]
        workers.append(worker_profile(stage, rank, steps[rank], times[rank], together))
        noises["latency_s"].append(estimate([empty_s for empty_s, *_ in times[rank]]).noise / 2)
        noises["compress_s"].append(steps[rank][COSTS - 1])
    sums = contention = None
    if stage.sync.per_layer_group:
        workers = [
            await add_lines(ctx, stage, worker, rank)
            for rank, worker in zip(members, workers, strict=True)
        ]
        if len(members) > 1:
            (sums,) = await measure_line(ctx, stage, SUM, members, LINES_S)
            contention = await measure_contention(
                ctx, stage, max(row[0] for row in steps.values()), sums
            )
    server_bytes_s = nic_bytes_per_s(workers, stage.trainer.dense_bytes)
    apply_s = await time_apply(ctx, stage, state)
    codecs = await measure_codecs(ctx, stage)
    return equalize_costs(workers, noises), apply_s, server_bytes_s, sums, contention, codecs


async def add_lines(
    ctx: RankContext, stage: StageConfig, worker: WorkerProfile, rank: int
) -> WorkerProfile:
    """Return the worker's profile with the costs of messages to and from the server by their
    bytes.
    """
    up, down = await measure_line(ctx, stage, LINK, (rank,), LINES_S / stage.num_workers)
    back_s = worker.latency_s  # time of the receipt
    up, down = (replace(way, latency_s=max(0.0, way.latency_s - back_s)) for way in (up, down))
    return replace(worker, push_line=up, pull_line=down)


async def measure_line(
    ctx: RankContext, stage: StageConfig, what: int, members: Sequence[int], budget_s: float
) -> list[AlphaBeta]:
    """Return the fitted costs of messages by their bytes, one per kind that the workers time.

    Of each repetition the shortest time over the workers counts. Sizes are measured in rounds until
    all intervals are narrow or the time is over, at least two large sizes. Raises: RunEndedError.
    """
    times: dict[int, list[tuple[float, ...]]] = {}
    end_s = ctx.now + budget_s
    sizes = (*SMALL, *LARGE)
    while not times or (ctx.now < end_s and not all(map(has_enough_repetitions, times.values()))):
        for nbytes in sizes:
            start = ctx.now
            await send_order(ctx, stage, members, what, nbytes)
            found = (await collect_answers(ctx, stage, members)).values()
            kinds = 1 if what == SUM else 2
            times.setdefault(nbytes, []).append(
                tuple(min(own[kind] for own in found) for kind in range(kinds))
            )
            # the next size takes twice as long
            if nbytes >= LARGE[1] and 3 * ctx.now - 2 * start > end_s:
                sizes = tuple(size for size in sizes if size <= nbytes)
                break
    kinds = range(len(times[LARGE[0]][0]))
    return [
        fit_line({nbytes: [row[kind] for row in rows] for nbytes, rows in times.items()})
        for kind in kinds
    ]


def has_enough_repetitions(rows: Sequence[Sequence[float]], *, over: bool = False) -> bool:
    """Return True if each kind of exchange has a narrow interval or the largest number of
    repetitions; if the time is over, the smallest number is enough.
    """
    return len(rows) >= REPEATS and (
        over or len(rows) >= MOST * REPEATS or all(map(is_narrow, zip(*rows, strict=True)))
    )


def row_of(worker: WorkerPlan) -> list[float]:
    """Return a worker's part of the plan as numbers for a message."""
    return [
        worker.local_steps,
        worker.data_share,
        worker.compression_ratio,
        worker.predicted_cycle_s or 0.0,
    ]


def worker_profile(
    stage: StageConfig,
    rank: int,
    steps: tuple[float, ...],
    alone: Sequence[tuple[float, ...]],
    together: Sequence[tuple[float, ...]],
) -> WorkerProfile:
    """Return the profile of a worker from its timings.

    Args: `steps` is its first answer, with quantiles and passes if measured. `alone` and `together`
    are rows of seconds (empty message, push, pull), one by one and all workers at once.
    """
    step_s, step_noise_s, spread_s, compress_s, _ = steps[:COSTS]
    more = steps[COSTS:]  # with `per_layer_group`: quantiles of a step, and both passes by group
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
    """Return the bytes per second through the server's NIC; None if concurrent pushes were not
    slower.

    It is the highest rate at which pushes that began together had arrived.
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

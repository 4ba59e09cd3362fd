"""Profiling as a stage on the run's tally: what a step, a push, a pull and an encoding cost each worker.

Rule: all workers time local steps at once, `steps` of them after one to warm up (the model stays as it is). Then they
take turns to exchange with the server, alone: nothing, the dense model up, the dense model down; at last all at once,
which is a figure of its own. A transfer is timed until its receipt is there, less the way of the receipt. Each
cost is a median of as many repetitions as its 95 % interval takes to be narrow, up to a bound; workers whose intervals
overlap count as equal. The server makes the profile, plans the stages that follow, and sends everyone the plan.

With `by_part` they also time both passes by layer group, and then messages of several sizes: each worker alone to the
server and from there, and all workers in a sum, which counts from when the last one has come. Of each, latency and
seconds per byte are fitted (`ashl.plan.line`); sizes go up for as long as there is time.

`stop.seconds` and an interrupt end it at once, without a profile.

Source: Shen et al., "ASHL", IEEE TC 2024, section on profiling (there: ten epochs, off the reported tally).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ashl.aggregate.weighted import Push
from ashl.compression.contract import Turn
from ashl.learn.device import numbers
from ashl.option import Natural, option
from ashl.overlap.chain import passed
from ashl.plan.line import LARGE, SMALL, Line, fitted
from ashl.plan.plan import WorkerPlan
from ashl.plan.profile import TICK_S, WorkerProfile, levelled
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.runtime.records import PlanMade, ProfileMeasured
from ashl.stage.link import Ends
from ashl.stage.rule import Loop
from ashl.stage.stage import GO, NEXT, STOP, Stage
from ashl.topology.ending import leave, record_end, within
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import BarrierRule, ServerState

REPEATS = 3  # of an exchange at least
MOST = 20  # times as many repetitions at most
NARROW = 0.05  # half an interval, as a share of its median
SLOWED = 1.1  # a push among others that takes so many times as long shows the server's port
EMPTY, UP, DOWN, RESULT = 0, 1, 2, 3  # what a worker asks of the server, or that it has done
LINK, SUM = -1, -2  # orders beside GO: time a message of this size both ways, or in a sum of all
LINES_S = 2.0  # for the messages of several sizes to and from all workers, and as long again for sums


class Figure(NamedTuple):
    """A median of times, and half of its 95 % interval."""

    median: float
    noise: float


@option
class Profiling(BarrierRule):
    """Its loops stand in for the topology's: nothing is learned here."""

    steps: Natural
    by_part: bool

    def loop(self, stage: Stage, rank: int) -> Loop:
        return server if rank == stage.server else worker


class OverError(Exception):
    """The run ends before all is measured; a worker has been told so."""

    def __init__(self, *order: Message) -> None:
        super().__init__("the run ends while it measures")
        self.order = order


async def worker(node: Node, stage: Stage, state: WorkerState) -> int:
    """Measure, and again whenever the server says so; take over the plan that it sends at the end."""
    assert isinstance(stage.sync, Profiling)
    times = await time_steps(node, stage, state, max(1, stage.sync.steps))
    compress_s = await repeated(partial(time_encoding, node, stage, state), REPEATS, REPEATS)
    found: tuple[float, ...] = (*figure(times), spread(times), statistics.median(compress_s))
    passes = await time_passes(node, stage, state, len(times)) if stage.sync.by_part else None
    try:
        while True:
            await node.send(stage.server, stage.tag("ask"), passes, (RESULT, *found))
            order = await node.recv(stage.tag("order"))
            word, end_ns = (int(value) for value in order.meta)
            passes, found = None, ()
            if word == SUM:
                found = (await time_sum(node, stage, end_ns),)
            elif word == LINK:
                found = await time_exchange(node, stage, UP, end_ns), await time_exchange(node, stage, DOWN, end_ns)
            elif word == GO:
                found = (await time_exchange(node, stage, EMPTY),)
                found += await time_exchange(node, stage, UP), await time_exchange(node, stage, DOWN)
            else:
                break
    except OverError as over:
        (order,) = over.order
        word, end_ns = (int(value) for value in order.meta)
    state.assigned = None if order.body is None else (stage.index + 1, order.body)
    leave(node, stage, word, end_ns)
    node.round(stage.index, state.round, 0, 0, dropped=False, loss=None)
    state.round += 1
    return word


async def repeated(once: Callable[[], Coroutine[None, None, float | None]], least: int, most: int) -> list[float]:
    """Times until their interval is narrow; fewer where there is nothing more to measure (None)."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and not is_narrow(times)):
        if (taken := await once()) is None:
            break
        times.append(taken)
    return times


def figure(times: Sequence[float]) -> Figure:
    """By order statistics: of n times, those √n to both sides of the middle (1.96/2 of it) bound the median."""
    ordered, n = sorted(times), len(times)
    k = max(0, int((n - 1.96 * math.sqrt(n)) / 2))
    noise = (ordered[n - 1 - k] - ordered[k]) / 2
    return Figure(statistics.median(ordered), noise if noise >= TICK_S else 0.0)


def spread(times: Sequence[float]) -> float:
    """Standard deviation of times without their outermost tenths, where the machine did something else."""
    ordered, trim = sorted(times), len(times) // 10
    return statistics.pstdev(ordered[trim : len(ordered) - trim])


def is_narrow(times: Sequence[float]) -> bool:
    found = figure(times)
    return found.noise <= NARROW * found.median


async def time_steps(node: Node, stage: Stage, state: WorkerState, steps: int) -> list[float]:
    """Seconds of local steps, the first left out; at least one."""
    trainer, batch = stage.trainer, stage.worker(node.rank).batch
    count = 0

    async def step() -> float | None:
        nonlocal count
        if count > 1 and (node.stopping or node.now_ns >= stage.judge.deadline_ns):
            return None
        start = node.now
        args = (state.params, state.moments, node.rank, state.step + count, 0.0)
        await node.compute(lambda: numbers([trainer.local_step(*args)[0]]), work=batch)  # till its loss is there
        count += 1
        return node.now - start

    await step()
    return await repeated(step, steps, MOST * steps)


async def time_encoding(node: Node, stage: Stage, state: WorkerState) -> float:
    """Seconds of encoding a dense vector."""
    turn = Turn(min(worker.compression_ratio for worker in stage.plan.workers), stage.seed, node.rank)
    start = node.now
    await node.compute(partial(stage.link.encode, Ends(), state.params, turn), work=1, kind="compress")
    return node.now - start


async def time_passes(node: Node, stage: Stage, state: WorkerState, times: int) -> torch.Tensor:
    """Seconds of forward of each layer group, and of backward, the last layers first: medians of so many steps."""
    count, step = len(stage.parts), state.step
    tags = [stage.tag("passed", k) for k in range(2 * count)]
    ready = tuple(zip(passed(stage.parts), tags, strict=True))
    slices = [(part.start, part.stop) for part in stage.parts]
    rows = []
    for k in range(times):
        start = node.now_ns
        passes = partial(stage.trainer.passes_in_parts, state.params, node.rank, step + k, slices)
        await node.compute(passes, work=stage.worker(node.rank).batch, parts=ready)
        ends = [start, *[(await node.recv(tag)).start_ns for tag in tags]]
        rows.append([max(0, end - begin) / 1e9 for begin, end in pairwise(ends)])
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return torch.tensor([*middle[:count][::-1], *middle[count:]], dtype=torch.float64)


async def time_sum(node: Node, stage: Stage, nbytes: int) -> float:
    """Seconds of a sum over all workers, from when this one has come to it."""
    body, start = blank(stage, nbytes), node.now
    await node.all_reduce(body, stage.workers)
    return node.now - start


def blank(stage: Stage, nbytes: int) -> Any:
    return stage.trainer.blank(nbytes / stage.trainer.dense_bytes)


async def time_exchange(node: Node, stage: Stage, what: int, nbytes: int | None = None) -> float:
    """Seconds until a body of so many bytes, or of the dense model's, is there and its receipt is back. Raises
    OverError."""
    nbytes = stage.trainer.dense_bytes if nbytes is None else nbytes
    body, start = blank(stage, nbytes) if what == UP else None, node.now
    await node.send(stage.server, stage.tag("ask"), body, (what, nbytes))
    answer = await node.recv(stage.tag("answer"), stage.tag("order"))
    if answer.tag == stage.tag("order"):
        raise OverError(answer)
    return node.now - start


async def server(node: Node, stage: Stage, state: ServerState) -> int:
    """Say whose turn it is, answer every exchange, plan; send everyone the plan, or that the run ends before."""
    state.tally.begin(node.now)
    assigned, word, reason = None, STOP, "profiled"
    try:
        costs = await measured(node, stage, state)
        assert stage.replan is not None
        state.profile, stages = stage.replan(*costs)
        rows = [[row_of(worker) for worker in planned.workers] for planned in stages]
        assigned = torch.tensor(rows, dtype=torch.float64).flatten() if rows else None
        state.assigned = None if assigned is None else (stage.index + 1, assigned)
        node.emit(ProfileMeasured(node.rank, state.profile.to_json()))
        node.emit(PlanMade(node.rank, stage.index + 1, rows))
        word = NEXT if stage.following else STOP
    except OverError:
        reason = node.stopping or "seconds"
    state.tally.end_ns = within(stage, node.now_ns)
    record_end(node, stage, state.tally, reason)
    for rank in stage.workers:
        await node.send(rank, stage.tag("order"), assigned, (word, state.tally.end_ns))
    if word == STOP:
        node.ledger.close(state.tally.end_ns)
    return word


async def measured(
    node: Node, stage: Stage, state: ServerState
) -> tuple[tuple[WorkerProfile, ...], float, float | None, Line | None]:
    """(workers, seconds of applying a push, bytes per second of the server's port, what sums cost). Raises
    OverError."""
    members = stage.workers
    times: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in members}
    steps = await answers(node, stage, members)
    while not all(enough(rows) for rows in times.values()):  # in turn, so that all see the same weather
        for rank in members:
            await tell(node, stage, (rank,))
            times[rank].append((await answers(node, stage, (rank,)))[rank])
    loaded = []
    for _ in range(REPEATS if len(members) > 1 else 0):
        await tell(node, stage, members)
        loaded.append(await answers(node, stage, members))
    workers = []
    for rank in members:
        together = [row[rank] for row in loaded]
        workers.append(worker_profile(stage, rank, steps[rank], times[rank], together))
    sums = None
    if stage.sync.by_part:
        workers = [await with_lines(node, stage, worker, rank) for rank, worker in zip(members, workers, strict=True)]
        if len(members) > 1:
            (sums,) = await line(node, stage, SUM, members, LINES_S)
    server_bytes_s = port(workers, stage.trainer.dense_bytes)
    return levelled(workers), await time_apply(node, stage, state), server_bytes_s, sums


async def with_lines(node: Node, stage: Stage, worker: WorkerProfile, rank: int) -> WorkerProfile:
    """... and what messages between this worker and the server cost by their bytes."""
    up, down = await line(node, stage, LINK, (rank,), LINES_S / stage.num_workers)
    back_s = worker.latency_s  # of the receipt
    up, down = (replace(way, latency_s=max(0.0, way.latency_s - back_s)) for way in (up, down))
    return replace(worker, push_line=up, pull_line=down)


async def line(node: Node, stage: Stage, what: int, members: Sequence[int], budget_s: float) -> list[Line]:
    """What these workers find of messages of several sizes: those of every kind that they time, the least over the
    workers. In rounds until all are narrow, and as time allows; two large sizes at least. Raises OverError."""
    times: dict[int, list[tuple[float, ...]]] = {}
    end_s, sizes = node.now + budget_s, (*SMALL, *LARGE)
    while not times or (node.now < end_s and not all(map(enough, times.values()))):
        for nbytes in sizes:
            start = node.now
            for rank in members:
                await node.send(rank, stage.tag("order"), None, (what, nbytes))
            found = (await answers(node, stage, members)).values()
            times.setdefault(nbytes, []).append(tuple(map(min, zip(*found, strict=True))))
            if nbytes >= LARGE[1] and 3 * node.now - 2 * start > end_s:  # the next size takes twice as long
                sizes = tuple(size for size in sizes if size <= nbytes)
                break
    kinds = range(len(times[LARGE[0]][0]))
    return [fitted({nbytes: [row[kind] for row in rows] for nbytes, rows in times.items()}) for kind in kinds]


def enough(rows: Sequence[Sequence[float]]) -> bool:
    """Whether each kind of exchange has been timed often enough."""
    return len(rows) >= REPEATS and (len(rows) >= MOST * REPEATS or all(map(is_narrow, zip(*rows, strict=True))))


async def tell(node: Node, stage: Stage, members: Sequence[int]) -> None:
    """It is their turn."""
    for rank in members:
        await node.send(rank, stage.tag("order"), None, (GO, 0))


async def answers(node: Node, stage: Stage, members: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """What these workers found, while their exchanges are answered. Raises OverError."""
    found: dict[int, tuple[float, ...]] = {}
    while len(found) < len(members):
        message = await node.recv(stage.tag("ask"), before_s=stage.judge.deadline_s)
        if message is None or node.stopping:
            raise OverError
        what, *values = message.meta
        if what == RESULT:
            found[message.src] = (*values, *(() if message.body is None else message.body.tolist()))
        else:
            body = blank(stage, int(values[0])) if what == DOWN else None
            await node.send(message.src, stage.tag("answer"), body)
    return found


async def time_apply(node: Node, stage: Stage, state: ServerState) -> float:
    """Seconds of applying one push; the model stays as it is."""
    push = Push(0, stage.trainer.blank(1.0), 1, 1, 0, 0.0, 0.0, 0.0, 0.0)

    def apply() -> None:
        stage.outer.step(state.outer_state, state.params, stage.aggregate.fold((push,), [1.0]), 0.0)

    start = node.now
    await node.compute(apply, work=1, kind="apply")
    return node.now - start


def row_of(worker: WorkerPlan) -> list[float]:
    """A worker's part of the plan, as it travels."""
    return [worker.local_steps, worker.data_share, worker.compression_ratio, worker.predicted_cycle_s or 0.0]


def worker_profile(
    stage: Stage,
    rank: int,
    steps: tuple[float, ...],
    alone: Sequence[tuple[float, ...]],
    together: Sequence[tuple[float, ...]],
) -> WorkerProfile:
    """Of what was timed: steps with an encoding, and rows of an exchange of nothing, of a push and of a pull."""
    (step_s, step_noise_s, spread_s, compress_s), passes = steps[:4], steps[4:]
    empty, up, down = (figure(times) for times in zip(*alone, strict=True))
    latency_s = empty.median / 2  # an exchange of nothing crosses the link twice
    push_s, pull_s = (max(way.median - latency_s, latency_s, TICK_S) for way in (up, down))
    loaded = [max(statistics.median(times) - latency_s, TICK_S) for times in zip(*together, strict=True)]
    _, push_loaded_s, pull_loaded_s = loaded or (None, None, None)
    beyond = (way_s - latency_s for way_s in (push_s, pull_s))
    push_bytes_s, pull_bytes_s = (stage.trainer.dense_bytes / way_s if way_s > 0 else None for way_s in beyond)
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
    )


def port(workers: Sequence[WorkerProfile], dense_bytes: int) -> float | None:
    """Bytes per second through the server's port: what had come by the time at which each of the pushes was there that
    began together; None where nobody was slowed down."""
    loaded = [(w.push_loaded_s - w.latency_s, w.push_s) for w in workers if w.push_loaded_s is not None]
    if not any(taken_s > SLOWED * alone_s for taken_s, alone_s in loaded):
        return None
    return max((k + 1) * dense_bytes / taken_s for k, (taken_s, _) in enumerate(sorted(loaded)) if taken_s > 0)

"""What `ashl profile --full` measures beside a profile's medians, see `ashl.plan.full`.

Rule: all workers take steps at once for `STEPS_S`, of the profile's batch size and for shorter of a half and a quarter
of it, and then each of them alone. Messages of several sizes go each way, each worker alone and then all at once, round
by round; so do sums over the first g workers. Of every round a line is fitted through its sizes, and latency and
seconds per byte are medians over the rounds. What the last of n messages at once takes longer than one alone is n times
what each holds the server's port; where bytes slow nobody down, that has no rate. Every codec in question encodes the
whole model, and its layers without the largest.

What messages cost the cores is the processor time that ranks use while all workers exchange without a pause, by size,
half of it for each end. What is used beyond that, and a step alone, where all take a step between two of them, is what
computing costs more after a pause. Of sums and gatherings the processor time is measured beside the whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ashl.compression.contract import Turn
from ashl.learn.device import numbers
from ashl.plan.full import Coding, Cost, Full, Handling, ServerCosts, StepTimes, Sum, WorkerCosts, quantiles
from ashl.plan.noise import figure
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly, Vector
from ashl.stage.link import Ends
from ashl.stage.stage import Stage
from ashl.sync.timing.exchanges import (
    BOTH,
    DOWN,
    EMPTY,
    GATHER,
    SUMS,
    UP,
    answers,
    tell,
    time_apply,
    time_exchange,
)
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState

STEPS, ALONE, PUSH, PULL, CODING = range(-3, -8, -1)  # orders, with a batch size, bytes, or which codec
LOADED, ROUNDS_OF = -10, -11  # ... and with bytes, without steps and with them
STEPS_S = {STEPS: 8.0, ALONE: 0.75}  # with the batch size of the profile; a quarter of it with others
LEAST, MOST = 12, 20_000  # steps
LINKS_S, SUMS_S, CODINGS_S = 16.0, 8.0, 1.5  # in all; of each codec
LOADED_S = 1.0  # of each size
ROUNDS = 3, 30  # of messages of every size, at least and at most
TEAMS = 7  # sizes of groups that sum, at most
SLOWED = 1.1  # a byte of many at once that costs so many times as much as alone shows the server's port


async def timed(node: Node, stage: Stage, state: WorkerState, word: int, value: int) -> torch.Tensor:
    """What a worker finds that has this order. Raises OverError."""
    if word in STEPS_S:
        found = await time_batch(node, stage, state, value, STEPS_S[word])
    elif word == CODING:
        found = await time_coding(node, stage, state.params, value)
    elif word in (LOADED, ROUNDS_OF):
        found = await time_loaded(node, stage, state, value, steps=word == ROUNDS_OF)
    else:
        what = EMPTY if not value else UP if word == PUSH else DOWN
        found = [await time_exchange(node, stage, what, value or None)]
    return torch.tensor(found, dtype=torch.float64)


async def time_batch(node: Node, stage: Stage, state: WorkerState, batch: int, budget_s: float) -> list[float]:
    """(count, median, mean, half the median's interval, drift, share of a core in use, quantiles ...) of steps with so
    many samples."""
    end_s = node.now + (budget_s if batch == stage.worker(node.rank).batch else budget_s / 4)
    times, begun, used = list[float](), node.now, node.used
    while len(times) <= LEAST or (node.now < end_s and len(times) < MOST):
        if node.stopping or node.now_ns >= stage.judge.deadline_ns:
            break
        start = node.now
        await node.compute(partial(a_step, node, stage, state, len(times), batch), work=batch)
        times.append(max(1e-9, node.now - start))
    share = (node.used - used) / max(1e-9, node.now - begun)
    times = times[1:] or times or [1e-9]  # the first allocates
    found, half = figure(times), len(times) // 2
    drift = statistics.median(times[half:]) / statistics.median(times[:half]) - 1 if half else 0.0
    return [len(times), found.median, statistics.fmean(times), found.noise, drift, share, *quantiles(times)]


async def time_coding(node: Node, stage: Stage, params: Vector, k: int) -> list[float]:
    """(elements, encoding, half its interval, decoding, half of that) of each link of a codec."""
    found: list[float] = []
    for link in stage.timed[k][1]:
        found.append(link.d)
        vector = params if isinstance(params, SizeOnly) else params[: link.d]
        ends, turn = (Ends(), Ends()), Turn(link.codec.ratio or 1.0, stage.seed, node.rank, round=1)
        encode = partial(link.encode, ends[0], vector, turn)
        work, end_s = link.d / stage.trainer.num_params, node.now + CODINGS_S / 2 / stage.num_workers
        rows: list[tuple[float, float]] = []
        while len(rows) < LEAST or (len(rows) < MOST and node.now < end_s):
            start = node.now
            body = await node.compute(encode, work=work, kind="compress")
            encoded = node.now
            link.decode(ends[1], node.rank, body)  # off the simulator's clock, as where a server takes it in
            rows.append((encoded - start, node.now - encoded))
            if node.stopping or node.now_ns >= stage.judge.deadline_ns:
                break
        for times in zip(*(rows[1:] or rows), strict=True):  # the first allocates
            found += [statistics.fmean(times), figure(times).noise]
    return found


async def time_loaded(node: Node, stage: Stage, state: WorkerState, nbytes: int, *, steps: bool) -> list[float]:
    """(exchanges of so many bytes both ways, perhaps each after a step; seconds of a core that they took here)."""
    batch, k, used, end_s = stage.worker(node.rank).batch, 0, node.used, node.now + LOADED_S
    while k < LEAST or (node.now < end_s and k < MOST):
        if steps:
            await node.compute(partial(a_step, node, stage, state, k, batch), work=batch)
        await time_exchange(node, stage, BOTH if nbytes else EMPTY, nbytes or None)
        k += 1
    return [k, node.used - used]


def a_step(node: Node, stage: Stage, state: WorkerState, k: int, batch: int) -> list[float]:
    """The k-th of so many samples; the model stays as it is."""
    span = range(k * batch, (k + 1) * batch)
    return numbers([stage.trainer.local_step(state.params, state.moments, node.rank, k, 0.0, span)[0]])


async def measured_full(node: Node, stage: Stage, state: ServerState) -> Full:
    """The server's side of all of it. Raises OverError."""
    steps = await all_steps(node, stage)
    alone = [await ask(node, stage, (rank,), ALONE, stage.worker(rank).batch) for rank in stage.workers]
    single = [(found[rank][5], step_times(stage.worker(rank).batch, found[rank])) for rank, found in enumerate(alone)]
    links, port = await all_links(node, stage)
    workers = tuple(
        WorkerCosts(
            steps=steps[rank],
            alone_s=own.mean_s,
            push=links[PUSH][rank],
            pull=links[PULL][rank],
            alone=own,
            used=min(1.0, used),
        )
        for rank, (used, own) in enumerate(single)
    )
    applying = figure([await time_apply(node, stage, state) for _ in range(ROUNDS[1])][1:])
    server = ServerCosts(apply_s=applying.median, apply_noise_s=applying.noise, into=port[PUSH], out=port[PULL])
    sums = await all_sums(node, stage)
    return Full(
        made="",
        versions={},
        workers=workers,
        server=server,
        sums=sums,
        codings=tuple([await coding(node, stage, k) for k in range(len(stage.timed))]),
        gathering=await gathering(node, stage) if sums else None,
        handling=await all_handling(node, stage, workers),
    )


def step_times(batch: int, row: Sequence[float]) -> StepTimes:
    """As a worker has found them."""
    count, median_s, mean_s, noise_s, drift, _, *times = row
    return StepTimes(
        batch=batch,
        count=int(count),
        median_s=median_s,
        mean_s=mean_s,
        noise_s=noise_s,
        drift=drift,
        times_s=tuple(times),
    )


async def ask(node: Node, stage: Stage, members: Sequence[int], word: int, value: int) -> dict[int, tuple[float, ...]]:
    await tell(node, stage, members, word, value)
    return await answers(node, stage, members)


async def all_steps(node: Node, stage: Stage) -> list[tuple[StepTimes, ...]]:
    """By worker: of its own batch size, and of smaller ones."""
    found: list[list[StepTimes]] = [[] for _ in stage.workers]
    for share in (1, 2, 4):
        for rank in stage.workers:
            await tell(node, stage, (rank,), STEPS, max(1, stage.worker(rank).batch // share))
        answered = await answers(node, stage, stage.workers)
        for rank, row in answered.items():
            batch = max(1, stage.worker(rank).batch // share)
            if all(own.batch != batch for own in found[rank]):
                found[rank].append(step_times(batch, row))
    return [tuple(own) for own in found]


async def all_links(node: Node, stage: Stage) -> tuple[dict[int, list[Cost]], dict[int, Cost]]:
    """(what messages cost each worker, by way; how long each holds the server's port)."""
    sizes, members, end_s = sizes_of(stage), stage.workers, node.now + LINKS_S
    alone: dict[tuple[int, int], dict[int, list[float]]] = {}
    loaded: dict[int, dict[int, list[float]]] = {PUSH: {}, PULL: {}}
    for k in range(ROUNDS[1]):
        if k >= ROUNDS[0] and node.now >= end_s:
            break
        for nbytes in sizes:
            for way in (PUSH, PULL):
                for rank in members:
                    (taken_s,) = (await ask(node, stage, (rank,), way, nbytes))[rank]
                    alone.setdefault((way, rank), {}).setdefault(nbytes, []).append(taken_s)
                if len(members) > 1:
                    together = await ask(node, stage, members, way, nbytes)
                    loaded[way].setdefault(nbytes, []).append(max(taken_s for (taken_s,) in together.values()))
    back_s = [statistics.median(alone[PUSH, rank][0]) / 2 for rank in members]  # of the receipt
    links = {way: [less(cost_of(alone[way, rank]), back_s[rank]) for rank in members] for way in (PUSH, PULL)}
    last, n = {way: cost_of(loaded[way]) for way in (PUSH, PULL)}, len(members)
    port = {way: port_of(links[way], last[way], max(back_s), n, out=way == PULL) for way in (PUSH, PULL)}
    return links, port


def sizes_of(stage: Stage) -> list[int]:
    """Bytes of what is sent: nothing, and around what the run will send."""
    dense = stage.trainer.dense_bytes
    return [0, *sorted({max(256, dense // share // 4 * 4) for share in (64, 8, 2, 1)}), 2 * dense]


def cost_of(times: Mapping[int, Sequence[float]]) -> Cost:
    """The line through the sizes, round by round: medians over the rounds, and half of their intervals."""
    rounds = min(map(len, times.values()), default=0)
    if not rounds:
        return Cost(latency_s=0.0, s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)
    lines = [line_through([(nbytes, found[k]) for nbytes, found in times.items()]) for k in range(rounds)]
    latency, slope = (figure(column) for column in zip(*lines, strict=True))
    spread = statistics.pstdev([line[1] for line in lines]) / math.sqrt(rounds)  # below what a clock resolves
    return Cost(
        latency_s=latency.median,
        s_per_byte=slope.median,
        latency_noise_s=latency.noise,
        s_per_byte_noise=max(slope.noise, 1.96 * spread),
    )


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and seconds per byte of least squares of the relative errors, neither below zero."""
    weights = [1 / max(time_s, 1e-9) ** 2 for _, time_s in points]
    total = math.fsum(weights)
    x = math.fsum(w * nbytes for w, (nbytes, _) in zip(weights, points, strict=True)) / total
    y = math.fsum(w * time_s for w, (_, time_s) in zip(weights, points, strict=True)) / total
    over = math.fsum(w * (nbytes - x) ** 2 for w, (nbytes, _) in zip(weights, points, strict=True))
    both = math.fsum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, points, strict=True))
    slope = max(0.0, both / over) if over else 0.0
    if y - slope * x >= 0:
        return y - slope * x, slope
    squares = math.fsum(w * nbytes**2 for w, (nbytes, _) in zip(weights, points, strict=True))
    return 0.0, math.fsum(w * b * t for w, (b, t) in zip(weights, points, strict=True)) / squares


def less(cost: Cost, back_s: float) -> Cost:
    """Without the way back of a receipt."""
    own = {"s_per_byte": cost.s_per_byte, "s_per_byte_noise": cost.s_per_byte_noise}
    return Cost(latency_s=max(0.0, cost.latency_s - back_s), latency_noise_s=cost.latency_noise_s, **own)


def port_of(alone: Sequence[Cost], last: Cost, back_s: float, n: int, *, out: bool) -> Cost:
    """How long a message holds the server's port, from those of each worker alone and from the last of all at once: n
    times what each holds it on its way in; on its way out, what the others hold it and then its own way. A message has
    a receipt, which holds it as long in the other direction."""
    if n < 2:
        return Cost(latency_s=0.0, s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)
    latency_s = max(0.0, last.latency_s - back_s - max(cost.latency_s for cost in alone)) / (n - 1) / 2
    own = max(cost.s_per_byte for cost in alone)
    held = (last.s_per_byte - own) / (n - 1) if out else last.s_per_byte / n
    return Cost(
        latency_s=latency_s if latency_s > 1e-9 else 0.0,
        s_per_byte=held if last.s_per_byte > SLOWED * own else 0.0,
        latency_noise_s=last.latency_noise_s / n,
        s_per_byte_noise=last.s_per_byte_noise / n,
    )


async def all_sums(node: Node, stage: Stage) -> tuple[Sum, ...]:
    """Of groups of the first workers, by size."""
    n = stage.num_workers
    groups = range(2, n + 1) if n <= TEAMS + 1 else sorted({*(2**k for k in range(1, TEAMS) if 2**k < n), n})
    return tuple([await summed(node, stage, SUMS, group, SUMS_S / len(groups)) for group in groups])


async def gathering(node: Node, stage: Stage) -> Sum:
    """Of all workers, by the bytes of all together."""
    return await summed(node, stage, GATHER, stage.num_workers, SUMS_S / 4)


async def summed(node: Node, stage: Stage, what: int, group: int, budget_s: float) -> Sum:
    """What it costs a group, counted from who came last; and which share of that it keeps a core busy at each."""
    times, took_s, used_s, end_s = dict[int, list[float]](), 0.0, 0.0, node.now + budget_s
    for k in range(ROUNDS[1]):
        if k >= ROUNDS[0] and node.now >= end_s:
            break
        for nbytes in sizes_of(stage)[1:]:
            await tell(node, stage, stage.workers[:group], what, nbytes, group)
            found = (await answers(node, stage, stage.workers[:group])).values()
            taken_s = min(time_s for time_s, _ in found)
            times.setdefault(nbytes * (group if what == GATHER else 1), []).append(taken_s)
            took_s, used_s = took_s + taken_s, used_s + math.fsum(used for _, used in found) / group
    return Sum(group=group, cost=cost_of(times), busy=min(1.0, used_s / took_s) if took_s else 0.0)


async def all_handling(node: Node, stage: Stage, alone: Sequence[WorkerCosts]) -> Handling:
    """What an end of a message costs a worker and the server, by its bytes, while all exchange; and what a step costs a
    worker beyond what it does alone where it comes between them."""
    dense, rows = stage.trainer.dense_bytes, list[tuple[int, float, float]]()
    for word, nbytes in ((LOADED, 0), (LOADED, max(256, dense // 8 // 4 * 4)), (LOADED, dense), (ROUNDS_OF, dense)):
        used = node.used
        found = (await ask(node, stage, stage.workers, word, nbytes)).values()
        count = sum(rounds for rounds, _ in found)
        rows.append((nbytes, math.fsum(own for _, own in found) / count, (node.used - used) / count))
    *exchanges, (_, round_s, _) = rows
    worker, server = (through([(row[0], row[at] / 2, 0.0) for row in exchanges]) for at in (1, 2))
    step_s = statistics.fmean((own.alone_s or 0.0) * (own.used or 0.0) for own in alone)
    return Handling(worker=worker, server=server, resumed_s=max(0.0, round_s - exchanges[-1][1] - step_s))


async def coding(node: Node, stage: Stage, k: int) -> Coding:
    """Of the k-th codec in question: at each worker, and decoding in the mean over them."""
    found = {rank: (await ask(node, stage, (rank,), CODING, k))[rank] for rank in stage.workers}
    encode, decode = [], []
    for rank in stage.workers:
        rows = [found[rank][i : i + 5] for i in range(0, len(found[rank]), 5)]
        encode.append(through([(4 * int(d), time_s, noise_s) for d, time_s, noise_s, _, _ in rows]))
        decode.append(through([(4 * int(d), time_s, noise_s) for d, _, _, time_s, noise_s in rows]))
    middle = sorted(decode, key=lambda cost: cost.seconds(stage.trainer.dense_bytes))[len(decode) // 2]
    return Coding(codec=stage.timed[k][0], encode=tuple(encode), decode=middle)


def through(rows: Sequence[tuple[int, float, float]]) -> Cost:
    """The line through one or two sizes, with what is not sure of them."""
    latency_s, s_per_byte = line_through([(nbytes, time_s) for nbytes, time_s, _ in rows])
    if len(rows) == 1:
        latency_s, s_per_byte = 0.0, rows[0][1] / rows[0][0]
    noise_s, largest = max(noise for _, _, noise in rows), max(nbytes for nbytes, _, _ in rows)
    return Cost(latency_s=latency_s, s_per_byte=s_per_byte, latency_noise_s=noise_s, s_per_byte_noise=noise_s / largest)

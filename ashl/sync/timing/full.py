"""What `ashl profile --full` measures beside a profile's medians, see `ashl.plan.full`.

Rule: all workers take steps at once for `STEPS_S`, of the profile's batch size and for shorter of a half and a quarter
of it, and then each of them alone. Messages of several sizes go each way, each worker alone and then all at once, round
by round; so do sums over g workers, as many groups at once as there are. Of every round a line is fitted through its
sizes, and latency and seconds per byte are medians over the rounds. What the last of n messages at once takes longer
than one alone is n times what each holds the server's port; where bytes slow nobody down, that has no rate. Every codec
in question encodes the whole model, and its layers without the largest, at all workers at once and between steps and
messages.

What messages cost the cores is the processor time that ranks use while all workers exchange without a pause, by size,
half of it for each end. What steps and messages use beyond that, and beyond a step alone, where all take a step between
two of them, push it and record the round, as in a run, is what a pause costs. Messages between workers are timed on a
ring, by `ashl.sync.timing.neighbours`, and sums by `ashl.sync.timing.group_sums`.
A quota shows where a rank that is alone, a worker with its steps or the server with pushes, has less than a core and
the system does not say that none has held it back; its period is how often short steps are interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from ashl.compression.contract import Turn
from ashl.learn.device import HOST
from ashl.plan.contention import WHOLE_CORE
from ashl.plan.full import Coding, Cost, Full, Handling, ServerCosts, StepTimes, WorkerCosts, quantiles
from ashl.plan.noise import figure
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly
from ashl.stage.link import Ends
from ashl.stage.stage import Stage
from ashl.sync.timing.exchanges import (
    BOTH,
    DOWN,
    EMPTY,
    UP,
    a_step,
    answers,
    close_round,
    instruct,
    sizes_of,
    small_of,
    time_apply,
    time_exchange,
)
from ashl.sync.timing.fits import cost_of, crossing, less, port_of, through
from ashl.sync.timing.group_sums import GATHER, SUMS, SUMS_S, all_sums, summed, time_sums
from ashl.sync.timing.neighbours import NEAR, measured_neighbours, time_neighbours
from ashl.sync.timing.quotas import halts, held_back, in_a_row
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState

STEPS, ALONE, PUSH, PULL, CODING = range(-3, -8, -1)  # orders, with a batch size, bytes, or which codec
LOADED = -8  # ... and with bytes, perhaps between steps
STEPS_S = {STEPS: 8.0, ALONE: 0.75}  # with the batch size of the profile; a quarter of it with others
LEAST, MOST = 12, 20_000  # steps
SHORT = 2  # samples of a step that is to end before a quota does; there are layers that want more than one
CODED = 6  # encodings, at least
APPLYING_S, AT_ONCE = (0.4, 0.001), 100  # pushes, one after the other; and about so long of them at once
LINKS_S, CODINGS_S = 16.0, 2.0  # in all; of each codec
LOADED_S, WINDOWS = 0.5, 7  # of each size
ROUNDS = 3, 30  # of messages of every size, at least and at most


async def timed(
    node: Node, stage: Stage, state: WorkerState, word: int, value: int, group: int, steps: int
) -> torch.Tensor:
    """What a worker finds that has this order. Raises OverError."""
    if word in STEPS_S:
        found = await time_batch(node, stage, state, word, value)
    elif word == CODING:
        found = await time_coding(node, stage, state, value)
    elif word == LOADED:
        found = await time_loaded(node, stage, state, value, steps=bool(steps))
    elif word in (SUMS, GATHER):
        found = await time_sums(node, stage, state, value, group, gather=word == GATHER, steps=bool(steps))
    elif word == NEAR:
        found = await time_neighbours(node, stage, state, value, group)
    else:
        what = EMPTY if not value else UP if word == PUSH else DOWN
        found = [await time_exchange(node, stage, what, value or None)]
    return torch.tensor(found, dtype=torch.float64)


async def time_batch(node: Node, stage: Stage, state: WorkerState, word: int, batch: int) -> list[float]:
    """(count, median, mean, half the median's interval, drift, share of a core in use, seconds from one interruption to
    the next, quantiles ...) of steps with so many samples."""
    budget_s, held = STEPS_S[word] / (1 if batch == stage.worker(node.rank).batch else 4), node.throttled
    times, used = await time_steps(node, stage, state, batch, budget_s)
    share, short, halt_s = math.fsum(used) / math.fsum(times), min(batch, SHORT), 0.0
    if word == ALONE and share < WHOLE_CORE and held_back(node, held):
        halt_s = halts(*(times, used) if batch == short else await time_steps(node, stage, state, short, budget_s))
    found, half = figure(times), len(times) // 2
    drift = statistics.median(times[half:]) / statistics.median(times[:half]) - 1 if half else 0.0
    return [len(times), found.median, fmean(times), found.noise, drift, share, halt_s, *quantiles(times)]


async def time_steps(
    node: Node, stage: Stage, state: WorkerState, batch: int, budget_s: float
) -> tuple[list[float], list[float]]:
    """(seconds, seconds of a core) of each step."""
    end_s = node.now + budget_s

    def more(count: int) -> bool:
        if node.stopping or node.now_ns >= stage.judge.deadline_ns:
            return False
        return count <= LEAST or (node.now < end_s and count < MOST)

    async def step(count: int) -> None:
        await node.compute(partial(a_step, node, stage, state, count, batch), work=batch)

    times, used = await in_a_row(node, step, more)
    return times[1:] or times or [1e-9], used[1:] or used or [0.0]  # the first allocates


async def time_coding(node: Node, stage: Stage, state: WorkerState, k: int) -> list[float]:
    """(elements, encoding, half its interval, decoding, half of that, each of as many bodies as there are workers, half
    of that) of each link of a codec, in rounds as a run has them: a step and an exchange before each leave nothing of
    it in the caches. On the host it counts what is used of a core, as others have their turns in between. Who decodes a
    body adds it up, too."""
    found, params, batch = list[float](), state.params, stage.worker(node.rank).batch
    on_host = isinstance(params, SizeOnly) or str(params.device) == HOST
    for link in stage.timed[k][1]:
        found.append(link.d)
        vector = params if isinstance(params, SizeOnly) else params[: link.d]
        ends, turn = (Ends(), Ends()), Turn(link.codec.ratio or 1.0, stage.seed, node.rank, round=1)
        encode = partial(link.encode, ends[0], vector, turn)
        work, end_s = link.d / stage.trainer.num_params, node.now + CODINGS_S / 2
        rows: list[tuple[float, ...]] = []
        while len(rows) < CODED or (len(rows) < MOST and node.now < end_s):
            await time_exchange(node, stage, BOTH)
            step = partial(a_step, node, stage, state, len(rows), batch)
            await node.compute(step, work=batch)
            start, used = node.now, node.used
            body = await node.compute(encode, work=work, kind="compress")
            encode_s = node.now - start, node.used - used
            taken_s = [encode_s]
            for count in (1, stage.num_workers):
                await time_exchange(node, stage, BOTH)
                start, used = node.now, node.used
                link.merge(ends[1], [body] * count, [0.5] * count, (node.rank,) * count)  # off the simulator's clock
                taken_s.append(((node.now - start) / count, (node.used - used) / count))
            rows.append(tuple(min(own) if on_host else own[0] for own in taken_s))
            if node.stopping or node.now_ns >= stage.judge.deadline_ns:
                break
        for times in zip(*(rows[1:] or rows), strict=True):  # the first allocates
            found += [fmean(times), figure(times).noise]
    return found


async def time_loaded(node: Node, stage: Stage, state: WorkerState, nbytes: int, *, steps: bool) -> list[float]:
    """(exchanges of so many bytes both ways, perhaps each after a step; seconds of a core that they took here, those of
    them that steps took, and seconds)."""
    batch, k, used, begun, stepping = stage.worker(node.rank).batch, 0, node.used, node.now, 0.0
    end_s = begun + LOADED_S
    while k < LEAST or (node.now < end_s and k < MOST):
        if steps:
            before = node.used
            await node.compute(partial(a_step, node, stage, state, k, batch), work=batch)
            stepping += node.used - before
        await time_exchange(node, stage, BOTH if nbytes else EMPTY, nbytes or None)
        if steps:
            close_round(node, stage, state)
        k += 1
    return [k, node.used - used, stepping, node.now - begun]


async def measured_full(node: Node, stage: Stage, state: ServerState) -> Full:
    """The server's side of all of it. Raises OverError."""
    steps = await all_steps(node, stage)
    alone = [(await ask(node, stage, (rank,), ALONE, stage.worker(rank).batch))[rank] for rank in stage.workers]
    single = [(row[5], step_times(stage.worker(rank).batch, row)) for rank, row in enumerate(alone)]
    links, port, empty_s = await all_links(node, stage)
    workers = tuple(
        WorkerCosts(
            steps=steps[rank],
            alone_s=own.mean_s,
            push=links[PUSH][rank],
            pull=links[PULL][rank],
            alone=own,
            used=min(1.0, used),
            halt_s=alone[rank][6],
            empty_s=empty_s[rank],
        )
        for rank, (used, own) in enumerate(single)
    )
    steps_s = [own.mean_s * min(1.0, used) for used, own in single]
    server = await applying(node, stage, state, port)
    handling = await all_handling(node, stage, state, steps_s, server.apply_s)
    crossed = crossing(port, links, handling.exchange_s or 0.0, stage.trainer.dense_bytes)
    server = replace(server, crossed_s_per_byte=crossed)
    rounds_s = [own_s + handling.resumed_s for own_s in steps_s]
    neighbours = await measured_neighbours(node, stage, fmean(rounds_s))
    sums = await all_sums(node, stage, rounds_s)
    return Full(
        made="",
        versions={},
        workers=workers,
        server=server,
        sums=sums,
        codings=tuple([await coding(node, stage, k) for k in range(len(stage.timed))]),
        gathering=await summed(node, stage, GATHER, stage.num_workers, SUMS_S / 4, rounds_s) if sums else None,
        handling=handling,
        neighbours=neighbours,
    )


def step_times(batch: int, row: Sequence[float]) -> StepTimes:
    """As a worker has found them."""
    count, median_s, mean_s, noise_s, drift, _, _, *times = row
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
    await instruct(node, stage, members, word, value)
    return await answers(node, stage, members)


async def all_steps(node: Node, stage: Stage) -> list[tuple[StepTimes, ...]]:
    """By worker: of its own batch size, and of smaller ones."""
    found: list[list[StepTimes]] = [[] for _ in stage.workers]
    for share in (1, 2, 4):
        for rank in stage.workers:
            await instruct(node, stage, (rank,), STEPS, max(1, stage.worker(rank).batch // share))
        answered = await answers(node, stage, stage.workers)
        for rank, row in answered.items():
            batch = max(1, stage.worker(rank).batch // share)
            if all(own.batch != batch for own in found[rank]):
                found[rank].append(step_times(batch, row))
    return [tuple(own) for own in found]


async def all_links(node: Node, stage: Stage) -> tuple[dict[int, list[Cost]], dict[int, Cost], list[float]]:
    """(what messages cost each worker, by way; how long each holds the server's port; what one without a body costs
    each worker)."""
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
    return links, port, back_s


async def applying(node: Node, stage: Stage, state: ServerState, port: Mapping[int, Cost]) -> ServerCosts:
    """What a push costs the server that is there, and what share of a core it has for that."""
    found = figure([await time_apply(node, stage, state) for _ in range(ROUNDS[1])][1:])
    budget_s, at_once_s = APPLYING_S
    count = max(1, min(AT_ONCE, round(at_once_s / max(1e-9, found.median))))
    held, end_s = node.throttled, node.now + budget_s
    times, used = await in_a_row(
        node,
        lambda done: time_apply(node, stage, state, count),
        lambda done: not done or (node.now < end_s and done < budget_s / at_once_s),
    )
    share = math.fsum(used) / math.fsum(times)
    return ServerCosts(
        apply_s=found.median,
        apply_noise_s=found.noise,
        into=port[PUSH],
        out=port[PULL],
        used=min(1.0, share),
        halt_s=halts(times, used) if share < WHOLE_CORE and held_back(node, held) else 0.0,
    )


async def all_handling(
    node: Node, stage: Stage, state: ServerState, steps_s: Sequence[float], apply_s: float
) -> Handling:
    """Of all workers at once, whose steps take so much of a core alone. Medians over windows that take turns, as a
    machine's pace drifts. Where steps come between, each push is applied, as in a run."""
    dense = stage.trainer.dense_bytes
    kinds = ((False, 0), (False, small_of(stage)), (False, dense), (True, dense))
    windows: list[list[tuple[float, ...]]] = [[] for _ in kinds]
    resumed: list[tuple[float, ...]] = []  # what steps take, by worker
    for (steps, nbytes), found in [*zip(kinds, windows, strict=True)] * WINDOWS:
        used = node.used
        await instruct(node, stage, stage.workers, LOADED, nbytes, steps=steps)
        answered = await answers(node, stage, stage.workers, state if steps else None)
        counts, used_s, stepping_s, took_s = zip(*answered.values(), strict=True)
        per = 1 / math.fsum(counts)
        own_s = 1 / math.fsum(count / max(1e-9, time_s) for count, time_s in zip(counts, took_s, strict=True))
        found.append((per * math.fsum(used_s), per * (node.used - used), own_s, per * math.fsum(stepping_s)))
        if steps:
            resumed.append(tuple(answered[rank][2] / answered[rank][0] for rank in stage.workers))
    empty, *exchanges, (used_s, served_s, round_s, stepping_s) = [
        tuple(map(statistics.median, zip(*own, strict=True))) for own in windows
    ]
    exchanging_s, serving_s, exchange_s, _ = exchanges[-1]
    each_s = [statistics.median(own) - time_s for own, time_s in zip(zip(*resumed, strict=True), steps_s, strict=True)]
    sizes = [nbytes for _, nbytes in kinds[1:-1]]
    worker, server = (
        through([(nbytes, own[at] / 2, 0.0) for nbytes, own in zip(sizes, exchanges, strict=True)]) for at in (0, 1)
    )
    return Handling(
        worker=worker,
        server=server,
        resumed_s=max(0.0, stepping_s - fmean(steps_s)),
        sender_resumed_s=max(0.0, used_s - stepping_s - exchanging_s),
        server_resumed_s=max(0.0, served_s - serving_s - apply_s),
        empty_s=(empty[0] / 2, empty[1] / 2),
        exchange_s=exchange_s,
        round_s=round_s,
        each_resumed_s=tuple(max(0.0, time_s) for time_s in each_s),
    )


async def coding(node: Node, stage: Stage, k: int) -> Coding:
    """Of the k-th codec in question: at each worker, and decoding in the median over them."""
    found = await ask(node, stage, stage.workers, CODING, k)
    costs: list[list[Cost]] = [[], [], []]  # of encoding, of decoding one and each of all
    for rank in stage.workers:
        rows = [found[rank][i : i + 7] for i in range(0, len(found[rank]), 7)]
        for what, own in enumerate(costs):
            own.append(through([(4 * int(row[0]), row[1 + 2 * what], row[2 + 2 * what]) for row in rows]))
    encode, *decoding = costs
    one, of_all = (sorted(own, key=lambda c: c.seconds(stage.trainer.dense_bytes))[len(own) // 2] for own in decoding)
    return Coding(codec=stage.timed[k][0], encode=tuple(encode), decode=one, decode_all=of_all)

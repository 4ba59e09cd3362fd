"""How the workers of an all-reduce come to the weighted sum of what they have, with and without compression.

Rule: everybody ends with Σ_j c_j·C(x_j), the same to the bit on all. A codec without loss, or one that is linear, is
summed on its way: 2(n − 1)/n of a body each way. The bodies of any other are gathered, (n − 1) bodies each way, and
every worker decodes and sums all of them in rank order: it grows with n, and beats a dense sum while a body is shorter
than 2/n of the vector. A codec with a protocol of its own has `collective`:

    await collective(node, stage, state, x, turn, weight, riders) -> (update, sums of the riders)

Two scalars ride along, of which the sums come back: a share of the mean loss, and what rank 0 has to say.

Source: gathering as in Alistarh et al., "QSGD", NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ashl.compression.around.ratio import scheduled
from ashl.runtime.node import Node
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage
from ashl.topology.local_work import not_finite, report_health, reports_mean, turn_of

Riders = tuple[float, float]  # (loss, word)


async def exchanged(
    node: Node, stage: Stage, state: Any, body: Any, weight: float, riders: Riders
) -> tuple[Any, float, int]:
    """(Σ c·C(x), mean loss, word). Of an update that is not finite nothing is made: the mean loss says so."""
    if stage.codec.flags.lossless:
        return await summed(node, stage, body, weight, riders)
    if not_finite(node, stage, state, body):
        body, riders = torch.zeros_like(body), (math.nan, riders[1])
    tick = state.tally.version
    looks = reports_mean(stage, tick) and not isinstance(body, SizeOnly)
    if looks:
        node.show_update(body, of=node.rank, tick=tick, weight=weight)
    update, loss, word = await compressed(node, stage, state, body, weight, riders)
    if looks and node.rank == 0:
        node.show_update(update, of=None, tick=tick)
    return update, loss, word


async def compressed(
    node: Node, stage: Stage, state: Any, body: Any, weight: float, riders: Riders
) -> tuple[Any, float, int]:
    """The same by the codec's own way."""
    codec, turn = stage.codec, turn_of(stage, node.rank, state)
    if hasattr(codec, "collective"):
        return await codec.collective(node, stage, state, body, turn, weight, riders)
    if codec.flags.linear:  # what adds up is alike in shape
        turn = turn._replace(ratio=least_ratio(stage), weight=weight)
    x = body * weight if codec.flags.linear else body
    state.sender, encoded = await node.compute(partial(codec.encode, state.sender, x, turn), work=1, kind="compress")
    report_health(node, stage, state, x, encoded)
    if codec.flags.linear:
        return await summed_bodies(node, stage, state, encoded, riders, scheduled(codec, turn))
    return await gathered(node, stage, state, encoded, riders)


def least_ratio(stage: Stage) -> float:
    """The kept share that all workers of a sum agree on."""
    return min(worker.compression_ratio for worker in stage.plan.workers)


async def summed(node: Node, stage: Stage, tensor: Any, weight: float, riders: Riders) -> tuple[Any, float, int]:
    """Σ c · one flat tensor of each."""
    total = await node.all_reduce(pack(tensor, weight, riders), stage.workers, riders=len(riders))
    return unpack(total)


async def summed_bodies(
    node: Node, stage: Stage, state: Any, body: Any, riders: Riders, ratio: float | None = None
) -> tuple[Any, float, int]:
    """What the sum of linear bodies, of this kept share, decodes to."""
    codec, d = stage.codec, stage.trainer.num_params
    timed = isinstance(body, SizeOnly)
    summand = SizeOnly(codec.summed_bytes(ratio, d), body.word) if timed else codec.summand(body)
    total, loss, word = await summed(node, stage, summand, 1.0, riders)
    whole = body if isinstance(body, SizeOnly) else codec.summed(body, total)
    if codec.flags.reduces and not isinstance(body, SizeOnly):
        decode = partial(codec.reduce, state.reduced, [whole], [1.0], d)
    else:
        decode = partial(codec.decode, None, whole, d)
    kept, update = await node.compute(decode, work=0, kind="compress")
    state.reduced = kept if codec.flags.reduces else None
    return update, loss, word


async def gathered(node: Node, stage: Stage, state: Any, body: Any, riders: Riders) -> tuple[Any, float, int]:
    """Everybody's bodies, decoded and summed by everybody alike."""
    group = stage.workers
    if isinstance(body, SizeOnly):
        bodies = await node.all_gather(SizeOnly(body.nbytes, int(riders[1])), group)
        return SizeOnly(stage.trainer.dense_bytes), 0.0, sum(b.word for b in bodies)
    tail = torch.tensor(riders, dtype=torch.float64).view(torch.uint8)
    parts = await node.all_gather(torch.cat([body, tail]), group, riders=tail.numel())
    told = sum_in_rank_order([part[-tail.numel() :].clone().view(torch.float64) for part in parts]).tolist()
    bodies = [part[: -tail.numel()] for part in parts]
    if math.isnan(told[0]):
        return torch.zeros(stage.trainer.num_params), told[0], int(told[1])
    combine = partial(combined, stage, state, bodies)
    update = await node.compute(combine, work=0, kind="compress")
    return update, told[0], int(told[1])


def combined(stage: Stage, state: Any, bodies: Sequence[Tensor]) -> Tensor:
    """Σ c_j·C(x_j) in rank order, or what the codec makes of the bodies together."""
    codec, d, weights = stage.codec, stage.trainer.num_params, stage.weights(stage.workers)
    if codec.flags.reduces:
        state.reduced, update = codec.reduce(state.reduced, bodies, weights, d)
        return update
    terms = []
    for rank, (body, weight) in enumerate(zip(bodies, weights, strict=True)):
        state.receivers[rank], x = codec.decode(state.receivers.get(rank), body, d)
        terms.append(x * weight)
    return sum_in_rank_order(terms)


def pack(body: Any, weight: float, riders: Riders) -> Any:
    """c·body and two scalars that ride along, in one vector."""
    if isinstance(body, SizeOnly):
        return SizeOnly(body.nbytes, int(riders[1]))
    packed = torch.empty(body.numel() + len(riders), dtype=body.dtype)
    torch.mul(body, weight, out=packed[: -len(riders)])
    packed[-2], packed[-1] = riders
    return packed


def unpack(total: Any) -> tuple[Any, float, int]:
    """(sum, mean loss, word)."""
    if isinstance(total, SizeOnly):
        return SizeOnly(total.nbytes), 0.0, total.word
    loss, word = total[-2:].tolist()
    return total[:-2], loss, int(word)

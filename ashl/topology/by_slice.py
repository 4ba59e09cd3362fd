"""A server that merges slice by slice, where all wait for all.

Rule: of a slice that has come from all workers the server takes the weighted sum, steps on these elements alone, and
sends them to everybody at once. The last slice of a gradient is the push itself: with it goes what the server counts
and answers, and once that is back all others are. The bits are those of a gradient and a model in one piece.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019. How large
slices are is `ashl.overlap.slices`'s to say.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from ashl.aggregate.weighted import Push
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.runtime.sums import piece, together
from ashl.stage.stage import Stage

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerRule, ServerState


def slices(stage: Stage) -> list[tuple[int, int]]:
    """The elements [start, stop) of each, in the order in which they leave."""
    return [(m.start + start, m.start + stop) for m in stage.messages for start, stop in stage.overlap.cuts(m)]


def last(stage: Stage) -> Stage:
    """The stage as it is for the last slice alone."""
    start, stop = slices(stage)[-1]
    return replace(stage, size=stop - start)


# --- at a worker


async def push_slices(node: Node, stage: Stage, samples: int) -> Any:
    """To the server, each slice as it is ready, but the last one, which is returned."""
    number, up, count = 0, stage.tag("slice"), len(stage.once(slices))
    for message, (_, tag) in zip(stage.messages, stage.ready, strict=True):
        part = (await node.recv(tag, src=node.rank)).body
        for start, stop in stage.overlap.cuts(message):
            body, number = piece(part, start, stop), number + 1
            if number < count:
                await node.send(stage.server, up, body, (number - 1, samples))
    return body


async def pulled(node: Node, stage: Stage, body: Any) -> Any:
    """The model, of which the last slice came with the reply."""
    places, back = stage.once(slices), stage.tag("back")
    came = {places[-1]: body}
    for _ in places[1:]:
        message = await node.recv(back)
        came[places[int(message.meta[0])]] = message.body
    return together([came[place] for place in sorted(came)])


# --- at the server


async def taken(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one slice, and send it back where it has come from all; returns whether the model is another one, which
    it is with the last alone."""
    number, samples = map(int, message.meta)
    if stage.by_priority:
        await node.send(message.src, stage.tag("had"), None, (number,))
    start, stop = stage.once(slices)[number]
    push = Push(message.src, message.body, 1, samples, 0, math.nan, 0.0, 0.0, 0.0)
    share = (stop - start) / stage.trainer.num_params
    await node.compute(partial(merge_slice, stage, state, number, push), work=share, kind="apply")
    if number in state.made:
        body = state.made[number][1]
        for rank in stage.workers:
            await node.send(rank, stage.tag("back"), body, (number,))
    return stage.by_priority and whole(stage, state)


async def after_slices(node: Node, stage: Stage, state: ServerState) -> Stage:
    """The stage as it is for a push that comes after its slices. Before the last one of a round is merged all of them
    are there: a link that became faster may have let it overtake one."""
    if not stage.overlap.by_slice:
        return stage
    while len(state.buffer) + 1 == state.quorum and len(state.made) + 1 < len(stage.once(slices)):
        await taken(node, stage, state, await node.recv(stage.tag("slice")))
    return stage.once(last)


def merge_slice(stage: Stage, state: ServerState, number: int, push: Push) -> None:
    """Keep a slice of a push; where it has come from all, step on it."""
    members = state.slices.setdefault(number, [])
    members.append(push)
    if len(members) < state.quorum:
        return
    del state.slices[number]
    members.sort(key=attrgetter("worker"))
    weights = stage.doing(state.workers).weights_of(members, state.tally.gone)
    annealed = cast("ServerRule", stage.sync).anneal(state.rule_state)
    lr = stage.trainer.rate(state.tally.samples - state.counted) * annealed
    step_on(stage, state, number, stage.aggregate.fold(members, weights), lr)


def step_on(stage: Stage, state: ServerState, number: int, update: Any, lr: float) -> None:
    start, stop = stage.once(slices)[number]
    exact = stage.link.flags.lossless
    state.made[number] = stage.trainer.apply_slice(state.params, state.moments, start, stop, update, lr, exact)


def joined(stage: Stage, state: ServerState, update: Any, lr: float) -> tuple[Any, Any, Any]:
    """(moments, outer moments, model) once the last slice has come from all, too."""
    step_on(stage, state, len(stage.once(slices)) - 1, update, lr)
    moments, params = in_order(stage, state)
    return moments, state.outer_state, params


def in_order(stage: Stage, state: ServerState) -> tuple[Any, Any]:
    """(moments, model) of all slices."""
    made = [state.made[number] for number in sorted(state.made, key=stage.once(slices).__getitem__)]
    state.made = {}
    return stage.trainer.joined(made)


def whole(stage: Stage, state: ServerState) -> bool:
    """By priority: whether a step that counts is in all slices, and so in the model now."""
    if not state.counted or len(state.made) < len(stage.once(slices)):
        return False
    state.moments, state.params = in_order(stage, state)
    state.counted = 0
    return True

"""Slices through a server by priority: those that the next forward pass needs first go before the others.

Rule: of the slices that backward has handed out, a worker sends the lowest layer's first, while fewer than `credit`
of them are on their way; the server says so when it has one. It merges a slice that has come from all and sends it back
at once (`ashl.topology.by_slice`), and the next forward pass waits for each message by itself, so that the slices of
the last layers travel under it. What is counted goes ahead of them, once backward is over: the server answers when all
have said so, and everybody knows before the next step begins whether the run goes on. The server's model is whole once
all slices of a step are in, and is evaluated then. At the end of a stage, and for a checkpoint, all is let in first.

Limits: with a credit of one slice each waits for the word about the one before, which takes two latencies.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ashl.aggregate.weighted import Push
from ashl.learn.pieces import Pieces
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.runtime.sums import piece, together
from ashl.stage.stage import Stage
from ashl.topology.by_slice import slices, taken, whole
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work, WorkerState

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerState


def numbers(stage: Stage) -> list[range]:
    """The slices of each message."""
    ends = list(accumulate(len(stage.overlap.cuts(message)) for message in stage.messages))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


# --- at a worker


async def step(node: Node, stage: Stage, state: WorkerState) -> Work:
    """One gradient, whose slices go by themselves; `state.coming` is the task that has to do with them."""
    start, (number, span), came = node.now, draw(state), list[Any]()
    groups = [(message.needed, stage.tag("group", k)) for k, message in enumerate(stage.messages)]
    needs = () if state.coming is None else tuple(reversed(groups))

    def work(hand_out: Callable[[int, Any], None], take: Callable[[int], Any] | None = None) -> float:
        def first(k: int) -> Any:
            assert take is not None
            came.append(take(k))
            return came[k]

        model = Pieces(stage.slices[::-1], first) if needs else state.params
        return stage.trainer.gradient_in_parts(model, node.rank, number, span, stage.slices, hand_out)

    state.coming = node.spawn(exchanged(node, stage, state.batch, state.coming))
    loss = await node.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params = together(came)
    return Work(None, loss, 1, state.batch, node.now - start, state.version)


async def exchanged(node: Node, stage: Stage, samples: int, before: Any) -> None:
    """The slices of one gradient on their way up, and those of the model, message by message, to the forward pass."""
    if before is not None:
        await node.join(before)
    parts, had, back = [tag for _, tag in stage.ready], stage.tag("had"), stage.tag("back")
    places, of = stage.once(slices), stage.once(numbers)
    waiting, came, held = list[tuple[int, int, Any]](), dict[int, Any](), 0
    while held or len(came) < len(places):
        message = await node.recv(*parts, had, back)
        if message.tag == had:
            held -= 1
        elif message.tag == back:
            came[int(message.meta[0])] = message.body
            k = next(k for k, own in enumerate(of) if int(message.meta[0]) in own)
            if all(number in came for number in of[k]):
                await node.send(node.rank, stage.tag("group", k), together([came[number] for number in of[k]]))
        else:
            k = parts.index(message.tag)
            for number, (start, stop) in zip(of[k], stage.overlap.cuts(stage.messages[k]), strict=True):
                heappush(waiting, (-k, number, piece(message.body, start, stop)))
        while waiting and held < stage.overlap.most_committed:
            _, number, body = heappop(waiting)
            held += 1
            await node.send(stage.server, stage.tag("slice"), body, (number, samples))


async def flushed(node: Node, stage: Stage, state: WorkerState) -> None:
    """Everything is in, and the model is no longer on its way to a forward pass."""
    await node.join(state.coming)
    state.params = together(
        [(await node.recv(stage.tag("group", k))).body for k in reversed(range(len(stage.messages)))]
    )
    state.coming = None


async def given_up(node: Node, stage: Stage, state: WorkerState) -> None:
    """Nobody waits for slices any more."""
    if state.coming is not None:
        await node.cancel(state.coming)
        state.coming = None
    groups = (stage.tag("group", k) for k in range(len(stage.messages)))
    await node.drop(*groups, *(tag for _, tag in stage.ready), stage.tag("had"))


# --- at the server


def counted(stage: Stage, state: ServerState, message: Message) -> bool:
    """A worker has ended a step: once all have, it counts. Returns whether the model has changed."""
    steps, samples, loss, version = message.meta[:4]
    tally, staleness = state.tally, state.tally.version - int(version)
    state.buffer.append(Push(message.src, None, int(steps), int(samples), staleness, loss, 0.0, 0.0, 0.0))
    if len(state.buffer) < state.quorum:
        return False
    members, state.buffer = state.buffer, []
    tally.merge()
    for member in members:
        tally.commit(member.worker, member.steps, member.samples)
        state.counted += member.samples
    return whole(stage, state)


async def drained(node: Node, stage: Stage, state: ServerState) -> None:
    """What is counted is in the model."""
    while state.counted:
        await taken(node, stage, state, await node.recv(stage.tag("slice")))

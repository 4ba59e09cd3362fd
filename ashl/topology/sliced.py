"""What travels between a worker and the parameter server in parts, while the worker computes.

Rule: message k, a slice of the gradient, leaves the moment backward has come to it; the slices queue at the worker's
port, and at the server's with those of the others. The last of them is the push itself, with what rides along. The
server puts a push together when that has come, so the gradient is the same to the bit as one in one piece. Where the
model comes back in parts, too, the first goes with the reply, and the forward pass waits for each of the others.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; Hashemi et al., "TicTac", MLSys 2019. What each message holds is
`ashl.overlap`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ashl.learn.pieces import Pieces
from ashl.runtime.effects import Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.sums import piece, together
from ashl.stage.stage import Stage
from ashl.topology import by_priority
from ashl.topology.by_slice import pulled, push_slices, slices
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work, WorkerState


async def sliced(node: Node, stage: Stage, state: WorkerState) -> Work:
    """One gradient, whose last slice is the body; the others are on their way. At its end a model that came in parts is
    there as a whole."""
    if stage.by_priority:
        return await by_priority.step(node, stage, state)
    start, tags = node.now, [tag for _, tag in stage.ready]
    step, span = draw(state)
    needs = () if state.coming is None else tuple((stage.messages[k].needed, tag) for k, tag in groups(stage))
    came = [state.coming]  # the first layers first

    def work(hand_out: Callable[[int, Any], None], take: Callable[[int], Any] | None = None) -> float:
        def taken(k: int) -> Any:
            if k and take is not None:
                came.append(take(k - 1))
            return came[k]

        model = Pieces(stage.slices[::-1], taken) if needs else state.params
        return stage.trainer.gradient_in_parts(model, node.rank, step, span, stage.slices, hand_out)

    others = None
    if stage.overlap.by_slice:
        others = node.spawn(push_slices(node, stage, state.batch))
    elif tags[:-1]:
        others = node.spawn(forwarded(node, stage.server, tags[:-1]))
    loss = await node.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params, state.coming = together(came), None
    step_s = node.now - start
    body = None if others is None else await node.join(others)
    if not stage.overlap.by_slice:
        body = (await node.recv(tags[-1])).body
    return Work(body, loss, 1, state.batch, step_s, state.version)


async def forwarded(node: Node, server: int, tags: Sequence[Tag]) -> None:
    """To the server, each part as it is ready."""
    for tag in tags:
        part = await node.recv(tag, src=node.rank)
        await node.send(server, tag, part.body)


async def put_together(node: Node, stage: Stage, push: Message) -> Message:
    """At the server: a push with the slices that left before it; it began when the first of them did."""
    if stage.overlap.by_slice or stage.by_priority:  # they have been taken in one by one
        return push
    before = [await node.recv(tag, src=push.src) for _, tag in stage.ready[:-1]]
    parts = (push, *reversed(before))  # the first layers first
    return push._replace(body=together([part.body for part in parts]), start_ns=min(part.start_ns for part in parts))


# --- the way back


def comes_in_parts(stage: Stage) -> bool:
    """Whether a reply is not the whole model."""
    return stage.overlap.by_slice or (stage.overlap.pulls and len(stage.messages) > 1)


def groups(stage: Stage) -> list[tuple[int, Tag]]:
    """The messages of a model that follow the first one, in the order in which forward needs them."""
    return [(k, stage.tag("group", k)) for k in reversed(range(len(stage.messages) - 1))]


def head(stage: Stage, model: Any) -> Any:
    """What goes with the reply: the model, or what forward needs first, or the last slice; by priority, nothing."""
    if not stage.overlap.pulls:
        return None if stage.by_priority else model
    if stage.overlap.by_slice:
        return piece(model, *stage.once(slices)[-1])
    return piece(model, stage.messages[-1].start, stage.messages[-1].stop)


async def following(node: Node, stage: Stage, ranks: Sequence[int], model: Any) -> None:
    """At the server: the rest of the model, to these workers in turn, but for slices that have gone."""
    if stage.overlap.by_slice:
        return
    for k, tag in groups(stage):
        body = piece(model, stage.messages[k].start, stage.messages[k].stop)
        for rank in ranks:
            await node.send(rank, tag, body)


async def settled(node: Node, stage: Stage, state: WorkerState) -> bool:
    """Whether nothing is on its way to this worker: a checkpoint has it come first, and slices are all there."""
    if stage.overlap.by_slice:
        state.params = await pulled(node, stage, state.coming)
    elif not node.wants_mark:
        return False
    elif stage.by_priority:
        await by_priority.flushed(node, stage, state)
    else:
        state.params = together([state.coming, *[(await node.recv(tag)).body for _, tag in groups(stage)]])
    state.coming = None
    return True

"""A push whose slices leave for the parameter server as they are ready, while backward goes on.

Rule: message k, a slice of the gradient, leaves the moment backward has come to it; the slices queue at the worker's
port, and at the server's with those of the others. The last of them is the push itself, with what rides along. The
server puts a push together when that has come, so the gradient is the same to the bit as one in one piece.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; what each message holds is `ashl.overlap`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ashl.runtime.effects import Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.sums import together
from ashl.stage.stage import Stage
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work, WorkerState


async def sliced(node: Node, stage: Stage, state: WorkerState) -> Work:
    """One gradient, whose last slice is the body; the others are on their way."""
    messages, start = stage.messages, node.now
    tags = [stage.tag("part", k) for k in range(len(messages))]
    step, span = draw(state)
    slices = [(message.start, message.stop) for message in messages]
    compute = partial(stage.trainer.gradient_in_parts, state.params, node.rank, step, span, slices)
    others = node.spawn(forwarded(node, stage.server, tags[:-1])) if tags[:-1] else None
    ready = tuple((message.ready, tag) for message, tag in zip(messages, tags, strict=True))
    loss = await node.compute(compute, work=state.batch, parts=ready)
    step_s = node.now - start
    if others is not None:
        await node.join(others)
    last = await node.recv(tags[-1])
    return Work(last.body, loss, 1, state.batch, step_s, state.version)


async def forwarded(node: Node, server: int, tags: Sequence[Tag]) -> None:
    """To the server, each part as it is ready."""
    for tag in tags:
        part = await node.recv(tag, src=node.rank)
        await node.send(server, tag, part.body)


async def put_together(node: Node, stage: Stage, push: Message) -> Message:
    """At the server: a push with the slices that left before it; it began when the first of them did."""
    before = [await node.recv(stage.tag("part", k), src=push.src) for k in range(len(stage.messages) - 1)]
    parts = (push, *reversed(before))
    return push._replace(body=together([part.body for part in parts]), start_ns=min(part.start_ns for part in parts))

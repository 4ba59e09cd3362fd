"""A server that merges one fragment of the model at a time, see `ashl.overlap.streaming` and `loscar`.

Rule: the merge after version v is of fragment v mod P. Each worker pushes what it has learned there, the server takes
the outer step on it once it has come from all, and answers with the fragment, which the worker mixes with its own. As
under all-reduce a worker holds one piece of work that is done and not exchanged (`ashl.topology.streaming`).

Sources: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, 2025; Maziane et al.,
"LOSCAR-SGD", arXiv 2605.20866, 2026. Both are written for all-reduce: that a server takes the outer step is ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ashl.overlap.streaming import Fragmented
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.stage.fragment import Fragment
from ashl.stage.stage import GO, Stage
from ashl.topology.delayed import AT_ONCE_S
from ashl.topology.ending import leave
from ashl.topology.local_work import WorkerState, encoded
from ashl.topology.merging import merged, rule_of
from ashl.topology.replies import Pull, parsed
from ashl.topology.streaming import ends_of, finish_piece, fragment_at, steps

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerState


async def worker(node: Node, stage: Stage, state: WorkerState) -> int:
    """Push a fragment, take the first of the next steps meanwhile, mix in what comes back, take the others; returns
    the last word."""
    state.enter(stage, node.rank)
    overlap, word, push, answer = stage.delayed, GO, stage.tag("push"), node.recv(stage.tag("pull"))
    assert isinstance(overlap, Fragmented)
    while word == GO:
        node.mark(stage.index, state)
        if state.pending is None:
            await finish_piece(node, stage, state, None, state.local_steps)
        work = state.pending
        part, fragment, held = at(stage, state, state.version)
        body, loss = await encoded(node, part, held, work)
        meta = (work.steps, work.samples, loss, work.version, work.step_s, state.pull_s)
        await node.send(stage.server, push, body, meta)
        total = state.local_steps
        beside = overlap.beside(total) if state.rest is None or state.rest[0] > 0 else 0
        ahead, asked = await steps(node, stage, state, beside) if beside else None, node.now
        message = await answer
        reply = parsed(Pull, message.meta)
        word = reply.word
        if message.body is not None:
            landed = part.link.pulled(held.params, message.body)
            state.params = fragment.put(state.params, landed)
            if state.start is not None:
                mixed = overlap.mixed(fragment.of(state.start), landed, held.params + work.body)
                state.start = fragment.put(state.start, mixed)
        seen = ahead is None or node.now - asked > AT_ONCE_S
        state.pull_s = node.now - message.start_ns / 1e9 if seen else 0.0
        state.follow(reply)
        if word != GO:
            leave(node, stage, word, reply.end_ns)
        node.round(stage.index, state.round, work.steps, reply.staleness, dropped=bool(reply.dropped), loss=loss)
        state.round += 1
        if word == GO:
            after = state.local_steps  # of the piece after the one that is under way
            await finish_piece(node, stage, state, ahead, total - beside)
            state.local_steps = after
    return word


async def taken_in(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """At the server: a push of the fragment whose turn it is; whether the model changed."""
    model, ends, outers = state.params, state.ends, [*(state.outer_state or len(stage.fragments) * (None,))]
    k = state.version % len(stage.fragments)
    part, fragment, held = at(stage, state, state.version)
    state.params, state.outer_state, state.ends = held.params, outers[k], held.ends
    changed = await merged(node, part, state, message)
    outers[k] = state.outer_state
    state.params = fragment.put(model, state.params) if changed else model
    state.outer_state, state.ends = tuple(outers), ends
    return changed


async def answered(node: Node, stage: Stage, state: ServerState, rank: int) -> Any:
    """... and what goes back: the fragment that was merged last."""
    part, _, held = at(stage, state, state.version - 1)
    return await rule_of(stage).messages().answer(node, part, held, rank, True)


def at(stage: Stage, state: Any, version: int) -> tuple[Stage, Fragment, Any]:
    """(the stage, where it lies, the state) as they are for the fragment of the merge after this version alone."""
    k, fragment = version % len(stage.fragments), fragment_at(stage, version)
    state.fragment_ends = state.fragment_ends or ends_of(stage)
    held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
    return stage.fragment(k), fragment, held

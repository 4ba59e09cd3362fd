"""How a parameter server ends a stage: what is under way is called in or dropped, and every worker is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ashl.runtime.effects import JOIN, LOST
from ashl.runtime.node import Node
from ashl.stage.stage import LAST, NEXT, STOP, Stage
from ashl.topology.ending import of_ending, within
from ashl.topology.members import away
from ashl.topology.membership import close_doors, introduced
from ashl.topology.replies import Pull
from ashl.topology.sliced import put_together

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerState


async def call_in(node: Node, stage: Stage, state: ServerState) -> None:
    """Delayed: who waits has computed something meanwhile; each is asked once to hand that in, and computes no more."""
    tally = state.tally
    applied = (tally.version, tally.steps, tally.samples)
    for rank in sorted(set(tally.waiting) - set(state.called)) if stage.delayed else ():
        state.called += (rank,)
        staleness, late = tally.answer(rank)
        await node.send(rank, state.pulls[rank], None, Pull(LAST, *applied, staleness, late, 0))


async def dismiss(node: Node, stage: Stage, state: ServerState, word: int, end_ns: int | None = None) -> None:
    """Tell every worker that the stage ended now, or then. What came before and was not merged is dropped."""
    tally, end_ns = state.tally, within(stage, node.now_ns) if end_ns is None else end_ns
    tally.end_ns, applied = end_ns, (tally.version, tally.steps, tally.samples)
    unmerged = {push.worker for push in state.buffer}
    for push in state.buffer:
        tally.drop(push.worker, push.steps, of_ending(word))
    state.buffer = []
    working = set(stage.workers) - set(tally.waiting) - tally.gone
    for rank in sorted(tally.waiting):
        staleness, late = tally.answer(rank)
        stage.link.gave(state.ends, rank, state.params)
        meta = (*Pull(word, *applied, staleness, late or rank in unmerged, end_ns), *away(stage, tally.gone))
        await node.send(rank, state.pulls[rank], state.params if word == NEXT else None, meta)
    while working:
        message = await node.recv(stage.tag("push"), LOST, JOIN)
        if message.tag == JOIN:
            introduced(state, message)
            continue
        working.discard(message.src)
        if message.tag == LOST:
            continue
        message = await put_together(node, stage, message) if stage.messages else message
        if message.start_ns <= end_ns:
            tally.drop(message.src, int(message.meta[0]), of_ending(word))
        await node.send(message.src, state.pulls[message.src], None, Pull(word, *applied, 0, True, end_ns))
    if word == STOP:
        if stage.joins and node.rank == stage.server:
            node.spawn(close_doors(node, state, end_ns))
        node.ledger.close(end_ns)

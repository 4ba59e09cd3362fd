"""Gossip in rounds whose messages are some rounds late: what is on its way at the top of the loop.

Rule: whoever sends keeps what its last `lag` rounds said. Where all go on from a checkpoint at the begin of one round,
each says that again, so that nothing is missing of what the others have not taken in.

Source: sender-based message logging, Johnson and Zwaenepoel, FTCS 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.topology.rounds import round_tag

if TYPE_CHECKING:
    from ashl.topology.gossip import Outgoing, RoundState


async def post(node: Node, stage: Stage, state: RoundState, k: int, messages: Outgoing, lag: int) -> None:
    """Tell whoever listens in round k, and pass on what rank 0 has decided."""
    said: Outgoing = {rank: (body, (*state.header, *numbers)) for rank, (body, numbers) in messages.items()}
    if lag:
        state.under_way = (*state.under_way, (k, said))[-lag:]
    await say(node, stage, state, k, said)


async def say(node: Node, stage: Stage, state: RoundState, k: int, said: Outgoing) -> None:
    tag = round_tag(stage, state, node.rank, k)
    for rank, (body, meta) in said.items():
        await node.send(rank, tag, body, meta)


async def taken_up(node: Node, stages: Sequence[Stage], index: int, state: RoundState) -> tuple[int, RoundState]:
    """At a worker, from a checkpoint: as it was kept, and so is what it had said."""
    for k, said in state.under_way:
        await say(node, stages[index], state, k, said)
    return index, state

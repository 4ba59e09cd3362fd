"""One rank's way through a plan: the stages in order, its state carried across. The same on both kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ashl.runtime.node import Node
from ashl.stage import Stage


async def program(node: Node, stages: Sequence[Stage]) -> str:
    """Play this rank's role in every stage; returns why the last one ended."""
    first = stages[0]
    state = first.topology.begin(first, node.rank)
    if node.rank == first.home:
        node.counter = state.clock
    reason = ""
    for stage in stages:
        reason = await stage.topology.role(stage, node.rank)(node, stage, state)
    if node.rank == first.home:
        clock = state.clock
        node.snapshot(state.params, final=True, time_ns=clock.end_ns, reason=reason, **clock.report())
    return reason

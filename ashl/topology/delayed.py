"""Work that is exchanged while the next piece of it is computed, see `ashl.overlap.contract.Delayed`.

A worker holds one piece that is done and not exchanged (`WorkerState.pending`). In each round it hands that in,
computes the next one, takes what came of the exchange, and comes to a border. So at the top of a loop nothing is under
way. Before another stage begins the last piece is exchanged, too; at the end of a run it is not, and no count has it.
"""

from __future__ import annotations

from typing import Any

from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.topology.local_work import Work, WorkerState, local_work

AT_ONCE_S = 1e-3  # a reply that is had within so long was there before


async def worked(node: Node, stage: Stage, state: WorkerState) -> Work:
    """The work to exchange now: what was computed during the exchange before, or new."""
    if state.pending is not None:
        return state.pending
    work = at_border(node, stage, state, await local_work(node, stage, state))
    state.plan_round(stage, node.rank, ahead=1)
    return work


def at_border(node: Node, stage: Stage, state: WorkerState, work: Work) -> Work:
    """A piece is done and the exchange before it has landed in `state.params`: what to exchange of it next."""
    if stage.delayed is None or stage.sync.exchange != "difference":
        return work
    start = state.params if state.start is None else state.start

    def ahead() -> Any:
        own = stage.aggregate.clip(work.body) * stage.team_weights[stage.workers.index(node.rank)]
        rate = stage.trainer.rate(state.samples)
        state.own_moments, model = stage.outer.step(state.own_moments, state.params, own, rate)
        return model

    body, state.start = stage.delayed.border(state.params, start, work.body, ahead)
    return work._replace(body=body)

"""An all-reduce of one fragment of the model at a time, beside local steps, see `ashl.overlap.streaming` and `loscar`.

As in `ashl.topology.delayed` a worker holds one piece of work that is done and not exchanged, so that at the top of the
loop nothing is under way. A fragment is exchanged and merged as a model is, and counts are those of all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ashl.overlap.streaming import Fragmented
from ashl.runtime.node import Node
from ashl.stage.fragment import Fragment
from ashl.stage.link import Ends
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.stage.team import Team
from ashl.topology.ending import REASONS, end_ridden, foreseen, keep_in_time
from ashl.topology.exchange import exchanged
from ashl.topology.local_work import Work, WorkerState, local_work

if TYPE_CHECKING:
    from ashl.topology.all_reduce import PeerState


async def worker(node: Node, stage: Stage, state: PeerState) -> int:
    """Hand in a fragment, take the first of the next steps meanwhile, merge, take the others; returns the last word."""
    stage, overlap, count = state.begin(node, stage), stage.delayed, len(stage.fragments)
    assert isinstance(overlap, Fragmented)
    state.fragment_ends = state.fragment_ends or ends_of(stage)
    while True:
        pending: Work | None = state.pending
        node.mark(stage.index, state if pending is None or stage.cut(state.pending_rest) is stage else None)
        if pending is None:
            await finish_piece(node, stage, state, None, state.local_steps)
            continue
        version = state.tally.version
        k, own = version % count, stage.cut(state.pending_rest)
        part, staleness, fragment = own.fragment(k), version - pending.version, fragment_at(stage, version)
        team = replace(Team.of(node, part), share=part.link.d / stage.link.d)
        team.begin(pending.loss / team.size, REASONS.index(state.word) if node.rank == stage.home else 0)
        held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
        exchange = exchanged(team, part, held, version, stage.aggregate.clip(pending.body))
        total, ahead = state.local_steps, None
        more = overlap.delay > 0 and (state.rest is None or state.rest[0] > 0)  # alike on all, as `beside` need not be
        beside = overlap.beside(total) if more else 0
        if beside:
            under_way = node.spawn(exchange)
            await node.sleep(0)  # what is encoded is encoded first
            ahead = await steps(node, stage, state, beside)
            update = await node.join(under_way)
        else:
            update = await exchange
        late = keep_in_time(node, stage, state, state.params)
        merge = partial(landed, own, state, k, update, team.loss, staleness)
        state.params, state.outer_state, tally = node.alike(team.ranks, ("merge", stage.index, version), merge)
        state.tally, state.version, state.steps, state.samples = tally, tally.version, tally.steps, tally.samples
        if state.start is not None:
            places = fragment.of(state.start), fragment.of(state.params), held.params + pending.body
            state.start = fragment.put(state.start, overlap.mixed(*places))
        reason = stage.judge.over(tally) or REASONS[int(team.word)]
        if reason and more:  # nobody ends before the others
            await node.all_reduce(torch.zeros(1), team.ranks, riders=1)
        node.round(stage.index, state.round, pending.steps, staleness, dropped=late, loss=pending.loss)
        state.round += 1
        if node.rank == stage.home and not late and stage.judge.take(state, node.now):
            node.snapshot(state.params, counts=tally.report())
        if reason:
            state.word = None
            return end_ridden(node, stage, state, reason, node.now_ns)
        await finish_piece(node, stage, state, ahead, total - beside)
        if node.rank == stage.home:
            state.word = foreseen(node, stage, tally)


def ends_of(stage: Stage) -> tuple[Ends, ...]:
    """Of each fragment's links."""
    return tuple(Ends() for _ in stage.fragments)


def fragment_at(stage: Stage, version: int) -> Fragment:
    """That of the merge after this version."""
    fragment = stage.fragments[version % len(stage.fragments)]
    return fragment if stage.overlap.share is None else fragment.drawn(stage.seed, version)


async def steps(node: Node, stage: Stage, state: WorkerState, count: int) -> Work:
    """So many local steps, from where the worker stands, which they move."""
    start = state.params if state.start is None else state.start
    state.local_steps = count
    work = await local_work(node, stage, state)
    state.start = start + work.body
    return work


async def finish_piece(node: Node, stage: Stage, state: WorkerState, ahead: Work | None, count: int) -> None:
    """The last steps of a piece, after those that were taken beside the last exchange: what has been learned in the
    next fragment since it was exchanged is pending from here on."""
    fragment, start = fragment_at(stage, state.version), state.start
    work = await steps(node, stage, state, count)
    body = fragment.of(work.body)
    if start is not None:
        body = fragment.of(start) - fragment.of(state.params) + body
    if ahead is not None:
        total = ahead.steps + work.steps
        loss, step_s = (
            (one * ahead.steps + other * work.steps) / total
            for one, other in ((ahead.loss, work.loss), (ahead.step_s, work.step_s))
        )
        work = Work(body, loss, total, ahead.samples + work.samples, step_s, ahead.version)
    state.pending, state.pending_rest = work._replace(body=body), state.rest
    state.plan_round(stage, node.rank, ahead=1)


def landed(
    stage: Stage, state: PeerState, k: int, update: Any, mean_loss: float, staleness: int
) -> tuple[Any, Any, Tally]:
    """(model, outer moments of all fragments, counts) with this sum merged into a fragment; `state` stays as it is."""
    tally = stage.counted(state.tally, mean_loss, staleness)
    if tally.diverged:
        return state.params, state.outer_state, tally
    fragment, held = fragment_at(stage, state.tally.version), [*(state.outer_state or len(stage.fragments) * (None,))]
    before, lr = fragment.of(state.params), stage.trainer.rate(state.tally.samples)
    held[k], params = fragment.outer.step(held[k], before, update, lr)
    return fragment.put(state.params, params), tuple(held), tally

"""Fragments of a model that are exchanged one at a time: steps shared by server and all-reduce.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, 2025.
"""

from __future__ import annotations

from ashl.runtime.rank_context import RankContext
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.fragment import Fragment
from ashl.stage.stage import Stage
from ashl.topology.local_work import Work, WorkerState, local_work


def codec_states_of(stage: Stage) -> tuple[CodecState, ...]:
    """Return an empty codec state for each fragment."""
    return tuple(CodecState() for _ in stage.fragments)


def fragment_at(stage: Stage, version: int) -> Fragment:
    """Return the fragment of the merge that follows this version."""
    fragment = stage.fragments[version % len(stage.fragments)]
    return (
        fragment
        if stage.overlap.share is None
        else fragment.with_drawn_indices(stage.seed, version)
    )


async def take_local_steps(ctx: RankContext, stage: Stage, state: WorkerState, count: int) -> Work:
    """Take `count` local steps from the worker's present position, and move it by them."""
    start = state.params if state.start is None else state.start
    state.local_steps = count
    work = await local_work(ctx, stage, state)
    state.start = start + work.body
    return work


async def finish_piece(
    ctx: RankContext, stage: Stage, state: WorkerState, ahead: Work | None, count: int
) -> None:
    """Take the last `count` steps of a piece, after those that overlapped with the last exchange
    (`ahead`).

    Afterwards `state.pending` holds the next fragment's progress since that fragment was exchanged
    last.
    """
    fragment, start = fragment_at(stage, state.version), state.start
    work = await take_local_steps(ctx, stage, state, count)
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
    state.plan_round(stage, ctx.rank, ahead=1)

"""Exchanges in parts: the fragment of the model that an exchange concerns, the local steps around a
delayed exchange, and a gradient whose buckets travel while it is computed.

Workers of an all-reduce and workers of a server share these.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from ashl.learn.pieces import Pieces
from ashl.overlap.contract import overlapped_steps
from ashl.runtime.effects import Encoding
from ashl.runtime.rank_context import RankContext
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import StageConfig
from ashl.stage.fragment import Fragment
from ashl.topology.local_work import Work, WorkerState, local_work, next_batch, start_of, trainer_of


class Part(NamedTuple):
    """The part of the model that one exchange concerns: the whole model, or a fragment."""

    stage: StageConfig  # restricted to the part
    state: Any  # a copy with the part's elements and codec state
    fragment: Fragment | None = None  # None for the whole model
    number: int = 0

    def put(self, whole: Any, values: Any) -> Any:
        """Return the whole model with `values` as the elements of the part."""
        return values if self.fragment is None else self.fragment.put(whole, values)


def part_of(stage: StageConfig, state: Any, version: int) -> Part:
    """Return the part of the model that the merge after `version` concerns."""
    if not stage.fragments:
        return Part(stage, state)
    k, fragment = version % len(stage.fragments), fragment_at(stage, version)
    state.fragment_codec_states = state.fragment_codec_states or tuple(
        CodecState() for _ in stage.fragments
    )
    held = copy(state)
    held.params, held.codec_state = fragment.of(state.params), state.fragment_codec_states[k]
    held.outer_state = state.outer_state[k] if state.outer_state else None
    return Part(stage.fragment_stages[k], held, fragment, k)


def with_part(
    stage: StageConfig, state: Any, part: Part, params: Any, outer: Any
) -> tuple[Any, Any]:
    """Return (model, outer moments) with those of a part; with fragments, by fragment."""
    if part.fragment is None:
        return params, outer
    outers = [*(state.outer_state or len(stage.fragments) * (None,))]
    outers[part.number] = outer
    return part.fragment.put(state.params, params), tuple(outers)


def fragment_at(stage: StageConfig, version: int) -> Fragment:
    """Return the fragment of the merge that follows this version."""
    fragment = stage.fragments[version % len(stage.fragments)]
    if stage.overlap.share is None:
        return fragment
    return fragment.with_drawn_indices(stage.seed, version)


# Delayed exchanges: work is exchanged while the next piece is computed
#
# See `ashl.overlap.contract.Delayed`. A worker holds one finished piece that is not exchanged yet
# (`WorkerState.pending`). In each round it sends that piece and takes the first local steps of the
# next one. Then it applies the result of the exchange, and takes the remaining steps. So at the top
# of a loop nothing is in flight. Before another stage begins the last piece is exchanged, too. At
# the end of a run it is not, and no counter includes it.


def begins_next_piece(stage: StageConfig, state: WorkerState) -> bool:
    """Return True if workers take steps of another piece before the present exchange is applied."""
    rounds_remain = state.rest is None or state.rest[0] > 0
    overlaps = stage.delayed is not None and stage.delayed.delay > 0
    return overlaps and rounds_remain and not state.last


async def begin_piece(
    ctx: RankContext, stage: StageConfig, state: WorkerState
) -> tuple[Work | None, int]:
    """Take the local steps of the next piece of work that an exchange overlaps with.

    Returns: (these steps or None, number of steps of the piece that remain).
    """
    total = ahead = state.local_steps
    if stage.delayed is None or not begins_next_piece(stage, state):
        return None, total
    state.local_steps = ahead = overlapped_steps(stage.delayed, total)
    return (await local_work(ctx, stage, state) if ahead else None), total - ahead


async def finish_piece(
    ctx: RankContext,
    stage: StageConfig,
    state: WorkerState,
    steps: int,
    begun: Work | None = None,
    applied: tuple[Part, Work] | None = None,
) -> None:
    """Take the last `steps` local steps of a piece, and keep the piece in `state.pending`.

    Args: begun: the piece's steps so far, during an exchange; applied: the part of the model that
    this exchange changed, as it was before, and the work that was exchanged.
    """
    work = begun
    if steps:
        if begun is not None:
            state.start = start_of(state) + begun.payload
        if applied is not None and stage.fragments:
            state.start = mix_position(stage, state, *applied)
        state.local_steps = steps
        work = join_work(begun, await local_work(ctx, stage, state))
    assert work is not None
    work = at_round_boundary(ctx, stage, state, work)
    if stage.fragments:
        work = work._replace(payload=fragment_at(stage, state.version).of(work.payload))
    state.pending = work


def mix_position(stage: StageConfig, state: WorkerState, part: Part, exchanged: Work) -> Any:
    """Return the worker's position amid a piece of work, after an exchange has changed a part."""
    assert stage.delayed is not None
    assert part.fragment is not None
    fragment, sent = part.fragment, part.state.params + exchanged.payload
    own, landed = fragment.of(state.start), fragment.of(state.params)
    return fragment.put(state.start, stage.delayed.mix(own, landed, sent))


def at_round_boundary(ctx: RankContext, stage: StageConfig, state: WorkerState, work: Work) -> Work:
    """Return a finished piece as it is exchanged, and set the start of the next one.

    The exchange before it is applied to `state.params` already.
    """
    if stage.delayed is None or stage.sync.exchange != "difference":
        return work

    def ahead() -> Any:
        own = stage.aggregate.clip(work.payload) * ctx.members.planned.weights[ctx.rank]
        rate = stage.trainer.rate(state.samples)
        state.own_moments, model = stage.outer.step(state.own_moments, state.params, own, rate)
        return model

    body, state.start = stage.delayed.at_boundary(
        state.params, start_of(state), work.payload, ahead
    )
    return work._replace(payload=body)


def join_work(begun: Work | None, last: Work) -> Work:
    """Return the counts of both parts of a piece, with the content of the last one."""
    if begun is None:
        return last
    total = begun.steps + last.steps
    loss, step_s = (
        (one * begun.steps + other * last.steps) / total
        for one, other in ((begun.loss, last.loss), (begun.step_s, last.step_s))
    )
    samples = begun.samples + last.samples
    return Work(last.payload, loss, total, samples, step_s, begun.version)


# A gradient by bucket: its buckets leave during the backward pass, and those of the model arrive
# during the next forward pass


async def compute_by_bucket(
    ctx: RankContext, stage: StageConfig, state: WorkerState, encoding: Encoding | None = None
) -> tuple[float, list[Any]]:
    """Compute one gradient, of which segment k arrives as a message with the tag "part".

    If the model is in flight, forward waits for each of its segments; they arrive as messages with
    the tag "group". Returns: (loss, segments of that model in the order of forward).
    """
    trainer = trainer_of(stage, state)
    step, span = next_batch(state)
    arrived, in_flight = list[Any](), state.coming is not None

    def bring(take: Callable[[int], Any], k: int) -> Any:
        arrived.append(take(k))
        return arrived[k]

    def compute(
        emit: Callable[[int, Any], None], take: Callable[[int], Any] | None = None
    ) -> float:
        model = state.params
        if take is not None:
            model = Pieces(stage.slices[::-1], partial(bring, take))
        return trainer.gradient_in_parts(model, ctx.rank, step, span, stage.slices, emit)

    needs = stage.needs if in_flight else ()
    loss = await ctx.compute(
        compute, state.batch, parts=stage.ready, encoding=encoding, needs=needs
    )
    return loss, arrived

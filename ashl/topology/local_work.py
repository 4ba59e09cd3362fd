"""Local work: what a worker computes between two merges, on every topology.

It is one gradient, or some local steps. Source: gradients as in synchronous SGD; differences as in
local SGD (Stich, ICLR 2019). *Gradient estimators* below has the kinds of gradients. Work may be
exchanged in parts: by fragments of the model, while the next piece is computed (delayed), or bucket
by bucket.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, layer_name
from ashl.compression.error_metrics import measure_compression_error, payload_sizes
from ashl.device import read_scalars, to_host
from ashl.learn.pieces import Pieces
from ashl.overlap.contract import overlapped_steps
from ashl.plan.assignments import Assignments, Members
from ashl.runtime.effects import Encoding
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import CompressionReport, NotFinite
from ashl.size_only import SizeOnly, Vector
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline, Payload
from ashl.stage.contract import WEIGHTS, StageConfig
from ashl.stage.fragment import Fragment
from ashl.stage.members import Remaining, cap_local_steps, remaining_rounds, rest_if_truncated

AT_ONCE_S = 1e-3  # seconds; a reply received within this time had already arrived


@dataclass
class WorkerState:
    """State of a worker, complete for a checkpoint.

    `step` and `drawn` count its own minibatches and samples. `steps` and `samples` count those of
    all workers that were applied before its last pull.
    """

    params: Any
    moments: Any
    codec_state: CodecState = field(default_factory=CodecState)  # the codec's state at this worker
    step: int = 0
    drawn: int = 0
    round: int = 0
    version: int = 0  # of the model
    steps: int = 0
    samples: int = 0
    local_steps: int = 1  # H, until a reply changes it
    batch: int = 1
    ratio: float = 1.0  # density of the update
    # (first stage, assignments of the workers) as planned after profiling
    assigned: tuple[int, Any] | None = None
    entered: int | None = None  # index of the current stage
    rest: Remaining = None  # part of the next round that remains, if a stop limit truncates it
    pull_s: float = 0.0  # seconds of the last pull
    interval_s: float = 0.0  # if not 0: take steps for this many seconds, instead of H steps
    anchor: Any = None  # memory of the estimator: a snapshot, or values of each sample
    squares: Any = None  # sums of squares of parts of the last gradient, for codecs that use them
    rule_state: Any = None  # state of the sync mode, if it has one at workers
    start: Any = None  # start of the next local steps, if it is not `params`
    begun: Begun | None = None  # local steps so far, at a safe point between them
    # finished work to exchange next: with delayed exchanges, or at a safe point after it
    pending: Any = None
    # at a safe point in or after local work, which is `begun` or `pending`: the state before it
    before_work: Any = None
    idle: tuple[int, ...] = ()  # joining workers that have no work in this round
    pending_rest: Remaining = None  # `rest` when that work was begun
    fragment_codec_states: tuple[CodecState, ...] = ()  # the codec's state of each fragment
    outer_state: Any = None  # moments of the outer optimizer, if this worker takes its steps
    own_moments: Any = None  # of outer steps on its own work that is still in flight
    last: bool = False  # True if it computes nothing after this work
    covered_workers: tuple[int, ...] = ()  # failed workers on whose data it trains, too
    incarnation: int = 0  # time of its join request (ns), if it joined a running run
    coming: Any = None  # first bucket of a model that arrives in buckets, or the task of its slices

    def enter(self, stage: StageConfig, members: Members, rank: int) -> None:
        """Enter a stage: set its H and density, and carry over codec state and moments.

        Does nothing if the state is that of a checkpoint within this stage.
        """
        if self.entered == stage.index:
            return
        self.entered = stage.index
        worker = stage.worker(rank)
        self.ratio, self.batch = worker.compression_ratio, worker.batch
        self.plan_round(stage, members, rank)
        self.interval_s = stage.sync.interval_s
        self.anchor = self.squares = self.rule_state = self.start = self.pending = None
        self.begun = self.before_work = None
        self.last = False
        if stage.resets_outer_momentum:
            self.own_moments = None
        if stage.resets_momentum:
            self.moments = stage.trainer.moments()
        self.codec_state = stage.carry_over_codec_state(self.codec_state, self.samples)

    def end_pass(self) -> None:
        """Reset what belongs to one pass of a loop, before this state is saved."""

    def copy_to_restart(self) -> Self:
        """Return a copy that later work does not change, see `RankContext.safe_point`."""
        before = copy.copy(self)
        before.codec_state = self.codec_state.copy()
        before.fragment_codec_states = tuple(one.copy() for one in self.fragment_codec_states)
        return before

    def repeat_work(self) -> None:
        """Return to the state before the kept work, which is computed again."""
        before = self.before_work
        self.step, self.drawn, self.moments = before.step, before.drawn, before.moments
        self.begun = self.pending = self.before_work = None

    def plan_round(self, stage: StageConfig, members: Members, rank: int, ahead: int = 0) -> None:
        """Set H of the next round, or of the one `ahead` rounds later; the last is truncated."""
        planned, done = members.planned, (self.steps, self.samples)
        rest = remaining_rounds(stage, members, planned, done, ahead)
        self.rest = rest_if_truncated(rest)
        self.local_steps = cap_local_steps(planned, rank, self.rest)


class Begun(NamedTuple):
    """Local steps that were taken so far, from which the work continues."""

    planned: tuple[int, int]  # steps and samples of the whole work
    params: Any  # the model from which they started
    moments: Any  # the optimizer's moments at that model
    lr: float
    local: Any  # the model after them
    grads: Any  # Σ lr·∇f, if gradients are accumulated
    losses: list[Any]  # one a step; the running work appends to the same list
    steps: int
    spent_s: float  # seconds that they took


class Work(NamedTuple):
    """Result of local work."""

    payload: Any  # the gradient or difference to exchange
    loss: float  # mean over the samples
    steps: int
    samples: int
    step_s: float  # seconds of one step
    version: int  # of the model on which it was begun


async def local_work(
    ctx: RankContext, stage: StageConfig, state: WorkerState, trainer: Any = None
) -> Work:
    """Compute a worker's work between two exchanges; `sync.exchange` selects its kind.

    Rule: gradient: g = ∇f(w; batch), or an estimate of it, see *Gradient estimators*.
    difference: w_H − w after H steps of the worker's optimizer; its state persists.
    accumulated: Σ lr·∇f(w; batch) over H batches, on the model as pulled.

    The learning rate is that of the samples applied before the last pull. A peer may replace
    `state.params` meanwhile. The result stays relative to the model at the start.
    Where an epoch may begin meanwhile, each step is a safe point, and the work continues from
    `state.begun`.
    Args: trainer: computes the local steps instead of the stage's.
    """
    start, kind, version = ctx.now, stage.sync.exchange, state.version
    if kind == "gradient":
        loss, grad, samples = await estimate_gradient(ctx, stage, state)
        return Work(grad, loss, 1, samples, ctx.now - start, version)
    trainer = trainer or trainer_of(stage, state)
    if state.begun is None:
        planned = state.local_steps, state.local_steps * state.batch
        first, lr, before_s = state.moments, trainer.rate(state.samples), 0.0
        params = local = start_of(state)
        grads, losses, steps = None, [], 0
    else:
        planned, params, first, lr, local, grads, losses, steps, before_s = state.begun
        losses = losses[:steps]
    start_ns, interval_ns = ctx.now_ns, round(state.interval_s * 1e9)
    while ctx.now_ns - start_ns < interval_ns if interval_ns else steps < state.local_steps:
        step, span = next_batch(state)
        if kind == "accumulated":
            work = partial(accumulate_gradient, trainer, grads, params, ctx.rank, step, lr, span)
            loss, grads = await ctx.compute(work, state.batch)
        else:
            work = partial(trainer.local_step, local, state.moments, ctx.rank, step, lr, span)
            loss, state.moments, local = await ctx.compute(work, state.batch)
        steps += 1
        losses.append(loss)
        if ctx.in_local_work and steps < state.local_steps:
            spent_s = before_s + ctx.now - start
            state.begun = Begun(planned, params, first, lr, local, grads, losses, steps, spent_s)
            ctx.move_safe_point(stage.index, state)
    state.begun = None
    spent_s = before_s + (ctx.now - start)
    total, payload = 0.0, local - params if grads is None else grads
    for loss in read_scalars(losses):
        total += loss
    if trainer.weighs and kind == "difference" and WEIGHTS in stage.topology.supports:
        share = share_of(ctx, trainer, range(state.step - steps, state.step))
        payload, total = payload * share, total * share
    return Work(payload, total / steps, steps, steps * state.batch, spent_s / steps, version)


def keeps_work(stage: StageConfig) -> bool:
    """Return True if an epoch between local work and its exchange need not repeat the work.

    It must if the exchange begins before the work ends, and if the work has the data or the weights
    of other members in it.
    """
    in_order = not stage.buckets and stage.delayed_overlap is None
    return in_order and not stage.reshards and not stage.trainer.weighs


def mark_round(ctx: RankContext, stage: StageConfig, state: WorkerState) -> None:
    """Mark the top of a round as a safe point. It moves with each step that is kept."""
    if not ctx.tolerates_failures:
        return
    computes = state.pending is None and keeps_work(stage)
    ctx.safe_point(stage.index, state, before_work=computes)
    if computes and state.begun is None:
        assert ctx.restart_point is not None
        state.before_work = ctx.restart_point[1]


async def kept_work(
    ctx: RankContext, stage: StageConfig, state: WorkerState, compute: Any = local_work
) -> Work:
    """Return the work of this round: finished before this epoch, or computed now.

    Where the loop has said at its safe point that work follows, the safe point moves behind it.
    """
    if state.pending is not None:
        return state.pending
    work = await compute(ctx, stage, state)
    if ctx.in_local_work:
        ctx.end_local_work(stage.index, replace(state, pending=work))
    return work


def suits_round(state: WorkerState, round_of_all: Assignments, rank: int) -> bool:
    """Return True if the kept work of a rank is its part of a round with this work."""
    work, begun = state.pending, state.begun
    kept = (work.steps, work.samples) if begun is None else begun.planned
    return kept == (round_of_all.steps[rank], round_of_all.samples[rank])


def no_work(stage: StageConfig, state: WorkerState) -> Work:
    """Return the work of a joining worker in the round in progress: zeros."""
    d = stage.pipeline.d
    zeros = SizeOnly(4 * d) if isinstance(state.params, SizeOnly) else state.params.new_zeros(d)
    return Work(zeros, 0.0, 0, 0, 0.0, state.version)


def unmerged_steps(state: WorkerState) -> int:
    """Return the steps of a worker that no model contains: of finished or begun work."""
    work = state.pending or state.begun
    return 0 if work is None else work.steps


def share_of(ctx: RankContext, trainer: Any, steps: range) -> float:
    """Return the weight of this worker's samples relative to the others', see `Trainer.share`."""
    planned = ctx.members.planned
    same_steps = len({planned.steps[rank] for rank in ctx.members.ranks}) == 1
    return trainer.share(ctx.rank, steps if same_steps else range(0), planned.weights)


async def encode_update(
    ctx: RankContext, stage: StageConfig, state: WorkerState, work: Work
) -> tuple[Payload, float]:
    """Encode an update for sending. Returns: (payload, loss).

    An update that is not finite is not encoded, because it would reach every element. The returned
    loss is NaN then, which ends the run as diverged.
    """
    x = stage.aggregate.clip(work.payload)
    if stage.pipeline.traits.lossless:
        return x, work.loss
    if report_not_finite(ctx, stage, state, x):
        return x, math.nan
    encode = partial(
        stage.pipeline.encode,
        state.codec_state,
        x,
        context_of(stage, ctx.rank, state, state.version),
    )
    payload = await ctx.compute(encode, work=1, kind="compress")
    report_health(ctx, stage, state, x, [(stage.pipeline, state.codec_state, payload)])
    return payload, work.loss


def report_health(
    ctx: RankContext,
    stage: StageConfig,
    state: WorkerState,
    x: Vector,
    sent: Sequence[tuple[CompressionPipeline, CodecState, Payload]],
) -> None:
    """Report the compression error of this round, every `compression_stats_every` rounds.

    Args: x: the update; sent: (pipeline, codec state, payload) of each part of x.
    """
    every, codec = stage.compression_stats_every, stage.pipeline.inner_codec
    if every is None or state.round % every or isinstance(x, SizeOnly):
        return
    pieces = [
        (pipeline.inner_codec, pipeline.d, to_host(payload))
        for pipeline, _, payload in sent
        if isinstance(payload, Tensor)
    ]
    if codec.traits.reduces or not codec.decodes_alone:
        # such payloads cannot be decoded one by one, so report their sizes only
        found = payload_sizes([payload for _, _, payload in pieces])
    else:
        residuals = [
            rest
            for pipeline, codec_state, _ in sent
            if (rest := pipeline.residual(codec_state)) is not None
        ]
        back = torch.cat([to_host(rest) for rest in residuals]) if residuals else None
        found = measure_compression_error(pieces, back, to_host(x))
    ctx.emit(CompressionReport(ctx.rank, state.round, ctx.now_ns, **found))


def context_of(stage: StageConfig, rank: int, state: WorkerState, version: int) -> EncodeContext:
    """Return the encoding context of a worker's next message, which concerns a model of this
    version.
    """
    return EncodeContext(
        ratio=state.ratio,
        seed=stage.seed,
        worker=rank,
        round=state.round,
        workers=stage.num_workers,
        epoch=state.samples / stage.epoch_samples,
        lr=1.0 if stage.sync.exchange == "difference" else -stage.trainer.rate(state.samples),
        params=state.params,
        version=version,
        squares=state.squares,
    )


def report_not_finite(ctx: RankContext, stage: StageConfig, state: WorkerState, x: Vector) -> bool:
    """Return True if an update is not finite, and report the first such layer."""
    if isinstance(x, SizeOnly) or all_finite(x):
        return False
    layer = layer_name(stage.layout, int(to_host(torch.isfinite(x)).int().argmin()))
    ctx.emit(NotFinite(ctx.rank, f"layer {layer} of the update of worker {ctx.rank}", state.round))
    return True


def all_finite(x: Tensor) -> bool:
    """Return True if x has no NaN and no infinity.

    One pass suffices if the sum is finite. A sum of finite numbers may be infinite, so only an
    infinite sum needs a second pass.
    """
    return math.isfinite(read_scalars([x.sum()])[0]) or bool(to_host(torch.isfinite(x).all()))


def accumulate_gradient(
    trainer: Any, total: Any, params: Any, rank: int, step: int, lr: float, span: range
) -> tuple[Any, Any]:
    """Return (loss, total + lr·gradient); a total of None counts as zero."""
    loss, grad = trainer.gradient(params, rank, step, span)
    return loss, grad * lr if total is None else total + grad * lr


def start_of(state: WorkerState) -> Any:
    """Return the model from which the next local steps start."""
    return state.params if state.start is None else state.start


# Gradient estimators: the gradient that a worker exchanges, of the mean loss over its shard
#
# Rule, on the pulled model w:
#     minibatch   ∇f(w; batch)
#     full        ∇f(w; shard), summed over parts of the size of a batch; costs as many samples as
#                 the shard has
#     svrg        ∇f(w; batch) − ∇f(s; batch) + ∇f(s; shard) with a snapshot s of w, renewed after
#                 each pass over the shard; costs two minibatches, and the shard with each snapshot
#     moments     ∇f(w; batch), and with it v = Σ_p (share_p · ∇f(w; part_p))² over parts of the
#                 minibatch
#     statistics  no gradient, but the optimizer's statistics of the shard (`ashl.optimizer.bcd`)
#
# The optimizer, or the `estimator` of the sync mode or the codec, selects one. With parts of one
# sample, v is Σ (∇f(w; z)/B)² over the samples z of the batch. Larger parts approximate it: v has
# the same mean if gradients are pure noise. Otherwise v is larger, so fewer coordinates count as
# certain.
#
# Limits: augmentation and dropout of full gradients are fixed, so that f is one function. For
# minibatches they vary, and svrg is centred on the fixed ones. The minibatches of svrg use equal
# random numbers at w and at s.
#
# Source: Johnson and Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
# Reduction", NIPS 2013; Tsuzuku et al., "Variance-based Gradient Compression for Efficient
# Distributed Deep Learning", ICLR workshop 2018.


class Anchor(NamedTuple):
    """Snapshot of the model: its gradient over the whole shard, and the samples drawn before it."""

    params: Any
    gradient: Any
    drawn: int


def trainer_of(stage: StageConfig, state: Any) -> Any:
    """Return the trainer of a worker, which may use the data of failed workers, too."""
    if not state.covered_workers:
        return stage.trainer
    return stage.trainer.redistribute(frozenset(state.covered_workers))


def next_batch(state: Any) -> tuple[int, range]:
    """Draw the worker's next minibatch. Returns: (number, range in its stream of samples)."""
    number, first = state.step, state.drawn
    state.step, state.drawn = number + 1, first + state.batch
    return number, range(first, state.drawn)


async def estimate_gradient(
    ctx: RankContext, stage: StageConfig, state: Any
) -> tuple[float, Any, int]:
    """Estimate the gradient at `state.params` with the stage's estimator.

    Returns: (mean loss, gradient, samples that it covers).
    """
    trainer, rank, params, kind = trainer_of(stage, state), ctx.rank, state.params, stage.estimator
    if kind == "full":
        next_batch(state)
        return await average_over_shard(ctx, stage, state)
    if kind == "statistics":
        work = partial(trainer.sweep, params, state.moments, state.anchor, rank)
        size = trainer.shard_size(rank)
        loss, state.anchor, statistics = await ctx.compute(work, work=size)
        return loss, statistics, size
    if kind == "svrg":
        if state.anchor is None or state.drawn - state.anchor.drawn >= trainer.shard_size(rank):
            _, gradient, _ = await average_over_shard(ctx, stage, state)
            state.anchor = Anchor(params, gradient, state.drawn)
        loss, gradient = await reduce_variance(ctx, stage, state)
        return loss, gradient + state.anchor.gradient, state.batch
    step, span = next_batch(state)
    if kind == "moments":
        work = partial(trainer.spread_gradient, params, rank, step, span, stage.codec.parts)
        loss, gradient, state.squares = await ctx.compute(work, work=state.batch)
        return loss, gradient, state.batch
    if stage.keeps_batch and state.batch > (planned := stage.worker(rank).batch):
        sizes = split_batch(state.batch, planned)
        return *await sum_minibatches(ctx, stage, state, step, span.start, sizes), state.batch
    work = partial(trainer.gradient, params, rank, step, span)
    loss, gradient = await ctx.compute(work, state.batch)
    return read_scalars([loss])[0], gradient, state.batch


def split_batch(batch: int, planned: int) -> list[int]:
    """Return the sizes of minibatches of nearly equal size, none larger than `planned`."""
    count = -(-batch // planned)
    return [batch // count + (place < batch % count) for place in range(count)]


async def sum_minibatches(
    ctx: RankContext, stage: StageConfig, state: Any, step: int, first: int, sizes: list[int]
) -> tuple[float, Any]:
    """Return (mean loss, gradient) of the samples from `first` on, in minibatches of these sizes.

    Rule: g = Σ_k b_k/b · ∇f(w; minibatch k), with b = Σ_k b_k.
    """
    losses, total = [], None
    for size in sizes:
        span = range(first, first + size)
        work = partial(stage.trainer.gradient, state.params, ctx.rank, step, span)
        loss, gradient = await ctx.compute(work, size)
        gradient = gradient * (size / state.batch)
        total = gradient if total is None else total + gradient
        losses.append(loss)
        first += size
    loss = sum(size * own for size, own in zip(sizes, read_scalars(losses), strict=True))
    return loss / state.batch, total


async def average_over_shard(
    ctx: RankContext, stage: StageConfig, state: Any
) -> tuple[float, Any, int]:
    """Return (mean loss, gradient, samples) over all samples of the worker."""
    trainer = trainer_of(stage, state)
    size = trainer.shard_size(ctx.rank)
    batch = stage.worker(ctx.rank).batch
    work = partial(trainer.full_gradient, state.params, ctx.rank, batch)
    return (*await ctx.compute(work, work=size), size)


async def reduce_variance(ctx: RankContext, stage: StageConfig, state: Any) -> tuple[float, Any]:
    """Return (loss, ∇f(w; batch) − ∇f(s; batch)) on the next minibatch."""
    step, span = next_batch(state)
    gradient_of = trainer_of(stage, state).reduced_gradient
    work = partial(gradient_of, state.params, state.anchor.params, ctx.rank, step, span)
    loss, gradient = await ctx.compute(work, work=2 * state.batch)
    return read_scalars([loss])[0], gradient


# The part of the model that an exchange concerns


class Part(NamedTuple):
    """The part of the model that one exchange concerns: the whole model, or a fragment."""

    stage: StageConfig  # restricted to the part
    state: Any  # a copy with the part's elements and codec state
    fragment: Fragment | None = None  # None for the whole model
    number: int = 0

    def put(self, whole: Any, values: Any) -> Any:
        """Return the whole model with `values` as the elements of the part."""
        return values if self.fragment is None else self.fragment.insert(whole, values)


def part_of(whole: Part, version: int) -> Part:
    """Return the part of the whole model that the merge after `version` concerns."""
    stage, state = whole.stage, whole.state
    if not stage.fragments:
        return whole
    k, fragment = version % len(stage.fragments), choose_fragment(stage, version)
    state.fragment_codec_states = state.fragment_codec_states or tuple(
        CodecState() for _ in stage.fragments
    )
    held = copy.copy(state)
    held.params, held.codec_state = fragment.extract(state.params), state.fragment_codec_states[k]
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
    return part.fragment.insert(state.params, params), tuple(outers)


def choose_fragment(stage: StageConfig, version: int) -> Fragment:
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
    overlaps = stage.delayed_overlap is not None and stage.delayed_overlap.delay > 0
    return overlaps and rounds_remain and not state.last


async def begin_piece(
    ctx: RankContext, stage: StageConfig, state: WorkerState
) -> tuple[Work | None, int]:
    """Take the local steps of the next piece of work that an exchange overlaps with.

    Returns: (these steps or None, number of steps of the piece that remain).
    """
    total = ahead = state.local_steps
    if stage.delayed_overlap is None or not begins_next_piece(stage, state):
        return None, total
    state.local_steps = ahead = overlapped_steps(stage.delayed_overlap, total)
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
        work = work._replace(payload=choose_fragment(stage, state.version).extract(work.payload))
    state.pending = work


def mix_position(stage: StageConfig, state: WorkerState, part: Part, exchanged: Work) -> Any:
    """Return the worker's position amid a piece of work, after an exchange has changed a part."""
    assert stage.delayed_overlap is not None
    assert part.fragment is not None
    fragment, sent = part.fragment, part.state.params + exchanged.payload
    own, landed = fragment.extract(state.start), fragment.extract(state.params)
    return fragment.insert(state.start, stage.delayed_overlap.mix(own, landed, sent))


def at_round_boundary(ctx: RankContext, stage: StageConfig, state: WorkerState, work: Work) -> Work:
    """Return a finished piece as it is exchanged, and set the start of the next one.

    The exchange before it is applied to `state.params` already.
    """
    if stage.delayed_overlap is None or stage.sync.exchange != "difference":
        return work

    def step_ahead() -> Any:
        own = stage.aggregate.clip(work.payload) * ctx.members.planned.weights[ctx.rank]
        rate = stage.trainer.rate(state.samples)
        state.own_moments, model = stage.outer.step(state.own_moments, state.params, own, rate)
        return model

    body, state.start = stage.delayed_overlap.at_boundary(
        state.params, start_of(state), work.payload, step_ahead
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
    in_flight = state.coming is not None
    arrived = dict[int, Any]()  # a model may use its parameters in another order than it has them

    def take_segment(take: Callable[[int], Any], k: int) -> Any:
        arrived[k] = take(k)
        return arrived[k]

    def compute(
        emit: Callable[[int, Any], None], take: Callable[[int], Any] | None = None
    ) -> float:
        model = state.params
        if take is not None:
            model = Pieces(stage.slices[::-1], partial(take_segment, take))
        return trainer.gradient_in_parts(model, ctx.rank, step, span, stage.slices, emit)

    needs = stage.needed_segments if in_flight else ()
    loss = await ctx.compute(
        compute, state.batch, parts=stage.ready_segments, encoding=encoding, needs=needs
    )
    return loss, [arrived[k] for k in sorted(arrived)]

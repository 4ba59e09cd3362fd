"""What every worker does between two merges, whatever the topology: one gradient, or local steps.

Source: exchange of gradients as in synchronous SGD; exchange of differences as in local SGD (Stich,
ICLR 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext
from ashl.compression.wrappers.error_metrics import measure_compression_error, payload_sizes
from ashl.compression.wrappers.layers import Layerwise, layer_at
from ashl.learn.device import numbers, to_host
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import CompressionReport, NotFinite
from ashl.size_only import SizeOnly, Vector
from ashl.stage.compression_pipeline import Body, CodecState, CompressionPipeline
from ashl.stage.stage import WEIGHTS, Stage
from ashl.topology.estimate import estimate_gradient, next_batch
from ashl.topology.replies import Admission, Pull


@dataclass
class WorkerState:
    """All that a worker needs to go on. `step` counts its minibatches, `drawn` the samples in them;
    `steps` and `samples` are those of everybody that were applied as of its last pull.
    """

    params: Any
    moments: Any
    ends: CodecState = field(default_factory=CodecState)  # what the codec keeps here
    step: int = 0
    drawn: int = 0
    round: int = 0
    version: int = 0
    steps: int = 0
    samples: int = 0
    local_steps: int = 1  # H, until a reply says otherwise
    batch: int = 1
    ratio: float = 1.0  # density of the update
    assigned: tuple[int, Any] | None = None  # what profiling has planned, from this stage on
    entered: int | None = None  # the stage that it is in
    rest: tuple[int, int] | None = None  # of the stage's rounds, as `Stage.rest` says
    pull_s: float = 0.0  # what the last pull took
    interval_s: float = (
        0.0  # where it is not 0, steps are taken until so much time has passed, instead of H
    )
    anchor: Any = None  # what the estimator keeps: a snapshot, or what belongs to each sample
    squares: Any = None  # what the last gradient's parts say of its variance
    rule_state: Any = None  # the state of this stage's sync rule, where it has one
    start: Any = None  # what the next steps start from, where it is not `params`
    pending: Any = None  # work that is to be exchanged next, where exchanges are delayed
    pending_rest: tuple[int, int] | None = None  # of the stage's rounds, when that was begun
    fragment_ends: tuple[
        CodecState, ...
    ] = ()  # what the codec keeps here of each, where fragments are exchanged
    own_moments: Any = None  # of outer steps on what of its work has not landed yet
    last: bool = False  # whether nothing is computed beyond it
    away: tuple[int, ...] = ()  # who is gone, where it has a part of their data
    incarnation: int = 0  # when it asked to take part, where it came while the others ran
    coming: Any = None  # of a model that comes back in parts, what has come: the first

    def enter(self, stage: Stage, rank: int) -> None:
        """A stage begins: its H and ratio, and what is handed over from the stage before."""
        if self.entered == stage.index:
            return  # it goes on from a checkpoint
        self.entered = stage.index
        worker = stage.worker(rank)
        self.ratio, self.batch = worker.compression_ratio, worker.batch
        self.plan_round(stage, rank)
        self.interval_s = stage.sync.interval_s
        self.anchor = self.squares = self.rule_state = self.start = self.pending = None
        self.last = False
        if stage.resets_outer:
            self.own_moments = None
        if stage.resets:
            self.moments = stage.trainer.moments()
        self.ends = stage.carry_over_codec_state(self.ends, self.samples)

    def follow(self, assignment: Pull | Admission) -> None:
        """Go on as a server says."""
        self.version, self.steps, self.samples = (
            assignment.version,
            assignment.steps,
            assignment.samples,
        )
        self.local_steps, self.ratio, self.interval_s = (
            assignment.local_steps,
            assignment.ratio,
            assignment.interval_s,
        )
        self.batch = assignment.batch or self.batch

    def plan_round(self, stage: Stage, rank: int, ahead: int = 0) -> None:
        """Its H in the next round, or so many later, which may be the last one and cut short."""
        self.rest = stage.remaining_rounds(self.steps, self.samples, ahead)
        self.local_steps = stage.cap_local_steps(stage.worker(rank).local_steps, rank, self.rest)


class Work(NamedTuple):
    """What came of it: the body to exchange, the mean loss seen, steps taken, samples seen, seconds
    of one step, and the version of the model that it was begun on.
    """

    body: Any
    loss: float
    steps: int
    samples: int
    step_s: float
    version: int


async def local_work(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """gradient: g = ∇f(w; batch), or what `topology.estimate` makes instead. difference: w_H − w
    after H steps of the worker's optimizer, whose state persists. accumulated: Σ lr·∇f(w; batch)
    over H batches, on the model as pulled.

    The learning rate is that of the samples applied as of the last pull. `state.params` may become
    another model meanwhile, by a peer: what is computed stays relative to the one at the start.
    """
    stage = stage.with_redistributed_shards(state.away) if state.away else stage
    trainer, start, kind, version = stage.trainer, ctx.now, stage.sync.exchange, state.version
    params = state.params if state.start is None else state.start
    if kind == "gradient":
        loss, grad, samples = await estimate_gradient(ctx, stage, state)
        return Work(grad, loss, 1, samples, ctx.now - start, version)
    local, lr, losses, steps = params, trainer.rate(state.samples), [], 0
    start_ns, interval_ns, grads = ctx.now_ns, round(state.interval_s * 1e9), None
    while ctx.now_ns - start_ns < interval_ns if interval_ns else steps < state.local_steps:
        step, span = next_batch(state)
        if kind == "accumulated":
            work = partial(accumulate, stage, grads, params, ctx.rank, step, lr, span)
            loss, grads = await ctx.compute(work, state.batch)
        else:
            work = partial(trainer.local_step, local, state.moments, ctx.rank, step, lr, span)
            loss, state.moments, local = await ctx.compute(work, state.batch)
        steps += 1
        losses.append(loss)
    total, body = 0.0, local - params if grads is None else grads
    for loss in numbers(losses):
        total += loss
    if trainer.weighs and kind == "difference" and WEIGHTS in stage.topology.supports:
        share = share_of(stage, ctx.rank, range(state.step - steps, state.step))
        body, total = body * share, total * share
    return Work(body, total / steps, steps, steps * state.batch, (ctx.now - start) / steps, version)


def share_of(stage: Stage, rank: int, steps: range) -> float:
    """How much the samples of a worker's local steps count beside those of the others, see
    `Trainer.share`.
    """
    weights = [0.0] * stage.num_workers
    for worker, weight in zip(stage.workers, stage.team_weights, strict=True):
        weights[worker] = weight
    alike = len({stage.round_steps[worker] for worker in stage.workers}) == 1
    return stage.trainer.share(rank, steps if alike else range(0), weights)


async def encode_update(
    ctx: RankContext, stage: Stage, state: WorkerState, work: Work
) -> tuple[Body, float]:
    """(body, loss) of what is to be sent. What is not finite is not encoded, and shows in a loss
    that is none: it would reach every element, and the run is lost.
    """
    x = stage.aggregate.clip(work.body)
    if stage.link.traits.lossless:
        return x, work.loss
    if not_finite(ctx, stage, state, x):
        return x, math.nan
    encode = partial(
        stage.link.encode, state.ends, x, context_of(stage, ctx.rank, state, state.version)
    )
    body = await ctx.compute(encode, work=1, kind="compress")
    report_health(ctx, stage, state, x, [(stage.link, state.ends, body)])
    if reports_mean(stage, state.version):
        weight = stage.weights(stage.workers)[ctx.rank]
        ctx.show_update(x, of=ctx.rank, tick=state.version, weight=weight)
    return body, work.loss


def report_health(
    ctx: RankContext,
    stage: Stage,
    state: WorkerState,
    x: Vector,
    sent: Sequence[tuple[CompressionPipeline, CodecState, Body]],
) -> None:
    """Every so often, say what compression loses of what was sent of x, piece by piece, with what
    is kept of each.
    """
    every, codec = stage.compression_stats_every, stage.link.innermost
    if every is None or state.round % every or isinstance(x, SizeOnly):
        return
    pieces = [
        (link.innermost, link.d, to_host(body))
        for link, _, body in sent
        if isinstance(body, Tensor)
    ]
    if codec.traits.reduces or not isinstance(codec, Code | Layerwise):
        found = payload_sizes(
            [body for _, _, body in pieces]
        )  # bodies alone do not say what comes of them
    else:
        kept = [rest for link, ends, _ in sent if (rest := link.residual(ends)) is not None]
        back = torch.cat([to_host(rest) for rest in kept]) if kept else None
        found = measure_compression_error(
            pieces, back, to_host(x), stage.layout, stage.compression_stats_per_layer
        )
    ctx.emit(CompressionReport(ctx.rank, state.round, ctx.now_ns, **found))


def reports_mean(stage: Stage, version: int) -> bool:
    """Whether everybody hands in what was to be sent at this merge: only where all of it is merged
    at once.
    """
    barrier = not stage.topology.has_server or stage.quorum == stage.num_workers
    return (
        stage.compression_stats_vs_mean
        and barrier
        and stage.compression_stats_every is not None
        and not version % stage.compression_stats_every
    )


def context_of(stage: Stage, rank: int, state: WorkerState, version: int) -> EncodeContext:
    """What a worker's next message is encoded for, which is about a model of this version."""
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


def not_finite(ctx: RankContext, stage: Stage, state: WorkerState, x: Vector) -> bool:
    """Whether an update is not finite; the first layer in which it is not is reported."""
    if isinstance(x, SizeOnly) or all_finite(x):
        return False
    layer = layer_at(stage.layout, int(to_host(torch.isfinite(x)).int().argmin()))
    ctx.emit(NotFinite(ctx.rank, f"layer {layer} of the update of worker {ctx.rank}", state.round))
    return True


def all_finite(x: Tensor) -> bool:
    """Whether there is no NaN and no infinity; mostly in one pass: a sum of finite numbers may be
    infinite, too.
    """
    return math.isfinite(numbers([x.sum()])[0]) or bool(to_host(torch.isfinite(x).all()))


def accumulate(
    stage: Stage, total: Any, params: Any, rank: int, step: int, lr: float, span: range
) -> tuple[Any, Any]:
    """(loss, total + lr·gradient), with None for a total of nothing."""
    loss, grad = stage.trainer.gradient(params, rank, step, span)
    return loss, grad * lr if total is None else total + grad * lr


# Work that is exchanged while the next piece is computed  Work that is exchanged while the next
# piece of it is computed, see `ashl.overlap.contract.Delayed`.  A worker holds one piece that is
# done and not exchanged (`WorkerState.pending`). In each round it hands that in, computes the next
# one, takes what came of the exchange, and comes to a border. So at the top of a loop nothing is
# under way. Before another stage begins the last piece is exchanged, too; at the end of a run it is
# not, and no count
# has it.


AT_ONCE_S = 1e-3  # a reply that is had within so long was there before


async def exchangeable_work(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """The work to exchange now: what was computed during the exchange before, or new."""
    if state.pending is not None:
        return state.pending
    work = at_round_boundary(ctx, stage, state, await local_work(ctx, stage, state))
    state.plan_round(stage, ctx.rank, ahead=1)
    return work


def at_round_boundary(ctx: RankContext, stage: Stage, state: WorkerState, work: Work) -> Work:
    """A piece is done and the exchange before it has landed in `state.params`: what to exchange of
    it next.
    """
    if stage.delayed is None or stage.sync.exchange != "difference":
        return work
    start = state.params if state.start is None else state.start

    def ahead() -> Any:
        own = stage.aggregate.clip(work.body) * stage.team_weights[stage.workers.index(ctx.rank)]
        rate = stage.trainer.rate(state.samples)
        state.own_moments, model = stage.outer.step(state.own_moments, state.params, own, rate)
        return model

    body, state.start = stage.delayed.at_boundary(state.params, start, work.body, ahead)
    return work._replace(body=body)

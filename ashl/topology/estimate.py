"""Gradient estimators: the gradient that a worker exchanges, of the mean loss over its shard.

Rule, on the pulled model w:
    minibatch   ∇f(w; batch)
    full        ∇f(w; shard), summed over parts of the size of a batch; costs as many samples as
                the shard has
    svrg        ∇f(w; batch) − ∇f(s; batch) + ∇f(s; shard) with a snapshot s of w, renewed after
                each pass over the shard; costs two minibatches, and the shard with each snapshot
    moments     ∇f(w; batch), and with it v = Σ_p (share_p · ∇f(w; part_p))² over parts of the
                minibatch
    statistics  no gradient, but the optimizer's statistics of the shard (`ashl.optimizer.bcd`)

The optimizer, or the `estimator` of the sync mode or the codec, selects one. With parts of one
sample, v is Σ (∇f(w; z)/B)² over the samples z of the batch. Larger parts approximate it: v has the
same mean if gradients are pure noise. Otherwise v is larger, so fewer coordinates count as certain.

Limits: augmentation and dropout of full gradients are fixed, so that f is one function. For
minibatches they vary, and svrg is centred on the fixed ones. The minibatches of svrg use equal
random numbers at w and at s.

Source: Johnson and Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
Reduction", NIPS 2013; Tsuzuku et al., "Variance-based Gradient Compression for Efficient
Distributed Deep Learning", ICLR workshop 2018.
"""

from functools import partial
from typing import Any, NamedTuple

from ashl.learn.device import numbers
from ashl.runtime.rank_context import RankContext
from ashl.stage.stage import Stage


class Anchor(NamedTuple):
    """Snapshot of the model: its gradient over the whole shard, and the samples drawn before it."""

    params: Any
    gradient: Any
    drawn: int


def trainer_of(stage: Stage, state: Any) -> Any:
    """Return the trainer of a worker, which may use the data of failed workers, too."""
    return stage.trainer.redistribute(frozenset(state.away)) if state.away else stage.trainer


def next_batch(state: Any) -> tuple[int, range]:
    """Draw the worker's next minibatch. Returns: (number, range in its stream of samples)."""
    number, first = state.step, state.drawn
    state.step, state.drawn = number + 1, first + state.batch
    return number, range(first, state.drawn)


async def estimate_gradient(ctx: RankContext, stage: Stage, state: Any) -> tuple[float, Any, int]:
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
    loss, gradient = await ctx.compute(
        partial(trainer.gradient, params, rank, step, span), state.batch
    )
    return numbers([loss])[0], gradient, state.batch


async def average_over_shard(ctx: RankContext, stage: Stage, state: Any) -> tuple[float, Any, int]:
    """Return (mean loss, gradient, samples) over all samples of the worker."""
    trainer = trainer_of(stage, state)
    size = trainer.shard_size(ctx.rank)
    batch = stage.worker(ctx.rank).batch
    work = partial(trainer.full_gradient, state.params, ctx.rank, batch)
    return (*await ctx.compute(work, work=size), size)


async def reduce_variance(ctx: RankContext, stage: Stage, state: Any) -> tuple[float, Any]:
    """Return (loss, ∇f(w; batch) − ∇f(s; batch)) on the next minibatch."""
    step, span = next_batch(state)
    gradient_of = trainer_of(stage, state).reduced_gradient
    work = partial(gradient_of, state.params, state.anchor.params, ctx.rank, step, span)
    loss, gradient = await ctx.compute(work, work=2 * state.batch)
    return numbers([loss])[0], gradient

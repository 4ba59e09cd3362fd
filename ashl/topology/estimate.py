"""The gradient that a worker exchanges: an estimate of that of its own objective, the mean loss
over its shard.

Rule, on the model w that was pulled:
    minibatch   ∇f(w; batch)
    full        ∇f(w; shard), summed over parts of the size of a batch; costs as many samples as the
                shard has
    svrg        ∇f(w; batch) − ∇f(s; batch) + ∇f(s; shard) with a snapshot s of w that is taken anew
                once the
                minibatches have gone over the shard; costs two minibatches, and the shard with each
                snapshot
    moments     ∇f(w; batch), and with it v = Σ_p (share_p · ∇f(w; part_p))² over parts of the
                minibatch
    statistics  no gradient, but what the optimizer makes of the shard (`ashl.optimizer.bcd`)

Which of them is for the optimizer, the sync mode or the codec to say, the latter two as
`estimator`. With parts of one sample, v is Σ (∇f(w; z)/B)² over the samples z of the batch; larger
ones are a fair stand-in, of the same mean where gradients are mere noise, and larger by their size
where they are not: then fewer coordinates count as sure.

Limits: augmentation and dropout of full gradients are always the same, so that f is one function;
those of minibatches change, and svrg is centred on the former. Minibatches of svrg and their
anchors draw alike.

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
    """A snapshot of the model, the gradient there over the whole shard, and the samples drawn until
    then.
    """

    params: Any
    gradient: Any
    drawn: int


def next_batch(state: Any) -> tuple[int, range]:
    """The worker's next minibatch: its number, and where it lies in the worker's stream of
    samples.
    """
    number, first = state.step, state.drawn
    state.step, state.drawn = number + 1, first + state.batch
    return number, range(first, state.drawn)


async def estimate_gradient(ctx: RankContext, stage: Stage, state: Any) -> tuple[float, Any, int]:
    """(mean loss seen, gradient at `state.params`, samples that it is of), by the stage's
    estimator.
    """
    trainer, rank, params, kind = stage.trainer, ctx.rank, state.params, stage.estimator
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
    """The same over all samples of the worker."""
    size = stage.trainer.shard_size(ctx.rank)
    work = partial(
        stage.trainer.full_gradient, state.params, ctx.rank, stage.worker(ctx.rank).batch
    )
    return (*await ctx.compute(work, work=size), size)


async def reduce_variance(ctx: RankContext, stage: Stage, state: Any) -> tuple[float, Any]:
    """(loss, ∇f(w; batch) − ∇f(s; batch)) on the next minibatch."""
    step, span = next_batch(state)
    work = partial(
        stage.trainer.reduced_gradient, state.params, state.anchor.params, ctx.rank, step, span
    )
    loss, gradient = await ctx.compute(work, work=2 * state.batch)
    return numbers([loss])[0], gradient

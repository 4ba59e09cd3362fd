"""Pairs: a worker averages its model with that of one other worker after each piece of work.

Rule: i sends x_i. j answers with x_j and takes x_j ← x_j + (x_i − x_j)/2 at once. i takes x_i ← x_i
+ (x_j − x_i')/2, with x_i' the model that it sent. In this difference form, local steps and other
averages may happen in between on either side. With any messages in flight, only the workers' own
steps change Σ_i x_i. Each worker answers in a task of its own, even while it computes or waits for
an answer, so no deadlock is possible on any graph.

With `overlap`, i sends before it computes and takes the answer afterwards, so the exchange is
hidden. Otherwise it computes, then averages. No worker leaves before the coordinator has told it
that all are done.

Source: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv 1710.06952.
"""

from typing import Any, ClassVar

from ashl.data.rng import Purpose, bit_generator
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.contract import GO, STOP, StageConfig
from ashl.topology.coordinator import (
    RoamingState,
    apply_signal,
    await_answer,
    close_worker,
    report_done,
    report_merge,
)
from ashl.topology.gossip import RoamingRule, graph_of
from ashl.topology.graph import MemberGraph
from ashl.topology.local_work import kept_work


class PairRule(RoamingRule, contract=True):
    """Sync mode in which workers average in pairs; `peers` are those that a worker may ask."""

    overlap: ClassVar[bool] = True  # if True, the exchange is hidden behind the computation

    async def worker(self, ctx: RankContext, stage: StageConfig, state: RoamingState) -> int:
        return await worker(ctx, stage, state)

    def peers(self, graph: MemberGraph, rank: int) -> tuple[int, ...]:
        raise NotImplementedError

    def encode_model(self, stage: StageConfig, state: RoamingState, rank: int, asks: bool) -> Any:
        """Return the worker's model as it is sent, with a request (`asks`) or an answer."""
        return state.params

    def decode_model(self, state: RoamingState, payload: Any, near: Vector) -> Any:
        """Decode the model of another worker; `near` is a model close to it."""
        return payload


async def worker(ctx: RankContext, stage: StageConfig, state: RoamingState) -> int:
    """Run a worker: compute and average until the coordinator ends the stage.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    rule = stage.sync
    state.enter(stage, ctx.members, ctx.rank)
    answering = ctx.spawn(answer_requests(ctx, stage, state))
    peers, dropped = rule.peers(graph_of(stage, ctx.members.ranks), ctx.rank), 0
    while state.signal == GO:
        ctx.safe_point(stage.index, state, before_work=state.keeps_steps)
        version, sent = state.version, state.params
        if rule.overlap:
            await send_request(ctx, stage, state, peers)
        work = await kept_work(ctx, stage, state)
        state.pending = None
        await await_answer(ctx, stage, state)
        staleness = state.version - version
        if not rule.overlap and state.signal != STOP:
            sent = state.params
            await send_request(ctx, stage, state, peers)
        await merge_answer(ctx, stage, state, sent)
        if state.signal == STOP:  # the run ends, so this piece of work is dropped
            dropped = work.steps
            break
        state.params = state.params + work.payload
        state.version += 1
        await report_merge(ctx, stage, state, work, staleness)
    await report_done(ctx, stage, state, dropped)
    await ctx.join(answering)
    return close_worker(ctx, stage, state, dropped)


def draw_partner(peers: tuple[int, ...], seed: int, rank: int, k: int) -> int | None:
    """Return the worker to ask after the k-th piece of work; None if this one only answers."""
    return (
        peers[int(bit_generator(seed, Purpose.PEER, rank, k).random_raw()) % len(peers)]
        if peers
        else None
    )


async def send_request(
    ctx: RankContext, stage: StageConfig, state: RoamingState, peers: tuple[int, ...]
) -> None:
    """Ask one of these peers to average."""
    state.asked = draw_partner(peers, stage.seed, ctx.rank, state.round)
    if state.asked is not None:
        payload = stage.sync.encode_model(stage, state, ctx.rank, True)
        await ctx.send(state.asked, stage.tag("ask"), payload)


async def merge_answer(
    ctx: RankContext, stage: StageConfig, state: RoamingState, sent: Vector
) -> None:
    """Merge the answer of the worker that was asked, if one was."""
    if state.asked is None:
        return
    message = await ctx.recv(stage.tag("answer"), src=state.asked)
    state.asked = None
    merge_model(stage.sync, state, message.payload, sent)


def merge_model(rule: PairRule, state: RoamingState, payload: Any, sent: Vector) -> None:
    """Update the model: x ← x + (y − x')/2."""
    state.params = state.params + (rule.decode_model(state, payload, sent) - sent) * 0.5
    state.version += 1


async def answer_requests(ctx: RankContext, stage: StageConfig, state: RoamingState) -> None:
    """Answer the requests of other workers and handle signals, until all workers are done."""
    asked, signal, rule = stage.tag("ask"), stage.tag("signal"), stage.sync
    while True:
        message = await ctx.recv(asked, signal)
        if message.tag == signal:
            if apply_signal(ctx, state, message):
                return
        else:
            payload = rule.encode_model(stage, state, ctx.rank, False)
            await ctx.send(message.src, stage.tag("answer"), payload)
            merge_model(rule, state, message.payload, state.params)

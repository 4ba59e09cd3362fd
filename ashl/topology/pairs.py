"""Pairs: a worker works at its own pace and, after each piece of work, averages its model with one
other worker's.

Rule: i sends x_i; j answers with x_j and takes x_j ← x_j + (x_i − x_j)/2 at once; i takes x_i ← x_i
+ (x_j − x_i')/2 with x_i' what it sent. In difference form, local steps and other meetings may
happen in between on either side: whatever is in flight, Σ_i x_i changes by nothing but the workers'
own steps. Each worker answers in a task of its own, also while it computes or waits for an answer
itself, hence no circle of waiting can close whatever the graph.

With `overlap`, i sends before it computes and takes the answer when it has computed, so that the
exchange is hidden; otherwise it computes, then meets. Nobody leaves before the coordinator says
that all are done.

A checkpoint whose ranks keep themselves one after the other is a cut through the run: whoever has
been kept belongs to what follows, whoever is still to be to what was before. Who asks says in the
tag which it is, and whoever is on the other side answers without a model: both go on as they were.
So no average is in one of two models that are kept, and nobody waits.

Sources: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv 1710.06952; colours of messages as in Lai and Yang, "On Distributed Snapshots", Information
Processing Letters 1987.
"""

from typing import Any, ClassVar

from ashl.data.rng import Purpose, bits
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.stage import GO, STOP, Stage
from ashl.topology.coordinator import (
    CheckpointKind,
    RoamingState,
    apply_signal,
    await_answer,
    close_worker,
    report_done,
    report_merge,
)
from ashl.topology.gossip import RoamingRule
from ashl.topology.local_work import local_work


class PairRule(RoamingRule, contract=True):
    """A sync mode in which workers average in pairs: it says whom each of them may ask."""

    checkpoint_kind: ClassVar[CheckpointKind] = "each"
    overlap: ClassVar[bool] = True  # whether the exchange is hidden behind the computation

    async def worker(self, ctx: RankContext, stage: Stage, state: RoamingState) -> int:
        return await worker(ctx, stage, state)

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...]:
        raise NotImplementedError

    def encode_model(self, stage: Stage, state: RoamingState, rank: int, asks: bool) -> Any:
        """The worker's model as it travels, to ask with it or to answer."""
        return state.params

    def decode_model(self, state: RoamingState, body: Any, near: Vector) -> Any:
        """Another's model, for who has this one."""
        return body


def rule_of(stage: Stage) -> PairRule:
    """The stage's sync mode, as pairs ask it."""
    assert isinstance(stage.sync, PairRule)
    return stage.sync


async def worker(ctx: RankContext, stage: Stage, state: RoamingState) -> int:
    """Work and meet until the coordinator says that the stage is over; returns the last word."""
    rule = rule_of(stage)
    state.enter(stage, ctx.rank)
    answering = ctx.spawn(answer(ctx, stage, state), is_background_service=True)
    peers, dropped = rule.peers(stage, ctx.rank), 0
    while state.signal == GO:
        state.cut ^= ctx.safe_point(stage.index, state)
        version, sent = state.version, state.params
        if rule.overlap:
            await ask(ctx, stage, state, peers)
        work = await local_work(ctx, stage, state)
        await await_answer(ctx, stage, state)
        staleness = state.version - version
        if not rule.overlap and state.signal != STOP:
            sent = state.params
            await ask(ctx, stage, state, peers)
        await meet(ctx, stage, state, sent)
        if state.signal == STOP:  # the end of the run: work that is under way is thrown away
            dropped = work.steps
            break
        state.params = state.params + work.body
        state.version += 1
        await report_merge(ctx, stage, state, work, staleness)
    await report_done(ctx, stage, state, dropped)
    await ctx.join(answering)
    return close_worker(ctx, stage, state, dropped)


def draw_partner(peers: tuple[int, ...], seed: int, rank: int, k: int) -> int | None:
    """Whom this worker meets after its k-th piece of work; None where it only answers."""
    return (
        peers[int(bits(seed, Purpose.PEER, rank, k).random_raw()) % len(peers)] if peers else None
    )


async def ask(ctx: RankContext, stage: Stage, state: RoamingState, peers: tuple[int, ...]) -> None:
    """Ask one of these peers."""
    state.asked = draw_partner(peers, stage.seed, ctx.rank, state.round)
    if state.asked is not None:
        body = rule_of(stage).encode_model(stage, state, ctx.rank, True)
        await ctx.send(state.asked, stage.tag("ask", state.cut), body)


async def meet(ctx: RankContext, stage: Stage, state: RoamingState, sent: Vector) -> None:
    """Take the answer of the worker that was asked, if one was."""
    if state.asked is None:
        return
    message = await ctx.recv(stage.tag("answer"), src=state.asked)
    state.asked = None
    if message.body is not None:
        rule = rule_of(stage)
        merge(rule, state, message.body, sent)


def merge(rule: PairRule, state: RoamingState, body: Any, sent: Vector) -> None:
    """x ← x + (y − x')/2."""
    state.params = state.params + (rule.decode_model(state, body, sent) - sent) * 0.5
    state.version += 1


async def answer(ctx: RankContext, stage: Stage, state: RoamingState) -> None:
    """Beside the worker's own loop: answer whoever asks, and take in words, until all are done."""
    asked, signal, rule = (
        (stage.tag("ask"), stage.tag("ask", 1)),
        stage.tag("signal"),
        rule_of(stage),
    )
    while True:
        message = await ctx.recv(*asked, signal)
        if message.tag == signal:
            if apply_signal(ctx, state, message):
                return
        elif message.tag != stage.tag("ask", state.cut):
            await ctx.send(message.src, stage.tag("answer"), None)
        else:
            body = rule.encode_model(stage, state, ctx.rank, False)
            await ctx.send(message.src, stage.tag("answer"), body)
            merge(rule, state, message.body, state.params)

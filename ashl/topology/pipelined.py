"""Steps whose sums go on during the next forward pass, which waits for the model layer group by layer group.

Rule: message k of the gradient is summed as `overlap` says. Once the sum of a group is in, the optimizer steps on that
group, and the forward pass may come to it. The bits are those of a sum and a step in one piece.

With the group that forward comes to first ride the losses and rank 0's word: so before a step begins everybody knows
whether the run goes on, as without overlap. A model is handed to the evaluator once all of its groups are in, and so a
target that it reaches ends the run one step later. At the end of a stage, and for a checkpoint, nothing is begun before
all is in.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019; Zhang et al.,
"DeAR", ICDCS 2023. What goes when is `ashl.overlap`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from ashl.learn.pieces import Pieces
from ashl.runtime.node import Node
from ashl.runtime.sums import piece, together
from ashl.stage.stage import Stage
from ashl.stage.team import Team
from ashl.topology.ending import REASONS, end_ridden, foreseen, keep_in_time
from ashl.topology.estimate import draw

if TYPE_CHECKING:
    from ashl.topology.all_reduce import PeerState


async def worker(node: Node, stage: Stage, state: PeerState) -> int:
    """One step after the other; returns the last word."""
    state.begin(node, stage)
    team, exchange = Team.of(node, stage), None
    groups = [(stage.tag("group", k), message) for k, message in enumerate(stage.messages)]
    while True:
        if exchange is not None and node.wants_mark:
            await flushed(node, stage, exchange)
            exchange = None
        if exchange is None:
            node.mark(stage.index, state if stage.cut(state.rest) is stage else None)
            for tag, message in groups:
                await node.send(node.rank, tag, piece(state.params, message.start, message.stop))
        exchange = node.spawn(exchanged(team, stage, state))
        needs = tuple((message.needed, tag) for tag, message in reversed(groups))
        loss = await node.compute(gradient(node, stage, state), state.batch, parts=stage.ready, needs=needs)
        team.begin(loss / team.size, REASONS.index(state.word) if node.rank == 0 else 0)
        await node.send(node.rank, stage.tag("loss"))
        await node.recv(stage.tag("counted"))
        tally = state.tally
        reason = stage.judge.over(tally) or REASONS[int(team.word)]
        if reason:
            await flushed(node, stage, exchange)
        node.round(stage.index, state.round, 1, 0, dropped=state.in_time is not None, loss=loss)
        state.round += 1
        state.word = foreseen(node, stage, tally) if node.rank == 0 and not reason else None
        if reason:
            return end_ridden(node, stage, state, reason, node.now_ns)
        state.plan_round(stage, node.rank)


def gradient(node: Node, stage: Stage, state: PeerState) -> Callable[..., float]:
    """The work of one step, which hands out the gradient's slices and takes the model's."""
    step, span = draw(state)

    def work(hand_out: Callable[[int, Any], None], take: Callable[[int], Any]) -> float:
        pieces = Pieces(stage.slices[::-1], take)
        return stage.trainer.gradient_in_parts(pieces, node.rank, step, span, stage.slices, hand_out)

    return work


async def flushed(node: Node, stage: Stage, exchange: Any) -> None:
    """Everything is in, and the model is no longer on its way to a forward pass."""
    if await node.join(exchange):
        for k in range(len(stage.messages)):
            await node.recv(stage.tag("group", k))


async def exchanged(team: Team, stage: Stage, state: PeerState) -> bool:
    """Sum the gradient of one step, and make of it the model, group by group, for the next forward pass; returns
    whether there is one. Once the first group is in, `team.loss` and `team.word` are sums, and `state.tally` counts the
    step."""
    node, version = team.node, state.tally.version
    sums = await (halves if stage.overlap.halves else slices)(team, stage)
    before, params, moments, made = state.tally, state.params, state.moments, list[Any]()
    rate = stage.trainer.rate(before.samples)
    for k in reversed(range(len(stage.messages))):
        message = stage.messages[k]
        total = piece(together([await node.join(task) for task in sums[k]]), 0, message.stop - message.start)
        if k == len(stage.messages) - 1:
            count = partial(stage.counted, before, team.loss)
            state.tally = node.alike(team.ranks, ("count", stage.index, version), count)
            tally = state.tally
            state.version, state.steps, state.samples = tally.version, tally.steps, tally.samples
            await node.send(node.rank, stage.tag("counted"))
        if not state.tally.diverged:
            where, exact = (message.start, message.stop), stage.link.flags.lossless
            step = partial(stage.trainer.apply_slice, params, moments, *where, total, rate, exact)
            made.append(node.alike(team.ranks, ("group", stage.index, version, k), step))
            await node.send(node.rank, stage.tag("group", k), made[-1][1])
    late = keep_in_time(node, stage, state, params, before)
    if made:
        whole = partial(stage.trainer.joined, made)
        state.moments, state.params = node.alike(team.ranks, ("model", stage.index, version), whole)
    if node.rank == 0 and not late and stage.judge.take(state, node.now):
        node.snapshot(state.params, counts=state.tally.report())
    return bool(made)


async def parts(team: Team, stage: Stage, post: Callable[[int, Any, bool], list[Coroutine]]) -> list[list[Any]]:
    """The tasks that sum each part of the gradient, begun as it is ready, alike in order on all ranks."""
    node, tasks, last = team.node, list[list[Any]](), len(stage.messages) - 1
    for k in range(last + 1):
        part = await node.recv(stage.tag("part", k))
        if k == last:
            await node.recv(stage.tag("loss"))
        tasks.append([node.spawn(coroutine) for coroutine in post(k, part.body * team.weight, k == last)])
    return tasks


async def slices(team: Team, stage: Stage) -> list[list[Any]]:
    """Slices of each part, those that forward needs first with the lowest key."""

    def post(k: int, x: Any, rides: bool) -> list[Coroutine]:
        key, credit = len(stage.messages) - k, stage.overlap.most_committed
        cut = [piece(x, start, stop) for start, stop in stage.overlap.cuts(stage.messages[k])]
        alone: list[Coroutine] = [summed(team, part, key, credit) for part in (cut[:-1] if rides else cut)]
        return [*alone, team.all_reduce(cut[-1], key=key, credit=credit)] if rides else alone

    return await parts(team, stage, post)


async def summed(team: Team, x: Any, key: int, credit: int) -> Any:
    return await team.node.all_reduce(x, team.ranks, key=key, credit=credit)


async def halves(team: Team, stage: Stage) -> list[list[Any]]:
    """Each part's sum is scattered as it is ready; once all have been, they are gathered, those that forward needs
    first before the others."""
    scatters = await parts(team, stage, lambda k, x, rides: [scattered(team, x)])
    chunks = [await team.node.join(task) for (task,) in scatters]
    rides, others = team.gather(chunks[-1]), chunks[-2::-1]
    gathers = [team.node.spawn(rides), *(team.node.spawn(gathered(team, chunk)) for chunk in others)]
    return [[task] for task in reversed(gathers)]


async def scattered(team: Team, x: Any) -> Any:
    return await team.node.all_reduce(x, team.ranks, "scatter")


async def gathered(team: Team, chunk: Any) -> Any:
    return await team.node.all_reduce(chunk, team.ranks, "gather")

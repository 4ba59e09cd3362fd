"""Who takes part: a parameter server goes on without a worker that is lost, and with one that comes (back).

Rule of a loss, once it is noticed: what others wait for, they wait for without that worker. A lead is counted from the
slowest of those who are left. A round waits for them alone, is merged at once where the loss makes it whole, and what
the lost worker had pushed for it is dropped and counted; so from there on it is the round of the others. Where pushes
are merged as they come, what had come is used, and the weights are those of the others, Σ w_i = 1. What compressors
keep for the worker is forgotten.

With `runtime.on_loss=reshard` the data of the lost are with the others meanwhile: dealt out one by one, each worker
goes on behind its cursor in the order of passes over its own samples and these, from its next round on after it has
heard. So a pass visits each of them once, at one worker; who comes back has its own again.

Rule of a join: the worker gets the stage, the model, and its orders. It counts as far as the slowest is; its optimizer
and its compressor begin anew, and its data go on where the server has last heard of them. Who comes at a border takes
part from the next stage on, and who comes when the run is over learns it. A life is known by the moment at which it
asked to take part, and what the server sends to it has that as its tag: nothing is mistaken for an answer to another.

From a checkpoint of workers that go at their own pace all come anew, to the server as it was: what it had merged is
counted, and what was on its way is lost and computed again. Each is as far as it was, with the optimizer's state and
the residual that it had when it next went on.

Source: membership as in Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014 (3.8);
rounds of those who are left as with the backup workers of Chen et al., arXiv 1604.00981.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ashl.errors import AshlError
from ashl.runtime.effects import JOIN, LOST, Message, PeerLostError, Tag
from ashl.runtime.node import Node
from ashl.stage.program import reassigned
from ashl.stage.stage import GO, NEXT, STOP, Stage
from ashl.stage.tally import FAILURE
from ashl.topology.local_work import WorkerState
from ashl.topology.members import as_members, away
from ashl.topology.merging import merge, orders_of, rule_of
from ashl.topology.replies import parsed

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerState

PLANNED: Tag = ("planned", 0, 0)  # what profiling has planned, for who was not there


def welcomed(life: int) -> Tag:
    """The tag of the answer to a newcomer."""
    return "welcome", 0, life


class Welcome(NamedTuple):
    """What a newcomer receives beside the model."""

    word: int  # GO; STOP where the run is over
    end_ns: int  # of the run, with STOP
    stage: int = 0
    version: int = 0
    steps: int = 0  # applied so far
    samples: int = 0
    rounds: int = 0  # its own, applied or dropped or kept for a merge
    done: int = 0  # ... of the steps
    planned: int = 0  # the stage from which on another message says what workers do; 0 = the plan does
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


WELCOME = len(Welcome._fields)


async def membership(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """At the server: a worker is lost or has come; returns whether the model changed."""
    if message.tag == LOST:
        return await lost(node, stage, state, message.src)
    introduced(state, message)
    if state.word != NEXT:
        await welcome(node, stage, state, message.src)
    return False


def introduced(state: ServerState, message: Message) -> None:
    """A newcomer asks to take part."""
    (life,) = message.meta
    state.newcomers += (message.src,)
    state.lives[message.src] = int(life)


def check_left(node: Node, stage: Stage, rank: int, left: int) -> None:
    """Raises AshlError where too few workers are left without this one; where a run goes on without none, that is but a
    consequence of its loss."""
    if left < stage.min_workers:
        raise AshlError(
            f"worker {rank} is lost at {node.now:.6g} s and {left} of {stage.num_workers} workers are left, fewer than "
            f"runtime.min_workers={stage.min_workers}: the run ends here"
        ) from (None if stage.elastic else PeerLostError(rank))


async def lost(node: Node, stage: Stage, state: ServerState, rank: int) -> bool:
    """Go on without a worker; returns whether the model changed, as the round was whole without it. Raises AshlError
    where too few are left."""
    tally, rule = state.tally, rule_of(stage)
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    if rank in tally.gone:
        return False
    tally.lose(rank)
    state.quorum = stage.quorum_of(tally.present)
    state.ends.forget(rank)
    check_left(node, stage, rank, tally.present + len(state.newcomers))
    tally.now_s = node.now
    rule.messages().changed(stage, state, rank)
    if not rule.in_rounds:
        return False
    for push in state.buffer:
        if push.worker == rank:
            tally.drop(rank, push.steps, FAILURE)
    state.buffer = [push for push in state.buffer if push.worker != rank]
    if not state.buffer or len(state.buffer) < state.quorum:
        return False
    await node.compute(partial(merge, stage, state, None), work=1, kind="apply")
    return True


async def welcome(node: Node, stage: Stage, state: ServerState, rank: int) -> None:
    """Let a newcomer take part, from this model on."""
    tally = state.tally
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    tally.come(rank)
    state.quorum, state.pulls[rank] = stage.quorum_of(tally.present), stage.tag("pull", state.lives[rank])
    tally.now_s = node.now
    messages = rule_of(stage).messages()
    messages.changed(stage, state, rank)
    stage.link.gave(state.ends, rank, state.params)
    planned, rows = state.assigned or (0, None)
    applied, what = (tally.version, tally.steps, tally.samples), orders_of(stage, state, rank)
    held, (rounds, done) = [push.steps for push in state.buffer if push.worker == rank], tally.done_by(rank)
    pushed = rounds + len(held), done + sum(held)
    greeting = Welcome(GO, 0, stage.index, *applied, *pushed, planned, *what)
    body = messages.greeting(stage, state)
    await node.send(rank, welcomed(state.lives[rank]), body, (*greeting, *away(stage, tally.gone)))
    if rows is not None:
        await node.send(rank, PLANNED, rows)


async def close_doors(node: Node, state: ServerState, end_ns: int) -> None:
    """At the server, once nobody else is to be answered: whoever has come, or comes, learns that the run is over."""
    while True:
        for rank in state.newcomers:
            await node.send(rank, welcomed(state.lives[rank]), None, Welcome(STOP, end_ns))
        state.newcomers = ()
        message = await node.recv(JOIN, LOST)
        if message.tag == JOIN:
            introduced(state, message)


async def gather(node: Node, stages: Sequence[Stage], index: int, state: ServerState) -> tuple[int, ServerState]:
    """At the server, from a checkpoint: nothing is on its way, and all workers come anew."""
    stage, tally, heard = stages[index], state.tally, set[int]()
    state.newcomers, state.called, state.ahead, state.buffer = (), (), None, []
    for rank in stage.workers:
        state.ends.forget(rank)
        if rank in tally.waiting:
            tally.answer(rank)
    while len(heard) < stage.num_workers:
        message = await node.recv(JOIN, LOST)
        heard.add(message.src)
        if message.tag == LOST:
            await lost(node, stage, state, message.src)
        else:
            introduced(state, message)
    return index, state


async def come(node: Node, stages: Sequence[Stage], kept: WorkerState | None = None) -> tuple[int, WorkerState] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there; None where the run
    is over. `kept`: what it was in a checkpoint."""
    life = int(float(node.now_ns))
    await node.send(stages[0].server, JOIN, None, (life,))
    message = await node.recv(welcomed(life))
    greeting = parsed(Welcome, message.meta)
    if greeting.word == STOP:
        node.ledger.close(greeting.end_ns)
        return None
    params, moments = stages[0].trainer.init()
    state = WorkerState(params, moments if kept is None else kept.moments)
    state.steps, state.samples = greeting.steps, greeting.samples
    if greeting.planned:
        state.assigned = greeting.planned, (await node.recv(PLANNED)).body
        stages = reassigned(stages, *state.assigned)
    stage, state.life, state.away = stages[greeting.stage], life, as_members(message.meta[WELCOME:])
    state.enter(stage, node.rank)
    if kept is not None:
        state.ends, state.moments = stage.taken_up(kept.ends, state.samples), kept.moments
    if message.body is not None:
        rule_of(stage).messages().greeted(state, message.body, kept)
    state.follow(greeting)
    state.round, state.step = greeting.rounds, greeting.done
    state.drawn = state.step * state.batch
    return stage.index, state

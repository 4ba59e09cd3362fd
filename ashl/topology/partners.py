"""Partners that are lost and that come back, where workers meet in pairs and a coordinator counts.

Rule of a loss, once it is noticed: whoever waits for an answer of the lost worker goes on as if it had not asked, and
draws its partners among those who are left; with nobody left to meet it works alone. Where losses cut the graph into
parts, each goes on by itself until somebody is back. The coordinator waits for the lost no longer; what it had reported
counts, as it was part of a model, and the mean of the models is of those who are left.

Rule of a return: the worker asks the coordinator to take part, which names the lowest neighbour that is there. It gets
that one's model (the first model of the run, where no neighbour is there), begins with empty moments, and its data go
on where the coordinator has last heard of them; its other neighbours meet it from when it writes to them. Who comes at
a border takes part from the next stage on, and who comes when the run is over learns it. A life is known by the moment
at which it asked to take part, and what answers it has that as its tag.

From a checkpoint on processes all come anew, each with its own model as it was at the top of its loop. The coordinator
counts of each what is in its model; what was on its way is lost.

Source: membership as in Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014 (3.8);
partners that need not be there as in Boyd et al., "Randomized Gossip Algorithms", IEEE Trans. IT 2006.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from ashl.runtime.effects import JOIN, LOST, Message
from ashl.runtime.node import Node
from ashl.stage.stage import GO, STOP, Stage
from ashl.topology.membership import check_left, welcomed

if TYPE_CHECKING:
    from ashl.topology.coordinator import CoordinatorState, RoamingState
    from ashl.topology.gossip import RoamingRule

NOBODY = -1


class Asked(NamedTuple):
    """What a newcomer asks for: of the coordinator whose model it may have, of its neighbours to be met."""

    life: float
    after: float = NOBODY  # to the coordinator: the neighbours up to this one are lost
    model: float = 0.0  # to a neighbour: whether its model is wanted


class Admission(NamedTuple):
    """What the coordinator tells a newcomer."""

    word: float  # GO; STOP where the run is over
    end_ns: float  # of the run, with STOP
    stage: float = 0.0
    partner: float = NOBODY  # whose model it may have
    steps: float = 0.0  # applied so far
    samples: float = 0.0
    rounds: float = 0.0  # its own, applied or dropped
    done: float = 0.0  # ... of the steps


class Is(NamedTuple):
    """What a worker says that comes from a checkpoint."""

    life: float
    rounds: float  # that its model has
    steps: float  # that it has taken


# --- at the coordinator


async def membership(
    node: Node, stage: Stage, state: CoordinatorState, message: Message, closing: bool = False
) -> None:
    """A worker is lost, or asks to take part; where the stage is `closing`, a new one waits for what follows. Raises
    AshlError where too few are left."""
    if message.tag == LOST:
        return lost(node, stage, state, message.src)
    state.newcomers[message.src] = message.meta
    if not closing or message.src not in state.tally.gone:  # the partner that it was given is lost
        await welcome(node, stage, state, message.src)


def lost(node: Node, stage: Stage, state: CoordinatorState, rank: int) -> None:
    """Go on without a worker."""
    state.newcomers.pop(rank, None)
    if rank not in state.tally.gone:
        state.tally.lose(rank)
        check_left(node, stage, rank, state.tally.present + len(state.newcomers))


async def welcome(node: Node, stage: Stage, state: CoordinatorState, rank: int) -> None:
    """Let a newcomer take part."""
    tally, asked = state.tally, Asked(*state.newcomers.pop(rank))
    away = {stage.server, *tally.gone}
    near = [peer for peer in stage.topology.links(stage, rank) if peer not in away and peer > asked.after]
    if rank in tally.gone:
        tally.come(rank)
    applied = tally.steps, tally.samples
    admission = Admission(GO, 0, stage.index, min(near, default=NOBODY), *applied, *tally.done_by(rank))
    await node.send(rank, welcomed(int(asked.life)), None, admission)


async def gather(
    node: Node, stages: Sequence[Stage], index: int, state: CoordinatorState
) -> tuple[int, CoordinatorState]:
    """From a checkpoint: all workers come anew, and their models are what counts. All are level from here on."""
    stage, tally, came = stages[index], state.tally, dict[int, Is]()
    state.newcomers, before = {}, sum(tally.commits)
    while len(came) < stage.num_workers:
        message = await node.recv(JOIN)
        came[message.src] = Is(*message.meta)
    for rank, is_at in sorted(came.items()):
        rounds, steps = tally.done_by(rank)
        more = int(is_at.steps) - steps
        tally.take_back(rank, rounds - int(is_at.rounds), -more, -more * stage.worker(rank).batch)
        tally.lose(rank)
    tally.version += sum(tally.commits) - before
    for rank, is_at in sorted(came.items()):
        tally.come(rank)
        admission = Admission(GO, 0, stage.index, NOBODY, tally.steps, tally.samples)
        await node.send(rank, welcomed(int(is_at.life)), None, admission)
    return index, state


async def close_doors(node: Node, state: CoordinatorState, end_ns: int) -> None:
    """Once all others are let go: whoever has come, or comes, learns that the run is over."""
    while True:
        for rank, (life, *_) in state.newcomers.items():
            await node.send(rank, welcomed(int(life)), None, Admission(STOP, end_ns))
        state.newcomers.clear()
        message = await node.recv(JOIN, LOST)
        if message.tag == JOIN:
            state.newcomers[message.src] = message.meta


# --- at a worker


async def note_presence(node: Node, stage: Stage, state: RoamingState, message: Message) -> None:
    """A neighbour is lost, has come, or says that it is there."""
    peer = message.src
    if message.tag != LOST:
        state.absent.discard(peer)
        if message.tag == JOIN:
            asked = Asked(*message.meta)
            await node.send(peer, welcomed(int(asked.life)), state.params if asked.model else None)
        return
    state.absent.add(peer)
    if state.asked == peer:
        state.asked = None
        await node.send(node.rank, stage.tag("answer"))  # for who waits for one


async def come(node: Node, stages: Sequence[Stage], state: RoamingState) -> int | None:
    """At a worker that comes while the others run: takes part in its first state; returns the stage that they are in,
    None where the run is over."""
    life, coordinator = int(float(node.now_ns)), stages[0].server
    state.absent = {peer for stage in stages for peer in stage.topology.links(stage, node.rank)} - {coordinator}
    after = NOBODY
    while True:
        await node.send(coordinator, JOIN, None, Asked(life, after))
        admission = Admission(*(await node.recv(welcomed(life), src=coordinator)).meta)
        if admission.word == STOP:
            node.ledger.close(int(admission.end_ns))
            return None
        after = int(admission.partner)
        if after == NOBODY:
            break
        await node.send(after, JOIN, None, Asked(life, model=1.0))
        message = await node.recv(welcomed(life), LOST, src=after)
        if message.tag != LOST:
            state.params = message.body
            break
    others, state.absent = sorted(state.absent - {after}), state.absent - {after}
    for peer in others:
        await node.send(peer, JOIN, None, Asked(life))
    stage, state.life, state.samples = stages[int(admission.stage)], life, int(admission.samples)
    state.enter(stage, node.rank)
    state.round, state.step = int(admission.rounds), int(admission.done)
    state.drawn = state.step * state.batch
    return stage.index


async def taken_up(node: Node, stages: Sequence[Stage], index: int, state: RoamingState) -> tuple[int, RoamingState]:
    """At a worker, from a checkpoint: as it was kept."""
    life, coordinator = int(float(node.now_ns)), stages[0].server
    await node.send(coordinator, JOIN, None, Is(life, state.round, state.step))
    admission = Admission(*(await node.recv(welcomed(life), src=coordinator)).meta)
    state.life, state.samples, state.reported, state.absent = life, int(admission.samples), False, set()
    cast("RoamingRule", stages[index].sync).taken_up(state)
    return index, state

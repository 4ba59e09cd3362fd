"""Groups that lose a member, and workers that come, where models are averaged in groups.

Rule of a loss, once it is noticed: groups that have not begun meet without the lost worker, and new ones have it no
longer. Of a group that is averaging, those who are left average anew, as soon as all of them have said whether the sum
came to nothing; what the lost worker had computed is dropped with it, or counts where the sum had ended before. On
processes it may have ended at some of them alone, and the rest average without these.

Rule of a join: the coordinator names a worker of the next group that begins, which sends its model once it has
averaged; where nobody has one any more, the newcomer begins with the first model. It counts as having asked as often as
before, and at least as often as whoever has asked least; its optimizer begins anew, and its data go on behind what was
counted of it. Groups that it is in learn how often each of their members had been lost: so nobody takes one for its
earlier life. Who comes at a border takes part from the next stage on, and who comes when the run is over learns it. A
life is known by the moment at which it asked to take part, and what answers it has that as its tag.

From a checkpoint on processes all come anew, each as it was at the top of its loop, with its own model and data. The
coordinator counts of each what is in its model, and nobody has asked; what others had of an average that a worker was
kept before, they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ashl.runtime.effects import JOIN, LOST, Message, Tag
from ashl.runtime.node import Node
from ashl.stage.rule import Members
from ashl.stage.stage import GO, STOP, Stage
from ashl.stage.tally import FAILURE
from ashl.topology import group_generator as generator
from ashl.topology.group_generator import Group
from ashl.topology.members import as_members, as_numbers
from ashl.topology.parameter_server import check_left, welcomed

if TYPE_CHECKING:
    from ashl.topology.group_rule import GroupRule
    from ashl.topology.partial_all_reduce import GroupReply, MakerState, Replica

NOBODY = -1
OWN = -2  # minus a worker: in place of its last group, where its model is nobody else's


class Admission(NamedTuple):
    """What the coordinator tells a newcomer."""

    word: float  # GO; STOP where the run is over
    end_ns: float  # of the run, with STOP
    stage: float = 0.0
    giver: float = NOBODY  # who sends its model
    samples: float = 0.0
    rounds: float = 0.0  # its own, applied or dropped
    done: float = 0.0  # ... of the steps
    tick: float = 0.0  # of the last evaluation


class Team(NamedTuple):
    """Those who average, and what sets them apart from who else were or will be these ranks."""

    members: Members
    epoch: int
    lives: tuple[int, ...]


def model_for(life: int) -> Tag:
    return "model", 0, life


def lives_of(state: MakerState, members: Members) -> Tensor | None:
    """How often each of these had been lost, as a body, where one has come back."""
    if not state.again or state.again.keys().isdisjoint(members):
        return None
    return torch.tensor([state.again.get(member, 0) for member in members])


def lives_in(message: Message) -> tuple[int, ...]:
    return () if message.body is None else tuple(message.body.tolist())


# --- at the coordinator


async def changed(node: Node, stage: Stage, state: MakerState, message: Message) -> list[Group]:
    """A worker is lost, or asks to take part; returns the groups that begin now. Raises AshlError where too few are
    left."""
    rank, started = message.src, list[Group]()
    if message.tag == LOST:
        state.losses += 1
        state.again[rank] = int(message.meta[0]) + 1
        started = lost(node, stage, state, rank)
    else:
        state.heirs[rank], state.lives[rank] = NOBODY, int(message.meta[0])
        if rank not in state.tally.gone and state.word != GO:  # nobody will give it a model in this stage any more
            started = without(node, stage, state, rank)
    if state.word == GO and not {*stage.workers} - state.tally.gone - state.heirs.keys():  # nobody has one
        for heir in [heir for heir, giver in state.heirs.items() if giver == NOBODY]:
            await admit(node, stage, state, heir, NOBODY)
            del state.heirs[heir]
    return started


def unserved(state: MakerState) -> list[Message]:
    """Newcomers of a stage that is over, who will have no model in it: as if they came now."""
    waiting = [rank for rank, giver in state.heirs.items() if giver == NOBODY and rank not in state.tally.gone]
    return [Message(rank, JOIN, None, (state.lives[rank],), 0) for rank in waiting]


def lost(node: Node, stage: Stage, state: MakerState, rank: int) -> list[Group]:
    tally = state.tally
    state.heirs.pop(rank, None)  # whom it was to give its model hears of it, too, and asks again
    if rank in tally.gone:
        return []
    started = without(node, stage, state, rank)
    check_left(node, stage, rank, tally.present + len(tally.gone.intersection(state.heirs)))
    return started


def without(node: Node, stage: Stage, state: MakerState, rank: int) -> list[Group]:
    """Go on without a worker."""
    state.tally.lose(rank)
    steps, _ = state.asked.pop(rank, (0, 0))
    state.tally.drop(rank, steps, FAILURE)
    started = generator.lose(state.groups, cast("GroupRule", stage.sync), rank, node.now_ns)
    for number, members in state.yet.items():
        if rank in members | state.broken[number]:
            members.discard(rank)
            state.broken[number].discard(rank)
            if not members:
                node.spawn(remind(node, stage, number))
    return started


async def remind(node: Node, stage: Stage, number: int) -> None:
    """All who are left of a group have reported: that is taken in as if the last one did so now."""
    await node.send(node.rank, stage.tag("again"), meta=(number,))


def reported(state: MakerState, message: Message) -> bool:
    """Where workers may be lost: a member of a group has averaged, or its average came to nothing. Whether others of
    the group have still to say so."""
    number = int(message.meta[0])
    if number not in state.yet:
        return number not in state.running
    if message.tag[0] == "again" and message.src in state.yet[number]:
        state.broken[number].add(message.src)
    state.yet[number].discard(message.src)
    return bool(state.yet[number])


async def settled(node: Node, stage: Stage, state: MakerState, number: int) -> list[Group]:
    """All who are left of a group have said what came of it; returns the groups that begin now."""
    group, work = state.running[number]
    left = tuple(sorted(state.broken.get(number, ())))
    if not left:
        state.yet.pop(number, None)
        state.broken.pop(number, None)
        del state.running[number]
        if work:  # nobody is left of it
            for member, (steps, _) in zip(group.members, work, strict=True):
                state.tally.drop(member, steps, FAILURE)
        return generator.done(state.groups, cast("GroupRule", stage.sync), group, node.now_ns)
    if work:
        each = dict(zip(group.members, work, strict=True))
        for member in each.keys() - {*left}:
            state.tally.drop(member, each[member][0], FAILURE)
        work = [each[member] for member in left]
    state.running[number] = Group(number, left), work
    state.yet[number], state.broken[number] = set(left), set()
    for member in left:
        meta = (state.losses, *as_numbers(left))
        await node.send(member, stage.tag("anew", number), lives_of(state, left), meta)
    ended = Group(number, tuple(member for member in group.members if member not in left))
    return generator.done(state.groups, cast("GroupRule", stage.sync), ended, node.now_ns)


async def inherited(node: Node, stage: Stage, state: MakerState, giver: int, reply: GroupReply) -> GroupReply:
    """The reply to a worker, with the newcomer that is to have its model, where one waits for it."""
    heir = next((rank for rank, named in state.heirs.items() if named == NOBODY and rank != giver), None)
    if heir is None or giver in state.heirs:
        return reply
    state.heirs[heir] = giver
    await admit(node, stage, state, heir, giver)
    return reply._replace(heir=heir, life=state.lives[heir])


async def admit(node: Node, stage: Stage, state: MakerState, heir: int, giver: int) -> None:
    """A newcomer takes part from now on, with the model of this worker; with nobody's, the first one."""
    tally = state.tally
    if heir in tally.gone:
        tally.come(heir)
        generator.come(state.groups, heir)
        state.last[heir] = OWN - heir
    admission = Admission(GO, 0, stage.index, giver, tally.samples, *tally.done_by(heir), state.ticks)
    await node.send(heir, welcomed(state.lives[heir]), None, admission)


async def gather(node: Node, stages: Sequence[Stage], index: int, state: MakerState) -> tuple[int, MakerState]:
    """From a checkpoint: nothing is on its way, and all workers come anew, as they were."""
    stage, tally, came = stages[index], state.tally, dict[int, Message]()
    generator.reopen(state.groups)
    state.asked, state.running, state.yet, state.broken, state.heirs = {}, {}, {}, {}, {}
    state.last = [OWN - rank for rank in stage.workers]
    while len(came) < stage.num_workers:
        message = await node.recv(JOIN)
        came[message.src] = message
    for rank, message in sorted(came.items()):
        life, rounds, steps = map(int, message.meta)
        counted, before = tally.done_by(rank)
        more = steps - before
        tally.take_back(rank, counted - rounds, -more, -more * stage.worker(rank).batch)
        tally.lose(rank)
        tally.come(rank)
        state.lives[rank] = life
    for rank in stage.workers:
        admission = Admission(GO, 0, stage.index, NOBODY, tally.samples, tick=state.ticks)
        await node.send(rank, welcomed(state.lives[rank]), None, admission)
    return index, state


async def close_doors(node: Node, state: MakerState) -> None:
    """Once all others are let go: whoever has come, or comes, learns that the run is over."""
    while True:
        for rank in state.heirs:
            await node.send(rank, welcomed(state.lives[rank]), None, Admission(STOP, state.tally.end_ns))
        state.heirs.clear()
        message = await node.recv(JOIN, LOST)
        if message.tag == JOIN:
            state.heirs[message.src], state.lives[message.src] = NOBODY, int(message.meta[0])


# --- at a worker


async def anew(node: Node, stage: Stage, number: float) -> Team:
    """An average has come to nothing: who is left of this group."""
    await node.send(stage.home, stage.tag("again"), meta=(number,))
    message = await node.recv(stage.tag("anew", int(number)), src=stage.home)
    epoch, *left = message.meta
    return Team(as_members(left), int(epoch), lives_in(message))


async def come(node: Node, stages: Sequence[Stage], state: Replica, kept: bool = False) -> tuple[int, Any] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there; None where the run
    is over. `kept`: all come, and this is its state from a checkpoint."""
    done = (state.round, state.step) if kept else ()
    while True:
        while await node.recv(LOST, before_s=node.now):
            pass  # what was before is of no concern
        state.life = int(float(node.now_ns)) + (state.life == node.now_ns)
        await node.send(stages[0].home, JOIN, None, (state.life, *done))
        admission = Admission(*(await node.recv(welcomed(state.life), src=stages[0].home)).meta)
        if admission.word == STOP:
            node.ledger.close(int(admission.end_ns))
            return None
        if admission.giver == NOBODY:
            break
        message = await node.recv(model_for(state.life), LOST, src=int(admission.giver))
        if message.tag != LOST:
            state.params = message.body
            break
    stage = stages[int(admission.stage)]
    state.samples, state.tick = int(admission.samples), int(admission.tick)
    if kept:
        return stage.index, state
    state.enter(stage, node.rank)
    state.round, state.step = int(admission.rounds), int(admission.done)
    state.drawn = state.step * state.batch
    return stage.index, state

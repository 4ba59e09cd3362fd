"""How a worker comes (back) while others gossip in rounds.

Rule: it asks all others. Whoever reads that has all members of the last view agree on one in which it is, too
(`ashl.topology.views`): from a round on that nobody has begun. Before that round the lowest neighbour that is there
gives it its model, and all that all have alike: the counts, the views, what is known of the end. Its optimizer begins
anew, as does what its sync mode keeps; its data go on behind what was counted of it. Until it has the model it is a
member that knows nothing: it answers those who agree on another view, and says that it waits, so that then somebody
who is there gives it a model for that view. So nobody waits for one that is lost, nor for one that waits itself.

Who has no path to the others waits until somebody has come who is between them. A stage ends for all members at once,
so one that waits for its model begins in the stage in which it was let in. Where the run is over, or is by the time
that it could begin, all who are through answer that.

Limit: from its first round on a run is one of these workers with these models.
Source: joining a view with a transfer of state as in Birman and Joseph, "Exploiting Virtual Synchrony in Distributed
Systems", SOSP 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ashl.runtime.effects import JOIN, LOST, Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.packed import opened, parcelled
from ashl.stage.stage import GO, STOP, Stage
from ashl.stage.tally import Start, Tally
from ashl.topology.ending import InTime
from ashl.topology.knowledge import NOTHING_HEARD, Came, Knowledge, read, written
from ashl.topology.rounds import Lives, asking, last_view, note
from ashl.topology.views import changed, nobody_left, take_in

if TYPE_CHECKING:
    from ashl.topology.gossip import RoundRule, RoundState


class Admission(NamedTuple):
    """What a newcomer receives with the model."""

    word: float  # GO; STOP where the run is over
    end_ns: float  # of the run, with STOP
    views: float = 0.0  # how many there are with the one that lets it in
    parts: float = 0.0  # messages that follow


class Known(NamedTuple):
    """What all have alike, before its first round."""

    stage: int
    k: int  # the round before
    turned: int
    tally: Tally
    in_time: Tally | None
    evaluated: Start


def welcome_tag(life: int) -> Tag:
    """The tag of the answer to a newcomer."""
    return "welcome", 0, life


def part_of(life: int, views: int, part: int) -> Tag:
    """The tag of what follows it, which may have been for an earlier view that came to nothing."""
    return f"welcome{views}", part, life


# --- at those who are there


async def welcome(node: Node, stage: Stage, state: RoundState, before: int, k: int) -> None:
    """Before round k: give the model to those who begin with it and have it from here, by the views that hold from now
    on; `before` is how many did."""
    for place in range(before, min(state.turned, state.sure)):
        for rank, giver in sorted(state.views[place].came.items()):
            if giver == node.rank and not any(rank in later.rounds for later in state.views[place + 1 :]):
                await give(node, stage, state, rank, place, k)


async def give(node: Node, stage: Stage, state: RoundState, rank: int, place: int, k: int) -> None:
    assert isinstance(state.tally, Tally)
    in_time, life = state.in_time, state.views[place].known[rank] // 2
    known = Known(stage.index, k - 1, state.turned, state.tally, in_time and in_time.tally, state.evaluated)
    rest = [*parcelled(known), written(Knowledge(state.views, state.known, 0, k, {}, state.header))]
    rest += [] if in_time is None else [in_time.params]
    await node.send(rank, welcome_tag(life), state.params, Admission(GO, 0, place + 1, len(rest)))
    for part, body in enumerate(rest, 1):
        await node.send(rank, part_of(life, place + 1, part), body)


async def close_doors(node: Node, stage: Stage, state: RoundState, end_ns: int) -> None:
    """Once the run is over: whoever has asked to take part, or does, learns it."""
    for rank in asking(last_view(state), state.known, stage.num_workers):
        await node.send(rank, welcome_tag(state.known.get(rank, 0) // 2), None, Admission(STOP, end_ns))
    while True:
        message = await node.recv(JOIN, LOST)
        if message.tag == JOIN:
            await node.send(message.src, welcome_tag(int(message.meta[0])), None, Admission(STOP, end_ns))


# --- at a worker that comes


async def come(node: Node, stages: Sequence[Stage], state: RoundState) -> int | None:
    """At a worker that comes while the others run: takes part in its first state; returns the stage that they are in,
    None where the run is over. Raises AshlError where nobody is left who could let it in."""
    others = stages[0].topology.links(stages[0], node.rank)
    note(state.known, {node.rank: 2 * node.life})
    state.waits, state.k = True, -1
    for peer in others:
        await node.send(peer, JOIN, None, (node.life, True))
    by_tag = {stage.tag("agree"): stage for stage in stages}
    without = dict[int, Lives]()  # who has said that it has no model either, and whom it knew to be lost then
    made_in: Stage | None = None  # where the last view is from: of one that waits, no member leaves that stage
    while True:
        message = await node.recv(welcome_tag(node.life), LOST, JOIN, *by_tag)
        if message.tag == welcome_tag(node.life):
            admission = Admission(*message.meta)
            if admission.word == STOP:
                node.ledger.close(int(admission.end_ns))
                return None
            if admission.views >= len(state.views):
                rest = await heard(node, message.src, admission)
                if rest[-1].tag != LOST:
                    return begin(node, stages, state, [message, *rest])
                message = rest[-1]  # a loss like any other
        elif message.tag in by_tag and message.body is not None:  # else it says that a stage before was over
            if message.src in (known := read(message.body)).waiting:
                without[message.src] = known.known
            made_in = await attend(node, by_tag[message.tag], state, message, made_in)
        if message.tag in (LOST, JOIN):
            take_in(state, message, {})
            peers = others if message.tag == LOST else ()  # whoever waits for this one would not hear of it
            if message.tag == JOIN and message.meta[1]:  # it has come later, and has not heard of this one
                await node.send(message.src, JOIN, None, (node.life, False))
                peers = (message.src,)
            here = Knowledge((), state.known, 0, state.k, {}, NOTHING_HEARD, frozenset({node.rank}))
            for peer in peers:
                for agree in by_tag:
                    await node.send(peer, agree, written(here))
        if all(state.known.get(rank, 0) % 2 or without.get(rank) == state.known for rank in others):
            raise nobody_left(stages[0])


async def attend(node: Node, stage: Stage, state: RoundState, message: Message, made_in: Stage | None) -> Stage | None:
    """Take part in an agreement, without a model, where those who make it have this life of the worker among them;
    returns where the last view is from."""
    came, views = Came(), state.views
    take_in(state, message, came)
    made_in = made_in if state.views is views else stage
    view = last_view(state)
    if stage is made_in and node.rank not in view.gone and view.known.get(node.rank) == 2 * node.life:
        await changed(node, stage, state, None, came)
    return made_in


async def heard(node: Node, giver: int, admission: Admission) -> list[Message]:
    """What follows the model; where who tells it is lost meanwhile, its loss is the last."""
    messages = list[Message]()
    for part in range(1, int(admission.parts) + 1):
        message = await node.recv(part_of(node.life, int(admission.views), part), LOST, src=giver)
        messages.append(message)
        if message.tag == LOST:
            break
    return messages


def begin(node: Node, stages: Sequence[Stage], state: RoundState, messages: Sequence[Message]) -> int:
    """Take over what the others have alike; returns the stage."""
    model, parcel, what, *late = (message.body for message in messages)
    known: Known = opened([parcel], ("ashl",), stages[0].trainer.device)
    there, tally, whole = read(what), known.tally, stages[known.stage]
    state.params, state.samples, state.steps = model, tally.samples, tally.steps
    state.enter(whole, node.rank, node.now)
    state.tally, state.version, state.evaluated = tally, tally.version, known.evaluated
    state.views, state.turned, state.header, state.k = there.views, known.turned, there.header, known.k
    state.sure = len(there.views)
    note(state.known, there.known)
    if known.in_time is not None:
        known.in_time.gone = tally.gone  # who is lost later has no model of then, either
        state.in_time = InTime(late[0], known.in_time)
    stage = whole.among(state.views[state.turned - 1].gone)
    state.round, state.step = tally.done_by(node.rank)
    state.drawn = state.step * state.batch
    state.rule_state = cast("RoundRule", stage.sync).changed(stage, state, node.rank)
    state.plan_round(stage, node.rank)
    state.waits, state.came = False, True
    if node.rank == stage.home:
        counts: Any = state
        node.counter = counts
        if stage.limits.eval_every_s is not None:
            state.evaluated = tally.here(node.now)
    return known.stage

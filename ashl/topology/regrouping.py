"""Who takes part in an all-reduce: it goes on without workers that are lost, and with those that come (back).

Rule of a loss: the sum that lacks a member comes to nothing, and the others form a new team. They repeat that round
from the state that all of them have, with the work that each has done for it, summed by those who are left with
Σ w_i = 1. Who is a merge ahead goes back by one. What the lost worker was at counts as dropped: a round of its steps.
A compressor's own messages come to nothing for who waits for one of the lost, and then for who waits for one of those;
who has them all waits until all others have, too. What compressors keep of it is forgotten. The lowest rank that is
left does what rank 0 does. With `runtime.on_loss=reshard` its data are with the others from the round after that on,
as `ashl.topology.membership` says.

Rule of a join: whoever comes asks, the first rank says with the next sum that somebody is at the door, and after that
merge all form the team anew. The newcomer gets model, counts, outer moments, and where all step alike on the sum the
optimizer's; its own moments and its compressor begin anew, and its data go on behind what was counted of it. Where
compressors keep copies of each other, or something that all have alike, all of them begin anew with it.

All members have one merge alike, so that from there on a run is, bit for bit, one of those who are left.

Source: a new communicator of those who are left as in Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013; an all-reduce that goes on as in Horovod Elastic.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ashl.compression.contract import Collective
from ashl.errors import AshlError
from ashl.runtime.effects import LOST, Formed, Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.packed import opened, parcelled
from ashl.stage.link import Ends
from ashl.stage.stage import GO, NEXT, STOP, Stage
from ashl.stage.tally import FAILURE, Tally
from ashl.topology.ending import JOIN, foreseen, of_ending, within
from ashl.topology.local_work import Work

if TYPE_CHECKING:
    from ashl.topology.all_reduce import PeerState, StepRule

MOST = 64  # messages to a newcomer
NONE = -1  # the version of who has no model yet
ENDS = (None, "next", "seconds")  # what a rank calls the reason that has not seen it, by the word


class Known(NamedTuple):
    """What a newcomer receives beside the model."""

    stage: int
    tally: Tally
    rest: tuple[int, int] | None
    moments: Any  # of the optimizer, where all step alike
    outer_state: Any
    rule_state: Any


def keep(state: PeerState, work: Work) -> None:
    """The work of a round is done and not exchanged yet: from here it could be repeated."""
    before = copy.copy(state)
    before.ends, before.kept, before.redo = state.ends.copy(), (), work
    state.kept = (*state.kept[-1:], before)


async def repaired(node: Node, stage: Stage, state: PeerState) -> tuple[Stage, str | None]:
    """A sum has come to nothing: go on without who is lost, with that round once more (`state.redo`). Returns the stage
    as it is among those who are left, and why it ends instead, with what was to be summed dropped, where somebody sees
    that it is time. Raises AshlError where too few are left."""
    reason = foreseen(node, stage, state.tally)
    formed = await node.regroup(state.tally.version, word_of(stage, reason))
    go_back(node, state, formed.version)
    stage = await among(node, stage, state, formed)
    if not formed.word:
        return stage, None
    if state.redo is not None:
        node.round(stage.index, state.round, state.redo.steps, 0, dropped=True, loss=state.redo.loss)
        state.round += 1
    state.redo, state.tally, steps = None, state.tally.copy(), stage.cut(state.rest).round_steps
    for rank in stage.workers:
        state.tally.drop(rank, steps[rank], of_ending(formed.word))
    return stage, reason if word_of(stage, reason) == formed.word else ENDS[formed.word]


async def regrouped(node: Node, stage: Stage, state: PeerState, reason: str) -> Stage:
    """With this merge the stage ends for a reason, or a worker is let in. Returns the stage as it is among those who
    are there. Where some have not come so far, all go back to their round: then there is a `state.redo`. Raises
    AshlError where too few are left."""
    formed = await node.regroup(state.tally.version, word_of(stage, reason), open=reason == JOIN)
    if formed.version < state.tally.version:
        go_back(node, state, formed.version)
    return await among(node, stage, state, formed)


def word_of(stage: Stage, reason: str | None) -> int:
    if reason in (None, JOIN):
        return GO
    return NEXT if reason == "next" and stage.following else STOP


async def among(node: Node, stage: Stage, state: PeerState, formed: Formed) -> Stage:
    """Go on as this team."""
    state.epoch, state.lives, state.formed_ns = formed.epoch, formed.lives, formed.time_ns
    if formed.ranks == stage.workers and not (formed.lost or formed.came):
        return stage
    if len(formed.ranks) < stage.min_workers:
        raise AshlError(
            f"worker {', '.join(map(str, formed.lost))} is lost by {node.now:.6g} s and {len(formed.ranks)} of "
            f"{stage.num_workers} workers are left, fewer than runtime.min_workers={stage.min_workers}: the run ends "
            "here"
        )
    state.tally = changed(stage, state, formed)
    for rank in formed.lost:
        state.ends.forget(rank)
    if formed.came and not alone(stage, state.ends):
        state.ends = Ends(gradients=state.ends.gradients)
    first = min(set(formed.ranks) - set(formed.came))
    before, stage = stage, stage.among(state.tally.gone)
    if state.redo is None:
        state.plan_round(stage, node.rank)
    if node.rank == first:
        for rank in formed.came:
            await welcome(node, stage, state, rank)
    if stage.home != before.home:
        stand_in(node, stage, state)
    return stage


def go_back(node: Node, state: PeerState, version: int) -> None:
    """To the round of this version, with its work done."""
    before = next(kept for kept in state.kept if kept.tally.version == version)
    if before is not state.kept[-1] and before.redo is not None:
        node.steps -= before.redo.steps  # that round is recorded once more
    taken, lives = state.evaluated, state.lives
    state.__dict__.update(before.__dict__)
    state.ends, state.evaluated, state.lives = before.ends.copy(), taken, lives


def changed(stage: Stage, state: PeerState, formed: Formed) -> Tally:
    """The counts without those who are lost, and with those who came. What the lost had handed in for a round that is
    done once more is dropped; where none is, they had nothing under way."""
    planned = cast("StepRule", stage.sync).in_round(stage, state.rule_state, state.tally)
    tally, steps = state.tally.copy(), planned.cut(state.rest).round_steps
    tally.gone = set(tally.gone)
    for rank in formed.lost:
        tally.lose(rank)
        if formed.word == GO and state.redo is not None:
            tally.drop(rank, steps[rank], FAILURE)
    for rank in {*stage.workers}.difference(formed.ranks, formed.lost):
        tally.lose(rank)  # who waits for the model still
    for rank in tally.gone.intersection(formed.came):
        tally.come(rank)
    return tally


def alone(stage: Stage, ends: Ends) -> bool:
    """Whether what compressors keep is each worker's own business."""
    shared = isinstance(stage.link.innermost, Collective) or ends.memory is not None
    return not (shared or any(kept is not None for kept in ends.receivers.values()))


def stand_in(node: Node, stage: Stage, state: PeerState) -> None:
    """Another rank counts, judges and hands out snapshots from now on."""
    here = node.rank == stage.home
    node.counter = state if here else None
    if here:
        state.evaluated = state.tally.here(node.now)


def welcome_tag(epoch: int, k: int) -> Tag:
    """The tag of the k-th message to who is new in a team; the first holds the model, the second says what follows."""
    return "welcome", k, epoch


async def welcome(node: Node, stage: Stage, state: PeerState, rank: int) -> None:
    """At the lowest of those who were there: let a newcomer know all that it needs."""
    alike = state.moments if stage.sync.exchange == "gradient" or stage.sync.momentum_travels else None
    parcel = parcelled(Known(stage.index, state.tally, state.rest, alike, state.outer_state, state.rule_state))
    for k, body in enumerate((state.params, *parcel)):
        await node.send(rank, welcome_tag(state.epoch, k), body, (len(parcel),))


async def heard(node: Node, epoch: int, host: int) -> list[Message] | None:
    """What a newcomer receives; None where the sender is lost meanwhile."""
    messages = list[Message]()
    while not messages or len(messages) <= messages[0].meta[0]:
        message = await node.recv(welcome_tag(epoch, len(messages)), LOST, src=host)
        if message.tag == LOST:
            await node.drop(*(welcome_tag(epoch, k) for k in range(MOST)))
            return None
        messages.append(message)
    return messages


async def come(node: Node, stages: Sequence[Stage], state: PeerState) -> tuple[int, PeerState] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there; None where the run
    is over. `state` is that of before the first stage."""
    first = stages[0]
    while True:
        while await node.recv(LOST, before_s=node.now):
            pass  # what was before is of no concern
        formed = await node.regroup(NONE)
        if formed.word == STOP:
            node.ledger.close(within(first, formed.time_ns))
            return None
        host = min(set(formed.ranks) - set(formed.came))
        if (messages := await heard(node, formed.epoch, host)) is not None:
            break
    model, *parcel = [message.body for message in messages]
    known = opened(parcel, ("ashl", type(first.outer).__module__.partition(".")[0]), first.trainer.device)
    stage = stages[known.stage].among(known.tally.gone)
    state.params, state.tally, state.outer_state = model, known.tally, known.outer_state
    state.version, state.steps, state.samples = known.tally.version, known.tally.steps, known.tally.samples
    state.enter(stage, node.rank)
    state.moments = stage.trainer.moments() if known.moments is None else known.moments
    state.round, state.step = known.tally.done_by(node.rank)
    state.drawn = state.step * state.batch
    state.rest = known.rest
    state.rule_state = known.rule_state
    state.epoch, state.lives = formed.epoch, formed.lives
    stand_in(node, stage, state)
    return stage.index, state

"""Views: which workers take part in which round of gossip in rounds, where workers may be lost.

Rule: who waits for a message of a lost worker, or hears of the loss, stops in its round k and tells all neighbours that
are left whom it knows to be lost, k, and of how many rounds of each of them it has heard; so does everybody who hears
that. As often as the graph of the others is wide they pass on the largest of these, so that all who are left know the
same; where one more is lost meanwhile, it begins anew. Then the round R = max k + 1 is the first without the lost: from
there on the graph is that of `ashl.topology.remaining`. The rounds up to R − 1 are finished by all, and who misses a
message of the lost there gives its weight to its own model. Of the lost those rounds count of which somebody has heard,
and only those are merged: what was counted of later ones is taken back. So every sample that counts is in somebody's
model, and from R on the run is that of the others alone. A verdict that was on its way holds after round R − 1 at the
earliest. The lowest rank that is left judges, counts and asks for snapshots, which every worker could.

A stage ends when all have sent each other that they are through, in the same way; a loss before that comes first, and
where fewer samples count then, the stage goes on. They leave once the lowest rank that is left, which records the end,
has said that it has: where it is lost before that, the next one does. Who is through answers those who have heard of a
loss only later.

Where a loss leaves others without a path to each other, be it on the graph of the next stage, or fewer than
`runtime.min_workers`, the run ends.

Where workers may come back (`ashl.topology.returns`), all are linked to all, so that each hears of every loss and tells
everybody at once, and a return is agreed on in the same way. Only the members of a view make the next one, and each
has to, so there is no other with the same number among those who are left. Before it is sent to anybody else, all have
said that they have it: else one who is lost could have sent a newcomer a view that nobody else has.

Source: views as in Birman and Joseph, "Exploiting Virtual Synchrony in Distributed Systems", SOSP 1987; rows that keep
adding up to 1 as in Xiao, Boyd and Lall, "Distributed Average Consensus with Time-Varying Metropolis Weights", 2006.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from ashl.errors import AshlError
from ashl.runtime.effects import JOIN, LOST, Message, PeerLostError
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.topology.graph import Round, Sources, reaches_all
from ashl.topology.knowledge import Came, GossipHeader, Knowledge, latest, read, written
from ashl.topology.membership import check_left
from ashl.topology.remaining import distances
from ashl.topology.rounds import (
    ALL_THERE,
    View,
    asking,
    gone_in,
    last_view,
    note,
    round_tag,
    rounds_of,
    start_of,
    staying,
)

if TYPE_CHECKING:
    from ashl.topology.gossip import Gossip, RoundState


def learn(state: RoundState, rank: int, loss: float, heard: Mapping[int, Message]) -> None:
    """Put together what this rank knows and what it has received."""
    headers = [GossipHeader(*message.meta[: len(GossipHeader._fields)]) for message in heard.values()]
    known = [state.header, *headers]
    losses = [value for value in (loss, *(header.loss for header in headers)) if math.isfinite(value)]
    verdict, last = max((header.verdict, header.last) for header in known)
    state.header = GossipHeader(
        loss=sum(losses) / len(losses) if losses else math.nan,
        not_finite=max(0 if math.isfinite(loss) else rank + 1, *(header.not_finite for header in known)),
        verdict=verdict,
        last=last,
        snapshot_after=max(header.snapshot_after for header in known),
    )


CONFIRMS = -1  # the phase of who has made a view, and says so


class Team(NamedTuple):
    """Those who are left of a graph: whom each tells, and how often until all know what one knew."""

    near: Sources
    width: int
    whole: bool  # whether models of everybody reach everybody


def team_of(sources: Sources, rounds: Sequence[Round], ranks: Sequence[int], all_linked: bool) -> Team:
    """Where all are linked to all, each tells everybody."""
    width, whole = 0, reaches_all(rounds, len(ranks), ranks[0])
    if all_linked:
        there = frozenset(ranks)
        near = tuple(tuple(r for r in ranks if r != rank) if rank in there else () for rank in range(len(sources)))
        return Team(near, min(1, len(ranks) - 1), whole)
    for rank in ranks:
        found = distances(sources, rank)
        width, whole = max(width, *found.values()), whole and len(found) == len(ranks)
    return Team(sources, width, whole)


def topology_of(stage: Stage) -> Gossip:
    return cast("Gossip", stage.topology)


async def hear_those_left(
    node: Node, stage: Stage, state: RoundState, k: int, sources: tuple[int, ...]
) -> dict[int, Message]:
    """The messages of round k, of those who are there or had sent them before they were lost."""
    agree, heard = stage.tag("agree"), dict[int, Message]()
    await catch_up(node, stage, state)
    for rank in sources:
        tag = round_tag(stage, state, rank, k)
        while rank not in heard and k < (count := rounds_of(state, rank, k)):
            message = await node.recv(tag, agree, LOST, src=rank, before_s=math.inf if count == math.inf else node.now)
            if message is None:
                break
            if message.tag != tag:
                await changed(node, stage, state, message)
                continue
            heard[rank] = message
            state.latest[rank] = k + 1
            if rank in state.answers:  # it is through with the stage before
                await node.cancel(state.answers.pop(rank))
    return heard


async def catch_up(node: Node, stage: Stage, state: RoundState) -> None:
    """Take in what has been heard so far of who is lost or comes. Where they come, that is once in a round, so that
    rounds end however many do."""
    agree, came = stage.tag("agree"), Came()
    while message := await node.recv(LOST, JOIN, agree, before_s=node.now):
        if stage.joins:
            take_in(state, message, came)
        else:
            await changed(node, stage, state, message)
    await changed(node, stage, state, None, came)


async def changed(
    node: Node, stage: Stage, state: RoundState, message: Message | None = None, came: Came | None = None
) -> int | None:
    """Where it is heard that somebody is lost, or has come, agree with all who are left on a view; `came` is what they
    have said of that. Returns the moment at which the stage ended, where the others were through. Raises AshlError
    where those who are left cannot go on."""
    came = Came() if came is None else came
    moment_ns = None if message is None else take_in(state, message, came)
    while moment_ns is None and (state.known != last_view(state).known or unsure(stage, state)):
        attempt = agreed if state.known != last_view(state).known else confirmed
        moment_ns = await attempt(node, stage, state, came)
    if moment_ns is not None:  # for who has asked this rank
        for peer in topology_of(stage).team(parties(stage, state)).near[node.rank]:
            await node.send(peer, stage.tag("agree"), None, (moment_ns,))
    return moment_ns


def take_in(state: RoundState, message: Message, came: Came) -> int | None:
    """What a message says of who is lost or has come; the moment at which the stage ended, where it says that."""
    if message.tag in (LOST, JOIN):
        note(state.known, {message.src: 2 * int(message.meta[0]) + (message.tag == LOST)})
    elif message.body is None:
        return None if state.waits else int(message.meta[0])  # no stage ends without who waits
    else:
        theirs = read(message.body)
        came[theirs.key, theirs.phase, message.src] = theirs
        if has_the_next(state, message.src, theirs):
            held = state.views[: theirs.before]  # of which a newcomer has none: the last one is all that it needs
            state.views = held + (ALL_THERE,) * (theirs.before - len(held)) + theirs.views
            state.header = theirs.header._replace(loss=state.header.loss)  # a verdict holds for all from the same round
        note(state.known, theirs.known)
    return None


def has_the_next(state: RoundState, src: int, theirs: Knowledge) -> bool:
    """Whether a view comes with what is received. Not from one that is lost by now, as the others may make another view
    without it, and from no other than those who make views with this rank: else some could have one, some another."""
    view, life = last_view(state), theirs.known.get(src, 0)
    if state.known.get(src, 0) > life:
        return False
    if state.waits:
        return theirs.key[0] >= len(state.views)
    return theirs.key[0] > len(state.views) and src not in view.gone and view.known.get(src, 0) == life


def unsure(stage: Stage, state: RoundState) -> bool:
    """Whether somebody might not have the last view, and make another one once others are lost."""
    return stage.joins and state.sure < len(state.views)


def parties(stage: Stage, state: RoundState) -> Stage:
    """The stage as of those who make the next view."""
    there = staying(last_view(state), state.known, stage.num_workers)
    return stage.among({*range(stage.num_workers)}.difference(there))


async def agreed(node: Node, stage: Stage, state: RoundState, came: Came) -> int | None:
    """One attempt, which ends early where more is heard of; returns as `changed` does."""
    view, agree, known_now = last_view(state), stage.tag("agree"), dict(state.known)
    left = parties(stage, state)
    near, ended = topology_of(stage).team(left), left.gone - view.gone
    here = with_newcomers(stage, left, asking(view, known_now, stage.num_workers))
    if lost := {rank for rank, life in known_now.items() if life % 2} - view.gone:
        check_left(node, stage, max(lost), len(here.workers))
    check_whole(node, here)
    rounds = {rank: state.latest.get(rank, 0) for rank in ended}
    waiting = frozenset({node.rank} if state.waits else ())
    known = Knowledge(state.views, known_now, 0, state.k, rounds, state.header, waiting)
    for phase in range(near.width):
        for peer in near.near[node.rank]:
            await node.send(peer, agree, written(latest(known._replace(phase=phase))))
        waited = [(known.key, phase, peer) for peer in near.near[node.rank]]
        while not all(item in came for item in waited):
            if (moment_ns := take_in(state, await node.recv(agree, LOST), came)) is not None:
                return moment_ns
            if state.views != known.views or state.known != known_now:
                return None
        for item in waited:
            known = known.with_what(came[item])
    state.sure = len(state.views)  # all are as far
    if known.waiting.issuperset(left.workers):
        raise nobody_left(stage)
    if not state.waits:
        adopt(state, known, left, here)
    while state.waits and state.views == known.views and state.known == known_now:  # others make it, who have them all
        if (moment_ns := take_in(state, await node.recv(agree, LOST), came)) is not None:
            return moment_ns
    return None


def check_whole(node: Node, here: Stage) -> None:
    """Raises AshlError where models of these do not reach all of them."""
    if not topology_of(here).team(here).whole:
        raise AshlError(
            f"without worker {', '.join(map(str, sorted(here.gone)))} the graph of those who are left falls apart at "
            f"{node.now:.6g} s: the run ends here; take a graph with more edges, as topology.graph=complete"
        )


async def confirmed(node: Node, stage: Stage, state: RoundState, came: Came) -> int | None:
    """Those who have made the last view tell each other that they have it, so that whoever goes on from here has it;
    before that it is sent to nobody else. Ends early where more is heard of; returns as `changed` does."""
    agree, views, known_now = stage.tag("agree"), state.views, dict(state.known)
    made_by = staying(views[-2] if len(views) > 1 else ALL_THERE, views[-1].known, stage.num_workers)
    others = [rank for rank in made_by if rank != node.rank] if node.rank in made_by else []
    waiting = frozenset({node.rank} if state.waits else ())
    known = Knowledge(views, known_now, CONFIRMS, state.k, {}, state.header, waiting)
    for peer in others:
        await node.send(peer, agree, written(latest(known)))
    while not all((known.key, CONFIRMS, peer) in came for peer in others):
        if (moment_ns := take_in(state, await node.recv(agree, LOST), came)) is not None:
            return moment_ns
        if state.views != views or state.known != known_now:
            return None
    state.sure = len(views)
    return None


def adopt(state: RoundState, known: Knowledge, left: Stage, here: Stage) -> None:
    """The next view, which `left` have agreed on and that `here` are in, begins after all rounds that anybody is in."""
    first, header = max(known.k + 1, last_view(state).first), known.header
    with_model = [rank for rank in left.workers if rank not in known.waiting]
    topology, came = topology_of(here), dict[int, int]()
    for rank in sorted({*here.workers}.difference(with_model)):
        neighbours = {*topology.neighbours(here, rank)}
        came[rank] = next((other for other in with_model if other in neighbours), with_model[0])
    rounds = {rank: max(count, start_of(state.views, rank)) for rank, count in known.rounds.items()}
    rounds |= {rank: start_of(state.views, rank) for rank in known.waiting}
    last = max(header.last, first - 1) if header.verdict else 0
    state.header = header._replace(loss=state.header.loss, last=last)
    state.views += (View(first, here.gone, rounds, known.known, came),)


def nobody_left(stage: Stage) -> AshlError:
    return AshlError(f"0 of {stage.num_workers} workers are left that have the model: the run ends here")


def with_newcomers(stage: Stage, left: Stage, new: Sequence[int]) -> Stage:
    """The stage as of these and of those who ask to be let in, as far as models of all reach all then."""
    if not new:
        return left
    together = left.gone.difference(new)
    all_in = stage.among(together)
    near = tuple(topology_of(stage).neighbours(all_in, rank) for rank in range(stage.num_workers))
    here = stage.among(together.union(new).difference(distances(near, left.workers[0])))
    return here if topology_of(stage).team(here).whole else left


async def finish(node: Node, stage: Stage, state: RoundState) -> int | None:
    """Wait until all who are left are through with the stage, and the home rank records its end; returns the moment at
    which the last one was, None where somebody is found to be lost before that."""
    views, agree, moment_ns = len(state.views), stage.tag("agree"), node.now_ns
    ended_ns = await changed(node, stage, state)  # who has just come may have heard of a loss
    if ended_ns is not None or len(state.views) > views:
        return ended_ns
    here = stage.among(gone_in(state))
    team, recorded = topology_of(stage).team(here), stage.tag("recorded", views)
    near = team.near[node.rank]
    for phase in range(team.width):
        tag = stage.tag("end", views * stage.num_workers + phase)
        for peer in near:
            await node.send(peer, tag, None, (moment_ns,))
        for peer in near:
            while (message := await node.recv(tag, agree, LOST, src=peer)).tag != tag:
                ended_ns = await changed(node, stage, state, message)
                if ended_ns is not None or len(state.views) > views:
                    return ended_ns
            moment_ns = max(moment_ns, int(message.meta[0]))
    while node.rank != here.home and (message := await node.recv(recorded, agree, LOST)).tag != recorded:
        ended_ns = await changed(node, stage, state, message)
        if ended_ns is not None or len(state.views) > views:
            return ended_ns
    for peer in near:  # the home rank records it before anything else can happen
        await node.send(peer, recorded, None)
    await node.drop(recorded)  # others pass it on, too
    state.answers = {peer: node.spawn(answer(node, stage, peer, moment_ns)) for peer in near}
    return moment_ns


async def answer(node: Node, stage: Stage, peer: int, moment_ns: int) -> None:
    """Beside what follows: tell a neighbour that has heard of a loss only now that the stage was over before."""
    with suppress(PeerLostError):
        while True:
            message = await node.recv(stage.tag("agree"), src=peer)
            if message.body is not None:
                await node.send(peer, stage.tag("agree"), None, (moment_ns,))

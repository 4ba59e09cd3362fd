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

A stage ends when all have told each other that they are through, in the same way; a loss before that comes first, and
where fewer samples count then, the stage goes on. They leave once the lowest rank that is left, which records the end,
has said that it has: where it is lost before that, the next one does. Who is through answers those who have heard of a
loss only later.

Where a loss leaves others without a path to each other, or fewer than `runtime.min_workers`, the run ends. Nobody
comes back yet.

Source: views as in Birman and Joseph, "Exploiting Virtual Synchrony in Distributed Systems", SOSP 1987; rows that keep
adding up to 1 as in Xiao, Boyd and Lall, "Distributed Average Consensus with Time-Varying Metropolis Weights", 2006.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime.effects import LOST, Message, PeerLostError
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.topology.graph import Round, Sources, reaches_all
from ashl.topology.membership import check_left
from ashl.topology.remaining import distances

if TYPE_CHECKING:
    from ashl.topology.gossip import Gossip, RoundRule, RoundState


class GossipHeader(NamedTuple):
    """What rides on every message: all that is known of the run so far."""

    loss: float  # mean of the sender's loss and of those that it heard of
    not_finite: float = 0  # 1 + the rank whose loss is no number; 0 = none
    verdict: float = 0  # of rank 0, as a place in VERDICTS
    last: float = 0  # the round after which it holds
    snapshot_after: float = -1  # the round after which all hand in their models


NOTHING_HEARD = GossipHeader(math.nan)


def learn(state: RoundState, rank: int, loss: float, heard: Mapping[int, Message]) -> None:
    """Put together what this rank knows and what it was told."""
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


class View(NamedTuple):
    """Who takes no part from a round on, and of how many rounds of those who are new among them the others have
    heard."""

    first: int
    gone: frozenset[int]
    rounds: dict[int, int]


class Knowledge(NamedTuple):
    """What is told where somebody is lost."""

    views: tuple[View, ...]
    lost: frozenset[int]
    phase: int
    k: int
    rounds: dict[int, int]
    header: GossipHeader

    @property
    def key(self) -> tuple[int, frozenset[int]]:
        """What is being agreed on."""
        return len(self.views), self.lost

    def with_what(self, other: Knowledge) -> Knowledge:
        """What both know together."""
        rounds = {
            rank: max(of.get(rank, 0) for of in (self.rounds, other.rounds)) for rank in self.rounds | other.rounds
        }
        mine, theirs = self.header, other.header
        verdict, last = max((mine.verdict, mine.last), (theirs.verdict, theirs.last))
        return Knowledge(
            max(self.views, other.views, key=len),
            self.lost | other.lost,
            self.phase,
            max(self.k, other.k),
            rounds,
            GossipHeader(
                mine.loss,
                max(mine.not_finite, theirs.not_finite),
                verdict,
                last,
                max(mine.snapshot_after, theirs.snapshot_after),
            ),
        )


Came = dict[tuple[tuple[int, frozenset[int]], int, int], Knowledge]  # by what is agreed on, phase and sender


def written(known: Knowledge) -> Tensor:
    """As a body."""
    views = [(view.first, sorted(view.gone), sorted(view.rounds.items())) for view in known.views]
    fields = (views, sorted(known.lost), known.phase, known.k, sorted(known.rounds.items()), known.header)
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def read(body: Tensor) -> Knowledge:
    views, lost, phase, k, rounds, header = json.loads(bytes(body.tolist()))
    known = tuple(View(first, frozenset(gone), dict(of)) for first, gone, of in views)
    return Knowledge(known, frozenset(lost), phase, k, dict(rounds), GossipHeader(*header))


class Team(NamedTuple):
    """Those who are left of a graph: whom each tells, and how often until all know what one knew."""

    near: Sources
    width: int
    whole: bool  # whether models of everybody reach everybody


def team_of(sources: Sources, rounds: Sequence[Round], ranks: Sequence[int]) -> Team:
    width, whole = 0, reaches_all(rounds, len(ranks), ranks[0])
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
    tag, agree, heard = stage.tag("gossip", k), stage.tag("agree"), dict[int, Message]()
    while message := await node.recv(LOST, agree, before_s=node.now):
        await changed(node, stage, state, message)
    await changed(node, stage, state)
    for rank in sources:
        while rank not in heard and k < rounds_of(state, rank):
            waits = math.inf if rank not in state.lost else node.now
            message = await node.recv(tag, agree, LOST, src=rank, before_s=waits)
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


def rounds_of(state: RoundState, rank: int) -> float:
    """How many rounds of a neighbour count."""
    return next((view.rounds[rank] for view in state.views if rank in view.rounds), math.inf)


def gone_in(state: RoundState) -> frozenset[int]:
    """Who takes no part by the last view."""
    return state.views[-1].gone if state.views else frozenset()


async def changed(node: Node, stage: Stage, state: RoundState, message: Message | None = None) -> int | None:
    """Where a loss is heard of, agree with all who are left on a view without it. Returns the moment at which the stage
    ended, where the others were through. Raises AshlError where those who are left cannot go on."""
    came: Came = {}
    moment_ns = None if message is None else take_in(state, message, came)
    while moment_ns is None and not state.lost <= gone_in(state):
        moment_ns = await agreed(node, stage, state, came)
    if moment_ns is not None:  # for who has asked this rank
        for peer in topology_of(stage).team(stage.among(state.lost)).near[node.rank]:
            await node.send(peer, stage.tag("agree"), None, (moment_ns,))
    return moment_ns


def take_in(state: RoundState, message: Message, came: Came) -> int | None:
    """What a message says of who is lost; the moment at which the stage ended, where it says that."""
    if message.tag == LOST:
        state.lost.add(message.src)
    elif message.body is None:
        return int(message.meta[0])
    else:
        known = read(message.body)
        came[known.key, known.phase, message.src] = known
        state.views, state.lost = max(state.views, known.views, key=len), state.lost | known.lost
    return None


async def agreed(node: Node, stage: Stage, state: RoundState, came: Came) -> int | None:
    """One attempt, which ends early where more is heard of; returns as `changed` does."""
    gone, lost, agree = gone_in(state), frozenset(state.lost), stage.tag("agree")
    here = stage.among(lost)
    check_left(node, stage, max(lost - gone), len(here.workers))
    team = topology_of(stage).team(here)
    if not team.whole:
        raise AshlError(
            f"without worker {', '.join(map(str, sorted(lost)))} the graph of those who are left falls apart at "
            f"{node.now:.6g} s: the run ends here; take a graph with more edges, as topology.graph=complete"
        )
    rounds = {rank: state.latest.get(rank, 0) for rank in lost - gone}
    known = Knowledge(state.views, lost, 0, state.k, rounds, state.header)
    for phase in range(team.width):
        for peer in team.near[node.rank]:
            await node.send(peer, agree, written(known._replace(phase=phase)))
        waited = [(known.key, phase, peer) for peer in team.near[node.rank]]
        while not all(item in came for item in waited):
            if (moment_ns := take_in(state, await node.recv(agree, LOST), came)) is not None:
                return moment_ns
            if (len(state.views), state.lost) != known.key:
                return None
        for item in waited:
            known = known.with_what(came[item])
    header = known.header
    state.header = header._replace(loss=state.header.loss, last=max(header.last, known.k) if header.verdict else 0)
    state.views += (View(known.k + 1, lost, known.rounds),)
    return None


def turned(node: Node, stage: Stage, state: RoundState, k: int) -> Stage:
    """The stage as it is in round k, with the counts of those who have been lost for it."""
    tally, rule = state.tally, cast("RoundRule", stage.sync)
    while state.turned < len(state.views) and state.views[state.turned].first <= k:
        view, here = state.views[state.turned], stage.among(state.views[state.turned].gone)
        assert isinstance(tally, Tally)
        for rank in sorted(view.gone - tally.gone):
            take_back(stage, state, rank, view.first - max(0, view.rounds[rank] - rule.early))
            tally.lose(rank)
        state.turned += 1
        state.steps, state.samples = tally.steps, tally.samples
        state.rule_state = rule.changed(here, state, node.rank)
        state.plan_round(here, node.rank)
        if node.rank == here.home:
            counts: Any = state
            node.counter = counts
    return stage.among(state.views[state.turned - 1].gone if state.turned else ())


def take_back(stage: Stage, state: RoundState, rank: int, rounds: int) -> None:
    """So many of the rounds that were counted of a worker are part of no model that is left."""
    steps, samples, tally = stage.round_steps[rank], stage.round_samples[rank], state.tally
    assert isinstance(tally, Tally)
    before = tally.commits[rank]
    tally.take_back(rank, rounds, rounds * steps, rounds * samples)
    if state.in_time is not None:
        late = before - state.in_time.tally.commits[rank]  # rounds that do not count anyway
        rounds = max(0, rounds - late)
        state.in_time.tally.take_back(rank, rounds, rounds * steps, rounds * samples)


async def finish(node: Node, stage: Stage, state: RoundState) -> int | None:
    """Wait until all who are left are through with the stage, and the home rank records its end; returns the moment at
    which the last one was, None where somebody is found to be lost before that."""
    views, agree, moment_ns = len(state.views), stage.tag("agree"), node.now_ns
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

"""Gossip: every worker holds a model of its own and exchanges it with its neighbours on a graph.

Rule (D-PSGD): x_i ← Σ_j w_ij·x_j + Δ_i, with Δ_i what the worker's own optimizer did between two exchanges. Whom to
hear from and what to make of it is the sync mode's. What is evaluated is the mean of all models; momentum stays local.

Synchronous modes (`RoundRule`) go round by round, each worker as soon as it has heard from its sources of that round:
no server, no barrier. Counts are functions of the round, so that all ranks count alike. What rank 0 alone can know
(seconds, evaluations, that a loss is no number) rides on the messages: its verdict holds after the round by which it
has reached everyone, which rank 0 works out from the graph.

Where workers may be lost, see `ashl.topology.views`, and where they come back, `ashl.topology.returns`. Asynchronous
modes (`RoamingRule`) have a loop of their own, and the coordinator of `ashl.topology.coordinator`.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.size_only import Vector
from ashl.stage.rule import CHURN, Loop, Network, Rule, Topology
from ashl.stage.stage import GO, STOP, Stage
from ashl.stage.tally import NOTHING, Progress, Start, Tally
from ashl.topology import returns, under_way
from ashl.topology.coordinator import CoordinatorState, Kept, RoamingState, coordinator
from ashl.topology.ending import REASONS, InTime, end_ridden, foreseen, keep_in_time
from ashl.topology.graph import Edge, Round, Sources, depths, edges_of, rounds_of, sources_of
from ashl.topology.knowledge import NOTHING_HEARD, GossipHeader
from ashl.topology.local_work import WorkerState, local_work
from ashl.topology.partners import come, gather, taken_up
from ashl.topology.remaining import remaining
from ashl.topology.rounds import Lives, View, carried_over, count, gone_in, turned
from ashl.topology.under_way import post
from ashl.topology.views import Team, check_whole, finish, hear_those_left, learn, team_of

VERDICTS = (*REASONS, "diverged")
Outgoing = dict[int, tuple[Any, tuple[float, ...]]]  # rank → the body and the numbers that it is sent


class GossipRule(Rule, contract=True):
    """What both kinds of gossip say."""

    columns: ClassVar[bool] = False  # whether weights are those of push-sum, whose columns add up to 1
    comes_back: ClassVar[bool] = True  # whether a worker that is lost can

    def check(self, rounds: Sequence[Round]) -> None:
        """Raises UsageError where a graph is wrong for it."""


class RoundRule(GossipRule, contract=True):
    """What gossip in rounds asks its sync mode. The defaults: everybody hears from its neighbours, all in time.

    The rule's own state of this stage is `state.rule_state`.
    """

    in_rounds: ClassVar[bool] = True
    meets_all: ClassVar[bool] = False  # whether all workers sum something, too, now and then
    early: ClassVar[bool] = False  # whether models leave before the local work
    lag: ClassVar[int] = 0  # rounds that messages may be late
    suspect: ClassVar[str] = ""  # what else may be wrong where a run diverges

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Any:
        """The rule's own state when a stage begins."""
        return None

    def changed(self, stage: Stage, state: RoundState, rank: int) -> Any:
        """From this round on others take part: the rule's own state."""
        return state.rule_state

    def sources(self, stage: Stage, rank: int, k: int) -> tuple[int, ...]:
        """Whom a rank hears from in round k."""
        return graph_of(stage).round(stage, k).sources[rank]

    async def outgoing(self, node: Node, stage: Stage, state: RoundState, k: int, delta: Any) -> Outgoing:
        """What is sent in round k; Δ is None where models leave early."""
        raise NotImplementedError

    def merge(
        self, stage: Stage, state: RoundState, rank: int, k: int, delta: Vector, heard: Mapping[int, Message]
    ) -> None:
        """The messages of round k − lag and Δ become the model."""
        raise NotImplementedError

    def settle(self, state: RoundState, heard: Mapping[int, Message]) -> None:
        """Where messages may be late: take in the last ones, at the end of a stage."""


class RoamingRule(GossipRule, contract=True):
    """A sync mode of gossip in which workers go at their own pace."""

    coordinated: ClassVar[bool] = True
    carries: ClassVar[frozenset[str]] = frozenset()  # its rule says whether it goes on without a worker
    kept: ClassVar[Kept] = ""  # how real processes come to a checkpoint

    async def worker(self, node: Node, stage: Stage, state: RoamingState) -> int:
        """The loop of a worker; returns the last word."""
        raise NotImplementedError

    def taken_up(self, state: RoamingState) -> None:
        """A worker goes on from such a checkpoint: nothing is on its way, and what is later is to come again."""

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...] | None:
        """Whom a worker may ask for an answer; None where it just hears from its neighbours."""
        return None


@option
class Gossip(Topology):
    """Workers talk to their neighbours on a graph, and to nobody else."""

    asks: ClassVar[type[Rule]] = GossipRule
    carries: ClassVar[frozenset[str]] = frozenset({CHURN})  # whole models travel, and nobody adds up updates
    replicas: ClassVar[bool] = True
    graph: str
    degree: Count

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        """Raises UsageError where the graph is wrong for so many workers or for this sync mode."""
        assert isinstance(sync, GossipRule)
        sync.check(self.rounds(sync, num_workers, seed))

    def rounds(self, sync: GossipRule, num_workers: int, seed: int) -> tuple[Round, ...]:
        """The graph, with the weights that the sync mode needs."""
        weights = "columns" if sync.columns else "metropolis"
        return rounds_of(self.graph, weights, self.degree, num_workers, seed)

    def round(self, stage: Stage, k: int) -> Round:
        """The graph of round k."""
        rounds = stage.once(rounds_in)
        return rounds[k % len(rounds)]

    def edges(self, stage: Stage) -> tuple[Edge, ...]:
        """The edges of all rounds, whatever their direction."""
        return stage.once(edges_in)

    def neighbours(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom an edge connects this worker with, in whichever round and direction."""
        return stage.once(neighbours_in)[rank]

    def team(self, stage: Stage) -> Team:
        """Those who are left, and how they reach each other."""
        return stage.once(team_in)

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The neighbours of all rounds, and the coordinator; all others, where they agree on who comes back."""
        if returning(stage):
            return tuple(other for other in range(stage.num_workers) if other != rank)
        others = stage.workers if stage.home == stage.server else ()
        if rank == stage.server:
            return others
        return self.neighbours(stage, rank) + ((stage.server,) if others else ())

    def hears(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """All others, where all meet in a sum."""
        if isinstance(stage.sync, RoundRule) and stage.sync.meets_all:
            return tuple(other for other in range(stage.num_workers) if other != rank)
        return self.links(stage, rank)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What one exchange takes, uncontended: the slowest transfer from a neighbour, or there and back."""
        peers = stage.sync.peers(stage, rank) if isinstance(stage.sync, RoamingRule) else None
        near = self.neighbours(stage, rank) if peers is None else peers
        ways, dense = 1 + (peers is not None), stage.trainer.dense_bytes
        return ways * max((network.transfer_ns(peer, rank, dense) for peer in near), default=0)

    def begin(self, node: Node, stage: Stage) -> CoordinatorState | RoamingState | RoundState:
        if node.rank == stage.server:
            return CoordinatorState(Tally(stage.num_workers))
        if stage.home == stage.server:
            return RoamingState(*stage.trainer.init())
        n = stage.num_workers
        counts = node.rank == stage.home or stage.elastic  # whoever may stand in for it
        return RoundState(*stage.trainer.init(), tally=Tally(n) if counts else Progress(n))

    async def come(
        self, node: Node, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        if kept is not None and isinstance(kept[1], RoundState):
            return await under_way.taken_up(node, stages, *kept)
        if kept is not None:
            return await (gather if node.rank == stages[0].server else taken_up)(node, stages, *kept)
        state: Any = self.begin(node, stages[0])
        index = await (come if isinstance(state, RoamingState) else returns.come)(node, stages, state)
        return None if index is None else (index, state)

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank == stage.server:
            return coordinator
        return stage.sync.worker if isinstance(stage.sync, RoamingRule) else worker


def rule_in(stage: Stage) -> RoundRule:
    """The stage's sync mode, as the loop of rounds asks it."""
    assert isinstance(stage.sync, RoundRule)
    return stage.sync


def graph_of(stage: Stage) -> Gossip:
    """The stage's topology, as its rules use it."""
    assert isinstance(stage.topology, Gossip)
    return stage.topology


def rounds_in(stage: Stage) -> tuple[Round, ...]:
    """The stage's graph, see `Gossip.rounds`."""
    assert isinstance(stage.sync, GossipRule)
    rounds = graph_of(stage).rounds(stage.sync, stage.num_workers, stage.seed)
    return remaining(rounds, stage.gone, stage.sync.columns) if stage.gone else rounds


def edges_in(stage: Stage) -> tuple[Edge, ...]:
    topology = graph_of(stage)
    edges = edges_of(topology.graph, topology.degree, stage.num_workers, stage.seed)
    return tuple(edge for edge in edges if stage.gone.isdisjoint(edge)) if stage.gone else edges


def returning(stage: Stage) -> bool:
    """Whether workers may come back that go round by round."""
    return stage.elastic and stage.joins and stage.sync.in_rounds


def team_in(stage: Stage) -> Team:
    return team_of(stage.once(neighbours_in), stage.once(rounds_in), stage.workers, returning(stage))


def neighbours_in(stage: Stage) -> Sources:
    return sources_of(stage.once(edges_in), stage.num_workers)


@dataclass
class RoundState(WorkerState):
    """A worker that goes round by round, and counts as all others do; rank 0 keeps the books by worker, too."""

    tally: Progress = field(default_factory=lambda: Progress(0))
    evaluated: Start = NOTHING  # the last evaluation
    in_time: InTime | None = None  # once a round has come too late
    header: GossipHeader = NOTHING_HEARD
    k: int = 0  # rounds of this stage so far
    under_way: tuple[tuple[int, Outgoing], ...] = ()  # what it said in the last of them, where messages may be late
    views: tuple[View, ...] = ()  # of this stage: who takes part from which round on, as all have agreed
    turned: int = 0  # how many of them hold by now
    sure: int = 0  # how many of them all others have, too
    known: Lives = field(default_factory=dict)  # who is lost or has come, as far as this rank has heard
    waits: bool = False  # whether it has come, and has no model yet
    came: bool = False  # whether it has one, and has not begun its first round
    latest: dict[int, int] = field(default_factory=dict)  # rounds of this stage that were heard of each neighbour
    answers: dict[int, Any] = field(default_factory=dict)  # tasks that answer who is not through with the stage before

    def enter(self, stage: Stage, rank: int, now_s: float = 0.0) -> None:
        again = self.entered == stage.index
        super().enter(stage, rank)
        if not again:
            self.tally.begin(now_s)
            self.k, self.header, self.latest, self.under_way = 0, NOTHING_HEARD, {}, ()
            self.views = carried_over(self.views, stage.joins)
            self.sure, self.turned = len(self.views), max(0, len(self.views) - 1)
            self.rule_state = rule_in(stage).begin(stage, self, rank)


async def worker(node: Node, stage: Stage, state: RoundState) -> int:
    """Work, tell, hear, merge; round by round, until the counts or a verdict of rank 0 say otherwise. Returns the last
    word."""
    state.enter(stage, node.rank, node.now)
    rule, rank, whole = rule_in(stage), node.rank, stage
    if state.views:
        check_whole(node, stage.among(gone_in(state)))
    if state.came:  # with this the stage may be over for all
        state.came = False
        if (word := await ended(node, stage, state)) != GO:
            return word
        state.k += 1
    while True:
        if whole.elastic:
            stage = turned(node, whole, state, state.k)
        own = stage.cut(state.rest)
        node.mark(stage.index, state if own is stage else None)
        k, params = state.k, state.params
        if rule.early:
            await post(node, stage, state, k, await rule.outgoing(node, stage, state, k, None), rule.lag)
        work = await local_work(node, stage, state)
        if not rule.early:
            await post(node, stage, state, k, await rule.outgoing(node, stage, state, k, work.body), rule.lag)
        heard = await hear(node, stage, state, k - rule.lag)
        rule.merge(stage, state, rank, k, work.body, heard)
        learn(state, rank, work.loss, heard)
        late = keep_in_time(node, stage, state, params)
        count(own, state)
        state.plan_round(stage, rank)
        asked = state.header.snapshot_after == k  # before rank 0 asks for the next one
        if rank == stage.home:
            look_ahead(node, stage, state, k)
        due = stage.limits.eval_every_s is None and stage.judge.take(state, node.now)
        if (due or asked) and not late:
            counts = state.tally.report() if rank == stage.home and isinstance(state.tally, Tally) else None
            node.snapshot(state.params, tick=state.tally.version, counts=counts, without=stage.gone)
        word = await ended(node, stage, state)
        node.round(stage.index, state.round, work.steps, rule.lag, dropped=late, loss=work.loss)
        state.round += 1
        if word != GO:
            return word
        state.k += 1


async def ended(node: Node, stage: Stage, state: RoundState) -> int:
    """The last word where the stage ends with this round, else GO."""
    if stage.elastic:
        stage = await turned_to(node, stage, state, state.k + 1)
    while reason := over(stage, state):
        if not stage.elastic:
            for under_way in range(max(0, state.k + 1 - rule_in(stage).lag), state.k + 1):
                rule_in(stage).settle(state, await hear(node, stage, state, under_way))
            return await end(node, stage, state, reason)
        moment_ns = await finish(node, stage, state)
        stage = await turned_to(node, stage, state, state.k + 1)
        if moment_ns is not None:
            word = end_ridden(node, stage, state, reason, moment_ns)
            if word == STOP and returning(stage):
                node.spawn(returns.close_doors(node, stage, state, state.tally.end_ns))
            return word
    return GO


async def turned_to(node: Node, stage: Stage, state: RoundState, k: int) -> Stage:
    """The stage as it is in round k, which is to begin; who begins with it has its model."""
    before = state.turned
    stage = turned(node, stage, state, k)
    await returns.welcome(node, stage, state, before, k)
    return stage


def over(stage: Stage, state: RoundState) -> str | None:
    """Why the stage is over after this round."""
    if (reason := stage.judge.spent(state.tally)) or not state.header.verdict or state.k < state.header.last:
        return reason
    return VERDICTS[int(state.header.verdict)]


async def hear(node: Node, stage: Stage, state: RoundState, k: int) -> dict[int, Message]:
    """The messages of round k, in rank order."""
    sources = rule_in(stage).sources(stage, node.rank, k) if k >= 0 else ()
    if stage.elastic:
        return await hear_those_left(node, stage, state, k, sources)
    return {rank: await node.recv(stage.tag("gossip", k), src=rank) for rank in sources}


def look_ahead(node: Node, stage: Stage, state: RoundState, k: int) -> None:
    """Rank 0 alone: what all others have to know, and the round after which they do; not where it is to give way."""
    tally, header = state.tally, state.header
    if stage.among(gone_in(state)).home != node.rank:
        return
    if header.not_finite:
        why = f"the loss of worker {int(header.not_finite) - 1} became no number near step {tally.steps}"
        tally.diverged = why + rule_in(stage).suspect
    reason = "diverged" if tally.diverged else foreseen(node, stage, tally)
    timed = header.snapshot_after <= k and stage.limits.eval_every_s is not None
    snapshot = timed and stage.judge.take(state, node.now)
    if (reason and not header.verdict) or snapshot:
        start = max(k + 1, state.views[-1].first if state.views else 0)  # before that, losses may be in the way
        known = start - 1 + rounds_to_all(stage.among(gone_in(state)), start)
        if reason and not header.verdict:
            header = header._replace(verdict=VERDICTS.index(reason), last=known)
        state.header = header._replace(snapshot_after=known) if snapshot else header


def rounds_to_all(stage: Stage, first: int) -> int:
    """How many rounds it takes what rank 0 sends from round `first` on to reach everyone."""
    rule = rule_in(stage)
    if type(rule).sources is RoundRule.sources and len(stage.once(rounds_in)) == 1 and not stage.gone:
        return (1 + rule.lag) * max(depths(graph_of(stage).round(stage, 0).targets))
    k, since = first - rule.lag, {stage.home: first}  # the round from which on a rank passes it on
    unaware = [rank for rank in stage.workers if rank != stage.home]
    while unaware:
        knew = {rank for rank, start in since.items() if start <= k}
        reached = [rank for rank in unaware if k >= 0 and not knew.isdisjoint(rule.sources(stage, rank, k))]
        since |= dict.fromkeys(reached, k + rule.lag + 1)
        unaware = [rank for rank in unaware if rank not in since]
        k += 1
    return k + rule.lag - first


async def end(node: Node, stage: Stage, state: RoundState, reason: str) -> int:
    """The stage ended with this round; at the moment when the last worker had finished it. Returns the last word."""
    node.mark(stage.index, None)
    moment = await node.all_reduce(torch.tensor([node.now_ns]), stage.workers, "max", riders=1)
    return end_ridden(node, stage, state, reason, int(moment))

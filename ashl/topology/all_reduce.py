"""All-reduce: every worker holds the model, and each merge is one sum over all of them.

Rule: one outer step on Σ_j c_j·Δ_j, or one optimizer step on Σ_j c_j·g_j, the same on every worker. A ring moves
2(n − 1)/n of the model each way. Nobody can be late: a merge waits for the slowest. Where workers are lost or come it
goes on as `ashl.topology.regrouping` says. By which `algorithm` a sum travels is `ashl.cluster.sum_rounds`'s to say.

Limit: all algorithms give the same model, bit for bit, where sums are exact.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from ashl.cluster.sum_rounds import Algorithm
from ashl.option import option
from ashl.runtime.node import Node
from ashl.stage.rule import CHURN, CODEC, DELAY, OUTER, OVERLAP, STATISTICS, WEIGHTS, Loop, Network, Rule, Topology
from ashl.stage.stage import Stage
from ashl.stage.tally import NOTHING, Start, Tally
from ashl.stage.team import Team, TeamBrokenError, whole
from ashl.topology import pipelined, streaming
from ashl.topology.delayed import at_border, worked
from ashl.topology.ending import JOIN, REASONS, InTime, end_ridden, foreseen, keep_in_time
from ashl.topology.exchange import exchanged
from ashl.topology.local_work import Work, WorkerState, local_work
from ashl.topology.overlapped import overlapped
from ashl.topology.regrouping import come, keep, regrouped, repaired

Do = Callable[[Node, Stage, WorkerState], Awaitable[Work]]


class Heard(NamedTuple):
    """What a rule hears of a round, equal on all workers."""

    due: bool  # as the lead rank said
    now_s: float  # about when the merge was
    step_s: tuple[float, ...] = ()  # seconds of one step of each worker, where the rule tells; 0 = failed


class StepRule(Rule, contract=True):
    """What an all-reduce asks its sync mode: how many steps lie between two sums, and of what. All go on together."""

    in_rounds: ClassVar[bool] = True

    def work(self) -> Do:
        """What a worker does between two sums, and hands in."""
        return local_work

    tells: ClassVar[bool] = False  # whether every worker hears what a step took each of them, by a small sum of its own

    def begin(self, stage: Stage, tally: Tally) -> Any:
        """The rule's own state when the stage begins, equal on all workers."""
        return None

    def due(self, state: Any, now_s: float) -> bool:
        """Return True if it is time for what `hear` is told with the next sum; asked at the lead rank alone."""
        return False

    def hear(self, stage: Stage, state: Any, tally: Tally, heard: Heard) -> Any:
        """The rule's own state after a merge; `state` stays as it is."""
        return state

    def in_round(self, stage: Stage, state: Any, tally: Tally) -> Stage:
        """The stage as it is in the next round, where H or batches follow what has been counted and heard."""
        return stage

    @property
    def changes(self) -> bool:
        """Return True if its rounds differ from what is planned."""
        return type(self).in_round is not StepRule.in_round


NOTHING_HEARD = Heard(False, 0.0)


@option
class AllReduce(Topology):
    """No server: the workers' bodies are summed in rank order, or gathered where they do not add up (see
    `topology.exchange`), and everybody keeps the sum."""

    asks: ClassVar[type[Rule]] = StepRule
    carries: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, STATISTICS, OUTER, OVERLAP, DELAY, CHURN})
    algorithm: Algorithm | None = None  # so that an option of one's own which extends this may say nothing

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Collectives only, and no point-to-point links, unless the codec's own protocol needs some; to all, where
        workers may be lost, as it goes another way then."""
        peers = stage.link.peers(rank, stage.num_workers)
        return self.hears(stage, rank) if stage.elastic and stage.link.talks else peers

    def hears(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """All others: the sum lacks what this one would add to it."""
        return tuple(peer for peer in range(stage.num_workers) if peer != rank)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a merge takes: a sum on its way, or bodies that go round once, all as long as the longest."""
        if stage.fragments:
            parts = (stage.fragment(k) for k in range(len(stage.fragments)))
            return max(self.exchange_ns(part, network, rank) for part in parts)
        if stage.link.adds_up:
            nbytes = stage.codec.payload(stage.worker(rank).compression_ratio, stage.link.d)
            return network.all_reduce_ns(stage.workers, nbytes, 0)
        return network.all_gather_ns(stage.workers, stage.num_workers * stage.once(longest_body), 0)

    def begin(self, node: Node, stage: Stage) -> PeerState:
        n = stage.num_workers
        return PeerState(*stage.trainer.init(), tally=node.alike(stage.workers, "tally", lambda: Tally(n)))

    async def come(
        self, node: Node, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, PeerState] | None:
        return await come(node, stages, PeerState(*stages[0].trainer.init()))

    def role(self, stage: Stage, rank: int) -> Loop:
        if stage.delayed is not None:
            return streaming.worker if stage.fragments else delayed
        return pipelined.worker if stage.overlap.crosses else worker


def longest_body(stage: Stage) -> int:
    shares = {worker.compression_ratio for worker in stage.plan.workers}
    return max(stage.codec.payload(share, stage.link.d) for share in shares)


@dataclass
class PeerState(WorkerState):
    """A worker that also counts, alike on every rank. What all have alike is replaced and never changed, so that in
    virtual time all may hold the same one."""

    tally: Tally = field(default_factory=lambda: Tally(0))
    evaluated: Start = NOTHING  # at rank 0: the last evaluation
    in_time: InTime | None = None  # once a merge has come too late
    word: str | None = None  # what rank 0 will tell the others with the next exchange
    outer_state: Any = None  # the outer optimizer's moments
    epoch: int = 0  # of the team
    lives: tuple[int, ...] = ()  # of its members, where one has been lost before
    formed_ns: int = 0  # when all had asked for that team
    kept: tuple[PeerState, ...] = ()  # where workers may be lost: as it was before the last two exchanges
    redo: Work | None = None  # what is to be exchanged once more

    def begin(self, node: Node, stage: Stage) -> Stage:
        """A stage begins, unless it goes on from a checkpoint; returns it as it is among those who are there."""
        stage = stage.among(self.tally.gone)
        if self.entered != stage.index:
            opened = partial(begun, self.tally, node.now)
            self.tally = node.alike(stage.workers, ("begin", stage.index), opened)
            if stage.resets_outer:
                self.outer_state = None
            self.kept = ()
            self.enter(stage, node.rank)
            self.rule_state = rule_of(stage).begin(stage, self.tally)
        return stage

    def adopt(self, result: Merged) -> None:
        self.params, self.outer_state, self.tally = result.params, result.outer_state, result.tally
        self.version, self.steps, self.samples = result.tally.version, result.tally.steps, result.tally.samples
        if result.moments is not None:
            self.moments = result.moments

    def plan(self, ahead: Ahead, rank: int) -> None:
        self.rest, self.rule_state = ahead.rest, ahead.rule_state
        self.take(ahead.own, rank)

    def take(self, own: Stage, rank: int) -> None:
        """The next round's H and batch."""
        self.local_steps, self.batch = own.plan.workers[rank].local_steps, own.plan.workers[rank].batch


class Merged(NamedTuple):
    """What a merge makes, alike on all ranks; moments where the optimizer steps on the sum, else None."""

    params: Any
    moments: Any
    outer_state: Any
    tally: Tally


class Ahead(NamedTuple):
    """What comes after a merge, alike on all ranks."""

    over: str | None  # why the run ends, as the counts say
    rest: tuple[int, int] | None  # of the rounds, as `Stage.rest` says
    planned: Stage  # the stage as it is in the next round
    own: Stage  # ... and as much of that as is left
    rule_state: Any = None  # the rule's own
    seen_ns: int = 0  # when a rank saw the merge first; who stands still sees it later


def begun(tally: Tally, now_s: float) -> Tally:
    tally = tally.copy()
    tally.begin(now_s)
    return tally


def rule_of(stage: Stage) -> StepRule:
    """The stage's sync mode, as an all-reduce asks it."""
    assert isinstance(stage.sync, StepRule)
    return stage.sync


async def worker(node: Node, stage: Stage, state: PeerState) -> int:
    """Compute, sum with all others, merge; until the counts, or a word of rank 0, say otherwise. Returns the last word.

    What rank 0 alone can know (seconds, evaluations) reaches the others one exchange later.
    """
    stage = state.begin(node, stage)
    rule = rule_of(stage)
    team, home, do = Team.of(node, stage, state.epoch, state.lives), stage.home, rule.work()
    planned, own = as_planned(stage, state, node.rank)
    while True:
        node.mark(stage.index, state if own is planned else None)
        team = team if own is team.stage else Team.of(node, own, state.epoch, state.lives)
        word = 0
        if node.rank == home:
            word = REASONS.index(state.word) + len(REASONS) * rule.due(state.rule_state, node.now)
        try:
            work, update = await summed(team, stage, state, do, word)
            step_s = await told(team, work) if rule.tells else ()
        except TeamBrokenError:
            stage, reason = await repaired(node, stage, state)
            team, home = Team.of(node, stage, state.epoch, state.lives), stage.home
            if reason:
                return end(node, stage, state, reason)
            planned, own = as_planned(stage, state, node.rank)
            continue
        moment = ("merge", stage.index, state.tally.version)
        due, said = divmod(int(team.word), len(REASONS))
        heard = Heard(bool(due), node.now, step_s)
        merge = partial(merged_and_planned, stage, own, state, update, team.loss, now_ns=node.now_ns, heard=heard)
        result, ahead = node.alike(team.ranks, moment, merge)
        late = keep_in_time(node, stage, state, state.params, now_ns=ahead.seen_ns)
        state.adopt(result)
        state.plan(ahead, node.rank)
        tally, planned, own = result.tally, ahead.planned, ahead.own
        reason, judge = ahead.over or REASONS[said], home
        if (
            reason and not stage.elastic and stage.topology.links(stage, node.rank)
        ):  # messages do not end everywhere at once, but stages do
            await node.all_reduce(torch.zeros(1), team.ranks, riders=1)
        if stage.elastic:
            state.redo = None
            if reason:
                stage = await regrouped(node, stage, state, reason)
                team, home, tally = Team.of(node, stage, state.epoch, state.lives), stage.home, state.tally
                planned, own = as_planned(stage, state, node.rank)
                if state.redo is not None:  # others have not come so far
                    continue
                judge = judge if judge in stage.workers else home
        node.round(stage.index, state.round, work.steps, 0, dropped=late, loss=work.loss)
        state.round += 1
        if node.rank == judge and not late and stage.judge.take(state, node.now):
            node.snapshot(state.params, counts=tally.report())
        if reason and reason != JOIN:
            return end(node, stage, state, reason)
        if node.rank == home:
            state.word = foreseen(node, stage, tally) or (JOIN if node.knocks else None)


async def summed(team: Team, stage: Stage, state: PeerState, do: Do, word: float) -> tuple[Work, Any]:
    """(a round's work, or that of the round that is done once more, and the weighted sum of everybody's); `team.loss`
    and `team.word` are sums then. Raises TeamBrokenError where a worker is lost."""
    version = state.tally.version
    if stage.messages:
        return await overlapped(team, stage, state, version, word)
    work = await do(team.node, stage, state) if state.redo is None else state.redo
    if stage.elastic:
        keep(state, work)
    team.begin(work.loss / team.size, word)
    return work, await exchanged(team, stage, state, version, stage.aggregate.clip(work.body))


async def delayed(node: Node, stage: Stage, state: PeerState) -> int:
    """Hand in the work that is done, compute the next while it is summed, merge; returns the last word.

    A word of rank 0 rides one exchange later, as the loss does. Where it is that another stage begins, the work that is
    done by then is summed as well. No piece is computed that a count of the run leaves no room for.
    """
    state.begin(node, stage)
    while True:
        pending = state.pending is not None
        node.mark(stage.index, state if stage.cut(state.pending_rest if pending else state.rest) is stage else None)
        if not pending:
            state.pending_rest = state.rest
            state.pending = await worked(node, stage, state)
            continue
        work, own = state.pending, stage.cut(state.pending_rest)
        team = Team.of(node, own)
        team.begin(work.loss / team.size, REASONS.index(state.word) if node.rank == 0 else 0)
        x = stage.aggregate.clip(work.body)
        exchange = node.spawn(exchanged(team, stage, state, state.tally.version, x))
        await node.sleep(0)  # what is encoded is encoded first
        ahead = None if state.last or spent(state.rest) else await local_work(node, stage, state)
        update = await node.join(exchange)
        late = keep_in_time(node, stage, state, state.params)
        moment, staleness = ("merge", stage.index, state.tally.version), state.tally.version - work.version
        merge = partial(merged_and_planned, stage, own, state, update, team.loss, staleness, more=1)
        result, coming = node.alike(team.ranks, moment, merge)
        state.adopt(result)
        state.pending, state.pending_rest = ahead and at_border(node, stage, state, ahead), state.rest
        state.plan(coming, node.rank)
        reason = coming.over or REASONS[int(team.word)] or ("next" if state.last else None)
        state.last = reason == "next" and stage.following and not state.last
        if reason and not state.last:  # nobody ends before the others
            await node.all_reduce(torch.zeros(1), team.ranks, riders=1)
        node.round(stage.index, state.round, work.steps, staleness, dropped=late, loss=work.loss)
        state.round += 1
        if node.rank == 0 and not late and stage.judge.take(state, node.now):
            node.snapshot(state.params, counts=state.tally.report())
        if reason and not state.last:
            return end(node, stage, state, reason)
        if node.rank == 0:
            state.word = foreseen(node, stage, state.tally)


def spent(rest: tuple[int, int] | None) -> bool:
    """Whether no round is left that anybody could take part in."""
    return rest is not None and rest[0] <= 0


def as_planned(stage: Stage, state: PeerState, rank: int) -> tuple[Stage, Stage]:
    """The stage as it is in the next round, whose H and batch the worker takes: as planned, and what is left of it."""
    planned = rule_of(stage).in_round(stage, state.rule_state, state.tally)
    own = planned.cut(state.rest)
    state.take(own, rank)
    return planned, own


async def told(team: Team, work: Work) -> tuple[float, ...]:
    """Seconds of one step of each worker. Raises TeamBrokenError where one is lost."""
    own = torch.zeros(team.stage.num_workers, dtype=torch.float64)
    own[team.node.rank] = work.step_s
    total = await team.node.all_reduce(own, team.ranks, riders=len(own), epoch=team.epoch)
    return tuple(whole(total).tolist())


def merged(stage: Stage, state: PeerState, update: Any, mean_loss: float, staleness: int = 0) -> Merged:
    """The same arithmetic on every rank, and the same as a server's; `state` stays as it is."""
    tally = stage.counted(state.tally, mean_loss, staleness)
    if tally.diverged:
        return Merged(state.params, None, state.outer_state, tally)
    moments, outer_state, params = stage.sync.step(stage, state, update, stage.trainer.rate(state.tally.samples))
    return Merged(params, moments, outer_state, tally)


def merged_and_planned(
    stage: Stage,
    own: Stage,
    state: PeerState,
    update: Any,
    mean_loss: float,
    staleness: int = 0,
    more: int = 0,
    now_ns: int = 0,
    heard: Heard = NOTHING_HEARD,
) -> tuple[Merged, Ahead]:
    """A round's work, which was `own` of the stage, is merged, and the next round planned, or the one so many later."""
    result = merged(own, state, update, mean_loss, staleness)
    rule = rule_of(stage)
    rule_state = rule.hear(stage, state.rule_state, result.tally, heard)
    planned = rule.in_round(stage, rule_state, result.tally)
    rest = planned.rest(result.tally.steps, result.tally.samples, more)
    return result, Ahead(stage.judge.over(result.tally), rest, planned, planned.cut(rest), rule_state, now_ns)


def end(node: Node, stage: Stage, state: PeerState, reason: str) -> int:
    """The stage ended with this merge; returns the last word."""
    state.word = None
    return end_ridden(node, stage, state, reason, state.formed_ns if stage.elastic else node.now_ns)

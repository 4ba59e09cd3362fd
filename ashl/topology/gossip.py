"""Gossip: every worker holds a model of its own and exchanges it with its neighbours on a graph.

Rule (D-PSGD): x_i ← Σ_j w_ij·x_j + Δ_i, with Δ_i what the worker's own optimizer did between two
exchanges. Whom to hear from and what to make of it is the sync mode's. What is evaluated is the
mean of all models; momentum stays local.

Synchronous modes (`RoundRule`) go round by round, each worker as soon as it has heard from its
sources of that round: no server, no barrier. Counts are functions of the round, so that all ranks
count alike. What rank 0 alone can know (seconds, evaluations, that a loss is no number) rides on
the messages: its verdict holds after the round by which it has reached everyone, which rank 0 works
out from the graph.

Where messages may be late (`RoundRule.lag`), a sender keeps its messages of the last `lag` rounds.
When all workers resume from a checkpoint at the same round, each sends them again, so that no
receiver misses one.

Asynchronous modes (`RoamingRule`) have a loop of their own, and the coordinator of
`ashl.topology.coordinator`.

No mode goes on without a failed worker: such a run ends, and can be resumed from a checkpoint.

Sources: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017; sender-based message logging as in Johnson and Zwaenepoel, FTCS 1987.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.progress import RUN_START, Progress, ProgressMark, RunProgress
from ashl.stage.stage import GO, Loop, Network, Rule, Stage, Topology
from ashl.topology.coordinator import (
    CheckpointKind,
    CoordinatorState,
    RoamingState,
    coordinator,
    gather_workers,
    resume_worker,
)
from ashl.topology.ending import REASONS, InTime, end_piggybacked, keep_within_budget, local_stop
from ashl.topology.graph import Edge, Round, Sources, depths, edges_of, rounds_of, sources_of
from ashl.topology.local_work import WorkerState, local_work

DECISIONS = (*REASONS, "diverged")
Outgoing = dict[
    int, tuple[Any, tuple[float, ...]]
]  # rank → the body and the numbers that it is sent


class GossipHeader(NamedTuple):
    """What every message carries about the run so far."""

    loss: float  # mean of the sender's loss and of the losses it has received
    not_finite: float = 0  # 1 + the rank whose loss is no number; 0 = none
    decision: float = 0  # of rank 0, as a place in VERDICTS
    last: float = 0  # the round after which the verdict holds
    snapshot_after: float = -1  # the round after which all workers hand in their models


NO_HEADER = GossipHeader(math.nan)


class GossipRule(Rule, contract=True):
    """What both kinds of gossip say."""

    columns: ClassVar[bool] = (
        False  # whether weights are those of push-sum, whose columns add up to 1
    )

    def check(self, rounds: Sequence[Round]) -> None:
        """Raises UsageError where a graph is wrong for it."""


class RoundRule(GossipRule, contract=True):
    """What gossip in rounds asks its sync mode. The defaults: everybody hears from its neighbours,
    all in time.

    The rule's own state of this stage is `state.rule_state`.
    """

    in_rounds: ClassVar[bool] = True
    early: ClassVar[bool] = False  # whether models leave before the local work
    lag: ClassVar[int] = 0  # rounds that messages may be late
    suspect: ClassVar[str] = ""  # what else may be wrong where a run diverges

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Any:
        """The rule's own state when a stage begins."""
        return None

    def sources(self, stage: Stage, rank: int, k: int) -> tuple[int, ...]:
        """Whom a rank hears from in round k."""
        return graph_of(stage).round(stage, k).sources[rank]

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        """What is sent in round k; Δ is None where models leave early."""
        raise NotImplementedError

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        """The messages of round k − lag and Δ become the model."""
        raise NotImplementedError

    def settle(self, state: RoundState, heard: Mapping[int, Message]) -> None:
        """Where messages may be late: take in the last ones, at the end of a stage."""


class RoamingRule(GossipRule, contract=True):
    """A sync mode of gossip in which workers go at their own pace."""

    coordinated: ClassVar[bool] = True
    checkpoint_kind: ClassVar[CheckpointKind] = ""  # how real processes come to a checkpoint

    async def worker(self, ctx: RankContext, stage: Stage, state: RoamingState) -> int:
        """The loop of a worker; returns the last word."""
        raise NotImplementedError

    def resume_state(self, state: RoamingState) -> None:
        """A worker goes on from such a checkpoint: nothing is on its way, and what is later is to
        come again.
        """

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...] | None:
        """Whom a worker may ask for an answer; None where it just hears from its neighbours."""
        return None


@option
class Gossip(Topology):
    """Workers talk to their neighbours on a graph, and to nobody else."""

    policy_type: ClassVar[type[Rule]] = GossipRule
    supports: ClassVar[frozenset[str]] = (
        frozenset()
    )  # whole models travel, and no server adds up updates
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
        rounds = stage.cached(rounds_in)
        return rounds[k % len(rounds)]

    def edges(self, stage: Stage) -> tuple[Edge, ...]:
        """The edges of all rounds, whatever their direction."""
        return stage.cached(edges_in)

    def neighbours(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom an edge connects this worker with, in whichever round and direction."""
        return stage.cached(neighbours_in)[rank]

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The neighbours of all rounds, and the coordinator."""
        others = stage.workers if stage.lead_rank == stage.server else ()
        if rank == stage.server:
            return others
        return self.neighbours(stage, rank) + ((stage.server,) if others else ())

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What one exchange takes, uncontended: the slowest transfer from a neighbour, or there and
        back.
        """
        peers = stage.sync.peers(stage, rank) if isinstance(stage.sync, RoamingRule) else None
        near = self.neighbours(stage, rank) if peers is None else peers
        ways, dense = 1 + (peers is not None), stage.trainer.dense_bytes
        return ways * max((network.transfer_ns(peer, rank, dense) for peer in near), default=0)

    def begin(self, ctx: RankContext, stage: Stage) -> CoordinatorState | RoamingState | RoundState:
        if ctx.rank == stage.server:
            return CoordinatorState(Progress(stage.num_workers))
        if stage.lead_rank == stage.server:
            return RoamingState(*stage.trainer.init())
        n = stage.num_workers
        return RoundState(
            *stage.trainer.init(),
            progress=Progress(n) if ctx.rank == stage.lead_rank else RunProgress(n),
        )

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        assert kept is not None, "workers come to a run of gossip from a checkpoint alone"
        index, state = kept
        stage = stages[index]
        if isinstance(state, RoundState):
            for k, sent in state.in_flight:
                await send(ctx, stage, k, sent)
        elif ctx.rank == stage.server:
            await gather_workers(ctx, stage, state)
        else:
            await resume_worker(ctx, stage, state)
            assert isinstance(stage.sync, RoamingRule)
            stage.sync.resume_state(state)
        return kept

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
    return graph_of(stage).rounds(stage.sync, stage.num_workers, stage.seed)


def edges_in(stage: Stage) -> tuple[Edge, ...]:
    topology = graph_of(stage)
    return edges_of(topology.graph, topology.degree, stage.num_workers, stage.seed)


def neighbours_in(stage: Stage) -> Sources:
    return sources_of(stage.cached(edges_in), stage.num_workers)


@dataclass
class RoundState(WorkerState):
    """A worker that goes round by round, and counts as all others do; rank 0 keeps the books by
    worker, too.
    """

    progress: RunProgress = field(default_factory=lambda: RunProgress(0))
    evaluated: ProgressMark = RUN_START  # the last evaluation
    in_time: InTime | None = None  # once a round has come too late
    header: GossipHeader = NO_HEADER
    k: int = 0  # rounds of this stage so far
    in_flight: tuple[
        tuple[int, Outgoing], ...
    ] = ()  # what it said in the last of them, where messages may be late

    def enter(self, stage: Stage, rank: int, now_s: float = 0.0) -> None:
        again = self.entered == stage.index
        super().enter(stage, rank)
        if not again:
            self.progress.begin(now_s)
            self.k, self.header, self.in_flight = 0, NO_HEADER, ()
            self.rule_state = rule_in(stage).begin(stage, self, rank)


async def worker(ctx: RankContext, stage: Stage, state: RoundState) -> int:
    """Work, tell, hear, merge; round by round, until the counts or a verdict of rank 0 say
    otherwise. Returns the last word.
    """
    state.enter(stage, ctx.rank, ctx.now)
    rule, rank = rule_in(stage), ctx.rank
    while True:
        own = stage.truncate_last_round(state.rest)
        ctx.safe_point(stage.index, state if own is stage else None)
        k, params = state.k, state.params
        if rule.early:
            await post(
                ctx, stage, state, k, await rule.outgoing(ctx, stage, state, k, None), rule.lag
            )
        work = await local_work(ctx, stage, state)
        if not rule.early:
            await post(
                ctx, stage, state, k, await rule.outgoing(ctx, stage, state, k, work.body), rule.lag
            )
        heard = await receive_models(ctx, stage, k - rule.lag)
        rule.merge(stage, state, rank, k, work.body, heard)
        merge_headers(state, rank, work.loss, heard)
        late = keep_within_budget(ctx, stage, state, params)
        count_round(own, state)
        state.plan_round(stage, rank)
        asked = state.header.snapshot_after == k  # before rank 0 asks for the next one
        if rank == stage.lead_rank:
            look_ahead(ctx, stage, state, k)
        due = stage.limits.eval_every_s is None and stage.stop_criteria.take_evaluation(
            state, ctx.now
        )
        if (due or asked) and not late:
            counts = (
                state.progress.report()
                if rank == stage.lead_rank and isinstance(state.progress, Progress)
                else None
            )
            ctx.snapshot(state.params, tick=state.progress.version, counts=counts)
        signal = await end_signal(ctx, stage, state)
        ctx.record_round(
            stage.index, state.round, work.steps, rule.lag, dropped=late, loss=work.loss
        )
        state.round += 1
        if signal != GO:
            return signal
        state.k += 1


async def end_signal(ctx: RankContext, stage: Stage, state: RoundState) -> int:
    """The last word where the stage ends with this round, else GO."""
    reason = stop_reason(stage, state)
    if not reason:
        return GO
    for late in range(max(0, state.k + 1 - rule_in(stage).lag), state.k + 1):
        rule_in(stage).settle(state, await receive_models(ctx, stage, late))
    ctx.safe_point(stage.index, None)
    moment = await ctx.all_reduce(torch.tensor([ctx.now_ns]), stage.workers, "max", piggybacked=1)
    return end_piggybacked(ctx, stage, state, reason, int(moment))


def stop_reason(stage: Stage, state: RoundState) -> str | None:
    """Why the stage is over after this round."""
    if (
        (reason := stage.stop_criteria.reached_limit(state.progress))
        or not state.header.decision
        or state.k < state.header.last
    ):
        return reason
    return DECISIONS[int(state.header.decision)]


async def post(
    ctx: RankContext, stage: Stage, state: RoundState, k: int, messages: Outgoing, lag: int
) -> None:
    """Send the messages of round k, each with the header; where messages may be late, keep those of
    the last rounds.
    """
    sent: Outgoing = {
        rank: (body, (*state.header, *numbers)) for rank, (body, numbers) in messages.items()
    }
    if lag:
        state.in_flight = (*state.in_flight, (k, sent))[-lag:]
    await send(ctx, stage, k, sent)


async def send(ctx: RankContext, stage: Stage, k: int, messages: Outgoing) -> None:
    for rank, (body, meta) in messages.items():
        await ctx.send(rank, stage.tag("gossip", k), body, meta)


async def receive_models(ctx: RankContext, stage: Stage, k: int) -> dict[int, Message]:
    """The messages of round k, in rank order."""
    sources = rule_in(stage).sources(stage, ctx.rank, k) if k >= 0 else ()
    return {rank: await ctx.recv(stage.tag("gossip", k), src=rank) for rank in sources}


def merge_headers(state: RoundState, rank: int, loss: float, heard: Mapping[int, Message]) -> None:
    """Merge the header of this rank with its loss and the headers it has received."""
    headers = [
        GossipHeader(*message.meta[: len(GossipHeader._fields)]) for message in heard.values()
    ]
    known = [state.header, *headers]
    losses = [
        value for value in (loss, *(header.loss for header in headers)) if math.isfinite(value)
    ]
    decision, last = max((header.decision, header.last) for header in known)
    state.header = GossipHeader(
        loss=sum(losses) / len(losses) if losses else math.nan,
        not_finite=max(
            0 if math.isfinite(loss) else rank + 1, *(header.not_finite for header in known)
        ),
        decision=decision,
        last=last,
        snapshot_after=max(header.snapshot_after for header in known),
    )


def count_round(stage: Stage, state: RoundState) -> None:
    """Count one more merge of every worker."""
    progress = state.progress
    if isinstance(progress, Progress):
        progress.observe_all(rule_in(stage).lag, state.header.loss, "the workers' loss", commits=1)
        progress.commit_all(stage.round_steps, stage.round_totals[1])
        progress.merge()
    else:
        progress.advance(*stage.round_totals, stage.num_workers)
        progress.version += 1
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples


def look_ahead(ctx: RankContext, stage: Stage, state: RoundState, k: int) -> None:
    """Rank 0 alone: what all others have to know, and the round after which they do."""
    progress, header = state.progress, state.header
    if header.not_finite:
        why = (
            f"the loss of worker {int(header.not_finite) - 1} became no number near step"
            f" {progress.steps}"
        )
        progress.diverged = why + rule_in(stage).suspect
    reason = "diverged" if progress.diverged else local_stop(ctx, stage, progress)
    timed = header.snapshot_after <= k and stage.limits.eval_every_s is not None
    snapshot = timed and stage.stop_criteria.take_evaluation(state, ctx.now)
    if (reason and not header.decision) or snapshot:
        known = k + rounds_to_all(stage, k + 1)
        if reason and not header.decision:
            header = header._replace(decision=DECISIONS.index(reason), last=known)
        state.header = header._replace(snapshot_after=known) if snapshot else header


def rounds_to_all(stage: Stage, first: int) -> int:
    """How many rounds it takes what rank 0 sends from round `first` on to reach everyone."""
    rule = rule_in(stage)
    if type(rule).sources is RoundRule.sources and len(stage.cached(rounds_in)) == 1:
        return (1 + rule.lag) * max(depths(graph_of(stage).round(stage, 0).targets))
    k, since = (
        first - rule.lag,
        {stage.lead_rank: first},
    )  # the round from which on a rank passes it on
    unaware = [rank for rank in stage.workers if rank != stage.lead_rank]
    while unaware:
        knew = {rank for rank, start in since.items() if start <= k}
        reached = [
            rank for rank in unaware if k >= 0 and not knew.isdisjoint(rule.sources(stage, rank, k))
        ]
        since |= dict.fromkeys(reached, k + rule.lag + 1)
        unaware = [rank for rank in unaware if rank not in since]
        k += 1
    return k + rule.lag - first

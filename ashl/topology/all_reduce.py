"""All-reduce: every worker holds the model, and each merge is one sum over all of them.

Rule: one outer step on Σ_j c_j·Δ_j, or one optimizer step on Σ_j c_j·g_j, the same on every worker.
A ring moves 2(n − 1)/n of the model each way. Nobody can be late: a merge waits for the slowest.
Where workers are lost or come it goes on as `ashl.topology.all_reduce` says. By which `algorithm` a
sum travels is `ashl.cluster.all_reduce_rounds`'s to say.

Limit: all algorithms give the same model, bit for bit, where sums are exact.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch

from ashl.cluster.all_reduce_rounds import Algorithm
from ashl.compression.contract import Collective
from ashl.errors import AshlError
from ashl.learn.pieces import Pieces
from ashl.option import option
from ashl.overlap.streaming import Fragmented
from ashl.runtime.effects import PEER_FAILED, Formed, Message, Tag
from ashl.runtime.plain_state import join_tensors, split_tensors
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import concatenate, slice_vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.process_group import GroupBrokenError, ProcessGroup, check_complete
from ashl.stage.progress import FAILURE, RUN_START, Progress, ProgressMark
from ashl.stage.stage import (
    CODEC,
    DELAY,
    FAULT_TOLERANT,
    GO,
    NEXT,
    OUTER,
    OVERLAP,
    STATISTICS,
    STOP,
    WEIGHTS,
    Loop,
    Network,
    Rule,
    Stage,
    Topology,
)
from ashl.topology.ending import (
    JOIN,
    REASONS,
    InTime,
    drop_reason,
    end_piggybacked,
    end_time_ns,
    keep_within_budget,
    local_stop,
)
from ashl.topology.estimate import next_batch
from ashl.topology.exchange import Coding, exchange_update
from ashl.topology.fragments import codec_states_of, finish_piece, fragment_at, take_local_steps
from ashl.topology.local_work import (
    Work,
    WorkerState,
    at_round_boundary,
    exchangeable_work,
    local_work,
)

Do = Callable[[RankContext, Stage, WorkerState], Awaitable[Work]]


class RoundReport(NamedTuple):
    """What a rule hears of a round, equal on all workers."""

    due: bool  # as the lead rank said
    now_s: float  # about when the merge was
    step_s: tuple[
        float, ...
    ] = ()  # seconds of one step of each worker, where the rule tells; 0 = failed


class StepRule(Rule, contract=True):
    """What an all-reduce asks its sync mode: how many steps lie between two sums, and of what. All
    go on together.
    """

    in_rounds: ClassVar[bool] = True

    def work(self) -> Do:
        """What a worker does between two sums, and hands in."""
        return local_work

    tells: ClassVar[bool] = (
        False  # whether every worker hears what a step took each of them, by a small sum of its own
    )

    def begin(self, stage: Stage, progress: Progress) -> Any:
        """The rule's own state when the stage begins, equal on all workers."""
        return None

    def due(self, state: Any, now_s: float) -> bool:
        """Return True if it is time for what `hear` is told with the next sum; asked at the lead
        rank alone.
        """
        return False

    def observe_round(
        self, stage: Stage, state: Any, progress: Progress, report: RoundReport
    ) -> Any:
        """The rule's own state after a merge; `state` stays as it is."""
        return state

    def in_round(self, stage: Stage, state: Any, progress: Progress) -> Stage:
        """The stage as it is in the next round, where H or batches follow what has been counted and
        heard.
        """
        return stage

    @property
    def changes(self) -> bool:
        """Return True if its rounds differ from what is planned."""
        return type(self).in_round is not StepRule.in_round


NO_REPORT = RoundReport(False, 0.0)


@option
class AllReduce(Topology):
    """No server: the workers' bodies are summed in rank order, or gathered where they do not add up
    (see `topology.exchange`), and everybody keeps the sum.
    """

    policy_type: ClassVar[type[Rule]] = StepRule
    supports: ClassVar[frozenset[str]] = frozenset(
        {CODEC, WEIGHTS, STATISTICS, OUTER, OVERLAP, DELAY, FAULT_TOLERANT}
    )
    algorithm: Algorithm | None = (
        None  # so that an option of one's own which extends this may say nothing
    )

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Collectives only, and no point-to-point links, unless the codec's own protocol needs
        some; to all, where workers may be lost, as it goes another way then.
        """
        peers = stage.link.peers(rank, stage.num_workers)
        return (
            self.notified_on_failure(stage, rank)
            if stage.elastic and stage.link.has_own_messages
            else peers
        )

    def notified_on_failure(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """All others: the sum lacks what this one would add to it."""
        return tuple(peer for peer in range(stage.num_workers) if peer != rank)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a merge takes: a sum on its way, or bodies that go round once, all as long as the
        longest.
        """
        if stage.fragments:
            parts = (stage.fragment(k) for k in range(len(stage.fragments)))
            return max(self.exchange_ns(part, network, rank) for part in parts)
        if stage.link.adds_up:
            nbytes = stage.codec.encoded_nbytes(stage.worker(rank).compression_ratio, stage.link.d)
            return network.all_reduce_ns(stage.workers, nbytes, 0)
        return network.all_gather_ns(
            stage.workers, stage.num_workers * stage.cached(longest_payload), 0
        )

    def begin(self, ctx: RankContext, stage: Stage) -> PeerState:
        n = stage.num_workers
        return PeerState(
            *stage.trainer.init(),
            progress=ctx.compute_once(stage.workers, "progress", lambda: Progress(n)),
        )

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, PeerState] | None:
        return await join(ctx, stages, PeerState(*stages[0].trainer.init()))

    def role(self, stage: Stage, rank: int) -> Loop:
        if stage.delayed is not None:
            return run_streaming if stage.fragments else run_delayed
        return run_pipelined if stage.overlap.overlaps_next_forward else worker


def longest_payload(stage: Stage) -> int:
    shares = {worker.compression_ratio for worker in stage.plan.workers}
    return max(stage.codec.encoded_nbytes(share, stage.link.d) for share in shares)


@dataclass
class PeerState(WorkerState):
    """A worker that also counts, alike on every rank. What all have alike is replaced and never
    changed, so that in virtual time all may hold the same one.
    """

    progress: Progress = field(default_factory=lambda: Progress(0))
    evaluated: ProgressMark = RUN_START  # at rank 0: the last evaluation
    in_time: InTime | None = None  # once a merge has come too late
    signal: str | None = None  # what rank 0 will tell the others with the next exchange
    outer_state: Any = None  # the outer optimizer's moments
    epoch: int = 0  # of the team
    incarnations: tuple[int, ...] = ()  # of its members, where one has been lost before
    formed_ns: int = 0  # when all had asked for that team
    kept: tuple[
        PeerState, ...
    ] = ()  # where workers may be lost: as it was before the last two exchanges
    redo: Work | None = None  # what is to be exchanged once more

    def begin(self, ctx: RankContext, stage: Stage) -> Stage:
        """A stage begins, unless it goes on from a checkpoint; returns it as it is among those who
        are there.
        """
        stage = stage.restricted_to(self.progress.gone)
        if self.entered != stage.index:
            opened = partial(begin_step, self.progress, ctx.now)
            self.progress = ctx.compute_once(stage.workers, ("begin", stage.index), opened)
            if stage.resets_outer:
                self.outer_state = None
            self.kept = ()
            self.enter(stage, ctx.rank)
            self.rule_state = rule_of(stage).begin(stage, self.progress)
        return stage

    def apply_merge(self, result: Merged) -> None:
        self.params, self.outer_state, self.progress = (
            result.params,
            result.outer_state,
            result.progress,
        )
        self.version, self.steps, self.samples = (
            result.progress.version,
            result.progress.steps,
            result.progress.samples,
        )
        if result.moments is not None:
            self.moments = result.moments

    def plan(self, ahead: Ahead, rank: int) -> None:
        self.rest, self.rule_state = ahead.rest, ahead.rule_state
        self.set_round(ahead.own, rank)

    def set_round(self, own: Stage, rank: int) -> None:
        """The next round's H and batch."""
        self.local_steps, self.batch = (
            own.plan.workers[rank].local_steps,
            own.plan.workers[rank].batch,
        )


class Merged(NamedTuple):
    """What a merge makes, alike on all ranks; moments where the optimizer steps on the sum, else
    None.
    """

    params: Any
    moments: Any
    outer_state: Any
    progress: Progress


class Ahead(NamedTuple):
    """What comes after a merge, alike on all ranks."""

    over: str | None  # why the run ends, as the counts say
    rest: tuple[int, int] | None  # of the rounds, as `Stage.rest` says
    planned: Stage  # the stage as it is in the next round
    own: Stage  # ... and as much of that as is left
    rule_state: Any = None  # the rule's own
    seen_ns: int = 0  # when a rank saw the merge first; who stands still sees it later


def begin_step(progress: Progress, now_s: float) -> Progress:
    progress = progress.copy()
    progress.begin(now_s)
    return progress


def rule_of(stage: Stage) -> StepRule:
    """The stage's sync mode, as an all-reduce asks it."""
    assert isinstance(stage.sync, StepRule)
    return stage.sync


async def worker(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Compute, sum with all others, merge; until the counts, or a word of rank 0, say otherwise.
    Returns the last word.

    What rank 0 alone can know (seconds, evaluations) reaches the others one exchange later.
    """
    stage = state.begin(ctx, stage)
    rule = rule_of(stage)
    team, home, do = (
        ProcessGroup.of(ctx, stage, state.epoch, state.incarnations),
        stage.lead_rank,
        rule.work(),
    )
    planned, own = next_round_stage(stage, state, ctx.rank)
    while True:
        ctx.safe_point(stage.index, state if own is planned else None)
        team = (
            team
            if own is team.stage
            else ProcessGroup.of(ctx, own, state.epoch, state.incarnations)
        )
        signal = 0
        if ctx.rank == home:
            signal = REASONS.index(state.signal) + len(REASONS) * rule.due(
                state.rule_state, ctx.now
            )
        try:
            work, update = await sum_update(team, stage, state, do, signal)
            step_s = await exchange_step_times(team, work) if rule.tells else ()
        except GroupBrokenError:
            stage, reason = await repair_round(ctx, stage, state)
            team, home = (
                ProcessGroup.of(ctx, stage, state.epoch, state.incarnations),
                stage.lead_rank,
            )
            if reason:
                return end(ctx, stage, state, reason)
            planned, own = next_round_stage(stage, state, ctx.rank)
            continue
        moment = ("merge", stage.index, state.progress.version)
        due, said = divmod(int(team.signal), len(REASONS))
        report = RoundReport(bool(due), ctx.now, step_s)
        merge = partial(
            merge_and_plan, stage, own, state, update, team.loss, now_ns=ctx.now_ns, report=report
        )
        result, ahead = ctx.compute_once(team.ranks, moment, merge)
        late = keep_within_budget(ctx, stage, state, state.params, now_ns=ahead.seen_ns)
        state.apply_merge(result)
        state.plan(ahead, ctx.rank)
        progress, planned, own = result.progress, ahead.planned, ahead.own
        reason, judge = ahead.over or REASONS[said], home
        if (
            reason and not stage.elastic and stage.topology.links(stage, ctx.rank)
        ):  # messages do not end everywhere at once, but stages do
            await ctx.all_reduce(torch.zeros(1), team.ranks, piggybacked=1)
        if stage.elastic:
            state.redo = None
            if reason:
                stage = await regroup_workers(ctx, stage, state, reason)
                team, home, progress = (
                    ProcessGroup.of(ctx, stage, state.epoch, state.incarnations),
                    stage.lead_rank,
                    state.progress,
                )
                planned, own = next_round_stage(stage, state, ctx.rank)
                if state.redo is not None:  # others have not come so far
                    continue
                judge = judge if judge in stage.workers else home
        ctx.record_round(stage.index, state.round, work.steps, 0, dropped=late, loss=work.loss)
        state.round += 1
        if ctx.rank == judge and not late and stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=progress.report())
        if reason and reason != JOIN:
            return end(ctx, stage, state, reason)
        if ctx.rank == home:
            state.signal = local_stop(ctx, stage, progress) or (JOIN if ctx.join_pending else None)


async def sum_update(
    team: ProcessGroup, stage: Stage, state: PeerState, do: Do, signal: float
) -> tuple[Work, Any]:
    """(a round's work, or that of the round that is done once more, and the weighted sum of
    everybody's); `team.loss` and `team.word` are sums then. Raises TeamBrokenError where a worker
    is lost.
    """
    version = state.progress.version
    if stage.messages:
        return await sum_overlapped(team, stage, state, version, signal)
    work = await do(team.ctx, stage, state) if state.redo is None else state.redo
    if stage.elastic:
        keep(state, work)
    team.begin(work.loss / team.size, signal)
    return work, await exchange_update(
        team, stage, state, state.progress, version, stage.aggregate.clip(work.body)
    )


async def run_delayed(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Hand in the work that is done, compute the next while it is summed, merge; returns the last
    word.

    A word of rank 0 rides one exchange later, as the loss does. Where it is that another stage
    begins, the work that is done by then is summed as well. No piece is computed that a count of
    the run leaves no room for.
    """
    state.begin(ctx, stage)
    while True:
        pending = state.pending is not None
        ctx.safe_point(
            stage.index,
            (
                state
                if stage.truncate_last_round(state.pending_rest if pending else state.rest) is stage
                else None
            ),
        )
        if not pending:
            state.pending_rest = state.rest
            state.pending = await exchangeable_work(ctx, stage, state)
            continue
        work, own = state.pending, stage.truncate_last_round(state.pending_rest)
        team = ProcessGroup.of(ctx, own)
        team.begin(work.loss / team.size, REASONS.index(state.signal) if ctx.rank == 0 else 0)
        x = stage.aggregate.clip(work.body)
        exchange = ctx.spawn(
            exchange_update(team, stage, state, state.progress, state.progress.version, x)
        )
        await ctx.sleep(0)  # what is encoded is encoded first
        ahead = (
            None
            if state.last or no_rounds_left(state.rest)
            else await local_work(ctx, stage, state)
        )
        update = await ctx.join(exchange)
        late = keep_within_budget(ctx, stage, state, state.params)
        moment, staleness = (
            ("merge", stage.index, state.progress.version),
            state.progress.version - work.version,
        )
        merge = partial(merge_and_plan, stage, own, state, update, team.loss, staleness, more=1)
        result, coming = ctx.compute_once(team.ranks, moment, merge)
        state.apply_merge(result)
        state.pending, state.pending_rest = (
            ahead and at_round_boundary(ctx, stage, state, ahead),
            state.rest,
        )
        state.plan(coming, ctx.rank)
        reason = coming.over or REASONS[int(team.signal)] or ("next" if state.last else None)
        state.last = reason == "next" and stage.following and not state.last
        if reason and not state.last:  # nobody ends before the others
            await ctx.all_reduce(torch.zeros(1), team.ranks, piggybacked=1)
        ctx.record_round(
            stage.index, state.round, work.steps, staleness, dropped=late, loss=work.loss
        )
        state.round += 1
        if ctx.rank == 0 and not late and stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=state.progress.report())
        if reason and not state.last:
            return end(ctx, stage, state, reason)
        if ctx.rank == 0:
            state.signal = local_stop(ctx, stage, state.progress)


def no_rounds_left(rest: tuple[int, int] | None) -> bool:
    """Whether no round is left that anybody could take part in."""
    return rest is not None and rest[0] <= 0


def next_round_stage(stage: Stage, state: PeerState, rank: int) -> tuple[Stage, Stage]:
    """The stage as it is in the next round, whose H and batch the worker takes: as planned, and
    what is left of it.
    """
    planned = rule_of(stage).in_round(stage, state.rule_state, state.progress)
    own = planned.truncate_last_round(state.rest)
    state.set_round(own, rank)
    return planned, own


async def exchange_step_times(team: ProcessGroup, work: Work) -> tuple[float, ...]:
    """Seconds of one step of each worker. Raises TeamBrokenError where one is lost."""
    own = torch.zeros(team.stage.num_workers, dtype=torch.float64)
    own[team.ctx.rank] = work.step_s
    total = await team.ctx.all_reduce(own, team.ranks, piggybacked=len(own), epoch=team.epoch)
    return tuple(check_complete(total).tolist())


def compute_merge(
    stage: Stage, state: PeerState, update: Any, mean_loss: float, staleness: int = 0
) -> Merged:
    """The same arithmetic on every rank, and the same as a server's; `state` stays as it is."""
    progress = stage.count_merge(state.progress, mean_loss, staleness)
    if progress.diverged:
        return Merged(state.params, None, state.outer_state, progress)
    moments, outer_state, params = stage.sync.step(
        stage, state, update, stage.trainer.rate(state.progress.samples)
    )
    return Merged(params, moments, outer_state, progress)


def merge_and_plan(
    stage: Stage,
    own: Stage,
    state: PeerState,
    update: Any,
    mean_loss: float,
    staleness: int = 0,
    more: int = 0,
    now_ns: int = 0,
    report: RoundReport = NO_REPORT,
) -> tuple[Merged, Ahead]:
    """A round's work, which was `own` of the stage, is merged, and the next round planned, or the
    one so many later.
    """
    result = compute_merge(own, state, update, mean_loss, staleness)
    rule = rule_of(stage)
    rule_state = rule.observe_round(stage, state.rule_state, result.progress, report)
    planned = rule.in_round(stage, rule_state, result.progress)
    rest = planned.remaining_rounds(result.progress.steps, result.progress.samples, more)
    return result, Ahead(
        stage.stop_criteria.end_reason(result.progress),
        rest,
        planned,
        planned.truncate_last_round(rest),
        rule_state,
        now_ns,
    )


def end(ctx: RankContext, stage: Stage, state: PeerState, reason: str) -> int:
    """The stage ended with this merge; returns the last word."""
    state.signal = None
    return end_piggybacked(
        ctx, stage, state, reason, state.formed_ns if stage.elastic else ctx.now_ns
    )


# A model that comes back group by group, beneath the next forward pass  Steps whose sums go on
# during the next forward pass, which waits for the model layer group by layer group.  Rule: message
# k of the gradient is summed as `overlap` says. Once the sum of a group is in, the optimizer steps
# on that group, and the forward pass may come to it. The bits are those of a sum and a step in one
# piece.  With the group that forward comes to first ride the losses and rank 0's word: so before a
# step begins everybody knows whether the run goes on, as without overlap. A model is handed to the
# evaluator once all of its groups are in, and so a target that it reaches ends the run one step
# later. At the end of a stage, and for a checkpoint, nothing is begun before all is in.  Source:
# Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019;
# Zhang et
# al., "DeAR", ICDCS 2023. What goes when is `ashl.overlap`'s to say.


async def run_pipelined(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """One step after the other; returns the last word."""
    state.begin(ctx, stage)
    team, exchange = ProcessGroup.of(ctx, stage), None
    groups = [(stage.tag("group", k), message) for k, message in enumerate(stage.messages)]
    while True:
        if exchange is not None and ctx.safe_point_wanted:
            await flush_exchange(ctx, stage, exchange)
            exchange = None
        if exchange is None:
            ctx.safe_point(
                stage.index, state if stage.truncate_last_round(state.rest) is stage else None
            )
            for tag, message in groups:
                await ctx.send(
                    ctx.rank, tag, slice_vector(state.params, message.start, message.stop)
                )
        exchange = ctx.spawn(exchange_by_group(team, stage, state))
        needs = tuple((message.needed, tag) for tag, message in reversed(groups))
        loss = await ctx.compute(
            gradient_work(ctx, stage, state), state.batch, parts=stage.ready, needs=needs
        )
        team.begin(loss / team.size, REASONS.index(state.signal) if ctx.rank == 0 else 0)
        await ctx.send(ctx.rank, stage.tag("loss"))
        await ctx.recv(stage.tag("counted"))
        progress = state.progress
        reason = stage.stop_criteria.end_reason(progress) or REASONS[int(team.signal)]
        if reason:
            await flush_exchange(ctx, stage, exchange)
        ctx.record_round(
            stage.index, state.round, 1, 0, dropped=state.in_time is not None, loss=loss
        )
        state.round += 1
        state.signal = local_stop(ctx, stage, progress) if ctx.rank == 0 and not reason else None
        if reason:
            return end_piggybacked(ctx, stage, state, reason, ctx.now_ns)
        state.plan_round(stage, ctx.rank)


def gradient_work(ctx: RankContext, stage: Stage, state: PeerState) -> Callable[..., float]:
    """The work of one step, which hands out the gradient's slices and takes the model's."""
    step, span = next_batch(state)

    def work(hand_out: Callable[[int, Any], None], take: Callable[[int], Any]) -> float:
        pieces = Pieces(stage.slices[::-1], take)
        return stage.trainer.gradient_in_parts(pieces, ctx.rank, step, span, stage.slices, hand_out)

    return work


async def flush_exchange(ctx: RankContext, stage: Stage, exchange: Any) -> None:
    """Everything is in, and the model is no longer on its way to a forward pass."""
    if await ctx.join(exchange):
        for k in range(len(stage.messages)):
            await ctx.recv(stage.tag("group", k))


async def exchange_by_group(team: ProcessGroup, stage: Stage, state: PeerState) -> bool:
    """Sum the gradient of one step, and make of it the model, group by group, for the next forward
    pass; returns whether there is one. Once the first group is in, `team.loss` and `team.word` are
    sums, and `state.progress` counts the step.
    """
    ctx, version = team.ctx, state.progress.version
    sums = await (begin_half_sums if stage.overlap.reduce_scatter_all_gather else begin_slice_sums)(
        team, stage
    )
    before, params, moments, made = state.progress, state.params, state.moments, list[Any]()
    rate = stage.trainer.rate(before.samples)
    for k in reversed(range(len(stage.messages))):
        message = stage.messages[k]
        total = slice_vector(
            concatenate([await ctx.join(task) for task in sums[k]]), 0, message.stop - message.start
        )
        if k == len(stage.messages) - 1:
            count = partial(stage.count_merge, before, team.loss)
            state.progress = ctx.compute_once(team.ranks, ("count", stage.index, version), count)
            progress = state.progress
            state.version, state.steps, state.samples = (
                progress.version,
                progress.steps,
                progress.samples,
            )
            await ctx.send(ctx.rank, stage.tag("counted"))
        if not state.progress.diverged:
            where, exact = (message.start, message.stop), stage.link.traits.lossless
            step = partial(stage.trainer.apply_slice, params, moments, *where, total, rate, exact)
            made.append(ctx.compute_once(team.ranks, ("group", stage.index, version, k), step))
            await ctx.send(ctx.rank, stage.tag("group", k), made[-1][1])
    late = keep_within_budget(ctx, stage, state, params, before)
    if made:
        merge_whole = partial(stage.trainer.joined, made)
        state.moments, state.params = ctx.compute_once(
            team.ranks, ("model", stage.index, version), merge_whole
        )
    if ctx.rank == 0 and not late and stage.stop_criteria.take_evaluation(state, ctx.now):
        ctx.snapshot(state.params, counts=state.progress.report())
    return bool(made)


async def begin_sums(
    team: ProcessGroup, stage: Stage, post: Callable[[int, Any, bool], list[Coroutine]]
) -> list[list[Any]]:
    """The tasks that sum each part of the gradient, begun as it is ready, alike in order on all
    ranks.
    """
    ctx, tasks, last = team.ctx, list[list[Any]](), len(stage.messages) - 1
    for k in range(last + 1):
        part = await ctx.recv(stage.tag("part", k))
        if k == last:
            await ctx.recv(stage.tag("loss"))
        tasks.append(
            [ctx.spawn(coroutine) for coroutine in post(k, part.body * team.weight, k == last)]
        )
    return tasks


async def begin_slice_sums(team: ProcessGroup, stage: Stage) -> list[list[Any]]:
    """Slices of each part, those that forward needs first with the lowest key."""

    def post(k: int, x: Any, rides: bool) -> list[Coroutine]:
        key, credit = len(stage.messages) - k, stage.overlap.most_committed
        cut = [
            slice_vector(x, start, stop) for start, stop in stage.overlap.cuts(stage.messages[k])
        ]
        alone: list[Coroutine] = [
            sum_slice(team, part, key, credit) for part in (cut[:-1] if rides else cut)
        ]
        return [*alone, team.all_reduce(cut[-1], key=key, credit=credit)] if rides else alone

    return await begin_sums(team, stage, post)


async def sum_slice(team: ProcessGroup, x: Any, key: int, credit: int) -> Any:
    return await team.ctx.all_reduce(x, team.ranks, key=key, credit=credit)


async def begin_half_sums(team: ProcessGroup, stage: Stage) -> list[list[Any]]:
    """Each part's sum is scattered as it is ready; once all have been, they are gathered, those
    that forward needs first before the others.
    """
    scatters = await begin_sums(team, stage, lambda k, x, rides: [scatter_sum(team, x)])
    chunks = [await team.ctx.join(task) for (task,) in scatters]
    rides, others = team.gather(chunks[-1]), chunks[-2::-1]
    gathers = [
        team.ctx.spawn(rides),
        *(team.ctx.spawn(gather_sum(team, chunk)) for chunk in others),
    ]
    return [[task] for task in reversed(gathers)]


async def scatter_sum(team: ProcessGroup, x: Any) -> Any:
    return await team.ctx.all_reduce(x, team.ranks, "scatter")


async def gather_sum(team: ProcessGroup, chunk: Any) -> Any:
    return await team.ctx.all_reduce(chunk, team.ranks, "gather")


# A gradient that is summed in parts, during backward  A step whose gradient is summed in parts,
# while backward goes on.  Rule: message k, a slice of the gradient, is summed over all workers as
# soon as it is ready everywhere and message k − 1 has ended. The sum is the same to the bit as that
# of the gradient in one piece. What rides along goes with the last. Where a codec works in each
# message by itself, see `topology.exchange`.  Where a sum of one message comes to nothing, as a
# worker is lost, backward goes on to its end, no later message is sent, and nothing of the round is
# merged. Those who are left do it once more with the gradients that they have, message by message
# (`ashl.topology.all_reduce`).  Source: Zhang et al., "Poseidon", USENIX ATC 2017; what each
# message holds is `ashl.overlap`'s to say.


Bodies = list[Any]  # of messages, in the order in which they go


async def sum_overlapped(
    team: ProcessGroup, stage: Stage, state: PeerState, version: int, signal: float
) -> tuple[Work, Any]:
    """(one gradient, the weighted sum of everybody's); `team.loss` and `team.word` are sums then.
    Raises TeamBrokenError once the gradient is there.
    """
    coding = Coding.of(team, stage, state, version) if stage.links else None
    others = replace(team, carried=True)
    if state.redo is None:
        work, bodies, came = await compute_and_sum(others, coding, stage, state)
    else:
        work = state.redo
        bodies = (
            work.body
            if coding is None
            else await team.compute(partial(coding.all_encoded, work.body), work=1)
        )
        came = await sum_parts(others, coding, bodies[:-1])
    if stage.elastic:
        keep(state, work)
    if len(came) < len(bodies) - 1:
        raise GroupBrokenError
    team.begin(
        (work.loss if coding is None or coding.finish_encoding() else math.nan) / team.size, signal
    )
    came.append(await sum_part(team, coding, len(came), bodies[-1]))
    return work, concatenate(came[::-1]) if coding is None else await coding.decode_buckets(came)


async def compute_and_sum(
    team: ProcessGroup, coding: Coding | None, stage: Stage, state: PeerState
) -> tuple[Work, Bodies, list[Any]]:
    """(the gradient in parts, what is sent of each, what has come of all but the last), which have
    been exchanged meanwhile, as long as nobody was lost.
    """
    ctx, start, tags = team.ctx, team.ctx.now, [tag for _, tag in stage.ready]
    step, span = next_batch(state)
    compute = partial(
        stage.trainer.gradient_in_parts, state.params, ctx.rank, step, span, stage.slices
    )
    others = ctx.spawn(sum_as_ready(team, coding, tags[:-1])) if tags[:-1] else None
    encoding = None if coding is None else coding.encoding
    loss = await ctx.compute(compute, work=state.batch, parts=stage.ready, encoding=encoding)
    step_s = ctx.now - start
    bodies, came = (Bodies(), []) if others is None else await ctx.join(others)
    bodies.append((await ctx.recv(tags[-1], src=ctx.rank)).body)
    parts = bodies if coding is None else [coding.vectors[k] for k in range(len(tags))]
    return Work(parts, loss, 1, state.batch, step_s, state.version), bodies, came


async def sum_as_ready(
    team: ProcessGroup, coding: Coding | None, tags: Sequence[Tag]
) -> tuple[Bodies, list[Any]]:
    """(these messages, what came of them): each is exchanged once this rank has it, up to one that
    comes to nothing.
    """
    bodies, came = Bodies(), list[Any]()
    for k, tag in enumerate(tags):
        bodies.append((await team.ctx.recv(tag, src=team.ctx.rank)).body)
        if len(came) == k:
            came += await sum_parts(team, coding, bodies[k:], k)
    return bodies, came


async def sum_parts(
    team: ProcessGroup, coding: Coding | None, bodies: Bodies, first: int = 0
) -> list[Any]:
    """What came of these messages, one after the other, up to the one that comes to nothing."""
    came = list[Any]()
    for k, body in enumerate(bodies, first):
        try:
            came.append(await sum_part(team, coding, k, body))
        except GroupBrokenError:
            break
    return came


async def sum_part(team: ProcessGroup, coding: Coding | None, k: int, body: Any) -> Any:
    return await (
        team.all_reduce(body, team.weight)
        if coding is None
        else coding.exchange_bucket(team, k, body)
    )


# One fragment of the model at a time  An all-reduce of one fragment of the model at a time, beside
# local steps, see `ashl.overlap.streaming` and `loscar`.  As in `ashl.topology.local_work` a worker
# holds one piece of work that is done and not exchanged, so that at the top of the loop nothing is
# under way. A fragment is exchanged and merged as a model is, and counts are those of all.


async def run_streaming(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Hand in a fragment, take the first of the next steps meanwhile, merge, take the others;
    returns the last word.
    """
    stage, overlap, count = state.begin(ctx, stage), stage.delayed, len(stage.fragments)
    assert isinstance(overlap, Fragmented)
    state.fragment_ends = state.fragment_ends or codec_states_of(stage)
    while True:
        pending: Work | None = state.pending
        ctx.safe_point(
            stage.index,
            (
                state
                if pending is None or stage.truncate_last_round(state.pending_rest) is stage
                else None
            ),
        )
        if pending is None:
            await finish_piece(ctx, stage, state, None, state.local_steps)
            continue
        version = state.progress.version
        k, own = version % count, stage.truncate_last_round(state.pending_rest)
        part, staleness, fragment = (
            own.fragment(k),
            version - pending.version,
            fragment_at(stage, version),
        )
        team = replace(ProcessGroup.of(ctx, part), share=part.link.d / stage.link.d)
        team.begin(
            pending.loss / team.size,
            REASONS.index(state.signal) if ctx.rank == stage.lead_rank else 0,
        )
        held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
        exchange = exchange_update(
            team, part, held, state.progress, version, stage.aggregate.clip(pending.body)
        )
        total, ahead = state.local_steps, None
        more = overlap.delay > 0 and (
            state.rest is None or state.rest[0] > 0
        )  # alike on all, as `beside` need not be
        beside = overlap.overlapped_steps(total) if more else 0
        if beside:
            under_way = ctx.spawn(exchange)
            await ctx.sleep(0)  # what is encoded is encoded first
            ahead = await take_local_steps(ctx, stage, state, beside)
            update = await ctx.join(under_way)
        else:
            update = await exchange
        late = keep_within_budget(ctx, stage, state, state.params)
        merge = partial(apply_fragment, own, state, k, update, team.loss, staleness)
        state.params, state.outer_state, progress = ctx.compute_once(
            team.ranks, ("merge", stage.index, version), merge
        )
        state.progress, state.version, state.steps, state.samples = (
            progress,
            progress.version,
            progress.steps,
            progress.samples,
        )
        if state.start is not None:
            places = fragment.of(state.start), fragment.of(state.params), held.params + pending.body
            state.start = fragment.put(state.start, overlap.mix(*places))
        reason = stage.stop_criteria.end_reason(progress) or REASONS[int(team.signal)]
        if reason and more:  # nobody ends before the others
            await ctx.all_reduce(torch.zeros(1), team.ranks, piggybacked=1)
        ctx.record_round(
            stage.index, state.round, pending.steps, staleness, dropped=late, loss=pending.loss
        )
        state.round += 1
        if (
            ctx.rank == stage.lead_rank
            and not late
            and stage.stop_criteria.take_evaluation(state, ctx.now)
        ):
            ctx.snapshot(state.params, counts=progress.report())
        if reason:
            state.signal = None
            return end_piggybacked(ctx, stage, state, reason, ctx.now_ns)
        await finish_piece(ctx, stage, state, ahead, total - beside)
        if ctx.rank == stage.lead_rank:
            state.signal = local_stop(ctx, stage, progress)


def apply_fragment(
    stage: Stage, state: PeerState, k: int, update: Any, mean_loss: float, staleness: int
) -> tuple[Any, Any, Progress]:
    """(model, outer moments of all fragments, counts) with this sum merged into a fragment; `state`
    stays as it is.
    """
    progress = stage.count_merge(state.progress, mean_loss, staleness)
    if progress.diverged:
        return state.params, state.outer_state, progress
    fragment, held = (
        fragment_at(stage, state.progress.version),
        [*(state.outer_state or len(stage.fragments) * (None,))],
    )
    before, lr = fragment.of(state.params), stage.trainer.rate(state.progress.samples)
    held[k], params = fragment.outer.step(held[k], before, update, lr)
    return fragment.put(state.params, params), tuple(held), progress


# Members that fail and rejoin  Who takes part in an all-reduce: it goes on without workers that are
# lost, and with those that come (back).  Rule of a loss: the sum that lacks a member comes to
# nothing, and the others form a new team. They repeat that round from the state that all of them
# have, with the work that each has done for it, summed by those who are left with Σ w_i = 1. Who is
# a merge ahead goes back by one. What the lost worker was at counts as dropped: a round of its
# steps. A compressor's own messages come to nothing for who waits for one of the lost, and then for
# who waits for one of those; who has them all waits until all others have, too. What compressors
# keep of it is forgotten. The lowest rank that is left does what rank 0 does. With
# `runtime.on_worker_failure=reshard` its data are with the others from the round after that on, as
# `ashl.topology.parameter_server` says.  Rule of a join: whoever comes asks, the first rank says
# with the next sum that somebody is at the door, and after that merge all form the team anew. The
# newcomer gets model, counts, outer moments, and where all step alike on the sum the optimizer's;
# its own moments and its compressor begin anew, and its data go on behind what was counted of it.
# Where compressors keep copies of each other, or something that all have alike, all of them begin
# anew with it.  All members have one merge alike, so that from there on a run is, bit for bit, one
# of those who are left.  Source: a new communicator of those who are left as in Bland et al.,
# "Post-failure recovery of MPI communication
# capability", IJHPCA 2013; an all-reduce that goes on as in Horovod Elastic.


MOST = 64  # messages to a newcomer
NONE = -1  # the version of who has no model yet
ENDS = (None, "next", "seconds")  # what a rank calls the reason that has not seen it, by the word


class Known(NamedTuple):
    """What a newcomer receives beside the model."""

    stage: int
    progress: Progress
    rest: tuple[int, int] | None
    moments: Any  # of the optimizer, where all step alike
    outer_state: Any
    rule_state: Any


def keep(state: PeerState, work: Work) -> None:
    """The work of a round is done and not exchanged yet: from here it could be repeated."""
    before = copy.copy(state)
    before.ends, before.kept, before.redo = state.ends.copy(), (), work
    state.kept = (*state.kept[-1:], before)


async def repair_round(
    ctx: RankContext, stage: Stage, state: PeerState
) -> tuple[Stage, str | None]:
    """A sum has come to nothing: go on without who is lost, with that round once more
    (`state.redo`). Returns the stage as it is among those who are left, and why it ends instead,
    with what was to be summed dropped, where somebody sees that it is time. Raises AshlError where
    too few are left.
    """
    reason = local_stop(ctx, stage, state.progress)
    formed = await ctx.regroup(state.progress.version, signal_of(stage, reason))
    go_back(ctx, state, formed.version)
    stage = await restrict_to_team(ctx, stage, state, formed)
    if not formed.signal:
        return stage, None
    if state.redo is not None:
        ctx.record_round(
            stage.index, state.round, state.redo.steps, 0, dropped=True, loss=state.redo.loss
        )
        state.round += 1
    state.redo, state.progress, steps = (
        None,
        state.progress.copy(),
        stage.truncate_last_round(state.rest).round_steps,
    )
    for rank in stage.workers:
        state.progress.count_dropped(rank, steps[rank], drop_reason(formed.signal))
    return stage, reason if signal_of(stage, reason) == formed.signal else ENDS[formed.signal]


async def regroup_workers(ctx: RankContext, stage: Stage, state: PeerState, reason: str) -> Stage:
    """With this merge the stage ends for a reason, or a worker is let in. Returns the stage as it
    is among those who are there. Where some have not come so far, all go back to their round: then
    there is a `state.redo`. Raises AshlError where too few are left.
    """
    formed = await ctx.regroup(
        state.progress.version, signal_of(stage, reason), open=reason == JOIN
    )
    if formed.version < state.progress.version:
        go_back(ctx, state, formed.version)
    return await restrict_to_team(ctx, stage, state, formed)


def signal_of(stage: Stage, reason: str | None) -> int:
    if reason in (None, JOIN):
        return GO
    return NEXT if reason == "next" and stage.following else STOP


async def restrict_to_team(
    ctx: RankContext, stage: Stage, state: PeerState, formed: Formed
) -> Stage:
    """Go on as this team."""
    state.epoch, state.incarnations, state.formed_ns = (
        formed.epoch,
        formed.incarnations,
        formed.time_ns,
    )
    if formed.ranks == stage.workers and not (formed.failed or formed.joined):
        return stage
    if len(formed.ranks) < stage.min_workers:
        raise AshlError(
            f"worker {', '.join(map(str, formed.failed))} failed by {ctx.now:.6g} s and"
            f" {len(formed.ranks)} of {stage.num_workers} workers are running, fewer than"
            f" runtime.min_workers={stage.min_workers}: the run ends here"
        )
    state.progress = update_membership(stage, state, formed)
    for rank in formed.failed:
        state.ends.forget(rank)
    if formed.joined and not memory_is_local(stage, state.ends):
        state.ends = CodecState(gradients=state.ends.gradients)
    first = min(set(formed.ranks) - set(formed.joined))
    before, stage = stage, stage.restricted_to(state.progress.gone)
    if state.redo is None:
        state.plan_round(stage, ctx.rank)
    if ctx.rank == first:
        for rank in formed.joined:
            await admit(ctx, stage, state, rank)
    if stage.lead_rank != before.lead_rank:
        take_over_lead(ctx, stage, state)
    return stage


def go_back(ctx: RankContext, state: PeerState, version: int) -> None:
    """To the round of this version, with its work done."""
    before = next(kept for kept in state.kept if kept.progress.version == version)
    if before is not state.kept[-1] and before.redo is not None:
        ctx.steps -= before.redo.steps  # that round is recorded once more
    taken, incarnations = state.evaluated, state.incarnations
    state.__dict__.update(before.__dict__)
    state.ends, state.evaluated, state.incarnations = before.ends.copy(), taken, incarnations


def update_membership(stage: Stage, state: PeerState, formed: Formed) -> Progress:
    """The counts without those who are lost, and with those who came. What the lost had handed in
    for a round that is done once more is dropped; where none is, they had nothing under way.
    """
    planned = cast("StepRule", stage.sync).in_round(stage, state.rule_state, state.progress)
    progress, steps = state.progress.copy(), planned.truncate_last_round(state.rest).round_steps
    progress.gone = set(progress.gone)
    for rank in formed.failed:
        progress.remove_worker(rank)
        if formed.signal == GO and state.redo is not None:
            progress.count_dropped(rank, steps[rank], FAILURE)
    for rank in {*stage.workers}.difference(formed.ranks, formed.failed):
        progress.remove_worker(rank)  # who waits for the model still
    for rank in progress.gone.intersection(formed.joined):
        progress.join(rank)
    return progress


def memory_is_local(stage: Stage, ends: CodecState) -> bool:
    """Whether what compressors keep is each worker's own business."""
    shared = isinstance(stage.link.innermost, Collective) or ends.memory is not None
    return not (shared or any(kept is not None for kept in ends.receivers.values()))


def take_over_lead(ctx: RankContext, stage: Stage, state: PeerState) -> None:
    """Another rank counts, judges and hands out snapshots from now on."""
    here = ctx.rank == stage.lead_rank
    ctx.counter = state if here else None
    if here:
        state.evaluated = state.progress.mark_at(ctx.now)


def state_tag(epoch: int, k: int) -> Tag:
    """The tag of the k-th message to who is new in a team; the first holds the model, the second
    says what follows.
    """
    return "admission", k, epoch


async def admit(ctx: RankContext, stage: Stage, state: PeerState, rank: int) -> None:
    """At the lowest of those who were there: let a newcomer know all that it needs."""
    alike = (
        state.moments if stage.sync.exchange == "gradient" or stage.sync.momentum_travels else None
    )
    parcel = split_tensors(
        Known(stage.index, state.progress, state.rest, alike, state.outer_state, state.rule_state)
    )
    for k, body in enumerate((state.params, *parcel)):
        await ctx.send(rank, state_tag(state.epoch, k), body, (len(parcel),))


async def receive_state(ctx: RankContext, epoch: int, host: int) -> list[Message] | None:
    """What a newcomer receives; None where the sender is lost meanwhile."""
    messages = list[Message]()
    while not messages or len(messages) <= messages[0].meta[0]:
        message = await ctx.recv(state_tag(epoch, len(messages)), PEER_FAILED, src=host)
        if message.tag == PEER_FAILED:
            await ctx.discard(*(state_tag(epoch, k) for k in range(MOST)))
            return None
        messages.append(message)
    return messages


async def join(
    ctx: RankContext, stages: Sequence[Stage], state: PeerState
) -> tuple[int, PeerState] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there;
    None where the run is over. `state` is that of before the first stage.
    """
    first = stages[0]
    while True:
        while await ctx.recv(PEER_FAILED, before_s=ctx.now):
            pass  # what was before is of no concern
        formed = await ctx.regroup(NONE)
        if formed.signal == STOP:
            ctx.time_accounting.close_at(end_time_ns(first, formed.time_ns))
            return None
        host = min(set(formed.ranks) - set(formed.joined))
        if (messages := await receive_state(ctx, formed.epoch, host)) is not None:
            break
    model, *parcel = [message.body for message in messages]
    known = join_tensors(
        parcel, ("ashl", type(first.outer).__module__.partition(".")[0]), first.trainer.device
    )
    stage = stages[known.stage].restricted_to(known.progress.gone)
    state.params, state.progress, state.outer_state = model, known.progress, known.outer_state
    state.version, state.steps, state.samples = (
        known.progress.version,
        known.progress.steps,
        known.progress.samples,
    )
    state.enter(stage, ctx.rank)
    state.moments = stage.trainer.moments() if known.moments is None else known.moments
    state.round, state.step = known.progress.rounds_and_steps_of(ctx.rank)
    state.drawn = state.step * state.batch
    state.rest = known.rest
    state.rule_state = known.rule_state
    state.epoch, state.incarnations = formed.epoch, formed.incarnations
    take_over_lead(ctx, stage, state)
    return stage.index, state

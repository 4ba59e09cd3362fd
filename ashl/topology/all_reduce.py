"""All-reduce: every worker holds the model, and each merge sums the updates of all workers.

Rule: one outer step on Σ_j c_j·Δ_j, or one optimizer step on Σ_j c_j·g_j, identical on every
worker. A ring moves 2(n − 1)/n of the model each way. `algorithm` selects how a sum travels, see
`ashl.cluster.all_reduce_rounds`.

Data flow of a round: each worker computes its work, all of them sum it, and each one merges the sum
into its own copy of the model. A merge waits for the slowest worker. An update is stale only with
delayed exchanges, in which a worker computes the next work before the sum of the present one is
merged.

End: all workers count identically, so each one knows a limit on counts by itself. The lead rank,
which is the lowest present rank, also decides on time, evaluations, interrupts and join requests.
It piggybacks its decision, a number, on the next exchange. The other ranks add 0, so the sum is its
decision.

The loops: `worker` (one sum a round, or one a bucket), `run_delayed`, `run_pipelined` (buckets of
the model arrive during the next forward pass), `run_streaming` (fragments). None of them mentions
failures: after one the survivors begin again at their last safe points, see *Epochs* below.

Limit: all algorithms give the same model, bit for bit, if sums are exact.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from ashl.cluster.all_reduce_rounds import Algorithm
from ashl.compression.contract import Collective
from ashl.learn.pieces import Pieces
from ashl.option import option
from ashl.overlap.streaming import Fragmented
from ashl.runtime.effects import Epoch, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import concatenate, slice_vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.process_group import ProcessGroup
from ashl.stage.program import apply_assignments
from ashl.stage.progress import RUN_START, Progress, ProgressMark
from ashl.stage.stage import (
    CODEC,
    DELAY,
    FAULT_TOLERANT,
    OUTER,
    OVERLAP,
    STATISTICS,
    WEIGHTS,
    Loop,
    Network,
    Rule,
    Stage,
    Topology,
)
from ashl.topology.ending import (
    REASONS,
    InTime,
    end_piggybacked,
    keep_within_budget,
    local_stop,
)
from ashl.topology.epochs import (
    NO_MODEL,
    Standing,
    compare_members,
    receive_state,
    send_state,
    with_members,
)
from ashl.topology.estimate import next_batch
from ashl.topology.exchange import BucketEncoder, exchange_update
from ashl.topology.fragments import codec_states_of, finish_piece, fragment_at, take_local_steps
from ashl.topology.local_work import (
    Work,
    WorkerState,
    at_round_boundary,
    exchangeable_work,
    local_work,
)

ComputeWork = Callable[[RankContext, Stage, WorkerState], Awaitable[Work]]


class RoundReport(NamedTuple):
    """Facts about a round that a sync mode receives after its merge.

    Limit: between processes `now_s` is each rank's own time of the merge. So H and batches may
    depend on `due` and `step_s`, which are identical on all workers, and not on `now_s`.
    """

    due: bool  # the lead rank's answer to `StepRule.due`
    now_s: float  # time of the merge; in virtual time that of the first rank that merges
    # seconds of one step by worker, if the mode sets `tells`; 0 for a failed worker
    step_s: tuple[float, ...] = ()


class StepRule(Rule, contract=True):
    """Sync mode of an all-reduce: it sets the local steps between two sums, and what is summed.

    All workers proceed together.
    """

    in_rounds: ClassVar[bool] = True

    def work(self) -> ComputeWork:
        """Return the function that computes a worker's work between two sums."""
        return local_work

    # if True, one more small all-reduce a round tells every worker the step time of each worker
    tells: ClassVar[bool] = False

    def begin(self, stage: Stage, progress: Progress) -> Any:
        """Return the mode's state at the start of a stage.

        Between processes only times in it may differ from worker to worker.
        """
        return None

    def due(self, state: Any, now_s: float) -> bool:
        """Return True to report `due` with the next merge.

        Only the lead rank is asked. Its answer is piggybacked on the next sum, and `observe_round`
        receives it as `RoundReport.due` on every worker.
        """
        return False

    def observe_round(
        self, stage: Stage, state: Any, progress: Progress, report: RoundReport
    ) -> Any:
        """Return the mode's state after a merge; `state` itself is never changed."""
        return state

    def in_round(self, stage: Stage, state: Any, progress: Progress) -> Stage:
        """Return the stage with H (local steps) and the batches of the next round."""
        return stage

    @property
    def changes(self) -> bool:
        """Return True if the mode may change H or batches from round to round (by `in_round`)."""
        return type(self).in_round is not StepRule.in_round


NO_REPORT = RoundReport(False, 0.0)


@option
class AllReduce(Topology):
    """No server: an all-reduce sums the payloads, and every worker receives the sum.

    If a codec's payloads cannot be added, an all-gather replaces the all-reduce, and each worker
    decodes and sums all payloads itself (`ashl.topology.exchange`).
    """

    policy_type: ClassVar[type[Rule]] = StepRule
    regroups: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset(
        {CODEC, WEIGHTS, STATISTICS, OUTER, OVERLAP, DELAY, FAULT_TOLERANT}
    )
    # the default lets a user's subclass omit the option
    algorithm: Algorithm | None = None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Return the peers of point-to-point messages; none if the codec has no own protocol."""
        return stage.link.peers(rank, stage.num_workers)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """Return the time (ns) of one exchange: an all-reduce or an all-gather.

        An all-gather pads every payload to the longest one. With fragments: the maximum over all
        fragments.
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

    async def reform(
        self,
        ctx: RankContext,
        stages: Sequence[Stage],
        saved: tuple[int, PeerState] | None,
        epoch: Epoch,
    ) -> tuple[int, PeerState]:
        return await reform(ctx, stages, saved, epoch)

    def role(self, stage: Stage, rank: int) -> Loop:
        if stage.delayed is not None:
            return run_streaming if stage.fragments else run_delayed
        return run_pipelined if stage.overlap.overlaps_next_forward else worker


def longest_payload(stage: Stage) -> int:
    """Return the bytes of the longest payload that a worker sends."""
    shares = {worker.compression_ratio for worker in stage.plan.workers}
    return max(stage.codec.encoded_nbytes(share, stage.link.d) for share in shares)


@dataclass
class PeerState(WorkerState):
    """State of a worker that also counts progress, identically on every rank.

    Values that all ranks share are replaced, never changed, so that in virtual time all ranks may
    hold the same object.
    """

    progress: Progress = field(default_factory=lambda: Progress(0))
    evaluated: ProgressMark = RUN_START  # the last evaluation, at the lead rank
    # model and counts of the last merge within `stop.seconds`, once a merge has ended later
    in_time: InTime | None = None
    signal: str | None = None  # the reason that the lead rank piggybacks on the next exchange
    outer_state: Any = None  # moments of the outer optimizer

    def begin(self, ctx: RankContext, stage: Stage) -> Stage:
        """Enter a stage, unless the state is that of a checkpoint within it.

        Returns: the stage restricted to the present workers.
        """
        stage = stage.restricted_to(self.progress.gone)
        if self.entered != stage.index:
            opened = partial(begin_step, self.progress, ctx.now)
            self.progress = ctx.compute_once(stage.workers, ("begin", stage.index), opened)
            if stage.resets_outer:
                self.outer_state = None
            self.enter(stage, ctx.rank)
            self.rule_state = rule_of(stage).begin(stage, self.progress)
        return stage

    def apply_merge(self, result: Merged) -> None:
        self.params = result.params
        self.outer_state = result.outer_state
        self.adopt_progress(result.progress)
        if result.moments is not None:
            self.moments = result.moments

    def adopt_progress(self, progress: Progress) -> None:
        """Take over the counts, and the copies of them that local work reads."""
        self.progress = progress
        self.version = progress.version
        self.steps = progress.steps
        self.samples = progress.samples

    def apply_plan(self, ahead: Ahead, rank: int) -> None:
        self.rest, self.rule_state = ahead.rest, ahead.rule_state
        self.set_round(ahead.own, rank)

    def set_round(self, own: Stage, rank: int) -> None:
        """Set the H and the batch of the next round."""
        plan = own.plan.workers[rank]
        self.local_steps = plan.local_steps
        self.batch = plan.batch


class Merged(NamedTuple):
    """Result of a merge, identical on all ranks."""

    params: Any
    moments: Any  # of the optimizer if it steps on the sum, else None
    outer_state: Any
    progress: Progress


class Ahead(NamedTuple):
    """Plan of the round after a merge, identical on all ranks."""

    over: str | None  # the reason if a limit on counts ends the run; None if none does
    rest: tuple[int, int] | None  # remaining rounds, see `Stage.remaining_rounds`
    planned: Stage  # the stage in the next round, as planned
    own: Stage  # `planned`, with fewer local steps if the next round is the last one
    rule_state: Any = None  # state of the sync mode
    # time of the merge; in virtual time that of the first rank that merges (a paused rank is later)
    seen_ns: int = 0


def begin_step(progress: Progress, now_s: float) -> Progress:
    """Return a copy of the progress in which a stage begins at this time."""
    progress = progress.copy()
    progress.begin(now_s)
    return progress


def rule_of(stage: Stage) -> StepRule:
    """Return the stage's sync mode as a `StepRule`."""
    assert isinstance(stage.sync, StepRule)
    return stage.sync


async def worker(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Run a worker: compute, sum over all workers, merge, until the stage ends.

    A limit on counts ends the stage at its merge. A decision of the lead rank after a merge ends it
    one merge later.
    Returns: the final signal, NEXT or STOP.
    """
    stage = state.begin(ctx, stage)
    rule = rule_of(stage)
    team, compute = ProcessGroup.of(ctx, stage), rule.work()
    planned, own = next_round_stage(stage, state, ctx.rank)
    while True:
        ctx.safe_point(stage.index, state, resumable=own is planned)
        if own is not team.stage:
            team = ProcessGroup.of(ctx, own)
        signal = signal_to_send(ctx, stage, state)
        work, update = await sum_update(team, stage, state, compute, signal)
        step_s = await exchange_step_times(team, work) if rule.tells else ()
        moment = ("merge", stage.index, state.progress.version)
        due, reason_number = divmod(int(team.signal), len(REASONS))
        report = RoundReport(bool(due), ctx.now, step_s)
        merge = partial(
            merge_and_plan, stage, own, state, update, team.loss, now_ns=ctx.now_ns, report=report
        )
        result, ahead = ctx.compute_once(team.ranks, moment, merge)
        late = keep_within_budget(ctx, stage, state, state.params, now_ns=ahead.seen_ns)
        state.apply_merge(result)
        state.apply_plan(ahead, ctx.rank)
        planned, own = ahead.planned, ahead.own
        reason = ahead.over or REASONS[reason_number]
        if reason and stage.topology.links(stage, ctx.rank):
            # The codec's own messages end at different times on the ranks. One more all-reduce
            # makes all ranks end the stage at the same time.
            await ctx.all_reduce(torch.zeros(1), team.ranks, piggybacked=1)
        ctx.record_round(stage.index, state.round, work.steps, 0, dropped=late, loss=work.loss)
        state.round += 1
        is_evaluator = ctx.rank == stage.lead_rank and not late
        if is_evaluator and stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=state.progress.report())
        if reason:
            return end(ctx, stage, state, reason)
        if ctx.rank == stage.lead_rank:
            state.signal = local_stop(ctx, stage, state.progress)


def signal_to_send(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Return the number to piggyback: reason and `due` at the lead rank, 0 elsewhere."""
    is_due = ctx.rank == stage.lead_rank and rule_of(stage).due(state.rule_state, ctx.now)
    return reason_to_send(ctx, stage, state) + len(REASONS) * is_due


def reason_to_send(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Return the number of the lead rank's reason to end the stage; 0 on all other ranks."""
    return REASONS.index(state.signal) if ctx.rank == stage.lead_rank else 0


async def sum_update(
    team: ProcessGroup, stage: Stage, state: PeerState, compute: ComputeWork, signal: float
) -> tuple[Work, Any]:
    """Compute a round's work and sum it over all workers.

    Afterwards `team.loss` is the workers' mean loss and `team.signal` the lead rank's signal.
    Returns: (work, weighted sum).
    """
    version = state.progress.version
    if stage.messages:
        return await sum_overlapped(team, stage, state, version, signal)
    work = await compute(team.ctx, stage, state)
    team.begin(work.loss / team.size, signal)
    return work, await exchange_update(
        team, stage, state, state.progress, version, stage.aggregate.clip(work.body)
    )


async def run_delayed(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Run a worker with delayed exchanges: compute the next work while finished work is summed.

    At the top of the loop, a worker holds one finished piece of work and nothing is in flight. The
    worker sends that piece with its loss, computes the next piece, then merges the sum. If the
    signal is NEXT, one more exchange merges the piece that was computed meanwhile. If a limit on
    counts leaves no round for another piece, the worker computes none.
    Returns: the final signal, NEXT or STOP.
    """
    stage = state.begin(ctx, stage)
    while True:
        pending = state.pending is not None
        rest = state.pending_rest if pending else state.rest
        ctx.safe_point(stage.index, state, resumable=stage.truncate_last_round(rest) is stage)
        if not pending:
            state.pending_rest = state.rest
            state.pending = await exchangeable_work(ctx, stage, state)
            continue
        work, own = state.pending, stage.truncate_last_round(state.pending_rest)
        team = ProcessGroup.of(ctx, own)
        team.begin(work.loss / team.size, reason_to_send(ctx, stage, state))
        x = stage.aggregate.clip(work.body)
        exchange = ctx.spawn(
            exchange_update(team, stage, state, state.progress, state.progress.version, x)
        )
        await ctx.sleep(0)  # let the exchange encode before the local work starts
        ahead = None
        if not (state.last or no_rounds_left(state.rest)):
            ahead = await local_work(ctx, stage, state)
        update = await ctx.join(exchange)
        late = keep_within_budget(ctx, stage, state, state.params)
        moment = ("merge", stage.index, state.progress.version)
        staleness = state.progress.version - work.version
        merge = partial(merge_and_plan, stage, own, state, update, team.loss, staleness, more=1)
        result, next_round = ctx.compute_once(team.ranks, moment, merge)
        state.apply_merge(result)
        state.pending = ahead and at_round_boundary(ctx, stage, state, ahead)
        state.pending_rest = state.rest
        state.apply_plan(next_round, ctx.rank)
        reason = next_round.over or REASONS[int(team.signal)] or ("next" if state.last else None)
        state.last = reason == "next" and stage.following and not state.last
        if reason and not state.last:  # all ranks end together
            await ctx.all_reduce(torch.zeros(1), team.ranks, piggybacked=1)
        ctx.record_round(
            stage.index, state.round, work.steps, staleness, dropped=late, loss=work.loss
        )
        state.round += 1
        is_evaluator = ctx.rank == stage.lead_rank and not late
        if is_evaluator and stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=state.progress.report())
        if reason and not state.last:
            return end(ctx, stage, state, reason)
        if ctx.rank == stage.lead_rank:
            state.signal = local_stop(ctx, stage, state.progress)


def no_rounds_left(rest: tuple[int, int] | None) -> bool:
    """Return True if a limit on counts leaves no further round; None means no such limit."""
    return rest is not None and rest[0] <= 0


def next_round_stage(stage: Stage, state: PeerState, rank: int) -> tuple[Stage, Stage]:
    """Set H and batch of the next round.

    Returns: (the stage in that round as planned, the stage with fewer local steps if that round is
    the last one). Both are one object in every other round.
    """
    planned = rule_of(stage).in_round(stage, state.rule_state, state.progress)
    own = planned.truncate_last_round(state.rest)
    state.set_round(own, rank)
    return planned, own


async def exchange_step_times(team: ProcessGroup, work: Work) -> tuple[float, ...]:
    """Return the seconds of one step of each worker, by a small all-reduce."""
    own = torch.zeros(team.stage.num_workers, dtype=torch.float64)
    own[team.ctx.rank] = work.step_s
    total = await team.ctx.all_reduce(own, team.ranks, piggybacked=len(own))
    return tuple(total.tolist())


def compute_merge(
    stage: Stage, state: PeerState, update: Any, mean_loss: float, staleness: int = 0
) -> Merged:
    """Return the result of merging a sum: the model is unchanged after divergence.

    The arithmetic is that of a server, so both topologies give the same model. `state` is not
    changed.
    """
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
    """Merge a round's work, and plan a later round; `state` is not changed.

    Args: own: the stage in which the work was computed; the last round may have fewer local steps.
    more: rounds in flight, 1 with delayed exchanges: the plan is for the round after these.
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
    """End the stage with this merge. Returns: the final signal, NEXT or STOP."""
    state.signal = None
    return end_piggybacked(ctx, stage, state, reason, ctx.now_ns)


# Pipelined steps: the model arrives by bucket while the next forward pass continues
#
# Rule: bucket k of the gradient is summed as `overlap` plans. Once the sum of a bucket has
# arrived, the optimizer steps on that bucket, and the forward pass may use it. The model equals
# that of an unpartitioned sum and step, bit for bit.
#
# The workers' losses, and the signal of the lead rank (rank 0), are piggybacked on the bucket that
# forward needs first. So every rank knows before its next step whether the run continues, as
# without overlap. The lead rank evaluates a model once all of its buckets have arrived. By then the
# next step has begun, so a reached target ends the run one step later. At the end of a stage, and
# for a checkpoint, all buckets are drained first. `ashl.overlap` decides the order of the messages.
#
# Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training",
# MLSys 2019; Zhang et al., "DeAR", ICDCS 2023.


async def run_pipelined(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Run a worker whose buckets of the model arrive during the next forward pass.

    Returns: the final signal, NEXT or STOP.
    """
    stage = state.begin(ctx, stage)
    team, exchange = ProcessGroup.of(ctx, stage), None
    groups = [(stage.tag("group", k), message) for k, message in enumerate(stage.messages)]
    while True:
        if exchange is not None and ctx.safe_point_wanted:
            await flush_exchange(ctx, stage, exchange)
            exchange = None
        if exchange is None:
            ctx.safe_point(
                stage.index, state, resumable=stage.truncate_last_round(state.rest) is stage
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
        team.begin(loss / team.size, reason_to_send(ctx, stage, state))
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
        is_lead = ctx.rank == stage.lead_rank
        state.signal = local_stop(ctx, stage, progress) if is_lead and not reason else None
        if reason:
            return end_piggybacked(ctx, stage, state, reason, ctx.now_ns)
        state.plan_round(stage, ctx.rank)


def gradient_work(ctx: RankContext, stage: Stage, state: PeerState) -> Callable[..., float]:
    """Return the function that computes one gradient.

    Its arguments: `take(k)` waits for bucket k of the model during the forward pass; `emit(k, x)`
    passes on bucket k of the gradient during the backward pass.
    """
    step, span = next_batch(state)

    def work(emit: Callable[[int, Any], None], take: Callable[[int], Any]) -> float:
        pieces = Pieces(stage.slices[::-1], take)
        return stage.trainer.gradient_in_parts(pieces, ctx.rank, step, span, stage.slices, emit)

    return work


async def flush_exchange(ctx: RankContext, stage: Stage, exchange: Any) -> None:
    """Wait for every bucket of the model, and take those meant for the next forward pass."""
    if await ctx.join(exchange):
        for k in range(len(stage.messages)):
            await ctx.recv(stage.tag("group", k))


async def exchange_by_group(team: ProcessGroup, stage: Stage, state: PeerState) -> bool:
    """Sum the gradient of one step, and step on the model bucket by bucket for the next forward
    pass.

    The sum of the bucket that forward needs first arrives first. From then on `state.progress`
    counts the step, `team.loss` is the mean loss and `team.signal` the lead rank's signal.
    Returns: True if there is a new model, False after divergence.
    """
    ctx, version = team.ctx, state.progress.version
    # position in the data and number of the round after this step; they advance meanwhile
    after = {"step": state.step, "drawn": state.drawn, "round": state.round + 1}
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
    is_evaluator = ctx.rank == stage.lead_rank and not late
    if is_evaluator and stage.stop_criteria.take_evaluation(state, ctx.now):
        ctx.snapshot(state.params, counts=state.progress.report())
    if stage.elastic:
        ctx.mark_restart_point(stage.index, replace(state, signal=None, **after))
    return bool(made)


async def begin_sums(
    team: ProcessGroup, stage: Stage, post: Callable[[int, Any, bool], list[Coroutine]]
) -> list[list[Any]]:
    """Start the sums of each bucket as soon as backward has computed it, in the same order on all
    ranks.

    Args: post(k, x, is_last): a function that returns the collectives of bucket k with elements x.
    Returns: the tasks, by bucket.
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
    """Start the sums of each bucket's slices; the slices that forward needs first go first."""

    def post(k: int, x: Any, is_last: bool) -> list[Coroutine]:
        key, credit = len(stage.messages) - k, stage.overlap.most_committed
        cuts = stage.overlap.cuts(stage.messages[k])
        slices = [slice_vector(x, start, stop) for start, stop in cuts]
        if not is_last:
            return [sum_slice(team, part, key, credit) for part in slices]
        # loss and signal are piggybacked on the last slice of the last bucket
        sums: list[Coroutine] = [sum_slice(team, part, key, credit) for part in slices[:-1]]
        return [*sums, team.all_reduce(slices[-1], key=key, credit=credit)]

    return await begin_sums(team, stage, post)


async def sum_slice(team: ProcessGroup, x: Any, key: int, credit: int) -> Any:
    """Sum one slice over all workers; a lower `key` is sent first, at most `credit` in flight."""
    return await team.ctx.all_reduce(x, team.ranks, key=key, credit=credit)


async def begin_half_sums(team: ProcessGroup, stage: Stage) -> list[list[Any]]:
    """Start a reduce-scatter of each bucket; after all of them, gather them in forward order."""
    scatters = await begin_sums(team, stage, lambda k, x, is_last: [scatter_sum(team, x)])
    chunks = [await team.ctx.join(task) for (task,) in scatters]
    # loss and signal are piggybacked on the first chunk that is gathered
    gathers = [team.ctx.spawn(team.gather(chunks[-1]))]
    for chunk in chunks[-2::-1]:
        gathers.append(team.ctx.spawn(gather_sum(team, chunk)))
    return [[task] for task in reversed(gathers)]


async def scatter_sum(team: ProcessGroup, x: Any) -> Any:
    """Return this worker's chunk of the sum over all workers (a reduce-scatter)."""
    return await team.ctx.all_reduce(x, team.ranks, "scatter")


async def gather_sum(team: ProcessGroup, chunk: Any) -> Any:
    """Return the whole sum from the workers' chunks (an all-gather)."""
    return await team.ctx.all_reduce(chunk, team.ranks, "gather")


# Bucketed sums: a gradient that is summed by bucket while backward continues
#
# Rule: bucket k, a slice of the gradient, is summed over all workers once it is ready on all of
# them and the sum of bucket k − 1 has ended. The sum equals that of the whole gradient, bit for
# bit. Loss and signal are piggybacked on the last bucket. For a codec that encodes each bucket
# separately, see `ashl.topology.exchange`. `ashl.overlap` decides which layers a bucket holds.
#
# Source: Zhang et al., "Poseidon", USENIX ATC 2017.


Bodies = list[Any]  # payloads of the buckets, in sending order


async def sum_overlapped(
    team: ProcessGroup, stage: Stage, state: PeerState, version: int, signal: float
) -> tuple[Work, Any]:
    """Compute one gradient and sum it by bucket during backward.

    Afterwards `team.loss` is the workers' mean loss and `team.signal` the lead rank's signal.
    Returns: (work, weighted sum).
    """
    coding = BucketEncoder.of(team, stage, state, version) if stage.links else None
    others = replace(team, piggybacked_sent=True)
    work, bodies, sums = await compute_and_sum(others, coding, stage, state)
    is_finite = coding is None or coding.finish_encoding()
    team.begin((work.loss if is_finite else math.nan) / team.size, signal)
    sums.append(await sum_part(team, coding, len(sums), bodies[-1]))
    return work, concatenate(sums[::-1]) if coding is None else await coding.decode_buckets(sums)


async def compute_and_sum(
    team: ProcessGroup, coding: BucketEncoder | None, stage: Stage, state: PeerState
) -> tuple[Work, Bodies, list[Any]]:
    """Compute one gradient and exchange its buckets, except the last.

    Returns: (work with the gradient by bucket, payload of each bucket, sums received so far).
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
    bodies, sums = (Bodies(), []) if others is None else await ctx.join(others)
    bodies.append((await ctx.recv(tags[-1], src=ctx.rank)).body)
    parts = bodies if coding is None else [coding.vectors[k] for k in range(len(tags))]
    return Work(parts, loss, 1, state.batch, step_s, state.version), bodies, sums


async def sum_as_ready(
    team: ProcessGroup, coding: BucketEncoder | None, tags: Sequence[Tag]
) -> tuple[Bodies, list[Any]]:
    """Exchange each bucket as soon as it is ready.

    Returns: (payload of each bucket, sums received).
    """
    bodies, sums = Bodies(), list[Any]()
    for k, tag in enumerate(tags):
        bodies.append((await team.ctx.recv(tag, src=team.ctx.rank)).body)
        sums.append(await sum_part(team, coding, k, bodies[k]))
    return bodies, sums


async def sum_part(team: ProcessGroup, coding: BucketEncoder | None, k: int, body: Any) -> Any:
    """Return the sum of bucket k over all workers."""
    return await (
        team.all_reduce(body, team.weight)
        if coding is None
        else coding.exchange_bucket(team, k, body)
    )


# Streaming: an all-reduce of one fragment of the model at a time, while local steps continue
#
# As with other delayed exchanges (`ashl.topology.local_work`), a worker holds one finished piece of
# work that is not exchanged yet. So at the top of the loop nothing is in flight. An exchange sums
# the work in one fragment, and its merge steps on that fragment only. It counts as one merge of the
# whole model. See `ashl.overlap.streaming` and `loscar`.


async def run_streaming(ctx: RankContext, stage: Stage, state: PeerState) -> int:
    """Run a worker that exchanges one fragment of its finished work at a time.

    While the sum of a fragment is in flight, the worker takes the first local steps of the next
    piece of work. It takes the remaining ones after the merge.
    Returns: the final signal, NEXT or STOP.
    """
    stage, overlap, count = state.begin(ctx, stage), stage.delayed, len(stage.fragments)
    assert isinstance(overlap, Fragmented)
    state.fragment_ends = state.fragment_ends or codec_states_of(stage)
    while True:
        pending: Work | None = state.pending
        ctx.safe_point(
            stage.index,
            state,
            resumable=pending is None or stage.truncate_last_round(state.pending_rest) is stage,
        )
        if pending is None:
            await finish_piece(ctx, stage, state, None, state.local_steps)
            continue
        version = state.progress.version
        k, own = version % count, stage.truncate_last_round(state.pending_rest)
        part, fragment = own.fragment(k), fragment_at(stage, version)
        staleness = version - pending.version
        team = replace(ProcessGroup.of(ctx, part), share=part.link.d / stage.link.d)
        team.begin(
            pending.loss / team.size,
            reason_to_send(ctx, stage, state),
        )
        held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
        exchange = exchange_update(
            team, part, held, state.progress, version, stage.aggregate.clip(pending.body)
        )
        total, ahead = state.local_steps, None
        # equal on all ranks, unlike `beside`, which depends on a worker's H
        more = overlap.delay > 0 and (state.rest is None or state.rest[0] > 0)
        beside = overlap.overlapped_steps(total) if more else 0
        if beside:
            in_flight = ctx.spawn(exchange)
            await ctx.sleep(0)  # let the exchange encode before the local steps start
            ahead = await take_local_steps(ctx, stage, state, beside)
            update = await ctx.join(in_flight)
        else:
            update = await exchange
        late = keep_within_budget(ctx, stage, state, state.params)
        merge = partial(apply_fragment, own, state, k, update, team.loss, staleness)
        state.params, state.outer_state, progress = ctx.compute_once(
            team.ranks, ("merge", stage.index, version), merge
        )
        state.adopt_progress(progress)
        if state.start is not None:
            start, landed = fragment.of(state.start), fragment.of(state.params)
            mixed = overlap.mix(start, landed, held.params + pending.body)
            state.start = fragment.put(state.start, mixed)
        reason = stage.stop_criteria.end_reason(progress) or REASONS[int(team.signal)]
        if reason and more:  # all ranks end together
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
    """Merge a sum into one fragment; `state` is not changed.

    Returns: (model, outer moments of all fragments, progress).
    """
    progress = stage.count_merge(state.progress, mean_loss, staleness)
    if progress.diverged:
        return state.params, state.outer_state, progress
    fragment = fragment_at(stage, state.progress.version)
    outer_states = [*(state.outer_state or len(stage.fragments) * (None,))]
    before, lr = fragment.of(state.params), stage.trainer.rate(state.progress.samples)
    outer_states[k], params = fragment.outer.step(outer_states[k], before, update, lr)
    return fragment.put(state.params, params), tuple(outer_states), progress


# Epochs: how the members of a new epoch continue
#
# Each member goes back to its last safe point, the top of a round (`RankContext.safe_point`). The
# members exchange the versions of their models. The lowest rank with the highest version is the
# donor: it sends the state that all workers have in common to each member with an older model, and
# to each joining worker. Then the round is computed again, with the members' weights, Σ w_i = 1.
# The failed worker's steps of the round count as dropped.
#
# A survivor keeps its own state: momentum, residual, position in its data. A joining worker begins
# with momentum and residual zero, and its data continue after the samples that were counted for it.
# If a state was sent, and codecs hold copies of each other's state, all of them are reset.
#
# All members apply the same merges. So after a failure the run equals, bit for bit, a run of the
# survivors from that round on.
#
# Source: a new communicator of the survivors as in Bland et al., "Post-failure recovery of MPI
# communication capability", IJHPCA 2013; an all-reduce that continues as in Horovod Elastic.


class CommonState(NamedTuple):
    """State that all workers have in common, beside the model."""

    index: int  # of the stage; beyond the last one once the run has ended
    progress: Progress
    is_delayed: bool  # True if workers hold finished work for the next exchange
    pending_rest: tuple[int, int] | None  # remaining rounds when that work was begun
    last: bool  # True if that work is the last of the stage
    moments: Any  # of the optimizer if all workers step on the sum, else None
    outer_state: Any
    rule_state: Any
    assigned: Any  # as planned after profiling
    in_time: InTime | None


async def reform(
    ctx: RankContext,
    stages: Sequence[Stage],
    saved: tuple[int, PeerState] | None,
    epoch: Epoch,
) -> tuple[int, PeerState]:
    """Continue as a member of a new epoch: bring all members to the newest model.

    Args: saved: (stage, state) of this rank's last safe point; None for a joining worker.
    Returns: (stage, state) to continue with.   Raises: AshlError if no member has a model.
    """
    index, state = saved or (0, PeerState(*stages[0].trainer.init()))
    version = state.progress.version if saved else NO_MODEL
    standing = await compare_members(ctx, stages[0], epoch, index, version)
    if ctx.rank == standing.donor:
        known = common_state(stages, index, state)
        for rank in standing.behind:
            await send_state(ctx, rank, epoch, state.params, known)
    elif ctx.rank in standing.behind:
        model, known = await receive_state(ctx, stages[0], standing.donor, epoch)
        index = take_over(ctx, stages, state, model, known, is_new=saved is None)
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    if index < len(stages):
        continue_with(ctx, stages[index], state, epoch, standing)
    else:
        ctx.time_accounting.close_at(state.progress.end_ns)
    return index, state


def continue_with(
    ctx: RankContext, stage: Stage, state: PeerState, epoch: Epoch, standing: Standing
) -> None:
    """Set the state for a stage with the members of this epoch."""
    before = stage.restricted_to(state.progress.gone)
    own = rule_of(before).in_round(before, state.rule_state, state.progress)
    rest = state.rest if stage.delayed is None else state.pending_rest
    steps = own.truncate_last_round(rest).round_steps
    state.progress = with_members(state.progress, epoch, standing.joined, steps)
    for rank in {*before.workers}.difference(epoch.workers).union(standing.joined):
        state.ends.forget(rank)
    if standing.behind and not memory_is_local(stage, state.ends):
        state.ends = CodecState(gradients=state.ends.gradients)
    stage = stage.restricted_to(state.progress.gone)
    if state.pending is None and state.rest is not None and stage.delayed is not None:
        planned = stage.worker(ctx.rank).local_steps
        state.local_steps = stage.cap_local_steps(planned, ctx.rank, state.rest)
    else:
        state.plan_round(stage, ctx.rank, ahead=int(state.pending is not None))
    if ctx.rank in standing.joined:
        state.round, state.step = state.progress.rounds_and_steps_of(ctx.rank)
        state.drawn = state.step * state.batch
    is_new_lead = stage.lead_rank != before.lead_rank or ctx.rank in standing.joined
    if ctx.rank == stage.lead_rank and is_new_lead:
        state.evaluated = state.progress.mark_at(ctx.now)


def memory_is_local(stage: Stage, ends: CodecState) -> bool:
    """Return True if no codec holds state of another worker, or state in common with others."""
    shared = isinstance(stage.link.innermost, Collective) or ends.memory is not None
    return not (shared or any(kept is not None for kept in ends.receivers.values()))


def common_state(stages: Sequence[Stage], index: int, state: PeerState) -> CommonState:
    """Return the state of this worker that all workers have in common."""
    sync = stages[min(index, len(stages) - 1)].sync
    # all workers have equal moments if they step on the sum
    shares_moments = sync.exchange == "gradient" or sync.momentum_travels
    return CommonState(
        index,
        state.progress,
        state.pending is not None,
        state.pending_rest,
        state.last,
        state.moments if shares_moments else None,
        state.outer_state,
        state.rule_state,
        state.assigned,
        state.in_time,
    )


def take_over(
    ctx: RankContext,
    stages: Sequence[Stage],
    state: PeerState,
    model: Any,
    known: CommonState,
    is_new: bool,
) -> int:
    """Take over the model and the common state of the donor. Returns: the index of the stage."""
    state.params, state.outer_state = model, known.outer_state
    state.adopt_progress(known.progress)
    state.assigned, state.in_time = known.assigned, known.in_time
    if known.index >= len(stages):
        return known.index
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    stage = stages[known.index].restricted_to(known.progress.gone)
    state.enter(stage, ctx.rank)
    if known.moments is not None:
        state.moments = known.moments
    elif is_new:
        state.moments = stage.trainer.moments()
    state.round, state.step = known.progress.rounds_and_steps_of(ctx.rank)
    state.drawn = state.step * state.batch
    state.pending = state.start = None
    state.pending_rest, state.last = known.pending_rest, known.last
    state.rule_state = known.rule_state
    # a first piece of work is planned as the others' finished piece
    state.rest = known.pending_rest if known.is_delayed else None
    return known.index

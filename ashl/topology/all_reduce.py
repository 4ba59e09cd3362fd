"""All-reduce: every worker holds the model, and each merge sums the updates of all workers.

Use when: workers are about equally fast, or H is planned, and no node can carry a server.
Avoid when: workers must not wait for the slowest one.
Alternatives: `parameter_server` without barriers; `gossip` and `partial_all_reduce` without a
common model.

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

One loop, `worker`, serves all overlaps (docs/contributing/overlap.md). It does not mention
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
from ashl.option import option
from ashl.overlap.contract import overlapped_steps
from ashl.plan.assignments import Assignments, Members
from ashl.plan.plan import WorkerPlan
from ashl.runtime.effects import Epoch, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import concatenate, slice_vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import (
    CODEC,
    DELAY,
    FAULT_TOLERANT,
    OUTER,
    OVERLAP,
    STATISTICS,
    WEIGHTS,
    Loop,
    Rule,
    StageConfig,
    Topology,
)
from ashl.stage.members import (
    Remaining,
    assign,
    cap_local_steps,
    count_merge,
    is_truncated,
    members_with_work,
    remaining_rounds,
    rest_if_truncated,
    shared_members,
    survivors,
    truncate_round,
    without_work,
)
from ashl.stage.process_group import ProcessGroup
from ashl.stage.program import apply_assignments
from ashl.stage.progress import RUN_START, Progress, ProgressMark
from ashl.topology.ending import (
    CHECKPOINT,
    REASONS,
    StateWithinBudget,
    end_piggybacked,
    local_stop,
    save_within_budget,
)
from ashl.topology.epochs import (
    NO_MODEL,
    Standing,
    compare_members,
    receive_state,
    send_state,
    with_members,
)
from ashl.topology.exchange import BucketEncoder, exchange_update
from ashl.topology.local_work import (
    Part,
    Work,
    WorkerState,
    begin_piece,
    begins_next_piece,
    compute_by_bucket,
    finish_piece,
    kept_work,
    local_work,
    mark_round,
    no_work,
    part_of,
    suits_round,
    with_part,
)

ComputeWork = Callable[[RankContext, StageConfig, WorkerState], Awaitable[Work]]


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

    def begin(self, stage: StageConfig, progress: Progress) -> Any:
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
        self, stage: StageConfig, state: Any, progress: Progress, report: RoundReport
    ) -> Any:
        """Return the mode's state after a merge; `state` itself is never changed."""
        return state

    def in_round(
        self, stage: StageConfig, state: Any, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        """Return the work of all workers in the next round: their H and batches, by rank."""
        return stage.plan.workers

    @property
    def changes(self) -> bool:
        """Return True if the mode may change H or batches from round to round (by `in_round`)."""
        return type(self).in_round is not StepRule.in_round


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

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        """Return the peers of point-to-point messages; none if the codec has no own protocol."""
        return stage.pipeline.peers(rank, stage.num_workers)

    def begin(self, stage: StageConfig, rank: int) -> PeerState:
        return PeerState(*stage.trainer.init(), progress=Progress(stage.num_workers))

    async def reform(
        self,
        ctx: RankContext,
        stages: Sequence[StageConfig],
        saved: tuple[int, PeerState] | None,
        epoch: Epoch,
    ) -> tuple[int, PeerState]:
        return await reform(ctx, stages, saved, epoch)

    def role(self, stage: StageConfig, rank: int) -> Loop:
        return worker


@dataclass
class PeerState(WorkerState):
    """State of a worker that also counts progress, identically on every rank.

    Values that all ranks share are replaced, never changed, so that in virtual time all ranks may
    hold the same object.
    """

    progress: Progress = field(default_factory=lambda: Progress(0))
    evaluated: ProgressMark = RUN_START  # the last evaluation, at the lead rank
    in_time: StateWithinBudget | None = None  # None until a merge ends after the budget
    signal: str | None = None  # the reason that the lead rank piggybacks on the next exchange

    def begin(self, ctx: RankContext, stage: StageConfig) -> None:
        """Enter a stage, unless the state is that of a pause within it."""
        if self.entered == stage.index:
            return
        opened = partial(begin_stage, self.progress, ctx.now)
        self.progress = ctx.compute_once(ctx.members.ranks, ("begin", stage.index), opened)
        if stage.resets_outer_momentum:
            self.outer_state = None
        self.enter(stage, ctx.members, ctx.rank)
        self.rule_state = stage.sync.begin(stage, self.progress)

    def apply_merge(self, result: Merged) -> None:
        """Take over the model, the moments and the counts of a merge."""
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


class Merged(NamedTuple):
    """Result of a merge, identical on all ranks."""

    params: Any
    moments: Any  # of the optimizer if it steps on the sum, else None
    outer_state: Any
    progress: Progress


class Ahead(NamedTuple):
    """Plan of the round after a merge, identical on all ranks."""

    reason: str | None  # why the stage ends with this merge, or None
    rest: Remaining  # part of a later round that remains, if a stop limit truncates it
    planned: Assignments  # the work of the next round, as planned
    exchanged: Assignments  # the work that the next exchange merges, truncated by a stop limit
    rule_state: Any = None  # state of the sync mode
    # time of the merge; in virtual time that of the first rank that merges (a paused rank is later)
    seen_ns: int = 0


def begin_stage(progress: Progress, now_s: float) -> Progress:
    """Return a copy of the progress in which a stage begins at this time."""
    progress = progress.copy()
    progress.begin(now_s)
    return progress


async def worker(ctx: RankContext, stage: StageConfig, state: PeerState) -> int:
    """Run a worker: compute, exchange, merge, until the stage ends.

    A limit on counts ends the stage at its merge. A decision of the lead rank after a merge ends it
    one merge later. With delayed exchanges, one more exchange merges the work that was computed
    meanwhile, if another stage follows.
    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    state.begin(ctx, stage)
    planned, exchanged = plan_first_round(ctx, stage, state)
    is_lead = ctx.rank == ctx.members.lead_rank
    whole, team = Part(stage, state), None
    while True:
        state.local_steps = cap_local_steps(planned, ctx.rank, state.rest)
        state.batch = planned.workers[ctx.rank].batch
        if state.coming is None:  # no bucket of the model is in flight
            mark_round(ctx, stage, state)
        if stage.delayed_overlap is not None and state.pending is None:
            await finish_piece(ctx, stage, state, state.local_steps)
            state.pending_rest = state.rest
            so_far = state.steps, state.samples
            rest = remaining_rounds(stage, ctx.members, planned, so_far, ahead=1)
            state.rest = rest_if_truncated(rest)
            continue
        part = part_of(whole, state.version)
        if team is None or team.stage is not part.stage or team.work is not exchanged:
            team = group_of(ctx, stage, part, exchanged)
        team.begin(0.0, signal_to_send(ctx, stage, state) if is_lead else 0)
        done = await exchange(team, stage, state, part)
        ahead = merge(team, stage, state, part, done)
        planned, exchanged, reason = ahead.planned, ahead.exchanged, ahead.reason
        state.last = reason == "next" and stage.following and done.begun is not None
        ends = reason not in (None, CHECKPOINT) and not state.last
        if ends:
            await end_together(ctx, stage, state, done)
        record_merge(ctx, stage, state, done, is_lead)
        if ends:
            return end(ctx, stage, state, reason)
        if stage.delayed_overlap is not None:
            await finish_piece(ctx, stage, state, done.remaining, done.begun, (part, done.work))
        if reason == CHECKPOINT and not is_truncated(state.rest):
            await receive_model(ctx, stage, state)
            return end(ctx, stage, state, reason)
        if is_lead:
            state.signal = local_stop(ctx, stage, state.progress)


def plan_round(
    stage: StageConfig, members: Members, rule_state: Any, progress: Progress
) -> Assignments:
    """Return the work of a whole round, as the sync mode sets it."""
    workers = stage.sync.in_round(stage, rule_state, progress)
    if workers is stage.plan.workers:
        return members.planned
    return assign(stage, members.ranks, workers)


def plan_present_round(stage: StageConfig, members: Members, state: PeerState) -> Assignments:
    """Return the whole work of the round in progress; set what remains of it for these members and
    the stop limit, which a resumed run may change. Delayed exchanges keep what they began with.
    """
    planned = plan_round(stage, members, state.rule_state, state.progress)
    if stage.delayed_overlap is None:
        done = state.steps, state.samples
        rest = remaining_rounds(stage, members, planned, done)
        state.rest = state.pending_rest = rest_if_truncated(rest)
    return planned


def plan_first_round(
    ctx: RankContext, stage: StageConfig, state: PeerState
) -> tuple[Assignments, Assignments]:
    """Return the work of the round with which a worker begins its loop: as planned, and as its
    exchange merges it. A worker in `state.idle` has none.
    """
    members = members_with_work(stage, ctx.members, state.idle)
    planned = plan_present_round(stage, members, state)
    rest = state.rest if state.pending is None else state.pending_rest
    return planned, without_work(truncate_round(stage, members, planned, rest), state.idle)


def group_of(ctx: RankContext, stage: StageConfig, part: Part, work: Assignments) -> ProcessGroup:
    """Return the process group that exchanges a part of the model in rounds with this work."""
    team = ProcessGroup.from_members(ctx, part.stage, work)
    if part.fragment is not None:
        team.share = part.stage.pipeline.d / stage.pipeline.d
    return team


async def end_together(
    ctx: RankContext, stage: StageConfig, state: PeerState, done: Exchanged
) -> None:
    """Let all ranks end the stage at the same time.

    They would not if a codec has messages of its own, or if they computed during the exchange.
    Buckets of the model that are in flight are received first.
    """
    if state.coming is not None:
        await receive_model(ctx, stage, state)
    elif done.in_flight or stage.topology.links(stage, ctx.rank):
        await ctx.all_reduce(torch.zeros(1), ctx.members.ranks, piggybacked=1)


def record_merge(
    ctx: RankContext, stage: StageConfig, state: PeerState, done: Exchanged, is_lead: bool
) -> None:
    """Record a worker's round; the lead rank evaluates the model if that is due."""
    work, late = done.work, state.in_time is not None
    if work.steps:
        ctx.record_round(
            stage.index, state.round, work.steps, done.staleness, dropped=late, loss=work.loss
        )
        state.round += 1
    if is_lead and not done.sums:
        evaluate_if_due(ctx, stage, state)


def evaluate_if_due(ctx: RankContext, stage: StageConfig, state: PeerState) -> None:
    """Evaluate the model, unless it was merged after the budget."""
    if state.in_time is None and stage.stop_criteria.begin_due_evaluation(state, ctx.now):
        ctx.snapshot(state.params, counts=state.progress.report())


def signal_to_send(ctx: RankContext, stage: StageConfig, state: PeerState) -> int:
    """Return the number that the lead rank piggybacks: its reason to end or pause, and `due`."""
    due = stage.sync.due(state.rule_state, ctx.now)
    return REASONS.index(state.signal) + len(REASONS) * due


def end(ctx: RankContext, stage: StageConfig, state: PeerState, reason: str) -> int:
    """End the stage with this merge, or pause. Returns: the final signal."""
    state.signal = None
    return end_piggybacked(ctx, stage, state, reason, ctx.now_ns)


# The exchange of a round
#
# Rule: the sum equals that of the whole update, bit for bit, however `overlap` partitions it. Loss
# and signal are piggybacked on the first collective of a whole update, or on the last bucket.
#
# Within a step: a bucket of the gradient is summed once backward has computed it and the sum before
# it has ended. The merge waits for all buckets.
# Across steps: a merge counts once the last bucket has arrived, which forward needs first. So every
# rank knows before its next step whether the run continues. The optimizer steps on each bucket as
# it arrives, and the next forward pass waits for each (`step_by_bucket`).
# Delayed: the piece of work that was finished last is summed while workers take the first local
# steps of the next one. With fragments, a merge concerns one fragment of the model.
#
# Sources: Zhang et al., "Poseidon", USENIX ATC 2017; Jayarajan et al., "Priority-based Parameter
# Propagation for Distributed DNN Training", MLSys 2019; Zhang et al., "DeAR", ICDCS 2023; Douillard
# et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, 2025.


Sums = list[list[Any]]  # by segment: the sums of its buckets, or the tasks of these sums


class Exchanged(NamedTuple):
    """The outcome of an exchange."""

    work: Work  # this worker's part of it
    staleness: int  # merges since that work was begun
    update: Any  # the weighted sum; None if its buckets arrive during the next step
    sums: Sums = []  # noqa: RUF012, sums of the buckets that arrive during the next step
    begun: Work | None = None  # steps of the next piece of work, taken meanwhile
    remaining: int = 0  # steps of that piece that remain
    in_flight: bool = False  # True if workers computed meanwhile
    step_s: tuple[float, ...] = ()  # seconds of one step by worker, if the mode sets `tells`


async def exchange(
    team: ProcessGroup, stage: StageConfig, state: PeerState, part: Part
) -> Exchanged:
    """Compute a round's work and sum it over all workers.

    Afterwards `team.loss` is the workers' mean loss and `team.signal` the lead rank's signal.
    """
    if stage.buckets:
        return await exchange_by_bucket(team, stage, state)
    ctx, version, steps = team.ctx, state.version, state.local_steps
    work = await kept_work(ctx, stage, state, stage.sync.work())
    team.loss = work.loss / (team.size - len(state.idle))
    x = stage.aggregate.clip(work.payload)
    summing = exchange_update(team, part.stage, part.state, state.progress, version, x)
    if stage.delayed_overlap is None:
        update = await summing
        step_s = await exchange_step_times(team, work) if stage.sync.tells else ()
        return Exchanged(work, 0, update, step_s=step_s)
    in_flight, begun = begins_next_piece(stage, state), None
    if in_flight and overlapped_steps(stage.delayed_overlap, steps):
        task = ctx.spawn(summing)
        await ctx.sleep(0)  # let the exchange encode before the local steps start
        begun, steps = await begin_piece(ctx, stage, state)
        update = await ctx.join(task)
    else:
        update = await summing
    return Exchanged(work, version - work.version, update, [], begun, steps, in_flight)


async def exchange_by_bucket(team: ProcessGroup, stage: StageConfig, state: PeerState) -> Exchanged:
    """Compute one gradient and sum its buckets while backward continues."""
    ctx, start, tags = team.ctx, team.ctx.now, [tag for _, tag in stage.ready_segments]
    coding = BucketEncoder.prepare(team, stage, state, state.version) if stage.pipelines else None
    posting = ctx.spawn(sum_as_ready(team, stage, coding, tags[:-1]))
    encoding = None if coding is None else coding.encoding
    loss, _ = await compute_by_bucket(ctx, stage, state, encoding)
    work = Work(None, loss, 1, state.batch, ctx.now - start, state.version)
    sums = await ctx.join(posting)
    payload = (await ctx.recv(tags[-1], src=ctx.rank)).payload
    is_finite = coding is None or coding.finish_encoding()
    team.loss = (loss if is_finite else math.nan) / team.size
    if stage.overlaps_next_forward:
        sums.append([ctx.spawn(one) for one in sums_of(team, stage, coding, len(sums), payload)])
        if stage.buckets[0].reduce_scattered:
            sums = await gather_sums(team, sums)
        for task in sums[-1]:
            await ctx.join(task)
        return Exchanged(work, 0, None, sums)
    found = list[Any]()
    for one in sums_of(team, stage, coding, len(sums), payload):
        found.append(await one)
    sums.append(found)
    step_s = await exchange_step_times(team, work) if stage.sync.tells else ()
    if coding is None:
        update = concatenate([x for found in reversed(sums) for x in found])
    else:
        update = await coding.decode_buckets([found for (found,) in sums])
    return Exchanged(work, 0, update, step_s=step_s)


async def sum_as_ready(
    team: ProcessGroup, stage: StageConfig, coding: BucketEncoder | None, tags: Sequence[Tag]
) -> Sums:
    """Begin the sums of each segment as soon as backward has computed it.

    Returns: the tasks of these sums; the sums themselves if the merge waits for all of them.
    """
    sums, others = Sums(), replace(team, piggybacked_sent=True)
    for k, tag in enumerate(tags):
        payload = (await team.ctx.recv(tag, src=team.ctx.rank)).payload
        found = list[Any]()
        for one in sums_of(others, stage, coding, k, payload):
            found.append(team.ctx.spawn(one) if stage.overlaps_next_forward else await one)
        sums.append(found)
    return sums


def sums_of(
    team: ProcessGroup, stage: StageConfig, coding: BucketEncoder | None, k: int, payload: Any
) -> list[Coroutine]:
    """Return the collectives of segment k, one a bucket, in the order in which all ranks post them.

    The scalars of `team` are piggybacked on the last one.
    """
    if coding is not None:
        return [coding.exchange_bucket(team, k, payload)]
    segment, sums = stage.segments[k], []
    last, others = segment.buckets[-1], team
    if len(segment.buckets) > 1:
        others = replace(team, piggybacked_sent=True)
    for number in segment.buckets:
        bucket, own, x = stage.buckets[number], others, payload
        if others is not team:
            x = slice_vector(payload, bucket.start - segment.start, bucket.stop - segment.start)
            own = team if number == last else others
        if bucket.reduce_scattered:
            sums.append(own.scatter(x * team.weight))
        else:
            sums.append(own.all_reduce(x, team.weight, bucket.priority, bucket.credit))
    return sums


async def gather_sums(team: ProcessGroup, scatters: Sums) -> Sums:
    """Gather the scattered sums in the order in which forward needs them, once all are there."""
    chunks = [await team.ctx.join(task) for (task,) in scatters]
    others = replace(team, piggybacked_sent=True)
    gathers = [team.ctx.spawn(team.gather(chunks[-1]))]
    gathers += [team.ctx.spawn(others.gather(chunk)) for chunk in chunks[-2::-1]]
    return [[task] for task in reversed(gathers)]


async def step_by_bucket(
    team: ProcessGroup,
    stage: StageConfig,
    state: PeerState,
    before: Progress,
    sums: Sums,
    position: dict[str, int],
) -> bool:
    """Step on the model bucket by bucket, as their sums arrive, and pass each one to the next
    forward pass.

    Args: before: the progress before this merge; position: fields of the state after this step,
    which the next step changes meanwhile.
    Returns: True if there is a new model, False after divergence.
    """
    ctx, params, moments, made = team.ctx, state.params, state.moments, list[Any]()
    rate, exact = stage.trainer.rate(before.samples), stage.pipeline.traits.lossless
    for k in reversed(range(len(stage.segments))):
        start, stop = stage.slices[k]
        total = concatenate([await ctx.join(task) for task in sums[k]])
        if not state.progress.diverged:
            x = slice_vector(total, 0, stop - start)
            step = partial(stage.trainer.apply_slice, params, moments, start, stop, x, rate, exact)
            moment = "group", stage.index, before.version, k
            made.append(ctx.compute_once(team.ranks, moment, step))
            await ctx.send(ctx.rank, stage.tag("group", k), made[-1][1])
    save_within_budget(ctx, stage, state, params, before)
    if made:
        join = partial(stage.trainer.join_slices, made)
        moment = "model", stage.index, before.version
        state.moments, state.params = ctx.compute_once(team.ranks, moment, join)
    if ctx.rank == ctx.members.lead_rank:
        evaluate_if_due(ctx, stage, state)
    if stage.elastic:
        restart = replace(state, signal=None, coming=None, **position)
        ctx.safe_point(stage.index, restart)
    return bool(made)


async def receive_model(ctx: RankContext, stage: StageConfig, state: PeerState) -> None:
    """Wait for every bucket of the model that is in flight, instead of the next forward pass."""
    if state.coming is not None and await ctx.join(state.coming):
        for k in range(len(stage.segments)):
            await ctx.recv(stage.tag("group", k))
    state.coming = None


async def exchange_step_times(team: ProcessGroup, work: Work) -> tuple[float, ...]:
    """Return the seconds of one step of each worker, by a small all-reduce."""
    own = torch.zeros(team.stage.num_workers, dtype=torch.float64)
    own[team.ctx.rank] = work.step_s
    total = await team.ctx.all_reduce(own, team.ranks, piggybacked=len(own))
    return tuple(total.tolist())


# The merge of a round


def merge(
    team: ProcessGroup, stage: StageConfig, state: PeerState, part: Part, done: Exchanged
) -> Ahead:
    """Merge what all workers have exchanged, and plan the next round."""
    ctx, before = team.ctx, state.progress
    moment = "merge", stage.index, state.version
    compute = partial(merge_and_plan, team, stage, state, part, done)
    result, ahead = ctx.compute_once(team.ranks, moment, compute)
    save_within_budget(ctx, stage, state, state.params, now_ns=ahead.seen_ns)
    state.apply_merge(result)
    state.pending = state.before_work = None
    state.pending_rest = state.rest
    state.rest = ahead.rest
    state.rule_state = ahead.rule_state
    state.idle = ()
    if done.sums:
        position = {"step": state.step, "drawn": state.drawn, "round": state.round + 1}
        stepping = step_by_bucket(team, stage, state, before, done.sums, position)
        state.coming = ctx.spawn(stepping)
    return ahead


def merge_and_plan(
    team: ProcessGroup, stage: StageConfig, state: PeerState, part: Part, done: Exchanged
) -> tuple[Merged, Ahead]:
    """Merge a round's work, and plan a later round; `state` is not changed.

    With delayed exchanges the plan is for the round after the one in flight.
    """
    members, now_ns = team.ctx.members, team.ctx.now_ns
    progress = count_merge(team.work, state.progress, team.loss, done.staleness)
    result = compute_merge(part.stage, part.state, done.update, progress)
    params, outer_state = with_part(stage, state, part, result.params, result.outer_state)
    result = result._replace(params=params, outer_state=outer_state)
    rule, (due, number) = stage.sync, divmod(int(team.signal), len(REASONS))
    report = RoundReport(bool(due), now_ns / 1e9, done.step_s)
    rule_state = rule.observe_round(stage, state.rule_state, progress, report)
    planned = plan_round(stage, members, rule_state, progress)
    is_delayed = stage.delayed_overlap is not None
    done_so_far = progress.steps, progress.samples
    whole = remaining_rounds(stage, members, planned, done_so_far, int(is_delayed))
    rest = rest_if_truncated(whole)
    # with delayed exchanges, the next one merges the work that is computed now
    exchanged = truncate_round(stage, members, planned, state.rest if is_delayed else rest)
    reason = stage.stop_criteria.end_reason(progress) or REASONS[number]
    if state.last and reason in (None, CHECKPOINT):
        reason = "next"
    return result, Ahead(reason, rest, planned, exchanged, rule_state, now_ns)


def compute_merge(stage: StageConfig, state: PeerState, update: Any, progress: Progress) -> Merged:
    """Return the result of merging a sum: the model is unchanged after divergence, and if its
    buckets arrive later.

    The arithmetic is that of a server, so both topologies give the same model. `state` is not
    changed; `progress` counts the merge.
    """
    if progress.diverged or update is None:
        return Merged(state.params, None, state.outer_state, progress)
    moments, outer_state, params = stage.sync.step(
        stage, state, update, stage.trainer.rate(state.progress.samples)
    )
    return Merged(params, moments, outer_state, progress)


# Epochs: how the members of a new epoch continue
#
# Each member goes back to its last safe point: the top of a round (`RankContext.safe_point`), or
# the end of its last local step (`move_safe_point`, `end_local_work`). A member amid a step
# completes it before. The members exchange the versions of their models. If some of them have
# missed the last merge, the others go back by one more round. The donor is the lowest rank with the
# newest state. It sends what all workers have in common to each joining worker, and to a member
# that has missed the end of a stage. Then the kept work is exchanged. The weights are those of the
# members that have work; they add up to 1. Work is computed again if the new members would compute
# it otherwise (`suits_members`), and if its exchange overlaps with computing (`keeps_work`). The
# failed worker's steps of the round count as dropped.
#
# If any member keeps its work, a joining worker has none in this round: it adds zeros with weight 0
# (`PeerState.idle`), so that no member waits for it. It computes from the next round on.
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


# fields of `PeerState` that are equal on all workers, beside the model
COMMON = (
    "progress",
    "pending_rest",
    "last",
    "outer_state",
    "rule_state",
    "assigned",
    "in_time",
    "rest",
    "idle",
)


async def reform(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    saved: tuple[int, PeerState] | None,
    epoch: Epoch,
) -> tuple[int, PeerState]:
    """Continue as a member of a new epoch: bring all members to the newest model.

    Args: saved: (stage, state) of this rank's last safe point; None for a joining worker.
    Returns: (stage, state) to continue with.   Raises: AshlError if no member has a model.
    """
    index, state = saved or (0, PeerState(*stages[0].trainer.init()))
    version = state.progress.version if saved else NO_MODEL
    standing = await compare_members(ctx, stages, epoch, index, version, goes_back=True)
    if index < len(stages) and version > standing.version:
        state = go_back(ctx, state)
        assert state.progress.version == standing.version
    if ctx.rank == standing.donor:
        known = common_state(stages, index, state)
        for rank in standing.outdated:
            await send_state(ctx, rank, epoch, state.params, known)
    elif ctx.rank in standing.outdated:
        model, known = await receive_state(ctx, stages[0], standing.donor, epoch)
        index = adopt_donor_state(ctx, stages, state, model, known, epoch, is_new=saved is None)
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    if index < len(stages):
        enter_epoch(ctx, stages[index], state, epoch, standing)
        if state.before_work is not None and not suits_members(ctx, stages[index], state, epoch):
            state = state.before_work.copy_to_restart()
            enter_epoch(ctx, stages[index], state, epoch, standing)
    else:
        ctx.time_accounting.close(state.progress.end_ns)
    return index, state


def suits_members(ctx: RankContext, stage: StageConfig, state: PeerState, epoch: Epoch) -> bool:
    """Return True if the members of this epoch would compute the kept work of this rank as it is.

    They would not if they have another H or batch.
    """
    everyone = shared_members(ctx, stage, epoch.workers, epoch.number)
    members = members_with_work(stage, everyone, state.idle)
    planned = plan_present_round(stage, members, state)
    return suits_round(state, truncate_round(stage, members, planned, state.rest), ctx.rank)


def go_back(ctx: RankContext, state: PeerState) -> PeerState:
    """Return this rank's state one round before: some members have missed the merge since."""
    assert ctx.before_restart_point is not None
    before: PeerState = ctx.before_restart_point[1].copy_to_restart()
    # the repeated round is recorded once more
    pending = before.pending
    ctx.steps -= state.step - before.step if pending is None else pending.steps
    before.evaluated = state.evaluated
    return before


def enter_epoch(
    ctx: RankContext, stage: StageConfig, state: PeerState, epoch: Epoch, standing: Standing
) -> None:
    """Set the state for a stage with the members of this epoch."""
    before = shared_members(ctx, stage, survivors(stage, state.progress.failed), epoch.number)
    worked = members_with_work(stage, before, state.idle)
    planned = plan_present_round(stage, worked, state)
    steps = truncate_round(stage, worked, planned, state.pending_rest).steps
    state.progress = with_members(state.progress, epoch, standing.joined, steps)
    for rank in {*before.ranks}.difference(epoch.workers).union(standing.joined):
        state.codec_state.forget(rank)
    if standing.outdated and not memory_is_local(stage, state.codec_state):
        state.codec_state = CodecState(gradients=state.codec_state.gradients)
    members = shared_members(ctx, stage, survivors(stage, state.progress.failed), epoch.number)
    state.idle = standing.idle
    if ctx.rank != members.lead_rank:
        state.signal = None
    if state.pending is not None and not state.pending.steps:
        state.pending = None
    if ctx.rank in state.idle:
        state.pending = no_work(stage, state)
    if stage.delayed_overlap is not None and state.pending is not None:
        state.plan_round(stage, members, ctx.rank, ahead=1)
    if ctx.rank in standing.joined:
        state.round, state.step = state.progress.rounds_and_steps_of(ctx.rank)
        state.drawn = state.step * state.batch
    is_new_lead = members.lead_rank != before.lead_rank or ctx.rank in standing.joined
    if ctx.rank == members.lead_rank and is_new_lead:
        state.evaluated = state.progress.current_mark(ctx.now)


def memory_is_local(stage: StageConfig, ends: CodecState) -> bool:
    """Return True if no codec holds state of another worker, or state in common with others."""
    shared = isinstance(stage.pipeline.inner_codec, Collective) or ends.memory is not None
    return not (shared or any(kept is not None for kept in ends.receivers.values()))


def shares_moments(rule: StepRule) -> bool:
    """Return True if all workers have equal moments, because they step on the sum."""
    return rule.exchange != "difference" or rule.momentum_travels


def common_state(stages: Sequence[StageConfig], index: int, state: PeerState) -> dict[str, Any]:
    """Return the state of this worker that all workers have in common, with its stage."""
    stage = stages[min(index, len(stages) - 1)]
    return {name: getattr(state, name) for name in COMMON} | {
        "index": index,
        "moments": state.moments if shares_moments(stage.sync) else None,
        # True if workers hold finished work for the next exchange
        "is_delayed": state.pending is not None and stage.delayed_overlap is not None,
    }


def adopt_donor_state(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    state: PeerState,
    model: Any,
    known: dict[str, Any],
    epoch: Epoch,
    is_new: bool,
) -> int:
    """Take over the model and the common state of the donor. Returns: the index of the stage."""
    state.params, index, progress = model, known["index"], known["progress"]
    state.adopt_progress(progress)
    if index < len(stages):
        if known["assigned"] is not None:
            stages = apply_assignments(stages, *known["assigned"])
        stage = stages[index]
        ranks = survivors(stage, progress.failed)
        state.enter(stage, shared_members(ctx, stage, ranks, epoch.number), ctx.rank)
        if known["moments"] is not None:
            state.moments = known["moments"]
        elif is_new:
            state.moments = stage.trainer.moments()
        state.round, state.step = progress.rounds_and_steps_of(ctx.rank)
        state.drawn = state.step * state.batch
        state.pending = state.start = state.begun = state.before_work = None
    for name in COMMON:
        setattr(state, name, known[name])
    if known["is_delayed"]:
        # a first piece of work is planned as the others' finished piece
        state.rest = known["pending_rest"]
    return index

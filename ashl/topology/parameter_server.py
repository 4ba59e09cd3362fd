"""Parameter server: workers push updates, the server merges them into the model and answers with
the model.

Data flow: a worker computes on the model that it pulled last and sends a push. The server decodes
the push, merges it once `quorum` pushes are there (`aggregate` sets the weights, `outer` takes the
step), and answers every waiting worker that `sync.may_proceed` names. Traffic per worker and
exchange: one push and one pull of the model. States of a stage: GO; NEXT, while pushes in flight
are merged before the next stage; STOP, at the end of the run. With
`runtime.on_worker_failure=reshard` each surviving worker also trains on its part of a failed
worker's data, from the first round that it begins after the reply that reports the failure.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar, cast

from ashl.aggregate.weighted import Push
from ashl.compression.contract import EncodeContext
from ashl.errors import AshlError, UsageError
from ashl.learn.pieces import Pieces
from ashl.option import Ratio, option, quoted
from ashl.overlap.streaming import Fragmented
from ashl.plan.plan import WorkerPlan, assigned
from ashl.plan.profile import Profile
from ashl.planner.assignment import Planner
from ashl.planner.online import Averages
from ashl.runtime.effects import JOIN, PEER_FAILED, Message, PeerFailedError, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import Replan
from ashl.runtime.sums import concatenate, slice_vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.fragment import Fragment
from ashl.stage.program import apply_assignments
from ashl.stage.progress import DIVERGED, FAILURE, LATE, RUN_START, Progress, ProgressMark
from ashl.stage.stage import (
    CODEC,
    DELAY,
    FAULT_TOLERANT,
    GO,
    LAST,
    NEXT,
    OUTER,
    OVERLAP,
    PULLS,
    STOP,
    WEIGHTS,
    Loop,
    Network,
    Rule,
    Stage,
    Topology,
)
from ashl.topology.ending import drop_reason, end_time_ns, leave_stage, record_end, stop_decision
from ashl.topology.estimate import next_batch
from ashl.topology.fragments import codec_states_of, finish_piece, fragment_at, take_local_steps
from ashl.topology.local_work import (
    AT_ONCE_S,
    Work,
    WorkerState,
    at_round_boundary,
    encode_update,
    exchangeable_work,
    local_work,
    reports_mean,
)
from ashl.topology.members import as_members, failed_as_numbers
from ashl.topology.replies import (
    ADMISSION_FIELDS,
    AS_PLANNED,
    PULL_FIELDS,
    Admission,
    Assignment,
    Pull,
    parse_reply,
)


class Updates:
    """Messages between worker and server: updates in pushes, the model in pulls.

    `plain`: the optimizer's step depends on nothing but the learning rate. `unbiased`: the codec
    must be unbiased. `whole`: some pushes are computed from the whole shard of a worker.
    """

    plain: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    async def make_push(
        self, ctx: RankContext, stage: Stage, state: WorkerState
    ) -> tuple[Work, Any, float]:
        """Compute the next push of a worker. Returns: (work, payload, loss)."""
        if stage.delayed is not None:
            work = await exchangeable_work(ctx, stage, state)
        else:
            work = await (compute_in_slices if stage.messages else local_work)(ctx, stage, state)
        body, loss = await encode_update(ctx, stage, state, work)
        return work, body, loss

    def admission_payload(self, stage: Stage, state: ServerState) -> Any:
        """Return the payload that a joining worker starts from."""
        return state.params

    def apply_admission(self, state: WorkerState, body: Any, kept: WorkerState | None) -> None:
        """Start a joining worker from `body`; `kept` is its state in a checkpoint, or None."""
        state.params = body

    def on_membership_change(self, stage: Stage, state: ServerState, rank: int) -> None:
        """Update the server's state once this worker has failed (it is in `progress.gone`) or
        rejoins (it is not).
        """
        state.rule_state = rule_of(stage).on_membership_change(
            stage, state.rule_state, state.progress, rank
        )

    def apply_push(
        self, ctx: RankContext, stage: Stage, state: ServerState, message: Message
    ) -> Coroutine[Any, Any, bool]:
        """Apply a push that is not too stale. Returns: True if the model changed."""
        return (merge_fragment_push if stage.fragments else merge_push)(ctx, stage, state, message)

    async def answer(
        self, ctx: RankContext, stage: Stage, state: ServerState, rank: int, changed: bool
    ) -> Any:
        """Return the payload of a reply: the model, or its compressed difference; None if the model
        did not change.
        """
        if stage.fragments:
            return await answer_fragment(ctx, stage, state, rank)
        if not changed or stage.topology.pull_ratio is None:
            return state.params if changed else None
        context = EncodeContext(
            stage.topology.pull_ratio, stage.seed, stage.server + 1 + rank, state.progress.version
        )
        pull = partial(stage.link.encode_pull, state.ends, rank, state.params, context)
        return await ctx.compute(pull, work=1, kind="compress")

    def apply_pull(self, stage: Stage, state: WorkerState, body: Any) -> Any:
        """Return the model that a worker continues with after a pull; not called at a stage
        boundary.
        """
        return stage.link.apply_pull(state.params, body)


class ServerRule(Rule, contract=True):
    """Sync mode of a parameter server. The defaults are those of ASP: no worker ever waits.

    `state` belongs to the rule: `begin` makes it, `observe` returns the next one. Checkpoints of
    the server hold it, so it consists of plain values. All methods are pure: equal arguments give
    equal results.
    """

    takes_all: ClassVar[bool] = (
        False  # if True, the server handles every push that has arrived before it answers
    )

    def quorum(self, num_workers: int) -> int:
        """Return the number of pushes of a merge. Raises: UsageError if there are fewer workers."""
        return 1

    def accepts(self, staleness: int) -> bool:
        """Return True if a push is merged; otherwise it is dropped and counted as dropped."""
        return True

    def begin(self, stage: Stage, progress: Progress) -> Any:
        """Return the rule's state at the start of a stage."""
        return None

    def may_proceed(self, state: Any, progress: Progress) -> Iterable[int]:
        """Return the waiting workers that may proceed now."""
        return progress.waiting

    def observe(self, stage: Stage, state: Any, progress: Progress, push: Push) -> Any:
        """Return the rule's state after a push that arrived at `progress.now_s`."""
        return state

    def closes_s(self, state: Any, progress: Progress) -> float:
        """Return the time (seconds) at which buffered pushes are merged even without a quorum;
        -inf: never.

        Applies with `takes_all` only.
        """
        return -math.inf

    def next_assignment(
        self, stage: Stage, state: Any, progress: Progress, rank: int
    ) -> Assignment | None:
        """Return the work of this worker, which proceeds at `progress.now_s`; None: as planned."""
        return None

    def on_membership_change(self, stage: Stage, state: Any, progress: Progress, rank: int) -> Any:
        """Return the rule's state once this worker has failed (it is in `progress.gone`) or
        rejoined (it is not).
        """
        return state

    def on_rescale(self, stage: Stage, state: Any, progress: Progress) -> Any:
        """Return the rule's state for a run that resumes with another number of workers at
        `progress.now_s`.
        """
        return self.begin(stage, progress)

    def lr_scale(self, state: Any) -> float:
        """Return the factor of the server's learning rate."""
        return 1.0

    def messages(self) -> Updates:
        """Return the messages that this mode exchanges, see `Updates`."""
        return UPDATES


class BarrierRule(ServerRule, contract=True):
    """Base of synchronous modes: every worker waits until all workers have pushed."""

    averages: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    def quorum(self, num_workers: int) -> int:
        return num_workers

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

    def may_proceed(self, state: Any, progress: Progress) -> Iterable[int]:
        return progress.waiting_without_merge()


UPDATES = Updates()


@option
class ParameterServer(Topology):
    """One server (rank n) holds the model; workers talk to it alone.

    With `pull_ratio` a pull carries that share of the difference to the worker's last pull, by the
    chosen codec.
    """

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset(
        {CODEC, WEIGHTS, PULLS, OUTER, OVERLAP, DELAY, FAULT_TOLERANT}
    )
    has_server: ClassVar[bool] = True
    pull_ratio: Ratio | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        return stage.workers if rank == stage.server else (stage.server,)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a push and a pull take, uncontended."""
        if stage.fragments:
            parts = (stage.fragment(k) for k in range(len(stage.fragments)))
            return max(self.exchange_ns(part, network, rank) for part in parts)
        up = stage.codec.encoded_nbytes(stage.worker(rank).compression_ratio, stage.link.d)
        down = stage.link.pull_bytes(self.pull_ratio)
        return network.transfer_ns(rank, stage.server, up) + network.transfer_ns(
            stage.server, rank, down
        )

    def begin(self, ctx: RankContext, stage: Stage) -> WorkerState | ServerState:
        params, moments = stage.trainer.init()
        if ctx.rank == stage.server:
            return ServerState(params, moments, Progress(stage.num_workers))
        return WorkerState(params, moments)

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        if kept is not None and ctx.rank == stages[0].server:
            return await gather_workers(ctx, stages, *kept)
        return await join(ctx, stages, None if kept is None else kept[1])

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank == stage.server:
            return server
        return run_fragments if stage.fragments else worker


@dataclass
class ServerState:
    """All that the server needs to go on."""

    params: Any
    moments: Any  # of the optimizer, where gradients are exchanged
    progress: Progress
    evaluated: ProgressMark = RUN_START  # the last evaluation
    buffer: list[Push] = field(default_factory=list)  # pushes that came and are not merged yet
    slices: dict[int, list[Push]] = field(
        default_factory=dict
    )  # ... by number, where slices are merged
    made: dict[int, tuple[Any, Any]] = field(
        default_factory=dict
    )  # (moments, elements) of those that were merged
    ends: CodecState = field(default_factory=CodecState)  # what the codec keeps here
    fragment_ends: tuple[CodecState, ...] = ()  # ... of each, where fragments are exchanged
    outer_state: Any = None  # the outer optimizer's moments
    profile: Profile | None = None  # as measured by a profiling stage
    assigned: tuple[int, Any] | None = None  # what profiling has planned, from this stage on
    entered: int | None = None  # the stage that it is in
    counted: int = 0  # samples of a step of which not all slices are merged yet
    averages: Any = None  # what an online planner has seen
    rule_state: Any = None  # the sync rule's own
    signal: int = GO  # NEXT while the work that is under way is waited for
    flush_requested: tuple[
        int, ...
    ] = ()  # who has been asked for the last of it, where exchanges are delayed
    reason: str | None = None
    ahead: Message | None = None  # what has come already
    newcomers: tuple[int, ...] = ()  # who came at the border, and is answered in the next stage
    incarnations: dict[int, int] = field(
        default_factory=dict
    )  # the present one of each worker that has come back
    pulls: list[Tag] = field(default_factory=list)  # of each worker's replies, in its present life
    quorum: int = 1  # how many pushes make a merge now

    workers: tuple[
        WorkerPlan, ...
    ] = ()  # what each worker does now: the plan's, until it is planned anew

    @property
    def version(self) -> int:
        """Of the model."""
        return self.progress.version

    def enter(self, stage: Stage, now_s: float) -> None:
        """A stage begins: its workers, codecs that begin anew at both ends, and momentum as it is
        handed over.
        """
        if self.entered == stage.index:
            return  # it goes on from a checkpoint
        self.entered, self.signal, self.flush_requested, self.reason, self.ahead = (
            stage.index,
            GO,
            (),
            None,
            None,
        )
        self.slices, self.made, self.counted = {}, {}, 0
        self.progress.begin(now_s)
        self.rule_state = rule_of(stage).begin(stage, self.progress)
        self.workers, self.ends = (
            stage.plan.workers,
            stage.carry_over_codec_state(self.ends, self.progress.samples),
        )
        self.quorum = stage.quorum_of(self.progress.present)
        self.pulls = [stage.tag("pull", self.incarnations.get(rank, 0)) for rank in stage.workers]
        if stage.resets:
            self.moments = stage.trainer.moments()
        self.outer_state = None if stage.resets_outer else self.outer_state


async def worker(ctx: RankContext, stage: Stage, state: WorkerState) -> int:
    """Compute on the model last pulled, push what came of it, wait for the reply; returns the last
    word. Where exchanges are delayed, the next piece of work is computed between a push and its
    reply.
    """
    state.enter(stage, ctx.rank)
    messages, signal, push, pull = (
        rule_of(stage).messages(),
        GO,
        stage.tag("push"),
        stage.tag("pull", state.incarnation),
    )
    server, in_parts, answer = (
        stage.topology.server_of(stage, ctx.rank),
        pull_comes_in_parts(stage),
        ctx.recv(pull),
    )
    while signal in (GO, LAST):
        if state.coming is None or await settle_pull(ctx, stage, state):
            ctx.safe_point(stage.index, state)
        work, body, loss = await messages.make_push(ctx, stage, state)
        meta = (work.steps, work.samples, loss, work.version, work.step_s, state.pull_s)
        await ctx.send(server, push, body, meta)
        ahead, asked = None, 0.0
        if stage.delayed is not None and not state.last:
            ahead, asked = await local_work(ctx, stage, state), ctx.now
        message = await answer
        reply = parse_reply(Pull, message.meta)
        signal = reply.signal
        if stage.reshards:
            state.away = as_members(message.meta[PULL_FIELDS:])
        if reply.dropped and not stage.codec.traits.lossless and not math.isnan(loss):
            stage.link.restore_dropped(state.ends, body)
        if message.body is not None:
            if in_parts and signal == GO:
                state.coming = message.body
            else:
                state.params = (
                    message.body
                    if signal == NEXT
                    else messages.apply_pull(stage, state, message.body)
                )
        seen = message.body is not None and (ahead is None or ctx.now - asked > AT_ONCE_S)
        state.pull_s = ctx.now - message.start_ns / 1e9 if seen else 0.0
        state.pending = ahead and at_round_boundary(ctx, stage, state, ahead)
        state.follow(reply)
        state.last = signal == LAST
        if signal in (NEXT, STOP):
            if stage.by_priority:
                await cancel_exchange(ctx, stage, state)
            await ctx.discard(
                stage.tag("back")
            )  # slices of a model that comes as a whole now, or no more
            leave_stage(ctx, stage, signal, reply.end_ns)
        ctx.record_round(
            stage.index,
            state.round,
            work.steps,
            reply.staleness,
            dropped=bool(reply.dropped),
            loss=loss,
        )
        state.round += 1
    return signal


async def server(ctx: RankContext, stage: Stage, state: ServerState) -> int:
    """Merge and answer until the stage is over, then answer every worker once more; returns the
    last word.

    Before the next stage begins, the work that is under way is waited for and merged; at the end of
    the run it is not.
    """
    progress, rule, push = state.progress, rule_of(stage), stage.tag("push")
    state.enter(stage, ctx.now)
    slices = {stage.tag("slice"): on_slice} if stage.overlap.by_slice or stage.by_priority else {}
    incoming, others, deadline_s = (
        (push, *slices, PEER_FAILED, JOIN),
        {**slices, CLOSE: merge_buffered},
        stage.stop_criteria.deadline_s,
    )
    endless = ctx.recv(*incoming) if math.isinf(deadline_s) else None
    while state.newcomers:
        await admit(ctx, stage, state, state.newcomers[0])
    while True:
        ctx.safe_point(stage.index, state)
        message = state.ahead or await (endless or ctx.recv(*incoming, before_s=deadline_s))
        state.ahead = None
        ctx.time_accounting.end_round()  # nobody asks for the server's rounds, so they are not kept
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        take_in = on_push if message.tag == push else others.get(message.tag, on_membership)
        if await take_in(ctx, stage, state, message) and stage.stop_criteria.take_evaluation(
            state, ctx.now
        ):
            ctx.snapshot(state.params, counts=progress.report())
        signal, reason = stop_decision(ctx, stage, progress)
        if signal == STOP or state.signal == GO:
            state.signal, state.reason = signal, reason
        if state.signal == STOP:
            break
        if state.signal == NEXT:
            await flush_pending(ctx, stage, state)
            if len(progress.waiting) == progress.present:
                if state.buffer:
                    await ctx.compute(
                        partial(apply_merge, stage, state, None), work=1, kind="apply"
                    )
                break
            continue
        if rule.takes_all:
            state.ahead = await receive_more(ctx, stage, state, incoming)
        if state.ahead is None:
            ranks = []
            for rank in sorted(rule.may_proceed(state.rule_state, progress)):
                if await reply(ctx, stage, state, rank):
                    ranks.append(rank)
            if stage.overlap.pulls:
                await send_remaining_parts(ctx, stage, ranks, state.params)
    await drain_slices(ctx, stage, state)
    if state.signal == STOP:
        ctx.safe_point(stage.index, None)
    await ctx.discard(*slices)  # of pushes that are too late
    await finish_stage(ctx, stage, state, state.signal)
    record_end(ctx, stage, progress, state.reason)
    return state.signal


# What the server makes of a push
#
# What a parameter server makes of pushes: taken in, folded into the model, and answered.


CLOSE: Tag = ("close", 0, 0)  # from a server to itself: what has come is merged now


def rule_of(stage: Stage) -> ServerRule:
    """The stage's sync mode, as a server asks it."""
    rule: Any = stage.sync  # planning has seen to it
    return rule


async def on_push(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one push; returns whether the model changed."""
    progress, worker, rule = state.progress, message.src, rule_of(stage)
    if stage.messages:
        message, stage = (
            await assemble_push(ctx, stage, message),
            await await_slices(ctx, stage, state),
        )
    steps, loss, version = int(message.meta[0]), message.meta[2], int(message.meta[3])
    staleness = progress.version - version
    all_late = (
        staleness > 0 and rule.in_rounds and stage.delayed is not None
    )  # by one round, so that nobody is
    beyond = staleness - 1 if all_late else staleness
    late = not (rule.accepts(beyond) and stage.aggregate.accepts(beyond))
    progress.observe(
        worker, 0 if late else staleness, loss
    )  # staleness is counted of what was applied
    progress.start_waiting(worker, staleness, late)
    if late or progress.diverged:
        progress.count_dropped(worker, steps, LATE if late else DIVERGED)
        return False
    if stage.by_priority:
        return count_step(stage, state, message)
    return await rule.messages().apply_push(ctx, stage, state, message)


async def receive_more(
    ctx: RankContext, stage: Stage, state: ServerState, tags: Sequence[Tag]
) -> Message | None:
    """What else has come, where the rule takes in all of it, or comes until what has come is
    merged.
    """
    closes_s, deadline_s = (
        rule_of(stage).closes_s(state.rule_state, state.progress),
        stage.stop_criteria.deadline_s,
    )
    message = await ctx.recv(*tags, before_s=max(ctx.now, min(closes_s, deadline_s)))
    due = message is None and -math.inf < closes_s <= deadline_s
    return Message(ctx.rank, CLOSE, None, (), int(ctx.now_ns)) if due else message


async def merge_buffered(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """Merge what has come, however few."""
    await ctx.compute(partial(apply_merge, stage, state, None), work=1, kind="apply")
    return True


async def merge_push(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Decode an update, fold it in, and let the rule and the planner see it; returns whether the
    model changed.
    """
    progress, worker = state.progress, message.src
    steps, samples, loss, version, step_s, pull_s = message.meta
    body = stage.link.receive_body(state.ends, worker, message.body)
    staleness, push_s = progress.version - int(version), ctx.now - message.start_ns / 1e9
    push = Push(worker, body, int(steps), int(samples), staleness, loss, step_s, push_s, pull_s)
    update = await ctx.compute(partial(apply_merge, stage, state, push), stage.push_share, "apply")
    if (
        update is not None
        and not stage.codec.traits.lossless
        and reports_mean(stage, progress.version - 1)
    ):
        ctx.show_update(update, of=None, tick=progress.version - 1)
    progress.now_s = ctx.now
    state.rule_state = rule_of(stage).observe(stage, state.rule_state, progress, push)
    if stage.plan.h_preset is not None and stage.planner is not None and stage.planner.follows:
        replan(ctx, stage, state, push, stage.planner)
    return update is not None


def apply_merge(stage: Stage, state: ServerState, push: Push | None) -> Any:
    """Fold a push into the model: one outer step on Σ c_i·Δ_i, or one optimizer step on Σ c_i·g_i;
    returns that sum. Until a quorum has come it is kept (None); with push None those that were are
    folded in, however few: at a border, or where the others of the quorum are gone.
    """
    progress = state.progress
    members = state.buffer
    if push is not None:
        members.append(push)
        if len(members) < state.quorum:
            return None
    if len(members) > 1:
        members.sort(key=attrgetter("worker"))
    weights = (
        stage.with_assignments(state.workers)
        .with_redistributed_shards(progress.gone)
        .weights_of(members, progress.gone)
    )
    if stage.codec.traits.reduces:
        update: Any = stage.link.reduce(state.ends, [member.body for member in members], weights)
    else:
        update = stage.aggregate.fold(members, weights)
    state.buffer = []
    lr = stage.trainer.rate(progress.samples) * rule_of(stage).lr_scale(state.rule_state)
    step = finish_sliced_step if state.made else stage.sync.step
    moments, state.outer_state, state.params = step(stage, state, update, lr)
    if moments is not None:
        state.moments = moments
    progress.merge()
    for member in members:
        progress.commit(member.worker, member.steps, member.samples)
    return update


def replan(
    ctx: RankContext, stage: Stage, state: ServerState, push: Push, planner: Planner
) -> None:
    """Let an online planner see this commit and, where it is worth it, change H, ratios and weights
    from now on, of those who are there.
    """
    payload = stage.payload(state.workers[push.worker].compression_ratio)
    if state.averages is None:
        profile = state.profile or stage.profile
        assert profile is not None, "an online planner starts from a profile"
        state.averages = Averages(profile)
    averages = planner.observe(
        state.averages, push.worker, push.step_s, push.push_s, push.pull_s, payload
    )
    averages = planner.hear(averages, push.worker, push.body, push.steps, push.samples)
    assert stage.plan.h_preset is not None
    presets = (stage.plan.h_preset, stage.plan.r_preset)
    there = [rank for rank in stage.workers if rank not in state.progress.gone]
    current = [state.workers[rank] for rank in there]
    seen, rows = planner.replan(averages.of(there), current, *presets, stage.payload)
    state.averages = replace(averages, commits=seen.commits)
    if rows is not None:
        anew = dict(
            zip(there, assigned(current, rows, resharded=False), strict=True)
        )  # shards are cut at borders only
        state.workers = tuple(anew.get(rank, worker) for rank, worker in enumerate(state.workers))
        ratios = [w.compression_ratio for w in state.workers]
        ctx.emit(
            Replan(
                ctx.rank, stage.index, ratios, [w.local_steps for w in state.workers], ctx.now_ns
            )
        )


async def reply(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> bool:
    """Go on, on this model; returns whether it is another one than before.

    Raises UsageError where the rule lets go who does not wait.
    """
    progress = state.progress
    if rank not in progress.waiting:
        who = f"{quoted(type(stage.sync))} lets worker {rank} go on, which does not wait"
        raise UsageError(f"{who}; let its `may_proceed` return some of `progress.waiting`.")
    changed = progress.pulled[rank] != progress.version  # since this worker's last pull
    staleness, late = progress.release(rank)
    progress.now_s = ctx.now
    local_steps, ratio, interval_s, batch = assignment_of(stage, state, rank)
    body = await rule_of(stage).messages().answer(ctx, stage, state, rank, changed)
    body = first_part(stage, body) if stage.messages and changed else body
    counts = progress.version, progress.steps, progress.samples
    meta = Pull(GO, *counts, staleness, late, 0, local_steps, ratio, interval_s, batch)
    await ctx.send(
        rank,
        state.pulls[rank],
        body,
        (*meta, *failed_as_numbers(stage, progress.gone)) if stage.reshards else meta,
    )
    return changed


def assignment_of(stage: Stage, state: ServerState, rank: int) -> tuple[int, float, float, int]:
    """What this worker, which goes on now, does next: `Assignment` in full."""
    progress, plan = state.progress, state.workers[rank]
    assignment = (
        rule_of(stage).next_assignment(stage, state.rule_state, progress, rank) or AS_PLANNED
    )
    planned = plan.local_steps if assignment.local_steps is None else assignment.local_steps
    ahead = int(stage.delayed is not None)
    rest = (
        None
        if planned == 1
        else stage.remaining_rounds(progress.steps, progress.samples, ahead, progress.gone)
    )
    ratio = plan.compression_ratio if assignment.ratio is None else assignment.ratio
    return (
        stage.cap_local_steps(planned, rank, rest),
        ratio,
        assignment.interval_s,
        assignment.batch,
    )


# Workers that fail and rejoin  Who takes part: a parameter server goes on without a worker that is
# lost, and with one that comes (back).  Rule of a loss, once it is noticed: what others wait for,
# they wait for without that worker. A lead is counted from the slowest of those who are left. A
# round waits for them alone, is merged at once where the loss makes it whole, and what the lost
# worker had pushed for it is dropped and counted; so from there on it is the round of the others.
# Where pushes are merged as they come, what had come is used, and the weights are those of the
# others, Σ w_i = 1. What compressors keep for the worker is forgotten.  With
# `runtime.on_worker_failure=reshard` the data of the lost are with the others meanwhile: dealt out
# one by one, each worker goes on behind its cursor in the order of passes over its own samples and
# these, from its next round on after it has heard. So a pass visits each of them once, at one
# worker; who comes back has its own again.  Rule of a join: the worker gets the stage, the model,
# and its orders. It counts as far as the slowest is; its optimizer and its compressor begin anew,
# and its data go on where the server has last heard of them. Who comes at a border takes part from
# the next stage on, and who comes when the run is over learns it. A life is known by the moment at
# which it asked to take part, and what the server sends to it has that as its tag: nothing is
# mistaken for an answer to another.  From a checkpoint of workers that go at their own pace all
# come anew, to the server as it was: what it had merged is counted, and what was on its way is lost
# and computed again. Each is as far as it was, with the optimizer's state and the residual that it
# had when it next went on.  Source: membership as in Li et al., "Scaling Distributed Machine
# Learning with the Parameter Server", OSDI 2014
# (3.8); rounds of those who are left as with the backup workers of Chen et al., arXiv 1604.00981.


PLANNED: Tag = ("planned", 0, 0)  # what profiling has planned, for who was not there


def admission_tag(incarnation: int) -> Tag:
    """The tag of the answer to a newcomer."""
    return "welcome", 0, incarnation


async def on_membership(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """At the server: a worker is lost or has come; returns whether the model changed."""
    if message.tag == PEER_FAILED:
        return await remove_failed(ctx, stage, state, message.src)
    record_join(state, message)
    if state.signal != NEXT:
        await admit(ctx, stage, state, message.src)
    return False


def record_join(state: ServerState, message: Message) -> None:
    """A newcomer asks to take part."""
    (incarnation,) = message.meta
    state.newcomers += (message.src,)
    state.incarnations[message.src] = int(incarnation)


def check_left(ctx: RankContext, stage: Stage, rank: int, left: int) -> None:
    """Raises AshlError where too few workers are left without this one; where a run goes on without
    none, that is but a consequence of its loss.
    """
    if left < stage.min_workers:
        raise AshlError(
            f"worker {rank} failed at {ctx.now:.6g} s and {left} of {stage.num_workers} workers are"
            f" running, fewer than runtime.min_workers={stage.min_workers}: the run ends here"
        ) from (None if stage.elastic else PeerFailedError(rank))


async def remove_failed(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> bool:
    """Go on without a worker; returns whether the model changed, as the round was whole without it.
    Raises AshlError where too few are left.
    """
    progress, rule = state.progress, rule_of(stage)
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    if rank in progress.gone:
        return False
    progress.remove_worker(rank)
    state.quorum = stage.quorum_of(progress.present)
    state.ends.forget(rank)
    check_left(ctx, stage, rank, progress.present + len(state.newcomers))
    progress.now_s = ctx.now
    rule.messages().on_membership_change(stage, state, rank)
    if not rule.in_rounds:
        return False
    for push in state.buffer:
        if push.worker == rank:
            progress.count_dropped(rank, push.steps, FAILURE)
    state.buffer = [push for push in state.buffer if push.worker != rank]
    if not state.buffer or len(state.buffer) < state.quorum:
        return False
    await ctx.compute(partial(apply_merge, stage, state, None), work=1, kind="apply")
    return True


async def admit(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> None:
    """Let a newcomer take part, from this model on."""
    progress = state.progress
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    progress.join(rank)
    state.quorum, state.pulls[rank] = (
        stage.quorum_of(progress.present),
        stage.tag("pull", state.incarnations[rank]),
    )
    progress.now_s = ctx.now
    messages = rule_of(stage).messages()
    messages.on_membership_change(stage, state, rank)
    stage.link.record_full_pull(state.ends, rank, state.params)
    planned, rows = state.assigned or (0, None)
    applied, what = (
        (progress.version, progress.steps, progress.samples),
        assignment_of(stage, state, rank),
    )
    held, (rounds, done) = (
        [push.steps for push in state.buffer if push.worker == rank],
        progress.rounds_and_steps_of(rank),
    )
    pushed = rounds + len(held), done + sum(held)
    admission = Admission(GO, 0, stage.index, *applied, *pushed, planned, *what)
    body = messages.admission_payload(stage, state)
    await ctx.send(
        rank,
        admission_tag(state.incarnations[rank]),
        body,
        (*admission, *failed_as_numbers(stage, progress.gone)),
    )
    if rows is not None:
        await ctx.send(rank, PLANNED, rows)


async def reject_late_joins(ctx: RankContext, state: ServerState, end_ns: int) -> None:
    """At the server, once nobody else is to be answered: whoever has come, or comes, learns that
    the run is over.
    """
    while True:
        for rank in state.newcomers:
            await ctx.send(
                rank, admission_tag(state.incarnations[rank]), None, Admission(STOP, end_ns)
            )
        state.newcomers = ()
        message = await ctx.recv(JOIN, PEER_FAILED)
        if message.tag == JOIN:
            record_join(state, message)


async def gather_workers(
    ctx: RankContext, stages: Sequence[Stage], index: int, state: ServerState
) -> tuple[int, ServerState]:
    """At the server, from a checkpoint: nothing is on its way, and all workers come anew."""
    stage, progress, heard = stages[index], state.progress, set[int]()
    state.newcomers, state.flush_requested, state.ahead, state.buffer = (), (), None, []
    for rank in stage.workers:
        state.ends.forget(rank)
        if rank in progress.waiting:
            progress.stop_waiting(rank)
    while len(heard) < stage.num_workers:
        message = await ctx.recv(JOIN, PEER_FAILED)
        heard.add(message.src)
        if message.tag == PEER_FAILED:
            await remove_failed(ctx, stage, state, message.src)
        else:
            record_join(state, message)
    return index, state


async def join(
    ctx: RankContext, stages: Sequence[Stage], kept: WorkerState | None = None
) -> tuple[int, WorkerState] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there;
    None where the run is over. `kept`: what it was in a checkpoint.
    """
    incarnation = int(float(ctx.now_ns))
    await ctx.send(stages[0].server, JOIN, None, (incarnation,))
    message = await ctx.recv(admission_tag(incarnation))
    admission = parse_reply(Admission, message.meta)
    if admission.signal == STOP:
        ctx.time_accounting.close_at(admission.end_ns)
        return None
    params, moments = stages[0].trainer.init()
    state = WorkerState(params, moments if kept is None else kept.moments)
    state.steps, state.samples = admission.steps, admission.samples
    if admission.planned:
        state.assigned = admission.planned, (await ctx.recv(PLANNED)).body
        stages = apply_assignments(stages, *state.assigned)
    stage, state.incarnation, state.away = (
        stages[admission.stage],
        incarnation,
        as_members(message.meta[ADMISSION_FIELDS:]),
    )
    state.enter(stage, ctx.rank)
    if kept is not None:
        state.ends, state.moments = (
            stage.restore_codec_state(kept.ends, state.samples),
            kept.moments,
        )
    if message.body is not None:
        rule_of(stage).messages().apply_admission(state, message.body, kept)
    state.follow(admission)
    state.round, state.step = admission.rounds, admission.done
    state.drawn = state.step * state.batch
    return stage.index, state


# The end of a stage  How a parameter server ends a stage: what is under way is called in or
# dropped, and every worker is answered.


async def flush_pending(ctx: RankContext, stage: Stage, state: ServerState) -> None:
    """Delayed: who waits has computed something meanwhile; each is asked once to hand that in, and
    computes no more.
    """
    progress = state.progress
    applied = (progress.version, progress.steps, progress.samples)
    for rank in sorted(set(progress.waiting) - set(state.flush_requested)) if stage.delayed else ():
        state.flush_requested += (rank,)
        staleness, late = progress.stop_waiting(rank)
        await ctx.send(rank, state.pulls[rank], None, Pull(LAST, *applied, staleness, late, 0))


async def finish_stage(
    ctx: RankContext, stage: Stage, state: ServerState, signal: int, end_ns: int | None = None
) -> None:
    """Tell every worker that the stage ended now, or then. What came before and was not merged is
    dropped.
    """
    progress, end_ns = state.progress, end_time_ns(stage, ctx.now_ns) if end_ns is None else end_ns
    progress.end_ns, applied = end_ns, (progress.version, progress.steps, progress.samples)
    unmerged = {push.worker for push in state.buffer}
    for push in state.buffer:
        progress.count_dropped(push.worker, push.steps, drop_reason(signal))
    state.buffer = []
    working = set(stage.workers) - set(progress.waiting) - progress.gone
    for rank in sorted(progress.waiting):
        staleness, late = progress.stop_waiting(rank)
        stage.link.record_full_pull(state.ends, rank, state.params)
        meta = (
            *Pull(signal, *applied, staleness, late or rank in unmerged, end_ns),
            *failed_as_numbers(stage, progress.gone),
        )
        await ctx.send(rank, state.pulls[rank], state.params if signal == NEXT else None, meta)
    while working:
        message = await ctx.recv(stage.tag("push"), PEER_FAILED, JOIN)
        if message.tag == JOIN:
            record_join(state, message)
            continue
        working.discard(message.src)
        if message.tag == PEER_FAILED:
            continue
        message = await assemble_push(ctx, stage, message) if stage.messages else message
        if message.start_ns <= end_ns:
            progress.count_dropped(message.src, int(message.meta[0]), drop_reason(signal))
        await ctx.send(
            message.src, state.pulls[message.src], None, Pull(signal, *applied, 0, True, end_ns)
        )
    if signal == STOP:
        if stage.joins and ctx.rank == stage.server:
            ctx.spawn(reject_late_joins(ctx, state, end_ns))
        ctx.time_accounting.close_at(end_ns)


# Messages in parts  What travels between a worker and the parameter server in parts, while the
# worker computes.  Rule: message k, a slice of the gradient, leaves the moment backward has come to
# it; the slices queue at the worker's port, and at the server's with those of the others. The last
# of them is the push itself, with what rides along. The server puts a push together when that has
# come, so the gradient is the same to the bit as one in one piece. Where the model comes back in
# parts, too, the first goes with the reply, and the forward pass waits for each of the others.
# Source: Zhang et al., "Poseidon", USENIX ATC 2017; Hashemi et al., "TicTac", MLSys 2019. What each
# message holds is
# `ashl.overlap`'s to say.


async def compute_in_slices(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """One gradient, whose last slice is the body; the others are on their way. At its end a model
    that came in parts is there as a whole.
    """
    if stage.by_priority:
        return await step_by_priority(ctx, stage, state)
    start, tags = ctx.now, [tag for _, tag in stage.ready]
    step, span = next_batch(state)
    needs = (
        ()
        if state.coming is None
        else tuple((stage.messages[k].needed, tag) for k, tag in later_buckets(stage))
    )
    came = [state.coming]  # the first layers first

    def work(
        hand_out: Callable[[int, Any], None], take: Callable[[int], Any] | None = None
    ) -> float:
        def taken(k: int) -> Any:
            if k and take is not None:
                came.append(take(k - 1))
            return came[k]

        model = Pieces(stage.slices[::-1], taken) if needs else state.params
        return stage.trainer.gradient_in_parts(model, ctx.rank, step, span, stage.slices, hand_out)

    others = None
    if stage.overlap.by_slice:
        others = ctx.spawn(push_slices(ctx, stage, state.batch))
    elif tags[:-1]:
        others = ctx.spawn(forward_parts(ctx, stage.server, tags[:-1]))
    loss = await ctx.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params, state.coming = concatenate(came), None
    step_s = ctx.now - start
    body = None if others is None else await ctx.join(others)
    if not stage.overlap.by_slice:
        body = (await ctx.recv(tags[-1])).body
    return Work(body, loss, 1, state.batch, step_s, state.version)


async def forward_parts(ctx: RankContext, server: int, tags: Sequence[Tag]) -> None:
    """To the server, each part as it is ready."""
    for tag in tags:
        part = await ctx.recv(tag, src=ctx.rank)
        await ctx.send(server, tag, part.body)


async def assemble_push(ctx: RankContext, stage: Stage, push: Message) -> Message:
    """At the server: a push with the slices that left before it; it began when the first of them
    did.
    """
    if stage.overlap.by_slice or stage.by_priority:  # they have been taken in one by one
        return push
    before = [await ctx.recv(tag, src=push.src) for _, tag in stage.ready[:-1]]
    parts = (push, *reversed(before))  # the first layers first
    return push._replace(
        body=concatenate([part.body for part in parts]),
        start_ns=min(part.start_ns for part in parts),
    )


# The way back


def pull_comes_in_parts(stage: Stage) -> bool:
    """Whether a reply is not the whole model."""
    return stage.overlap.by_slice or (stage.overlap.pulls and len(stage.messages) > 1)


def later_buckets(stage: Stage) -> list[tuple[int, Tag]]:
    """The messages of a model that follow the first one, in the order in which forward
    needs them.
    """
    return [(k, stage.tag("group", k)) for k in reversed(range(len(stage.messages) - 1))]


def first_part(stage: Stage, model: Any) -> Any:
    """What goes with the reply: the model, or what forward needs first, or the last slice; by
    priority, nothing.
    """
    if not stage.overlap.pulls:
        return None if stage.by_priority else model
    if stage.overlap.by_slice:
        return slice_vector(model, *stage.cached(slice_ranges)[-1])
    return slice_vector(model, stage.messages[-1].start, stage.messages[-1].stop)


async def send_remaining_parts(
    ctx: RankContext, stage: Stage, ranks: Sequence[int], model: Any
) -> None:
    """At the server: the rest of the model, to these workers in turn, but for slices that have
    gone.
    """
    if stage.overlap.by_slice:
        return
    for k, tag in later_buckets(stage):
        body = slice_vector(model, stage.messages[k].start, stage.messages[k].stop)
        for rank in ranks:
            await ctx.send(rank, tag, body)


async def settle_pull(ctx: RankContext, stage: Stage, state: WorkerState) -> bool:
    """Whether nothing is on its way to this worker: a checkpoint has it come first, and slices are
    all there.
    """
    if stage.overlap.by_slice:
        state.params = await receive_slices(ctx, stage, state.coming)
    elif not ctx.safe_point_wanted:
        return False
    elif stage.by_priority:
        await flush_by_priority(ctx, stage, state)
    else:
        state.params = concatenate(
            [state.coming, *[(await ctx.recv(tag)).body for _, tag in later_buckets(stage)]]
        )
    state.coming = None
    return True


# Slices that are merged by themselves  A server that merges slice by slice, where all wait for all.
# Rule: of a slice that has come from all workers the server takes the weighted sum, steps on these
# elements alone, and sends them to everybody at once. The last slice of a gradient is the push
# itself: with it goes what the server counts and answers, and once that is back all others are. The
# bits are those of a gradient and a model in one piece.  Source: Jayarajan et al., "Priority-based
# Parameter Propagation for Distributed DNN Training", MLSys 2019. How large
# slices are is `ashl.overlap.slices`'s to say.


def slice_ranges(stage: Stage) -> list[tuple[int, int]]:
    """The elements [start, stop) of each, in the order in which they leave."""
    return [
        (m.start + start, m.start + stop)
        for m in stage.messages
        for start, stop in stage.overlap.cuts(m)
    ]


def last_slice_stage(stage: Stage) -> Stage:
    """The stage as it is for the last slice alone."""
    start, stop = slice_ranges(stage)[-1]
    return replace(stage, size=stop - start)


# At a worker


async def push_slices(ctx: RankContext, stage: Stage, samples: int) -> Any:
    """To the server, each slice as it is ready, but the last one, which is returned."""
    number, up, count = 0, stage.tag("slice"), len(stage.cached(slice_ranges))
    for message, (_, tag) in zip(stage.messages, stage.ready, strict=True):
        part = (await ctx.recv(tag, src=ctx.rank)).body
        for start, stop in stage.overlap.cuts(message):
            body, number = slice_vector(part, start, stop), number + 1
            if number < count:
                await ctx.send(stage.server, up, body, (number - 1, samples))
    return body


async def receive_slices(ctx: RankContext, stage: Stage, body: Any) -> Any:
    """The model, of which the last slice came with the reply."""
    places, back = stage.cached(slice_ranges), stage.tag("back")
    came = {places[-1]: body}
    for _ in places[1:]:
        message = await ctx.recv(back)
        came[places[int(message.meta[0])]] = message.body
    return concatenate([came[place] for place in sorted(came)])


# At the server


async def on_slice(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one slice, and send it back where it has come from all; returns whether the model is
    another one, which it is with the last alone.
    """
    number, samples = map(int, message.meta)
    if stage.by_priority:
        await ctx.send(message.src, stage.tag("had"), None, (number,))
    start, stop = stage.cached(slice_ranges)[number]
    push = Push(message.src, message.body, 1, samples, 0, math.nan, 0.0, 0.0, 0.0)
    share = (stop - start) / stage.trainer.num_params
    await ctx.compute(partial(merge_slice, stage, state, number, push), work=share, kind="apply")
    if number in state.made:
        body = state.made[number][1]
        for rank in stage.workers:
            await ctx.send(rank, stage.tag("back"), body, (number,))
    return stage.by_priority and finish_if_complete(stage, state)


async def await_slices(ctx: RankContext, stage: Stage, state: ServerState) -> Stage:
    """The stage as it is for a push that comes after its slices. Before the last one of a round is
    merged all of them are there: a link that became faster may have let it overtake one.
    """
    if not stage.overlap.by_slice:
        return stage
    while len(state.buffer) + 1 == state.quorum and len(state.made) + 1 < len(
        stage.cached(slice_ranges)
    ):
        await on_slice(ctx, stage, state, await ctx.recv(stage.tag("slice")))
    return stage.cached(last_slice_stage)


def merge_slice(stage: Stage, state: ServerState, number: int, push: Push) -> None:
    """Keep a slice of a push; where it has come from all, step on it."""
    members = state.slices.setdefault(number, [])
    members.append(push)
    if len(members) < state.quorum:
        return
    del state.slices[number]
    members.sort(key=attrgetter("worker"))
    weights = stage.with_assignments(state.workers).weights_of(members, state.progress.gone)
    scale = cast("ServerRule", stage.sync).lr_scale(state.rule_state)
    lr = stage.trainer.rate(state.progress.samples - state.counted) * scale
    step_on(stage, state, number, stage.aggregate.fold(members, weights), lr)


def step_on(stage: Stage, state: ServerState, number: int, update: Any, lr: float) -> None:
    start, stop = stage.cached(slice_ranges)[number]
    exact = stage.link.traits.lossless
    state.made[number] = stage.trainer.apply_slice(
        state.params, state.moments, start, stop, update, lr, exact
    )


def finish_sliced_step(
    stage: Stage, state: ServerState, update: Any, lr: float
) -> tuple[Any, Any, Any]:
    """(moments, outer moments, model) once the last slice has come from all, too."""
    step_on(stage, state, len(stage.cached(slice_ranges)) - 1, update, lr)
    moments, params = join_slices(stage, state)
    return moments, state.outer_state, params


def join_slices(stage: Stage, state: ServerState) -> tuple[Any, Any]:
    """(moments, model) of all slices."""
    made = [
        state.made[number]
        for number in sorted(state.made, key=stage.cached(slice_ranges).__getitem__)
    ]
    state.made = {}
    return stage.trainer.joined(made)


def finish_if_complete(stage: Stage, state: ServerState) -> bool:
    """By priority: whether a step that counts is in all slices, and so in the model now."""
    if not state.counted or len(state.made) < len(stage.cached(slice_ranges)):
        return False
    state.moments, state.params = join_slices(stage, state)
    state.counted = 0
    return True


# Slices in the order in which forward needs them  Slices through a server by priority: those that
# the next forward pass needs first go before the others.  Rule: of the slices that backward has
# handed out, a worker sends the lowest layer's first, while fewer than `credit` of them are on
# their way; the server says so when it has one. It merges a slice that has come from all and sends
# it back at once (`ashl.topology.parameter_server`), and the next forward pass waits for each
# message by itself, so that the slices of the last layers travel under it. What is counted goes
# ahead of them, once backward is over: the server answers when all have said so, and everybody
# knows before the next step begins whether the run goes on. The server's model is whole once all
# slices of a step are in, and is evaluated then. At the end of a stage, and for a checkpoint, all
# is let in first.  Limits: with a credit of one slice each waits for the word about the one before,
# which takes two latencies. Source: Jayarajan et al., "Priority-based Parameter Propagation for
# Distributed DNN Training" (P3), MLSys 2019.


def slice_numbers(stage: Stage) -> list[range]:
    """The slices of each message."""
    ends = list(accumulate(len(stage.overlap.cuts(message)) for message in stage.messages))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


# At a worker


async def step_by_priority(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """One gradient, whose slices go by themselves; `state.coming` is the task that has to do with
    them.
    """
    start, (number, span), came = ctx.now, next_batch(state), list[Any]()
    groups = [(message.needed, stage.tag("group", k)) for k, message in enumerate(stage.messages)]
    needs = () if state.coming is None else tuple(reversed(groups))

    def work(
        hand_out: Callable[[int, Any], None], take: Callable[[int], Any] | None = None
    ) -> float:
        def first(k: int) -> Any:
            assert take is not None
            came.append(take(k))
            return came[k]

        model = Pieces(stage.slices[::-1], first) if needs else state.params
        return stage.trainer.gradient_in_parts(
            model, ctx.rank, number, span, stage.slices, hand_out
        )

    state.coming = ctx.spawn(exchange_by_priority(ctx, stage, state.batch, state.coming))
    loss = await ctx.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params = concatenate(came)
    return Work(None, loss, 1, state.batch, ctx.now - start, state.version)


async def exchange_by_priority(ctx: RankContext, stage: Stage, samples: int, before: Any) -> None:
    """The slices of one gradient on their way up, and those of the model, message by message, to
    the forward pass.
    """
    if before is not None:
        await ctx.join(before)
    parts, had, back = [tag for _, tag in stage.ready], stage.tag("had"), stage.tag("back")
    places, of = stage.cached(slice_ranges), stage.cached(slice_numbers)
    waiting, came, held = list[tuple[int, int, Any]](), dict[int, Any](), 0
    while held or len(came) < len(places):
        message = await ctx.recv(*parts, had, back)
        if message.tag == had:
            held -= 1
        elif message.tag == back:
            came[int(message.meta[0])] = message.body
            k = next(k for k, own in enumerate(of) if int(message.meta[0]) in own)
            if all(number in came for number in of[k]):
                await ctx.send(
                    ctx.rank, stage.tag("group", k), concatenate([came[number] for number in of[k]])
                )
        else:
            k = parts.index(message.tag)
            for number, (start, stop) in zip(
                of[k], stage.overlap.cuts(stage.messages[k]), strict=True
            ):
                heappush(waiting, (-k, number, slice_vector(message.body, start, stop)))
        while waiting and held < stage.overlap.most_committed:
            _, number, body = heappop(waiting)
            held += 1
            await ctx.send(stage.server, stage.tag("slice"), body, (number, samples))


async def flush_by_priority(ctx: RankContext, stage: Stage, state: WorkerState) -> None:
    """Everything is in, and the model is no longer on its way to a forward pass."""
    await ctx.join(state.coming)
    state.params = concatenate(
        [(await ctx.recv(stage.tag("group", k))).body for k in reversed(range(len(stage.messages)))]
    )
    state.coming = None


async def cancel_exchange(ctx: RankContext, stage: Stage, state: WorkerState) -> None:
    """Nobody waits for slices any more."""
    if state.coming is not None:
        await ctx.cancel(state.coming)
        state.coming = None
    groups = (stage.tag("group", k) for k in range(len(stage.messages)))
    await ctx.discard(*groups, *(tag for _, tag in stage.ready), stage.tag("had"))


# At the server


def count_step(stage: Stage, state: ServerState, message: Message) -> bool:
    """A worker has ended a step: once all have, it counts. Returns whether the model has
    changed.
    """
    steps, samples, loss, version = message.meta[:4]
    progress, staleness = state.progress, state.progress.version - int(version)
    state.buffer.append(
        Push(message.src, None, int(steps), int(samples), staleness, loss, 0.0, 0.0, 0.0)
    )
    if len(state.buffer) < state.quorum:
        return False
    members, state.buffer = state.buffer, []
    progress.merge()
    for member in members:
        progress.commit(member.worker, member.steps, member.samples)
        state.counted += member.samples
    return finish_if_complete(stage, state)


async def drain_slices(ctx: RankContext, stage: Stage, state: ServerState) -> None:
    """What is counted is in the model."""
    while state.counted:
        await on_slice(ctx, stage, state, await ctx.recv(stage.tag("slice")))


# One fragment of the model at a time  A server that merges one fragment of the model at a time, see
# `ashl.overlap.streaming` and `loscar`.  Rule: the merge after version v is of fragment v mod P.
# Each worker pushes what it has learned there, the server takes the outer step on it once it has
# come from all, and answers with the fragment, which the worker mixes with its own. As under
# all-reduce a worker holds one piece of work that is done and not exchanged
# (`ashl.topology.all_reduce`).  Sources: Douillard et al., "Streaming DiLoCo with overlapping
# communication", arXiv 2501.18512, 2025; Maziane et al., "LOSCAR-SGD", arXiv 2605.20866, 2026. Both
# are written for all-reduce: that a server takes the outer step is
# ours.


async def run_fragments(ctx: RankContext, stage: Stage, state: WorkerState) -> int:
    """Push a fragment, take the first of the next steps meanwhile, mix in what comes back, take the
    others; returns the last word.
    """
    state.enter(stage, ctx.rank)
    overlap, signal, push, answer = (
        stage.delayed,
        GO,
        stage.tag("push"),
        ctx.recv(stage.tag("pull")),
    )
    assert isinstance(overlap, Fragmented)
    while signal == GO:
        ctx.safe_point(stage.index, state)
        if state.pending is None:
            await finish_piece(ctx, stage, state, None, state.local_steps)
        work = state.pending
        part, fragment, held = fragment_state(stage, state, state.version)
        body, loss = await encode_update(ctx, part, held, work)
        meta = (work.steps, work.samples, loss, work.version, work.step_s, state.pull_s)
        await ctx.send(stage.server, push, body, meta)
        total = state.local_steps
        beside = overlap.overlapped_steps(total) if state.rest is None or state.rest[0] > 0 else 0
        ahead, asked = (
            await take_local_steps(ctx, stage, state, beside) if beside else None,
            ctx.now,
        )
        message = await answer
        reply = parse_reply(Pull, message.meta)
        signal = reply.signal
        if message.body is not None:
            landed = part.link.apply_pull(held.params, message.body)
            state.params = fragment.put(state.params, landed)
            if state.start is not None:
                mixed = overlap.mix(fragment.of(state.start), landed, held.params + work.body)
                state.start = fragment.put(state.start, mixed)
        seen = ahead is None or ctx.now - asked > AT_ONCE_S
        state.pull_s = ctx.now - message.start_ns / 1e9 if seen else 0.0
        state.follow(reply)
        if signal != GO:
            leave_stage(ctx, stage, signal, reply.end_ns)
        ctx.record_round(
            stage.index,
            state.round,
            work.steps,
            reply.staleness,
            dropped=bool(reply.dropped),
            loss=loss,
        )
        state.round += 1
        if signal == GO:
            after = state.local_steps  # of the piece after the one that is under way
            await finish_piece(ctx, stage, state, ahead, total - beside)
            state.local_steps = after
    return signal


async def merge_fragment_push(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """At the server: a push of the fragment whose turn it is; whether the model changed."""
    model, ends, outers = (
        state.params,
        state.ends,
        [*(state.outer_state or len(stage.fragments) * (None,))],
    )
    k = state.version % len(stage.fragments)
    part, fragment, held = fragment_state(stage, state, state.version)
    state.params, state.outer_state, state.ends = held.params, outers[k], held.ends
    changed = await merge_push(ctx, part, state, message)
    outers[k] = state.outer_state
    state.params = fragment.put(model, state.params) if changed else model
    state.outer_state, state.ends = tuple(outers), ends
    return changed


async def answer_fragment(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> Any:
    """... and what goes back: the fragment that was merged last."""
    part, _, held = fragment_state(stage, state, state.version - 1)
    return await rule_of(stage).messages().answer(ctx, part, held, rank, True)


def fragment_state(stage: Stage, state: Any, version: int) -> tuple[Stage, Fragment, Any]:
    """(the stage, where it lies, the state) as they are for the fragment of the merge after this
    version alone.
    """
    k, fragment = version % len(stage.fragments), fragment_at(stage, version)
    state.fragment_ends = state.fragment_ends or codec_states_of(stage)
    held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
    return stage.fragment(k), fragment, held

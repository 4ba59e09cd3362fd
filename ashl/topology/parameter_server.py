"""Parameter server: workers push updates, the server merges them into the model and answers with
the model.

Use when: one node has a good NIC, and asynchronous modes, pulls or plans by worker are wanted.
Avoid when: many workers push at once, so that the NIC of the server is the bottleneck.
Alternatives: `sharded_server`; `all_reduce` with a barrier; `halos` for regions.

Data flow: a worker computes on the model that it pulled last and sends a push. The server decodes
and buffers the push. Once the buffer holds `quorum` pushes, the server merges them: `aggregate`
sets the weights, `outer` takes the step. It then answers every waiting worker that
`may_proceed` names. A push that is too stale for the sync mode is dropped, and its worker
waits for an answer as well. Traffic per worker and exchange: one push and one pull of the model.

Merges without a quorum: at the time `closes_s` of the sync mode; before the next stage. With a
barrier, a worker failure lowers the quorum, and the server merges if the buffer then holds it.

Control signals in a reply: GO; LAST, only with delayed exchanges: push the piece of work that is
finished and compute no more in this stage; NEXT, another stage follows; STOP, the run is over;
PAUSE, as GO, but save first. Before NEXT the server waits for pushes in flight and merges them. At
STOP it drops them. Before PAUSE it answers no worker until all of them wait.

With `runtime.on_worker_failure=reshard` each surviving worker also trains on its part of a failed
worker's data. It begins in the first round after the reply that reports the failure. With
`keep_batch` each reply sets the worker's batch, so that the batches of the survivors add up to the
global batch.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, get_type_hints

from ashl.aggregate.weighted import Push
from ashl.compression.contract import EncodeContext
from ashl.errors import UsageError
from ashl.option import Ratio, option, quoted_name
from ashl.plan.plan import WorkerPlan, assign_work
from ashl.plan.profile import Profile
from ashl.planner.assignment import Planner
from ashl.planner.online import Averages
from ashl.runtime.effects import JOIN, PEER_FAILED, Message, PeerFailedError, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import Replan
from ashl.runtime.sums import concatenate, slice_vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import (
    CODEC,
    DELAY,
    FAULT_TOLERANT,
    GO,
    LAST,
    NEXT,
    OUTER,
    OVERLAP,
    PAUSE,
    PULLS,
    STOP,
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
    is_truncated,
    members_of,
    merge_weights,
    remaining_rounds,
    survivors,
)
from ashl.stage.program import apply_assignments, check_min_workers
from ashl.stage.progress import DIVERGED, FAILURE, LATE, RUN_START, Progress, ProgressMark
from ashl.topology.ending import (
    decide_end,
    drop_reason,
    end_time_ns,
    leave_stage,
    record_end,
    update_signal,
)
from ashl.topology.local_work import (
    AT_ONCE_S,
    Part,
    Work,
    WorkerState,
    begin_piece,
    compute_by_bucket,
    encode_update,
    finish_piece,
    local_work,
    part_of,
    with_part,
)

# Headers of the messages


class Assignment(NamedTuple):
    """Next work of a worker that proceeds, as a sync mode sets it.

    None keeps the planned value; a batch of 0 keeps the batch of the previous round.
    """

    local_steps: int | None = None  # H, the steps before the next push
    ratio: float | None = None  # density of the update
    interval_s: float = 0.0  # if not 0: take steps for this many seconds, instead of H steps
    batch: int = 0  # samples per step


AS_PLANNED = Assignment()


class Pull(NamedTuple):
    """Header of every reply to a push.

    With `runtime.on_worker_failure=reshard` the ranks of the failed workers follow the header. The
    answer to a join request has it, too, followed by `JOIN_FIELDS` numbers about the new member.
    """

    signal: int  # GO, LAST, NEXT, STOP or PAUSE
    version: int  # version of the model
    steps: int  # steps applied so far, of all workers
    samples: int  # samples applied so far, which the learning rate follows
    staleness: int  # staleness of the push that this reply answers
    dropped: bool  # True if that push was dropped
    end_ns: int  # end time of the stage, with NEXT and STOP; else 0
    # next work, with GO; units as in `Assignment`
    local_steps: int = 1
    ratio: float = 1.0
    interval_s: float = 0.0
    batch: int = 0


PULL_FIELDS = len(Pull._fields)
PULL_TYPES = tuple(get_type_hints(Pull).values())


def parse_reply(meta: tuple[float, ...]) -> Pull:
    """Return the header of a reply; further numbers in `meta` are ignored.

    In virtual time the header may already have that type. Between processes all fields are floats.
    """
    if isinstance(meta, Pull):
        return meta
    return Pull(*(kind(x) for kind, x in zip(PULL_TYPES, meta, strict=False)))


def adopt_reply(state: WorkerState, header: Pull) -> None:
    """Take over the counts and the assignment of a server's reply."""
    state.version = header.version
    state.steps = header.steps
    state.samples = header.samples
    state.local_steps = header.local_steps
    state.ratio = header.ratio
    state.interval_s = header.interval_s
    state.batch = header.batch or state.batch


class ServerRule(Rule, contract=True):
    """Sync mode of a parameter server. The defaults are those of ASP: no worker ever waits.

    `state` belongs to the rule: `begin` makes it, `observe` returns the next one. Checkpoints of
    the server hold it, so it consists of plain values. Methods that receive it are pure: equal
    arguments give equal results. Methods that receive the state of a rank may change that.
    """

    # True: the server handles every push that has arrived before it answers
    takes_all: ClassVar[bool] = False
    # True: its pushes or pulls are other than updates and models
    own_messages: ClassVar[bool] = False
    # True: some pushes hold the gradient over all data of a worker, which cannot be resharded
    pushes_full_gradients: ClassVar[bool] = False

    def quorum(self, num_workers: int) -> int:
        """Return the number of pushes of a merge. Raises: UsageError if there are fewer workers."""
        return 1

    def accepts(self, staleness: int) -> bool:
        """Return True if a push with this staleness (merges) is merged; otherwise it is dropped."""
        return True

    def begin(self, stage: StageConfig, progress: Progress) -> Any:
        """Return the rule's state at the start of a stage."""
        return None

    def may_proceed(self, state: Any, progress: Progress) -> Iterable[int]:
        """Return the waiting workers that may proceed now."""
        return progress.waiting

    def observe(self, stage: StageConfig, state: Any, progress: Progress, push: Push) -> Any:
        """Return the rule's state after a push that arrived at `progress.now_s`."""
        return state

    def closes_s(self, state: Any, progress: Progress) -> float:
        """Return the time (seconds) at which buffered pushes are merged even without a quorum;
        -inf: never.

        Applies with `takes_all` only.
        """
        return -math.inf

    def next_assignment(
        self, stage: StageConfig, state: Any, progress: Progress, rank: int
    ) -> Assignment | None:
        """Return the work of this worker, which proceeds at `progress.now_s`; None: as planned."""
        return None

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        """Update the server's state after this worker has failed."""

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        """Update the server's state after this worker has rejoined."""

    def lr_scale(self, state: Any) -> float:
        """Return the factor of the server's learning rate."""
        return 1.0

    # Messages between worker and server: updates in pushes, the model in pulls

    async def make_push(
        self, ctx: RankContext, stage: StageConfig, state: WorkerState
    ) -> tuple[Work, Any, float]:
        """Compute the next push of a worker. Returns: (work, payload, loss)."""
        work = state.pending
        if work is None:
            work = await (compute_and_push if stage.buckets else local_work)(ctx, stage, state)
        payload, loss = await encode_update(ctx, stage, state, work)
        return work, payload, loss

    def admission_payload(self, stage: StageConfig, state: ServerState) -> Any:
        """Return the payload that a joining worker starts from: the server's model."""
        return state.params

    def apply_admission(self, state: WorkerState, payload: Any) -> None:
        """Start a joining worker from the payload `payload` of the answer to its join request."""
        state.params = payload

    async def apply_push(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
    ) -> bool:
        """Apply a push that is not too stale. Returns: True if the model changed."""
        return await merge_push(ctx, stage, state, message)

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        """Return the payload of a reply: the model, or its compressed difference; None if the model
        did not change.
        """
        if not changed:
            return None
        part = part_of(Part(stage, state), state.progress.version - 1)
        model = part.state.params
        if stage.topology.pull_ratio is None:
            return model
        context = EncodeContext(
            stage.topology.pull_ratio, stage.seed, stage.server + 1 + rank, state.progress.version
        )
        pull = partial(
            part.stage.pipeline.encode_pull, part.state.codec_state, rank, model, context
        )
        return await ctx.compute(pull, work=1, kind="compress")

    def apply_pull(self, stage: StageConfig, state: WorkerState, payload: Any) -> Any:
        """Return the model that a worker continues with after a pull; not called at a stage
        boundary.
        """
        return stage.pipeline.apply_pull(state.params, payload)


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


@option
class ParameterServer(Topology):
    """One server (rank n) holds the model; each worker exchanges messages with the server only.

    `pull_ratio` is the density of pulls. If it is set, a pull holds the difference between the
    model and the worker's last pull. The codec compresses it to that fraction of its elements.
    """

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset(
        {CODEC, WEIGHTS, PULLS, OUTER, OVERLAP, DELAY, FAULT_TOLERANT}
    )
    has_server: ClassVar[bool] = True
    pull_ratio: Ratio | None

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        return stage.workers if rank == stage.server else (stage.server,)

    def begin(self, stage: StageConfig, rank: int) -> WorkerState | ServerState:
        params, moments = stage.trainer.init()
        if rank == stage.server:
            return ServerState(params, moments, Progress(stage.num_workers))
        return WorkerState(params, moments)

    async def join(
        self, ctx: RankContext, stages: Sequence[StageConfig]
    ) -> tuple[int, WorkerState] | None:
        return await join(ctx, stages)

    def role(self, stage: StageConfig, rank: int) -> Loop:
        if rank == stage.server:
            return server
        return worker


@dataclass
class ServerState:
    """State of the server, complete for a checkpoint."""

    params: Any
    moments: Any  # moments of the optimizer if gradients are exchanged
    progress: Progress
    evaluated: ProgressMark = RUN_START  # the last evaluation
    buffer: list[Push] = field(default_factory=list)  # pushes that are not merged yet
    # pushes of a slice that are not merged yet, by slice number
    slices: dict[int, list[Push]] = field(default_factory=dict)
    # merged slices of this step, by slice number: (moments, elements of the model)
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    codec_state: CodecState = field(default_factory=CodecState)  # the codec's state at the server
    fragment_codec_states: tuple[CodecState, ...] = ()  # the codec's state of each fragment
    outer_state: Any = None  # moments of the outer optimizer
    profile: Profile | None = None  # measured by a profiling stage
    # (first stage, assignments of the workers) as planned after profiling
    assigned: tuple[int, Any] | None = None
    entered: int | None = None  # index of the current stage
    # samples of the step that is counted but has unmerged slices (slices by priority); 0: none
    counted: int = 0
    averages: Any = None  # running averages of an online planner
    rule_state: Any = None  # state of the sync mode
    signal: int = GO  # NEXT while pushes in flight are drained
    # workers that were asked for their last piece of work (delayed exchanges only)
    flush_requested: tuple[int, ...] = ()
    reason: str | None = None  # why the stage ends
    ahead: Message | None = None  # a received message to handle before waiting workers are answered
    newcomers: tuple[int, ...] = ()  # workers whose join request has no answer yet
    incarnations: dict[int, int] = field(default_factory=dict)  # of each rejoined worker
    failures: dict[int, int] = field(default_factory=dict)  # earlier failures of these workers
    quorum: int = 1  # pushes of one merge
    members: Any = None  # `Members`: the workers that have not failed
    work: Any = None  # `Assignments`: their present work

    def end_pass(self) -> None:
        """Reset what belongs to one pass of the server's loop, before this state is saved."""
        self.signal = GO
        self.reason = None

    def enter(self, stage: StageConfig, now_s: float) -> None:
        """Enter a stage: reset what belongs to a stage, and carry over codec state and moments.

        Does nothing if the state is that of a checkpoint within this stage.
        """
        if self.entered == stage.index:
            return
        self.entered = stage.index
        self.signal = GO
        self.flush_requested = ()
        self.reason = None
        self.ahead = None
        self.slices = {}
        self.made = {}
        self.counted = 0
        self.progress.begin(now_s)
        self.rule_state = stage.sync.begin(stage, self.progress)
        self.set_members(stage)
        self.work = self.members.planned
        self.codec_state = stage.carry_over_codec_state(self.codec_state, self.progress.samples)
        if stage.resets_momentum:
            self.moments = stage.trainer.moments()
        self.outer_state = None if stage.resets_outer_momentum else self.outer_state

    def pull_tag(self, stage: StageConfig, rank: int) -> Tag:
        """Return the tag of the replies to this worker."""
        return stage.tag("pull", self.incarnations.get(rank, 0))

    def set_members(self, stage: StageConfig) -> None:
        """Set the members and the quorum after a failure or a rejoin."""
        self.members = members_of(stage, survivors(stage, self.progress.failed))
        self.quorum = stage.quorum_of(self.progress.num_present)

    def assign(self, stage: StageConfig, workers: tuple[WorkerPlan, ...]) -> None:
        """Set the work of all workers, by rank, and the weights that follow from it."""
        self.work = assign(stage, self.members.ranks, workers)


def record_exchange(
    ctx: RankContext, stage: StageConfig, state: WorkerState, work: Work, reply: Pull, loss: float
) -> None:
    """Record a worker's round from its local work and the reply to it, and count the round."""
    ctx.record_round(
        stage.index,
        state.round,
        work.steps,
        reply.staleness,
        dropped=bool(reply.dropped),
        loss=loss,
    )
    state.round += 1


async def worker(ctx: RankContext, stage: StageConfig, state: WorkerState) -> int:
    """Run a worker: compute on the model pulled last, push the update, wait for the reply.

    With delayed exchanges the worker computes the next piece of work between a push and its reply.
    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    state.enter(stage, ctx.members, ctx.rank)
    signal = GO
    push = stage.tag("push")
    pull = stage.tag("pull", state.incarnation)
    server = stage.topology.server_of(stage, ctx.rank)
    answer = ctx.recv(pull)
    whole = Part(stage, state)
    while signal in (GO, LAST):
        is_due = not stage.overlaps_next_forward
        if state.coming is None or await receive_model_if_due(ctx, stage, state, is_due):
            ctx.safe_point(stage.index, state)
        if stage.delayed_overlap is not None and state.pending is None:
            await finish_piece(ctx, stage, state, state.local_steps)
            state.plan_round(stage, ctx.members, ctx.rank, ahead=1)
        part = part_of(whole, state.version)
        work, payload, loss = await stage.sync.make_push(ctx, part.stage, part.state)
        meta = (work.steps, work.samples, loss, work.version, work.step_s, state.pull_s)
        await ctx.send(server, push, payload, meta)
        begun, remaining = None, 0
        if stage.delayed_overlap is not None:
            begun, remaining = await begin_piece(ctx, stage, state)
        asked = ctx.now
        message = await answer
        reply = parse_reply(message.meta)
        signal = reply.signal
        if stage.reshards:
            state.covered_workers = tuple(map(int, message.meta[PULL_FIELDS:]))
        if reply.dropped and not stage.pipeline.traits.lossless and not math.isnan(loss):
            stage.pipeline.restore_dropped(state.codec_state, payload)
        if message.payload is not None:
            apply_reply(stage, state, part, signal, message.payload)
        seen = message.payload is not None and (begun is None or ctx.now - asked > AT_ONCE_S)
        state.pull_s = ctx.now - message.start_ns / 1e9 if seen else 0.0
        adopt_reply(state, reply)
        state.last = signal == LAST
        if signal in (NEXT, STOP):
            await cancel_exchange(ctx, stage, state)
            leave_stage(ctx, stage, signal, reply.end_ns)
        record_exchange(ctx, stage, state, work, reply, loss)
        state.pending = None
        if stage.delayed_overlap is not None and signal not in (NEXT, STOP):
            after = state.local_steps  # H of the piece that follows the present one
            applied = (part, work) if message.payload is not None else None
            await finish_piece(ctx, stage, state, remaining, begun, applied)
            state.local_steps = after
    await receive_model_if_due(ctx, stage, state, signal == PAUSE)
    return signal


def apply_reply(
    stage: StageConfig, state: WorkerState, part: Part, signal: int, payload: Any
) -> None:
    """Apply the payload of a reply: the model's first bucket, the model, or its difference."""
    if stage.overlaps_next_forward and signal in (GO, PAUSE):
        state.coming = payload
    elif signal == NEXT:
        state.params = payload
    else:
        params = stage.sync.apply_pull(part.stage, part.state, payload)
        state.params = part.put(state.params, params)


async def server(ctx: RankContext, stage: StageConfig, state: ServerState) -> int:
    """Run the server: merge and answer until the stage ends, then answer every worker once more.

    If several servers hold a shard of the model each, this is the first one: it alone decides, and
    tells the others when a version is evaluated and when the stage ends.
    Before another stage begins, the server waits for the pushes in flight and merges them. At the
    end of the run it drops them. Returns: the final signal, NEXT, STOP or PAUSE.
    """
    progress, push, rule = state.progress, stage.tag("push"), stage.sync
    state.enter(stage, ctx.now)
    buckets = {stage.tag("bucket"): on_bucket} if stage.merges_buckets else {}
    incoming = (push, *buckets, PEER_FAILED, JOIN)
    handlers = {push: on_push, **buckets, CLOSE: on_close}
    deadline_s = stage.stop_criteria.deadline_s
    endless = ctx.recv(*incoming) if math.isinf(deadline_s) else None
    await admit_all(ctx, stage, state)
    while True:
        ctx.safe_point(stage.index, state)
        message = state.ahead or await (endless or ctx.recv(*incoming, before_s=deadline_s))
        state.ahead = None
        ctx.time_accounting.fold_if_many()
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        handle = handlers.get(message.tag, on_membership)
        changed = await handle(ctx, stage, state, message)
        if changed and stage.stop_criteria.begin_due_evaluation(state, ctx.now):
            await evaluate(ctx, stage, state)
        update_signal(ctx, stage, state)
        if state.newcomers:
            await admit_newcomers(ctx, stage, state)
        if state.signal == STOP or (state.signal == NEXT and await drain_pushes(ctx, stage, state)):
            break
        if state.signal == PAUSE and await pause_if_all_wait(ctx, stage, state):
            return PAUSE
        if state.signal != GO:
            continue
        if rule.takes_all:  # handle all messages that have arrived before any worker is answered
            state.ahead = await receive_more(ctx, stage, state, incoming)
        if state.ahead is None and progress.waiting:
            await reply_to_all(ctx, stage, state, rule.may_proceed(state.rule_state, progress))
    await drain_buckets(ctx, stage, state)
    await ctx.discard(*buckets)  # parts of pushes that will not be merged
    end_ns = decide_end(ctx, stage, state.signal)
    await tell_servers(ctx, stage, progress.version, state.signal, end_ns)
    await finish_stage(ctx, stage, state, state.signal, end_ns)
    record_end(ctx, stage, progress, state.reason)
    return state.signal


async def evaluate(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Emit the model for an evaluation; other servers emit their shards of the same version."""
    version, is_whole = state.progress.version, stage.topology.servers == 1
    await tell_servers(ctx, stage, version, GO)
    ctx.snapshot(state.params, tick=None if is_whole else version, counts=state.progress.report())


async def tell_servers(ctx: RankContext, stage: StageConfig, *meta: int) -> None:
    """Tell the other servers of the model, if there are any, what the first one has decided.

    (version, GO): this version is evaluated. (version, signal, time in ns): the stage has ended.
    """
    for k in range(1, stage.topology.servers):
        await ctx.send(ctx.rank + k, stage.tag("first"), None, meta)


async def reply_to_all(
    ctx: RankContext, stage: StageConfig, state: ServerState, ranks: Iterable[int], signal: int = GO
) -> None:
    """Let these waiting workers proceed on the present model, or pause."""
    ranks = sorted(ranks)
    if not stage.overlaps_next_forward or stage.merges_buckets:
        for rank in ranks:
            await reply(ctx, stage, state, rank, signal)
        return
    changed = [rank for rank in ranks if await reply(ctx, stage, state, rank, signal)]
    await send_remaining_buckets(ctx, stage, changed, state.params)


async def pause_if_all_wait(ctx: RankContext, stage: StageConfig, state: ServerState) -> bool:
    """Let all workers pause once each of them waits, so that nothing is in flight.

    A worker may wait for a merge that no push completes any more; then the buffer is merged. If a
    stop limit truncates the next round, there is no pause.
    Returns: True if all workers pause.
    """
    progress = state.progress
    if len(progress.waiting) < progress.num_present:
        return False
    if state.buffer and not may_all_proceed(stage, state):
        await merge_buffered(ctx, stage, state)
    await drain_buckets(ctx, stage, state)
    await admit_newcomers(ctx, stage, state)
    if len(progress.waiting) < progress.num_present:
        return False
    if is_next_round_truncated(stage, state):
        state.signal, state.reason = GO, None
        return False
    await tell_servers(ctx, stage, progress.version, PAUSE, end_time_ns(stage, ctx.now_ns))
    await reply_to_all(ctx, stage, state, progress.waiting, PAUSE)
    return True


def may_all_proceed(stage: StageConfig, state: ServerState) -> bool:
    """Return True if every waiting worker may proceed now."""
    ranks = {*stage.sync.may_proceed(state.rule_state, state.progress)}
    return len(ranks) == len(state.progress.waiting)


# Pushes at the server: decode, merge, answer


CLOSE: Tag = ("close", 0, 0)  # from the server to itself: merge the buffered pushes now


async def on_push(
    ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
) -> bool:
    """Count one push, and apply it unless it is too stale; its worker then waits for a reply.

    Returns: True if the model changed.
    """
    progress, worker, rule = state.progress, message.src, stage.sync
    if stage.buckets:
        message = await assemble_push(ctx, stage, message)
    if message.tag == PEER_FAILED:
        return await remove_failed(ctx, stage, state, worker)
    steps, loss, version = int(message.meta[0]), message.meta[2], int(message.meta[3])
    staleness = progress.version - version
    # with a barrier and delayed exchanges every push is stale by one round, which is not counted
    one_late = staleness > 0 and rule.in_rounds and stage.delayed_overlap is not None
    beyond = staleness - 1 if one_late else staleness
    late = not (rule.accepts(beyond) and stage.aggregate.accepts(beyond))
    progress.observe(worker, 0 if late else staleness, loss)  # staleness of applied pushes only
    progress.start_waiting(worker, staleness, late)
    if late or progress.diverged:
        progress.count_dropped(worker, steps, LATE if late else DIVERGED)
        return False
    if stage.merges_buckets:
        return count_step(ctx, stage, state, message)
    return await rule.apply_push(ctx, stage, state, message)


async def receive_more(
    ctx: RankContext, stage: StageConfig, state: ServerState, tags: Sequence[Tag]
) -> Message | None:
    """Return the next message that arrives before the time `closes_s` of the sync mode.

    Without such a time: the next message that has already arrived.
    Returns: None if there is no message, so it answers now; a `CLOSE` message at `closes_s`.
    """
    closes_s = stage.sync.closes_s(state.rule_state, state.progress)
    deadline_s = stage.stop_criteria.deadline_s
    message = await ctx.recv(*tags, before_s=max(ctx.now, min(closes_s, deadline_s)))
    due = message is None and -math.inf < closes_s <= deadline_s
    return Message(ctx.rank, CLOSE, None, (), int(ctx.now_ns)) if due else message


async def on_close(
    ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
) -> bool:
    """Merge the buffered pushes at the time `closes_s` of the sync mode. Returns: True."""
    await merge_buffered(ctx, stage, state)
    return True


async def merge_buffered(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Merge the buffered pushes, even without a quorum."""
    part = part_of(Part(stage, state), state.progress.version)
    merge = partial(apply_merge, stage, state, part, None)
    await ctx.compute(merge, part.stage.push_share, "apply")


async def merge_push(
    ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
) -> bool:
    """Decode a push, merge it, and pass it to the sync mode and an online planner.

    Returns: True if the model changed.
    """
    part = part_of(Part(stage, state), state.progress.version)
    payload = part.stage.pipeline.receive_payload(
        part.state.codec_state, message.src, message.payload
    )
    push = push_of(ctx, state, message, payload)
    merge = partial(apply_merge, stage, state, part, push)
    update = await ctx.compute(merge, part.stage.push_share, "apply")
    observe_push(ctx, stage, state, push)
    return update is not None


def push_of(ctx: RankContext, state: ServerState, message: Message, payload: Any) -> Push:
    """Return a push with this decoded payload, as weights and sync modes see it."""
    steps, samples, loss, version, step_s, pull_s = message.meta
    staleness = state.progress.version - int(version)
    push_s = ctx.now - message.start_ns / 1e9
    counts = int(steps), int(samples), staleness
    return Push(message.src, payload, *counts, loss, step_s, push_s, pull_s)


def observe_push(ctx: RankContext, stage: StageConfig, state: ServerState, push: Push) -> None:
    """Pass a push to the sync mode and to a planner that replans during the run."""
    state.progress.now_s = ctx.now
    state.rule_state = stage.sync.observe(stage, state.rule_state, state.progress, push)
    if stage.plan.h_preset is not None and stage.planner is not None and stage.planner.replans:
        replan(ctx, stage, state, push, stage.planner)


def apply_merge(stage: StageConfig, state: ServerState, part: Part, push: Push | None) -> Any:
    """Buffer a push, and merge the buffer once it holds a quorum.

    Update rule: one outer step on Σ_i c_i·Δ_i, or one optimizer step on Σ_i c_i·g_i
    Args: part: the part of the model that the merge concerns; push: the new push; None: merge the
    buffered pushes, even without a quorum.
    Returns: the merged update; None if the quorum is not reached.
    """
    progress = state.progress
    members = state.buffer
    if push is not None:
        members.append(push)
        if len(members) < state.quorum:
            return None
    if len(members) > 1:
        members.sort(key=attrgetter("worker"))
    weights = merge_weights(stage, state.work, members)
    if stage.pipeline.traits.reduces:
        payloads = [member.payload for member in members]
        update: Any = part.stage.pipeline.reduce(part.state.codec_state, payloads, weights)
    else:
        update = stage.aggregate.fold(members, weights)
    state.buffer = []
    lr = stage.trainer.rate(progress.samples) * stage.sync.lr_scale(state.rule_state)
    moments, outer_state, params = stage.sync.step(part.stage, part.state, update, lr)
    state.params, state.outer_state = with_part(stage, state, part, params, outer_state)
    if moments is not None:
        state.moments = moments
    progress.merge()
    for member in members:
        progress.commit(member.worker, member.steps, member.samples)
    return update


def replan(
    ctx: RankContext, stage: StageConfig, state: ServerState, push: Push, planner: Planner
) -> None:
    """Pass the costs of a push to a planner that replans during the run.

    If it replans, H, density and weights of the present workers change from now on.
    """
    workers = state.work.workers
    payload = stage.payload_fraction(workers[push.worker].compression_ratio)
    if state.averages is None:
        profile = state.profile or stage.profile
        assert profile is not None, "an online planner starts from a profile"
        state.averages = Averages(profile)
    averages = planner.observe(
        state.averages, push.worker, push.step_s, push.push_s, push.pull_s, payload
    )
    averages = planner.observe_update(averages, push.worker, push.payload, push.steps, push.samples)
    assert stage.plan.h_preset is not None
    presets = (stage.plan.h_preset, stage.plan.r_preset)
    present = state.members.ranks
    current = [workers[rank] for rank in present]
    seen, rows = planner.replan(
        averages.restrict_to(present), current, *presets, stage.payload_fraction
    )
    state.averages = replace(averages, commits=seen.commits)
    if rows is None:
        return
    # data shards change at stage boundaries only
    changed = dict(zip(present, assign_work(current, rows, resharded=False), strict=True))
    workers = tuple(changed.get(rank, worker) for rank, worker in enumerate(workers))
    state.assign(stage, workers)
    ratios = [worker.compression_ratio for worker in workers]
    local_steps = [worker.local_steps for worker in workers]
    ctx.emit(Replan(ctx.rank, stage.index, ratios, local_steps, ctx.now_ns))


async def reply(
    ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, signal: int = GO
) -> bool:
    """Let a waiting worker proceed on the present model, or pause.

    Returns: True if the model differs from the worker's last pull.
    Raises: UsageError if the sync mode names a worker that does not wait.
    """
    progress = state.progress
    if rank not in progress.waiting:
        who = f"{quoted_name(type(stage.sync))} lets worker {rank} go on, which does not wait"
        raise UsageError(f"{who}; let its `may_proceed` return some of `progress.waiting`")
    changed = progress.pulled[rank] != progress.version  # since this worker's last pull
    staleness, late = progress.release(rank)
    progress.now_s = ctx.now
    local_steps, ratio, interval_s, batch = assignment_of(stage, state, rank)
    payload = await stage.sync.answer(ctx, stage, state, rank, changed)
    payload = first_bucket(stage, payload) if stage.buckets and changed else payload
    counts = progress.version, progress.steps, progress.samples
    meta = Pull(signal, *counts, staleness, late, 0, local_steps, ratio, interval_s, batch)
    if stage.reshards:
        meta = (*meta, *failed_ranks(stage, progress))
    await ctx.send(rank, state.pull_tag(stage, rank), payload, meta)
    return changed


def failed_ranks(stage: StageConfig, progress: Progress) -> list[int]:
    """Return the failed workers for a reply, if the survivors train on their data; else none."""
    return sorted(progress.failed) if stage.reshards else []


def assignment_of(
    stage: StageConfig, state: ServerState, rank: int
) -> tuple[int, float, float, int]:
    """Return the next assignment of this worker, which proceeds now.

    Returns: (local steps, density, seconds of local work or 0, batch or 0 for the present one).
    """
    plan = state.work.workers[rank]
    assignment, steps = next_work(stage, state, rank)
    rest = None if steps == 1 else rounds_ahead(stage, state)
    local_steps = cap_local_steps(state.members.planned, rank, rest, steps)
    ratio = plan.compression_ratio if assignment.ratio is None else assignment.ratio
    kept = plan.batch if stage.keeps_batch else 0
    return local_steps, ratio, assignment.interval_s, assignment.batch or kept


def next_work(stage: StageConfig, state: ServerState, rank: int) -> tuple[Assignment, int]:
    """Return what the sync mode assigns to this worker, and its H unless a limit truncates it."""
    rule, planned = stage.sync, state.work.workers[rank].local_steps
    assignment = rule.next_assignment(stage, state.rule_state, state.progress, rank) or AS_PLANNED
    return assignment, planned if assignment.local_steps is None else assignment.local_steps


def is_next_round_truncated(stage: StageConfig, state: ServerState) -> bool:
    """Return True if a stop limit truncates the next round of the waiting workers, as planned or as
    the sync mode assigns it.
    """
    rest, whole = rounds_ahead(stage, state), state.members.planned
    if rest is None:
        return False
    steps = {rank: next_work(stage, state, rank)[1] for rank in state.progress.waiting}
    truncated = any(cap_local_steps(whole, rank, rest, h) < h for rank, h in steps.items())
    return truncated or is_truncated(rest)


def rounds_ahead(stage: StageConfig, state: ServerState) -> Remaining:
    """Return the rounds that remain before the next assignment."""
    done = state.progress.steps, state.progress.samples
    ahead = int(stage.delayed_overlap is not None)
    return remaining_rounds(stage, state.members, state.members.planned, done, ahead)


# Workers that fail and rejoin
#
# Failure: once the server has noticed it, the others no longer wait for the failed worker. The lead
# of a worker, in rounds, is counted from the slowest surviving worker. With a barrier, a round
# waits for the survivors only. If their pushes have all arrived, the server merges them at once.
# The failed worker's push for that round is dropped, so the round is that of the survivors. Without
# a barrier, a push that arrived before the failure is applied, and the weights are those of the
# survivors, Σ w_i = 1. The codec's state of the failed worker is discarded.
#
# Data with `runtime.on_worker_failure=reshard`: until the failed worker rejoins, the survivors
# train on its data. Its samples are distributed over the survivors one by one. Each survivor makes
# passes over its own samples and the additional ones, from its present position. It begins in the
# first round after the reply that reports the failure. So a pass visits each sample once, at one
# worker. A rejoining worker has its own data again.
#
# Buckets: those of a push that is not complete are discarded. If buckets are merged alone, those
# that were merged before contain the failed worker's part; the others are merged without it. A
# joining worker is admitted between two steps.
#
# Rejoin: the worker receives the stage, the model and its assignment: with a barrier after the next
# merge, otherwise at once. Its count of rounds starts at that of the slowest worker. Its optimizer
# and its codec start with an empty state. Its data continue after the last position that the server
# knows. A worker that asks at a stage boundary joins in the next stage. The server tells a worker
# that asks after the end that the run is over. An incarnation is identified by the time of its join
# request, which is part of the tag of every message to it. So no worker mistakes a reply to an
# earlier incarnation for its own.
#
# Source: membership as in Li et al., "Scaling Distributed Machine Learning with the Parameter
# Server", OSDI 2014, section 3.8; rounds of the survivors as with the backup workers of Chen et
# al., arXiv 1604.00981.


PLANNED: Tag = ("planned", 0, 0)  # assignments planned after profiling, for a joining worker
# Numbers in the answer to a join request: index of the stage; rounds of this worker (applied,
# dropped or not merged yet), and its steps in them; first stage whose assignments follow as
# `PLANNED`, or 0.
JOIN_FIELDS = 4


def admission_tag(incarnation: int) -> Tag:
    """Return the tag of the answer to a join request."""
    return "admission", 0, incarnation


async def on_membership(
    ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
) -> bool:
    """Handle a worker failure or a join request. Returns: True if the model changed."""
    if message.tag == PEER_FAILED:
        return await remove_failed(ctx, stage, state, message.src)
    record_join(state, message)
    await admit_newcomers(ctx, stage, state)
    return False


async def admit_newcomers(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Admit the workers that have asked to join.

    They wait while a stage ends, and while some buckets of a step are merged and others are not.
    With a barrier they wait for the next merge, so that no round waits for a worker that joins
    within it.
    """
    if state.signal not in (GO, PAUSE) or state.made or state.counted:
        return
    progress, rule = state.progress, stage.sync
    has_barrier = rule.in_rounds and not stage.merges_buckets
    if has_barrier and progress.num_present and not [*rule.may_proceed(state.rule_state, progress)]:
        return
    await admit_all(ctx, stage, state)


async def admit_all(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Admit all workers that have asked to join."""
    while state.newcomers:
        await admit(ctx, stage, state, state.newcomers[0])


def record_join(state: ServerState, message: Message) -> None:
    """Record a join request, which is answered later."""
    state.newcomers += (message.src,)
    state.incarnations[message.src] = int(message.meta[0])
    state.failures[message.src] = int(message.meta[1])


async def remove_failed(
    ctx: RankContext, stage: StageConfig, state: ServerState, rank: int
) -> bool:
    """Continue without a failed worker.

    Returns: True if the survivors' pushes complete a round, so that the model changed.
    Raises: AshlError if too few workers remain.
    """
    progress, rule = state.progress, stage.sync
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    if rank in progress.failed:
        return False
    progress.remove_worker(rank)
    state.set_members(stage)
    state.assign(stage, state.work.workers)
    for codec_state in (state.codec_state, *state.fragment_codec_states):
        codec_state.forget(rank)
    if ctx.rank == stage.server:  # the server of a region does not know all workers
        check_min_workers(ctx, stage, [rank], progress.num_present + len(state.newcomers))
    progress.now_s = ctx.now
    rule.without(stage, state, rank)
    await discard_parts(ctx, stage, rank)
    if not rule.in_rounds:
        return False
    for push in state.buffer:
        if push.worker == rank:
            progress.count_dropped(rank, push.steps, FAILURE)
    state.buffer = [push for push in state.buffer if push.worker != rank]
    if stage.merges_buckets:
        return await merge_without(ctx, stage, state, rank)
    if not state.buffer or len(state.buffer) < state.quorum:
        return False
    await merge_buffered(ctx, stage, state)
    return True


async def admit(
    ctx: RankContext,
    stage: StageConfig,
    state: ServerState,
    rank: int,
    of_first: int | None = None,
) -> None:
    """Admit a (re)joining worker, which continues from the present model.

    The first of several servers tells the others. Args: of_first: its version.
    """
    progress = state.progress
    for k in range(1, stage.topology.servers) if of_first is None else ():
        known = state.incarnations[rank], state.failures[rank]
        await ctx.send(ctx.rank + k, stage.tag("joined"), None, (rank, *known, progress.version))
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    progress.join(rank)
    state.set_members(stage)
    state.assign(stage, state.work.workers)
    progress.now_s = ctx.now
    stage.sync.with_joined(stage, state, rank)
    state.codec_state.held[rank] = state.params
    planned, rows = state.assigned or (0, None)
    version = progress.version
    if of_first is not None and stage.sync.in_rounds:  # the round that the first server waits for
        version = min(version, of_first)
    applied = (version, progress.steps, progress.samples)
    assignment = assignment_of(stage, state, rank)
    rounds, done = progress.rounds_and_steps_of(rank)
    # steps of its earlier incarnation's pushes that are buffered
    buffered = [push.steps for push in state.buffer if push.worker == rank]
    pushed = (rounds + len(buffered), done + sum(buffered))
    header = Pull(GO, *applied, 0, False, 0, *assignment)
    payload = stage.sync.admission_payload(stage, state)
    meta = (*header, stage.index, *pushed, planned, *failed_ranks(stage, progress))
    await ctx.send(rank, admission_tag(state.incarnations[rank]), payload, meta)
    if rows is not None:
        await ctx.send(rank, PLANNED, rows)


async def reject_late_joins(ctx: RankContext, state: ServerState, end_ns: int) -> None:
    """Tell each worker that asks to join after the end that the run is over.

    It runs as a task that ends with the kernel.
    """
    while True:
        for rank in state.newcomers:
            over = Pull(STOP, 0, 0, 0, 0, False, end_ns)
            await ctx.send(rank, admission_tag(state.incarnations[rank]), None, over)
        state.newcomers = ()
        message = await ctx.recv(JOIN, PEER_FAILED)
        if message.tag == JOIN:
            record_join(state, message)


async def join(ctx: RankContext, stages: Sequence[StageConfig]) -> tuple[int, WorkerState] | None:
    """Join a running run as a worker.

    Returns: (index of the present stage, state in it); None if the run is over.
    """
    answers = await ask_to_join(ctx, stages[0])
    if answers is None:
        return None
    return await enter_running_stage(ctx, stages, answers[0], answers[0].payload)


async def ask_to_join(ctx: RankContext, stage: StageConfig) -> list[Message] | None:
    """Ask to join. Returns: the answers of all servers of the model, by rank; None if the run is
    over.
    """
    incarnation, topology = int(float(ctx.now_ns)), stage.topology
    servers = topology.links(stage, ctx.rank)
    for server in servers[:1] if topology.servers > 1 else servers:
        await ctx.send(server, JOIN, None, (incarnation, ctx.incarnation))
    answers = [await ctx.recv(admission_tag(incarnation))]
    header = parse_reply(answers[0].meta)
    if header.signal == STOP:
        ctx.time_accounting.close(header.end_ns)
        return None
    while len(answers) < topology.servers:
        answers.append(await ctx.recv(admission_tag(incarnation)))
    return sorted(answers, key=attrgetter("src"))


async def enter_running_stage(
    ctx: RankContext, stages: Sequence[StageConfig], message: Message, payload: Any
) -> tuple[int, Any]:
    """Begin as a worker that was admitted. Returns: (index of the present stage, state in it).

    Args: message: the answer of the server; payload: what the worker starts from.
    """
    header, more = parse_reply(message.meta), message.meta[PULL_FIELDS:]
    index, rounds, done, planned = map(int, more[:JOIN_FIELDS])
    state = stages[0].topology.begin(stages[0], ctx.rank)
    state.incarnation = int(message.tag[2])
    state.steps, state.samples = header.steps, header.samples
    if planned:
        state.assigned = planned, (await ctx.recv(PLANNED)).payload
        stages = apply_assignments(stages, *state.assigned)
    stage = stages[index]
    state.covered_workers = tuple(map(int, more[JOIN_FIELDS:]))
    state.enter(stage, members_of(stage), ctx.rank)
    if payload is not None:
        stage.sync.apply_admission(state, payload)
    adopt_reply(state, header)
    state.round, state.step = rounds, done
    state.drawn = state.step * state.batch
    return stage.index, state


# End of a stage: work in flight is drained or dropped, and the server answers every worker


async def drain_pushes(ctx: RankContext, stage: StageConfig, state: ServerState) -> bool:
    """Drain work in flight before the next stage.

    Returns: True once every present worker waits and all their pushes are merged.
    """
    await flush_pending(ctx, stage, state)
    if len(state.progress.waiting) < state.progress.num_present:
        return False
    if state.buffer:
        await merge_buffered(ctx, stage, state)
    return True


async def flush_pending(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Ask each waiting worker once for its last piece of work (delayed exchanges only).

    Such a worker has computed the next piece while its push was in flight. After that piece it
    computes no more in this stage.
    """
    progress = state.progress
    applied = (progress.version, progress.steps, progress.samples)
    for rank in (
        sorted(set(progress.waiting) - set(state.flush_requested)) if stage.delayed_overlap else ()
    ):
        state.flush_requested += (rank,)
        staleness, late = progress.stop_waiting(rank)
        header = Pull(LAST, *applied, staleness, late, 0)
        await ctx.send(rank, state.pull_tag(stage, rank), None, header)


async def finish_stage(
    ctx: RankContext, stage: StageConfig, state: ServerState, signal: int, end_ns: int
) -> None:
    """Tell every worker that the stage has ended, and drop pushes that are not merged.

    Waiting workers are answered at once, the others once their push arrives. At NEXT each waiting
    worker receives the model.
    Args: signal: NEXT or STOP; end_ns: end time of the stage (ns).
    """
    progress = state.progress
    progress.end_ns = end_ns
    applied = (progress.version, progress.steps, progress.samples)
    unmerged = {push.worker for push in state.buffer}
    for push in state.buffer:
        progress.count_dropped(push.worker, push.steps, drop_reason(signal))
    state.buffer = []
    working = set(stage.workers) - set(progress.waiting) - progress.failed
    for rank in sorted(progress.waiting):
        staleness, late = progress.stop_waiting(rank)
        state.codec_state.held[rank] = state.params
        meta = (
            *Pull(signal, *applied, staleness, late or rank in unmerged, end_ns),
            *failed_ranks(stage, progress),
        )
        payload = state.params if signal == NEXT else None
        await ctx.send(rank, state.pull_tag(stage, rank), payload, meta)
    while working:
        message = await ctx.recv(stage.tag("push"), PEER_FAILED, JOIN)
        if message.tag == JOIN:
            record_join(state, message)
            continue
        working.discard(message.src)
        message = await assemble_push(ctx, stage, message)
        if message.tag == PEER_FAILED:
            continue
        if message.start_ns <= end_ns:
            progress.count_dropped(message.src, int(message.meta[0]), drop_reason(signal))
        await ctx.send(
            message.src,
            state.pull_tag(stage, message.src),
            None,
            Pull(signal, *applied, 0, True, end_ns),
        )
    if signal == STOP:
        # with shards, only the first server tells that the run is over
        if stage.joins and (ctx.rank == stage.server or stage.topology.servers == 1):
            ctx.spawn(reject_late_joins(ctx, state, end_ns))
        ctx.time_accounting.close(end_ns)


# Gradients and models in buckets
#
# Rule: a worker sends each bucket of the gradient as soon as backward has computed it. The buckets
# queue at the NIC of the worker, and at the NIC of the server with those of other workers.
#
# Merged as a whole: the last bucket is the push itself and carries its header. The server assembles
# a push once that bucket has arrived, so the gradient equals an unpartitioned one, bit for bit. If
# the next forward pass waits for each bucket of the model, the first one travels with the reply.
#
# Merged alone, in modes with a barrier: once a bucket has arrived from all workers, the server
# computes its weighted sum, steps on these elements and sends them to all workers at once. The push
# is a header, sent when backward has ended. The server answers when all headers have arrived, so
# every worker knows before its next step whether the run continues. The server's model is complete,
# and is evaluated, once all buckets of a step are merged. With a credit, a worker sends the ready
# bucket of the lowest layer first, and at most `credit` of them that the server has not
# acknowledged. At the end of a stage, and before a pause, all buckets are drained.
#
# Limits: the model equals that of an unpartitioned push, bit for bit. With a credit of one bucket,
# each bucket waits for the acknowledgement of the one before, which takes two latencies.
# Sources: Zhang et al., "Poseidon", USENIX ATC 2017; Hashemi et al., "TicTac", MLSys 2019;
# Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys
# 2019.


# Buckets at a worker


async def compute_and_push(ctx: RankContext, stage: StageConfig, state: WorkerState) -> Work:
    """Compute one gradient and send its buckets while backward continues.

    Returns: the work with the last bucket as its payload, or without payload if a task sends all
    buckets and receives the model (`state.coming`).
    """
    start, tags, in_flight = ctx.now, [tag for _, tag in stage.ready_segments], state.coming
    if stage.merges_buckets:
        task = ctx.spawn(exchange_buckets(ctx, stage, state.batch, in_flight))
    else:
        if in_flight is not None:
            await ctx.send(ctx.rank, stage.needed_segments[0][1], in_flight)
        task = ctx.spawn(forward_buckets(ctx, stage.server, tags[:-1]))
    loss, arrived = await compute_by_bucket(ctx, stage, state)
    if in_flight is not None:
        state.params = concatenate(arrived)
    step_s, payload, state.coming = ctx.now - start, None, task
    if not stage.merges_buckets:
        await ctx.join(task)
        payload, state.coming = (await ctx.recv(tags[-1])).payload, None
    return Work(payload, loss, 1, state.batch, step_s, state.version)


async def forward_buckets(ctx: RankContext, server: int, tags: Sequence[Tag]) -> None:
    """Send each bucket of the gradient to the server as soon as backward has computed it."""
    for tag in tags:
        bucket = await ctx.recv(tag, src=ctx.rank)
        await ctx.send(server, tag, bucket.payload)


async def exchange_buckets(
    ctx: RankContext, stage: StageConfig, samples: int, before: Any
) -> dict[int, Any]:
    """Send the buckets of one gradient by priority, and pass the model's segments to forward.

    Args: samples: of the gradient; before: the task of the previous step, or None.
    Returns: the buckets of the model, by number.
    """
    if before is not None:
        await ctx.join(before)
    parts, ack, back = [tag for _, tag in stage.ready_segments], stage.tag("ack"), stage.tag("back")
    queue = list[tuple[int, int, Any]]()  # (priority, number, elements)
    arrived = dict[int, Any]()  # merged buckets, by number
    in_flight = 0  # buckets without an acknowledgement, if there is a credit
    while in_flight or len(arrived) < len(stage.buckets):
        message = await ctx.recv(*parts, ack, back)
        if message.tag == ack:
            in_flight -= 1
        elif message.tag == back:
            number = int(message.meta[0])
            arrived[number] = message.payload
            if stage.overlaps_next_forward:
                await pass_on_segment(ctx, stage, arrived, number)
        else:
            segment = stage.segments[parts.index(message.tag)]
            for number in segment.buckets:
                own = stage.buckets[number]
                payload = slice_vector(
                    message.payload, own.start - segment.start, own.stop - segment.start
                )
                heappush(queue, (own.priority, number, payload))
        while queue and (not (credit := stage.buckets[0].credit) or in_flight < credit):
            _, number, payload = heappop(queue)
            in_flight += bool(credit)
            await ctx.send(stage.server, stage.tag("bucket"), payload, (number, samples))
    return arrived


async def pass_on_segment(
    ctx: RankContext, stage: StageConfig, arrived: Mapping[int, Any], number: int
) -> None:
    """Pass a segment of the model to the forward pass, if bucket `number` completes it."""
    k = next(k for k, own in enumerate(stage.segments) if number in own.buckets)
    numbers = stage.segments[k].buckets
    if all(number in arrived for number in numbers):
        segment = concatenate([arrived[number] for number in numbers])
        await ctx.send(ctx.rank, stage.tag("group", k), segment)


async def receive_model_if_due(
    ctx: RankContext, stage: StageConfig, state: WorkerState, is_due: bool
) -> bool:
    """Receive the model now if that is due; otherwise the next forward pass waits for each segment.

    Returns: True if nothing is in flight to this worker.
    """
    if state.coming is None or not is_due:
        return state.coming is None
    arrived = dict[int, Any]()
    if stage.merges_buckets:
        arrived = await ctx.join(state.coming)
    else:
        await ctx.send(ctx.rank, stage.needed_segments[0][1], state.coming)
    if stage.overlaps_next_forward:
        parts = [(await ctx.recv(tag)).payload for _, tag in stage.needed_segments]
    else:
        parts = [arrived[k] for k in sorted(arrived, key=lambda k: stage.buckets[k].start)]
    state.params = concatenate(parts)
    state.coming = None
    return True


async def cancel_exchange(ctx: RankContext, stage: StageConfig, state: WorkerState) -> None:
    """Cancel the exchange of buckets, and discard its messages.

    At NEXT the last reply holds the whole model, and at STOP none is needed.
    """
    if not stage.buckets:
        return
    if stage.merges_buckets and state.coming is not None:
        await ctx.cancel(state.coming)
    state.coming = None
    segments = (tag for _, tag in (*stage.needed_segments, *stage.ready_segments))
    await ctx.discard(*segments, stage.tag("ack"), stage.tag("back"))


# Buckets at the server


async def assemble_push(ctx: RankContext, stage: StageConfig, push: Message) -> Message:
    """Join a push with the buckets that left before it. Its start time is that of the first one.

    Returns: the failure of its worker, if the push is one or a bucket of it was lost.
    """
    before = list[Message]()
    for tag in tags_before_push(stage):
        if push.tag != PEER_FAILED:
            part = await ctx.recv(tag, PEER_FAILED, src=push.src)
            push = part if part.tag == PEER_FAILED else push
            before.append(part)
    if push.tag == PEER_FAILED:
        await discard_parts(ctx, stage, push.src)
    if push.tag == PEER_FAILED or not before:
        return push
    parts = (push, *reversed(before))  # in forward order
    return push._replace(
        payload=concatenate([part.payload for part in parts]),
        start_ns=min(part.start_ns for part in parts),
    )


def tags_before_push(stage: StageConfig) -> list[Tag]:
    """Return the tags of the buckets that leave before the push that they are a part of."""
    return [] if stage.merges_buckets else [tag for _, tag in stage.ready_segments[:-1]]


async def discard_parts(ctx: RankContext, stage: StageConfig, rank: int) -> None:
    """Discard the buckets of a failed worker that have arrived before its push."""
    tags = tags_before_push(stage)
    with suppress(PeerFailedError):  # none is left
        while tags and await ctx.recv(*tags, src=rank, before_s=ctx.now) is not None:
            pass


def first_bucket(stage: StageConfig, model: Any) -> Any:
    """Return the part of the model that travels with the reply.

    It is the whole model, or the bucket that forward needs first; nothing if buckets are merged
    alone.
    """
    if stage.merges_buckets:
        return None
    return slice_vector(model, *stage.slices[-1]) if stage.overlaps_next_forward else model


async def send_remaining_buckets(
    ctx: RankContext, stage: StageConfig, ranks: Sequence[int], model: Any
) -> None:
    """Send the other buckets of the model to these workers, in the order of the forward pass."""
    for k in reversed(range(len(stage.segments) - 1)):
        payload = slice_vector(model, *stage.slices[k])
        for rank in ranks:
            await ctx.send(rank, stage.tag("group", k), payload)


async def on_bucket(
    ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
) -> bool:
    """Merge one bucket, and send it back once it has arrived from all workers.

    Returns: True if the bucket completes a model.
    """
    number, samples = map(int, message.meta)
    if stage.buckets[number].credit:
        await ctx.send(message.src, stage.tag("ack"), None, (number,))
    push = Push(message.src, message.payload, 1, samples, 0, math.nan, 0.0, 0.0, 0.0)
    state.slices.setdefault(number, []).append(push)
    await merge_and_return(ctx, stage, state, number)
    return finish_if_complete(stage, state)


async def merge_and_return(
    ctx: RankContext, stage: StageConfig, state: ServerState, number: int
) -> None:
    """Merge a bucket that has arrived from all workers, and send it to them."""
    bucket = stage.buckets[number]
    share = (bucket.stop - bucket.start) / stage.trainer.num_params
    await ctx.compute(partial(merge_bucket, stage, state, number), work=share, kind="apply")
    if number not in state.made:
        return
    payload = state.made[number][1]
    for rank in state.members.ranks:
        # a worker that waits for the end of the stage needs no buckets
        if state.signal in (GO, PAUSE) or rank not in state.progress.waiting:
            await ctx.send(rank, stage.tag("back"), payload, (number,))


def merge_bucket(stage: StageConfig, state: ServerState, number: int) -> None:
    """Step on the elements of a bucket once it has arrived from all workers."""
    members = state.slices.get(number, [])
    if len(members) < state.quorum:
        return
    state.slices.pop(number, None)
    members.sort(key=attrgetter("worker"))
    weights = merge_weights(stage, state.work, members)
    scale = stage.sync.lr_scale(state.rule_state)
    lr = stage.trainer.rate(state.progress.samples - state.counted) * scale
    bucket, exact = stage.buckets[number], stage.pipeline.traits.lossless
    if members:
        update = stage.aggregate.fold(members, weights)
    else:
        update = slice_vector(state.params, bucket.start, bucket.stop) * 0.0
    state.made[number] = stage.trainer.apply_slice(
        state.params, state.moments, bucket.start, bucket.stop, update, lr, exact
    )


async def merge_without(
    ctx: RankContext, stage: StageConfig, state: ServerState, rank: int
) -> bool:
    """Merge the buckets, and count the step, that waited for a failed worker alone.

    If no worker remains, a step that is not counted is discarded. Of a counted one, buckets that
    no worker sends any more are merged as zero.
    Returns: True if that completes a model.
    """
    waited_for = [*state.slices]
    for number, members in state.slices.items():
        state.slices[number] = [push for push in members if push.worker != rank]
    count_headers(state)
    if not state.progress.num_present:
        waited_for = [k for k in range(len(stage.buckets)) if state.counted and k not in state.made]
        state.slices = {}
        state.made = state.made if state.counted else {}
    for number in waited_for:
        if len(state.slices.get(number, ())) >= state.quorum:
            await merge_and_return(ctx, stage, state, number)
    return finish_if_complete(stage, state)


def count_step(ctx: RankContext, stage: StageConfig, state: ServerState, message: Message) -> bool:
    """Count a step once the headers of all workers have arrived.

    Returns: True if all of its buckets are merged by then, so that the model changed.
    """
    push = push_of(ctx, state, message, None)
    state.buffer.append(push)
    count_headers(state)
    observe_push(ctx, stage, state, push)
    return finish_if_complete(stage, state)


def count_headers(state: ServerState) -> None:
    """Count a step whose headers have arrived from all workers."""
    if not state.buffer or len(state.buffer) < state.quorum:
        return
    members, state.buffer = state.buffer, []
    state.progress.merge()
    for member in members:
        state.progress.commit(member.worker, member.steps, member.samples)
        state.counted += member.samples


def finish_if_complete(stage: StageConfig, state: ServerState) -> bool:
    """Make the model of a counted step once all of its buckets are merged.

    Returns: True if the model changed.
    """
    if not state.counted or len(state.made) < len(stage.buckets):
        return False
    in_order = sorted(state.made, key=lambda number: stage.buckets[number].start)
    state.moments, state.params = stage.trainer.join_slices([state.made[k] for k in in_order])
    state.made, state.counted = {}, 0
    return True


async def drain_buckets(ctx: RankContext, stage: StageConfig, state: ServerState) -> None:
    """Merge buckets until the model contains every counted step."""
    bucket = stage.tag("bucket")
    while state.counted:
        message = await ctx.recv(bucket, PEER_FAILED, JOIN)
        handle = on_bucket if message.tag == bucket else on_membership
        await handle(ctx, stage, state, message)

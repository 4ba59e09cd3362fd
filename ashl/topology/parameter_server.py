"""Parameter server: workers push updates, the server merges them into the model and answers with
the model.

Data flow: a worker computes on the model that it pulled last and sends a push. The server decodes
and buffers the push. Once the buffer holds `quorum` pushes, the server merges them: `aggregate`
sets the weights, `outer` takes the step. It then answers every waiting worker that
`sync.may_proceed` names. A push that is too stale for the sync mode is dropped, and its worker
waits for an answer as well. Traffic per worker and exchange: one push and one pull of the model.

Merges without a quorum: at the time `closes_s` of the sync mode; before the next stage. With a
barrier, a worker failure lowers the quorum, and the server merges if the buffer then holds it.

Control signals in a reply: GO; LAST, only with delayed exchanges: push the piece of work that is
finished and compute no more in this stage; NEXT, another stage follows; STOP, the run is over.
Before NEXT the server waits for pushes in flight and merges them. At STOP it drops them.

With `runtime.on_worker_failure=reshard` each surviving worker also trains on its part of a failed
worker's data. It begins in the first round after the reply that reports the failure.

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

    Requirements that planning checks: with `plain`, the optimizer is SGD without momentum and
    weight decay. With `unbiased`, the codec is unbiased. With `whole`, some pushes hold the
    gradient over all data of a worker, and `runtime.on_worker_failure=reshard` is not supported.
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
        """Return the payload that a joining worker starts from: the server's model."""
        return state.params

    def apply_admission(self, state: WorkerState, body: Any, kept: WorkerState | None) -> None:
        """Start a joining worker from the payload `body` of the answer to its join request.

        Args: kept: the worker's state in a checkpoint, or None.
        """
        state.params = body

    def on_membership_change(self, stage: Stage, state: ServerState, rank: int) -> None:
        """Update the server's state after this worker has failed or rejoined.

        A failed worker is in `progress.gone`, a rejoined one is not.
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

    # If True, the server handles every push that has arrived before it answers.
    takes_all: ClassVar[bool] = False

    def quorum(self, num_workers: int) -> int:
        """Return the number of pushes of a merge. Raises: UsageError if there are fewer workers."""
        return 1

    def accepts(self, staleness: int) -> bool:
        """Return True if a push with this staleness (merges) is merged; otherwise it is dropped."""
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
        """Return the rule's state after this worker has failed or rejoined.

        A failed worker is in `progress.gone`, a rejoined one is not.
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

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        return stage.workers if rank == stage.server else (stage.server,)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """Return the time (ns) of a push and a pull without contention.

        With fragments: the maximum over all fragments.
        """
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
    ends: CodecState = field(default_factory=CodecState)  # the codec's state at the server
    fragment_ends: tuple[CodecState, ...] = ()  # the codec's state of each fragment
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
    pulls: list[Tag] = field(default_factory=list)  # tag of the replies to each worker
    quorum: int = 1  # pushes of one merge
    workers: tuple[WorkerPlan, ...] = ()  # present assignment of each worker, by rank

    @property
    def version(self) -> int:
        """Version of the model."""
        return self.progress.version

    def enter(self, stage: Stage, now_s: float) -> None:
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
        self.rule_state = rule_of(stage).begin(stage, self.progress)
        self.workers = stage.plan.workers
        self.ends = stage.carry_over_codec_state(self.ends, self.progress.samples)
        self.quorum = stage.quorum_of(self.progress.present)
        self.pulls = [stage.tag("pull", self.incarnations.get(rank, 0)) for rank in stage.workers]
        if stage.resets:
            self.moments = stage.trainer.moments()
        self.outer_state = None if stage.resets_outer else self.outer_state


def record_exchange(
    ctx: RankContext, stage: Stage, state: WorkerState, work: Work, reply: Pull, loss: float
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


async def worker(ctx: RankContext, stage: Stage, state: WorkerState) -> int:
    """Run a worker: compute on the model pulled last, push the update, wait for the reply.

    With delayed exchanges the worker computes the next piece of work between a push and its reply.
    Returns: the final signal, NEXT or STOP.
    """
    state.enter(stage, ctx.rank)
    messages = rule_of(stage).messages()
    signal = GO
    push = stage.tag("push")
    pull = stage.tag("pull", state.incarnation)
    server = stage.topology.server_of(stage, ctx.rank)
    answer = ctx.recv(pull)
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
            apply_reply(stage, state, signal, message.body)
        seen = message.body is not None and (ahead is None or ctx.now - asked > AT_ONCE_S)
        state.pull_s = ctx.now - message.start_ns / 1e9 if seen else 0.0
        state.pending = ahead and at_round_boundary(ctx, stage, state, ahead)
        state.follow(reply)
        state.last = signal == LAST
        if signal in (NEXT, STOP):
            if stage.by_priority:
                await cancel_exchange(ctx, stage, state)
            # discard slices: at NEXT the reply holds the whole model, at STOP none is needed
            await ctx.discard(stage.tag("back"))
            leave_stage(ctx, stage, signal, reply.end_ns)
        record_exchange(ctx, stage, state, work, reply, loss)
    return signal


def apply_reply(stage: Stage, state: WorkerState, signal: int, body: Any) -> None:
    """Apply the payload of a reply: the model's first bucket, the model, or its difference."""
    if pull_comes_in_parts(stage) and signal == GO:
        state.coming = body
    elif signal == NEXT:
        state.params = body
    else:
        state.params = rule_of(stage).messages().apply_pull(stage, state, body)


async def server(ctx: RankContext, stage: Stage, state: ServerState) -> int:
    """Run the server: merge and answer until the stage ends, then answer every worker once more.

    Before another stage begins, the server waits for the pushes in flight and merges them. At the
    end of the run it drops them. Returns: the final signal, NEXT or STOP.
    """
    progress, push = state.progress, stage.tag("push")
    state.enter(stage, ctx.now)
    slices = {stage.tag("slice"): on_slice} if stage.overlap.by_slice or stage.by_priority else {}
    incoming = (push, *slices, PEER_FAILED, JOIN)
    handlers = {push: on_push, **slices, CLOSE: merge_buffered}
    deadline_s = stage.stop_criteria.deadline_s
    endless = ctx.recv(*incoming) if math.isinf(deadline_s) else None
    while state.newcomers:
        await admit(ctx, stage, state, state.newcomers[0])
    while True:
        ctx.safe_point(stage.index, state)
        message = state.ahead or await (endless or ctx.recv(*incoming, before_s=deadline_s))
        state.ahead = None
        ctx.time_accounting.end_round()  # the server's rounds are not reported, so drop their spans
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        handle = handlers.get(message.tag, on_membership)
        changed = await handle(ctx, stage, state, message)
        if changed and stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=progress.report())
        signal, reason = stop_decision(ctx, stage, progress)
        if signal == STOP or state.signal == GO:
            state.signal, state.reason = signal, reason
        if state.signal == STOP or (state.signal == NEXT and await drain_pushes(ctx, stage, state)):
            break
        if state.signal == GO:
            await answer_waiting(ctx, stage, state, incoming)
    await drain_slices(ctx, stage, state)
    if state.signal == STOP:
        ctx.safe_point(stage.index, None)
    await ctx.discard(*slices)  # slices of pushes that are not merged any more
    await finish_stage(ctx, stage, state, state.signal)
    record_end(ctx, stage, progress, state.reason)
    return state.signal


async def answer_waiting(
    ctx: RankContext, stage: Stage, state: ServerState, incoming: Sequence[Tag]
) -> None:
    """Answer every waiting worker that may proceed.

    A sync mode with `takes_all` handles all arrived messages first. If another one has arrived, it
    is kept in `state.ahead` and no worker is answered yet.
    """
    rule = rule_of(stage)
    if rule.takes_all:
        state.ahead = await receive_more(ctx, stage, state, incoming)
    if state.ahead is not None:
        return
    changed = []
    for rank in sorted(rule.may_proceed(state.rule_state, state.progress)):
        if await reply(ctx, stage, state, rank):
            changed.append(rank)
    if stage.overlap.pulls:
        await send_remaining_parts(ctx, stage, changed, state.params)


# Pushes at the server: decode, merge, answer


CLOSE: Tag = ("close", 0, 0)  # from the server to itself: merge the buffered pushes now


def rule_of(stage: Stage) -> ServerRule:
    """Return the stage's sync mode as a `ServerRule`; planning has checked its type."""
    rule: Any = stage.sync
    return rule


async def on_push(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Count one push, and apply it unless it is too stale; its worker then waits for a reply.

    Returns: True if the model changed.
    """
    progress, worker, rule = state.progress, message.src, rule_of(stage)
    if stage.messages:
        message = await assemble_push(ctx, stage, message)
        stage = await await_slices(ctx, stage, state)
    steps, loss, version = int(message.meta[0]), message.meta[2], int(message.meta[3])
    staleness = progress.version - version
    # with a barrier and delayed exchanges every push is stale by one round, which is not counted
    one_late = staleness > 0 and rule.in_rounds and stage.delayed is not None
    beyond = staleness - 1 if one_late else staleness
    late = not (rule.accepts(beyond) and stage.aggregate.accepts(beyond))
    progress.observe(worker, 0 if late else staleness, loss)  # staleness of applied pushes only
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
    """Return the next message that arrives before the time `closes_s` of the sync mode.

    Without such a time: the next message that has already arrived.
    Returns: None if there is no message, so it answers now; a `CLOSE` message at `closes_s`.
    """
    closes_s = rule_of(stage).closes_s(state.rule_state, state.progress)
    deadline_s = stage.stop_criteria.deadline_s
    message = await ctx.recv(*tags, before_s=max(ctx.now, min(closes_s, deadline_s)))
    due = message is None and -math.inf < closes_s <= deadline_s
    return Message(ctx.rank, CLOSE, None, (), int(ctx.now_ns)) if due else message


async def merge_buffered(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """Merge the buffered pushes, even without a quorum. Returns: True."""
    await ctx.compute(partial(apply_merge, stage, state, None), work=1, kind="apply")
    return True


async def merge_push(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Decode a push, merge it, and pass it to the sync mode and an online planner.

    Returns: True if the model changed.
    """
    progress, worker = state.progress, message.src
    steps, samples, loss, version, step_s, pull_s = message.meta
    body = stage.link.receive_payload(state.ends, worker, message.body)
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
    """Buffer a push, and merge the buffer once it holds a quorum.

    Update rule: one outer step on Σ_i c_i·Δ_i, or one optimizer step on Σ_i c_i·g_i
    Args: push: the new push; None: merge the buffered pushes, even without a quorum.
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
    """Pass the costs of a push to a planner that replans during the run.

    If it replans, H, density and weights of the present workers change from now on.
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
    present = [rank for rank in stage.workers if rank not in state.progress.gone]
    current = [state.workers[rank] for rank in present]
    seen, rows = planner.replan(averages.of(present), current, *presets, stage.payload)
    state.averages = replace(averages, commits=seen.commits)
    if rows is None:
        return
    # data shards change at stage boundaries only
    changed = dict(zip(present, assigned(current, rows, resharded=False), strict=True))
    state.workers = tuple(changed.get(rank, worker) for rank, worker in enumerate(state.workers))
    ratios = [worker.compression_ratio for worker in state.workers]
    local_steps = [worker.local_steps for worker in state.workers]
    ctx.emit(Replan(ctx.rank, stage.index, ratios, local_steps, ctx.now_ns))


async def reply(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> bool:
    """Let a waiting worker proceed on the present model.

    Returns: True if the model differs from the worker's last pull.
    Raises: UsageError if the sync mode names a worker that does not wait.
    """
    progress = state.progress
    if rank not in progress.waiting:
        who = f"{quoted(type(stage.sync))} lets worker {rank} go on, which does not wait"
        raise UsageError(f"{who}; let its `may_proceed` return some of `progress.waiting`")
    changed = progress.pulled[rank] != progress.version  # since this worker's last pull
    staleness, late = progress.release(rank)
    progress.now_s = ctx.now
    local_steps, ratio, interval_s, batch = assignment_of(stage, state, rank)
    body = await rule_of(stage).messages().answer(ctx, stage, state, rank, changed)
    body = first_part(stage, body) if stage.messages and changed else body
    counts = progress.version, progress.steps, progress.samples
    meta = Pull(GO, *counts, staleness, late, 0, local_steps, ratio, interval_s, batch)
    if stage.reshards:
        meta = (*meta, *failed_as_numbers(stage, progress.gone))
    await ctx.send(rank, state.pulls[rank], body, meta)
    return changed


def assignment_of(stage: Stage, state: ServerState, rank: int) -> tuple[int, float, float, int]:
    """Return the next assignment of this worker, which proceeds now.

    Returns: (local steps, density, seconds of local work or 0, batch or 0 for the present one).
    """
    progress, plan = state.progress, state.workers[rank]
    rule = rule_of(stage)
    assignment = rule.next_assignment(stage, state.rule_state, progress, rank) or AS_PLANNED
    planned = plan.local_steps if assignment.local_steps is None else assignment.local_steps
    rest = None
    if planned != 1:
        ahead = int(stage.delayed is not None)
        rest = stage.remaining_rounds(progress.steps, progress.samples, ahead, progress.gone)
    local_steps = stage.cap_local_steps(planned, rank, rest)
    ratio = plan.compression_ratio if assignment.ratio is None else assignment.ratio
    return local_steps, ratio, assignment.interval_s, assignment.batch


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
# Rejoin: the worker receives the stage, the model and its assignment. Its count of rounds starts at
# that of the slowest worker. Its optimizer and its codec start with an empty state. Its data
# continue after the last position that the server knows. A worker that asks at a stage boundary
# joins in the next stage. The server tells a worker that asks after the end that the run is over.
# An incarnation is identified by the time of its join request, which is part of the tag of every
# message to it. So no worker mistakes a reply to an earlier incarnation for its own.
#
# Checkpoint of asynchronous workers: all workers join the restored server again. Merged pushes
# count. Workers compute pushes again that were in flight or buffered. Each worker resumes with the
# server's counts of it, and with the optimizer state and residual of its own last safe point.
#
# Source: membership as in Li et al., "Scaling Distributed Machine Learning with the Parameter
# Server", OSDI 2014, section 3.8; rounds of the survivors as with the backup workers of Chen et
# al., arXiv 1604.00981.


PLANNED: Tag = ("planned", 0, 0)  # assignments planned after profiling, for a joining worker


def admission_tag(incarnation: int) -> Tag:
    """Return the tag of the answer to a join request."""
    return "admission", 0, incarnation


async def on_membership(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """Handle a worker failure or a join request. Returns: True if the model changed."""
    if message.tag == PEER_FAILED:
        return await remove_failed(ctx, stage, state, message.src)
    record_join(state, message)
    if state.signal != NEXT:
        await admit(ctx, stage, state, message.src)
    return False


def record_join(state: ServerState, message: Message) -> None:
    """Record a join request, which is answered later."""
    (incarnation,) = message.meta
    state.newcomers += (message.src,)
    state.incarnations[message.src] = int(incarnation)


def check_min_workers(ctx: RankContext, stage: Stage, rank: int, remaining: int) -> None:
    """Raise AshlError if the remaining workers are too few after the failure of `rank`.

    The limit is `runtime.min_workers`. In a run that does not tolerate failures, the error names
    that failure as its `__cause__`.
    """
    if remaining < stage.min_workers:
        raise AshlError(
            f"worker {rank} failed at {ctx.now:.6g} s and {remaining} of {stage.num_workers}"
            f" workers are running, fewer than runtime.min_workers={stage.min_workers}:"
            " the run ends here"
        ) from (None if stage.elastic else PeerFailedError(rank))


async def remove_failed(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> bool:
    """Continue without a failed worker.

    Returns: True if the survivors' pushes complete a round, so that the model changed.
    Raises: AshlError if too few workers remain.
    """
    progress, rule = state.progress, rule_of(stage)
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    if rank in progress.gone:
        return False
    progress.remove_worker(rank)
    state.quorum = stage.quorum_of(progress.present)
    state.ends.forget(rank)
    check_min_workers(ctx, stage, rank, progress.present + len(state.newcomers))
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
    """Admit a (re)joining worker, which continues from the present model."""
    progress = state.progress
    state.newcomers = tuple(other for other in state.newcomers if other != rank)
    progress.join(rank)
    state.quorum = stage.quorum_of(progress.present)
    state.pulls[rank] = stage.tag("pull", state.incarnations[rank])
    progress.now_s = ctx.now
    messages = rule_of(stage).messages()
    messages.on_membership_change(stage, state, rank)
    stage.link.record_full_pull(state.ends, rank, state.params)
    planned, rows = state.assigned or (0, None)
    applied = (progress.version, progress.steps, progress.samples)
    assignment = assignment_of(stage, state, rank)
    rounds, done = progress.rounds_and_steps_of(rank)
    # steps of its earlier incarnation's pushes that are buffered
    buffered = [push.steps for push in state.buffer if push.worker == rank]
    pushed = (rounds + len(buffered), done + sum(buffered))
    admission = Admission(GO, 0, stage.index, *applied, *pushed, planned, *assignment)
    body = messages.admission_payload(stage, state)
    meta = (*admission, *failed_as_numbers(stage, progress.gone))
    await ctx.send(rank, admission_tag(state.incarnations[rank]), body, meta)
    if rows is not None:
        await ctx.send(rank, PLANNED, rows)


async def reject_late_joins(ctx: RankContext, state: ServerState, end_ns: int) -> None:
    """Tell each worker that asks to join after the end that the run is over.

    It runs as a task that ends with the kernel.
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
    """Restore the server from a checkpoint: drop messages in flight and await all join requests.

    A worker that fails before it joins is removed. The server admits the others when its loop
    begins. Returns: (index of the stage, state).
    """
    stage, progress = stages[index], state.progress
    answered = set[int]()
    state.newcomers = ()
    state.flush_requested = ()
    state.ahead = None
    state.buffer = []
    for rank in stage.workers:
        state.ends.forget(rank)
        if rank in progress.waiting:
            progress.stop_waiting(rank)
    while len(answered) < stage.num_workers:
        message = await ctx.recv(JOIN, PEER_FAILED)
        answered.add(message.src)
        if message.tag == PEER_FAILED:
            await remove_failed(ctx, stage, state, message.src)
        else:
            record_join(state, message)
    return index, state


async def join(
    ctx: RankContext, stages: Sequence[Stage], kept: WorkerState | None = None
) -> tuple[int, WorkerState] | None:
    """Join a running run as a worker.

    Args: kept: the worker's state in a checkpoint, or None.
    Returns: (index of the present stage, state in it); None if the run is over.
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
    stage = stages[admission.stage]
    state.incarnation = incarnation
    state.away = as_members(message.meta[ADMISSION_FIELDS:])
    state.enter(stage, ctx.rank)
    if kept is not None:
        state.ends = stage.restore_codec_state(kept.ends, state.samples)
        state.moments = kept.moments
    if message.body is not None:
        rule_of(stage).messages().apply_admission(state, message.body, kept)
    state.follow(admission)
    state.round, state.step = admission.rounds, admission.done
    state.drawn = state.step * state.batch
    return stage.index, state


# End of a stage: work in flight is drained or dropped, and the server answers every worker


async def drain_pushes(ctx: RankContext, stage: Stage, state: ServerState) -> bool:
    """Drain work in flight before the next stage.

    Returns: True once every present worker waits and all their pushes are merged.
    """
    await flush_pending(ctx, stage, state)
    if len(state.progress.waiting) < state.progress.present:
        return False
    if state.buffer:
        await ctx.compute(partial(apply_merge, stage, state, None), work=1, kind="apply")
    return True


async def flush_pending(ctx: RankContext, stage: Stage, state: ServerState) -> None:
    """Ask each waiting worker once for its last piece of work (delayed exchanges only).

    Such a worker has computed the next piece while its push was in flight. After that piece it
    computes no more in this stage.
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
    """Tell every worker that the stage has ended, and drop pushes that are not merged.

    Waiting workers are answered at once, the others once their push arrives. At NEXT each waiting
    worker receives the model.
    Args: signal: NEXT or STOP; end_ns: end time of the stage (ns), None for now.
    """
    progress = state.progress
    if end_ns is None:
        end_ns = end_time_ns(stage, ctx.now_ns)
    progress.end_ns = end_ns
    applied = (progress.version, progress.steps, progress.samples)
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


# Bucketed pushes: a gradient travels in buckets while backward continues
#
# Rule: a worker sends bucket k, a slice of the gradient, as soon as backward has computed it. The
# buckets queue at the NIC of the worker, and at the NIC of the server with those of other workers.
# The last bucket is the push itself and carries its header. The server assembles a push once that
# bucket has arrived, so the gradient equals an unpartitioned one, bit for bit. If the model is
# partitioned, too, its first bucket travels with the reply, and forward waits for each of the
# others. `ashl.overlap` decides which layers a bucket holds.
#
# Source: Zhang et al., "Poseidon", USENIX ATC 2017; Hashemi et al., "TicTac", MLSys 2019.


async def compute_in_slices(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """Compute one gradient and send its slices while backward continues.

    Returns: the work with the last slice as its payload. If the model arrives in buckets, the
    forward pass waits for each, and `state.params` is complete afterwards.
    """
    if stage.by_priority:
        return await step_by_priority(ctx, stage, state)
    start, tags = ctx.now, [tag for _, tag in stage.ready]
    step, span = next_batch(state)
    needs: tuple[tuple[float, Tag], ...] = ()
    if state.coming is not None:
        needs = tuple((stage.messages[k].needed, tag) for k, tag in later_buckets(stage))
    arrived = [state.coming]  # buckets of the model, in forward order

    def work(emit: Callable[[int, Any], None], take: Callable[[int], Any] | None = None) -> float:
        def bucket(k: int) -> Any:
            if k and take is not None:
                arrived.append(take(k - 1))
            return arrived[k]

        model = Pieces(stage.slices[::-1], bucket) if needs else state.params
        return stage.trainer.gradient_in_parts(model, ctx.rank, step, span, stage.slices, emit)

    others = None
    if stage.overlap.by_slice:
        others = ctx.spawn(push_slices(ctx, stage, state.batch))
    elif tags[:-1]:
        others = ctx.spawn(forward_parts(ctx, stage.server, tags[:-1]))
    loss = await ctx.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params, state.coming = concatenate(arrived), None
    step_s = ctx.now - start
    body = None if others is None else await ctx.join(others)
    if not stage.overlap.by_slice:
        body = (await ctx.recv(tags[-1])).body
    return Work(body, loss, 1, state.batch, step_s, state.version)


async def forward_parts(ctx: RankContext, server: int, tags: Sequence[Tag]) -> None:
    """Send each bucket of the gradient to the server as soon as backward has computed it."""
    for tag in tags:
        part = await ctx.recv(tag, src=ctx.rank)
        await ctx.send(server, tag, part.body)


async def assemble_push(ctx: RankContext, stage: Stage, push: Message) -> Message:
    """Join a push with the buckets that left before it, at the server.

    Its start time is that of the first bucket.
    """
    # with slices, the server merges each of the earlier slices separately
    if stage.overlap.by_slice or stage.by_priority:
        return push
    before = [await ctx.recv(tag, src=push.src) for _, tag in stage.ready[:-1]]
    parts = (push, *reversed(before))  # in forward order
    return push._replace(
        body=concatenate([part.body for part in parts]),
        start_ns=min(part.start_ns for part in parts),
    )


# Bucketed pulls: the model travels in buckets while forward continues


def pull_comes_in_parts(stage: Stage) -> bool:
    """Return True if a reply holds the first part of the model and other messages the rest.

    With slices by priority it is False, because replies hold no part of the model.
    """
    return stage.overlap.by_slice or (stage.overlap.pulls and len(stage.messages) > 1)


def later_buckets(stage: Stage) -> list[tuple[int, Tag]]:
    """Return (number, tag) of the model's buckets after the first, in forward order."""
    return [(k, stage.tag("group", k)) for k in reversed(range(len(stage.messages) - 1))]


def first_part(stage: Stage, model: Any) -> Any:
    """Return the part of the model that travels with the reply.

    Without bucketed pulls: the whole model. With them: the bucket that forward needs first. If the
    server merges by slice: the last slice. By priority: nothing.
    """
    if not stage.overlap.pulls:
        return None if stage.by_priority else model
    if stage.overlap.by_slice:
        return slice_vector(model, *stage.cached(slice_ranges)[-1])
    return slice_vector(model, stage.messages[-1].start, stage.messages[-1].stop)


async def send_remaining_parts(
    ctx: RankContext, stage: Stage, ranks: Sequence[int], model: Any
) -> None:
    """Send the other buckets of the model to these workers, bucket by bucket.

    Slices are not sent here: the server has sent each one once it was merged.
    """
    if stage.overlap.by_slice:
        return
    for k, tag in later_buckets(stage):
        body = slice_vector(model, stage.messages[k].start, stage.messages[k].stop)
        for rank in ranks:
            await ctx.send(rank, tag, body)


async def settle_pull(ctx: RankContext, stage: Stage, state: WorkerState) -> bool:
    """Receive the rest of the model now if it arrives in slices, or if a checkpoint is due.

    Otherwise the next forward pass waits for each bucket.
    Returns: True if nothing is in flight to this worker.
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


# Slices that are merged one by one, in modes with a barrier
#
# Rule: once a slice has arrived from all workers, the server computes its weighted sum. It steps on
# these elements alone and sends them to all workers at once. The last slice of a gradient is the
# push itself: it carries the header that the server counts and answers. The server answers a push
# after it has sent all other slices. The model equals that of an unpartitioned push, bit for bit.
# `ashl.overlap.slices` decides how large slices are.
#
# Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training",
# MLSys 2019.


def slice_ranges(stage: Stage) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of each slice, in sending order."""
    return [
        (m.start + start, m.start + stop)
        for m in stage.messages
        for start, stop in stage.overlap.cuts(m)
    ]


def last_slice_stage(stage: Stage) -> Stage:
    """Return the stage restricted to the last slice."""
    start, stop = slice_ranges(stage)[-1]
    return replace(stage, size=stop - start)


# Slices at a worker


async def push_slices(ctx: RankContext, stage: Stage, samples: int) -> Any:
    """Send each slice to the server once it is ready, except the last one, which is the push.

    Args: samples: of the gradient. Returns: the last slice.
    """
    number, up, count = 0, stage.tag("slice"), len(stage.cached(slice_ranges))
    for message, (_, tag) in zip(stage.messages, stage.ready, strict=True):
        part = (await ctx.recv(tag, src=ctx.rank)).body
        for start, stop in stage.overlap.cuts(message):
            body = slice_vector(part, start, stop)
            number += 1
            if number < count:
                await ctx.send(stage.server, up, body, (number - 1, samples))
    return body


async def receive_slices(ctx: RankContext, stage: Stage, body: Any) -> Any:
    """Return the model once all slices have arrived; `body` is the last one, from the reply."""
    ranges, back = stage.cached(slice_ranges), stage.tag("back")
    arrived = {ranges[-1]: body}
    for _ in ranges[1:]:
        message = await ctx.recv(back)
        arrived[ranges[int(message.meta[0])]] = message.body
    return concatenate([arrived[bounds] for bounds in sorted(arrived)])


# Slices at the server


async def on_slice(ctx: RankContext, stage: Stage, state: ServerState, message: Message) -> bool:
    """Merge one slice, and send it back once it has arrived from all workers.

    Returns: True if the slice completes a model, which happens only with slices by priority.
    """
    number, samples = map(int, message.meta)
    if stage.by_priority:
        await ctx.send(message.src, stage.tag("ack"), None, (number,))
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
    """Return the stage restricted to the last slice, for a push; `stage` itself without slices.

    Before the last push of a round is merged, all other slices of the round must be merged. If a
    link became faster, the push may have overtaken a slice, so the server first waits for it.
    """
    if not stage.overlap.by_slice:
        return stage
    while len(state.buffer) + 1 == state.quorum and len(state.made) + 1 < len(
        stage.cached(slice_ranges)
    ):
        await on_slice(ctx, stage, state, await ctx.recv(stage.tag("slice")))
    return stage.cached(last_slice_stage)


def merge_slice(stage: Stage, state: ServerState, number: int, push: Push) -> None:
    """Buffer a slice of a push, and step on it once it has arrived from all workers."""
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
    """Take the optimizer's step on the elements of one slice, and keep the result in `made`."""
    start, stop = stage.cached(slice_ranges)[number]
    exact = stage.link.traits.lossless
    state.made[number] = stage.trainer.apply_slice(
        state.params, state.moments, start, stop, update, lr, exact
    )


def finish_sliced_step(
    stage: Stage, state: ServerState, update: Any, lr: float
) -> tuple[Any, Any, Any]:
    """Step on the last slice. Returns: (moments, outer moments, model)."""
    step_on(stage, state, len(stage.cached(slice_ranges)) - 1, update, lr)
    moments, params = join_slices(stage, state)
    return moments, state.outer_state, params


def join_slices(stage: Stage, state: ServerState) -> tuple[Any, Any]:
    """Return (moments, model) of all merged slices, and empty `made`."""
    made = [
        state.made[number]
        for number in sorted(state.made, key=stage.cached(slice_ranges).__getitem__)
    ]
    state.made = {}
    return stage.trainer.joined(made)


def finish_if_complete(stage: Stage, state: ServerState) -> bool:
    """Make the model of a counted step once all of its slices are merged (slices by priority).

    Returns: True if the model changed.
    """
    if not state.counted or len(state.made) < len(stage.cached(slice_ranges)):
        return False
    state.moments, state.params = join_slices(stage, state)
    state.counted = 0
    return True


# Slices by priority: those that the next forward pass needs first are sent first
#
# Rule: a worker sends the slice of the lowest layer first, among those that backward has computed.
# At most `credit` of its slices are in flight. The server acknowledges each slice. It merges a
# slice once it has arrived from all workers and sends it back at once. The next forward pass waits
# for each bucket separately, so the slices of the last layers travel during that pass.
#
# Once backward has ended, the worker sends the header, which is a push without payload. Slices that
# still wait for credit are sent later. The server answers when all headers have arrived, so every
# worker knows before its next step whether the run continues. The server's model is complete, and
# is evaluated, once all slices of a step are merged. At the end of a stage, and for a checkpoint,
# all slices are drained first.
#
# Limits: with a credit of one slice, each slice waits for the acknowledgement of the one before,
# which takes two latencies. Source: Jayarajan et al., "Priority-based Parameter Propagation for
# Distributed DNN Training" (P3), MLSys 2019.


def slice_numbers(stage: Stage) -> list[range]:
    """Return the slice numbers of each bucket."""
    ends = list(accumulate(len(stage.overlap.cuts(message)) for message in stage.messages))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


# Slices by priority at a worker


async def step_by_priority(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """Compute one gradient; the task `state.coming` exchanges its slices and outlives this call."""
    start, (number, span), arrived = ctx.now, next_batch(state), list[Any]()
    groups = [(message.needed, stage.tag("group", k)) for k, message in enumerate(stage.messages)]
    needs = () if state.coming is None else tuple(reversed(groups))

    def work(emit: Callable[[int, Any], None], take: Callable[[int], Any] | None = None) -> float:
        def bucket(k: int) -> Any:
            assert take is not None
            arrived.append(take(k))
            return arrived[k]

        model = Pieces(stage.slices[::-1], bucket) if needs else state.params
        return stage.trainer.gradient_in_parts(model, ctx.rank, number, span, stage.slices, emit)

    state.coming = ctx.spawn(exchange_by_priority(ctx, stage, state.batch, state.coming))
    loss = await ctx.compute(work, work=state.batch, parts=stage.ready, needs=needs)
    if needs:
        state.params = concatenate(arrived)
    return Work(None, loss, 1, state.batch, ctx.now - start, state.version)


async def exchange_by_priority(ctx: RankContext, stage: Stage, samples: int, before: Any) -> None:
    """Send the slices of one gradient by priority, and pass the model's buckets to forward.

    Args: samples: of the gradient; before: the task of the previous step, or None.
    """
    if before is not None:
        await ctx.join(before)
    parts, ack, back = [tag for _, tag in stage.ready], stage.tag("ack"), stage.tag("back")
    count, of = len(stage.cached(slice_ranges)), stage.cached(slice_numbers)
    queue = list[tuple[int, int, Any]]()  # (priority, number, elements), lowest layer first
    arrived = dict[int, Any]()  # merged slices, by number
    in_flight = 0  # slices without an acknowledgement
    while in_flight or len(arrived) < count:
        message = await ctx.recv(*parts, ack, back)
        if message.tag == ack:
            in_flight -= 1
        elif message.tag == back:
            number = int(message.meta[0])
            arrived[number] = message.body
            k = next(k for k, numbers in enumerate(of) if number in numbers)
            if all(number in arrived for number in of[k]):
                bucket = concatenate([arrived[number] for number in of[k]])
                await ctx.send(ctx.rank, stage.tag("group", k), bucket)
        else:
            k = parts.index(message.tag)
            cuts = stage.overlap.cuts(stage.messages[k])
            for number, (start, stop) in zip(of[k], cuts, strict=True):
                heappush(queue, (-k, number, slice_vector(message.body, start, stop)))
        while queue and in_flight < stage.overlap.most_committed:
            _, number, body = heappop(queue)
            in_flight += 1
            await ctx.send(stage.server, stage.tag("slice"), body, (number, samples))


async def flush_by_priority(ctx: RankContext, stage: Stage, state: WorkerState) -> None:
    """Wait until all slices are merged, and assemble the model from its buckets."""
    await ctx.join(state.coming)
    state.params = concatenate(
        [(await ctx.recv(stage.tag("group", k))).body for k in reversed(range(len(stage.messages)))]
    )
    state.coming = None


async def cancel_exchange(ctx: RankContext, stage: Stage, state: WorkerState) -> None:
    """Cancel the exchange of slices, and discard its messages."""
    if state.coming is not None:
        await ctx.cancel(state.coming)
        state.coming = None
    groups = (stage.tag("group", k) for k in range(len(stage.messages)))
    await ctx.discard(*groups, *(tag for _, tag in stage.ready), stage.tag("ack"))


# Slices by priority at the server


def count_step(stage: Stage, state: ServerState, message: Message) -> bool:
    """Count a step once the headers of all workers have arrived.

    Returns: True if all of its slices are merged by then, so that the model changed.
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
    """Merge slices until the model contains every counted step."""
    while state.counted:
        await on_slice(ctx, stage, state, await ctx.recv(stage.tag("slice")))


# One fragment of the model at a time, see `ashl.overlap.streaming` and `loscar`
#
# Rule: the merge after version v is of fragment v mod P, with P fragments. Each worker pushes the
# part of its finished work that lies in this fragment. Once these pushes have arrived from all
# workers, the server takes the outer step on the fragment and sends it back. The worker mixes it
# with its own fragment. As in `run_streaming` of `ashl.topology.all_reduce`, a worker holds one
# finished piece of work that is not exchanged yet.
#
# Sources: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
# 2025; Maziane et al., "LOSCAR-SGD", arXiv 2605.20866, 2026. Differs: both papers use all-reduce;
# here a server takes the outer step.


async def run_fragments(ctx: RankContext, stage: Stage, state: WorkerState) -> int:
    """Run a worker that exchanges one fragment of its finished work at a time.

    Between the push of a fragment and its reply, the worker takes the first local steps of the next
    piece of work. It takes the remaining ones after it has mixed the reply into its model.
    Returns: the final signal, NEXT or STOP.
    """
    state.enter(stage, ctx.rank)
    overlap, signal = stage.delayed, GO
    push, answer = stage.tag("push"), ctx.recv(stage.tag("pull"))
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
        ahead = await take_local_steps(ctx, stage, state, beside) if beside else None
        asked = ctx.now
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
        record_exchange(ctx, stage, state, work, reply, loss)
        if signal == GO:
            after = state.local_steps  # H of the piece that follows the present one
            await finish_piece(ctx, stage, state, ahead, total - beside)
            state.local_steps = after
    return signal


async def merge_fragment_push(
    ctx: RankContext, stage: Stage, state: ServerState, message: Message
) -> bool:
    """Merge a push of the present fragment, at the server. Returns: True if the model changed."""
    model, ends = state.params, state.ends
    outers = [*(state.outer_state or len(stage.fragments) * (None,))]
    k = state.version % len(stage.fragments)
    part, fragment, held = fragment_state(stage, state, state.version)
    state.params, state.outer_state, state.ends = held.params, outers[k], held.ends
    changed = await merge_push(ctx, part, state, message)
    outers[k] = state.outer_state
    state.params = fragment.put(model, state.params) if changed else model
    state.outer_state, state.ends = tuple(outers), ends
    return changed


async def answer_fragment(ctx: RankContext, stage: Stage, state: ServerState, rank: int) -> Any:
    """Return the payload of a reply: the fragment that was merged last."""
    part, _, held = fragment_state(stage, state, state.version - 1)
    return await rule_of(stage).messages().answer(ctx, part, held, rank, True)


def fragment_state(stage: Stage, state: Any, version: int) -> tuple[Stage, Fragment, Any]:
    """Return (stage, fragment, state) restricted to the fragment of the merge after `version`."""
    k, fragment = version % len(stage.fragments), fragment_at(stage, version)
    state.fragment_ends = state.fragment_ends or codec_states_of(stage)
    held = replace(state, params=fragment.of(state.params), ends=state.fragment_ends[k])
    return stage.fragment(k), fragment, held

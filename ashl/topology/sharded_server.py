"""Sharded server: several servers, each with a shard of the model behind a NIC of its own.

Use when: many workers push at once and wait for one server's NIC.
Avoid when: plans must change, or an overlap is needed.
Alternatives: `parameter_server`; `all_reduce`.

Rule: the model is partitioned into one shard per server. Each server is a parameter server for its
shard, with counts of its own. It receives a worker's shard of an update, merges, and answers with
its shard of the model. A worker proceeds once all servers have answered. So n simultaneous pushes
of S bytes bring n·S/s to each of s NICs, instead of n·S to one. Each worker begins its pushes at
another server, so that all NICs are busy from the start.

The first server assigns work, and decides when a stage ends or is evaluated. It notifies the
others, and each of them emits its shard as it was after as many merges. At the end of the run,
merges of other servers beyond that are in no model. Before another stage and before a pause, all
servers drain the pushes in flight. The codec treats each shard as a message of its own, with its
own scale, density, residual and layers.

Servers tolerate a worker failure, each from its own notification on. So they may differ by the
failed worker's last push. A rejoining worker asks the first server alone. That one tells the others
once it has admitted the worker, and the worker receives a shard from each. With a barrier, another
server may have merged the round in which the worker begins; it drops the worker's first push.

Limit: one server is the parameter server. With a barrier, several servers are, too, bit for bit, if
the codec is elementwise (`cast`, `sign` without scale). That also holds for a layerwise codec with
partition_by=layers (`terngrad`, or `compression.per_layer=true`). With other codecs a shard has
another scale, other random numbers or another selection than the whole model. Without a barrier,
each shard has its own order of pushes, as in such systems; the counts are those of the first
server.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014;
shards without a common order as in Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012
(Downpour SGD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.runtime.effects import PEER_FAILED, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import concatenate
from ashl.stage.compression_pipeline import CodecState, Payload
from ashl.stage.contract import (
    CODEC,
    FAULT_TOLERANT,
    GO,
    NEXT,
    OUTER,
    PAUSE,
    STOP,
    WEIGHTS,
    Loop,
    Rule,
    StageConfig,
    Topology,
)
from ashl.stage.progress import Progress
from ashl.topology.ending import (
    leave_stage,
)
from ashl.topology.local_work import (
    Work,
    WorkerState,
    context_of,
    local_work,
    report_health,
    report_not_finite,
)
from ashl.topology.parameter_server import (
    PULL_FIELDS,
    ServerRule,
    ServerState,
    admit,
    adopt_reply,
    ask_to_join,
    enter_running_stage,
    finish_stage,
    may_all_proceed,
    merge_buffered,
    on_membership,
    on_push,
    parse_reply,
    record_exchange,
    reply_to_all,
    server,
)


@option
class ShardedServer(Topology):
    """Ranks n, n + 1, … hold one shard of the model each."""

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, OUTER, FAULT_TOLERANT})
    has_server: ClassVar[bool] = True
    servers: Count
    partition_by: Literal["bytes", "layers"]

    @property
    def needs(self) -> dict[str, str]:
        whole = ("merges_by_shard", "fixed_plan", "elementwise", "elementwise_outer")
        return super().needs | dict.fromkeys((*whole, "nics", "no_nodes"), "")

    def bounds(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shard [start, stop) of each server, for layers of these sizes.

        Raises: UsageError if there are more servers than layers or parameters.
        """
        d = sum(sizes)
        ends = list(range(d + 1))
        if self.partition_by == "layers":
            ends = [0]
            for size in sizes:
                ends.append(ends[-1] + size)
        if self.servers >= len(ends):
            by_layers = self.partition_by == "layers"
            raise UsageError(
                f"topology.servers={self.servers}: the model has only {len(ends) - 1}"
                f" {'layers' if by_layers else 'parameters'} to partition; take at most as many"
                " servers" + (", or topology.partition_by=bytes" if by_layers else "")
            )
        cuts = [0]
        for k in range(1, self.servers):  # as equal as possible, and no shard is empty
            candidates = range(cuts[-1] + 1, len(ends) - (self.servers - k))
            cuts.append(min(candidates, key=lambda at: abs(ends[at] - d * k / self.servers)))
        return list(pairwise(ends[at] for at in (*cuts, len(ends) - 1)))

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        return self.servers

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        servers = all_servers(stage)
        if rank < stage.server:
            return servers
        return (*stage.workers, *(servers[1:] if rank == stage.server else servers[:1]))

    def begin(self, stage: StageConfig, rank: int) -> ShardedWorker | ShardState:
        params, moments = stage.trainer.init()
        if rank < stage.server:
            states = [CodecState() for _ in range(self.servers)]
            return ShardedWorker(
                params, moments, versions=[0] * self.servers, shard_codec_states=states
            )
        held = stage.fragments[rank - stage.server]
        return ShardState(
            held.extract(params), moments_of(stage, rank), Progress(stage.num_workers)
        )

    async def join(
        self, ctx: RankContext, stages: Sequence[StageConfig]
    ) -> tuple[int, ShardedWorker] | None:
        if (answers := await ask_to_join(ctx, stages[0])) is None:
            return None
        model = concatenate([answer.payload for answer in answers])
        index, state = await enter_running_stage(ctx, stages, answers[0], model)
        state.versions = [parse_reply(answer.meta).version for answer in answers]
        return index, state

    def role(self, stage: StageConfig, rank: int) -> Loop:
        if rank < stage.server:
            return worker
        return run_first if rank == stage.server else run_other


@dataclass
class ShardedWorker(WorkerState):
    """State of a worker whose model comes from several servers."""

    versions: list[int] = field(default_factory=list)  # version of each shard
    # the codec's state of each shard at this worker
    shard_codec_states: list[CodecState] = field(default_factory=list)


@dataclass
class ShardState(ServerState):
    """State of the server of a shard; the other servers also record decisions of the first one."""

    history: dict[int, Any] = field(default_factory=dict)  # the shard by version, if recent
    due: list[int] = field(default_factory=list)  # versions to be evaluated
    # end of the first server's stage: (version, signal, time in ns)
    last: tuple[int, int, int] | None = None
    leaving: list[int] = field(default_factory=list)  # workers that have been told of the end

    def end_pass(self) -> None:
        super().end_pass()
        self.history = {self.progress.version: self.params}
        self.last = None
        self.leaving = []
        # No admission is in flight, and a resumed run counts the failures of a worker from 0.
        self.failures = {rank: self.failures[rank] for rank in self.newcomers}


def parts(stage: StageConfig) -> tuple[StageConfig, ...]:
    """Return the stage restricted to the shard of each server."""
    return stage.fragment_stages


def moments_of(stage: StageConfig, rank: int) -> tuple[Any, ...]:
    """Return empty moments for a server's shard."""
    held = stage.fragments[rank - stage.server]
    return tuple(
        held.extract(moment) if moment.dim() else moment for moment in stage.trainer.moments()
    )


def enter_shard(ctx: RankContext, stage: StageConfig, state: ShardState) -> StageConfig:
    """Enter a stage at a server, unless the state is that of a checkpoint within it.

    Returns: the stage restricted to the server's shard.
    """
    own, begins = stage.fragment_stages[ctx.rank - stage.server], state.entered != stage.index
    state.enter(own, ctx.now)
    if begins:
        state.moments = moments_of(stage, ctx.rank) if stage.resets_momentum else state.moments
        state.history = {state.progress.version: state.params}
        state.due = []
        state.last = None
        state.leaving = []
    return own


def all_servers(stage: StageConfig) -> tuple[int, ...]:
    return tuple(range(stage.server, stage.server + stage.topology.servers))


async def worker(ctx: RankContext, stage: StageConfig, state: ShardedWorker) -> int:
    """Run a worker: compute on the model pulled last, push its shards, wait for all answers.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    if state.entered != stage.index:
        both = zip(parts(stage), state.shard_codec_states, strict=True)
        state.shard_codec_states = [
            part.carry_over_codec_state(one, state.samples) for part, one in both
        ]
    state.enter(stage, ctx.members, ctx.rank)
    servers, push = all_servers(stage), stage.tag("push")
    pull = stage.tag("pull", state.incarnation)
    signal = GO
    order = [(ctx.rank + k) % len(servers) for k in range(len(servers))]
    while signal == GO:
        ctx.safe_point(stage.index, state)
        work, payloads, loss = await make_pushes(ctx, stage, state)
        for k in order:
            meta = (work.steps, work.samples, loss, state.versions[k], work.step_s, state.pull_s)
            await ctx.send(servers[k], push, payloads[k], meta)
        asked = ctx.now
        answers, finals = await receive_answers(ctx, stage, pull)
        state.pull_s = ctx.now - max(asked, min(answer.start_ns for answer in answers) / 1e9)
        replies = [parse_reply(answer.meta) for answer in answers]
        dropped = [bool(reply.dropped) and not math.isnan(loss) for reply in replies]
        restore_shards(stage, state, payloads, dropped)
        reply = replies[0]
        for k, final in enumerate(finals):
            replies[k] = parse_reply(final.meta)
            if final.payload is not None:  # else the shard has not changed since the first answer
                answers[k] = final
        signal = replies[0].signal
        if any(answer.payload is not None for answer in answers):
            both = zip(answers, stage.fragments, strict=True)
            state.params = concatenate(
                [held.extract(state.params) if m.payload is None else m.payload for m, held in both]
            )
        adopt_reply(state, reply)
        state.versions = [one.version for one in replies]
        state.covered_workers = tuple(map(int, answers[0].meta[PULL_FIELDS:]))
        state.version = min(state.versions)
        if signal != GO:
            leave_stage(ctx, stage, signal, max(reply.end_ns for reply in replies))
        record_exchange(ctx, stage, state, work, reply, loss)
    return signal


LEAVING = (0, 0, 0.0, 0, 0.0, 0.0)  # header of a push without work: its worker knows of the end


async def receive_answers(
    ctx: RankContext, stage: StageConfig, pull: Tag
) -> tuple[list[Message], list[Message]]:
    """Receive the answers of all servers to a push, by server.

    Once an answer tells the end of the stage, the worker tells each server whose answer does not,
    and such a server answers once more. It is told at once, because another server may wait for a
    worker that waits for this one.
    Returns: the answers, and the final answers; no final ones if the stage continues.
    """
    servers = all_servers(stage)
    answers = [await ctx.recv(pull, src=servers[0])]
    if not is_final(answers[0]):
        answers += [await ctx.recv(pull, src=rank) for rank in servers[1:]]
    found = {answer.src: answer for answer in answers}
    finals = {answer.src: answer for answer in answers if is_final(answer)}
    if not finals:
        return answers, []
    for rank in [rank for rank in found if rank not in finals]:
        await ctx.send(rank, stage.tag("push"), None, LEAVING)
    while len(finals) < len(servers):
        answer = await ctx.recv(pull)
        found.setdefault(answer.src, answer)
        if is_final(answer):
            finals[answer.src] = answer
        else:
            await ctx.send(answer.src, stage.tag("push"), None, LEAVING)
    return [found[rank] for rank in servers], [finals[rank] for rank in servers]


def is_final(answer: Message) -> bool:
    """Return True if an answer tells the end of the stage, or a pause."""
    return parse_reply(answer.meta).signal != GO


async def make_pushes(
    ctx: RankContext, stage: StageConfig, state: ShardedWorker
) -> tuple[Work, list[Payload], float]:
    """Compute a worker's next pushes. Returns: (work, payload for each server, loss)."""
    work = await local_work(ctx, stage, state)
    x = stage.aggregate.clip(work.payload)
    shards = [held.extract(x) for held in stage.fragments]
    if stage.pipeline.traits.lossless:
        return work, shards, work.loss
    if report_not_finite(ctx, stage, state, x):
        return work, shards, math.nan
    payloads = await ctx.compute(
        partial(encode_shards, stage, state, ctx.rank, shards), work=1, kind="compress"
    )
    pipelines = [part.pipeline for part in parts(stage)]
    report_health(
        ctx, stage, state, x, list(zip(pipelines, state.shard_codec_states, payloads, strict=True))
    )
    return work, payloads, work.loss


def encode_shards(
    stage: StageConfig, state: ShardedWorker, rank: int, shards: Sequence[Any]
) -> list[Payload]:
    """Encode each shard, which the codec treats as a model of its own. Returns: the payloads."""
    context, payloads = context_of(stage, rank, state, state.version), []
    for k, (held, part, x) in enumerate(zip(stage.fragments, parts(stage), shards, strict=True)):
        squares = None if context.squares is None else held.extract(context.squares)
        own = context._replace(
            layer=held.first,
            version=state.versions[k],
            params=held.extract(state.params),
            squares=squares,
        )
        payloads.append(part.pipeline.encode(state.shard_codec_states[k], x, own))
    return payloads


def restore_shards(
    stage: StageConfig, state: ShardedWorker, payloads: Sequence[Payload], dropped: Sequence[bool]
) -> None:
    """Return the updates that a server has dropped to the codec's residual."""
    if stage.pipeline.traits.lossless:
        return
    shards = zip(parts(stage), state.shard_codec_states, payloads, dropped, strict=True)
    for part, codec_state, payload, was_dropped in shards:
        if was_dropped:
            part.pipeline.restore_dropped(codec_state, payload)


async def run_first(ctx: RankContext, stage: StageConfig, state: ShardState) -> int:
    """Run the first server as the server of its shard. Returns: the final signal."""
    return await server(ctx, enter_shard(ctx, stage, state), state)


def has_caught_up(state: ShardState) -> bool:
    """Return True if this server has no more to merge after the end of the first server's stage.

    At the end of the run it has merged as much as the first server. Otherwise every worker waits.
    """
    progress = state.progress
    if state.last is None:
        return False
    version, signal, _ = state.last
    return len(progress.waiting) == progress.num_present or (
        signal == STOP and (progress.version >= version or bool(progress.diverged))
    )


async def handle_message(
    ctx: RankContext, stage: StageConfig, state: ShardState, message: Message
) -> None:
    """Handle a push, a worker failure, or an admission or a decision of the first server."""
    progress, push = state.progress, stage.tag("push")
    if message.tag == push and not message.meta[0]:  # from a worker that knows of the end
        state.leaving.append(message.src)
        progress.start_waiting(message.src, 0, late=True)
    elif message.tag == stage.tag("joined"):
        await follow_admission(ctx, stage, state, message)
    elif message.tag in (push, PEER_FAILED):
        if message.tag == PEER_FAILED:
            state.failures[message.src] = 1 + int(message.meta[0])
        handle = on_push if message.tag == push else on_membership
        if await handle(ctx, stage, state, message):
            state.history[progress.version] = state.params
            # no server is further behind
            state.history.pop(progress.version - 2 * stage.num_workers, None)
    elif message.meta[1] == GO:
        state.due.append(int(message.meta[0]))
    else:
        version, signal, end_ns = map(int, message.meta)
        state.last = version, signal, end_ns


async def follow_admission(
    ctx: RankContext, stage: StageConfig, state: ShardState, message: Message
) -> None:
    """Admit a worker that the first server has admitted, unless it has failed again since."""
    rank, incarnation, failures, version = map(int, message.meta)
    if state.failures.get(rank, 0) <= failures:
        state.incarnations[rank] = incarnation
        await admit(ctx, stage, state, rank, version)


async def run_other(ctx: RankContext, stage: StageConfig, state: ShardState) -> int:
    """Run one of the other servers: merge and answer until the first one ends the stage.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    stage = enter_shard(ctx, stage, state)
    incoming = stage.tag("push"), stage.tag("first"), stage.tag("joined"), PEER_FAILED
    while not has_caught_up(state):
        ctx.safe_point(stage.index, state)
        message: Message = await ctx.recv(*incoming)
        ctx.time_accounting.fold_if_many()
        await handle_message(ctx, stage, state, message)
        for version in [due for due in state.due if due <= state.progress.version]:
            ctx.snapshot(state.history.get(version, state.params), tick=version)
            state.due.remove(version)
        if state.last is None:
            proceeding = stage.sync.may_proceed(state.rule_state, state.progress)
            await reply_to_all(ctx, stage, state, {*proceeding}.difference(state.leaving))
    # versions that this server never reaches, because it dropped a push that the first one merged
    for version in state.due:
        ctx.snapshot(state.params, tick=version)
    state.due = []
    assert state.last is not None
    version, state.signal, end_ns = state.last
    is_blocked = state.signal == PAUSE and not may_all_proceed(stage, state)
    if state.buffer and (state.signal == NEXT or is_blocked):
        await merge_buffered(ctx, stage, state)
    if state.signal == PAUSE:
        await reply_to_all(ctx, stage, state, state.progress.waiting, PAUSE)
        return PAUSE
    if state.signal == STOP:
        state.params = state.history.get(version, state.params)
    await finish_stage(ctx, stage, state, state.signal, end_ns)
    return state.signal

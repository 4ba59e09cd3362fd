"""Several servers: each holds a piece of the model behind a port of its own, and merges what comes
for it.

Rule: the model is cut into as many pieces as there are servers. Each of them is a parameter server
for its piece, with counts of its own: it takes in a worker's piece of an update, merges, and
answers with its piece of the model; a worker goes on once all have answered. So n pushes of S bytes
at once take n·S/s at each of s ports instead of n·S at one. The server that a worker pushes to
first goes round, so that all ports are busy from the start; answers go round in blocks of workers
(`in_turn`). What a worker does next is the first server's to say, and so is when a stage ends, or
is evaluated: it tells the others, and each shows its piece as it was after as many merges. At the
end of the run, what is merged elsewhere beyond that is in no model; where another stage follows,
all take in what is under way. Each piece is a message of its own for the codec, with a scale, a
share and what is left out of its own, and with its part of the model's layers. Servers go on
without a worker that is lost, each from when it hears of it, so that they may differ by its last
push.

Limit: one server is the parameter server; and where all wait for all, so are several, bit for bit,
with a codec that goes element by element (`cast`, `sign` without scale), or layer by layer with
partition_by=layers (`terngrad`, or `compression.per_layer=true`); of others each piece has another
scale, other draws or another choice than the whole. Where nobody waits, each piece has its own
order of pushes, as in such systems: the counts are the first server's.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014;
pieces without a common order as in Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012
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
from ashl.runtime.effects import JOIN, PEER_FAILED, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import concatenate
from ashl.stage.compression_pipeline import CodecState, Payload
from ashl.stage.program import apply_assignments
from ashl.stage.progress import Progress
from ashl.stage.stage import (
    CODEC,
    FAULT_TOLERANT,
    GO,
    NEXT,
    OUTER,
    STOP,
    WEIGHTS,
    Loop,
    Network,
    Rule,
    Stage,
    Topology,
)
from ashl.topology.ending import end_time_ns, leave_stage, record_end, stop_decision
from ashl.topology.local_work import (
    Work,
    WorkerState,
    context_of,
    local_work,
    not_finite,
    report_health,
)
from ashl.topology.members import as_members
from ashl.topology.parameter_server import (
    PLANNED,
    Admission,
    ServerRule,
    ServerState,
    admission_tag,
    admit,
    apply_merge,
    finish_stage,
    gather_workers,
    on_membership,
    on_push,
    reply,
    rule_of,
)
from ashl.topology.replies import PULL_FIELDS, Pull, parse_reply


@option
class ShardedServer(Topology):
    """Ranks n, n + 1 … hold a piece of the model each."""

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, OUTER, FAULT_TOLERANT})
    has_server: ClassVar[bool] = True
    servers: Count
    partition_by: Literal["bytes", "layers"]

    def bounds(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The piece [start, stop) of each server, for layers of these sizes. Raises UsageError."""
        d = sum(sizes)
        ends = list(range(d + 1))
        if self.partition_by == "layers":
            ends = [0]
            for size in sizes:
                ends.append(ends[-1] + size)
        if self.servers >= len(ends):
            raise UsageError(
                f"topology.servers={self.servers}, and the model has {len(ends) - 1}"
                f" {'layers' if self.partition_by == 'layers' else 'parameters'} to share out; take"
                " no more servers than that"
                + (", or topology.partition_by=bytes" if self.partition_by == "layers" else "")
            )
        cuts = [0]
        for k in range(1, self.servers):  # as near to equal as can be, and nothing empty
            left = range(cuts[-1] + 1, len(ends) - (self.servers - k))
            cuts.append(min(left, key=lambda at: abs(ends[at] - d * k / self.servers)))
        return list(pairwise(ends[at] for at in (*cuts, len(ends) - 1)))

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        return self.servers

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        servers = all_servers(stage)
        if rank < stage.server:
            return servers
        return (*stage.workers, *(servers[1:] if rank == stage.server else servers[:1]))

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a push and a pull take, uncontended: all pieces go through the worker's port."""
        ratio, down = stage.worker(rank).compression_ratio, stage.trainer.dense_bytes
        up = sum(part.codec.encoded_nbytes(ratio, part.link.d) for part in parts(stage))
        return network.transfer_ns(rank, stage.server, up) + network.transfer_ns(
            stage.server, rank, down
        )

    def begin(self, ctx: RankContext, stage: Stage) -> ShardedWorker | PieceState:
        params, moments = stage.trainer.init()
        if ctx.rank < stage.server:
            ends = [CodecState() for _ in range(self.servers)]
            return ShardedWorker(params, moments, versions=[0] * self.servers, piece_ends=ends)
        held = stage.fragments[ctx.rank - stage.server]
        return PieceState(held.of(params), moments_of(stage, ctx.rank), Progress(stage.num_workers))

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        assert kept is not None, "no worker can join while others run"
        if ctx.rank >= stages[0].server:
            return await gather_pieces(ctx, stages, *kept)
        return await resume_piece(ctx, stages, kept[1])

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank < stage.server:
            return worker
        return run_first if rank == stage.server else run_other


@dataclass
class ShardedWorker(WorkerState):
    """A worker with a model whose pieces come from several servers."""

    versions: list[int] = field(default_factory=list)  # of each piece
    piece_ends: list[CodecState] = field(default_factory=list)  # what the codec keeps here of each


@dataclass
class PieceState(ServerState):
    """All that the server of a piece needs to go on, with what those know that follow the first."""

    kept: dict[int, Any] = field(default_factory=dict)  # the piece as it was after so many merges
    due: list[int] = field(default_factory=list)  # versions that are evaluated
    last: tuple[int, int, int] | None = (
        None  # how the first server's stage ended: version, word and moment
    )
    leaving: list[int] = field(default_factory=list)  # workers that have heard of it


def parts(stage: Stage) -> list[Stage]:
    """The stage as it is for the piece of each server."""
    return [stage.fragment(k) for k in range(len(stage.fragments))]


def moments_of(stage: Stage, rank: int) -> tuple[Any, ...]:
    """Empty moments of a server's piece."""
    held = stage.fragments[rank - stage.server]
    return tuple(held.of(moment) if moment.dim() else moment for moment in stage.trainer.moments())


def enter_piece(ctx: RankContext, stage: Stage, state: PieceState) -> Stage:
    """A stage begins at a server, unless it goes on from a checkpoint; returns it as it is for its
    piece.
    """
    own, begins = stage.fragment(ctx.rank - stage.server), state.entered != stage.index
    state.enter(own, ctx.now)
    if begins:
        state.moments = moments_of(stage, ctx.rank) if stage.resets else state.moments
        state.kept, state.due, state.last, state.leaving = (
            {state.progress.version: state.params},
            [],
            None,
            [],
        )
    return own


def all_servers(stage: Stage) -> tuple[int, ...]:
    return tuple(range(stage.server, stage.server + stage.topology.servers))


def signal_tag(stage: Stage) -> Tag:
    """Of what the first server says to the others: (version, GO): it is evaluated; (version, word,
    when): the end.
    """
    return stage.tag("first")


async def gather_pieces(
    ctx: RankContext, stages: Sequence[Stage], index: int, state: PieceState
) -> tuple[int, PieceState]:
    """At a server, from a checkpoint: all workers come anew. They are level from here on, as
    servers that count their leads from different pushes might wait for each other.
    """
    await gather_workers(ctx, stages, index, state)
    state.due = []
    for rank in stages[index].workers:
        state.progress.remove_worker(rank)
    for rank in stages[index].workers:
        state.progress.join(rank)
    return index, state


async def resume_piece(
    ctx: RankContext, stages: Sequence[Stage], kept: ShardedWorker
) -> tuple[int, ShardedWorker]:
    """At a worker, from a checkpoint: as it was kept, with the model that the servers have, and as
    far as the first one counts.
    """
    incarnation, servers = int(float(ctx.now_ns)), all_servers(stages[0])
    for server in servers:
        await ctx.send(server, JOIN, None, (incarnation,))
    messages = [await ctx.recv(admission_tag(incarnation), src=server) for server in servers]
    admissions = [parse_reply(Admission, message.meta) for message in messages]
    state = ShardedWorker(concatenate([message.body for message in messages]), kept.moments)
    if admissions[0].planned:
        state.assigned = admissions[0].planned, (await ctx.recv(PLANNED, src=servers[0])).body
        stages = apply_assignments(stages, *state.assigned)
    stage = stages[admissions[0].stage]
    state.steps, state.samples, state.incarnation = (
        admissions[0].steps,
        admissions[0].samples,
        incarnation,
    )
    state.enter(stage, ctx.rank)
    state.follow(admissions[0])
    both = zip(parts(stage), kept.piece_ends, strict=True)
    state.piece_ends, state.moments = (
        [part.restore_codec_state(ends, state.samples) for part, ends in both],
        kept.moments,
    )
    state.versions = [one.version for one in admissions]
    state.version = min(state.versions)
    state.round, state.step = admissions[0].rounds, admissions[0].done
    state.drawn = state.step * state.batch
    return stage.index, state


async def worker(ctx: RankContext, stage: Stage, state: ShardedWorker) -> int:
    """Compute on the model last pulled, push its pieces, wait for all answers; returns the last
    word.
    """
    if state.entered != stage.index:
        both = zip(parts(stage), state.piece_ends, strict=True)
        state.piece_ends = [part.carry_over_codec_state(ends, state.samples) for part, ends in both]
    state.enter(stage, ctx.rank)
    servers, push, pull, signal = (
        all_servers(stage),
        stage.tag("push"),
        stage.tag("pull", state.incarnation),
        GO,
    )
    context = [(ctx.rank + k) % len(servers) for k in range(len(servers))]
    while signal == GO:
        ctx.safe_point(stage.index, state)
        work, bodies, loss = await make_pushes(ctx, stage, state)
        for k in context:
            meta = (work.steps, work.samples, loss, state.versions[k], work.step_s, state.pull_s)
            await ctx.send(servers[k], push, bodies[k], meta)
        asked, answers = ctx.now, [await ctx.recv(pull, src=server) for server in servers]
        state.pull_s = ctx.now - max(asked, min(answer.start_ns for answer in answers) / 1e9)
        replies = [parse_reply(Pull, answer.meta) for answer in answers]
        restore_pieces(
            stage,
            state,
            bodies,
            [bool(reply.dropped) and not math.isnan(loss) for reply in replies],
        )
        signal, reply = max(reply.signal for reply in replies), replies[0]
        for k in [
            k for k, one in enumerate(replies) if one.signal < signal
        ]:  # it has not heard that the stage is over
            await ctx.send(servers[k], push, None, (0, 0, 0.0, replies[k].version, 0.0, 0.0))
            answers[k] = await ctx.recv(pull, src=servers[k])
            replies[k] = parse_reply(Pull, answers[k].meta)
        if any(answer.body is not None for answer in answers):
            both = zip(answers, stage.fragments, strict=True)
            state.params = concatenate(
                [held.of(state.params) if m.body is None else m.body for m, held in both]
            )
        state.follow(reply)
        state.versions, state.away = (
            [one.version for one in replies],
            as_members(answers[0].meta[PULL_FIELDS:]),
        )
        state.version = min(state.versions)
        if signal != GO:
            leave_stage(ctx, stage, signal, max(reply.end_ns for reply in replies))
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


async def make_pushes(
    ctx: RankContext, stage: Stage, state: ShardedWorker
) -> tuple[Work, list[Payload], float]:
    """(work, what of it goes to each server, loss)."""
    work = await local_work(ctx, stage, state)
    x = stage.aggregate.clip(work.body)
    pieces = [held.of(x) for held in stage.fragments]
    if stage.link.traits.lossless:
        return work, pieces, work.loss
    if not_finite(ctx, stage, state, x):
        return work, pieces, math.nan
    bodies = await ctx.compute(
        partial(encode_pieces, stage, state, ctx.rank, pieces), work=1, kind="compress"
    )
    links = [part.link for part in parts(stage)]
    report_health(ctx, stage, state, x, list(zip(links, state.piece_ends, bodies, strict=True)))
    return work, bodies, work.loss


def encode_pieces(
    stage: Stage, state: ShardedWorker, rank: int, pieces: Sequence[Any]
) -> list[Payload]:
    """A body of each piece, which the codec knows as a model of its own."""
    context, bodies = context_of(stage, rank, state, state.version), []
    for k, (held, part, x) in enumerate(zip(stage.fragments, parts(stage), pieces, strict=True)):
        squares = None if context.squares is None else held.of(context.squares)
        own = context._replace(
            layer=held.first,
            version=state.versions[k],
            params=held.of(state.params),
            squares=squares,
        )
        bodies.append(part.link.encode(state.piece_ends[k], x, own))
    return bodies


def restore_pieces(
    stage: Stage, state: ShardedWorker, bodies: Sequence[Payload], dropped: Sequence[bool]
) -> None:
    """What a server has dropped, the codec takes up again."""
    if stage.link.traits.lossless:
        return
    for part, ends, body, lost in zip(parts(stage), state.piece_ends, bodies, dropped, strict=True):
        if lost:
            part.link.restore_dropped(ends, body)


async def answer(
    ctx: RankContext, stage: Stage, state: ServerState, without: Sequence[int] = ()
) -> None:
    """Release the workers that may proceed."""
    ranks = sorted(set(rule_of(stage).may_proceed(state.rule_state, state.progress)) - set(without))
    for rank in answer_order(
        ranks, ctx.rank - stage.server, stage.topology.servers, stage.answer_block
    ):
        await reply(ctx, stage, state, rank)


def answer_order(ranks: Sequence[int], place: int, servers: int, block: int) -> list[int]:
    """The order in which the server at this place answers these workers: block by block, and of
    each block every server begins with another worker.

    A worker goes on once it has all pieces. Answered by all servers at once, its own port takes in
    one piece after the other. In that time the servers can answer a whole block
    (`Stage.answer_block`), and no worker of it has its last piece later than in the order of ranks.
    In larger blocks the first workers would wait for the last. A block of 1 is the order of ranks.
    """
    order = list[int]()
    for start in range(0, len(ranks), block):
        own = ranks[start : start + block]
        shift = place * len(own) // servers
        order += [*own[shift:], *own[:shift]]
    return order


async def run_first(ctx: RankContext, stage: Stage, state: PieceState) -> int:
    """At the server that counts and judges: merge and answer until the stage is over; returns the
    last word.
    """
    progress, push, others, stage = (
        state.progress,
        stage.tag("push"),
        all_servers(stage)[1:],
        enter_piece(ctx, stage, state),
    )
    while state.newcomers:
        await admit(ctx, stage, state, state.newcomers[0])
    while True:
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(push, PEER_FAILED, before_s=stage.stop_criteria.deadline_s)
        ctx.time_accounting.end_round()
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        take_in = on_push if message.tag == push else on_membership
        if await take_in(ctx, stage, state, message) and stage.stop_criteria.take_evaluation(
            state, ctx.now
        ):
            for server in others:
                await ctx.send(server, signal_tag(stage), None, (progress.version, GO))
            ctx.snapshot(
                state.params, tick=progress.version if others else None, counts=progress.report()
            )
        signal, reason = stop_decision(ctx, stage, progress)
        if signal == STOP or state.signal == GO:
            state.signal, state.reason = signal, reason
        if state.signal == STOP or (
            state.signal == NEXT and len(progress.waiting) == progress.present
        ):
            break
        if state.signal == GO:
            await answer(ctx, stage, state)
    await merge_rest(ctx, stage, state)
    end_ns = end_time_ns(stage, ctx.now_ns)
    for server in others:
        await ctx.send(server, signal_tag(stage), None, (progress.version, state.signal, end_ns))
    await finish_stage(ctx, stage, state, state.signal, end_ns)
    record_end(ctx, stage, progress, state.reason)
    return state.signal


async def merge_rest(ctx: RankContext, stage: Stage, state: ServerState) -> None:
    """Where another stage follows, what has come makes a merge, however little."""
    if state.signal == NEXT and state.buffer:
        await ctx.compute(
            partial(apply_merge, stage, state, None), work=stage.push_share, kind="apply"
        )


def has_caught_up(state: PieceState) -> bool:
    """Whether the first server's stage is over and as much is merged here, or nobody is left who
    could push.
    """
    progress = state.progress
    if state.last is None:
        return False
    version, signal, _ = state.last
    return len(progress.waiting) == progress.present or (
        signal == STOP and (progress.version >= version or bool(progress.diverged))
    )


async def run_other(ctx: RankContext, stage: Stage, state: PieceState) -> int:
    """At the others: merge and answer, until the first one says that the stage is over; returns the
    last word.
    """
    progress, push, stage = state.progress, stage.tag("push"), enter_piece(ctx, stage, state)
    while state.newcomers:
        await admit(ctx, stage, state, state.newcomers[0])
    while not has_caught_up(state):
        ctx.safe_point(stage.index, state)
        message: Message = await ctx.recv(push, signal_tag(stage), PEER_FAILED)
        ctx.time_accounting.end_round()
        if message.tag == push and not message.meta[0]:  # of a worker that has heard of the end
            state.leaving.append(message.src)
            progress.start_waiting(message.src, 0, late=True)
        elif message.tag in (push, PEER_FAILED):
            if await (on_push if message.tag == push else on_membership)(
                ctx, stage, state, message
            ):
                state.kept[progress.version] = state.params
                state.kept.pop(
                    progress.version - 2 * stage.num_workers, None
                )  # nobody is further behind
        elif message.meta[1] == GO:
            state.due.append(int(message.meta[0]))
        else:
            state.last = int(message.meta[0]), int(message.meta[1]), int(message.meta[2])
        for version in [version for version in state.due if version <= progress.version]:
            ctx.snapshot(state.kept.get(version, state.params), tick=version)
            state.due.remove(version)
        if state.last is None:
            await answer(ctx, stage, state, state.leaving)
    for version in state.due:  # what was dropped here, and not at the first one, never comes
        ctx.snapshot(state.params, tick=version)
    assert state.last is not None
    version, state.signal, end_ns = state.last
    await merge_rest(ctx, stage, state)
    if state.signal == STOP:
        state.params = state.kept.get(version, state.params)
    await finish_stage(ctx, stage, state, state.signal, end_ns)
    return state.signal

"""Partial all-reduce (P-Reduce): models are averaged in small groups, which a scheduler forms.

Use when: many unequal workers: small groups average, and one slow worker delays only its group.
Avoid when: there are fewer than six workers, or a codec is needed.
Alternatives: `gossip` in pairs; `all_reduce` if workers are equal.

Rule: every H local steps x_i ← (1/g)·Σ_j x_j over the g members of a group; momentum stays local.
As a matrix this is symmetric, doubly stochastic and idempotent, so it conserves the mean of all
models. A thin coordinator (rank n) makes the groups (`ashl.topology.group_generator`). It tells the
members to begin once all have asked. No model passes through it.

Pause: once all workers have asked and no group averages. Each worker keeps its work, and waits for
its group afterwards. Groups that could begin meanwhile begin then.

Limit: one group of all workers is local SGD by all-reduce, bit for bit. Source: Luo et al.,
"Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020
(arXiv 1909.08029, as "Ripples").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ashl.option import Count, option
from ashl.runtime.effects import Epoch, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import (
    FAULT_TOLERANT,
    GO,
    PAUSE,
    STOP,
    Loop,
    Ranks,
    Rule,
    StageConfig,
    Topology,
)
from ashl.stage.progress import Progress
from ashl.topology import group_generator as generator
from ashl.topology.coordinator import CoordinatorState, ReplicaState, gather_members, rejoin_members
from ashl.topology.ending import (
    decide_end,
    end_time_ns,
    leave_stage,
    record_end,
    update_signal,
)
from ashl.topology.group_generator import Group, GroupRule, Groups
from ashl.topology.local_work import Work, kept_work

Done = tuple[int, int]  # (steps, samples)
OWN = -2  # minus a rank: stands for its last group if no other worker has its model
PER_NODE = 4  # workers of a node, if neither workers_per_node nor cluster.node is set


@option
class PartialAllReduce(Topology):
    """Every worker holds a model of its own, and the members of a group average theirs."""

    policy_type: ClassVar[type[Rule]] = GroupRule
    regroups: ClassVar[bool] = True
    # models travel whole, and no server adds up updates
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    coordinated: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    workers_per_node: Count | None

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        """Return the peers of headers: the coordinator and every worker; models travel by
        all-reduce.
        """
        return stage.workers if rank == stage.lead_rank else (stage.lead_rank,)

    def groups(self, stage: StageConfig) -> Sequence[Ranks]:
        return stage.sync.groups(self.nodes(stage))

    def begin(self, stage: StageConfig, rank: int) -> Replica | GroupCoordinatorState:
        if rank == stage.lead_rank:
            n = stage.num_workers
            progress = Progress(n, groups=[0] * n, conflicts=0)
            return GroupCoordinatorState(
                progress, groups=generator.open_groups(self.nodes(stage), stage.seed), last=[-1] * n
            )
        return Replica(*stage.trainer.init())

    async def reform(
        self,
        ctx: RankContext,
        stages: Sequence[StageConfig],
        saved: tuple[int, Any] | None,
        epoch: Epoch,
    ) -> tuple[int, Any]:
        if ctx.rank == stages[0].lead_rank:
            return await gather_members(ctx, stages, saved, epoch)
        index, state, reply = await rejoin_members(ctx, stages, saved, epoch)
        state.has_asked = False
        if saved is None:
            state.tick = int(reply.tick)
        return index, state

    def nodes(self, stage: StageConfig) -> tuple[int, ...]:
        """Return the node of each worker."""
        if self.workers_per_node is None and stage.nodes is not None:
            return stage.nodes
        return tuple(worker // (self.workers_per_node or PER_NODE) for worker in stage.workers)

    def role(self, stage: StageConfig, rank: int) -> Loop:
        return coordinator if rank == stage.lead_rank else worker


@dataclass
class Replica(ReplicaState):
    """State of a worker with a model of its own."""

    tick: int = 0  # number of the last evaluation for which it sent its model
    has_asked: bool = False  # True if it has asked with its pending work, before a pause


@dataclass(kw_only=True)
class GroupCoordinatorState(CoordinatorState):
    """State of the coordinator that makes the groups, complete for a checkpoint."""

    groups: Groups
    # the last group of each worker; -1: none yet, so that it has the initial model
    last: list[int]
    # work of each worker that has asked and is in no running group
    asked: dict[int, Done] = field(default_factory=dict)
    # running groups by number, with the members' work until it is counted
    running: dict[int, tuple[Group, list[Done]]] = field(default_factory=dict)
    held: list[Group] = field(default_factory=list)  # groups that begin after the pause

    def uncounted_steps(self, worker: int) -> int:
        work = {} if self.signal == STOP else dict(self.asked)
        for group, each in self.running.values():
            work |= dict(zip(group.members, each, strict=False))
        return work[worker][0] if worker in work else 0

    def begin_epoch(self, failed: set[int], origins: Mapping[int, int]) -> None:
        self.groups.failed = failed
        generator.reset_groups(self.groups)
        self.asked = {}
        self.running = {}
        self.held = []
        self.last = [origins.get(rank, OWN - rank) for rank in range(len(self.last))]

    def enter(self, stage: StageConfig, now_s: float) -> None:
        """Enter a stage, unless the state is that of a pause within it."""
        if self.entered != stage.index:
            if self.entered is not None:
                generator.reset_groups(self.groups)
            self.asked = {}
            self.running = {}
        super().enter(stage, now_s)


class GroupReply(NamedTuple):
    """Header of the answer to a worker, followed by its group's members.

    With STOP its work is not used; with NEXT this is its last group. Without members it leaves, or
    with PAUSE keeps its work.
    """

    signal: float  # GO, NEXT, STOP or PAUSE
    group: float  # number of the group
    samples: float  # applied once this group is done; the learning rate follows them
    staleness: float  # commits behind the foremost worker
    common: float  # 1 if all members come from one group, so that they started from one model
    tick: float  # number of the evaluation that asks for its model
    end_ns: float  # end of the stage, without members


REPLY_FIELDS = len(GroupReply._fields)


async def worker(ctx: RankContext, stage: StageConfig, state: Replica) -> int:
    """Run a worker: compute on its own model, then average with the group that the coordinator
    forms.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    state.enter(stage, ctx.members, ctx.rank)
    signal = GO
    while signal == GO:
        ctx.safe_point(stage.index, state, before_work=state.pending is None)
        work = await kept_work(ctx, stage, state)
        reply, members = await average_with_groups(ctx, stage, state, work)
        signal = int(reply.signal)
        if signal == PAUSE:
            state.pending = work
            state.has_asked = True
            return signal
        state.pending = None
        state.has_asked = False
        if signal != GO:
            leave_stage(ctx, stage, signal, int(reply.end_ns))
        ctx.record_round(
            stage.index,
            state.round,
            work.steps,
            int(reply.staleness),
            dropped=signal == STOP,
            loss=work.loss,
            group=list(members),
        )
        state.round += 1
    return signal


async def average_with_groups(
    ctx: RankContext, stage: StageConfig, state: Replica, work: Work
) -> tuple[GroupReply, Ranks]:
    """Ask for a group and average in it.

    Once the stage is over, the worker takes part in all groups that still expect it, because other
    members wait for it. With NEXT its work is part of the first of them, with STOP of none.
    Returns: (last reply, members of the first group).
    """
    payload, meta, first_members = work.payload, (work.steps, work.samples, work.loss), None
    while True:
        if not state.has_asked:
            await ctx.send(stage.lead_rank, stage.tag("ask"), meta=meta)
        state.has_asked = False
        message = await ctx.recv(stage.tag("group"), src=stage.lead_rank)
        reply = GroupReply(*message.meta[:REPLY_FIELDS])
        members = tuple(map(int, message.meta[REPLY_FIELDS:]))
        if reply.signal == PAUSE:
            return reply, members
        if reply.signal == STOP:
            payload = None
        first_members = first_members or members
        state.params = await average_group(ctx, state.params, payload, members, bool(reply.common))
        state.samples = int(reply.samples)
        if members:
            state.origin = int(reply.group)
        elif payload is not None:
            state.origin = OWN - ctx.rank
        if len(members) > 1 and ctx.rank == members[0]:
            await ctx.send(stage.lead_rank, stage.tag("done"), meta=(reply.group,))
        # the present model serves every evaluation that was requested since the last reply
        while reply.signal == GO and state.tick < reply.tick:
            state.tick += 1
            ctx.snapshot(state.params, tick=state.tick)
        if reply.signal == GO or not members:
            return reply, first_members
        payload, meta = None, (0, 0, 0.0)


async def average_group(
    ctx: RankContext, params: Any, payload: Any, members: Ranks, common: bool
) -> Any:
    """Return (1/g)·Σ_j (x_j + Δ_j), summed in rank order.

    Members with a common x exchange Δ only, which equals the sum of an all-reduce, bit for bit.
    """
    mine = params if payload is None else params + payload
    if len(members) < 2:
        return mine
    if not common:
        return await ctx.all_reduce(mine * (1 / len(members)), members)
    return params + await ctx.all_reduce(payload * (1 / len(members)), members)


async def coordinator(ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState) -> int:
    """Run the coordinator: make groups until the stage ends, then complete those that were made.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    progress = state.progress
    state.enter(stage, ctx.now)
    deadline_s, ahead = stage.stop_criteria.deadline_s, None
    await begin_held(ctx, stage, state)
    while state.signal in (GO, PAUSE):
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(*coordinator_tags(stage), before_s=deadline_s)
        ctx.time_accounting.fold_if_many()
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        on_report(ctx, stage, state, message)
        update_signal(ctx, stage, state)
        if state.signal not in (GO, PAUSE):
            ahead = message  # judged, but not handled yet
            break
        await on_message(ctx, stage, state, message)
        update_signal(ctx, stage, state)
        if state.signal == PAUSE and len(state.asked) == progress.num_present and not state.running:
            await release_workers(ctx, stage, state, sorted(state.asked))
            return PAUSE
    if state.signal == STOP:
        ctx.safe_point(stage.index, state)
    await drain_groups(ctx, stage, state, ahead)
    state.count_dropped()
    record_end(ctx, stage, progress, state.reason)
    if state.signal == STOP:
        ctx.time_accounting.close(progress.end_ns)
    return state.signal


def coordinator_tags(stage: StageConfig) -> tuple[Tag, ...]:
    """Return the tags of the messages that the coordinator handles."""
    return stage.tag("done"), stage.tag("ask")


def on_report(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, message: Message
) -> None:
    """Record the loss of a worker that asks, or count a group that is done."""
    progress = state.progress
    if message.tag[0] == "ask":
        progress.observe(
            message.src, progress.fastest - progress.clocks[message.src], message.meta[2]
        )
    else:
        count_group(ctx, stage, state, int(message.meta[0]))


async def on_message(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, message: Message
) -> None:
    """Handle a message: begin the groups that can begin now."""
    rule = stage.sync
    if message.tag[0] == "done":
        group, _ = state.running.pop(int(message.meta[0]))
        started = generator.complete_group(state.groups, rule, group)
    else:
        state.asked[message.src] = (int(message.meta[0]), int(message.meta[1]))
        started = generator.add_request(state.groups, rule, message.src)
    if state.signal == PAUSE:
        state.held += started
    else:
        await begin_groups(ctx, stage, state, started)


async def begin_held(ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState) -> None:
    """Begin the groups that could have begun since a pause was decided."""
    held, state.held = state.held, []
    await begin_groups(ctx, stage, state, held)


async def begin_groups(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, started: list[Group]
) -> None:
    """Begin these groups, and those that can begin after them."""
    rule = stage.sync
    for group in started:  # the list grows in the loop
        work = [state.asked.pop(member) for member in group.members]
        state.running[group.id] = (group, [] if state.signal == STOP else work)
        await begin_group(ctx, stage, state, group, work)
        if len(group.members) == 1:  # a group of one is done at once
            count_group(ctx, stage, state, group.id)
            del state.running[group.id]
            started += generator.complete_group(state.groups, rule, group)


async def begin_group(
    ctx: RankContext,
    stage: StageConfig,
    state: GroupCoordinatorState,
    group: Group,
    work: Sequence[Done],
) -> None:
    """Tell the members of a group, all of which have asked, that it begins.

    Args: work: (steps, samples) of each member.
    """
    progress = state.progress
    fresh = state.signal != STOP and all(steps for steps, _ in work)
    common = fresh and len({state.last[member] for member in group.members}) == 1
    applied = progress.samples + (
        0 if state.signal == STOP else sum(samples for _, samples in work)
    )
    for member in group.members:
        state.last[member] = group.id
        reply = GroupReply(
            state.signal,
            group.id,
            applied,
            progress.fastest - progress.clocks[member],
            common,
            state.ticks,
            progress.end_ns,
        )
        await ctx.send(member, stage.tag("group"), None, (*reply, *group.members))


def count_group(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, number: int
) -> None:
    """Count the work of a group, which is part of its members' models now."""
    group, work = state.running[number]
    if not work:  # counted already, or dropped
        return
    state.running[number] = (group, [])
    count_average(ctx, stage, state, group.members, work)


def count_average(
    ctx: RankContext,
    stage: StageConfig,
    state: GroupCoordinatorState,
    members: Ranks,
    work: Sequence[Done],
) -> None:
    """Count one average of these workers, each with its own work; a worker alone merges its own."""
    progress = state.progress
    assert progress.groups is not None
    progress.merge()
    progress.conflicts = state.groups.conflicts
    for member, (steps, samples) in zip(members, work, strict=True):
        if steps:  # else it averages again, with work that is counted already
            progress.commit(member, steps, samples)
            progress.groups[member] += len(members) > 1
    if state.signal != STOP and stage.stop_criteria.begin_due_evaluation(state, ctx.now):
        state.ticks += 1
        ctx.snapshot(None, tick=state.ticks, counts=progress.report(), without=progress.failed)


async def drain_groups(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, message: Message | None
) -> None:
    """End a stage: complete the groups that wait in buffers, and release all other workers.

    A worker that is expected in a group averages in it, which keeps the mean of all models.
    STOP: the stage has ended; groups that are averaging count, and other work is dropped.
    NEXT: the stage ends with the last worker, and all work counts. A worker without a group counts
    its work as part of its own model.
    Args: message: judged, but not handled yet.
    """
    progress, is_stop = state.progress, state.signal == STOP
    if is_stop:
        progress.end_ns = decide_end(ctx, stage, STOP)
        for worker, (steps, _) in state.asked.items():
            state.drop(worker, steps)
    generator.close_groups(state.groups)
    await begin_held(ctx, stage, state)
    released = {*await release_expected(ctx, stage, state)}
    while len(released | progress.failed) < stage.num_workers:
        is_judged = message is not None
        if message is None:
            message = await ctx.recv(*coordinator_tags(stage))
        is_request = message.tag[0] == "ask"
        if is_stop and is_request and message.start_ns <= progress.end_ns:
            state.drop(message.src, int(message.meta[0]))
        elif not (is_judged or (is_stop and is_request)) and (not is_request or message.meta[0]):
            on_report(ctx, stage, state, message)
        await on_message(ctx, stage, state, message)
        message = None
        released.update(await release_expected(ctx, stage, state))
    if not is_stop:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
        present = [worker for worker in stage.workers if worker not in progress.failed]
        await release_workers(ctx, stage, state, present)


async def release_expected(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState
) -> list[int]:
    """Return the workers that no group expects any more.

    With STOP they may leave now. With NEXT their work is counted first.
    """
    idle = generator.release_idle(state.groups)
    if state.signal == STOP:
        await release_workers(ctx, stage, state, idle)
        return idle
    for worker in idle:
        if (work := state.asked.pop(worker))[0]:
            count_average(ctx, stage, state, (worker,), [work])
            state.last[worker] = OWN - worker
    return idle


async def release_workers(
    ctx: RankContext, stage: StageConfig, state: GroupCoordinatorState, workers: Sequence[int]
) -> None:
    """Let these workers leave the stage."""
    for worker in workers:
        reply = GroupReply(
            state.signal, -1, state.progress.samples, 0, False, state.ticks, state.progress.end_ns
        )
        await ctx.send(worker, stage.tag("group"), meta=reply)

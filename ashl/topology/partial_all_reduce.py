"""Partial all-reduce (P-Reduce): models are averaged in small groups, which a scheduler forms.

Rule: every H local steps x_i ← (1/g)·Σ_j x_j over the g members of a group; momentum stays local.
As a matrix this is symmetric, doubly stochastic and idempotent, so it conserves the mean of all
models. A thin coordinator (rank n) makes the groups (`ashl.topology.group_generator`). It tells the
members to begin once all have asked. No model passes through it.

A run continues with the survivors after a failure, and rejoining workers are admitted.

Limit: one group of all workers is local SGD by all-reduce, bit for bit. Source: Luo et al.,
"Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020
(arXiv 1909.08029, as "Ripples").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ashl.option import Count, option
from ashl.runtime.effects import JOIN, PEER_FAILED, CollectiveAborted, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.progress import FAILURE, RUN_END, Progress
from ashl.stage.stage import FAULT_TOLERANT, GO, STOP, Loop, Members, Network, Rule, Stage, Topology
from ashl.topology import group_generator as generator
from ashl.topology.coordinator import CoordinatorState
from ashl.topology.ending import end_time_ns, leave_stage, record_end, stop_decision
from ashl.topology.group_generator import Group, GroupRule, Groups
from ashl.topology.local_work import Work, WorkerState, local_work
from ashl.topology.members import as_members, as_numbers, failed_as_numbers
from ashl.topology.parameter_server import admission_tag, check_min_workers

Done = tuple[int, int]  # (steps, samples)
PER_NODE = 4  # workers of a node, if neither workers_per_node nor cluster.node is set


@option
class PartialAllReduce(Topology):
    """Every worker holds a model of its own, and the members of a group average theirs."""

    policy_type: ClassVar[type[Rule]] = GroupRule
    # models travel whole, and no server adds up updates
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    coordinated: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    workers_per_node: Count | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Return the peers of headers: the coordinator and every worker; models travel by
        all-reduce.
        """
        return stage.workers if rank == stage.lead_rank else (stage.lead_rank,)

    def notified_on_failure(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Return all other ranks, because each of them may share a group with this one."""
        return tuple(peer for peer in (*stage.workers, stage.lead_rank) if peer != rank)

    def groups(self, stage: Stage) -> Sequence[Members]:
        return rule_in(stage).groups(self.nodes(stage))

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """Return the time (ns) to average in the largest possible group: all workers."""
        return network.all_reduce_ns(stage.workers, stage.trainer.dense_bytes, 0)

    def begin(self, ctx: RankContext, stage: Stage) -> Replica | GroupCoordinatorState:
        if ctx.rank == stage.lead_rank:
            n = stage.num_workers
            progress = Progress(n, groups=[0] * n, conflicts=0)
            return GroupCoordinatorState(
                progress, groups=generator.open_groups(self.nodes(stage), stage.seed), last=[-1] * n
            )
        return Replica(*stage.trainer.init())

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Replica | GroupCoordinatorState] | None:
        if kept is None:
            return await join(ctx, stages, Replica(*stages[0].trainer.init()))
        index, state = kept
        if ctx.rank == stages[0].lead_rank:
            return await gather_workers(ctx, stages, index, state)
        return await join(ctx, stages, state, kept=True)

    def nodes(self, stage: Stage) -> tuple[int, ...]:
        """Return the node of each worker."""
        if self.workers_per_node is None and stage.nodes is not None:
            return stage.nodes
        return tuple(worker // (self.workers_per_node or PER_NODE) for worker in stage.workers)

    def role(self, stage: Stage, rank: int) -> Loop:
        return coordinator if rank == stage.lead_rank else worker


def rule_in(stage: Stage) -> GroupRule:
    """Return the stage's sync mode as a `GroupRule`."""
    assert isinstance(stage.sync, GroupRule)
    return stage.sync


@dataclass
class Replica(WorkerState):
    """State of a worker with a model of its own."""

    tick: int = 0  # number of the last evaluation for which it sent its model


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
    signal: int = GO  # NEXT or STOP once the stage is over
    incarnations: dict[int, int] = field(default_factory=dict)  # of each rejoined worker
    epoch: int = 0  # failures handled so far
    failures: dict[int, int] = field(default_factory=dict)  # by worker: how often it has failed
    # by running group: the members that have not reported its end yet
    unreported: dict[int, set[int]] = field(default_factory=dict)
    # by running group: the members whose average was aborted
    aborted: dict[int, set[int]] = field(default_factory=dict)
    donor_of: dict[int, int] = field(default_factory=dict)  # by joining worker, or NO_DONOR

    def enter(self, stage: Stage, now_s: float) -> None:
        """Enter a stage, unless the state is that of a checkpoint within it."""
        if self.entered == stage.index:
            return
        self.progress.begin(now_s)
        if self.entered is not None:
            generator.reopen(self.groups)
        self.entered, self.signal, self.asked, self.running = stage.index, GO, {}, {}
        self.unreported, self.aborted = {}, {}


class GroupReply(NamedTuple):
    """Header of the answer to a worker, followed by its group's members and the failed workers.

    With STOP its work is not used; with NEXT this is its last group. Without members it leaves.
    """

    signal: float  # GO, NEXT or STOP
    group: float  # number of the group
    samples: float  # applied once this group is done; the learning rate follows them
    staleness: float  # commits behind the foremost worker
    common: float  # 1 if all members come from one group, so that they started from one model
    tick: float  # number of the evaluation that asks for its model
    end_ns: float  # end of the stage, without members
    epoch: float = 0  # failures before the group was formed
    joiner: float = -1  # the joining worker that receives its model; -1: none
    incarnation: float = 0  # of the joining worker
    size: float = 0  # how many numbers of the header encode the members


HEAD = len(GroupReply._fields)


async def worker(ctx: RankContext, stage: Stage, state: Replica) -> int:
    """Run a worker: compute on its own model, then average with the group that the coordinator
    forms.

    Returns: the final signal, NEXT or STOP.
    """
    state.enter(stage, ctx.rank)
    signal = GO
    while signal == GO:
        ctx.safe_point(stage.index, state)
        work = await local_work(ctx, stage, state)
        reply, members = await meet(ctx, stage, state, work)
        signal = int(reply.signal)
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


async def meet(
    ctx: RankContext, stage: Stage, state: Replica, work: Work
) -> tuple[GroupReply, Members]:
    """Ask for a group and average in it.

    Once the stage is over, the worker takes part in all groups that still expect it, because other
    members wait for it. With NEXT its work is part of the first of them, with STOP of none.
    Returns: (last reply, members of the first group).
    """
    body, meta, first_members = work.body, (work.steps, work.samples, work.loss), None
    while True:
        await ctx.send(stage.lead_rank, stage.tag("ask"), meta=meta)
        message = await ctx.recv(stage.tag("group", state.incarnation), src=stage.lead_rank)
        reply = GroupReply(*message.meta[:HEAD])
        end = HEAD + int(reply.size)
        members = as_members(message.meta[HEAD:end])
        state.away = as_members(message.meta[end:])
        if reply.signal == STOP:
            body = None
        first_members = first_members or members
        team = Team(members, int(reply.epoch), incarnations_in(message))
        result = await average_group(ctx, state.params, body, team, bool(reply.common))
        while result.__class__ is CollectiveAborted:
            team = await form_remaining_group(ctx, stage, reply.group)
            result = await average_group(ctx, state.params, body, team, bool(reply.common))
        state.params, state.samples = result, int(reply.samples)
        if reply.joiner >= 0:
            await ctx.send(int(reply.joiner), model_tag(int(reply.incarnation)), state.params)
        if len(members) > 1 and (ctx.rank == members[0] or stage.elastic):
            await ctx.send(stage.lead_rank, stage.tag("done"), meta=(reply.group,))
        # the present model serves every evaluation that was requested since the last reply
        while reply.signal == GO and state.tick < reply.tick:
            state.tick += 1
            ctx.snapshot(state.params, tick=state.tick)
        if reply.signal == GO or not members:
            return reply, first_members
        body, meta = None, (0, 0, 0.0)


async def average_group(ctx: RankContext, params: Any, body: Any, team: Team, common: bool) -> Any:
    """Return (1/g)·Σ_j (x_j + Δ_j), summed in rank order; `CollectiveAborted` if a member failed.

    Members with a common x exchange Δ only, which equals the sum of an all-reduce, bit for bit.
    """
    mine = params if body is None else params + body
    members, epoch, incarnations = team
    if len(members) < 2:
        return mine
    if not common:
        return await ctx.all_reduce(
            mine * (1 / len(members)), members, epoch=epoch, incarnations=incarnations
        )
    total = await ctx.all_reduce(
        body * (1 / len(members)), members, epoch=epoch, incarnations=incarnations
    )
    return total if total.__class__ is CollectiveAborted else params + total


async def coordinator(ctx: RankContext, stage: Stage, state: GroupCoordinatorState) -> int:
    """Run the coordinator: make groups until the stage ends, then complete those that were made.

    Returns: the final signal, NEXT or STOP.
    """
    progress, rule = state.progress, rule_in(stage)
    state.enter(stage, ctx.now)
    deadline_s, reason, ahead = stage.stop_criteria.deadline_s, None, None
    while state.signal == GO:
        ctx.safe_point(stage.index, state)
        wakes = rule.wakes(state.groups)
        before_s = deadline_s if wakes is None else min(deadline_s, wakes / 1e9)
        message = await ctx.recv(*coordinator_tags(stage), before_s=before_s)
        # the coordinator's rounds are not reported, so drop their spans
        ctx.time_accounting.end_round()
        if message is None and before_s == deadline_s:
            state.signal, reason = STOP, "seconds"
            break
        on_report(ctx, stage, state, message)
        state.signal, reason = stop_decision(ctx, stage, progress)
        if state.signal != GO:
            ahead = message  # judged, but not handled yet
            break
        await on_message(ctx, stage, state, message)
        state.signal, reason = stop_decision(ctx, stage, progress)
    if state.signal == STOP:
        ctx.safe_point(stage.index, None)
    await drain(ctx, stage, state, ahead)
    record_end(ctx, stage, progress, reason)
    if state.signal == STOP:
        ctx.time_accounting.close_at(progress.end_ns)
    return state.signal


def coordinator_tags(stage: Stage) -> tuple[Tag, ...]:
    """Return the tags of the messages that the coordinator handles."""
    return stage.tag("done"), stage.tag("ask"), stage.tag("aborted"), PEER_FAILED, JOIN


def on_report(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, message: Message | None
) -> None:
    """Record the loss of a worker that asks, or count a group that is done."""
    progress = state.progress
    if message is not None and message.tag[0] == "ask":
        progress.observe(
            message.src, progress.fastest - progress.clocks[message.src], message.meta[2]
        )
    elif message is not None and message.tag[0] == "done":
        count(ctx, stage, state, int(message.meta[0]))


async def on_message(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, message: Message | None
) -> None:
    """Handle a message, or (None) a time at which the scheduler asked to be woken.

    Groups that can begin now begin.
    """
    now_ns, rule = ctx.now_ns, rule_in(stage)
    if message is None:
        started = generator.wake_up(state.groups, rule, now_ns)
    elif message.tag in (PEER_FAILED, JOIN):
        started = await on_membership(ctx, stage, state, message)
    elif message.tag[0] != "ask" and not report_group(state, message):
        started = await complete_if_reported(ctx, stage, state, int(message.meta[0]))
    elif message.tag[0] != "ask":
        started = []
    else:
        state.donor_of.pop(message.src, None)
        state.asked[message.src] = (int(message.meta[0]), int(message.meta[1]))
        started = generator.request(state.groups, rule, message.src, now_ns)
    for group in started:  # the list grows in the loop
        work = [state.asked.pop(member) for member in group.members]
        state.running[group.id] = (group, [] if state.signal == STOP else work)
        await begin(ctx, stage, state, group, work)
        if stage.elastic and len(group.members) > 1:
            state.unreported[group.id], state.aborted[group.id] = set(group.members), set()
        if len(group.members) == 1:  # a group of one is done at once
            count(ctx, stage, state, group.id)
            del state.running[group.id]
            started += generator.complete_group(state.groups, rule, group, now_ns)


async def begin(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, group: Group, work: Sequence[Done]
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
    numbers, gone = as_numbers(group.members), failed_as_numbers(stage, progress.gone)
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
            state.epoch,
            size=len(numbers),
        )
        if state.donor_of and state.signal == GO:
            reply = await assign_joiner(ctx, stage, state, member, reply)
        tag = stage.tag("group", state.incarnations.get(member, 0))
        body = encode_failures(state, group.members)
        await ctx.send(member, tag, body, (*reply, *numbers, *gone))


def count(ctx: RankContext, stage: Stage, state: GroupCoordinatorState, number: int) -> None:
    """Count the work of a group, which is part of its members' models now."""
    group, work = state.running[number]
    if not work:  # counted already, or dropped
        return
    state.running[number] = (group, [])
    commit(ctx, stage, state, group.members, work)


def commit(
    ctx: RankContext,
    stage: Stage,
    state: GroupCoordinatorState,
    members: Members,
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
    if stage.stop_criteria.take_evaluation(state, ctx.now):
        state.ticks += 1
        ctx.snapshot(None, tick=state.ticks, counts=progress.report(), without=progress.gone)


async def drain(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, message: Message | None
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
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
        count_running_groups(ctx, stage, state)
    generator.close(state.groups)
    for joiner in joiners_without_donor(state):
        await on_message(ctx, stage, state, joiner)
    released = {*await release_expected(ctx, stage, state)}
    while len(released | progress.gone) < stage.num_workers:
        is_judged = message is not None
        if message is None:
            message = await ctx.recv(*coordinator_tags(stage))
        is_request = message.tag[0] == "ask"
        if is_stop and is_request and message.start_ns <= progress.end_ns:
            progress.count_dropped(message.src, int(message.meta[0]), RUN_END)
        elif not is_stop and not is_judged and (not is_request or message.meta[0]):
            on_report(ctx, stage, state, message)
        await on_message(ctx, stage, state, message)
        message = None
        released.update(await release_expected(ctx, stage, state))
    if not is_stop:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
        present = [worker for worker in stage.workers if worker not in progress.gone]
        await release_workers(ctx, stage, state, present)
    elif stage.joins:
        ctx.spawn(reject_late_joins(ctx, state))


def count_running_groups(ctx: RankContext, stage: Stage, state: GroupCoordinatorState) -> None:
    """Count the groups that are averaging, and drop the work of workers without a group."""
    for number in state.running:
        count(ctx, stage, state, number)
    for worker, (steps, _) in state.asked.items():
        state.progress.count_dropped(worker, steps, RUN_END)


async def release_expected(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState
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
            commit(ctx, stage, state, (worker,), [work])
            state.last[worker] = OWN - worker
    return idle


async def release_workers(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, workers: Sequence[int]
) -> None:
    """Let these workers leave the stage."""
    for worker in workers:
        reply = GroupReply(
            state.signal, -1, state.progress.samples, 0, False, state.ticks, state.progress.end_ns
        )
        meta = (*reply, *failed_as_numbers(stage, state.progress.gone))
        await ctx.send(worker, stage.tag("group", state.incarnations.get(worker, 0)), meta=meta)


# Workers that fail and rejoin
#
# Failure: once the coordinator has noticed it, groups that have not begun meet without the failed
# worker, and new groups do not include it. If a group is averaging, its survivors average again
# once all of them have reported whether the sum was aborted. The failed worker's work is dropped,
# or counts if the sum had ended before. On processes the sum may have ended at some members only;
# the others then average without these.
#
# Rejoin: the coordinator names a donor, a worker of the next group that begins. The donor sends its
# model to the joining worker after that average. If no worker has a model, the joining worker
# starts from the initial one. Its number of requests is that of before, but at least the least
# number of a present worker. Its optimizer starts with an empty state, and its data continue behind
# its counted samples. Groups learn how often each member has failed, so that no
# member takes another for its earlier incarnation. A worker that asks at a stage boundary joins in
# the next stage. A worker that asks after the end is told that the run is over. An incarnation is
# identified by the time of its join request, which is part of the tag of every message to it.
#
# Checkpoint on processes: all workers join again, each with the model and data of its own safe
# point. The coordinator counts what each model contains, and no worker has asked. If a worker was
# saved before an average, the other members of that group keep their part of it.


NO_DONOR = -1
OWN = -2  # minus a rank: stands for its last group if no other worker has its model


class Admission(NamedTuple):
    """The coordinator's answer to a join request."""

    signal: float  # GO; STOP if the run is over
    end_ns: float  # end of the run, with STOP
    stage: float = 0.0  # index of the present stage
    state_donor: float = NO_DONOR  # the worker that sends its model
    samples: float = 0.0  # applied so far, of all workers
    rounds: float = 0.0  # the worker's own rounds, applied or dropped
    done: float = 0.0  # steps in these rounds
    tick: float = 0.0  # number of the last evaluation


class Team(NamedTuple):
    """Members of one average, with numbers that tell it from other averages of these ranks."""

    members: Members
    epoch: int  # failures before it was formed
    incarnations: tuple[int, ...]  # failures of each member, or empty if there was none


def model_tag(incarnation: int) -> Tag:
    return "model", 0, incarnation


def encode_failures(state: GroupCoordinatorState, members: Members) -> Tensor | None:
    """Return how often each member has failed, as a payload; None if none of them has."""
    if not state.failures or state.failures.keys().isdisjoint(members):
        return None
    return torch.tensor([state.failures.get(member, 0) for member in members])


def incarnations_in(message: Message) -> tuple[int, ...]:
    return () if message.body is None else tuple(message.body.tolist())


# Membership at the coordinator


async def on_membership(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, message: Message
) -> list[Group]:
    """Handle a worker failure or a join request. Returns: the groups that begin now.

    Raises: AshlError if too few workers remain.
    """
    rank, started = message.src, list[Group]()
    if message.tag == PEER_FAILED:
        state.epoch += 1
        state.failures[rank] = int(message.meta[0]) + 1
        started = remove_failed(ctx, stage, state, rank)
    else:
        state.donor_of[rank], state.incarnations[rank] = NO_DONOR, int(message.meta[0])
        if rank not in state.progress.gone and state.signal != GO:
            # the stage is over, so no donor will be named in it
            started = continue_without(ctx, stage, state, rank)
    with_model = {*stage.workers} - state.progress.gone - state.donor_of.keys()
    if state.signal == GO and not with_model:
        for joiner in [rank for rank, donor in state.donor_of.items() if donor == NO_DONOR]:
            await admit(ctx, stage, state, joiner, NO_DONOR)
            del state.donor_of[joiner]
    return started


def joiners_without_donor(state: GroupCoordinatorState) -> list[Message]:
    """Return new join requests of the workers that get no donor, because the stage is over."""
    waiting = [
        rank
        for rank, state_donor in state.donor_of.items()
        if state_donor == NO_DONOR and rank not in state.progress.gone
    ]
    return [Message(rank, JOIN, None, (state.incarnations[rank],), 0) for rank in waiting]


def remove_failed(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, rank: int
) -> list[Group]:
    progress = state.progress
    # a worker that waits for the model of this one is notified, too, and asks again
    state.donor_of.pop(rank, None)
    if rank in progress.gone:
        return []
    started = continue_without(ctx, stage, state, rank)
    check_min_workers(
        ctx, stage, rank, progress.present + len(progress.gone.intersection(state.donor_of))
    )
    return started


def continue_without(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, rank: int
) -> list[Group]:
    """Remove a worker from progress and groups. Returns: the groups that begin now."""
    state.progress.remove_worker(rank)
    steps, _ = state.asked.pop(rank, (0, 0))
    state.progress.count_dropped(rank, steps, FAILURE)
    started = generator.remove_worker(state.groups, cast("GroupRule", stage.sync), rank, ctx.now_ns)
    for number, members in state.unreported.items():
        if rank in members | state.aborted[number]:
            members.discard(rank)
            state.aborted[number].discard(rank)
            if not members:
                ctx.spawn(remind(ctx, stage, number))
    return started


async def remind(ctx: RankContext, stage: Stage, number: int) -> None:
    """Make the coordinator handle a group whose survivors have all reported already."""
    await ctx.send(ctx.rank, stage.tag("aborted"), meta=(number,))


def report_group(state: GroupCoordinatorState, message: Message) -> bool:
    """Record that a member has averaged, or that its average was aborted.

    Returns: True if other members have not reported yet.
    """
    number = int(message.meta[0])
    if number not in state.unreported:
        return number not in state.running
    if message.tag[0] == "aborted" and message.src in state.unreported[number]:
        state.aborted[number].add(message.src)
    state.unreported[number].discard(message.src)
    return bool(state.unreported[number])


async def complete_if_reported(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, number: int
) -> list[Group]:
    """Complete a group whose survivors have all reported; an aborted average is repeated.

    Returns: the groups that begin now.
    """
    group, work = state.running[number]
    repeating = tuple(sorted(state.aborted.get(number, ())))
    if not repeating:
        state.unreported.pop(number, None)
        state.aborted.pop(number, None)
        del state.running[number]
        if work:  # no member survives
            for member, (steps, _) in zip(group.members, work, strict=True):
                state.progress.count_dropped(member, steps, FAILURE)
        return generator.complete_group(
            state.groups, cast("GroupRule", stage.sync), group, ctx.now_ns
        )
    if work:
        each = dict(zip(group.members, work, strict=True))
        for member in each.keys() - {*repeating}:
            state.progress.count_dropped(member, each[member][0], FAILURE)
        work = [each[member] for member in repeating]
    state.running[number] = Group(number, repeating), work
    state.unreported[number], state.aborted[number] = set(repeating), set()
    for member in repeating:
        meta = (state.epoch, *as_numbers(repeating))
        body = encode_failures(state, repeating)
        await ctx.send(member, stage.tag("regroup", number), body, meta)
    ended = Group(number, tuple(member for member in group.members if member not in repeating))
    return generator.complete_group(state.groups, cast("GroupRule", stage.sync), ended, ctx.now_ns)


async def assign_joiner(
    ctx: RankContext,
    stage: Stage,
    state: GroupCoordinatorState,
    state_donor: int,
    reply: GroupReply,
) -> GroupReply:
    """Make this worker the donor of a joining worker that waits for one, and tell it so."""
    waiting = [
        rank for rank, donor in state.donor_of.items() if donor == NO_DONOR and rank != state_donor
    ]
    joiner = next(iter(waiting), None)
    if joiner is None or state_donor in state.donor_of:
        return reply
    state.donor_of[joiner] = state_donor
    await admit(ctx, stage, state, joiner, state_donor)
    return reply._replace(joiner=joiner, incarnation=state.incarnations[joiner])


async def admit(
    ctx: RankContext, stage: Stage, state: GroupCoordinatorState, joiner: int, state_donor: int
) -> None:
    """Admit a joining worker, with its donor's model, or the initial one for `NO_DONOR`."""
    progress = state.progress
    if joiner in progress.gone:
        progress.join(joiner)
        generator.join(state.groups, joiner)
        state.last[joiner] = OWN - joiner
    admission = Admission(
        GO,
        0,
        stage.index,
        state_donor,
        progress.samples,
        *progress.rounds_and_steps_of(joiner),
        state.ticks,
    )
    await ctx.send(joiner, admission_tag(state.incarnations[joiner]), None, admission)


async def gather_workers(
    ctx: RankContext, stages: Sequence[Stage], index: int, state: GroupCoordinatorState
) -> tuple[int, GroupCoordinatorState]:
    """Restore the coordinator from a checkpoint: drop messages in flight and await all workers.

    It counts what each worker's model contains. Returns: (index of the stage, state).
    """
    stage, progress, requests = stages[index], state.progress, dict[int, Message]()
    generator.reopen(state.groups)
    state.asked, state.running, state.unreported, state.aborted, state.donor_of = {}, {}, {}, {}, {}
    state.last = [OWN - rank for rank in stage.workers]
    while len(requests) < stage.num_workers:
        message = await ctx.recv(JOIN)
        requests[message.src] = message
    for rank, message in sorted(requests.items()):
        incarnation, rounds, steps = map(int, message.meta)
        counted, before = progress.rounds_and_steps_of(rank)
        more = steps - before
        progress.take_back(rank, counted - rounds, -more, -more * stage.worker(rank).batch)
        progress.remove_worker(rank)
        progress.join(rank)
        state.incarnations[rank] = incarnation
    for rank in stage.workers:
        admission = Admission(GO, 0, stage.index, NO_DONOR, progress.samples, tick=state.ticks)
        await ctx.send(rank, admission_tag(state.incarnations[rank]), None, admission)
    return index, state


async def reject_late_joins(ctx: RankContext, state: GroupCoordinatorState) -> None:
    """Tell each worker that asks to join after the end that the run is over; never returns."""
    while True:
        for rank in state.donor_of:
            admission = Admission(STOP, state.progress.end_ns)
            await ctx.send(rank, admission_tag(state.incarnations[rank]), None, admission)
        state.donor_of.clear()
        message = await ctx.recv(JOIN, PEER_FAILED)
        if message.tag == JOIN:
            state.donor_of[message.src] = NO_DONOR
            state.incarnations[message.src] = int(message.meta[0])


# Membership at a worker


async def form_remaining_group(ctx: RankContext, stage: Stage, number: float) -> Team:
    """Report an aborted average. Returns: the members that repeat it."""
    await ctx.send(stage.lead_rank, stage.tag("aborted"), meta=(number,))
    message = await ctx.recv(stage.tag("regroup", int(number)), src=stage.lead_rank)
    epoch, *members = message.meta
    return Team(as_members(members), int(epoch), incarnations_in(message))


async def join(
    ctx: RankContext, stages: Sequence[Stage], state: Replica, kept: bool = False
) -> tuple[int, Any] | None:
    """Join a running run as a worker.

    Args: kept: True if `state` is that of a checkpoint, from which all workers resume.
    Returns: (index of the present stage, state in it); None if the run is over.
    """
    done = (state.round, state.step) if kept else ()
    while True:
        while await ctx.recv(PEER_FAILED, before_s=ctx.now):
            pass  # failures before this worker joined do not concern it
        state.incarnation = int(float(ctx.now_ns)) + (state.incarnation == ctx.now_ns)
        await ctx.send(stages[0].lead_rank, JOIN, None, (state.incarnation, *done))
        admission = Admission(
            *(await ctx.recv(admission_tag(state.incarnation), src=stages[0].lead_rank)).meta
        )
        if admission.signal == STOP:
            ctx.time_accounting.close_at(int(admission.end_ns))
            return None
        if admission.state_donor == NO_DONOR:
            break
        message = await ctx.recv(
            model_tag(state.incarnation), PEER_FAILED, src=int(admission.state_donor)
        )
        if message.tag != PEER_FAILED:
            state.params = message.body
            break
    stage = stages[int(admission.stage)]
    state.samples, state.tick = int(admission.samples), int(admission.tick)
    if kept:
        return stage.index, state
    state.enter(stage, ctx.rank)
    state.round, state.step = int(admission.rounds), int(admission.done)
    state.drawn = state.step * state.batch
    return stage.index, state

"""Partial all-reduce (P-Reduce): models are averaged in small groups, and who meets whom is a
scheduler's choice.

Rule: every H local steps x_i ← (1/g)·Σ_j x_j over the g members of a group; momentum stays local.
As a matrix this is symmetric, doubly stochastic and idempotent, so the mean of all models is
conserved. A thin coordinator (rank n) makes the groups (`ashl.topology.group_generator`) and tells
each member to begin once all have asked; no model passes it.

Where workers are lost or come, see `ashl.topology.partial_all_reduce`.

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
from ashl.topology.parameter_server import admission_tag, check_left

Done = tuple[int, int]  # (steps, samples)
PER_NODE = 4  # workers of a machine where nobody says


@option
class PartialAllReduce(Topology):
    """Every worker has a model of its own; a group's members average theirs."""

    policy_type: ClassVar[type[Rule]] = GroupRule
    supports: ClassVar[frozenset[str]] = frozenset(
        {FAULT_TOLERANT}
    )  # whole models travel, and no server adds up updates
    coordinated: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    workers_per_node: Count | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Words go between the workers and the coordinator; models by all-reduce."""
        return stage.workers if rank == stage.lead_rank else (stage.lead_rank,)

    def notified_on_failure(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """All others: it may be in a group with any of them."""
        return tuple(peer for peer in (*stage.workers, stage.lead_rank) if peer != rank)

    def groups(self, stage: Stage) -> Sequence[Members]:
        return rule_in(stage).groups(self.nodes(stage))

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What averaging in the largest possible group takes: all workers."""
        return network.all_reduce_ns(stage.workers, stage.trainer.dense_bytes, 0)

    def begin(self, ctx: RankContext, stage: Stage) -> Replica | MakerState:
        if ctx.rank == stage.lead_rank:
            n = stage.num_workers
            progress = Progress(n, groups=[0] * n, conflicts=0)
            return MakerState(
                progress, groups=generator.open_groups(self.nodes(stage), stage.seed), last=[-1] * n
            )
        return Replica(*stage.trainer.init())

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Replica | MakerState] | None:
        if kept is None:
            return await join(ctx, stages, Replica(*stages[0].trainer.init()))
        index, state = kept
        if ctx.rank == stages[0].lead_rank:
            return await gather_workers(ctx, stages, index, state)
        return await join(ctx, stages, state, kept=True)

    def nodes(self, stage: Stage) -> tuple[int, ...]:
        """The machine of each worker."""
        if self.workers_per_node is None and stage.nodes is not None:
            return stage.nodes
        return tuple(worker // (self.workers_per_node or PER_NODE) for worker in stage.workers)

    def role(self, stage: Stage, rank: int) -> Loop:
        return coordinator if rank == stage.lead_rank else worker


def rule_in(stage: Stage) -> GroupRule:
    """The stage's sync mode, as the generator asks it."""
    assert isinstance(stage.sync, GroupRule)
    return stage.sync


@dataclass
class Replica(WorkerState):
    """A worker with a model of its own."""

    tick: int = 0  # of the last evaluation that it gave its model to


@dataclass(kw_only=True)
class MakerState(CoordinatorState):
    """A coordinator that also makes the groups."""

    groups: Groups
    last: list[
        int
    ]  # the group in which each worker was last; -1 = none, so that it has the first model
    asked: dict[int, Done] = field(
        default_factory=dict
    )  # what those who have no group yet have computed
    running: dict[int, tuple[Group, list[Done]]] = field(
        default_factory=dict
    )  # with what its members have, until it is counted
    signal: int = GO  # NEXT or STOP once the stage is over
    incarnations: dict[int, int] = field(
        default_factory=dict
    )  # the present one of each worker that has come back
    losses: int = 0  # that are taken into account
    again: dict[int, int] = field(
        default_factory=dict
    )  # how often each worker that was lost had been by then
    yet: dict[int, set[int]] = field(
        default_factory=dict
    )  # by group that runs: who is to say what came of it
    broken: dict[int, set[int]] = field(
        default_factory=dict
    )  # ... and whose average has come to nothing
    donor_of: dict[int, int] = field(
        default_factory=dict
    )  # by joining worker: the donor of its model

    def enter(self, stage: Stage, now_s: float) -> None:
        if self.entered == stage.index:
            return  # it goes on from a checkpoint
        self.progress.begin(now_s)
        if self.entered is not None:
            generator.reopen(self.groups)
        self.entered, self.signal, self.asked, self.running = stage.index, GO, {}, {}
        self.yet, self.broken = {}, {}


class GroupReply(NamedTuple):
    """The answer to a worker, followed by the members of its group, and by those who are gone. With
    STOP its work is not used; with NEXT this is the last of it; without members it leaves.
    """

    signal: float  # GO, NEXT or STOP
    group: float
    samples: float  # applied once this group is done: the learning rate follows them
    staleness: float  # how many commits it is behind the foremost worker
    # whether all members come from the same group, so that they share the model that they started
    # from
    common: float
    tick: float  # of the evaluation that wants its model
    end_ns: float  # of the stage, without members
    epoch: float = 0  # of the group
    joiner: float = -1  # who has come, and is to have its model
    incarnation: float = 0  # ... of the heir
    size: float = 0  # how many numbers say who the members are


HEAD = len(GroupReply._fields)


async def worker(ctx: RankContext, stage: Stage, state: Replica) -> int:
    """Compute on its own model, average with whom the coordinator names, go on; returns the last
    word.
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
        how = (work.steps, int(reply.staleness))
        ctx.record_round(
            stage.index,
            state.round,
            *how,
            dropped=signal == STOP,
            loss=work.loss,
            group=list(members),
        )
        state.round += 1
    return signal


async def meet(
    ctx: RankContext, stage: Stage, state: Replica, work: Work
) -> tuple[GroupReply, Members]:
    """Ask for a group and average in it. Once the stage is over, the worker takes part in all that
    is still in its buffer, as others may wait for it there: under NEXT its work is part of the
    first of these, under STOP of none.
    """
    body, meta, met = work.body, (work.steps, work.samples, work.loss), None
    while True:
        await ctx.send(stage.lead_rank, stage.tag("ask"), meta=meta)
        message = await ctx.recv(stage.tag("group", state.incarnation), src=stage.lead_rank)
        reply = GroupReply(*message.meta[:HEAD])
        numbers, gone = (
            message.meta[HEAD : HEAD + int(reply.size)],
            message.meta[HEAD + int(reply.size) :],
        )
        members, state.away = as_members(numbers), as_members(gone)
        body, met = None if reply.signal == STOP else body, met or members
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
        while (
            reply.signal == GO and state.tick < reply.tick
        ):  # its model now is what it was at each of them
            state.tick += 1
            ctx.snapshot(state.params, tick=state.tick)
        if reply.signal == GO or not members:
            return reply, met
        body, meta = None, (0, 0, 0.0)


async def average_group(ctx: RankContext, params: Any, body: Any, team: Team, common: bool) -> Any:
    """(1/g)·Σ_j (x_j + Δ_j), summed in rank order; `CollectiveAborted` where a member
    failed. Members who
    share x exchange Δ alone: that is the sum of all-reduce, to the last bit.
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


async def coordinator(ctx: RankContext, stage: Stage, state: MakerState) -> int:
    """Make groups until the stage is over, then serve those that were made; returns the
    last word.
    """
    progress, rule = state.progress, rule_in(stage)
    state.enter(stage, ctx.now)
    deadline_s, reason, ahead = stage.stop_criteria.deadline_s, None, None
    while state.signal == GO:
        ctx.safe_point(stage.index, state)
        wakes = rule.wakes(state.groups)
        before_s = deadline_s if wakes is None else min(deadline_s, wakes / 1e9)
        message = await ctx.recv(*coordinator_tags(stage), before_s=before_s)
        # nobody asks for the coordinator's rounds, so they are not kept
        ctx.time_accounting.end_round()
        if message is None and before_s == deadline_s:
            state.signal, reason = STOP, "seconds"
            break
        on_report(ctx, stage, state, message)
        state.signal, reason = stop_decision(ctx, stage, progress)
        if state.signal != GO:
            ahead = message  # judged before anybody may go on
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
    """The tags of what the coordinator takes in."""
    return stage.tag("done"), stage.tag("ask"), stage.tag("again"), PEER_FAILED, JOIN


def on_report(ctx: RankContext, stage: Stage, state: MakerState, message: Message | None) -> None:
    """Note the loss of a worker that asks, or count a group that is done."""
    progress = state.progress
    if message is not None and message.tag[0] == "ask":
        progress.observe(
            message.src, progress.fastest - progress.clocks[message.src], message.meta[2]
        )
    elif message is not None and message.tag[0] == "done":
        count(ctx, stage, state, int(message.meta[0]))


async def on_message(
    ctx: RankContext, stage: Stage, state: MakerState, message: Message | None
) -> None:
    """A worker asks, a group is done, or (None) a moment has come that the scheduler waited for."""
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
    for group in started:  # grows while it is read
        work = [state.asked.pop(member) for member in group.members]
        state.running[group.id] = (group, [] if state.signal == STOP else work)
        await begin(ctx, stage, state, group, work)
        if stage.elastic and len(group.members) > 1:
            state.yet[group.id], state.broken[group.id] = set(group.members), set()
        if len(group.members) == 1:  # nobody to wait for
            count(ctx, stage, state, group.id)
            del state.running[group.id]
            started += generator.complete_group(state.groups, rule, group, now_ns)


async def begin(
    ctx: RankContext, stage: Stage, state: MakerState, group: Group, work: Sequence[Done]
) -> None:
    """Tell the members, who have all come with this work, who they are."""
    progress = state.progress
    fresh = state.signal != STOP and all(steps for steps, _ in work)
    common = fresh and len({state.last[member] for member in group.members}) == 1
    applied = progress.samples + (
        0 if state.signal == STOP else sum(samples for _, samples in work)
    )
    numbers, gone = as_numbers(group.members), failed_as_numbers(stage, progress.gone)
    for member in group.members:
        state.last[member] = group.id
        behind = progress.fastest - progress.clocks[member]
        of = (
            state.signal,
            group.id,
            applied,
            behind,
            common,
            state.ticks,
            progress.end_ns,
            state.losses,
        )
        reply = GroupReply(*of, size=len(numbers))
        if state.donor_of and state.signal == GO:
            reply = await assign_joiner(ctx, stage, state, member, reply)
        tag = stage.tag("group", state.incarnations.get(member, 0))
        await ctx.send(member, tag, lives_of(state, group.members), (*reply, *numbers, *gone))


def count(ctx: RankContext, stage: Stage, state: MakerState, number: int) -> None:
    """What the members of this group had computed is now part of their models."""
    group, work = state.running[number]
    if not work:  # counted already, or dropped
        return
    state.running[number] = (group, [])
    commit(ctx, stage, state, group.members, work)


def commit(
    ctx: RankContext, stage: Stage, state: MakerState, members: Members, work: Sequence[Done]
) -> None:
    """These workers have averaged, each with its own work; one alone has merged its own."""
    progress = state.progress
    assert progress.groups is not None
    progress.merge()
    progress.conflicts = state.groups.conflicts
    for member, (steps, samples) in zip(members, work, strict=True):
        if steps:  # else it averages once more, with work that was counted before
            progress.commit(member, steps, samples)
            progress.groups[member] += len(members) > 1
    if stage.stop_criteria.take_evaluation(state, ctx.now):
        state.ticks += 1
        ctx.snapshot(None, tick=state.ticks, counts=progress.report(), without=progress.gone)


async def drain(ctx: RankContext, stage: Stage, state: MakerState, message: Message | None) -> None:
    """The stage is over, with this message not taken in yet. Who is still expected in a group
    averages in it, which leaves the mean of all models as it is; who is not expected anywhere
    leaves.

    STOP: it ended now. Groups that run count, what else was computed is dropped. NEXT: it ends when
    the last worker has come, and everybody's work counts, that of who is in no group as its own
    model's.
    """
    progress, last = state.progress, state.signal == STOP
    if last:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
        for number in state.running:
            count(ctx, stage, state, number)
        for worker, (steps, _) in state.asked.items():
            progress.count_dropped(worker, steps, RUN_END)
    generator.close(state.groups)
    for joiner in joiners_without_donor(state):
        await on_message(ctx, stage, state, joiner)
    away = {*await release_expected(ctx, stage, state)}
    while len(away | progress.gone) < stage.num_workers:
        heard = message is not None
        if message is None:
            message = await ctx.recv(*coordinator_tags(stage))
        is_request = message.tag[0] == "ask"
        if last and is_request and message.start_ns <= progress.end_ns:
            progress.count_dropped(message.src, int(message.meta[0]), RUN_END)
        elif not last and not heard and (not is_request or message.meta[0]):
            on_report(ctx, stage, state, message)
        await on_message(ctx, stage, state, message)
        message = None
        away.update(await release_expected(ctx, stage, state))
    if not last:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
        await release_workers(
            ctx, stage, state, [worker for worker in stage.workers if worker not in progress.gone]
        )
    elif stage.joins:
        ctx.spawn(reject_late_joins(ctx, state))


async def release_expected(ctx: RankContext, stage: Stage, state: MakerState) -> list[int]:
    """Those who are expected in no group any more: under STOP they leave, under NEXT their work
    counts first.
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
    ctx: RankContext, stage: Stage, state: MakerState, workers: Sequence[int]
) -> None:
    """These workers may leave the stage."""
    for worker in workers:
        reply = GroupReply(
            state.signal, -1, state.progress.samples, 0, False, state.ticks, state.progress.end_ns
        )
        meta = (*reply, *failed_as_numbers(stage, state.progress.gone))
        await ctx.send(worker, stage.tag("group", state.incarnations.get(worker, 0)), meta=meta)


# Groups that lose a member, and workers that rejoin  Groups that lose a member, and workers that
# come, where models are averaged in groups.  Rule of a loss, once it is noticed: groups that have
# not begun meet without the lost worker, and new ones have it no longer. Of a group that is
# averaging, those who are left average anew, as soon as all of them have said whether the sum came
# to nothing; what the lost worker had computed is dropped with it, or counts where the sum had
# ended before. On processes it may have ended at some of them alone, and the rest average without
# these.  Rule of a join: the coordinator names a worker of the next group that begins, which sends
# its model once it has averaged; where nobody has one any more, the newcomer begins with the first
# model. It counts as having asked as often as before, and at least as often as whoever has asked
# least; its optimizer begins anew, and its data go on behind what was counted of it. Groups that it
# is in learn how often each of their members had been lost: so nobody takes one for its earlier
# life. Who comes at a border takes part from the next stage on, and who comes when the run is over
# learns it. A life is known by the moment at which it asked to take part, and what answers it has
# that as its tag.  From a checkpoint on processes all come anew, each as it was at the top of its
# loop, with its own model and data. The coordinator counts of each what is in its model, and nobody
# has asked; what others had of an average that a
# worker was kept before, they keep.


NOBODY = -1
OWN = -2  # minus a worker: in place of its last group, where its model is nobody else's


class Admission(NamedTuple):
    """What the coordinator tells a newcomer."""

    signal: float  # GO; STOP where the run is over
    end_ns: float  # of the run, with STOP
    stage: float = 0.0
    state_donor: float = NOBODY  # who sends its model
    samples: float = 0.0
    rounds: float = 0.0  # its own, applied or dropped
    done: float = 0.0  # ... of the steps
    tick: float = 0.0  # of the last evaluation


class Team(NamedTuple):
    """Those who average, and what sets them apart from who else were or will be these ranks."""

    members: Members
    epoch: int
    incarnations: tuple[int, ...]


def model_tag(incarnation: int) -> Tag:
    return "model", 0, incarnation


def lives_of(state: MakerState, members: Members) -> Tensor | None:
    """How often each of these had been lost, as a body, where one has come back."""
    if not state.again or state.again.keys().isdisjoint(members):
        return None
    return torch.tensor([state.again.get(member, 0) for member in members])


def incarnations_in(message: Message) -> tuple[int, ...]:
    return () if message.body is None else tuple(message.body.tolist())


# At the coordinator


async def on_membership(
    ctx: RankContext, stage: Stage, state: MakerState, message: Message
) -> list[Group]:
    """A worker is lost, or asks to take part; returns the groups that begin now. Raises AshlError
    where too few are left.
    """
    rank, started = message.src, list[Group]()
    if message.tag == PEER_FAILED:
        state.losses += 1
        state.again[rank] = int(message.meta[0]) + 1
        started = remove_failed(ctx, stage, state, rank)
    else:
        state.donor_of[rank], state.incarnations[rank] = NOBODY, int(message.meta[0])
        if (
            rank not in state.progress.gone and state.signal != GO
        ):  # nobody will give it a model in this stage any more
            started = continue_without(ctx, stage, state, rank)
    if (
        state.signal == GO and not {*stage.workers} - state.progress.gone - state.donor_of.keys()
    ):  # nobody has one
        for joiner in [
            joiner for joiner, state_donor in state.donor_of.items() if state_donor == NOBODY
        ]:
            await admit(ctx, stage, state, joiner, NOBODY)
            del state.donor_of[joiner]
    return started


def joiners_without_donor(state: MakerState) -> list[Message]:
    """Newcomers of a stage that is over, who will have no model in it: as if they came now."""
    waiting = [
        rank
        for rank, state_donor in state.donor_of.items()
        if state_donor == NOBODY and rank not in state.progress.gone
    ]
    return [Message(rank, JOIN, None, (state.incarnations[rank],), 0) for rank in waiting]


def remove_failed(ctx: RankContext, stage: Stage, state: MakerState, rank: int) -> list[Group]:
    progress = state.progress
    state.donor_of.pop(rank, None)  # whom it was to give its model hears of it, too, and asks again
    if rank in progress.gone:
        return []
    started = continue_without(ctx, stage, state, rank)
    check_left(ctx, stage, rank, progress.present + len(progress.gone.intersection(state.donor_of)))
    return started


def continue_without(ctx: RankContext, stage: Stage, state: MakerState, rank: int) -> list[Group]:
    """Go on without a worker."""
    state.progress.remove_worker(rank)
    steps, _ = state.asked.pop(rank, (0, 0))
    state.progress.count_dropped(rank, steps, FAILURE)
    started = generator.remove_worker(state.groups, cast("GroupRule", stage.sync), rank, ctx.now_ns)
    for number, members in state.yet.items():
        if rank in members | state.broken[number]:
            members.discard(rank)
            state.broken[number].discard(rank)
            if not members:
                ctx.spawn(remind(ctx, stage, number))
    return started


async def remind(ctx: RankContext, stage: Stage, number: int) -> None:
    """All who are left of a group have reported: that is taken in as if the last one did so now."""
    await ctx.send(ctx.rank, stage.tag("again"), meta=(number,))


def report_group(state: MakerState, message: Message) -> bool:
    """Where workers may be lost: a member of a group has averaged, or its average came to nothing.
    Whether others of the group have still to say so.
    """
    number = int(message.meta[0])
    if number not in state.yet:
        return number not in state.running
    if message.tag[0] == "again" and message.src in state.yet[number]:
        state.broken[number].add(message.src)
    state.yet[number].discard(message.src)
    return bool(state.yet[number])


async def complete_if_reported(
    ctx: RankContext, stage: Stage, state: MakerState, number: int
) -> list[Group]:
    """All who are left of a group have said what came of it; returns the groups that begin now."""
    group, work = state.running[number]
    left = tuple(sorted(state.broken.get(number, ())))
    if not left:
        state.yet.pop(number, None)
        state.broken.pop(number, None)
        del state.running[number]
        if work:  # nobody is left of it
            for member, (steps, _) in zip(group.members, work, strict=True):
                state.progress.count_dropped(member, steps, FAILURE)
        return generator.complete_group(
            state.groups, cast("GroupRule", stage.sync), group, ctx.now_ns
        )
    if work:
        each = dict(zip(group.members, work, strict=True))
        for member in each.keys() - {*left}:
            state.progress.count_dropped(member, each[member][0], FAILURE)
        work = [each[member] for member in left]
    state.running[number] = Group(number, left), work
    state.yet[number], state.broken[number] = set(left), set()
    for member in left:
        meta = (state.losses, *as_numbers(left))
        await ctx.send(member, stage.tag("anew", number), lives_of(state, left), meta)
    ended = Group(number, tuple(member for member in group.members if member not in left))
    return generator.complete_group(state.groups, cast("GroupRule", stage.sync), ended, ctx.now_ns)


async def assign_joiner(
    ctx: RankContext, stage: Stage, state: MakerState, state_donor: int, reply: GroupReply
) -> GroupReply:
    """The reply to a worker, with the newcomer that is to have its model, where one waits
    for it.
    """
    joiner = next(
        (rank for rank, named in state.donor_of.items() if named == NOBODY and rank != state_donor),
        None,
    )
    if joiner is None or state_donor in state.donor_of:
        return reply
    state.donor_of[joiner] = state_donor
    await admit(ctx, stage, state, joiner, state_donor)
    return reply._replace(joiner=joiner, incarnation=state.incarnations[joiner])


async def admit(
    ctx: RankContext, stage: Stage, state: MakerState, joiner: int, state_donor: int
) -> None:
    """A newcomer takes part from now on, with the model of this worker; with nobody's, the first
    one.
    """
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
    ctx: RankContext, stages: Sequence[Stage], index: int, state: MakerState
) -> tuple[int, MakerState]:
    """From a checkpoint: nothing is on its way, and all workers come anew, as they were."""
    stage, progress, came = stages[index], state.progress, dict[int, Message]()
    generator.reopen(state.groups)
    state.asked, state.running, state.yet, state.broken, state.donor_of = {}, {}, {}, {}, {}
    state.last = [OWN - rank for rank in stage.workers]
    while len(came) < stage.num_workers:
        message = await ctx.recv(JOIN)
        came[message.src] = message
    for rank, message in sorted(came.items()):
        incarnation, rounds, steps = map(int, message.meta)
        counted, before = progress.rounds_and_steps_of(rank)
        more = steps - before
        progress.take_back(rank, counted - rounds, -more, -more * stage.worker(rank).batch)
        progress.remove_worker(rank)
        progress.join(rank)
        state.incarnations[rank] = incarnation
    for rank in stage.workers:
        admission = Admission(GO, 0, stage.index, NOBODY, progress.samples, tick=state.ticks)
        await ctx.send(rank, admission_tag(state.incarnations[rank]), None, admission)
    return index, state


async def reject_late_joins(ctx: RankContext, state: MakerState) -> None:
    """Once all others are let go: whoever has come, or comes, learns that the run is over."""
    while True:
        for rank in state.donor_of:
            await ctx.send(
                rank,
                admission_tag(state.incarnations[rank]),
                None,
                Admission(STOP, state.progress.end_ns),
            )
        state.donor_of.clear()
        message = await ctx.recv(JOIN, PEER_FAILED)
        if message.tag == JOIN:
            state.donor_of[message.src], state.incarnations[message.src] = (
                NOBODY,
                int(message.meta[0]),
            )


# At a worker


async def form_remaining_group(ctx: RankContext, stage: Stage, number: float) -> Team:
    """An average has come to nothing: who is left of this group."""
    await ctx.send(stage.lead_rank, stage.tag("again"), meta=(number,))
    message = await ctx.recv(stage.tag("anew", int(number)), src=stage.lead_rank)
    epoch, *left = message.meta
    return Team(as_members(left), int(epoch), incarnations_in(message))


async def join(
    ctx: RankContext, stages: Sequence[Stage], state: Replica, kept: bool = False
) -> tuple[int, Any] | None:
    """At a worker that comes while the others run: the stage that they are in, and its state there;
    None where the run is over. `kept`: all come, and this is its state from a checkpoint.
    """
    done = (state.round, state.step) if kept else ()
    while True:
        while await ctx.recv(PEER_FAILED, before_s=ctx.now):
            pass  # what was before is of no concern
        state.incarnation = int(float(ctx.now_ns)) + (state.incarnation == ctx.now_ns)
        await ctx.send(stages[0].lead_rank, JOIN, None, (state.incarnation, *done))
        admission = Admission(
            *(await ctx.recv(admission_tag(state.incarnation), src=stages[0].lead_rank)).meta
        )
        if admission.signal == STOP:
            ctx.time_accounting.close_at(int(admission.end_ns))
            return None
        if admission.state_donor == NOBODY:
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

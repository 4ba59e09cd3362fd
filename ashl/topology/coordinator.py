"""Coordinator: the thin rank n of asynchronous methods without a server.

It neither holds nor receives a model. All its messages are headers, which cost no bytes. It counts
progress, decides when a stage ends and when models are evaluated, and lets workers leave once no
other worker needs them. Messages of a worker, with tags of the stage and iteration 0:

    "report" →    a `Report`, after each piece of work that is part of the worker's model now
    ← "go"        the answer, with the samples that the learning rate follows; a worker waits for
                  it (`await_answer`) before it merges its next piece of work, so that no worker is
                  more than one ahead of the coordinator
    ← "signal"    a `Signal`. SNAPSHOT: emit a snapshot with this tick. NEXT, STOP or PAUSE, to all:
                  begin no more work
    "done"   →    the steps that were dropped: this worker begins no more, but answers its peers
    ← "signal"    BYE: all are done, so no worker asks any more; now the worker may leave

After a failure or a rejoin, every worker goes back to its last safe point and tells the coordinator
what its model contains ("member"). The coordinator continues with its counts as they are, corrected
by these reports, and answers ("epoch"). A joining worker receives the model of the lowest worker
that has one.

With STOP, work in progress is dropped; with NEXT or PAUSE, it is still merged and reported. A
worker handles signals in a task of its own, or wherever it receives. A method that needs more of
its coordinator, for example a group generator, has its own loop around `stop_decision`.

Source: the drained end as in Luo et al., "Prague", ASPLOS 2020: a worker leaves once no group
expects it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from ashl.plan.assignments import Members
from ashl.runtime.effects import Epoch, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import GO, NEXT, PAUSE, STOP, StageConfig
from ashl.stage.members import shared_members
from ashl.stage.progress import FAILURE, RUN_END, RUN_START, Progress, ProgressMark
from ashl.topology.ending import (
    decide_end,
    drop_reason,
    end_time_ns,
    leave_stage,
    record_end,
    stop_decision,
)
from ashl.topology.local_work import WorkerState, unmerged_steps

SNAPSHOT, BYE = 5, 6  # further signals, in addition to NEXT, STOP and PAUSE


class Report(NamedTuple):
    """Work that a worker has merged."""

    steps: float
    samples: float
    loss: float
    staleness: float  # merges into its model while it computed


class Signal(NamedTuple):
    """Message from the coordinator to a worker."""

    signal: float  # NEXT, STOP, PAUSE, SNAPSHOT or BYE
    tick: float = 0.0  # number of the evaluation, with SNAPSHOT
    end_ns: float = 0.0  # end of the stage, with BYE


NO_DONOR = -1


class Member(NamedTuple):
    """Report of a member of a new epoch."""

    has_model: float  # 0 for a joining worker
    index: float  # stage of its safe point; beyond the last stage once it has ended
    rounds: float  # merges that its model contains
    steps: float  # steps that its model contains
    origin: float  # identifies its model: workers with equal numbers have equal models


class EpochReply(NamedTuple):
    """The coordinator's answer, followed by the ranks of the joining workers."""

    index: float  # stage index; beyond the last stage once the run is over
    end_ns: float  # end of the run, if it is over
    donor: float  # the worker that sends its model to the joining workers, or NO_DONOR
    samples: float  # applied so far, of all workers
    rounds: float  # this worker's own rounds, applied or dropped
    steps: float  # steps in these rounds
    tick: float  # number of the last evaluation


@dataclass
class CoordinatorState:
    """State of the coordinator, complete for a checkpoint."""

    progress: Progress
    evaluated: ProgressMark = RUN_START  # the last evaluation
    ticks: int = 0  # evaluations requested so far
    params: Any = None  # always None: it has no model
    assigned: tuple[int, Any] | None = None
    entered: int | None = None  # index of the current stage
    signal: int = GO  # NEXT or STOP once the stage is over, PAUSE before a pause
    reason: str | None = None  # the reason then
    # by worker: steps that the end of the stage drops, which are counted once all have left
    dropped: dict[int, int] = field(default_factory=dict)

    def copy_to_restart(self) -> Self:
        """Return this state: the coordinator continues with its counts as they are."""
        return self

    def uncounted_steps(self, worker: int) -> int:
        """Return the steps that this worker has reported and that are not counted yet."""
        return 0

    def begin_epoch(self, failed: set[int], origins: Mapping[int, int]) -> None:
        """Prepare for an epoch in which the workers in `failed` are no members.

        Args: origins: of each member's model, see `Member.origin`.
        """

    def enter(self, stage: StageConfig, now_s: float) -> None:
        """Enter a stage, unless the state is that of a pause within it."""
        if self.entered != stage.index:
            self.entered = stage.index
            self.end_pass()
            self.progress.begin(now_s)

    def end_pass(self) -> None:
        """Reset what belongs to one pass of a loop, before this state is saved."""
        self.signal = GO
        self.reason = None

    def drop(self, worker: int, steps: int) -> None:
        """Drop reported work of a worker, because the stage has ended."""
        self.dropped[worker] = self.dropped.get(worker, 0) + steps

    def count_dropped(self) -> None:
        """Count the work that the end of the stage drops."""
        for worker, steps in sorted(self.dropped.items()):
            self.progress.count_dropped(worker, steps, drop_reason(self.signal))
        self.dropped = {}


@dataclass
class ReplicaState(WorkerState):
    """State of a worker with a model of its own, in a run with a coordinator."""

    origin: int = -1  # number of its model, see `Member.origin`


@dataclass
class RoamingState(ReplicaState):
    """State of an asynchronous worker. `version` counts the merges into its model."""

    signal: int = GO  # NEXT or STOP, once the coordinator has sent it
    end_ns: int = 0
    reported: bool = False  # True while a report has no answer yet
    may_leave: bool = False  # True once it may leave
    asked: int | None = None  # the worker whose answer is still in flight

    @property
    def keeps_steps(self) -> bool:
        """Return True if an epoch waits for the step in progress. A single step is computed again,
        so that fast workers do not wait for a slow one.
        """
        return self.pending is None and self.local_steps > 1

    def begin_epoch(self) -> None:
        """Begin again on the members' graph, without messages in flight."""
        self.end_pass()
        self.rule_state = None

    def enter(self, stage: StageConfig, members: Members, rank: int) -> None:
        """Enter a stage, unless the state is that of a pause within it."""
        if self.entered != stage.index:
            self.end_pass()
        super().enter(stage, members, rank)

    def end_pass(self) -> None:
        self.signal = GO
        self.reported = False
        self.may_leave = False
        self.asked = None


async def coordinator(ctx: RankContext, stage: StageConfig, state: CoordinatorState) -> int:
    """Run the coordinator: count and decide until the stage ends, then let all workers leave.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    progress = state.progress
    state.enter(stage, ctx.now)
    reported, deadline_s = stage.tag("report"), stage.stop_criteria.deadline_s
    # the last reports before a pause may have reached a limit
    if reason := stage.stop_criteria.end_reason(progress):
        state.signal, state.reason = STOP, reason
    while state.signal == GO:
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(reported, before_s=deadline_s)
        ctx.time_accounting.fold_if_many()
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            break
        count_report(progress, message)
        await ctx.send(message.src, stage.tag("go"), None, (progress.samples,))
        if stage.stop_criteria.begin_due_evaluation(state, ctx.now):
            await ask_snapshots(ctx, stage, state)
        state.signal, state.reason = stop_decision(ctx, stage, progress)
    if state.signal == STOP:
        ctx.safe_point(stage.index, state)
    await finish_stage(ctx, stage, state)
    return state.signal


def count_report(progress: Progress, message: Message) -> None:
    """Count work that a worker has merged."""
    report = Report(*message.meta)
    progress.observe(message.src, int(report.staleness), report.loss)
    progress.commit(message.src, int(report.steps), int(report.samples))
    progress.merge()


async def ask_snapshots(ctx: RankContext, stage: StageConfig, state: CoordinatorState) -> None:
    """Ask every worker for a snapshot, and emit the counts that belong to it."""
    state.ticks += 1
    await broadcast_signal(ctx, stage, Signal(SNAPSHOT, state.ticks))
    progress = state.progress
    ctx.snapshot(None, tick=state.ticks, counts=progress.report(), without=progress.failed)


async def broadcast_signal(ctx: RankContext, stage: StageConfig, signal: Signal) -> None:
    """Send a signal to all workers."""
    for rank in ctx.members.ranks:
        await ctx.send(rank, stage.tag("signal"), None, signal)


async def finish_stage(ctx: RankContext, stage: StageConfig, state: CoordinatorState) -> None:
    """End the stage or let all pause: signal all workers, wait until all are done, let them leave.

    NEXT: the stage ends when the last worker is done. STOP: it has ended already. Work that is
    still reported was merged before its worker received the signal. It is part of a model, so it
    counts.
    """
    progress, signal = state.progress, state.signal
    progress.end_ns = decide_end(ctx, stage, signal)
    await broadcast_signal(ctx, stage, Signal(signal))
    working = set(ctx.members.ranks)
    while working:
        message = await ctx.recv(stage.tag("report"), stage.tag("done"))
        if message.tag[0] == "done":
            state.drop(message.src, int(message.meta[0]))
            working.discard(message.src)
        else:
            count_report(progress, message)
            await ctx.send(message.src, stage.tag("go"), None, (progress.samples,))
    if signal == NEXT:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
    state.count_dropped()
    await broadcast_signal(ctx, stage, Signal(BYE, end_ns=progress.end_ns))
    if signal == PAUSE:
        return
    record_end(ctx, stage, progress, state.reason)
    if signal == STOP:
        ctx.time_accounting.close(progress.end_ns)


def apply_signal(ctx: RankContext, state: RoamingState, message: Message) -> bool:
    """Handle a signal at a worker. Returns: True if the worker may leave."""
    signal = Signal(*message.meta)
    if signal.signal == SNAPSHOT:
        ctx.snapshot(state.params, tick=int(signal.tick))
    elif signal.signal == BYE:
        state.end_ns = int(signal.end_ns)
        state.may_leave = True
    else:
        state.signal = int(signal.signal)
    return state.may_leave


async def report_merge(
    ctx: RankContext, stage: StageConfig, state: RoamingState, work: Any, staleness: int
) -> None:
    """Report work that is part of the worker's model now, and close the round."""
    state.reported = True
    await ctx.send(
        stage.server,
        stage.tag("report"),
        None,
        Report(work.steps, work.samples, work.loss, staleness),
    )
    ctx.record_round(stage.index, state.round, work.steps, staleness, dropped=False, loss=work.loss)
    state.round += 1


async def await_answer(ctx: RankContext, stage: StageConfig, state: RoamingState) -> None:
    """Wait for the answer to the last report, if it has not arrived."""
    if state.reported:
        message = await ctx.recv(stage.tag("go"), src=stage.server)
        state.samples = int(message.meta[0])
        state.reported = False


async def report_done(
    ctx: RankContext, stage: StageConfig, state: RoamingState, dropped: int
) -> None:
    """Report that this worker begins no more work."""
    await await_answer(ctx, stage, state)
    await ctx.send(stage.server, stage.tag("done"), None, (dropped,))


def close_worker(ctx: RankContext, stage: StageConfig, state: RoamingState, dropped: int) -> int:
    """Close the time accounting of a worker that may leave, and record its dropped steps.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    signal = leave_stage(ctx, stage, state.signal, state.end_ns)
    if signal == STOP:
        ctx.record_round(stage.index, state.round, dropped, 0, dropped=True, loss=None)
        state.round += 1
    return signal


def epoch_tag(name: str, epoch: Epoch) -> Tag:
    return name, 0, epoch.number


async def gather_members(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    saved: tuple[int, Any] | None,
    epoch: Epoch,
) -> tuple[int, CoordinatorState]:
    """Bring the members of a new epoch together, as the coordinator.

    Args: as of `rejoin_members`.
    Returns: (stage, state) to continue with.
    """
    index, state = saved or (0, stages[0].topology.begin(stages[0], ctx.rank))
    progress, everyone = state.progress, range(stages[0].num_workers)
    found = dict[int, Member]()
    for rank in epoch.workers:
        message = await ctx.recv(epoch_tag("member", epoch), src=rank)
        found[rank] = Member(*message.meta)
    donor = min((rank for rank in found if found[rank].has_model), default=NO_DONOR)
    if index < len(stages) and state.signal == STOP:  # the end is decided
        count_members(stages, index, state, found)
        record_end(ctx, stages[index], progress, state.reason)
        index = len(stages)
    if state.signal == PAUSE:
        state.end_pass()
    if index < len(stages):
        count_members(stages, index, state, found)
        origins = {
            rank: int((member if member.has_model else found.get(donor, member)).origin)
            for rank, member in found.items()
        }
        state.begin_epoch({*everyone}.difference(found), origins)
    else:
        ctx.time_accounting.close(progress.end_ns)
    joining = [rank for rank in found if not found[rank].has_model]
    for rank in found:
        counted = progress.rounds_and_steps_of(rank)
        reply = EpochReply(index, progress.end_ns, donor, progress.samples, *counted, state.ticks)
        await ctx.send(rank, epoch_tag("epoch", epoch), None, (*reply, *joining))
    return index, state


def count_members(
    stages: Sequence[StageConfig], index: int, state: CoordinatorState, found: Mapping[int, Member]
) -> None:
    """Count what each member's model contains; afterwards all members have equal clocks.

    Steps of failed workers that are reported and not counted are dropped. If the run is over,
    members do not repeat the work that their models lack, so it is dropped, too.
    """
    progress, over = state.progress, state.signal == STOP
    working = {
        rank: member
        for rank, member in found.items()
        if member.has_model and member.index < len(stages)
    }
    before = sum(progress.commits)
    for rank in {*range(progress.num_workers)}.difference(progress.failed, found):
        progress.remove_worker(rank)
        progress.count_dropped(rank, state.uncounted_steps(rank), FAILURE)
    for rank, member in working.items():
        rounds, steps = progress.rounds_and_steps_of(rank)
        more = int(member.steps) - steps
        samples = more * stages[index].worker(rank).batch
        progress.subtract_rounds(rank, rounds - int(member.rounds), -more, -samples)
        progress.remove_worker(rank)
        if over:
            progress.count_dropped(rank, max(0, state.uncounted_steps(rank) - more), RUN_END)
    progress.version += sum(progress.commits) - before
    state.count_dropped()
    for rank in found:
        progress.join(rank)


async def rejoin_members(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    saved: tuple[int, Any] | None,
    epoch: Epoch,
) -> tuple[int, Any, EpochReply]:
    """Continue as a member of a new epoch, as a worker.

    Args: saved: (stage, state) of its last safe point; None for a joining worker.
    Returns: (stage, state) to continue with, and the coordinator's answer.
    """
    index, state = saved or (0, stages[0].topology.begin(stages[0], ctx.rank))
    merged = state.step - unmerged_steps(state)
    report = Member(saved is not None, index, state.round, merged, state.origin)
    await ctx.send(stages[0].server, epoch_tag("member", epoch), None, report)
    message = await ctx.recv(epoch_tag("epoch", epoch), src=stages[0].server)
    size = len(EpochReply._fields)
    reply, joining = EpochReply(*message.meta[:size]), message.meta[size:]
    model = epoch_tag("model", epoch)
    if ctx.rank == reply.donor:
        for rank in joining:
            await ctx.send(int(rank), model, state.params)
    elif saved is None and reply.donor != NO_DONOR:
        state.params = (await ctx.recv(model, src=int(reply.donor))).payload
    index = int(reply.index)
    state.samples = int(reply.samples)
    if index >= len(stages):
        ctx.time_accounting.close(int(reply.end_ns))
    elif saved is None:
        stage = stages[index]
        members = shared_members(ctx, stage, epoch.workers, epoch.number)
        state.enter(stage, members, ctx.rank)
        state.round, state.step = int(reply.rounds), int(reply.steps)
        state.drawn = state.step * state.batch
    return index, state, reply

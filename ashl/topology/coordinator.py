"""Coordinator: the thin rank n of methods that have no server and whose workers do not go in step.

It holds no model and sees none. All that reaches it or comes from it is a header, which costs no
bytes: it counts, it judges when a stage is over and when models are evaluated, and it lets workers
leave only when nobody needs them any longer. A worker's side of the protocol, with tags of the
stage and iteration 0:

    "report" →   a `Report`, after each piece of work that has become part of the worker's model
    ← "go"       the answer, with the samples that the learning rate follows; a worker waits for it
                 (`answered`) before
                 it merges its next piece of work, so that nobody runs ahead of the judge by more
                 than one
    ← "word"     a `Word`. SNAPSHOT: hand in a snapshot, with this tick. NEXT or STOP, to all: start
                 nothing more
    "done"   →   the steps that were thrown away: I start nothing more, but go on answering my peers
    ← "word"     BYE: all are done, so nobody will ask anything any more; now the worker may leave

On processes, every worker resumes from a checkpoint with its own model. It sends what that model
contains ("resume"), and the coordinator counts that, as messages in flight are not in the
checkpoint, and answers ("resumed").

Under STOP, work that is under way is thrown away; under NEXT, it is still merged and reported. A
worker takes in words in a task of its own (`obey`), or where it receives anyway. A method that
needs more of its coordinator (a group generator, say) has its own loop around `stop_decision`.

Source: the drained end as in Luo et al., "Prague", ASPLOS 2020, where a worker leaves once no group
expects it.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.stage.progress import RUN_START, Progress, ProgressMark
from ashl.stage.stage import GO, NEXT, STOP, Stage
from ashl.topology.ending import drop_reason, end_time_ns, leave_stage, record_end, stop_decision
from ashl.topology.local_work import WorkerState

SNAPSHOT, BYE = 3, 4  # beside NEXT and STOP
CheckpointKind = Literal[
    "", "each", "round"
]  # in no way; each when it hears of it; all at the begin of one round


class Report(NamedTuple):
    """What a worker has merged."""

    steps: float
    samples: float
    loss: float
    staleness: float  # merges of its own model that happened while it computed


class Signal(NamedTuple):
    """What the coordinator says."""

    signal: float
    tick: float = 0.0  # of the evaluation, with SNAPSHOT
    end_ns: float = 0.0  # of the stage, with BYE


class Resumed(NamedTuple):
    """What a worker has done that resumes from a checkpoint."""

    rounds: float  # merges that its model contains
    steps: float  # steps that it has taken


@dataclass
class CoordinatorState:
    """All that the coordinator needs to go on."""

    progress: Progress
    evaluated: ProgressMark = RUN_START  # the last evaluation
    ticks: int = 0  # evaluations asked for so far
    params: Any = None  # it has no model
    assigned: tuple[int, Any] | None = None
    entered: int | None = None  # the stage that it is in

    @property
    def version(self) -> int:
        """How often the foremost worker has merged."""
        return max(self.progress.commits)

    def enter(self, stage: Stage, now_s: float) -> None:
        if self.entered != stage.index:  # else it goes on from a checkpoint
            self.entered = stage.index
            self.progress.begin(now_s)


@dataclass
class RoamingState(WorkerState):
    """A worker that goes at its own pace. `version` counts the merges of its model."""

    signal: int = GO  # NEXT or STOP once the coordinator has said so
    end_ns: int = 0
    reported: bool = False  # and not answered yet
    gone: bool = False  # the coordinator has let it go
    asked: int | None = None  # whose answer is still to come
    # changes with each checkpoint that has it: those of one cut may exchange what each has only
    # once
    cut: int = 0

    def enter(self, stage: Stage, rank: int) -> None:
        if self.entered != stage.index:  # else it goes on from a checkpoint
            self.signal, self.reported, self.gone, self.asked = GO, False, False, None
        super().enter(stage, rank)


async def coordinator(ctx: RankContext, stage: Stage, state: CoordinatorState) -> int:
    """Count and judge until the stage is over, then let everybody leave; returns the last word."""
    progress = state.progress
    state.enter(stage, ctx.now)
    signal, reason = GO, None
    reported, deadline_s = stage.tag("report"), stage.stop_criteria.deadline_s
    while signal == GO:
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(reported, before_s=deadline_s)
        # nobody asks for the coordinator's rounds, so they are not kept
        ctx.time_accounting.end_round()
        if message is None:
            signal, reason = STOP, "seconds"
            break
        count_report(progress, message)
        await ctx.send(message.src, stage.tag("go"), None, (progress.samples,))
        if stage.stop_criteria.take_evaluation(state, ctx.now):
            await ask_snapshots(ctx, stage, state)
        signal, reason = stop_decision(ctx, stage, progress)
    if signal == STOP:
        ctx.safe_point(stage.index, None)
    await finish_stage(ctx, stage, state, signal, reason)
    return signal


def count_report(progress: Progress, message: Message) -> None:
    """Count what a worker has merged."""
    report = Report(*message.meta)
    progress.observe(message.src, int(report.staleness), report.loss)
    progress.commit(message.src, int(report.steps), int(report.samples))
    progress.merge()


async def ask_snapshots(ctx: RankContext, stage: Stage, state: CoordinatorState) -> None:
    """Ask every worker for a snapshot, and hand in the counts that belong to them."""
    state.ticks += 1
    await broadcast_signal(ctx, stage, Signal(SNAPSHOT, state.ticks))
    ctx.snapshot(None, tick=state.ticks, counts=state.progress.report())


async def broadcast_signal(ctx: RankContext, stage: Stage, signal: Signal) -> None:
    """Send a word to all workers."""
    for rank in stage.workers:
        await ctx.send(rank, stage.tag("signal"), None, signal)


async def finish_stage(
    ctx: RankContext, stage: Stage, state: CoordinatorState, signal: int, reason: str | None
) -> None:
    """The stage is over: tell all, wait until all are done, let them go. At a border (NEXT) it ends
    when the last one is done. At the end of the run it has ended now; what is still reported was
    merged before its worker had heard of that, in virtual time at this very moment, and counts,
    since it is part of a model.
    """
    progress = state.progress
    progress.end_ns = end_time_ns(stage, ctx.now_ns)
    await broadcast_signal(ctx, stage, Signal(signal))
    working = set(stage.workers)
    while working:
        message = await ctx.recv(stage.tag("report"), stage.tag("done"))
        if message.tag[0] == "done":
            progress.count_dropped(message.src, int(message.meta[0]), drop_reason(signal))
            working.discard(message.src)
        else:
            count_report(progress, message)
            await ctx.send(message.src, stage.tag("go"), None, (progress.samples,))
    if signal == NEXT:
        progress.end_ns = end_time_ns(stage, ctx.now_ns)
    await broadcast_signal(ctx, stage, Signal(BYE, end_ns=progress.end_ns))
    record_end(ctx, stage, progress, reason)
    if signal == STOP:
        ctx.time_accounting.close_at(progress.end_ns)


def apply_signal(ctx: RankContext, state: RoamingState, message: Message) -> bool:
    """A worker takes in a word; returns whether it may leave."""
    signal = Signal(*message.meta)
    if signal.signal == SNAPSHOT:
        ctx.snapshot(state.params, tick=int(signal.tick))
    elif signal.signal == BYE:
        state.end_ns, state.gone = int(signal.end_ns), True
    else:
        state.signal = int(signal.signal)
    return state.gone


async def report_merge(
    ctx: RankContext, stage: Stage, state: RoamingState, work: Any, staleness: int
) -> None:
    """This work is part of the worker's model now: tell the coordinator, and close the round."""
    state.reported = True
    await ctx.send(
        stage.server,
        stage.tag("report"),
        None,
        Report(work.steps, work.samples, work.loss, staleness),
    )
    ctx.record_round(stage.index, state.round, work.steps, staleness, dropped=False, loss=work.loss)
    state.round += 1


async def await_answer(ctx: RankContext, stage: Stage, state: RoamingState) -> None:
    """Wait for the answer to the last report, if it is still to come."""
    if state.reported:
        message = await ctx.recv(stage.tag("go"), src=stage.server)
        state.samples, state.reported = int(message.meta[0]), False


async def report_done(ctx: RankContext, stage: Stage, state: RoamingState, dropped: int) -> None:
    """This worker starts nothing more."""
    await await_answer(ctx, stage, state)
    await ctx.send(stage.server, stage.tag("done"), None, (dropped,))


def close_worker(ctx: RankContext, stage: Stage, state: RoamingState, dropped: int) -> int:
    """Close the books of a worker that may leave, its last steps thrown away; returns the last
    word.
    """
    signal = leave_stage(ctx, stage, state.signal, state.end_ns)
    if signal == STOP:
        ctx.record_round(stage.index, state.round, dropped, 0, dropped=True, loss=None)
        state.round += 1
    return signal


async def gather_workers(ctx: RankContext, stage: Stage, state: CoordinatorState) -> None:
    """Resume from a checkpoint: count what each worker's model contains. All workers are level from
    here on.
    """
    progress, resumed = state.progress, dict[int, Resumed]()
    before = sum(progress.commits)
    while len(resumed) < stage.num_workers:
        message = await ctx.recv(stage.tag("resume"))
        resumed[message.src] = Resumed(*message.meta)
    for rank, done in sorted(resumed.items()):
        rounds, steps = progress.rounds_and_steps_of(rank)
        more = int(done.steps) - steps
        progress.take_back(rank, rounds - int(done.rounds), -more, -more * stage.worker(rank).batch)
        progress.remove_worker(rank)
    progress.version += sum(progress.commits) - before
    for rank in sorted(resumed):
        progress.join(rank)
        await ctx.send(rank, stage.tag("resumed"), None, (progress.samples,))


async def resume_worker(ctx: RankContext, stage: Stage, state: RoamingState) -> None:
    """Resume from a checkpoint: tell the coordinator what this worker's model contains."""
    await ctx.send(stage.server, stage.tag("resume"), None, Resumed(state.round, state.step))
    message = await ctx.recv(stage.tag("resumed"), src=stage.server)
    state.samples, state.reported = int(message.meta[0]), False

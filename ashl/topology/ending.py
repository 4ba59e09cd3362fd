"""Ends of stages, for every topology. The final signal reaches all ranks in one of two ways.

Decided by the coordinator: a server, a coordinator or a group generator answers the workers. It
alone counts and decides (`stop_decision`), and sends the signal with its answers.

Piggybacked: no rank answers. All ranks count identically. Rank 0 alone knows seconds, evaluations
and interrupts; it adds a number to the next exchange (`local_stop`), so all ranks read the same
reason from the same exchange.

NEXT: another stage follows, and work in flight is merged. STOP: the run is over, and work in flight
is dropped. PAUSE: a checkpoint is due. Every rank ends its loop with nothing in flight and all its
work in its state. It is saved, and begins the loop of the same stage again. No rank pauses before a
round that a stop limit truncates, because a resumed run may have another limit.

`stop.seconds` is a budget: records end at that time, and nothing later counts. A coordinator ends
in time. With a piggybacked signal, merges continue until all ranks have read it. A rank that sees a
merge after the budget keeps the state before that merge (`keep_within_budget`), and the run ends
with it (`within_budget`).
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ashl.plan.plan import PATIENCE, TARGETS
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import RunEnding, StageBoundary, StageEnd
from ashl.stage.contract import GO, NEXT, PAUSE, STOP, StageConfig
from ashl.stage.progress import RUN_END, STAGE_END, Progress, RunProgress

CHECKPOINT = "checkpoint"
# reasons that rank 0 piggybacks on the next exchange by their position: the end of the run, the end
# of the stage ("next"), or a checkpoint
REASONS = (None, "seconds", *TARGETS, PATIENCE, "interrupted", "next", CHECKPOINT)


class InTime(NamedTuple):
    """The model and the counts of the last merge that ended within the budget."""

    params: Any
    progress: Any


class Budgeted(Protocol):
    """State of a rank that reads the final signal from an exchange."""

    params: Any
    progress: Any
    in_time: InTime | None


def keep_within_budget(
    ctx: RankContext,
    stage: StageConfig,
    state: Budgeted,
    params: Any,
    progress: Any = None,
    now_ns: int | None = None,
) -> bool:
    """Save the state before the first merge that ends after the budget (piggybacked signals).

    Args: params, progress: model and counts before the merge; None: `state.progress` does not count
    it yet. now_ns: time of the merge, None for now.
    Returns: True if this merge, or an earlier one, ended after the budget.
    """
    if (
        state.in_time is None
        and (ctx.now_ns if now_ns is None else now_ns) > stage.stop_criteria.deadline_ns
    ):
        progress = progress or state.progress
        # other ranks only read their progress, so a reference will do
        counts = (
            ctx.rank == ctx.members.lead_rank or stage.elastic or not isinstance(progress, Progress)
        )
        state.in_time = InTime(params, progress.copy() if counts else progress)
    return state.in_time is not None


def within_budget(ctx: RankContext, stage: StageConfig, state: Budgeted, reason: str) -> str:
    """Restore the state of the last merge within the budget, and drop later work (piggybacked
    signals).

    Returns: the reason of the end, which is "seconds" if later work was dropped.
    """
    if state.in_time is None:
        return reason
    late = state.progress
    state.params, state.progress = state.in_time
    if ctx.rank == ctx.members.lead_rank:
        for rank in ctx.members.ranks:
            state.progress.count_dropped(
                rank, late.steps_by[rank] - state.progress.steps_by[rank], RUN_END
            )
    return "seconds"


def drop_reason(signal: int) -> str:
    """Return the reason under which steps in flight are dropped when a stage ends with
    this signal.
    """
    return STAGE_END if signal == NEXT else RUN_END


def end_time_ns(stage: StageConfig, now_ns: int) -> int:
    """Return the end time of a stage that ends now: at most the end of the budget."""
    return int(min(now_ns, stage.stop_criteria.deadline_ns))


def decide_end(ctx: RankContext, stage: StageConfig, signal: int) -> int:
    """Return the end time of a stage that a coordinator ends now with this signal.

    The evaluator receives the end of the run before the models that ranks send until they know it.
    """
    end_ns = end_time_ns(stage, ctx.now_ns)
    if signal == STOP:
        ctx.emit(RunEnding(ctx.rank, end_ns))
    return end_ns


def stop_decision(
    ctx: RankContext, stage: StageConfig, progress: RunProgress
) -> tuple[int, str | None]:
    """Decide for all workers. Returns: (GO, NEXT, STOP or PAUSE; the reason or None)."""
    if reason := stage.stop_criteria.end_reason(progress) or ctx.stop_reason:
        return STOP, reason
    if stage.plan.until and (
        rule := stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores)
    ):
        return (NEXT if stage.following else STOP), rule
    return (PAUSE, CHECKPOINT) if ctx.is_checkpoint_due else (GO, None)


def local_stop(ctx: RankContext, stage: StageConfig, progress: RunProgress) -> str | None:
    """Return the reason that rank 0 adds to the next exchange, or None."""
    if reason := ctx.stop_reason or (
        "seconds" if ctx.now >= stage.stop_criteria.deadline_s else None
    ):
        return reason
    if stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores):
        return "next"
    return CHECKPOINT if ctx.is_checkpoint_due else None


def take_override(present: int, decided: int) -> bool:
    """Return True if a coordinator replaces its present signal by the one that it has decided on
    now: the end of the run wins, then the end of the stage, then a pause.
    """
    return decided == STOP or present == GO or (present == PAUSE and decided == NEXT)


def update_signal(ctx: RankContext, stage: StageConfig, state: Any) -> None:
    """Set a coordinator's signal and its reason."""
    signal, reason = stop_decision(ctx, stage, state.progress)
    if take_override(state.signal, signal):
        state.signal, state.reason = signal, reason


def record_end(
    ctx: RankContext, stage: StageConfig, progress: Progress, reason: str | None
) -> None:
    """Record at the lead rank how the stage ended, with the progress until then."""
    ctx.emit(
        StageEnd(ctx.rank, stage.index, stage.plan.name, reason, progress.end_ns, progress.report())
    )


def end_piggybacked(
    ctx: RankContext, stage: StageConfig, state: Budgeted, reason: str, now_ns: int
) -> int:
    """End this rank's stage at `now_ns`. Returns: the final signal, NEXT, STOP or PAUSE.

    If a rule ended the stage, the lead rank records the name of that rule.
    """
    if reason == CHECKPOINT:
        return PAUSE
    signal = NEXT if reason == "next" and stage.following else STOP
    if signal == STOP:
        reason = within_budget(ctx, stage, state, reason)
    progress = state.progress = replace(state.progress, end_ns=end_time_ns(stage, now_ns))
    if ctx.rank == ctx.members.lead_rank:
        if reason == "next":
            rule = stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores)
            reason = rule or next(iter(stage.plan.until), reason)
        # later stages end after the budget, too, so the run goes back to this state
        late = signal == NEXT and state.in_time
        counted = replace(state.in_time.progress, end_ns=progress.end_ns) if late else progress
        record_end(ctx, stage, counted, reason)
    return leave_stage(ctx, stage, signal, progress.end_ns)


def leave_stage(ctx: RankContext, stage: StageConfig, signal: int, end_ns: int) -> int:
    """Close a rank's time accounting of a stage that ended at `end_ns`. Returns: the signal."""
    if signal == NEXT:
        ctx.emit(StageBoundary(ctx.rank, stage.index, ctx.time_accounting.totals_until(end_ns)))
    elif signal != PAUSE:
        ctx.time_accounting.close(end_ns)
    return signal

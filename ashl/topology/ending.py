"""End a stage or the run, or pause it for a checkpoint, on every topology.

One rank decides, and its signal reaches all ranks in one of two ways.

By a coordinator: a server, a coordinator or a group generator answers the workers. It alone counts
and decides (`stop_decision`), and sends the signal with its answers.

Piggybacked: no rank answers. All ranks count identically, so each sees that a limit on counts is
reached. Only the lead rank (rank 0 until it fails) judges time, evaluations and interrupts. It
adds its reason as a number to the next exchange (`local_stop`), and all ranks read it there.

| signal | meaning | work in flight |
| --- | --- | --- |
| NEXT | another stage follows | is merged |
| STOP | the run is over | is dropped; gossip in rounds merges it |
| PAUSE | a checkpoint is due | is received, and is in the saved states |

After a pause every rank begins the loop of the same stage again. No rank pauses before a round that
a stop limit truncates, because a resumed run may have another limit.

`stop.seconds` is a budget: records end at that time, and no later merge counts. A coordinator stops
at that time. With a piggybacked signal, merges continue until all ranks have read it. So a rank
saves its state before the first merge after the budget (`save_within_budget`), and the run ends
with this state (`restore_within_budget`).
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ashl.plan.plan import PATIENCE, TARGETS
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import RunEnding, StageBoundary, StageEnd
from ashl.stage.contract import GO, NEXT, PAUSE, STOP, StageConfig
from ashl.stage.progress import RUN_END, STAGE_END, Progress, RunProgress

CHECKPOINT = "checkpoint"
# reasons that the lead rank piggybacks by their position: none, an end of the run, the end of the
# stage ("next"), or a checkpoint
REASONS = (None, "seconds", *TARGETS, PATIENCE, "interrupted", "next", CHECKPOINT)


class StateWithinBudget(NamedTuple):
    """The model and the counts of the last merge that ended within the budget."""

    params: Any
    progress: Any


class Budgeted(Protocol):
    """State of a rank that reads the final signal from an exchange."""

    params: Any
    progress: Any
    in_time: StateWithinBudget | None  # None until a merge ends after the budget


def save_within_budget(
    ctx: RankContext,
    stage: StageConfig,
    state: Budgeted,
    params: Any,
    progress: Any = None,
    now_ns: int | None = None,
) -> bool:
    """Save the state before a merge, if it is the first one that ends after the budget.

    Args: params, progress: model and counts before the merge; progress=None means `state.progress`,
    if it does not count the merge yet. now_ns: time of the merge, None for now.
    Returns: True if this merge, or an earlier one, ended after the budget.
    """
    if (
        state.in_time is None
        and (ctx.now_ns if now_ns is None else now_ns) > stage.stop_criteria.deadline_ns
    ):
        progress = progress or state.progress
        # The other ranks of an all-reduce share a `Progress` that is never changed: they need no
        # copy. Gossip changes counts in place, and the lead rank adds dropped steps to them.
        changes = (
            ctx.rank == ctx.members.lead_rank or stage.elastic or not isinstance(progress, Progress)
        )
        state.in_time = StateWithinBudget(params, progress.copy() if changes else progress)
    return state.in_time is not None


def restore_within_budget(ctx: RankContext, state: Budgeted, reason: str) -> str:
    """Restore the state of the last merge within the budget, and count later steps as dropped.

    Returns: the reason of the end, which is "seconds" if a state was restored.
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
    """Return the reason that is recorded for steps that a stage drops at its end."""
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
    """Return the decision of a coordinator: GO, NEXT, STOP or PAUSE, and its reason or None."""
    if reason := stage.stop_criteria.end_reason(progress) or ctx.stop_reason:
        return STOP, reason
    if stage.plan.until and (
        rule := stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores)
    ):
        return (NEXT if stage.following else STOP), rule
    return (PAUSE, CHECKPOINT) if ctx.is_checkpoint_due else (GO, None)


def local_stop(ctx: RankContext, stage: StageConfig, progress: RunProgress) -> str | None:
    """Return the reason that the lead rank adds to the next exchange, or None."""
    if reason := ctx.stop_reason or (
        "seconds" if ctx.now >= stage.stop_criteria.deadline_s else None
    ):
        return reason
    if stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores):
        return "next"
    return CHECKPOINT if ctx.is_checkpoint_due else None


def overrides(decided: int, present: int) -> bool:
    """Return True if a new decision replaces the present signal of a coordinator: the end of the
    run comes first, then the end of the stage, then a pause.
    """
    return decided == STOP or present == GO or (present == PAUSE and decided == NEXT)


def update_signal(ctx: RankContext, stage: StageConfig, state: Any) -> None:
    """Decide, and set a coordinator's signal and reason unless the present signal stands."""
    signal, reason = stop_decision(ctx, stage, state.progress)
    if overrides(signal, state.signal):
        state.signal, state.reason = signal, reason


def record_end(
    ctx: RankContext, stage: StageConfig, progress: Progress, reason: str | None
) -> None:
    """Record how the stage ended, and the progress until then; one rank of the run calls this."""
    ctx.emit(
        StageEnd(ctx.rank, stage.index, stage.plan.name, reason, progress.end_ns, progress.report())
    )


def end_piggybacked(
    ctx: RankContext, stage: StageConfig, state: Budgeted, reason: str, now_ns: int
) -> int:
    """End this rank's stage at `now_ns` for a piggybacked reason, or pause it.

    For the reason "next" the lead rank records the rule of the stage that applied.
    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    if reason == CHECKPOINT:
        return PAUSE
    signal = NEXT if reason == "next" and stage.following else STOP
    if signal == STOP:
        reason = restore_within_budget(ctx, state, reason)
    progress = state.progress = replace(state.progress, end_ns=end_time_ns(stage, now_ns))
    if ctx.rank == ctx.members.lead_rank:
        if reason == "next":
            rule = stage.stop_criteria.stage_end_reason(progress, ctx.now, ctx.scores)
            reason = rule or next(iter(stage.plan.until), reason)
        # merges after the budget count for no stage; the last stage restores the state
        saved = state.in_time if signal == NEXT else None
        counted = progress if saved is None else replace(saved.progress, end_ns=progress.end_ns)
        record_end(ctx, stage, counted, reason)
    return leave_stage(ctx, stage, signal, progress.end_ns)


def leave_stage(ctx: RankContext, stage: StageConfig, signal: int, end_ns: int) -> int:
    """Close a rank's time accounting of a stage that ended at `end_ns`. Returns: the signal."""
    if signal == NEXT:
        ctx.emit(StageBoundary(ctx.rank, stage.index, ctx.time_accounting.totals_until(end_ns)))
    elif signal != PAUSE:
        ctx.time_accounting.close(end_ns)
    return signal

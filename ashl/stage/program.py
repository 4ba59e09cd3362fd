"""Run one rank through the stages of a plan, in order, with its state carried from stage to
stage.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ashl.planner.assignment import assignment_of
from ashl.runtime.rank_context import RankContext
from ashl.stage.stage import STOP, Loop, Stage


async def program(
    ctx: RankContext,
    stages: Sequence[Stage],
    saved: tuple[int, Any] | None = None,
    joins: bool = False,
) -> None:
    """Run this rank's role in every stage, until a stage ends the run.

    Args: `saved`, (stage, state) of a checkpoint from which to resume. `joins`, True for a worker
    that joins while others run: it begins in their stage, or from a checkpoint in the stage of the
    checkpoint.
    """
    first = stages[0]
    ctx.time_accounting.limit_ns = first.stop_criteria.deadline_ns
    if joins and saved is None:
        first.trainer.set_worker_state(ctx.rank, None)
    if joins and (saved := await first.topology.join(ctx, stages, saved)) is None:
        return
    begin, state = saved or (0, first.topology.begin(ctx, first))
    if ctx.rank == first.lead_rank:
        ctx.counter = state
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    for index in range(begin, len(stages)):
        stage = stages[index]
        if await select_loop(stage, ctx.rank)(ctx, stage, state) == STOP:
            break
        if state.assigned is not None and state.assigned[0] == index + 1:
            stages = apply_assignments(stages, *state.assigned)
    if ctx.counter is not None:  # this is the lead rank, or replaces it
        progress, without = state.progress, state.progress.gone if first.replicas else ()
        ctx.snapshot(
            state.params,
            final=True,
            counts=progress.report(),
            time_ns=progress.end_ns,
            without=without,
        )
    elif first.replicas or (first.server < ctx.rank < first.server + first.topology.servers):
        ctx.snapshot(state.params, final=True)


def peers_of(stages: Sequence[Stage], rank: int) -> tuple[int, ...]:
    """Return all ranks with which this rank ever exchanges messages."""
    both = ((stage.topology.links(stage, rank), stage.sync.links(stage, rank)) for stage in stages)
    return tuple(sorted({peer for topology, rule in both for peer in (*topology, *rule)}))


def ranks_to_notify(stages: Sequence[Stage], rank: int) -> tuple[int, ...]:
    """Return all ranks that are notified of a failure of this rank."""
    return tuple(
        sorted(
            {peer for stage in stages for peer in stage.topology.notified_on_failure(stage, rank)}
        )
    )


def select_loop(stage: Stage, rank: int) -> Loop:
    """Return the loop of this rank: the sync mode's own, else the topology's."""
    return stage.sync.loop(stage, rank) or stage.topology.role(stage, rank)


def apply_assignments(stages: Sequence[Stage], first: int, assigned: Tensor) -> list[Stage]:
    """Return the stages, those from `first` on with the assignments that a profiling stage has
    planned.
    """
    rows = assigned.view(len(stages) - first, stages[0].num_workers, 4).tolist()
    after = [
        stage.with_replanned_shards([assignment_of(row) for row in r])
        for stage, r in zip(stages[first:], rows, strict=True)
    ]
    return [*stages[:first], *after]

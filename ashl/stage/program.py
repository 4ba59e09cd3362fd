"""Run one rank through the stages of a plan, in order, with its state carried from stage to
stage.

Epochs: when a worker fails or rejoins, the supervisor of the kernel begins a new epoch. It ends the
program of every rank and starts it again, with the members of the epoch and the rank's last safe
point. `Topology.reform` brings the members together; then the loop of the stage begins. So no loop
mentions failures.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ashl.errors import AshlError
from ashl.plan.plan import assign_work
from ashl.planner.assignment import Assignment, assignment_of
from ashl.runtime.effects import Epoch, PeerFailedError
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import PAUSE, STOP, Loop, StageConfig
from ashl.stage.members import shared_members, survivors
from ashl.stage.progress import RunProgress

AFTER_FINAL_MODEL = 2**31  # index of a stage: beyond the last one, and the final model is sent


async def run_stages(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    saved: tuple[int, Any] | None = None,
    joins: bool = False,
    epoch: Epoch | None = None,
    resumes: bool = False,
) -> None:
    """Run this rank's role in every stage, until a stage ends the run.

    Args: `saved`, (stage, state) to continue with: of a checkpoint, or of the last safe point
    before this epoch. `joins`, True for a worker that joins while others run: it begins in their
    stage. `epoch`, the members since the latest failure or rejoin. `resumes`, True if the members
    of `epoch` had come together before the checkpoint.
    """
    first = stages[0]
    ctx.time_accounting.limit_ns = first.stop_criteria.deadline_ns
    if (joins or epoch) and saved is None and ctx.rank < first.num_workers:
        first.trainer.set_worker_state(ctx.rank, None)
    if epoch is not None and not resumes:
        failed = sorted({*range(first.num_workers)}.difference(epoch.workers))
        check_min_workers(ctx, first, failed, len(epoch.workers))
        saved = await first.topology.reform(ctx, stages, saved, epoch)
    elif joins and (saved := await first.topology.join(ctx, stages)) is None:
        return
    begin, state = saved or (0, first.topology.begin(first, ctx.rank))
    ranks = present_workers(ctx, first, state, epoch)
    ctx.counter = state if ctx.rank == first.lead_of(ranks) else None
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    for index in range(begin, len(stages)):
        stage = stages[index]
        ctx.members = shared_members(ctx, stage, ranks, 0 if epoch is None else epoch.number)
        loop = select_loop(stage, ctx.rank)
        while (signal := await loop(ctx, stage, state)) == PAUSE:
            state.end_pass()
            ctx.mark_pause(stage.index, state)
            await ctx.save(stage.index, state)
        if signal == STOP:
            break
        if state.assigned is not None and state.assigned[0] == index + 1:
            stages = apply_assignments(stages, *state.assigned)
    if begin <= len(stages):
        ctx.safe_point(len(stages), state)
        send_final_model(ctx, first, state)


def present_workers(
    ctx: RankContext, stage: StageConfig, state: Any, epoch: Epoch | None
) -> tuple[int, ...]:
    """Return the workers that take part from now on.

    Without an epoch these are all workers; in a run that resumes after a failure, the survivors.
    """
    is_worker = ctx.rank < stage.num_workers
    if epoch is None:
        resumes = is_worker and isinstance(getattr(state, "progress", None), RunProgress)
        return survivors(stage, state.progress.failed) if resumes else stage.workers
    if is_worker and stage.reshards:
        state.covered_workers = tuple(sorted({*stage.workers}.difference(epoch.workers)))
    return epoch.workers


def send_final_model(ctx: RankContext, first: StageConfig, state: Any) -> None:
    """Send the model of the end of the run to the evaluator, from each rank that has a part of it;
    from now on this rank has nothing left to do.
    """
    if ctx.counter is not None:  # this is the lead rank, or replaces it
        progress, without = state.progress, state.progress.failed if first.replicas else ()
        ctx.snapshot(
            state.params,
            final=True,
            counts=progress.report(),
            time_ns=progress.end_ns,
            without=without,
        )
    elif first.replicas or (first.server < ctx.rank < first.server + first.topology.servers):
        ctx.snapshot(state.params, final=True)
    else:
        return
    ctx.safe_point(AFTER_FINAL_MODEL, state)


def check_min_workers(
    ctx: RankContext, stage: StageConfig, failed: Sequence[int], remaining: int
) -> None:
    """Raise AshlError if fewer than `runtime.min_workers` workers remain.

    In a run that does not tolerate failures, the error names the failure as its `__cause__`.
    """
    if remaining < stage.min_workers:
        raise AshlError(
            f"worker {', '.join(map(str, failed))} failed by {ctx.now:.6g} s and {remaining} of"
            f" {stage.num_workers} workers are running, fewer than"
            f" runtime.min_workers={stage.min_workers}: the run ends here"
        ) from (None if stage.elastic else PeerFailedError(failed[0]))


def peers_of(
    stages: Sequence[StageConfig], rank: int, members: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return all ranks with which this rank ever exchanges messages, while the workers in `members`
    take part; None = all workers. Except with epochs, they are notified of a failure of this rank.
    """
    peers = set[int]()
    for stage in stages:
        if members is None:
            peers.update(stage.topology.links(stage, rank))
        else:
            peers.update(stage.topology.links_among(stage, rank, members))
    return tuple(sorted(peers))


def pairs_of(stages: Sequence[StageConfig], num_ranks: int) -> list[tuple[int, int]]:
    """Return the pairs (lower rank, higher rank) of the first `num_ranks` ranks that ever exchange
    messages, in ascending order.
    """
    return [
        (rank, peer)
        for rank in range(num_ranks)
        for peer in peers_of(stages, rank)
        if rank < peer < num_ranks
    ]


def select_loop(stage: StageConfig, rank: int) -> Loop:
    """Return the loop of this rank: the sync mode's own, else the topology's."""
    return stage.sync.loop(stage, rank) or stage.topology.role(stage, rank)


def apply_assignments(
    stages: Sequence[StageConfig], first: int, assigned: Tensor
) -> list[StageConfig]:
    """Return the stages, those from `first` on with the assignments that a profiling stage has
    planned.
    """
    rows = assigned.view(len(stages) - first, stages[0].num_workers, 4).tolist()
    after = [
        replan_stage(stage, [assignment_of(row) for row in r])
        for stage, r in zip(stages[first:], rows, strict=True)
    ]
    return [*stages[:first], *after]


def replan_stage(stage: StageConfig, rows: Sequence[Assignment]) -> StageConfig:
    """Return a later stage as it is planned during the run, with shards as planned."""
    workers = assign_work(stage.plan.workers, rows)
    trainer = stage.trainer.reshard([worker.data_share for worker in workers])
    return replace(stage, plan=replace(stage.plan, workers=workers), trainer=trainer)

"""The members of a stage, their work and their weights: functions of the stage's configuration.

A stage has three parts. `StageConfig` is chosen before the run and never changes. `Members` are the
workers that take part; a failure or a rejoin changes them. `Assignments` are the work of all
workers in a round; a planner or a sync mode replaces them during the run.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.plan.assignments import Assignments, Members
from ashl.plan.plan import WorkerPlan
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import OF_SHARDS, StageConfig
from ashl.stage.progress import Progress

Remaining = tuple[int, int] | None  # (a, b): a/b rounds remain; None = no count ends the run


def members_of(stage: StageConfig, ranks: Sequence[int] | None = None) -> Members:
    """Return these workers as the members of a stage; None = all of them."""
    ranks = stage.workers if ranks is None else tuple(ranks)
    return Members(ranks, stage.lead_of(ranks), assign(stage, ranks, stage.plan.workers))


def shared_members(
    ctx: RankContext, stage: StageConfig, ranks: tuple[int, ...], epoch: int
) -> Members:
    """Return these workers as the members of a stage; in virtual time, the same object on all
    ranks of an epoch.
    """
    key = "members", stage.index, epoch
    return ctx.compute_once(ranks, key, partial(members_of, stage, ranks))


def survivors(stage: StageConfig, failed: Collection[int]) -> tuple[int, ...]:
    """Return the workers that are not in `failed`."""
    return tuple(rank for rank in stage.workers if rank not in failed) if failed else stage.workers


def assign(
    stage: StageConfig, ranks: Sequence[int], workers: tuple[WorkerPlan, ...]
) -> Assignments:
    """Return the work of all workers as assignments, with the weights of the members `ranks`."""
    workers = redistribute_shares(stage, ranks, workers)
    if stage.keeps_batch:
        planned = [worker.batch for worker in stage.plan.workers]
        workers = with_batches(workers, hold_batch(planned, ranks))
    one_gradient = stage.sync.exchange == "gradient"
    steps = tuple(1 if one_gradient else worker.local_steps for worker in workers)
    batches = [own.batch for own in with_gradient_samples(stage, workers)]
    samples = tuple(count * batch for count, batch in zip(steps, batches, strict=True))
    weights = dict(zip(ranks, member_weights(stage, ranks, workers), strict=True))
    return Assignments(
        workers,
        steps,
        samples,
        sum(steps[rank] for rank in ranks),
        sum(samples[rank] for rank in ranks),
        tuple(weights.get(rank, 0.0) for rank in stage.workers),
    )


def redistribute_shares(
    stage: StageConfig, ranks: Sequence[int], workers: tuple[WorkerPlan, ...]
) -> tuple[WorkerPlan, ...]:
    """Return the workers' plans with the data shares of the members.

    With `runtime.on_worker_failure=reshard` members use the data of failed workers, too.
    """
    if not stage.reshards:
        return workers
    shares = [worker.data_share for worker in stage.plan.workers]
    failed = set(stage.workers).difference(ranks)
    part = sum(shares[rank] for rank in failed) / max(1, len(ranks))
    return tuple(
        replace(worker, data_share=shares[rank] + part * (rank not in failed))
        for rank, worker in enumerate(workers)
    )


def hold_batch(planned: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the batch of each worker; those of the members `ranks` add up to all planned ones.

    Each member takes over samples of the failed workers in proportion to its own batch. Samples
    that do not divide evenly go to the lowest ranks.
    """
    total, of_members = sum(planned), sum(planned[rank] for rank in ranks)
    batches = [*planned]
    for rank in ranks:
        batches[rank] = planned[rank] * total // of_members
    for rank in ranks[: total - sum(batches[rank] for rank in ranks)]:
        batches[rank] += 1
    return batches


def with_local_steps(workers: Iterable[WorkerPlan], steps: Iterable[int]) -> tuple[WorkerPlan, ...]:
    """Return the workers' plans with these local steps, by rank."""
    both = zip(workers, steps, strict=False)
    return tuple(replace(worker, local_steps=count) for worker, count in both)


def with_batches(workers: Iterable[WorkerPlan], batches: Iterable[int]) -> tuple[WorkerPlan, ...]:
    """Return the workers' plans with these batches, by rank."""
    both = zip(workers, batches, strict=True)
    return tuple(replace(worker, batch=batch) for worker, batch in both)


# A round in progress when workers join


def members_with_work(stage: StageConfig, members: Members, idle: Collection[int]) -> Members:
    """Return the members that have work in a round in which the workers in `idle` have none."""
    if not idle:
        return members
    return members_of(stage, [rank for rank in members.ranks if rank not in idle])


def without_work(work: Assignments, idle: Collection[int]) -> Assignments:
    """Return the work of a round in which these workers have none."""
    if not idle:
        return work
    steps, samples = (
        tuple(0 if rank in idle else count for rank, count in enumerate(counts))
        for counts in (work.steps, work.samples)
    )
    return replace(work, steps=steps, samples=samples)


# The last round


def remaining_rounds(
    stage: StageConfig,
    members: Members,
    planned: Assignments,
    done: tuple[int, int],
    ahead: int = 0,
) -> Remaining:
    """Return (a, b): a/b rounds remain until the count that ends the run.

    Args: planned: the work of a whole round; done: steps and samples applied so far; ahead: rounds
    that count as done, too.
    Returns: None if no count ends the run, without synchronous rounds, or without members.
    """
    present = len(members.ranks)
    if not (stage.sync.in_rounds and present):
        return None
    quorum = stage.quorum_of(present)
    merged = (
        planned.total_steps * quorum // present,
        planned.total_samples * quorum // present,
    )
    remaining = stage.stop_criteria.remaining_rounds(*done, merged)
    return remaining and (remaining[0] - ahead * remaining[1], remaining[1])


def rest_if_truncated(rest: Remaining) -> Remaining:
    """Return what remains if a stop limit truncates the next round, else None.

    So a state that is saved or sent before the last round is the same under every later limit.
    """
    return rest if is_truncated(rest) else None


def is_truncated(rest: Remaining) -> bool:
    """Return True if a stop limit truncates a round of which `rest` remains."""
    return rest is not None and rest[0] < rest[1]


def cap_local_steps(
    planned: Assignments, rank: int, rest: Remaining, local_steps: int | None = None
) -> int:
    """Return the local steps of a worker in the next round.

    In the last round each worker computes its part of the remaining count, rounded up. So the
    count is exceeded by less than one step per worker.
    Args: planned: the work of a whole round; local_steps: the worker's H; None = as planned.
    """
    if local_steps is None:
        local_steps = planned.workers[rank].local_steps
    if rest is None:
        return local_steps
    remaining, whole = rest
    return min(local_steps, max(1, -(-planned.steps[rank] * remaining // whole)))


def truncate_round(
    stage: StageConfig, members: Members, planned: Assignments, rest: Remaining
) -> Assignments:
    """Return the work of a round of which `rest` remains."""
    if not is_truncated(rest):
        return planned
    steps = [cap_local_steps(planned, rank, rest) for rank in stage.workers]
    return assign(stage, members.ranks, with_local_steps(planned.workers, steps))


def count_merge(
    round_of_all: Assignments, progress: Progress, mean_loss: float, staleness: int = 0
) -> Progress:
    """Return the counts after one more merge of all members' work, or, after divergence, with the
    loss alone.
    """
    progress = progress.copy()
    progress.observe_all(staleness, mean_loss, "the workers' mean loss")
    if not progress.diverged:
        progress.commit_all(round_of_all.steps, round_of_all.total_samples)
        progress.merge()
    return progress


# Weights


def merge_weights(stage: StageConfig, work: Assignments, pushes: Sequence[Push]) -> list[float]:
    """Return the factors of the pushes of a merge: scale · w_i.

    If the sync mode averages, Σ w_i = 1 over these pushes, and each counts with its own steps and
    samples. A worker may have several pushes in a merge. Otherwise Σ w_i = 1 over all members.
    """
    if stage.sync.averages:
        executed = [as_executed(work.workers[push.worker], push) for push in pushes]
        return normalise_weights(stage, executed)
    return [work.weights[push.worker] for push in pushes]


def with_gradient_samples(
    stage: StageConfig, workers: tuple[WorkerPlan, ...]
) -> tuple[WorkerPlan, ...]:
    """Return the workers' plans with the samples of one gradient as their batch."""
    if stage.estimator not in OF_SHARDS:
        return workers
    return with_batches(workers, map(stage.trainer.shard_size, range(len(workers))))


def member_weights(
    stage: StageConfig, ranks: Iterable[int], workers: tuple[WorkerPlan, ...]
) -> list[float]:
    """Return the factor of each member's payload: scale · w_i with Σ w_i = 1 over `ranks`."""
    sized = with_gradient_samples(stage, workers)
    return normalise_weights(stage, [sized[rank] for rank in ranks])


def normalise_weights(stage: StageConfig, workers: Sequence[WorkerPlan]) -> list[float]:
    if not workers:
        return []
    weights = stage.aggregate.weigh(workers)
    try:
        total = sum(weights)
        fits = len(weights) == len(workers) and math.isfinite(total)
    except TypeError:  # a rule of the user's own may return anything
        total, fits = 0.0, False
    if not stage.aggregate.normalised:
        total = 1.0
    if not fits or not total:
        rule = type(stage.aggregate)
        raise UsageError(
            f"aggregate {rule.__module__}.{rule.__name__}: weigh() should return a finite number"
            f" for each of {len(workers)} workers, with a sum other than 0, and returned"
            f" {reprlib.repr(weights)}"
        )
    return [stage.aggregate.scale * weight / total for weight in weights]


def as_executed(worker: WorkerPlan, push: Push) -> WorkerPlan:
    """Return a worker's plan with the steps and batch of this push."""
    steps, batch = push.steps, push.samples // push.steps
    as_planned = worker.local_steps == steps and worker.batch == batch
    return worker if as_planned else replace(worker, local_steps=steps, batch=batch)

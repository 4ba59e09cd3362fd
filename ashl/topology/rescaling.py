"""Resume a run with another number of workers: states of the new ranks from those of the old ones.

Rule: each rank begins the stage as a new run does, with one model and with the counts so far. The
model is that of the server, all shards concatenated, or that of any all-reduce worker. Under gossip
and partial all-reduce it is the mean of all workers' models. Under HALoS all regions begin at the
global model.

A server keeps its model and its outer moments. It also keeps the optimizer's moments if it steps on
merged gradients. Workers under all-reduce, where these moments are equal, keep them as well. All
other state of a worker (its own moments, compression) and of the sync mode starts empty.

Totals stay as they are. Counts by worker (commits, steps, dropped steps, staleness) are the sum
over the old workers, distributed by data share. Each worker continues in its own data at the
fraction that the run has covered of all data.

Limits: if a round has the same samples for any number of workers, a run without local momentum
continues as with the old workers, up to rounding.
Source: as in Or, Zhang and Freedman, "Resource elasticity in distributed deep learning", MLSys
2020.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ashl.data.partition import apportion
from ashl.runtime.sums import concatenate, sum_in_rank_order
from ashl.stage.contract import StageConfig, extra_ranks
from ashl.stage.members import members_of
from ashl.stage.progress import Progress, RunProgress
from ashl.topology.all_reduce import PeerState, shares_moments
from ashl.topology.coordinator import CoordinatorState
from ashl.topology.gossip import RoundState
from ashl.topology.halos import GlobalServerState, RegionState
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState
from ashl.topology.partial_all_reduce import GroupCoordinatorState
from ashl.topology.sharded_server import ShardedWorker, ShardState


def rescale_states(
    stage: StageConfig, before: Mapping[int, Any], lead: Any, now_s: float
) -> list[Any]:
    """Return the states of all ranks in this stage, which has another number of workers than
    `before`: the workers in rank order, then the servers or the coordinator.

    Args: before, states of the old run by rank, without failed workers; lead, the state of the rank
    that counted progress in the old run; now_s, run time of the checkpoint, seconds.
    """
    old_workers = lead.progress.num_workers
    workers = [state for rank, state in sorted(before.items()) if rank < old_workers]
    servers = [state for rank, state in sorted(before.items()) if rank >= old_workers]
    model = lead.params
    if stage.replicas:
        model = sum_in_rank_order([own.params * (1 / len(workers)) for own in workers])
    elif isinstance(lead, ShardState):
        model = concatenate([shard.params for shard in servers])
    progress = redistribute_counts(stage, lead.progress, now_s)
    num_servers = extra_ranks(stage.topology, stage.sync, stage.nodes)
    states = [stage.topology.begin(stage, rank) for rank in range(stage.num_workers + num_servers)]
    for rank in stage.workers:
        begin_worker(stage, rank, states[rank], model, progress)
        if not servers:
            continue_without_server(stage, rank, states[rank], lead, progress)
    for place, state in enumerate(states[stage.num_workers :]):
        if isinstance(state, RegionState):
            begin_region(state, model, progress)
        else:
            continue_server(stage, place, state, servers[place], progress)
        if isinstance(state, GlobalServerState) and num_servers != len(servers):
            state.outer_state = None  # it is of another number of regions
    return states


def begin_worker(
    stage: StageConfig, rank: int, state: WorkerState, model: Any, progress: Progress
) -> None:
    """Set the model and the counts of a worker, and its place in its own data."""
    state.params = model
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples
    state.round, _ = progress.rounds_and_steps_of(rank)
    plan = stage.worker(rank)
    state.step = round(progress.samples * plan.data_share / plan.batch)
    state.drawn = state.step * plan.batch
    if isinstance(state, ShardedWorker):
        state.versions = [progress.version] * stage.topology.servers


def continue_without_server(
    stage: StageConfig, rank: int, state: Any, before: Any, progress: Progress
) -> None:
    """Let a worker of a run without a server or a coordinator enter the stage. It counts progress.

    Args: before, the state of the old rank that counted progress.
    """
    state.evaluated = before.evaluated
    if isinstance(state, RoundState):
        state.enter(stage, members_of(stage), rank)
        if isinstance(state.progress, Progress):
            state.progress = progress.copy()
        else:
            totals = {own.name: getattr(progress, own.name) for own in fields(RunProgress)}
            state.progress = RunProgress(**totals)
        return
    assert isinstance(state, PeerState)
    state.progress, state.outer_state = progress, before.outer_state
    state.enter(stage, members_of(stage), rank)
    state.rule_state = stage.sync.begin(stage, progress)
    if shares_moments(stage.sync):
        state.moments = before.moments


def continue_server(
    stage: StageConfig, place: int, state: Any, before: Any, progress: Progress
) -> None:
    """Let a server or a coordinator enter the stage with its model, moments and these counts.

    Args: place, its number among the servers; before, its state in the old run.
    """
    state.params, state.evaluated = before.params, before.evaluated
    state.progress = progress.copy()
    held = stage.fragment_stages[place] if isinstance(state, ShardState) else stage
    state.enter(held, progress.now_s)
    state.progress.started, state.progress.best = progress.started, progress.best
    if isinstance(state, ServerState):
        state.moments, state.outer_state = before.moments, before.outer_state
    else:
        assert isinstance(state, CoordinatorState)
    if isinstance(state, GroupCoordinatorState):
        state.groups.conflicts = progress.conflicts or 0


def begin_region(state: RegionState, model: Any, progress: Progress) -> None:
    """Let the server of a region begin at the global model and at the global counts."""
    others = state.progress.failed
    state.params, state.progress = model, progress.copy()
    for rank in others:
        state.progress.remove_worker(rank)
    state.sent_counts = sum(progress.steps_by), 0


def redistribute_counts(stage: StageConfig, before: Progress, now_s: float) -> Progress:
    """Return the counts at `now_s` seconds, with those by worker distributed by data share.

    All workers run, and leads in this stage start at 0. Each worker has the largest staleness of
    all old ones. The numbers of commits per worker since the start of the stage, and since the best
    loss, stay the same.
    """
    shares = [worker.data_share for worker in stage.plan.workers]
    progress = Progress(stage.num_workers)
    for own in fields(RunProgress)[1:]:
        setattr(progress, own.name, getattr(before, own.name))
    progress.failed = set()
    progress.now_s = now_s
    for name in ("commits", "steps_by", "dropped_by", "drops", "stale_sum"):
        setattr(progress, name, apportion(sum(getattr(before, name)), shares).tolist())
    if before.groups is not None:
        progress.groups = apportion(sum(before.groups), shares).tolist()
    progress.conflicts = before.conflicts
    progress.dropped_for = dict(before.dropped_for)
    progress.pulled = [before.version] * stage.num_workers
    progress.stale_max = [max(before.stale_max)] * stage.num_workers
    progress.max_lead = before.max_lead
    made, each = progress.total_commits, stage.num_workers / before.num_workers
    in_stage, since_best = made - before.started.commits, made - before.best[1]
    progress.started = before.started._replace(commits=made - round(in_stage * each))
    progress.best = before.best[0], made - round(since_best * each)
    return progress

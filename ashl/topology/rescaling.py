"""Resume a run with another number of workers: convert the states of the old ranks to those of the
new ones.

Rule, by topology. The new workers begin at one model:
server, all-reduce     the model of the server, or of any worker
sharded servers        the shards together; each server keeps its own
HALoS                  the model of the region; a new region begins at the global model
gossip, groups         the mean of the models of all workers, weighted by their mass in push-sum

Taken over are the model, the outer moments, all counts, and the optimizer's moments if it steps on
merged gradients. The sync mode converts its own state at a server (`ServerRule.on_rescale`). Total
counts stay as they are, and counts by worker are distributed over the present workers. All workers
begin at the top of their loops. Each continues in its own data at the fraction that the run has
covered of all data.
Reset, as for a joining worker: state that each worker had alone. That is its own momentum, codec
states at both ends, and a mode's state by worker or by edge of a graph. It is also the piece of
work that the worker had not exchanged, which is in no count.

Limits: if the samples of a round are the same for any number of workers, the run continues as with
the old workers, up to rounding; with exact sums bit for bit. With a learning rate of zero the mean
of all models stays as it was.
Source: as in Or, Zhang and Freedman, "Resource elasticity in distributed deep learning", MLSys
2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ashl.data.partition import apportion
from ashl.runtime.sums import concatenate
from ashl.size_only import SizeOnly, Vector
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of, remaining_rounds
from ashl.stage.progress import Progress, RunProgress
from ashl.topology import all_reduce
from ashl.topology.all_reduce import PeerState
from ashl.topology.coordinator import CoordinatorState, RoamingState
from ashl.topology.gossip import RoundState
from ashl.topology.group_generator import reset_groups
from ashl.topology.halos import REPORTED, GlobalServerState, RegionState
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerRule, ServerState, assignment_of
from ashl.topology.partial_all_reduce import GroupCoordinatorState, Replica
from ashl.topology.sharded_server import ShardedWorker, ShardState


def rescale_states(
    stage: StageConfig, before: Mapping[int, Any], lead: Any, now_s: float
) -> list[Any]:
    """Return the states of all ranks in this stage, which has another number of workers.

    Args: before: states of the old run by rank, without failed workers; lead: the one of them that
    counts the run's progress.
    """
    old_workers = lead.progress.num_workers
    beside = {rank - old_workers: state for rank, state in before.items() if rank >= old_workers}
    workers = [state for rank, state in sorted(before.items()) if rank < old_workers]
    match lead:
        case ShardState():
            return rescale_shards(stage, [state for _, state in sorted(beside.items())], now_s)
        case GlobalServerState():
            return rescale_regions(stage, lead, {k - 1: beside[k] for k in beside if k}, now_s)
        case ServerState():
            return rescale_server(stage, lead, now_s)
        case PeerState():
            return [*rescale_peers(stage, lead, now_s)]
        case RoundState():
            return [*rescale_rounds(stage, lead, workers, now_s)]
        case _:
            return rescale_replicas(stage, lead, workers, now_s)


def rescale_server(stage: StageConfig, before: ServerState, now_s: float) -> list[Any]:
    """Return the states of the workers, then that of the server."""
    server = restart_server(stage, before, redistribute_counts(stage, before.progress, now_s))
    return [*(begin_at_server(stage, rank, server) for rank in stage.workers), server]


def restart_server(stage: StageConfig, before: ServerState, progress: Progress) -> Any:
    """Return the state of a server that continues with its model and these counts."""
    server = type(before)(
        before.params, before.moments, progress, before.evaluated, outer_state=before.outer_state
    )
    server.entered = stage.index
    server.set_members(stage)
    server.work = server.members.planned
    server.codec_state = stage.carry_over_codec_state(CodecState(), progress.samples)
    server.pulls = [stage.tag("pull")] * stage.num_workers
    server.rule_state = stage.sync.on_rescale(stage, before.rule_state, progress)
    server.end_pass()
    return server


def begin_at_server(stage: StageConfig, rank: int, server: ServerState) -> WorkerState:
    """Return the state of a worker that begins with the model of its server."""
    state = WorkerState(server.params, stage.trainer.moments())
    begin(stage, rank, state, server.progress)
    stage.messages.apply_admission(state, stage.messages.admission_payload(stage, server))
    assign_by_server(stage, rank, state, server)
    if stage.topology.pull_ratio is not None:
        stage.pipeline.record_full_pull(server.codec_state, rank, server.params)
    return state


def assign_by_server(
    stage: StageConfig, rank: int, state: WorkerState, server: ServerState
) -> None:
    """Set the next work of a worker as its server assigns it."""
    state.local_steps, state.ratio, state.interval_s, batch = assignment_of(stage, server, rank)
    state.batch = batch or state.batch


def rescale_shards(stage: StageConfig, shards: Sequence[ShardState], now_s: float) -> list[Any]:
    """Return the states of the workers, then those of the servers, which keep their shards."""
    parts, servers = stage.fragment_stages, list[ShardState]()
    for part, before in zip(parts, shards, strict=True):
        progress = redistribute_counts(part, before.progress, now_s)
        servers.append(restart_server(part, before, progress))
    params, samples = concatenate([one.params for one in servers]), servers[0].progress.samples
    states = list[Any]()
    for rank in stage.workers:
        state = ShardedWorker(params, stage.trainer.moments())
        state.versions = [one.progress.version for one in servers]
        state.shard_codec_states = [
            part.carry_over_codec_state(CodecState(), samples) for part in parts
        ]
        begin(stage, rank, state, servers[0].progress)
        assign_by_server(parts[0], rank, state, servers[0])
        state.version = min(state.versions)
        states.append(state)
    return [*states, *servers]


def rescale_regions(
    stage: StageConfig, before: GlobalServerState, regions: Mapping[int, RegionState], now_s: float
) -> list[Any]:
    """Return the states of the workers, of the global server, and of the servers of the regions.

    Region k continues with the model of the old region k. A region that is new begins with the
    global model. The difference that a removed region had not sent is lost.
    """
    members = stage.topology.members(stage.nodes)
    if bool(regions) != (len(members) > 1):  # the server has another outer optimizer then
        before = replace(before, outer_state=None)
    if len(members) == 1:
        return rescale_server(stage, before, now_s)
    top = restart_server(stage, before, redistribute_counts(stage, before.progress, now_s))
    states: dict[int, Any] = {stage.server: top}
    for place, ranks in enumerate(members):
        counts = before.progress
        fresh = Progress(counts.num_workers, steps=counts.steps, samples=counts.samples)
        known = regions.get(place) or RegionState(
            before.params, stage.trainer.moments(), fresh, sent=before.params
        )
        own = stage.server + 1 + place
        top.samples[own] = before.samples.get(counts.num_workers + 1 + place, 0)
        progress = counts_of_region(stage, ranks, known.progress, counts, top.progress, now_s)
        region = restart_server(stage, known, progress)
        region.sent, region.merges, region.samples = known.sent, known.merges, known.samples
        region.losses = known.losses
        region.behind = sum(top.progress.steps_by[rank] for rank in ranks), top.samples[own]
        states |= {rank: begin_at_server(stage, rank, region) for rank in ranks} | {own: region}
    return [states[rank] for rank in sorted(states)]


def counts_of_region(
    stage: StageConfig,
    ranks: Sequence[int],
    known: Progress,
    counts: Progress,
    total: Progress,
    now_s: float,
) -> Progress:
    """Return the counts of a region with the workers `ranks`.

    Each has its share of the global counts, and of what the region has not sent.
    Args: known, counts: of the region and of the global server, in the old run; total: of the
    global server, by present workers.
    """
    progress, shares = redistribute_counts(stage, known, now_s), shares_of(stage, ranks)
    for name in REPORTED:
        both = zip(getattr(known, name), getattr(counts, name), strict=True)
        unsent = apportion(sum(max(0, own - sent) for own, sent in both), shares).tolist()
        row = [0] * stage.num_workers
        for rank, more in zip(ranks, unsent, strict=True):
            row[rank] = getattr(total, name)[rank] + (0 if name == "stale_max" else more)
        setattr(progress, name, row)
    progress.drops = [0] * stage.num_workers
    for rank, count in zip(ranks, apportion(sum(known.drops), shares).tolist(), strict=True):
        progress.drops[rank] = count
    for rank in {*stage.workers}.difference(ranks):
        progress.remove_worker(rank)
    return progress


def rescale_peers(stage: StageConfig, before: PeerState, now_s: float) -> list[PeerState]:
    """Return the states of workers that count identically."""
    progress, states = redistribute_counts(stage, before.progress, now_s), list[PeerState]()
    rule = stage.sync
    if isinstance(rule, ServerRule):
        rule_state = rule.on_rescale(stage, before.rule_state, progress)
    else:
        rule_state = rule.begin(stage, progress)
    members = members_of(stage)
    planned = all_reduce.plan_round(stage, members, rule_state, progress)
    rest = remaining_rounds(stage, members, planned, (progress.steps, progress.samples))
    for rank in stage.workers:
        state = PeerState(
            before.params,
            None,
            progress=progress,
            evaluated=before.evaluated,
            outer_state=before.outer_state,
        )
        begin(stage, rank, state, progress)
        shares_moments = all_reduce.shares_moments(rule)
        state.moments = before.moments if shares_moments else stage.trainer.moments()
        state.rest, state.rule_state = rest, rule_state
        states.append(state)
    return states


def rescale_rounds(
    stage: StageConfig, before: RoundState, workers: Sequence[RoundState], now_s: float
) -> list[RoundState]:
    """Return the states of workers that gossip in rounds; they begin at the mean of all models.

    Messages that were in flight at the pause are merged first.
    """
    rule = stage.sync
    assert isinstance(before.progress, Progress)
    progress = redistribute_counts(stage, before.progress, now_s)
    for own in workers:
        for received in own.early.values():
            rule.merge_in_flight(own, received)
    mean = mean_of_models(
        [own.params for own in workers], [rule.mass(own.rule_state) for own in workers]
    )
    totals = {own.name: getattr(progress, own.name) for own in fields(RunProgress)}
    states = list[RoundState]()
    for rank in stage.workers:
        state = RoundState(mean, stage.trainer.moments(), evaluated=before.evaluated)
        begin(stage, rank, state, progress)
        counts = rank == stage.lead_rank or stage.elastic
        state.progress = progress.copy() if counts else RunProgress(**totals)
        state.k = before.k
        state.begin_epoch(stage, rank)
        states.append(state)
    return states


def rescale_replicas(
    stage: StageConfig, before: CoordinatorState, workers: Sequence[Any], now_s: float
) -> list[Any]:
    """Return the states of workers that begin at the mean of all models, then that of the
    coordinator.
    """
    progress = redistribute_counts(stage, before.progress, now_s)
    mean = mean_of_models([own.params for own in workers], [1.0] * len(workers))
    states = list[Any]()
    for rank in stage.workers:
        state: RoamingState | Replica = RoamingState(mean, stage.trainer.moments())
        if isinstance(before, GroupCoordinatorState):
            state = Replica(mean, stage.trainer.moments(), tick=before.ticks)
        begin(stage, rank, state, progress)
        states.append(state)
    coordinator = CoordinatorState(progress, before.evaluated, before.ticks, entered=stage.index)
    if isinstance(before, GroupCoordinatorState):
        groups = replace(before.groups, nodes=stage.topology.nodes(stage), failed=set())
        reset_groups(groups)
        coordinator = GroupCoordinatorState(
            progress,
            before.evaluated,
            before.ticks,
            entered=stage.index,
            groups=groups,
            last=[-1] * stage.num_workers,
        )
    return [*states, coordinator]


def mean_of_models(models: Sequence[Vector], masses: Sequence[float]) -> Vector:
    """Return Σ m_i·x_i / Σ m_i, summed in rank order."""
    total = sum(masses)
    if isinstance(models[0], SizeOnly):
        return models[0]
    mean = models[0] * (masses[0] / total)
    for model, mass in zip(models[1:], masses[1:], strict=True):
        mean = mean + model * (mass / total)
    return mean


def begin(stage: StageConfig, rank: int, state: WorkerState, progress: Progress) -> None:
    """Let a worker enter this stage at these counts."""
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples
    state.enter(stage, members_of(stage), rank)
    state.round, _ = progress.rounds_and_steps_of(rank)
    state.step = round(progress.samples * stage.worker(rank).data_share / state.batch)
    state.drawn = state.step * state.batch


def shares_of(stage: StageConfig, ranks: Sequence[int]) -> list[float]:
    """Return the data shares of these workers."""
    return [stage.worker(rank).data_share for rank in ranks]


def redistribute_counts(stage: StageConfig, before: Progress, now_s: float) -> Progress:
    """Return the counts at `now_s`, with those by worker distributed by data share.

    Leads are reset. Commits since the start of the stage, and since the best loss, keep their
    number per worker.
    """
    shares = shares_of(stage, stage.workers)
    n = stage.num_workers
    progress = Progress(n)
    for own in fields(RunProgress)[1:]:
        setattr(progress, own.name, getattr(before, own.name))
    progress.failed = set()  # all new workers take part
    progress.now_s = now_s
    for name in ("commits", "steps_by", "dropped_by", "drops", "stale_sum"):
        setattr(progress, name, apportion(sum(getattr(before, name)), shares).tolist())
    if before.groups is not None:
        progress.groups = apportion(sum(before.groups), shares).tolist()
    progress.conflicts = before.conflicts
    progress.dropped_for = dict(before.dropped_for)
    progress.pulled = [before.version] * n
    progress.stale_max = [max(before.stale_max)] * n
    progress.max_lead = before.max_lead
    made, each = progress.total_commits, n / before.num_workers

    progress.started = before.started._replace(
        commits=made - round((made - before.started.commits) * each)
    )
    progress.best = before.best[0], made - round((made - before.best[1]) * each)
    return progress

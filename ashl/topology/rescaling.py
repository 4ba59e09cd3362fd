"""Resume a run with another number of workers: the parts of its state that others can use.

Rule: the run resumes from one state that all ranks agree on: the server's, or that of any worker
under all-reduce. Taken over are the model, the outer moments, all counts, and the optimizer's
moments if it steps on merged gradients. The sync mode converts its own state
(`ServerRule.on_rescale`). Total counts stay as they are, and counts by worker are distributed over
the present workers. All workers begin at the top of their loops on that model. Each continues in
its own data at the fraction that the run has covered of all data.
Reset, as for a joining worker: state that each worker had alone. That is its own momentum, codec
states at both ends, and a mode's state by worker. With delayed exchanges it is also the piece of
work that the worker had not exchanged, which is in no count.

Limit: if the samples of a round are the same for any number of workers, the run continues as with
the old workers, up to rounding; with exact sums bit for bit.
Source: as in Or, Zhang and Freedman, "Resource elasticity in distributed deep learning", MLSys
2020.
"""

from dataclasses import fields

from ashl.data.partition import apportion
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of, remaining_rounds
from ashl.stage.progress import Progress, RunProgress
from ashl.topology import all_reduce
from ashl.topology.all_reduce import PeerState
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerRule, ServerState, assignment_of


def rescale_states(
    stage: StageConfig, state: ServerState | PeerState, now_s: float
) -> list[WorkerState | ServerState]:
    """Return the states of all ranks in this stage, which has another number of workers.

    Args: stage: with the new number of workers; state: one state of the old run.
    """
    if isinstance(state, ServerState):
        return rescale_server(stage, state, now_s)
    return [*rescale_peers(stage, state, now_s)]


def rescale_server(
    stage: StageConfig, before: ServerState, now_s: float
) -> list[WorkerState | ServerState]:
    """Return the states of the workers, then that of the server."""
    progress, n = redistribute_counts(stage, before.progress), stage.num_workers
    progress.now_s = now_s
    server = ServerState(
        before.params, before.moments, progress, before.evaluated, outer_state=before.outer_state
    )
    server.entered = stage.index
    server.set_members(stage)
    server.work = server.members.planned
    server.codec_state = stage.carry_over_codec_state(CodecState(), progress.samples)
    server.pulls = [stage.tag("pull")] * n
    server.rule_state = stage.sync.on_rescale(stage, before.rule_state, progress)
    states = list[WorkerState | ServerState]()
    for rank in stage.workers:
        state = WorkerState(before.params, stage.trainer.moments())
        begin(stage, rank, state, progress)
        state.local_steps, state.ratio, state.interval_s, batch = assignment_of(stage, server, rank)
        state.batch = batch or state.batch
        if stage.topology.pull_ratio is not None:
            stage.pipeline.record_full_pull(server.codec_state, rank, before.params)
        states.append(state)
    return [*states, server]


def rescale_peers(stage: StageConfig, before: PeerState, now_s: float) -> list[PeerState]:
    """Return the states of workers that count identically."""
    progress, states = redistribute_counts(stage, before.progress), list[PeerState]()
    progress.now_s = now_s
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
        shares_moments = stage.sync.exchange == "gradient"
        state.moments = before.moments if shares_moments else stage.trainer.moments()
        state.rest, state.rule_state = rest, rule_state
        states.append(state)
    return states


def begin(stage: StageConfig, rank: int, state: WorkerState, progress: Progress) -> None:
    """Let a worker enter this stage at these counts."""
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples
    state.enter(stage, members_of(stage), rank)
    state.round, _ = progress.rounds_and_steps_of(rank)
    state.step = round(progress.samples * stage.worker(rank).data_share / state.batch)
    state.drawn = state.step * state.batch


def redistribute_counts(stage: StageConfig, before: Progress) -> Progress:
    """Return the counts, with those by worker distributed by data share.

    Leads are reset. Commits since the start of the stage, and since the best loss, keep their
    number per worker.
    """
    shares = [worker.data_share for worker in stage.plan.workers]
    n = stage.num_workers
    progress = Progress(n)
    for own in fields(RunProgress)[1:]:
        setattr(progress, own.name, getattr(before, own.name))
    progress.failed = set()  # all new workers take part
    for name in ("commits", "steps_by", "dropped_by", "drops", "stale_sum"):
        setattr(progress, name, apportion(sum(getattr(before, name)), shares).tolist())
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

"""A run goes on with another number of workers: what of its state has a meaning for others.

Rule: it goes on from one state that all agree on, the server's or, where workers sum, any of
theirs. From there come the model, the moments of whoever steps on merged gradients, the outer
optimizer's, what the sync rule keeps of the run as a whole (`ServerRule.rescaled`), and all counts:
of everybody together as they were, and by worker dealt out over those who are there now. All stand
at the top of their loops on that model, each as far into its own data as the run is into all of it.
Begins anew: what each worker kept by itself, as for one that comes: its own momentum, what codecs
keep at both ends, and what rules keep by worker.

Limit: where the samples of a round are the same, whoever computes on them, the run goes on as with
the workers that it had, to rounding; with exact sums bit for bit.
Source: as in Or, Zhang and Freedman, "Resource elasticity in distributed deep learning", MLSys
2020.
"""

from dataclasses import fields

from ashl.data.partition import apportion
from ashl.stage.compression_pipeline import CodecState
from ashl.stage.progress import Progress, RunProgress
from ashl.stage.stage import Stage
from ashl.topology import all_reduce
from ashl.topology.all_reduce import Ahead, PeerState
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerRule, ServerState, assignment_of, rule_of


def rescale_states(
    stage: Stage, state: ServerState | PeerState, now_s: float
) -> list[WorkerState | ServerState]:
    """The states of all ranks in this stage, which is one of another number of workers than the
    state is of.
    """
    return (
        rescale_server(stage, state, now_s)
        if isinstance(state, ServerState)
        else [*rescale_peers(stage, state, now_s)]
    )


def rescale_server(
    stage: Stage, before: ServerState, now_s: float
) -> list[WorkerState | ServerState]:
    """The workers', then the server's."""
    progress, n = tally_of(stage, before.progress), stage.num_workers
    progress.now_s = now_s
    server = ServerState(
        before.params, before.moments, progress, before.evaluated, outer_state=before.outer_state
    )
    server.entered, server.workers, server.quorum = stage.index, stage.plan.workers, stage.quorum
    server.ends, server.pulls = (
        stage.carry_over_codec_state(CodecState(), progress.samples),
        [stage.tag("pull")] * n,
    )
    server.rule_state = rule_of(stage).on_rescale(stage, before.rule_state, progress)
    states = list[WorkerState | ServerState]()
    for rank in stage.workers:
        state = WorkerState(before.params, stage.trainer.moments())
        begin(stage, rank, state, progress)
        state.local_steps, state.ratio, state.interval_s, batch = assignment_of(stage, server, rank)
        state.batch = batch or state.batch
        if stage.topology.pull_ratio is not None:
            stage.link.record_full_pull(server.ends, rank, before.params)
        states.append(state)
    return [*states, server]


def rescale_peers(stage: Stage, before: PeerState, now_s: float) -> list[PeerState]:
    """Those of workers that count alike."""
    progress, alike, states = (
        tally_of(stage, before.progress),
        stage.sync.exchange == "gradient",
        list[PeerState](),
    )
    progress.now_s = now_s
    rule = all_reduce.rule_of(stage)
    kept = (
        rule.on_rescale(stage, before.rule_state, progress)
        if isinstance(rule, ServerRule)
        else rule.begin(stage, progress)
    )
    planned = rule.in_round(stage, kept, progress)
    rest = planned.remaining_rounds(progress.steps, progress.samples)
    for rank in stage.workers:
        state = PeerState(
            before.params,
            None,
            progress=progress,
            evaluated=before.evaluated,
            outer_state=before.outer_state,
        )
        begin(stage, rank, state, progress)
        state.moments = before.moments if alike else stage.trainer.moments()
        state.apply_plan(Ahead(None, rest, planned, planned.truncate_last_round(rest), kept), rank)
        states.append(state)
    return states


def begin(stage: Stage, rank: int, state: WorkerState, progress: Progress) -> None:
    """A worker enters this stage, where these counts are."""
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples
    state.enter(stage, rank)
    state.round, _ = progress.rounds_and_steps_of(rank)
    state.step = round(progress.samples * stage.worker(rank).data_share / state.batch)
    state.drawn = state.step * state.batch


def tally_of(stage: Stage, before: Progress) -> Progress:
    """The counts, with those of each worker dealt out by what it has of the data. Leads begin anew,
    and what counts per worker from the begin of the stage on, or from the best loss, is as far as
    it was.
    """
    shares = [worker.data_share for worker in stage.plan.workers]
    n = stage.num_workers
    progress = Progress(n)
    for own in fields(RunProgress)[1:]:
        setattr(progress, own.name, getattr(before, own.name))
    for name in ("commits", "steps_by", "dropped_by", "drops", "stale_sum"):
        setattr(progress, name, apportion(sum(getattr(before, name)), shares).tolist())
    progress.dropped_for = dict(before.dropped_for)
    progress.pulled, progress.stale_max, progress.max_lead = (
        [before.version] * n,
        [max(before.stale_max)] * n,
        before.max_lead,
    )
    made, each = progress.total_commits, n / before.num_workers
    progress.started = before.started._replace(
        commits=made - round((made - before.started.commits) * each)
    )
    progress.best = before.best[0], made - round((made - before.best[1]) * each)
    return progress

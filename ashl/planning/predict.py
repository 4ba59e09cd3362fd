"""Prediction of a plan: its stages are timed in virtual time, without gradients."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster, Measured
from ashl.cluster.speed import NS, speed_of
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.runtime.contended_sim import simulator
from ashl.runtime.records import Record, Round, Rounds, Snapshot, StageEnd
from ashl.size_only import Vector
from ashl.stage.contract import StageConfig, extra_ranks
from ashl.stage.members import members_of, remaining_rounds, truncate_round
from ashl.stage.program import run_stages

# cycles of each worker: enough for a bounded lead to be used up within the first half
CYCLES = 128
ROUNDS = 10_000  # upper bound on the cycles of all workers together
STEPS = 400_000  # upper bound on the steps of all workers together, for large H
MARKS = 8  # number of intermediate readings of the counts
NO_LIMITS = Limits(
    epochs=None,
    steps=None,
    seconds=None,
    target_accuracy=None,
    target_loss=None,
    target_consecutive_evals=1,
    eval_every_s=None,
    eval_every_commits=None,
)


class ProgressMark(NamedTuple):
    """Progress of a stage at one moment."""

    steps: int
    time_ns: int
    reached_ns: Mapping[int, int]  # moment at which each rank reached this progress, if they differ


class StageObserver:
    """Observer that records the progress of a stage at marks and at its end, and the waits of its
    workers.
    """

    rounds: Rounds = "all"

    def __init__(self, num_workers: int, lead_rank: int) -> None:
        self.num_workers = num_workers
        self.lead_rank = lead_rank
        self.stop_reason: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.steps: dict[int, int] = {}  # steps at each evaluation, by version of the model
        # moment at which each counting rank reached the evaluation, by version of the model
        self.reached_ns: dict[int, dict[int, int]] = {}
        self.waits: list[tuple[int, int, int]] = []  # (rank, start, end) in nanoseconds
        # (end, duration without waiting) of each round, by rank, in nanoseconds
        self.cycles_ns = [list[tuple[int, int]]() for _ in range(num_workers)]
        self.end = ProgressMark(0, 0, {})

    def emit(self, record: Record) -> None:
        match record:
            case StageEnd():
                self.end = ProgressMark(record.counts.steps, record.end_ns, {})
            case Round() if record.rank < self.num_workers:
                waits = [(start, end) for kind, start, end in record.spans_ns if kind == "wait"]
                self.waits += [(record.rank, *wait) for wait in waits]
                waited_ns = sum(end - start for start, end in waits)
                cycle_ns = record.end_ns - record.start_ns - waited_ns
                self.cycles_ns[record.rank].append((record.end_ns, cycle_ns))

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        """Record that a counting rank has reached an evaluation; there is nothing to evaluate."""
        if record.final:
            return
        if record.counts is not None:
            version = record.counts.merges
            self.steps[version] = record.counts.steps
        elif record.tick is not None and self.lead_rank != self.num_workers:
            version = record.tick  # without a server all ranks count the same rounds
        else:
            return
        self.reached_ns.setdefault(version, {})[record.rank] = record.time_ns

    def marks_at_half_and_end(self) -> tuple[ProgressMark, ProgressMark]:
        """Return the mark nearest to half of the steps, and the end.

        Steps that had begun at the end are counted there and in no mark. So the last mark stands
        for the end if both are at the same moment.
        """
        reached = self.reached_ns
        marks = [
            ProgressMark(steps, max(reached[k].values()), reached[k])
            for k, steps in self.steps.items()
        ] or [ProgressMark(0, 0, {})]
        whole = marks[-1] if marks[-1].time_ns == self.end.time_ns else self.end
        return min(marks, key=lambda mark: abs(2 * mark.steps - whole.steps)), whole

    def waited_ns(self, mark: ProgressMark) -> int:
        """Return the waiting time of all workers together up to a mark, including the wait of early
        workers for the others.
        """
        own = [mark.reached_ns.get(rank, mark.time_ns) for rank in range(self.num_workers)]
        before = sum(
            min(end, own[rank]) - start for rank, start, end in self.waits if start < own[rank]
        )
        return before + sum(mark.time_ns - reached for reached in own)

    def cycle_s(self, rank: int, since_ns: int) -> float | None:
        """Return the median seconds of a worker's rounds without its waits, of those that end after
        `since_ns` if there are any; None if it has ended no round.
        """
        rounds = self.cycles_ns[rank]
        late = [cycle_ns for end_ns, cycle_ns in rounds if end_ns > since_ns]
        return median(late or [cycle_ns for _, cycle_ns in rounds]) / NS if rounds else None


def simulate_stage(
    stage: StageConfig, cluster: Cluster, steps: int, cycles: int, batch: int
) -> StageObserver:
    """Simulate a stage for `steps` steps, which are about `cycles` cycles of every worker."""
    n = stage.num_workers
    seen = StageObserver(n, stage.lead_rank)
    limits = replace(NO_LIMITS, steps=steps, eval_every_commits=max(1, cycles * n // MARKS))
    bounded = replace(
        stage,
        index=0,
        plan=replace(stage.plan, until={}),
        following=False,
        limits=limits,
        elastic=False,
    )
    num_ranks = n + extra_ranks(stage.topology, stage.sync, stage.nodes)
    costs = make_network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
    sim = simulator(
        num_ranks,
        speed_of(cluster, batch, seed=0),
        costs,
        seen,
        overlaps=stage.computes_during_collectives,
    )
    sim.run(partial(run_stages, stages=(bounded,)), tick=lambda: None)
    return seen


def steps_of(stage: StageConfig, worker: WorkerPlan, step_ns: int) -> int:
    """Return the steps between two merges.

    It is one where gradients are exchanged, the number that fills the interval of a sync mode with
    an interval, else the plan's H.
    """
    interval_ns = stage.sync.interval_s * NS
    if stage.sync.exchange == "gradient":
        return 1
    return math.ceil(interval_ns / step_ns) if interval_ns else worker.local_steps


def truncate_stage(stage: StageConfig) -> StageConfig:
    """Return a stage with shorter rounds if a round is longer than the whole run."""
    members = members_of(stage)
    rest = remaining_rounds(stage, members, members.planned, (0, 0))
    workers = truncate_round(stage, members, members.planned, rest).workers
    return replace(stage, plan=replace(stage.plan, workers=workers))


def predict_stage(stage: StageConfig, cluster: Cluster, batch: int) -> StagePlan:
    """Return the stage's plan with each worker's cycle, and long-run steps/s and wait share."""
    plan, n = stage.plan, stage.num_workers
    stage = truncate_stage(stage)
    if stage.sync.loop(stage, 0) is not None:  # a profiling stage has no steps
        return plan
    steady = replace(cluster, jitter=0.0, events=(), churn=None)
    speed = speed_of(steady, batch, seed=0)
    step_ns = [
        speed.cost_ns(rank, "compute", stage.samples_of(rank), 0) or 1 for rank in stage.workers
    ]
    local_steps = [
        steps_of(stage, worker, cost)
        for worker, cost in zip(stage.plan.workers, step_ns, strict=True)
    ]
    cycles = max(8, min(CYCLES, ROUNDS // n, STEPS // sum(local_steps)))
    drawn = (
        replace(steady, jitter=cluster.jitter)
        if isinstance(cluster, Measured) and cluster.steps
        else steady
    )
    seen = simulate_stage(stage, drawn, cycles * sum(local_steps), cycles, batch)
    half, whole = seen.marks_at_half_and_end()
    span_ns = whole.time_ns - half.time_ns
    waited_ns = seen.waited_ns(whole) - seen.waited_ns(half)
    return replace(
        plan,
        workers=tuple(
            replace(worker, predicted_cycle_s=seen.cycle_s(rank, half.time_ns))
            for rank, worker in enumerate(plan.workers)
        ),
        predicted_steps_per_s=(whole.steps - half.steps) / span_ns * NS if span_ns else None,
        predicted_wait_share=waited_ns / (span_ns * n) if span_ns else None,
    )

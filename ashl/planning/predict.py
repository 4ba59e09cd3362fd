"""What a plan should reach: its stages timed in virtual time, without gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster
from ashl.cluster.speed import NS, Speed
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.runtime.node import Vector
from ashl.runtime.records import LedgerTotals, Record, Snapshot, StageEnd, UpdateShown
from ashl.runtime.sim import Sim
from ashl.stage.program import program
from ashl.stage.rule import extra_ranks
from ashl.stage.stage import Stage

CYCLES = 64  # of every worker: enough for the slack of a bounded lead to be used up
ROUNDS = 20_000  # of all workers together: enough for thousands of them, and quick
WITHOUT = Limits(
    epochs=None,
    steps=None,
    seconds=None,
    target_accuracy=None,
    target_loss=None,
    target_hold=1,
    eval_every_s=None,
    eval_every_commits=None,
)


class Silent:
    """An observer that keeps how a stage ended and where its workers' time went."""

    rounds = False

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.steps = self.end_ns = self.wait_ns = 0

    def emit(self, record: Record) -> None:
        if isinstance(record, StageEnd):
            self.steps, self.end_ns = record.counts.steps, record.end_ns
        elif isinstance(record, LedgerTotals) and record.rank < self.num_workers:
            self.wait_ns += record.totals_ns["wait"]

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        """Nothing is learned, so there is nothing to evaluate."""


def timed(stage: Stage, cluster: Cluster, steps: int, batch: int, num_ranks: int) -> Silent:
    """How a stage stands after so many steps."""
    seen = Silent(stage.num_workers)
    bounded = replace(
        stage, index=0, plan=replace(stage.plan, until={}), following=False, limits=replace(WITHOUT, steps=steps)
    )
    sim = Sim(num_ranks, Speed(cluster, batch, seed=0), network(cluster, stage.trainer.dense_bytes), seen)
    sim.run(partial(program, stages=(bounded,)), tick=lambda: None)
    return seen


def steps_of(stage: Stage, worker: WorkerPlan, step_ns: int) -> int:
    """Steps between two merges: one where gradients are exchanged, as many as fill the interval where the sync mode has
    one, else the plan's H."""
    interval_ns = stage.sync.interval_s * NS
    if stage.sync.exchange == "gradient":
        return 1
    return math.ceil(interval_ns / step_ns) if interval_ns else worker.local_steps


def predict(stage: Stage, cluster: Cluster, batch: int) -> StagePlan:
    """The stage's plan with each worker's cycle, and steps/s and wait share in the long run, filled in."""
    plan, n = stage.plan, stage.num_workers
    if stage.sync.loop(stage, 0) is not None:  # a stage that only measures takes no steps
        return plan
    steady = replace(cluster, jitter=0.0, events=())
    num_ranks = n + extra_ranks(stage.topology, stage.sync)
    speed = Speed(steady, batch, seed=0)
    step_ns = [speed.cost_ns(rank, "compute", stage.samples_of(rank), 0) or 1 for rank in stage.workers]
    local_steps = [steps_of(stage, worker, cost) for worker, cost in zip(plan.workers, step_ns, strict=True)]
    per_cycle = sum(local_steps)
    cycles = max(4, min(CYCLES, ROUNDS // n))
    half = timed(stage, steady, cycles * per_cycle, batch, num_ranks)
    whole = timed(stage, steady, 2 * cycles * per_cycle, batch, num_ranks)
    span_ns = whole.end_ns - half.end_ns
    net = network(steady, stage.trainer.dense_bytes)
    workers = []
    for rank, worker in enumerate(plan.workers):
        cycle_ns = local_steps[rank] * step_ns[rank] + stage.topology.exchange_ns(stage, net, rank)
        workers.append(replace(worker, predicted_cycle_s=cycle_ns / NS))
    return replace(
        plan,
        workers=tuple(workers),
        predicted_steps_per_s=(whole.steps - half.steps) / span_ns * NS if span_ns else None,
        predicted_wait_share=(whole.wait_ns - half.wait_ns) / (span_ns * n) if span_ns else None,
    )

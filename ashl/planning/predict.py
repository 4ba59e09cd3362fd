"""What a plan should reach: its stages timed in virtual time, without gradients."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ashl.cluster.all_reduce_costs import contention_of
from ashl.cluster.network import network
from ashl.cluster.spec import Cluster, Measured
from ashl.cluster.speed import NS, Speed, speed_of
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.planning.step_timelines import Uncontended, make_group_timeline
from ashl.runtime.contended_sim import simulator
from ashl.runtime.records import Record, Round, Rounds, Snapshot, StageEnd, UpdateShown
from ashl.size_only import Vector
from ashl.stage.compression_pipeline import CompressionPipeline
from ashl.stage.program import program
from ashl.stage.stage import Stage, extra_ranks

# of every worker: enough for the slack of a bounded lead to be used up within the first half
CYCLES = 128
ROUNDS = 10_000  # of all workers together: enough for thousands of them, and quick
STEPS = 400_000  # of all workers together, where H is large
MARKS = 8  # at which the counts are read on the way
WITHOUT = Limits(
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
    """How a stage stood at some moment."""

    steps: int
    time_ns: int
    came_ns: Mapping[
        int, int
    ]  # when each rank had come so far, where that is not the same moment for all


class StageObserver:
    """An observer that keeps how a stage stood on its way and at its end, and when its workers
    waited.
    """

    rounds: Rounds = "all"

    def __init__(self, num_workers: int, home: int) -> None:
        self.num_workers, self.lead_rank = num_workers, home
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.steps: dict[int, int] = {}  # by version of the model, at each evaluation
        self.came_ns: dict[int, dict[int, int]] = {}  # ... when those who count had come to it
        self.waits: list[tuple[int, int, int]] = []  # whose, from when, to when
        self.end = ProgressMark(0, 0, {})

    def emit(self, record: Record) -> None:
        match record:
            case StageEnd():
                self.end = ProgressMark(record.counts.steps, record.end_ns, {})
            case Round() if record.rank < self.num_workers:
                self.waits += [
                    (record.rank, start, end)
                    for kind, start, end in record.spans_ns
                    if kind == "wait"
                ]

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        """A rank that counts has come to an evaluation; nothing is learned, so there is nothing to
        evaluate.
        """
        if not isinstance(record, Snapshot) or record.final:
            return
        if record.counts is not None:
            version = record.counts.merges
            self.steps[version] = record.counts.steps
        elif (
            record.tick is not None and self.lead_rank != self.num_workers
        ):  # all count alike, and call their rounds so
            version = record.tick
        else:
            return
        self.came_ns.setdefault(version, {})[record.rank] = record.time_ns

    def half_and_whole(self) -> tuple[ProgressMark, ProgressMark]:
        """The mark nearest to half of the steps, and the end. What is counted because it had begun
        by the end is in no mark, so the last mark stands for the end where they are at one moment.
        """
        came = self.came_ns
        marks = [
            ProgressMark(steps, max(came[k].values()), came[k]) for k, steps in self.steps.items()
        ] or [ProgressMark(0, 0, {})]
        whole = marks[-1] if marks[-1].time_ns == self.end.time_ns else self.end
        return min(marks, key=lambda mark: abs(2 * mark.steps - whole.steps)), whole

    def waited_ns(self, mark: ProgressMark) -> int:
        """What all workers together had waited by then, with who had come earlier waiting for the
        others.
        """
        own = [mark.came_ns.get(rank, mark.time_ns) for rank in range(self.num_workers)]
        before = sum(
            min(end, own[rank]) - start for rank, start, end in self.waits if start < own[rank]
        )
        return before + sum(mark.time_ns - came for came in own)


def simulate_stage(
    stage: Stage, cluster: Cluster, steps: int, cycles: int, batch: int
) -> StageObserver:
    """How a stage stands on its way to so many steps, which are about so many cycles of every
    worker.
    """
    n = stage.num_workers
    seen = StageObserver(n, stage.lead_rank)
    limits = replace(WITHOUT, steps=steps, eval_every_commits=max(1, cycles * n // MARKS))
    bounded = replace(
        stage,
        index=0,
        plan=replace(stage.plan, until={}),
        following=False,
        limits=limits,
        elastic=False,
    )
    num_ranks = n + extra_ranks(stage.topology, stage.sync, stage.nodes)
    costs = network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
    sim = simulator(
        num_ranks, speed_of(cluster, batch, seed=0), costs, seen, overlaps=stage.sums_beside
    )
    sim.run(partial(program, stages=(bounded,)), tick=lambda: None)
    return seen


def steps_of(stage: Stage, worker: WorkerPlan, step_ns: int) -> int:
    """Steps between two merges: one where gradients are exchanged, as many as fill the interval
    where the sync mode has one, else the plan's H.
    """
    interval_ns = stage.sync.interval_s * NS
    if stage.sync.exchange == "gradient":
        return 1
    return math.ceil(interval_ns / step_ns) if interval_ns else worker.local_steps


def bucketed_step_ns(stage: Stage, speed: Speed, costs: Uncontended) -> list[int]:
    """How long a step and its exchange take each worker in the long run, where messages go while it
    computes.
    """
    links = {
        (m.start, m.stop): link
        for m, link in zip(stage.messages, stage.links, strict=bool(stage.links))
    }

    def link_of(start: int, stop: int) -> CompressionPipeline:
        return links.get((start, stop), stage.link)

    cycles, known = [], dict[Hashable, int]()
    for rank in range(stage.num_workers):
        server = stage.topology.has_server
        timeline = make_group_timeline(
            (rank,), stage.plan, speed, costs, stage.parts, link_of if links else None, server
        )
        like = (
            timeline.ready_ns,
            timeline.needed_ns,
            rank if server else None,
        )  # a sum costs all the same
        if like not in known:
            known[like] = stage.overlap.step_ns(timeline)
        cycles.append(known[like])
    return cycles


def predict(stage: Stage, cluster: Cluster, batch: int) -> StagePlan:
    """The stage's plan with each worker's cycle, and steps/s and wait share in the long run, filled
    in.
    """
    plan, n = stage.plan, stage.num_workers
    stage = stage.truncate_last_round(
        stage.remaining_rounds(0, 0)
    )  # a round may be longer than the whole run
    if stage.sync.loop(stage, 0) is not None:  # a stage that only measures takes no steps
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
    half, whole = seen.half_and_whole()
    span_ns, waited_ns = whole.time_ns - half.time_ns, seen.waited_ns(whole) - seen.waited_ns(half)
    costs = Uncontended(network(steady, stage.trainer.dense_bytes, stage.topology.algorithm))
    cycles_ns = bucketed_step_ns(stage, speed, costs) if stage.messages else []
    for rank in range(n) if not stage.messages else ():
        steps, exchange_ns = local_steps[rank], stage.topology.exchange_ns(stage, costs, rank)
        hidden_ns = stage.delayed.overlapped_steps(steps) * step_ns[rank] if stage.delayed else 0
        cycles_ns.append(steps * step_ns[rank] + max(0, exchange_ns - hidden_ns))
    if (
        stage.by_priority or (stage.sums_beside and contention_of(cluster))
    ) and span_ns:  # chains do not know all
        cycles_ns = [round(span_ns * sum(local_steps) / (whole.steps - half.steps))] * n
    return replace(
        plan,
        workers=tuple(
            replace(w, predicted_cycle_s=ns / NS)
            for w, ns in zip(plan.workers, cycles_ns, strict=True)
        ),
        predicted_steps_per_s=(whole.steps - half.steps) / span_ns * NS if span_ns else None,
        predicted_wait_share=waited_ns / (span_ns * n) if span_ns else None,
    )

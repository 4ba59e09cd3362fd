"""Shared by the tests: a run in virtual time with everything that it said, from command-line
overrides.
"""

import hashlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from torch import Tensor

from ashl.cluster.network import make_network
from ashl.cluster.speed import speed_of
from ashl.config.compose import compose
from ashl.config.construct import construct
from ashl.device import HOST, to_host
from ashl.learn.learner import Learner
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import assemble_job
from ashl.run.evaluation import EvaluatedModel, ModelSet, count_rises, make_model_set
from ashl.runtime.churn import Churn
from ashl.runtime.contended_sim import simulator
from ashl.runtime.records import (
    Record,
    Rounds,
    RunEnding,
    Snapshot,
    WorkerFailed,
    WorkerRejoined,
    as_fields,
)
from ashl.runtime.sim import Sim
from ashl.size_only import Vector
from ashl.stage.contract import StageConfig
from ashl.stage.program import peers_of, run_stages


def slow_unless(quick: Container[Any], cases: Iterable[Any]) -> list[ParameterSet]:
    """Return cases for `parametrize`; all but the quick ones run with `-m slow` alone."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick)) for case in cases]


@dataclass
class Ran:
    """An observer that keeps everything."""

    plan: Plan
    rounds: Rounds = "all"
    stop_reason: str | None = None
    records: list[dict] = field(default_factory=list)
    snapshots: list[tuple[dict, Any]] = field(default_factory=list)
    models: dict[int, Any] = field(
        default_factory=dict
    )  # each worker's at the end, where it has its own
    events: int = 0
    parts: ModelSet | None = None  # where every worker has a model of its own
    learner: Learner | None = None
    scored: dict[int, dict[str, float | None]] = field(default_factory=dict)

    def emit(self, record: Record) -> None:
        self.records.append(flat(record))
        if self.parts is not None and isinstance(record, WorkerFailed):
            for whole in self.parts.exclude_worker(record.rank):
                self.keep(whole)
        elif self.parts is not None and isinstance(record, WorkerRejoined):
            self.parts.restore_worker(record.rank)
        elif self.parts is not None and isinstance(record, RunEnding):
            self.parts.end_ns = record.time_ns

    def keep(self, whole: EvaluatedModel) -> None:
        self.snapshots.append(
            (flat(whole.snapshot) | {"consensus_distance": whole.distance}, whole.params)
        )

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        vector = to_host(vector) if isinstance(vector, Tensor) else vector
        whole = EvaluatedModel(record, vector)
        if self.parts is not None:
            if record.final and vector is not None:
                self.models[record.rank] = vector
            whole = self.parts.add(record, vector)
        if whole is not None:
            self.keep(whole)

    @property
    def scores(self) -> dict[str, float | None] | None:
        """Return the evaluation of the last model, if a stage requests one."""
        if not self.snapshots or not any(
            {"evaluated_loss", "accuracy", "rises"} & set(s.until) for s in self.plan.stages
        ):
            return None
        for number in range(len(self.scored) + 1, len(self.snapshots) + 1):
            assert self.learner is not None
            found = self.scored[number] = self.learner.evaluate(self.snapshots[number - 1][1])
            found["rises"] = count_rises([scores["train_loss"] for scores in self.scored.values()])
        return self.scored[len(self.snapshots)]

    def of(self, kind: str) -> list[dict]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def end(self) -> dict:
        return self.of("StageEnd")[-1]

    @property
    def params(self) -> Tensor:
        record, params = self.snapshots[-1]
        assert record["final"]
        return params

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.params.numpy().tobytes()).hexdigest()

    @property
    def time_ns(self) -> int:
        return self.end["end_ns"]

    @property
    def steps_per_s(self) -> float:
        return self.end["steps"] / self.time_ns * 1e9

    @property
    def ledgers(self) -> list[dict[str, int]]:
        n = self.plan.num_workers
        return [
            r["totals_ns"]
            for r in sorted(self.of("TimeTotals"), key=lambda r: r["rank"])
            if r["rank"] < n
        ]


def flat(record: Record) -> dict[str, Any]:
    """A record as plain values, its counts among them."""
    fields = as_fields(record)
    return fields | (fields.pop("counts", None) or {})


def befallen(sim: Sim, cluster: Any, seed: int, stages: tuple[StageConfig, ...]) -> Callable:
    """Return the programs of all ranks, with the injected faults of the cluster."""
    play = partial(run_stages, stages=stages)
    if cluster.fault_kinds:
        peers, regroups = partial(peers_of, stages), stages[0].topology.regroups
        Churn(sim, cluster, seed, stages[0].min_workers, peers, play, regroups)
    return play


def planned(*overrides: str) -> Plan:
    return compile_plan(compose(["runtime=sim", "tracking=none", *overrides], None))


def simulated(*overrides: str) -> Ran:
    """Run these overrides in virtual time."""
    return run(planned(*overrides))


def run(
    plan: Plan,
    rebound: Callable[[StageConfig], StageConfig] = lambda stage: stage,
    device: str = HOST,
) -> Ran:
    """Run a plan in virtual time, with its stages `rebound`."""
    job = assemble_job(plan, device)
    cluster = construct(plan.cluster, "cluster")
    stages = tuple(map(rebound, job.stages))
    stage = stages[0]
    ran = Ran(plan, parts=make_model_set(stage), learner=job.learner)
    speed = speed_of(cluster, stage.plan.workers[0].batch, plan.seed)
    costs = make_network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
    sim = simulator(plan.num_ranks, speed, costs, ran, overlaps=stage.computes_during_collectives)
    play = befallen(sim, cluster, plan.seed, stages)
    sim.run(play, tick=lambda: None)
    ran.events = sim.events
    return ran

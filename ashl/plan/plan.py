"""A plan: every choice of a run, resolved into plain values. It is the same for virtual time and for a real run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SCHEMA = 1
Spec = dict[str, Any]  # `_target_` and its parameters
AVERAGE: Spec = {"_target_": "ashl.outer.average.Average"}  # what plans had before they said it


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What one worker does in one stage."""

    local_steps: int  # H, between two merges
    batch: int  # samples of one step
    data_share: float  # of the training set
    compression_ratio: float  # kept share of the update; 1 = dense
    predicted_cycle_s: float | None  # H steps, push and pull; null where costs are not declared
    message_bytes: int | None = None  # of one compressed update, at most; null once the ratio was planned anew


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    name: str
    sync: Spec
    topology: Spec
    aggregate: Spec
    outer: Spec = field(default_factory=AVERAGE.copy)
    compression: Spec
    optimizer: Spec
    until: dict[str, float]  # rule → bound, see Stage.reached; empty: until the run's own stop rule
    workers: tuple[WorkerPlan, ...]
    handover: dict[str, str] = field(default_factory=dict)  # what the workers do with momentum (keep, reset), residual
    h_preset: int | None = None  # where H is planned: the slowest worker's
    r_preset: float | None = None  # and the preset compression ratio; null = the codec's own
    predicted_steps_per_s: float | None = None
    predicted_wait_share: float | None = None


def assigned(workers: Sequence[WorkerPlan], rows: Sequence[Any]) -> tuple[WorkerPlan, ...]:
    """The workers with H, data share, ratio and cycle as a planner assigns them."""
    return tuple(
        replace(
            worker,
            local_steps=row.local_steps,
            data_share=row.data_share,
            compression_ratio=row.compression_ratio,
            predicted_cycle_s=row.predicted_cycle_s,
            message_bytes=worker.message_bytes if row.compression_ratio == worker.compression_ratio else None,
        )
        for worker, row in zip(workers, rows, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends (the first that is reached) and when it is evaluated."""

    epochs: float | None
    steps: int | None
    seconds: float | None
    target_accuracy: float | None
    target_loss: float | None
    target_hold: int
    eval_every_s: float | None
    eval_every_commits: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole run. Specs are `_target_` mappings that `ashl.planning.build` turns into objects in every process."""

    schema: int
    name: str
    seed: int
    num_workers: int
    num_ranks: int  # the workers, and the server where there is one
    num_params: int
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and shape of each parameter tensor
    choices: dict[str, str] = field(default_factory=dict)  # each group's option by name; no sync where stages name it
    model: Spec
    dataset: Spec
    cluster: Spec
    runtime: Spec
    planner: Spec
    limits: Limits
    stages: tuple[StagePlan, ...]
    predicted_s: float | None = None  # the whole run on its own clock, if no target ends it before
    allow_targets: tuple[str, ...] = ()
    health_every: int | None = None  # rounds between two looks at what compression loses
    health_layers: bool = False
    health_mean: bool = False
    notes: tuple[str, ...] = ()  # what is legal and worth knowing

    @property
    def home(self) -> int:
        """The rank that judges, counts and hands out snapshots: the server, or worker 0 where there is none."""
        return self.num_workers if self.num_ranks > self.num_workers else 0

    def num_steps(self, epoch_samples: int) -> int | None:
        """The count of steps at which the run ends, if neither time nor a target ends it before; None = by no count."""
        batch = sum(worker.batch for worker in self.stages[-1].workers) / self.num_workers
        by_epochs = None if self.limits.epochs is None else math.ceil(self.limits.epochs * epoch_samples / batch)
        return min((count for count in (self.limits.steps, by_epochs) if count is not None), default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError, KeyError or TypeError on anything that is not a plan of this schema."""
        data: Any = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')} where {SCHEMA} was expected")
        for stage in data["stages"]:
            stage["workers"] = tuple(WorkerPlan(**worker) for worker in stage["workers"])
        data["stages"] = tuple(StagePlan(**stage) for stage in data["stages"])
        data["limits"] = Limits(**data["limits"])
        data["layers"] = tuple((name, tuple(shape)) for name, shape in data.get("layers", ()))
        for key in ("allow_targets", "notes"):
            data[key] = tuple(data.get(key, ()))
        return Plan(**data)

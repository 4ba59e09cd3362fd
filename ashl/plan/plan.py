"""Plan: every choice of a run, resolved into plain values, the same for virtual time and real
runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.plan.checks import FILE, Count, Name, Natural, Share, one_of, read_json

SCHEMA = 1
ENDS = ("loss", "evaluated_loss", "accuracy", "rises", "plateau", "epochs", "commits", "seconds")
Until = Annotated[str, one_of(*ENDS)]
# at the boundary to a stage
Kept = Annotated[str, one_of("momentum", "residual")]
Handover = Annotated[str, one_of("keep", "reset", "drop")]
Spec = dict[str, Any]  # `_target_` and its parameters
# defaults of keys that older plan files lack
AVERAGE: Spec = {"_target_": "ashl.outer.average.Average"}
SERIAL: Spec = {"_target_": "ashl.overlap.none.Serial"}
CLASSES: Spec = {"_target_": "ashl.task.classification.Classification"}


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The work of one worker in one stage."""

    __pydantic_config__: ClassVar = FILE
    local_steps: Count  # H, steps between two merges
    batch: Count  # samples per step
    data_share: Share  # n_i / n, the size of the worker's shard over the training set
    compression_ratio: Share  # density of the update; 1 = dense
    # median seconds of a round without waiting; null = costs not declared
    predicted_cycle_s: float | None
    # upper bound on the bytes of one compressed update; null after the density was replanned
    message_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: its options as specs, its end, and the work of each worker."""

    __pydantic_config__: ClassVar = FILE
    name: Name
    sync: Spec
    topology: Spec
    aggregate: Spec
    outer: Spec = field(default_factory=AVERAGE.copy)
    compression: Spec
    overlap: Spec = field(default_factory=SERIAL.copy)  # with the layer groups of its messages
    optimizer: Spec
    until: dict[Until, float]  # rule → bound, see Stage.reached; empty = until the run's stop rule
    workers: tuple[WorkerPlan, ...]
    # at the boundary to this stage: momentum (keep or reset), residual (keep or drop)
    handover: dict[Kept, Handover] = field(default_factory=dict)
    h_preset: Count | None = None  # the slowest worker's H, if H is planned
    r_preset: Share | None = None  # preset density, if densities are planned; null = the codec's
    predicted_steps_per_s: float | None = None
    predicted_wait_share: float | None = None

    @property
    def is_profiling(self) -> bool:
        """Return True if the stage measures costs and learns nothing."""
        return str(self.sync["_target_"]).endswith(".Profiling")


def assign_work(
    workers: Sequence[WorkerPlan], rows: Sequence[Any], resharded: bool = True
) -> tuple[WorkerPlan, ...]:
    """Return the workers with H, data share (if `resharded`), density and cycle of a planner's
    assignment.
    """
    return tuple(
        replace(
            worker,
            local_steps=row.local_steps,
            data_share=row.data_share if resharded else worker.data_share,
            compression_ratio=row.compression_ratio,
            predicted_cycle_s=row.predicted_cycle_s,
            message_bytes=worker.message_bytes
            if row.compression_ratio == worker.compression_ratio
            else None,
        )
        for worker, row in zip(workers, rows, strict=True)
    )


TARGETS = ("target_accuracy", "target_loss", "target_metric")  # one reached target ends the run
PATIENCE = "patience"  # exit reason of a run that stop.patience ended


@dataclass(frozen=True, kw_only=True)
class Limits:
    """End of a run (the first limit or target that is reached) and times of its evaluations."""

    __pydantic_config__: ClassVar = FILE
    epochs: float | None
    steps: int | None
    seconds: float | None
    target_accuracy: float | None
    target_loss: float | None
    target_consecutive_evals: int
    eval_every_s: float | None
    eval_every_commits: int | None
    target_metric: float | None = None
    patience: int | None = None  # consecutive evaluations without a new best metric


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole run; each process constructs its options from the specs, see
    `ashl.planning.instantiate`.
    """

    __pydantic_config__: ClassVar = FILE
    schema: int
    name: str
    seed: Natural
    num_workers: Count
    num_ranks: int  # workers and servers or coordinator
    num_params: int
    sample_shape: tuple[int, ...] = ()  # shape of one sample
    num_classes: int = 0  # number of outputs that the data set needs
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and shape of each parameter tensor
    work: tuple[int, ...] = ()  # operations of each tensor in a forward pass; empty = not needed
    # share of a step after which each layer group's gradient is ready, as measured
    shares: tuple[float, ...] = ()
    # share of a step after which the forward pass reaches each layer group, as measured
    needed: tuple[float, ...] = ()
    # option of each group, by name; without sync if the schedule sets that of each stage
    choices: dict[str, str] = field(default_factory=dict)
    model: Spec
    dataset: Spec
    task: Spec = field(default_factory=CLASSES.copy)
    cluster: Spec
    runtime: Spec
    planner: Spec
    limits: Limits
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    predicted_s: float | None = None  # seconds of the whole run if no target ends it earlier
    allow_targets: tuple[str, ...] = ()
    start_from: str | None = None  # path of the initial weights; None = random, from the seed
    compression_stats_every: int | None = None  # rounds between two measurements; None = never
    notes: tuple[str, ...] = ()  # remarks for the user, one sentence each

    @property
    def lead_rank(self) -> int:
        """Return the rank that counts, decides the end and emits snapshots: the server, or worker 0
        without a server.
        """
        return self.num_workers if self.num_ranks > self.num_workers else 0

    def num_steps(self, epoch_samples: int) -> int | None:
        """Return the number of steps at which the run ends if no time or target ends it earlier.

        Returns: None if neither steps nor epochs limit the run.
        """
        batch = sum(worker.batch for worker in self.stages[-1].workers) / self.num_workers
        by_epochs = (
            None
            if self.limits.epochs is None
            else math.ceil(self.limits.epochs * epoch_samples / batch)
        )
        return min(
            (count for count in (self.limits.steps, by_epochs) if count is not None), default=None
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of a JSON text.

        Raises: ValueError, one sentence, if it is not a plan of this schema.
        """
        return read_json(Plan, text, SCHEMA)

"""Plan: every choice of a run, resolved into plain values, the same for virtual time and real
runs.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from ashl.errors import parsed

T = TypeVar("T")
SCHEMA = 1
Spec = dict[str, Any]  # `_target_` and its parameters
# defaults of keys that older plan files lack
AVERAGE: Spec = {"_target_": "ashl.outer.average.Average"}
SERIAL: Spec = {"_target_": "ashl.overlap.none.Serial"}
CLASSES: Spec = {"_target_": "ashl.task.classification.Classification"}


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The work of one worker in one stage."""

    local_steps: int  # H, steps between two merges
    batch: int  # samples per step
    data_share: float  # n_i / n, the size of the worker's shard over the training set
    compression_ratio: float  # density of the update; 1 = dense
    predicted_cycle_s: float | None  # seconds of H steps, push and pull; null = costs not declared
    # upper bound on the bytes of one compressed update; null after the density was replanned
    message_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: its options as specs, its end, and the work of each worker."""

    name: str
    sync: Spec
    topology: Spec
    aggregate: Spec
    outer: Spec = field(default_factory=AVERAGE.copy)
    compression: Spec
    overlap: Spec = field(default_factory=SERIAL.copy)  # with the layer groups of its messages
    optimizer: Spec
    until: dict[str, float]  # rule → bound, see Stage.reached; empty = until the run's stop rule
    workers: tuple[WorkerPlan, ...]
    # at the boundary to this stage: momentum (keep or reset), residual (keep or drop)
    handover: dict[str, str] = field(default_factory=dict)
    h_preset: int | None = None  # the slowest worker's H, if H is planned
    r_preset: float | None = None  # preset density, if densities are planned; null = the codec's
    predicted_steps_per_s: float | None = None
    predicted_wait_share: float | None = None


def assigned(
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

    schema: int
    name: str
    seed: int
    num_workers: int
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
    stages: tuple[StagePlan, ...]
    predicted_s: float | None = None  # seconds of the whole run if no target ends it earlier
    allow_targets: tuple[str, ...] = ()
    start_from: str | None = None  # path of the initial weights; None = random, from the seed
    compression_stats_every: int | None = None  # rounds between two measurements; None = never
    compression_stats_per_layer: bool = False
    compression_stats_vs_mean: bool = False
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

        Raises: ValueError, KeyError or TypeError if it is not a plan of this schema.
        """
        data: Any = parsed(text)
        if not isinstance(data, dict) or data.get("schema", SCHEMA) != SCHEMA:
            found = f"schema {data['schema']}" if isinstance(data, dict) else "no mapping of keys"
            raise ValueError(f"{found} where schema {SCHEMA} was expected")
        data["stages"] = tuple(
            _stage(stage, f"stage {i}") for i, stage in enumerate(_list(data["stages"], "stages"))
        )
        data["limits"] = _made(Limits, data["limits"], "limits")
        data["layers"] = tuple(_layer(layer) for layer in _list(data.get("layers", []), "layers"))
        for key in ("allow_targets", "notes", "work", "shares", "needed", "sample_shape"):
            data[key] = tuple(_list(data.get(key, []), key))
        for key in ("model", "dataset", "task", "cluster", "runtime", "planner", "choices"):
            _mapping(data.get(key, {}), key)
        return _made(Plan, data, "the plan")


def _stage(data: Any, where: str) -> StagePlan:
    """Return a stage of a plan file. Raises: ValueError."""
    where = f"stage {_mapping(data, where).get('name', where)}"
    for key in (
        "sync",
        "topology",
        "aggregate",
        "outer",
        "compression",
        "overlap",
        "optimizer",
        "until",
        "handover",
    ):
        _mapping(data.get(key, {}), f"{where}: {key}")
    workers = [
        _made(WorkerPlan, worker, f"{where}, worker {rank}")
        for rank, worker in enumerate(_list(data.get("workers", []), f"{where}: workers"))
    ]
    return _made(StagePlan, {**data, "workers": tuple(workers)}, where)


def _layer(data: Any) -> tuple[str, tuple[int, ...]]:
    if len(_list(data, "a layer")) != 2:
        raise ValueError(f"a layer is {json.dumps(data)}, where a name and a shape are expected")
    name, shape = data
    return name, tuple(_list(shape, f"the shape of layer {name}"))


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {json.dumps(data)}, where keys and values are expected")
    return data


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{where} is {json.dumps(data)}, where a list is expected")
    return data


def _made(cls: type[T], data: Any, where: str) -> T:
    """Return a dataclass made from a mapping, which must have all required keys and no unknown one.

    Raises: ValueError.
    """
    known = {field.name: field for field in fields(cls)}  # ty: ignore[invalid-argument-type]
    for key in _mapping(data, where):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"{where} has no key {key!r}; {hint}")
    needed = (
        key
        for key, own in known.items()
        if own.default is MISSING and own.default_factory is MISSING
    )
    for key in needed:
        if key not in data:
            raise ValueError(f"{where} lacks {key!r}")
    return cls(**data)

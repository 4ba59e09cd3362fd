"""A plan: every choice of a run, resolved into plain values. It is the same for virtual time and
for a real run.
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
AVERAGE: Spec = {"_target_": "ashl.outer.average.Average"}  # what plans had before they said it
SERIAL: Spec = {"_target_": "ashl.overlap.none.Serial"}
CLASSES: Spec = {"_target_": "ashl.task.classification.Classification"}  # likewise


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What one worker does in one stage."""

    local_steps: int  # H, between two merges
    batch: int  # samples of one step
    data_share: float  # n_i / n, the worker's shard by the training set
    compression_ratio: float  # density of the update; 1 = dense
    predicted_cycle_s: float | None  # H steps, push and pull; null where costs are not declared
    message_bytes: int | None = (
        None  # of one compressed update, at most; null once the ratio was planned anew
    )


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    name: str
    sync: Spec
    topology: Spec
    aggregate: Spec
    outer: Spec = field(default_factory=AVERAGE.copy)
    compression: Spec
    overlap: Spec = field(default_factory=SERIAL.copy)  # with the groups of its messages
    optimizer: Spec
    until: dict[str, float]  # rule → bound, see Stage.reached; empty: until the run's own stop rule
    workers: tuple[WorkerPlan, ...]
    handover: dict[str, str] = field(
        default_factory=dict
    )  # what the workers do with momentum (keep, reset), residual
    h_preset: int | None = None  # where H is planned: the slowest worker's
    r_preset: float | None = None  # and the preset compression ratio; null = the codec's own
    predicted_steps_per_s: float | None = None
    predicted_wait_share: float | None = None


def assigned(
    workers: Sequence[WorkerPlan], rows: Sequence[Any], resharded: bool = True
) -> tuple[WorkerPlan, ...]:
    """The workers with H, data share (where they are resharded), ratio and cycle as a planner
    assigns them.
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


TARGETS = ("target_accuracy", "target_loss", "target_metric")  # any of them, once it holds
PATIENCE = "patience"  # the exit reason of a run without a new best for too many evaluations


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends (the first that is reached) and when it is evaluated."""

    epochs: float | None
    steps: int | None
    seconds: float | None
    target_accuracy: float | None
    target_loss: float | None
    target_consecutive_evals: int
    eval_every_s: float | None
    eval_every_commits: int | None
    target_metric: float | None = None
    patience: int | None = None  # evaluations in a row without a new best


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole run: each process makes objects of its specs, see `ashl.planning.instantiate`."""

    schema: int
    name: str
    seed: int
    num_workers: int
    num_ranks: int  # the workers, and the server where there is one
    num_params: int
    sample_shape: tuple[int, ...] = ()  # of what the model is given
    num_classes: int = 0  # outputs that the data set asks for
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and shape of each parameter tensor
    work: tuple[
        int, ...
    ] = ()  # what each costs in a forward pass, where messages are planned by it
    shares: tuple[float, ...] = ()  # ... or of a step, until each layer group is ready, as measured
    needed: tuple[float, ...] = ()  # ... and until forward comes to each
    choices: dict[str, str] = field(
        default_factory=dict
    )  # each group's option by name; no sync where stages name it
    model: Spec
    dataset: Spec
    task: Spec = field(default_factory=CLASSES.copy)
    cluster: Spec
    runtime: Spec
    planner: Spec
    limits: Limits
    stages: tuple[StagePlan, ...]
    predicted_s: float | None = None  # the whole run on its own clock, if no target ends it before
    allow_targets: tuple[str, ...] = ()
    start_from: str | None = None  # a file of weights to begin with; None = drawn by the seed
    compression_stats_every: int | None = None  # rounds between two looks at what compression loses
    compression_stats_per_layer: bool = False
    compression_stats_vs_mean: bool = False
    notes: tuple[str, ...] = ()  # what is legal and worth knowing

    @property
    def lead_rank(self) -> int:
        """The rank that judges, counts and hands out snapshots: the server, or worker 0 where there
        is none.
        """
        return self.num_workers if self.num_ranks > self.num_workers else 0

    def num_steps(self, epoch_samples: int) -> int | None:
        """The count of steps at which the run ends, if neither time nor a target ends it before;
        None = by no count.
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
        """Raises ValueError, KeyError or TypeError on anything that is not a plan of this
        schema.
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
    """A stage as a file has it. Raises ValueError."""
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
    """A dataclass of a mapping, all of whose keys it has and which has all that it needs. Raises
    ValueError.
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

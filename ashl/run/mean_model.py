"""Where every worker has a model of its own: the mean of all models, which is what is evaluated, and their spread; and
where several servers have a piece of it each, the pieces put together.

Rule: x̄ = (1/n)·Σ_i x_i, in double precision and rank order, so that the mean of equal models is that model bit for bit;
consensus distance (1/n)·Σ_i ‖x_i − x̄‖².

Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the distance).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ashl.runtime.records import Snapshot
from ashl.runtime.sums import together
from ashl.size_only import SizeOnly, Vector
from ashl.stage.stage import Stage


class EvaluatedModel(NamedTuple):
    """What one evaluation is made of. `distance`: of the models from their mean, where each worker has its own."""

    snapshot: Snapshot  # with the counts
    params: Vector | None
    distance: float | None = None


def mean_of(models: Sequence[Vector]) -> tuple[Vector, float | None]:
    """(x̄, consensus distance); tensors that are only sizes have no distance."""
    tensors = [model for model in models if not isinstance(model, SizeOnly)]
    if not tensors:
        return models[0], None
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for model in tensors:
        total += model
    mean: Tensor = (total / len(tensors)).to(tensors[0].dtype)
    squares = [float(torch.linalg.vector_norm(model - mean, dtype=torch.float64)) ** 2 for model in tensors]
    return mean, sum(squares) / len(tensors)


@dataclass
class ModelSet:
    """Snapshots that make one evaluation together, until the last of them has come.

    Each worker gives its model with the evaluation's `tick` (none = at the end); the home rank, a worker or not, gives
    the counts. Where a snapshot was left out (see `run.reporter`), its evaluation never comes and is forgotten. Of a
    worker that is lost no model is waited for. Of pieces of one model, as many are waited for as there are servers.
    """

    num_workers: int
    pieces: bool = False
    _parts: dict[int | None, dict[int, tuple[Snapshot, Vector | None]]] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)  # workers that are lost now
    _without: dict[int | None, set[int]] = field(default_factory=dict)  # ... and of whom nothing will come

    def add(self, snapshot: Snapshot, params: Vector | None) -> EvaluatedModel | None:
        """The whole once all have come: with the counts and the latest time."""
        tick, rank = snapshot.tick, snapshot.rank
        parts = self._parts.setdefault(tick, {})
        parts[rank] = snapshot, params
        for other in [t for t in self._parts if t is not None and (tick is None or t < tick)]:
            if rank not in self._parts[other]:
                self._forget(other)  # a rank's snapshots come in order: this one stays incomplete
        self._without.setdefault(tick, set(self._gone)).update(snapshot.without)
        return self._whole(tick)

    def lose(self, rank: int) -> list[EvaluatedModel]:
        """A worker is lost; what is whole without it. Of pieces no worker has any."""
        if self.pieces:
            return []
        self._gone.add(rank)
        for without in self._without.values():
            without.add(rank)
        return [whole for tick in [*self._parts] if (whole := self._whole(tick))]

    def restore_worker(self, rank: int) -> None:
        """A worker is back."""
        self._gone.discard(rank)

    def has_pending(self, merges: int) -> bool:
        """Of pieces: whether some are still to come of a model after at most so many merges."""
        return self.pieces and any(tick is not None and tick <= merges for tick in self._parts)

    def discard_pending(self) -> None:
        """What has not come yet will not."""
        self._parts.clear()
        self._without.clear()

    def _forget(self, tick: int | None) -> None:
        del self._parts[tick]
        del self._without[tick]

    def _whole(self, tick: int | None) -> EvaluatedModel | None:
        parts, without = self._parts[tick], self._without[tick]
        models = [model for _, (_, model) in sorted(parts.items()) if model is not None]
        home = next((part for part, _ in parts.values() if part.counts is not None), None)
        if home is None or not models or len(models) + len(without - parts.keys()) < self.num_workers:
            return None
        self._forget(tick)
        time_ns = home.time_ns if tick is None else max(part.time_ns for part, _ in parts.values())
        found = (together(models), None) if self.pieces else mean_of(models)
        return EvaluatedModel(home._replace(time_ns=time_ns), *found)


def shard_sizes(stage: Stage) -> dict[int, int]:
    """How many parameters each server has, where each holds a piece of the model."""
    if stage.topology.servers == 1:
        return {}
    return {stage.server + k: held.size for k, held in enumerate(stage.fragments)}


def make_model_set(stage: Stage) -> ModelSet | None:
    """What puts a stage's evaluations together, where no rank has all of the model."""
    if stage.topology.servers > 1:
        return ModelSet(stage.topology.servers, pieces=True)
    return ModelSet(stage.num_workers) if stage.replicas else None

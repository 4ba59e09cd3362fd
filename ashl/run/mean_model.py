"""Where every worker has a model of its own: the mean of all models, which is what is evaluated, and their spread.

Rule: x̄ = (1/n)·Σ_i x_i, in double precision and rank order, so that the mean of equal models is that model bit for bit;
consensus distance (1/n)·Σ_i ‖x_i − x̄‖².

Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the distance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ashl.size_only import SizeOnly


def mean_of(models: Sequence[Any]) -> tuple[Any, float | None]:
    """(x̄, consensus distance); tensors that are only sizes have no distance."""
    if isinstance(models[0], SizeOnly):
        return models[0], None
    total = torch.zeros(models[0].shape, dtype=torch.float64)
    for model in models:
        total += model
    mean: Tensor = (total / len(models)).to(models[0].dtype)
    squares = [float(torch.linalg.vector_norm(model - mean, dtype=torch.float64)) ** 2 for model in models]
    return mean, sum(squares) / len(models)


@dataclass
class ModelSet:
    """Snapshots that make one evaluation together, until the last of them has come.

    Each worker gives its model with the evaluation's `tick` (none = at the end); the home rank, a worker or not, gives
    the counts. Where a snapshot was left out (see `runtime.reporter`), its evaluation never comes and is forgotten.
    """

    num_workers: int
    _parts: dict[int | None, list[tuple[dict, Any]]] = field(default_factory=dict)

    def add(self, record: dict, params: Any) -> tuple[dict, Any] | None:
        """(record, mean) once all have come: with the counts, the latest time and `consensus_distance`."""
        tick = record.get("tick")
        parts = self._parts.setdefault(tick, [])
        parts.append((record, params))
        models = {part["rank"]: model for part, model in parts if model is not None}
        counts = next((part for part, _ in parts if "commits" in part), None)
        if counts is None or len(models) < self.num_workers:
            return None
        for other in [t for t in self._parts if tick is None or (t is not None and t <= tick)]:
            del self._parts[other]  # a rank's snapshots come in order: what is incomplete by now stays so
        time_ns = counts["time_ns"] if tick is None else max(part["time_ns"] for part, _ in parts)
        mean, distance = mean_of([models[rank] for rank in sorted(models)])
        return {**counts, "time_ns": time_ns, "consensus_distance": distance}, mean

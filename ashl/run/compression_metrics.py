"""What the workers said of their compression, as metrics; and the warning where a codec enlarges what it is given."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ashl.compression.wrappers.error_metrics import cosine
from ashl.runtime import records
from ashl.runtime.records import UpdateShown

OFTEN = 3  # reports in a row in which a worker's update must have grown before a person is warned


@dataclass
class Health:
    """The latest report of each worker, how often in a row its update grew, and updates that wait for their mean."""

    dense_bytes: int
    latest: dict[int, records.Health] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    warning: str | None = None
    aggregate_cosine: float | None = None
    _updates: dict[int, dict[int | None, tuple[float, Tensor]]] = field(default_factory=dict)

    def add(self, report: records.Health) -> None:
        """A worker has looked at a message of its own."""
        rank, error = report.rank, report.relative_error
        self.latest[rank] = report
        grows = error is not None and error > 1 and not report.unbiased
        self.grown[rank] = self.grown.get(rank, 0) + 1 if grows else 0
        if self.grown[rank] == OFTEN and self.warning is None:
            layers = {name: found["relative_error"] or 0.0 for name, found in (report.layers or {}).items()}
            worst = max(layers, key=lambda name: layers[name], default=None)
            where = f", most of all in layer {worst}" if worst else ""
            self.warning = (
                f"the codec is not a contraction: at worker {rank} the relative error of messages is {error:.3g}, "
                f"above 1{where}; training may diverge. Take more bits, a larger ratio, or a codec that is a "
                "contraction"
            )

    def update(self, shown: UpdateShown, vector: Tensor, num_workers: int) -> None:
        """An update before compression, or what the merge made of all of them: once all have come, their cosine. What
        is incomplete when a later one is complete is forgotten."""
        parts = self._updates.setdefault(shown.tick, {})
        parts[shown.of] = (shown.weight, vector)
        if len(parts) <= num_workers:
            return
        _, merged = parts.pop(None)
        mean = torch.zeros(merged.numel(), dtype=torch.float64)
        for weight, x in parts.values():
            mean += weight * x
        self.aggregate_cosine = cosine(merged.double(), mean)
        self._updates = {other: kept for other, kept in self._updates.items() if other > shown.tick}

    def metrics(self) -> dict[str, float]:
        """Means over the workers' latest reports."""
        rows = self.latest.values()
        columns = {
            "relative_error": [row.relative_error for row in rows if row.relative_error is not None],
            "residual": [row.residual for row in rows if row.residual is not None],
            "cosine": [row.cosine for row in rows if row.cosine is not None],
            "aggregate_cosine": [self.aggregate_cosine] if self.aggregate_cosine is not None else [],
            "bits": [32 * fmean(row.nbytes for row in rows) / self.dense_bytes] if rows else [],
        }
        return {f"compress/{name}": fmean(values) for name, values in columns.items() if values}

    def report(self) -> dict[str, Any] | None:
        """What the summary says: the measures, the bytes of a message by what they are for, and the layers."""
        if not self.latest:
            return None
        rows = list(self.latest.values())
        names = ("headers", "scales", "values", "indices")
        return {
            **{key.removeprefix("compress/"): value for key, value in self.metrics().items()},
            "bytes": {name: fmean(row.split[i] for row in rows) for i, name in enumerate(names)},
            "layers": rows[0].layers,
            "warning": self.warning,
        }

"""What the workers said of their compression, as metrics; and the warning where a codec enlarges what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from ashl.compression.around.lost import cosine

MEASURES = ("lost", "residual", "cosine")
OFTEN = 3  # looks in a row at which a worker's update must have grown before it is told


@dataclass
class Health:
    """The latest look at each worker, how often in a row it was found ill, and updates that wait for their mean."""

    dense_bytes: int
    latest: dict[int, dict] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    warning: str | None = None
    aggregate_cosine: float | None = None
    _updates: dict[int, dict[int | None, tuple[float, Any]]] = field(default_factory=dict)

    def add(self, record: dict) -> None:
        """A worker has looked at a message of its own."""
        rank, lost = record["rank"], record["lost"]
        self.latest[rank] = record
        grows = lost is not None and lost > 1 and not record["unbiased"]
        self.grown[rank] = self.grown.get(rank, 0) + 1 if grows else 0
        if self.grown[rank] == OFTEN and self.warning is None:
            layers = {name: found["lost"] or 0.0 for name, found in (record.get("layers") or {}).items()}
            worst = max(layers, key=lambda name: layers[name], default=None)
            where = f", most of all in layer {worst}" if worst else ""
            self.warning = (
                f"compression enlarges what it is given: at worker {rank} what was lost is {lost:.3g} times as long "
                f"(squared) as what was to be sent{where}; training may diverge by it. Take more bits or a larger "
                "ratio, or a codec that is a contraction"
            )

    def part(self, record: dict, vector: Any, num_workers: int) -> None:
        """An update before compression (with its rank and weight), or what the merge made of all of them (rank None):
        once all have come, their cosine. What is incomplete when a later one is complete is forgotten."""
        tick = record["tick"]
        parts = self._updates.setdefault(tick, {})
        parts[record["of"]] = (record.get("weight", 1.0), vector)
        if len(parts) <= num_workers:
            return
        _, merged = parts.pop(None)
        mean = torch.zeros(merged.numel(), dtype=torch.float64)
        for weight, x in parts.values():
            mean += weight * x
        self.aggregate_cosine = cosine(merged.double(), mean)
        self._updates = {other: kept for other, kept in self._updates.items() if other > tick}

    def metrics(self) -> dict[str, float]:
        """Means over the workers' latest looks."""
        found = {
            f"compress/{name}": fmean(values)
            for name in MEASURES
            if (values := [r[name] for r in self.latest.values() if r[name] is not None])
        }
        if self.aggregate_cosine is not None:
            found["compress/aggregate_cosine"] = self.aggregate_cosine
        if self.latest:
            found["compress/bits"] = 32 * fmean(r["nbytes"] for r in self.latest.values()) / self.dense_bytes
        return found

    def report(self) -> dict[str, Any] | None:
        """What the summary says: the measures, the bytes of a message by what they are for, and the layers."""
        if not self.latest:
            return None
        rows = list(self.latest.values())
        names = ("headers", "scales", "values", "indices")
        return {
            **{key.removeprefix("compress/"): value for key, value in self.metrics().items()},
            "bytes": {name: fmean(row["split"][i] for row in rows) for i, name in enumerate(names)},
            "layers": rows[0].get("layers"),
            "warning": self.warning,
        }

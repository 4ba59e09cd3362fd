"""A real run beside the same in virtual time: by how much they differ, and of which part of the cluster that is.

Of each kind of time that workers book (compute, compress, push, pull, wait), seconds per step are compared; together
they make up the difference of the whole. The part with the largest difference is named: computing, encoding, the link,
or the server's port, where it is waiting; and the host, where computing or waiting takes longer than predicted and
steps are known to take longer while others compute.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ashl.calibration.combinations import Pair
from ashl.plan.calibration import Errors, HeldBack, errors, held_back
from ashl.plan.full import quantile
from ashl.plan.profile import Profile
from ashl.study.slots import read_summary

KINDS = {"compute": ("compute",), "encoding": ("compress",), "link": ("push", "pull"), "port": ("wait",)}


@dataclass(frozen=True)
class Found:
    """What a run came to, per step of a worker."""

    steps_per_s: float
    wait_share: float
    step_bytes: float  # both ways, of all workers
    round_s: float  # of a worker, from merge to merge
    booked_s: dict[str, float]


@dataclass(frozen=True)
class Compared:
    """One combination."""

    name: str
    model: str
    steps: int
    predicted: Found
    measured: Found
    forecast: float  # measured / predicted time, of the plan's own prediction
    component: str

    @property
    def ratio(self) -> float:
        """Measured / predicted time."""
        return self.predicted.steps_per_s / self.measured.steps_per_s

    @property
    def ratios(self) -> tuple[float, float]:
        """The same, and that of the plan: whoever asks the profile gets one or the other."""
        return self.ratio, self.forecast

    @property
    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def found_in(summary: Mapping[str, Any]) -> Found | None:
    """None where the run did not come to its end."""
    if summary["status"] != "finished" or not summary["steps"] or not summary["time_s"]:
        return None
    workers, steps = summary["workers"], summary["steps"]
    rounds = sum(worker["commits"] or worker["steps"] for worker in workers)
    return Found(
        steps_per_s=summary["steps_per_s"],
        wait_share=summary["wait_share"],
        step_bytes=(summary["bytes_up"] + summary["bytes_down"]) / steps,
        round_s=len(workers) * summary["time_s"] / rounds,
        booked_s={
            part: sum(w[f"{kind}_s"] for w in workers for kind in kinds) / steps for part, kinds in KINDS.items()
        },
    )


def compared(pair: Pair, real: Path, virtual: Path, profile: Profile) -> Compared | str:
    """What came of a pair, or why nothing did."""
    summaries = [read_summary(folder / own.hash) for folder, own in ((real, pair.real), (virtual, pair.virtual))]
    whole = [None if summary is None else found_in(summary) for summary in summaries]
    if whole[0] is None or whole[1] is None:
        bad = next((s for s, own in zip(summaries, whole, strict=True) if s is not None and own is None), None)
        return "not run yet" if bad is None else f"{bad['status']}: {bad['exit_reason']}"
    measured, predicted, summary = whole[0], whole[1], summaries[0]
    assert summary is not None
    forecast = summary["time_s"] / pair.predicted_s
    steps = summary["steps"]
    part = component(predicted, measured, profile, summary["max_lead"] is not None)
    return Compared(pair.name, pair.model, steps, predicted, measured, forecast, part)


def component(predicted: Found, measured: Found, profile: Profile, server: bool) -> str:
    """The part of the cluster that most of the difference is of."""
    differences = {part: measured.booked_s[part] - predicted.booked_s[part] for part in KINDS}
    part = max(differences, key=lambda part: abs(differences[part]))
    contended = profile.full is not None and profile.full.contended
    if contended and differences[part] > 0 and part in ("compute", "port"):
        return "host contention"
    return "link" if part == "port" and not server else part


@dataclass(frozen=True)
class Verdict:
    """All combinations together."""

    rows: tuple[Compared, ...]
    overall: Errors
    models: dict[str, Errors]
    held_back: HeldBack

    @property
    def median_error(self) -> float:
        """Of time, as a share."""
        return median(abs(row.ratio - 1) for row in self.rows)

    @property
    def worst(self) -> Compared:
        return max(self.rows, key=lambda row: abs(math.log(row.ratio)))

    def apart(self, model: str) -> float:
        """How far off times of a model are in the median, apart from what all have in common, as a share."""
        return median(abs(row.ratio / self.models[model].common - 1) for row in self.rows if row.model == model)

    @property
    def wait_error(self) -> float:
        """The largest difference of two wait shares."""
        return max(abs(row.measured.wait_share - row.predicted.wait_share) for row in self.rows)

    @property
    def weakest(self) -> str:
        """The component that is named most often, counting each row by how far it is off."""
        weights: dict[str, float] = {}
        for row in self.rows:
            weights[row.component] = weights.get(row.component, 0.0) + abs(math.log(row.ratio))
        return max(weights, key=lambda part: weights[part])

    def spread(self, of: str) -> dict[str, float]:
        """Quantiles of measured / predicted of one figure, or of the difference of wait shares."""
        pairs = [(asdict(row.predicted)[of], asdict(row.measured)[of]) for row in self.rows]
        if of == "wait_share":
            values = sorted(measured - predicted for predicted, measured in pairs)
        else:
            values = sorted(measured / predicted if predicted else 1.0 for predicted, measured in pairs)
        return {f"{share:g}": quantile(values, share) for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)}


def verdict(rows: Sequence[Compared]) -> Verdict:
    """Of two combinations at least. Every other one is held back, and then the rest."""
    models: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row.ratios)
    own = {model: errors(found) for model, found in models.items()}
    return Verdict(tuple(rows), errors(*models.values()), own, held_back([*models.values()]))

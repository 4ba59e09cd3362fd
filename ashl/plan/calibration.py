"""How far predictions from a profile were from what was measured: what `ashl calibrate` stores with it.

Rule: of each combination r = measured / predicted time. What all of a model have in common, their median m, is taken
off: what is predicted from the profile takes m times as long from then on. A combination is then off by |ln (r / m')|,
with m' the median of the others. What is predicted next lies within a factor e^±q of what will be measured, with q the
⌈(n + 1)·0.9⌉-th smallest of these n: so it is in about 9 of 10 cases if the next combination is drawn as these were,
whatever the distribution. Of fewer than nine, q is the greatest, and promises less.

Source: Barber, Candès, Ramdas and Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 2021;
split conformal prediction: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ashl.option import Count, Natural, NonNegative, Positive, option
from ashl.plan.full import quantile
from ashl.plan.plan import Spec

COVERED = 0.9
ENOUGH = 9  # combinations for that
FEW = 3  # combinations, which have nothing in common yet
# Of a cluster's spec: what is in seconds (steps are `compute` of `step_s`, transfers `link` of `exchange_s`), and in
# bytes per second
SECONDS = {"step_s", "exchange_s", "compress_s", "server_step_s", "encode_s", "decode_s", "latencies", "pull_latencies"}
SECONDS |= {"empty_s", "latency_s", "s_per_byte", "least_s", "server_crossed_s_per_byte", "part_s", "sum_s"}
SECONDS |= {"resumed_s", "quantum_s", "period_s", "kept_s", "late_s"}
RATES = {"up_bytes_s", "down_bytes_s", "server_bytes_s"}
AT = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@option
class Errors:
    """Of so many combinations: quantiles of measured / predicted time, what they have in common, and the bound on |ln|
    of the next one's beyond that."""

    count: Count
    quantiles: tuple[Positive, ...]  # at `AT`
    bound: NonNegative
    common: Positive = 1.0


@option
class Calibration:
    """Those of the profile's model and of all models, and how many of what was held back lay inside the bounds."""

    made: str
    of: str  # what the profile was, see `Profile.digest`
    model: Errors
    overall: Errors
    inside: Natural
    held_back: Natural

    @property
    def bound(self) -> float:
        """q, of the model where there are enough combinations of it for the promise."""
        return bound_of(self.model, self.overall)


def bound_of(model: Errors, overall: Errors) -> float:
    """q of a model, or of all where there are too few combinations of it."""
    return (model if model.count >= ENOUGH else overall).bound


class HeldBack(NamedTuple):
    """Of combinations that others foretold: how many lie inside their interval, and by which share each was off."""

    inside: int
    off: tuple[float, ...]


Ratios = Sequence[tuple[float, ...]]  # measured / predicted time of each combination, by whatever predicts it


def common(ratios: Ratios) -> float:
    """The median of the first of each; of few it says nothing."""
    return median(own[0] for own in ratios) if len(ratios) > FEW else 1.0


def off(own: tuple[float, ...], factor: float) -> float:
    """By how much the furthest is off, beyond this factor, as |ln|."""
    return max(abs(math.log(ratio / factor)) for ratio in own)


def bound(models: Iterable[Ratios]) -> float:
    """q, as above, of what each model's combinations are off beyond what its others have in common."""
    scores = sorted(score for ratios in models for score in beyond_others(ratios))
    return scores[min(len(scores), math.ceil((len(scores) + 1) * COVERED)) - 1]


def beyond_others(ratios: Ratios) -> list[float]:
    """By how much each is off beyond what the others have in common, where all of them have."""
    if len(ratios) <= FEW:
        return [off(own, 1.0) for own in ratios]
    firsts = [own[0] for own in ratios]
    return [off(own, median([*firsts[:k], *firsts[k + 1 :]])) for k, own in enumerate(ratios)]


def errors(*models: Ratios) -> Errors:
    """Of measured / predicted, at least one."""
    ordered = sorted(max(own, key=lambda ratio: abs(math.log(ratio))) for ratios in models for own in ratios)
    found = tuple(quantile(ordered, share) for share in AT)
    shared = common(models[0]) if len(models) == 1 else 1.0
    return Errors(count=len(ordered), quantiles=found, bound=bound(models), common=shared)


def held_back(models: Sequence[Ratios]) -> HeldBack:
    """Each half of the combinations against what the other half foretells."""
    inside, far = 0, list[float]()
    for first in (0, 1):
        halves = [(ratios[first::2], ratios[1 - first :: 2]) for ratios in models]
        if not any(known for _, known in halves):
            return HeldBack(0, ())
        of_all = bound(known for _, known in halves)
        for held, known in halves:
            factor, within = common(known), bound([known]) if len(known) >= ENOUGH else of_all
            inside += sum(off(own, factor) <= within * (1 + 1e-9) for own in held)
            far += [abs(own[0] / factor - 1) for own in held]
    return HeldBack(inside, tuple(far))


def slower(spec: Spec, factor: float) -> Spec:
    """A cluster's spec, as a profile has it, in which everything takes so many times as long."""

    def stretched(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: stretched(inner, own) for inner, own in value.items()}
        if isinstance(value, list):
            return [stretched(key, own) for own in value]
        if value is None or key not in SECONDS | RATES:
            return value
        return value * factor if key in SECONDS else value / factor

    return stretched("", spec)

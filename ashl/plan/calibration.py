"""How far predictions from a profile were from what was measured: what `ashl calibrate` stores with it.

Rule: of each combination r = measured / predicted. What is predicted next lies within a factor e^±q of what will be
measured, with q the ⌈(m + 1)·0.9⌉-th smallest of the m values |ln r|: so it is in 9 of 10 cases if the next combination
is drawn as these were, whatever the distribution. Of fewer than nine, q is the greatest, and promises less.

Source: split conformal prediction; Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005.
"""

import math
from collections.abc import Sequence

from ashl.option import Count, Natural, NonNegative, Positive, option
from ashl.plan.full import quantile

COVERED = 0.9
ENOUGH = 9  # combinations for that
AT = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@option
class Errors:
    """Of so many combinations: quantiles of measured / predicted time, and the bound on |ln| of the next one's."""

    count: Count
    quantiles: tuple[Positive, ...]  # at `AT`
    bound: NonNegative


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
        return (self.model if self.model.count >= ENOUGH else self.overall).bound


def bound(ratios: Sequence[float]) -> float:
    """q, as above."""
    scores = sorted(abs(math.log(ratio)) for ratio in ratios)
    return scores[min(len(scores), math.ceil((len(scores) + 1) * COVERED)) - 1]


def errors(ratios: Sequence[float]) -> Errors:
    """Of measured / predicted, at least one."""
    ordered = sorted(ratios)
    found = tuple(quantile(ordered, share) for share in AT)
    return Errors(count=len(ordered), quantiles=found, bound=bound(ratios))


def held_back(ratios: Sequence[float]) -> tuple[int, int]:
    """(how many lie inside, of how many): each half of the combinations against the bound of the other half."""
    halves = ratios[::2], ratios[1::2]
    if not all(halves):
        return 0, 0
    pairs = zip(halves, halves[::-1], strict=True)
    inside = sum(abs(math.log(ratio)) <= bound(other) * (1 + 1e-9) for half, other in pairs for ratio in half)
    return inside, len(ratios)

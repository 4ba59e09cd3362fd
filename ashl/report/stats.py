"""Compute intervals for few seeds, without assuming a distribution if none is needed.

A run that never reached its target counts as later than all that did: its time is infinite, which
medians and ranges can represent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

Key = tuple[int, int]  # a seed, and the number of the run among those with that seed
LEVEL = 0.95
# Student's t, two-sided 95 %, by degrees of freedom from 1. Beyond 30, the last value is used,
# which is slightly too wide.
T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
T95 += (
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
MAX_SEEDS = 100  # more than a user will run


@dataclass(frozen=True)
class Spread:
    """A median and an interval that covers the true median with probability `coverage`.

    The range of 3 seeds has a coverage of 0.75.
    """

    middle: float
    low: float
    high: float
    coverage: float
    count: int


@dataclass(frozen=True)
class Effect:
    """The effect of one setting relative to another, paired by seed: > 1 (ratio) or > 0
    (difference) is better.

    `middle` is the mean over the pairs, geometric for ratios. `low` and `high` are its 95 %
    interval by Student's t, of logarithms for ratios. They are None if a pair lacks a number or
    there is one pair only. `noise` is the standard deviation over the pairs on that scale.
    """

    pairs: int
    wins: int
    losses: int
    ratio: bool
    middle: float | None
    low: float | None
    high: float | None
    noise: float | None

    @property
    def chance(self) -> float:
        """The two-sided sign test's probability of so unequal a count of wins and losses between
        equals.
        """
        n, fewer = self.wins + self.losses, min(self.wins, self.losses)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)

    @property
    def probability(self) -> float | None:
        """The probability of being better on average, by Student's t over the pairs; None
        without interval.
        """
        if self.middle is None or self.noise is None:
            return None
        from scipy.stats import t

        mean = math.log(self.middle) if self.ratio else self.middle
        if not self.noise:
            return 0.5 + math.copysign(0.5, mean) * (mean != 0)
        return float(t.cdf(mean / self.noise * math.sqrt(self.pairs), self.pairs - 1))

    @property
    def ahead(self) -> bool:
        """True if it is better with confidence: by the whole interval or, without one, by the
        sign test.
        """
        if self.low is None:
            return self.wins > self.losses and self.chance <= 1 - LEVEL
        return self.low > (1.0 if self.ratio else 0.0)


def spread(values: Sequence[float]) -> Spread:
    """Return the median with the narrowest interval of order statistics that covers it with 95 %.

    If no interval has this coverage, the range is returned. It assumes no distribution: the k-th
    smallest and k-th largest of n miss the median with probability 2 P(Binomial(n, 1/2) < k). Six
    values are the fewest whose range covers 95 %.
    """
    ordered, n = sorted(values), len(values)
    tails = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = max((k for k, tail in enumerate(tails, 1) if 1 - tail >= LEVEL), default=1)
    return Spread(
        median(ordered), ordered[k - 1], ordered[n - k], 1 - tails[k - 1] if tails else 0.0, n
    )


def effect(
    own: Mapping[Key, float], base: Mapping[Key, float], *, ratio: bool, lower_is_better: bool
) -> Effect | None:
    """Return the effect of `own` relative to `base` over their common seeds; None if there are
    none.
    """
    keys = [key for key in own if key in base]
    if not keys:
        return None
    sign = -1.0 if lower_is_better else 1.0
    gains = [_gain(own[key], base[key], ratio) * sign for key in keys]
    wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    known = [gain for gain in gains if math.isfinite(gain)]
    back = math.exp if ratio else float
    middle = back(fmean(known)) if known else None
    if len(known) < max(2, len(gains)):
        return Effect(len(keys), wins, losses, ratio, middle, None, None, None)
    noise = stdev(known)
    half = t95(len(known) - 1) * noise / math.sqrt(len(known))
    low, high = back(fmean(known) - half), back(fmean(known) + half)
    return Effect(len(keys), wins, losses, ratio, middle, low, high, noise)


def _gain(own: float, base: float, ratio: bool) -> float:
    """Return how much larger `own` is: a log ratio or a difference.

    It is NaN if both are infinite, and infinite if one is, or if a quotient has a zero.
    """
    if math.isinf(own) and math.isinf(base):
        return math.nan
    if ratio and own != base and not math.isinf(own) and not math.isinf(base):
        return math.log(own / base) if min(own, base) > 0 else math.copysign(math.inf, own - base)
    return own - base


def t95(freedom: int) -> float:
    return T95[min(freedom, len(T95)) - 1]


def seeds_needed(found: Effect) -> int | None:
    """Return the number of pairs that would separate the two if mean and noise stay; None if
    unknown.

    Returns None also for more than `MAX_SEEDS`.
    """
    if found.middle is None or found.noise is None:
        return None
    size = abs(math.log(found.middle) if found.ratio else found.middle)
    return next(
        (
            n
            for n in range(max(3, found.pairs + 1), MAX_SEEDS + 1)
            if t95(n - 1) * found.noise / math.sqrt(n) < size
        ),
        None,
    )

"""Compute medians, intervals and tests for few seeds.

A run that ended before it reached its target is right-censored: its time to the target is longer
than its own time. A run that diverged never reaches it, and so is censored at infinity.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

Key = tuple[int, int]  # a seed, and the number of the run among those with that seed
LEVEL = 0.95
MAX_SEEDS = 100  # more than a user will run
ROUNDING = 1e-9
MAX_EXACT = 1000  # divisions of runs into two settings that the exact log-rank test tries


@dataclass(frozen=True)
class Spread:
    """A median and an interval that covers the true median with probability `coverage`.

    The range of 3 seeds has a coverage of 0.75. `bound` is a lower bound of an infinite median.
    """

    middle: float
    low: float
    high: float
    coverage: float
    count: int
    bound: float = math.inf


@dataclass(frozen=True)
class Effect:
    """The effect of one setting relative to another: > 1 (ratio) or > 0 (difference) is better.

    `middle` is the mean over pairs of equal seed, geometric for ratios. `low` and `high` are its
    95 % interval by Student's t, of logarithms for ratios, and `noise` is the standard deviation on
    that scale. They are None if a pair lacks a number or there is one pair only. `p_value`
    is that of a paired t test or, if a run has no number, of a log-rank test; 1 for one pair.
    """

    pairs: int
    wins: int
    losses: int
    ratio: bool
    middle: float | None
    low: float | None = None
    high: float | None = None
    noise: float | None = None
    p_value: float = 1.0

    @property
    def mean(self) -> float:
        """The mean over pairs on the scale of the test; 0 if it is unknown."""
        if self.middle is None:
            return 0.0
        return math.log(self.middle) if self.ratio else self.middle

    @property
    def probability(self) -> float | None:
        """The probability of being better on average, by Student's t; None without interval."""
        if self.low is None:
            return None
        return 1 - self.p_value / 2 if self.mean > 0 else self.p_value / 2

    @property
    def is_better(self) -> bool:
        """True if more pairs are better than worse, or else if the mean is better."""
        return self.mean > 0 if self.low is not None else self.wins > self.losses

    @property
    def is_better_with_confidence(self) -> bool:
        """True if it is better with 95 % confidence."""
        return self.is_better and self.p_value <= 1 - LEVEL


def spread(values: Sequence[float], ends: Sequence[float] | None = None) -> Spread:
    """Return the median with its interval; an infinite value was not reached.

    If a run was censored before another one reached its target, both are Kaplan and Meier's, with
    an interval by log(-log). Else the interval is the narrowest one of order statistics that covers
    the median with 95 %, or the range. It assumes no distribution.

    Args: ends has for each run the time up to which it did not reach its target; None = infinite.
    """
    from scipy.stats import binom

    n, finite = len(values), [value for value in values if math.isfinite(value)]
    ends = [math.inf] * n if ends is None else ends
    censored = [end for value, end in zip(values, ends, strict=True) if math.isinf(value)]
    last = max((end for end in [*finite, *censored] if math.isfinite(end)), default=math.inf)
    bound = last if all(map(math.isfinite, censored)) else math.inf
    if censored and finite and min(censored) < max(finite):
        return Spread(*_kaplan_meier(values, ends), LEVEL, n, bound)
    ordered, k = sorted(values), max(1, int(binom.ppf((1 - LEVEL) / 2, n, 0.5)))
    coverage = 1 - 2 * float(binom.cdf(k - 1, n, 0.5))
    return Spread(median(ordered), ordered[k - 1], ordered[n - k], max(coverage, 0.0), n, bound)


def _kaplan_meier(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of censored times and its interval, each infinite if it was not reached."""
    from scipy.stats import CensoredData, ecdf

    survival = ecdf(CensoredData.right_censored(*_observed_times(values, ends))).sf
    with warnings.catch_warnings():  # the interval is undefined where the estimate is 0 or 1
        warnings.simplefilter("ignore", RuntimeWarning)
        band = survival.confidence_interval(LEVEL, method="log-log")

    def first_time_below(probabilities: np.ndarray, most: float) -> float:
        below = survival.quantiles[probabilities <= most]
        return float(below[0]) if len(below) else math.inf

    # Where the estimate is exactly one half for a while, the median is the middle of this while.
    estimate = survival.probabilities
    middle = (
        first_time_below(estimate, 0.5 + ROUNDING) + first_time_below(estimate, 0.5 - ROUNDING)
    ) / 2
    return (
        middle,
        min(first_time_below(band.low.probabilities, 0.5), middle),
        first_time_below(band.high.probabilities, 0.5),
    )


def _observed_times(
    values: Sequence[float], ends: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the observed times, and True for those that are censored.

    The test statistics need finite times, so infinity becomes a time after all others.
    """
    times = np.minimum(values, ends)
    last = times[np.isfinite(times)].max(initial=0.0)
    return np.where(np.isfinite(times), times, last + 1), np.isinf(values)


def logrank_p_value(
    own: Sequence[float],
    own_ends: Sequence[float],
    base: Sequence[float],
    base_ends: Sequence[float],
) -> float:
    """Return the two-sided p-value of the log-rank test that two settings are equal.

    For few runs it is exact: the share of all divisions of the runs into two settings whose
    statistic is as large. It is 1 if no time lies within the observation of both settings.
    """
    from scipy.stats import CensoredData, logrank, permutation_test

    times, censored = _observed_times([*own, *base], [*own_ends, *base_ends])
    if censored.all():
        return 1.0

    def compare_parts(*parts: np.ndarray) -> Any:
        with np.errstate(invalid="ignore"):  # 0/0 if only one part is ever at risk
            return logrank(*(CensoredData.right_censored(times[p], censored[p]) for p in parts))

    places = np.split(np.arange(len(times)), [len(own)])
    if math.comb(len(times), len(own)) > MAX_EXACT:
        return float(np.nan_to_num(compare_parts(*places).pvalue, nan=1.0))

    def statistic(*parts: np.ndarray) -> float:
        return abs(float(np.nan_to_num(compare_parts(*parts).statistic)))

    return float(permutation_test(places, statistic, alternative="greater").pvalue)


def effect(
    own: Mapping[Key, float],
    base: Mapping[Key, float],
    *,
    ratio: bool,
    lower_is_better: bool,
    ends: tuple[Mapping[Key, float], Mapping[Key, float]] = ({}, {}),
) -> Effect | None:
    """Return the effect of `own` relative to `base`; None if they have no seed in common.

    Args: ends has for both the times up to which runs without a number were observed.
    """
    keys = [key for key in own if key in base]
    if not keys:
        return None
    from scipy.stats import ttest_1samp

    sign = -1.0 if lower_is_better else 1.0
    gains = [sign * _gain(own[key], base[key], ratio) for key in keys]
    wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    known = [gain for gain in gains if math.isfinite(gain)]
    to_scale = math.exp if ratio else float
    middle = to_scale(fmean(known)) if known else None
    found = Effect(len(keys), wins, losses, ratio, middle)
    if len(keys) == 1:
        return found
    if len(known) < len(gains):
        sides = [
            ([-sign * value for value in side.values()], [end.get(key, math.inf) for key in side])
            for side, end in zip((own, base), ends, strict=True)
        ]
        return replace(found, p_value=logrank_p_value(*sides[0], *sides[1]))
    noise = stdev(known)
    if not noise:
        p_value = float(not fmean(known))
        return replace(found, low=middle, high=middle, noise=noise, p_value=p_value)
    test = ttest_1samp(known, 0.0)
    low, high = map(to_scale, test.confidence_interval(LEVEL))
    return replace(found, low=low, high=high, noise=noise, p_value=float(test.pvalue))


def _gain(own: float, base: float, ratio: bool) -> float:
    """Return how much larger `own` is: a log ratio or a difference.

    It is NaN if both are infinite, and infinite if one is, or if a quotient has a zero.
    """
    if math.isinf(own) and math.isinf(base):
        return math.nan
    if ratio and own != base and not math.isinf(own) and not math.isinf(base):
        return math.log(own / base) if min(own, base) > 0 else math.copysign(math.inf, own - base)
    return own - base


def adjust_p_values(p_values: Sequence[float], count: int) -> list[float]:
    """Return Holm's adjusted p-values of some of `count` tests, in their order.

    With `count` all pairs of settings, the comparisons with the best one are corrected also for
    its choice by the same runs: a test of a pair that is not given could only raise them where
    the procedure has stopped.
    """
    from pandas import Series

    ordered = Series(p_values, dtype=float).sort_values()
    raised = (ordered * (count - np.arange(len(ordered)))).cummax().clip(upper=1.0)
    return raised.sort_index().tolist()


def seeds_needed(found: Effect, tests: int = 1) -> int | None:
    """Return the number of pairs that would separate the two if mean and noise stay.

    Returns None if it is unknown or more than `MAX_SEEDS`.

    Args: tests is the number of tests for which the level is corrected.
    """
    if found.noise is None:
        return None
    from scipy.stats import t

    level, scale = (1 - LEVEL) / tests, found.noise / abs(found.mean or ROUNDING)
    counts = range(max(3, found.pairs + 1), MAX_SEEDS + 1)
    return next((n for n in counts if t.isf(level / 2, n - 1) * scale < math.sqrt(n)), None)

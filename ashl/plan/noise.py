"""How sure a measured figure is: medians with the interval in which they lie, and workers that are equal within it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ashl.cluster.speed import LEVELS
from ashl.plan.profile import NOISES, TICK_S, WorkerProfile

NARROW = 0.05  # half an interval, as a share of its median


class Figure(NamedTuple):
    """A median of times, and half of its 95 % interval."""

    median: float
    noise: float


def figure(times: Sequence[float]) -> Figure:
    """By order statistics: of n times, those √n to both sides of the middle (1.96/2 of it) bound the median."""
    ordered, n = sorted(times), len(times)
    k = max(0, int((n - 1.96 * math.sqrt(n)) / 2))
    noise = (ordered[n - 1 - k] - ordered[k]) / 2
    return Figure(statistics.median(ordered), noise if noise >= TICK_S else 0.0)


def spread(times: Sequence[float]) -> float:
    """Standard deviation of times without their outermost tenths, where the machine did something else."""
    ordered, trim = sorted(times), len(times) // 10
    return statistics.pstdev(ordered[trim : len(ordered) - trim])


def quantiles(times: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of these times at `LEVELS`, linear between neighbours."""
    return tuple(float(time_s) for time_s in np.quantile(times, LEVELS))


def is_narrow(times: Sequence[float]) -> bool:
    found = figure(times)
    return found.noise <= NARROW * found.median


def levelled(workers: Sequence[WorkerProfile]) -> tuple[WorkerProfile, ...]:
    """The workers with costs that differ by no more than their noise made equal: to the mean of those who are."""
    found = list(workers)
    for cost, noise in NOISES.items():
        for ranks in alike(workers, cost, noise):
            mean = math.fsum(getattr(workers[rank], cost) for rank in ranks) / len(ranks)
            for rank in ranks:
                found[rank] = replace(found[rank], **{cost: mean})
    return tuple(found)


def alike(workers: Sequence[WorkerProfile], cost: str, noise: str) -> list[list[int]]:
    """The workers whose intervals overlap that of the least among them, where there are several and some noise."""
    groups: list[list[int]] = []
    for rank in sorted(range(len(workers)), key=lambda rank: getattr(workers[rank], cost)):
        least = workers[groups[-1][0]] if groups else None
        own, bound = getattr(workers[rank], cost), getattr(workers[rank], noise)
        if least is not None and own - bound <= getattr(least, cost) + getattr(least, noise):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [sorted(ranks) for ranks in groups if len(ranks) > 1 and any(getattr(workers[r], noise) for r in ranks)]

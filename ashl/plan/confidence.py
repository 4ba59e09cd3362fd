"""Confidence of measurements: medians with intervals, and workers that are equal within them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ashl.cluster.speed import LEVELS
from ashl.plan.profile import NOISES, TICK_S, WorkerProfile

NARROW = 0.05  # largest half interval of a reliable median, as a share of the median


class Estimate(NamedTuple):
    """A median of times, and half of its 95 % interval."""

    median: float
    noise: float


def estimate(times: Sequence[float]) -> Estimate:
    """Return the median and half of its 95 % interval, by order statistics.

    Of n sorted times, those 1.96/2 · √n positions to both sides of the middle bound the median.
    """
    ordered, n = sorted(times), len(times)
    k = max(0, int((n - 1.96 * math.sqrt(n)) / 2))
    noise = (ordered[n - 1 - k] - ordered[k]) / 2
    return Estimate(statistics.median(ordered), noise if noise >= TICK_S else 0.0)


def trimmed_deviation(times: Sequence[float]) -> float:
    """Return the standard deviation of times without the lowest and highest tenth.

    The extremes are from other load on the machine.
    """
    ordered, trim = sorted(times), len(times) // 10
    return statistics.pstdev(ordered[trim : len(ordered) - trim])


def quantiles(times: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of these times at `LEVELS`, linear between neighbours."""
    return tuple(float(time_s) for time_s in np.quantile(times, LEVELS))


def is_narrow(times: Sequence[float]) -> bool:
    """Return True if the interval of the median is narrow enough to be reliable."""
    found = estimate(times)
    return found.noise <= NARROW * found.median


def equalize_costs(
    workers: Sequence[WorkerProfile], noises: Mapping[str, Sequence[float]] | None = None
) -> tuple[WorkerProfile, ...]:
    """Return the workers with each cost made equal among those whose costs differ by no more than
    their noise.

    Equal workers then get equal H and densities. The common cost is the mean.
    Args: noises holds half intervals, by worker, of costs whose noise is no field of a profile.
    """
    found = list(workers)
    known = {cost: [getattr(worker, noise) for worker in workers] for cost, noise in NOISES.items()}
    for cost, bounds in (known | dict(noises or {})).items():
        for ranks in group_overlapping([getattr(worker, cost) for worker in workers], bounds):
            mean = math.fsum(getattr(workers[rank], cost) for rank in ranks) / len(ranks)
            for rank in ranks:
                found[rank] = replace(found[rank], **{cost: mean})
    return tuple(found)


def group_equal_workers(workers: Sequence[WorkerProfile], cost: str, noise: str) -> list[list[int]]:
    """Return groups of ranks whose workers count as equal in a cost."""
    return group_overlapping(
        [getattr(own, cost) for own in workers], [getattr(own, noise) for own in workers]
    )


def group_overlapping(costs: Sequence[float], noises: Sequence[float]) -> list[list[int]]:
    """Return groups of at least two ranks whose intervals overlap that of their least cost.

    A group without any noise is left out.
    """
    groups: list[list[int]] = []
    for rank in sorted(range(len(costs)), key=costs.__getitem__):
        least = groups[-1][0] if groups else None
        if least is not None and costs[rank] - noises[rank] <= costs[least] + noises[least]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [
        sorted(ranks) for ranks in groups if len(ranks) > 1 and any(noises[rank] for rank in ranks)
    ]

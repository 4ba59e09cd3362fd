"""Lines through what was timed: latency and seconds per byte, with half of their 95 % intervals.

Rule: t = a + s·b for b bytes, with the squares of relative errors least, so that short messages count as much as long
ones; where a would be below zero, s alone. A line for each round of sizes, and of their figures the medians. Of sums,
whose members wait for cores while bytes are on their way: t = max(l, a + s·b), where that is closer to what was timed.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 1994 (a and s).
`ashl.plan.line` fits what `ashl profile` times without `--full`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from ashl.plan.full import Cost
from ashl.plan.noise import figure

T = TypeVar("T")
SLOWED = 1.1  # a byte of many at once that costs so many times as much as alone shows the server's port


def cost_of(times: Mapping[int, Sequence[float]]) -> Cost:
    """The line through the sizes of bodies, round by round: medians over the rounds, and half of their intervals."""
    rounds = min(map(len, times.values()), default=0)
    if not rounds:
        return Cost(latency_s=0.0, s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)
    lines = [line_through([(nbytes, found[k]) for nbytes, found in times.items() if nbytes]) for k in range(rounds)]
    latency, slope = (figure(column) for column in zip(*lines, strict=True))
    spread = statistics.pstdev([line[1] for line in lines]) / math.sqrt(rounds)  # below what a clock resolves
    return Cost(
        latency_s=latency.median,
        s_per_byte=slope.median,
        latency_noise_s=latency.noise,
        s_per_byte_noise=max(slope.noise, 1.96 * spread),
    )


def cost_with_least(times: Mapping[int, Sequence[float]]) -> Cost:
    """The same, where some of the smallest bodies may all cost the least: as many as bring it closest to the medians,
    and none unless that makes its error half as large."""
    sizes, medians = sorted(times), {nbytes: statistics.median(found) for nbytes, found in times.items()}
    tried = [cost_of(times)]
    for k in range(1, len(sizes) - 1):
        least_s = fmean(medians[nbytes] for nbytes in sizes[:k])
        tried.append(replace(cost_of({nbytes: times[nbytes] for nbytes in sizes[k:]}), least_s=least_s))

    def error(cost: Cost) -> float:
        return math.hypot(*(cost.seconds(nbytes) / max(time_s, 1e-9) - 1 for nbytes, time_s in medians.items()))

    best = min(tried, key=error)
    return best if error(best) < error(tried[0]) / 2 else tried[0]


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and seconds per byte of least squares of the relative errors, neither below zero."""
    weights = [1 / max(time_s, 1e-9) ** 2 for _, time_s in points]
    total = math.fsum(weights)
    x = math.fsum(w * nbytes for w, (nbytes, _) in zip(weights, points, strict=True)) / total
    y = math.fsum(w * time_s for w, (_, time_s) in zip(weights, points, strict=True)) / total
    over = math.fsum(w * (nbytes - x) ** 2 for w, (nbytes, _) in zip(weights, points, strict=True))
    both = math.fsum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, points, strict=True))
    slope = max(0.0, both / over) if over else 0.0
    if y - slope * x >= 0:
        return y - slope * x, slope
    squares = math.fsum(w * nbytes**2 for w, (nbytes, _) in zip(weights, points, strict=True))
    return 0.0, math.fsum(w * b * t for w, (b, t) in zip(weights, points, strict=True)) / squares


def less(cost: Cost, back_s: float) -> Cost:
    """Without the way back of a receipt."""
    own = {"s_per_byte": cost.s_per_byte, "s_per_byte_noise": cost.s_per_byte_noise}
    return Cost(latency_s=max(0.0, cost.latency_s - back_s), latency_noise_s=cost.latency_noise_s, **own)


def port_of(alone: Sequence[Cost], last: Cost, back_s: float, n: int, *, out: bool) -> Cost:
    """How long a message holds the server's port, from those of each worker alone and from the last of all at once: n
    times what each holds it on its way in; on its way out, what the others hold it and then its own way. A message has
    a receipt, which holds it as long in the other direction."""
    if n < 2:
        return Cost(latency_s=0.0, s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)
    latency_s = max(0.0, last.latency_s - back_s - max(cost.latency_s for cost in alone)) / (n - 1) / 2
    own = max(cost.s_per_byte for cost in alone)
    held = (last.s_per_byte - own) / (n - 1) if out else last.s_per_byte / n
    return Cost(
        latency_s=latency_s if latency_s > 1e-9 else 0.0,
        s_per_byte=held if last.s_per_byte > SLOWED * own else 0.0,
        latency_noise_s=last.latency_noise_s / n,
        s_per_byte_noise=last.s_per_byte_noise / n,
    )


def crossing(port: Mapping[T, Cost], links: Mapping[T, Sequence[Cost]], exchange_s: float, nbytes: int) -> float | None:
    """For how many seconds a byte holds the server's port on the other way, too: where all exchange messages of so many
    bytes without a pause and have to wait for each other longer than either way, or their own ways, ask for,
    acknowledgements of the one way wait behind the other's bytes. Where bytes are not most of it, processors are slow,
    and it is None."""
    own_s = fmean(math.fsum(cost.seconds(nbytes) for cost in ways) for ways in zip(*links.values(), strict=True))
    alone_s = max(own_s / len(next(iter(links.values()))), *(cost.seconds(nbytes) for cost in port.values()))
    if exchange_s <= SLOWED * alone_s or any(cost.s_per_byte * nbytes < cost.latency_s for cost in port.values()):
        return None
    return (exchange_s - alone_s) / nbytes


def through(rows: Sequence[tuple[int, float, float]]) -> Cost:
    """The line through one or two sizes, with what is not sure of them."""
    latency_s, s_per_byte = line_through([(nbytes, time_s) for nbytes, time_s, _ in rows])
    if len(rows) == 1:
        latency_s, s_per_byte = 0.0, rows[0][1] / rows[0][0]
    noise_s, largest = max(noise for _, _, noise in rows), max(nbytes for nbytes, _, _ in rows)
    return Cost(latency_s=latency_s, s_per_byte=s_per_byte, latency_noise_s=noise_s, s_per_byte_noise=noise_s / largest)

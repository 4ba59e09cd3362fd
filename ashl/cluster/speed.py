"""Duration of computations: declared seconds per step, slowdown factors, jitter, and events that
change a factor.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from ashl.cluster.spec import Cluster, Measured

NS = 1e9
# levels of the quantiles of step times, denser near 1: rare steps are long
LEVELS = (*(k / 32 for k in range(32)), *(1 - 2.0**-k for k in range(6, 11)), 1.0)
BLOCK = 1024  # jitter is drawn in blocks: one generator per block keeps it counter-based and cheap


class Factors:
    """The slowdown factor of each worker over time, for one of "compute" and "link"."""

    def __init__(self, cluster: Cluster, what: str) -> None:
        self.base = cluster.compute if what == "compute" else cluster.links
        # by worker: moments in nanoseconds, and the factor from each moment on
        self.changes: dict[int, tuple[list[int], list[float]]] = {}
        # by worker: moments in nanoseconds when its link goes down and is up again
        self.outages: dict[int, list[tuple[int, int]]] = {}
        for event in sorted(cluster.events, key=lambda e: e.time_s):
            factor = event.compute if what == "compute" else event.link
            time_ns = round(event.time_s * NS)
            if event.worker is not None and factor is not None:
                times, factors = self.changes.setdefault(event.worker, ([], []))
                times.append(time_ns)
                factors.append(factor)
            if event.worker is not None and event.link_down and what == "link":
                self.outages.setdefault(event.worker, []).append(
                    (time_ns, time_ns + round(event.link_down * NS))
                )

    def factor_of(self, worker: int, now_ns: int) -> float:
        """Return the factor at `now_ns`; 1 for the server (rank n) and other ranks beyond the
        workers.
        """
        if worker >= len(self.base):
            return 1.0
        if worker not in self.changes:
            return self.base[worker]
        times, factors = self.changes[worker]
        return factors[before - 1] if (before := bisect_right(times, now_ns)) else self.base[worker]

    def add_outages(self, ends: Iterable[int], cost_ns: int, now_ns: int) -> int:
        """Return the duration of a transfer of `cost_ns` that begins now, with the outages of the
        links of its ends, which pause it.
        """
        if not self.outages:
            return cost_ns
        end_ns, back_ns = now_ns + cost_ns, now_ns
        for down_ns, up_ns in sorted(
            outage for rank in ends for outage in self.outages.get(rank, ())
        ):
            if (down_ns <= now_ns or down_ns < end_ns) and up_ns > back_ns:
                end_ns += up_ns - max(down_ns, back_ns)
                back_ns = up_ns
        return end_ns - now_ns


class Speed:
    """Cost of a computation in integer nanoseconds, rounded once.

    Jitter multiplies a step by a lognormal draw with mean 1 and the declared relative standard
    deviation; draw k of worker i is a pure function of (seed, i, k).
    """

    def __init__(self, cluster: Cluster, batch: int, seed: int) -> None:
        self.cluster, self.batch, self.seed = cluster, batch, seed
        self.factors = Factors(cluster, "compute")
        self.step_s = cluster.step_s
        self._drawn: dict[int, int] = {}
        self._blocks: dict[int, np.ndarray] = {}
        self._cache: dict[tuple[int, float], int] = {}
        self._plain = not cluster.events and not cluster.jitter

    def cost_ns(self, worker: int, kind: str, work: float, now_ns: int) -> int | None:
        """Return the nanoseconds of a computation; None if its cost is not declared and must be
        measured.
        """
        if kind == "compute":
            if self._plain:  # the hot path of a simulation with thousands of workers
                if (cost := self._cache.get((worker, work))) is None and self.step_s is not None:
                    cost = self._cache[worker, work] = self._step_ns(worker, work, now_ns)
                return cost
            return None if self.step_s is None else self._step_ns(worker, work, now_ns)
        if kind == "decode":
            seconds = self.cluster.decode_of(worker)
        else:
            seconds = (
                self.cluster.server_step_s if kind == "apply" else self.cluster.compress_of(worker)
            )
        return None if seconds is None else round(seconds * work * NS)

    def count_draws(self, worker: int) -> int:
        """Return the number of jitter draws that this worker has used."""
        return self._drawn.get(worker, 0)

    def skip_draws(self, worker: int, count: int) -> None:
        """Continue after this number of jitter draws."""
        self._drawn[worker] = count

    def _step_ns(self, worker: int, work: float, now_ns: int) -> int:
        assert self.step_s is not None
        seconds = self.factors.factor_of(worker, now_ns) * self.step_s * (work / self.batch)
        jitter = self.cluster.jitter_of(worker)
        seconds *= self._draw(worker, jitter) if jitter else self._mean_step(worker)
        return max(1, round(seconds * NS))  # at least 1 ns, so that the clock always advances

    def _mean_step(self, worker: int) -> float:
        """Return a worker's step without jitter, as a multiple of its declared time."""
        return 1.0

    def _draw(self, worker: int, jitter: float) -> float:
        k = self._drawn.get(worker, 0)
        self._drawn[worker] = k + 1
        if k % BLOCK == 0 or worker not in self._blocks:
            bits = np.random.Philox(key=[self.seed, worker], counter=[0, 0, 0, k // BLOCK])
            self._blocks[worker] = self._block(np.random.Generator(bits), worker, jitter)
        return float(self._blocks[worker][k % BLOCK])

    def _block(self, stream: np.random.Generator, worker: int, jitter: float) -> np.ndarray:
        """Return the next `BLOCK` draws."""
        sigma2 = math.log1p(jitter**2)
        return stream.lognormal(-sigma2 / 2, math.sqrt(sigma2), BLOCK)


class MeasuredSpeed(Speed):
    """Steps drawn from measured quantiles.

    Draw k of worker i is uniform between neighbouring quantiles and a pure function of (seed, i,
    k). Without jitter a step takes the mean of the quantiles.
    """

    def __init__(self, cluster: Measured, batch: int, seed: int) -> None:
        super().__init__(cluster, batch, seed)
        self._tables = [np.array(steps) for steps in cluster.steps]
        widths = np.diff(LEVELS)
        self._means = [float(widths @ (own[1:] + own[:-1]) / 2) for own in self._tables]

    def _mean_step(self, worker: int) -> float:
        return self._means[worker]

    def _block(self, stream: np.random.Generator, worker: int, jitter: float) -> np.ndarray:
        return np.interp(stream.random(BLOCK), LEVELS, self._tables[worker])


def speed_of(cluster: Cluster, batch: int, seed: int) -> Speed:
    """Return the declared speed of a cluster, or draws from the quantiles of its profile."""
    if isinstance(cluster, Measured) and cluster.steps:
        return MeasuredSpeed(cluster, batch, seed)
    return Speed(cluster, batch, seed)

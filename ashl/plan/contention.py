"""Machines with too few cores for the ranks on them, from what a full profile has measured.

Rule: where steps take longer while all workers of a machine take some, it has Σ alone / together cores over these, else
as many as its system says; and one where a step alone was given less than a core, as by a quota. Where that is less
than there are ranks on it, all that is done there is put on shared cores: steps as they are alone, and what a message
costs either end, which is taken off the time that it takes and that it holds the server's port. So it is, too, where a
quota holds a machine of one rank to less: what messages take of it, computing lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean

from ashl.cluster.speed import LEVELS
from ashl.plan.full import Cost, Full, WorkerCosts
from ashl.plan.line import Line
from ashl.plan.plan import Spec

SLOWED = 1.1  # what takes so many times as long as alone shows that there are too few cores
GIVEN = 0.9  # of a core, at least, or there is a quota
TICK_S = 0.004  # of a system that interrupts 250 times a second, where nothing shows it
PLENTY = 64.0  # cores, where nobody has counted them


def contended(spec: Spec, full: Full, hosts: Sequence[str | None], dense_bytes: int) -> Spec:
    """A cluster's spec as it is, or on shared cores where some machine has too few. `hosts` are those of the workers
    and of the server."""
    handling, port = full.handling, full.server
    alone = [own.alone for own in full.workers if own.alone and own.cores and own.used is not None]
    if handling is None or port is None or None in hosts or len(alone) < len(full.workers):
        return spec
    machines = [*dict.fromkeys(hosts)]
    at = [machines.index(host) for host in hosts]
    on = [[own for own, k in zip(full.workers, at, strict=False) if k == machine] for machine in range(len(machines))]
    cores = [cores_of(own) if own else PLENTY for own in on]
    if all(at.count(k) <= count and given(on[k]) == 1 for k, count in enumerate(cores)):
        return spec
    handled = [handling.server if rank == len(alone) else handling.worker for rank in range(len(at))]
    ends = [combined((1 / given(on[k]), cost)) for k, cost in zip(at, handled, strict=True)]
    both = [combined((1, end), (1, ends[-1])) for end in ends[:-1]]
    whole_s = fmean(way.seconds(dense_bytes) for own in full.workers for way in (own.push, own.pull))
    before = min(1.0, whole_s / max(1e-9, fmean(line.seconds(dense_bytes) for line in both)))
    push, pull = (
        [combined((1, cost), (-before, off)) for cost, off in zip(costs, both, strict=True)]
        for costs in ([own.push for own in full.workers], [own.pull for own in full.workers])
    )
    beside = on[at[-1]]
    held = combined((1, ends[-1]), *((len(beside) / len(alone), end) for end in ends[:1] if beside))
    return {
        **spec,
        "compute": [own.median_s for own in alone],
        "steps": [[time_s / own.median_s for time_s in own.times_s] for own in alone],
        "latencies": [line.latency_s for line in push],
        "pull_latencies": [line.latency_s for line in pull],
        "up_bytes_s": [1 / line.s_per_byte if line.s_per_byte else None for line in push],
        "down_bytes_s": [1 / line.s_per_byte if line.s_per_byte else None for line in pull],
        "server_in": asdict(combined((1, port.into), (-1 / max(1.0, cores[at[-1]]), held))),
        "server_out": asdict(combined((1, port.out), (-1 / max(1.0, cores[at[-1]]), held))),
        "shared": {
            "machine": at,
            "cores": cores,
            "resumed_s": [handling.resumed_s / given(on[k]) for k in at[:-1]],
            "quantum_s": quantum_of(full.workers, min(cores)),
            "ends": [asdict(end) for end in ends],
            "before": before,
            "busy": [[own.group, own.busy] for own in full.sums if own.busy is not None],
        },
    }


def combined(*terms: tuple[float, Cost | Line]) -> Line:
    """Their sum, each so many times; nothing below zero."""
    latency_s, s_per_byte = (
        max(0.0, math.fsum(factor * part for factor, part in parts))
        for parts in ([(f, line.latency_s) for f, line in terms], [(f, line.s_per_byte) for f, line in terms])
    )
    return Line(latency_s, s_per_byte)


def quantum_of(workers: Sequence[WorkerCosts], cores: float) -> float:
    """How long who has a core keeps it from others, by what steps that were interrupted took longer: of n workers the
    others have their turns meanwhile."""
    found = list[tuple[float, float]]()
    for own in workers:
        widths = pairwise((0.0, *LEVELS))
        found += [
            (time_s - own.alone.median_s, to - since)
            for time_s, (since, to) in zip(own.steps[0].times_s, widths, strict=True)
            if own.alone and time_s > 2 * own.alone.median_s
        ]
    half, turns = math.fsum(width for _, width in found) / 2, max(1.0, len(workers) / math.ceil(cores) - 1)
    for excess_s, width in sorted(found):
        half -= width
        if half <= 0:
            return excess_s / turns
    return TICK_S


def given(workers: Sequence[WorkerCosts]) -> float:
    """The share of a core that a step alone has where a quota gives none more, else 1."""
    share = max((own.used or 1.0 for own in workers), default=1.0)
    return share if share < GIVEN else 1.0


def cores_of(workers: Sequence[WorkerCosts]) -> float:
    """Of the machine that these are on, each as a step alone has it."""
    had = math.fsum(min(1.0, (own.alone_s or 0.0) / own.steps[0].mean_s) for own in workers)
    if len(workers) > 1 and had * SLOWED < len(workers):
        return had
    return 1.0 if given(workers) < 1 else float(max(own.cores or 1 for own in workers))

"""Machines with too few cores for the ranks on them, from what a full profile has measured.

Rule: where steps take longer while all workers of a machine take some, it has Σ alone / together cores over these, else
as many as its system says. Where a step alone was given less than a core, a quota gives so much in each period, anew
as often as steps were interrupted. On a machine with a quota, or with fewer cores than there are ranks on it, all that
is done there is put on shared cores: steps as they are alone while nothing interrupts them, and what a message costs
either end, which is taken off the time that it takes and that it holds the server's port. So messages take from
computing what they need of a quota, and who waits saves some of it. What ends cost beyond the latency of a message that
goes alone, they do once it has gone on. Where steps take longer while the workers of other machines compute, work takes
longer while cores are in use there, and what was measured meanwhile is less of it. Ends and pauses are scaled to how
long exchanges and rounds of all together took there (`ashl.planning.as_fast`); what is done between messages, as to
encode them, is held up alike, if it is.

How tasks share cores then is `ashl.cluster.cores`, with its sources; that these figures are enough is ours, and how far
off it is stands in docs/calibration.md.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean

from ashl.cluster.speed import LEVELS
from ashl.plan.full import SLOWED, Cost, Full, Handling, ServerCosts, StepTimes, WorkerCosts
from ashl.plan.line import Line
from ashl.plan.plan import Spec

WHOLE_CORE = 0.9  # of a core, at least, or there is a quota
TICK_S = 0.004  # of a system that interrupts 250 times a second, where nothing shows it
SPREAD = 0.5  # of quanta: who has had enough for a tick or a fraction of it loses its core at the next one
PERIOD_S = 0.1  # of a quota, where nothing shows it
KEPT_S = 0.001  # of a core that does nothing: Linux leaves it so much of a quota (`min_cfs_rq_runtime`)
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
    quotas = [quota_of([*own, *([port] if k == at[-1] else ())]) for k, own in enumerate(on)]
    if not any(quotas) and all(at.count(k) <= count for k, count in enumerate(cores)):
        return spec
    near, held_up = full.neighbours, max(1.0, ones(handling.slowed))
    given = [min(count, quota["cores"]) if quota else count for count, quota in zip(cores, quotas, strict=True)]
    slowed = crowded(full, at, given)
    freed = [1 / (1 + slowed[k] * others_use(handling, at, k, dense_bytes)) for k in at]  # of what others use
    ends, empty_s, resumed_s = handled(handling, freed)
    used = [own.used if quotas[k] and own.used else 1.0 for own, k in zip(full.workers, at, strict=False)]
    both = [combined((1, end), (1, ends[-1])) for end in ends[:-1]]
    # not of whole transfers: the bytes on a slow link are no work of its ends
    latency_s = fmean(way.latency_s for own in full.workers for way in (own.push, own.pull))
    before = min(1.0, latency_s / max(1e-9, fmean(line.latency_s for line in both)))
    push = [combined((1, own.push), (-before, off)) for own, off in zip(full.workers, both, strict=True)]
    pull = [combined((1, own.pull), (-before, off)) for own, off in zip(full.workers, both, strict=True)]
    if empty_s:
        ways = zip(spec["empty_s"], empty_s[:-1], strict=True)
        spec = {**spec, "empty_s": [max(0.0, own_s - before * (used_s + empty_s[-1])) for own_s, used_s in ways]}
    steps = [[t / own.median_s for t in uninterrupted(own, share)] for own, share in zip(alone, used, strict=True)]
    beside = [(1 / len(alone), end) for end, k in zip(ends, at[:-1], strict=False) if k == at[-1]]
    held = combined((1, ends[-1]), *beside)
    into, out = (asdict(combined((1, way), (-1 / max(1.0, cores[at[-1]]), held))) for way in (port.into, port.out))
    return {
        **spec,
        "encode_s": [held_up * own_s for own_s in spec["encode_s"]],
        "decode_s": held_up * spec.get("decode_s", 0.0),
        "server_step_s": held_up * spec["server_step_s"],
        "compute": [own.median_s for own in alone],
        "steps": steps,
        "latencies": [line.latency_s for line in push],
        "pull_latencies": [line.latency_s for line in pull],
        "up_bytes_s": [1 / line.s_per_byte if line.s_per_byte else None for line in push],
        "down_bytes_s": [1 / line.s_per_byte if line.s_per_byte else None for line in pull],
        "server_in": into,
        "server_out": out,
        "shared": {
            "machine": at,
            "cores": cores,
            "resumed_s": resumed_s,
            "quantum_s": quantum_of(full.workers, min(cores)),
            "spread": SPREAD,
            "ends": [asdict(end) for end in ends],
            "before": before,
            "busy": [[own.group, own.busy] for own in full.sums if own.busy is not None],
            "waited": [[own.group, own.waited] for own in full.sums if own.waited is not None],
            "between": near and asdict(combined((fmean(freed[:-1]) * ones(near.slowed), near.end))),
            "quotas": quotas,
            "crowded": slowed if any(slowed) else [],
            "empty_s": empty_s,
        },
    }


def handled(handling: Handling, freed: Sequence[float]) -> tuple[list[Line], list[float], list[float]]:
    """(what ends of messages cost each rank, those of messages without a body, what computing costs each worker more
    after a pause), as such a share of what was measured while others used cores."""
    last, slowed, paused = len(freed) - 1, ones(handling.slowed), ones(handling.paused)
    pauses_s = (handling.sender_resumed_s, handling.server_resumed_s)
    resumed = [Line(paused * (own_s or 0.0) / 2, 0.0) for own_s in pauses_s]
    ends = [
        combined((factor * slowed, (handling.worker, handling.server)[k == last]), (factor, resumed[k == last]))
        for k, factor in enumerate(freed)
    ]
    empty_s = [handling.empty_s[k == last] * f * slowed for k, f in enumerate(freed)] if handling.empty_s else []
    each_s = handling.each_resumed_s or [handling.resumed_s] * last
    return ends, empty_s, [own_s * factor * paused for own_s, factor in zip(each_s, freed[:-1], strict=True)]


def ones(factor: float | None) -> float:
    """Where nobody has looked for it, it is 1."""
    return 1.0 if factor is None else factor


def combined(*terms: tuple[float, Cost | Line]) -> Line:
    """Their sum, each so many times; nothing below zero."""
    latency_s, s_per_byte = (
        max(0.0, math.fsum(factor * part for factor, part in parts))
        for parts in ([(f, line.latency_s) for f, line in terms], [(f, line.s_per_byte) for f, line in terms])
    )
    return Line(latency_s, s_per_byte)


def crowded(full: Full, at: Sequence[int], given: Sequence[float]) -> list[float]:
    """By how much work on each machine takes longer for each core that is in use on the others, by steps of its only
    worker, alone and while all compute: machines may be one computer's, whatever quotas they have. A server that has
    one for itself is slowed as they are in the mean."""
    homes = at[:-1]
    in_use = [
        min(own, math.fsum(worker.used or 0.0 for worker, k in zip(full.workers, homes, strict=True) if k == machine))
        for machine, own in enumerate(given)
    ]
    found = [0.0] * len(given)
    for k, own in zip(homes, full.workers, strict=True):
        others = math.fsum(in_use) - in_use[k]
        if own.alone and homes.count(k) == 1 and others > 0:
            found[k] = max(0.0, own.steps[0].mean_s / own.alone.mean_s - 1) / others
    if at[-1] not in homes:
        found[at[-1]] = math.fsum(found) / len(set(homes))
    return found


def others_use(handling: Handling, at: Sequence[int], machine: int, dense_bytes: int) -> float:
    """How many cores of other machines were in use while all exchanged without a pause."""
    if not handling.exchange_s:
        return 0.0
    workers = 2 * handling.worker.seconds(dense_bytes) / handling.exchange_s / (len(at) - 1)
    server = 2 * handling.server.seconds(dense_bytes) / handling.exchange_s
    return math.fsum(server if rank == len(at) - 1 else workers for rank, k in enumerate(at) if k != machine)


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


def quota_of(ranks: Sequence[WorkerCosts | ServerCosts]) -> dict[str, float] | None:
    """What the machine is given that these are on, by what the one of them had that had most; None = all there is, as
    where one of them was never held back."""
    held = [own for own in ranks if own.used]
    most = max(held, key=lambda own: own.used or 0.0, default=None)
    if most is None or not most.used or most.used >= WHOLE_CORE or any(own.halt_s == 0 for own in held):
        return None
    return {"cores": most.used, "period_s": most.halt_s or PERIOD_S, "kept_s": KEPT_S, "late_s": TICK_S / 2}


def uninterrupted(steps: StepTimes, share: float) -> list[float]:
    """The quantiles of steps that had this share of a core, with the longest cut so that in the mean no more is left of
    them than that."""
    times, widths = list(steps.times_s), [to - since for since, to in pairwise((0.0, *LEVELS))]
    excess = (1 - share) * math.fsum(map(operator.mul, times, widths))
    for k in range(len(times) - 1, 0, -1):
        over = times[k] - times[k - 1]
        wide = math.fsum(widths[k:])
        if excess <= over * wide:
            return [*times[:k], *[times[k] - excess / wide] * (len(times) - k)]
        excess -= over * wide
    return times[:1] * len(times)


def cores_of(workers: Sequence[WorkerCosts]) -> float:
    """Of the machine that these are on, each as a step alone has it."""
    had = math.fsum(min(1.0, (own.alone_s or 0.0) / own.steps[0].mean_s) for own in workers)
    return had if len(workers) > 1 and had * SLOWED < len(workers) else float(max(own.cores or 1 for own in workers))

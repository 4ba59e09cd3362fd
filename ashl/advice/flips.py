"""Predict what would change the winner: the bandwidth, the slowest worker or the number of workers.

Rule: time elsewhere = steps to the target on this cluster / predicted steps per second there. The
times are scaled so that the prediction for this cluster equals the measured time.

Limits: assumes that learning needs the same number of steps there; other speeds and other numbers
of workers change this number.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ashl.advice.candidates import Candidate
from ashl.config.workers import LISTS, repeated
from ashl.errors import AshlError
from ashl.planning.compile_plan import compile_plan
from ashl.report.measure import Measure
from ashl.report.sensitivity import Axis, Cell, Terrain, flip

# Lists of a measured cluster with one entry per worker; the last three are written by
# `ashl profile`.
MEASURED = (
    "jitters",
    "encode_s",
    "latencies",
    "up_bytes_s",
    "down_bytes_s",
    "steps",
    "pull_latencies",
    "empty_s",
)
RATES = (
    "bandwidth_mbit_s",
    "server_bandwidth_mbit_s",
    "intra_node_bandwidth_mbit_s",
    "server_bytes_s",
)
FACTORS = tuple(2.0**k for k in range(-4, 5))
SLOWNESS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)

Spec = dict[str, Any]


class Racer(NamedTuple):
    """A candidate, its time to the target [s], and for each stage its steps and seconds until then.

    The steps are None for a stage whose speed is not predicted.
    """

    candidate: Candidate
    time_s: float
    stages: tuple[tuple[float | None, float], ...]


class Way(NamedTuple):
    """A property of the cluster to vary: its axis, and the cluster at a value of it."""

    axis: Axis
    spec: Callable[[float], Spec]


def faster_links(spec: Spec, factor: float) -> Spec:
    """Return the cluster with the bandwidth of all links and NICs multiplied by `factor`; latencies
    stay.
    """
    found = {key: spec[key] * factor for key in RATES if spec.get(key) is not None}
    for key in ("up_bytes_s", "down_bytes_s"):
        if spec.get(key) is not None:
            found[key] = [None if rate is None else rate * factor for rate in spec[key]]
    if spec["exchange_s"] is not None:
        found["exchange_s"] = spec["exchange_s"] / factor
    if (line := spec.get("all_reduce")) is not None:
        found["all_reduce"] = {**line, "s_per_byte": line["s_per_byte"] / factor}
    return {**spec, **found}


def with_slowest(spec: Spec, worker: int, slowness: float) -> Spec:
    """Return the cluster with this worker's step `slowness` times as long as the fastest other
    worker's.
    """
    compute = list(spec["compute"])
    compute[worker] = slowness * min(c for rank, c in enumerate(compute) if rank != worker)
    return {**spec, "compute": compute}


def with_workers(spec: Spec, count: int) -> Spec:
    """Return the cluster with `count` workers, by repeating or truncating the lists of workers.

    The measured cost of an all-reduce is removed, because it holds for its number of workers only.
    """
    found: Spec = {
        key: repeated(key, own, count)
        for key in (*LISTS, *MEASURED)
        if isinstance(own := spec.get(key), list) and own
    }
    found |= {"all_reduce": None} if "all_reduce" in spec else {}
    return {**spec, **found, "num_workers": count}


def ways(spec: Spec) -> list[Way]:
    """Return the properties that can vary, each with the present value among its values."""
    compute, n = spec["compute"], len(spec["compute"])
    bandwidth = axis_of("bandwidth", "the bandwidth of all links, in times of now", FACTORS, 1.0)
    found = [Way(bandwidth, lambda f: faster_links(spec, f))]
    if n > 1 and not spec["events"]:
        slowest = max(range(n), key=lambda rank: (compute[rank], rank))
        others = [c for rank, c in enumerate(compute) if rank != slowest]
        least, now = max(others) / min(others), compute[slowest] / min(others)
        values = {value for value in SLOWNESS if value >= least} | {now}
        name = f"the slowness of worker {slowest}, in times of the fastest's step"
        found.append(
            Way(axis_of("slowness", name, values, now), lambda v: with_slowest(spec, slowest, v))
        )
    counts = {float(max(2, round(n * factor))) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)} | {
        float(n)
    }
    if not spec["events"]:
        workers = axis_of("workers", "the number of workers", counts, n)
        found.append(Way(workers, lambda m: with_workers(spec, round(m))))
    return found


def axis_of(key: str, name: str, values: Sequence[float] | set[float], now: float) -> Axis:
    ordered = tuple(sorted(float(value) for value in values))
    return Axis(key, name, ordered, ordered.index(float(now)))


def predicted_s(own: Racer, spec: Spec) -> float | None:
    """Return the predicted seconds of its steps on another cluster; None if no prediction is
    possible.
    """
    config = {**own.candidate.config, "cluster": spec, "profile": None}
    try:
        plan = compile_plan(config, None, [])
    except AshlError:
        return None
    total_s = 0.0
    for stage, (steps, seconds) in zip(plan.stages, own.stages, strict=False):
        if steps is None:
            total_s += seconds
        elif not stage.predicted_steps_per_s:
            return None
        else:
            total_s += steps / stage.predicted_steps_per_s
    return total_s or None


def terrain_of(
    racers: Sequence[Racer], way: Way, measure: Measure, over: Callable[[], bool]
) -> Terrain | None:
    """Return the predicted ranking at each value of an axis; values that the time did not allow
    have no cell.
    """
    now = way.axis.values[way.axis.first]
    bases = {own: predicted_s(own, way.spec(now)) for own in racers}
    cells = dict[tuple[int, ...], Cell]()
    for index in sorted(range(len(way.axis.values)), key=lambda k: abs(k - way.axis.first)):
        if over():
            break
        times = list[tuple[str, float]]()
        for own in racers:
            base_s = bases[own]
            here_s = (
                base_s
                if index == way.axis.first
                else base_s and predicted_s(own, way.spec(way.axis.values[index]))
            )
            times.append(
                (
                    own.candidate.name,
                    own.time_s * here_s / base_s if here_s and base_s else math.inf,
                )
            )
        if len(times) > 1 and any(math.isfinite(time_s) for _, time_s in times):
            cells[index,] = Cell(tuple(sorted(times, key=lambda named: named[1])), sure=True)
    names = tuple(own.candidate.name for own in racers)
    return Terrain((way.axis,), names, cells, measure) if (way.axis.first,) in cells else None


def described(ground: Terrain) -> tuple[str, dict[str, Any]]:
    """Return where the winner changes along this axis, as a sentence and as a record."""
    axis, base = ground.axes[0], ground.base
    assert base is not None
    tried = [axis.values[point[0]] for point in ground.cells]
    change = flip(ground, base)
    record: dict[str, Any] = {
        "axis": axis.key,
        "now": axis.values[axis.first],
        "from": min(tried),
        "to": max(tried),
    }
    if change is None:
        return (
            f"{axis.name}: no other candidate wins from {min(tried):.3g} to {max(tried):.3g}",
            record | {"flip": None},
        )
    start, to = change.changes[axis]
    about = "about" if change.exact else "at the latest"
    record |= {"flip": to, "winner": change.new}
    return f"{axis.name}: from {start:.3g} to {about} {to:.3g}, and {change.new} wins", record


def flips_of(
    racers: Sequence[Racer], measure: Measure, over: Callable[[], bool]
) -> list[tuple[str, dict[str, Any]]]:
    """Return a sentence and a record for each property of the cluster, as far as time allows."""
    plan = racers[0].candidate.plan
    spec = {**plan.cluster, "num_workers": plan.num_workers}
    grounds = [None if over() else terrain_of(racers, way, measure, over) for way in ways(spec)]
    return [described(ground) for ground in grounds if ground is not None and len(ground.cells) > 1]

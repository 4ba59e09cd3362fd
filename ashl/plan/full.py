"""What `ashl profile --full` measures of a cluster: distributions where a profile has medians, costs by size, and of
each figure half of its 95 % interval.

A step is drawn from its quantiles, between which it is linear. A message takes latency + seconds per byte, each way; at
the server's port it waits for those that came before, each of which holds it that long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from ashl.cluster.spec import Fitted
from ashl.cluster.speed import LEVELS
from ashl.option import Count, Duration, NonNegative, Positive, option
from ashl.plan.plan import Spec


@option
class Cost:
    """What a thing costs by its bytes, and at least."""

    latency_s: Duration
    s_per_byte: Duration
    latency_noise_s: Duration
    s_per_byte_noise: Duration
    least_s: Duration | None = None  # null = by its bytes alone

    def seconds(self, nbytes: float) -> float:
        return max(self.least_s or 0.0, self.latency_s + self.s_per_byte * nbytes)


SLOWED = 1.1  # what takes so many times as long as it would has something in its way
FREE = Cost(latency_s=0.0, s_per_byte=0.0, latency_noise_s=0.0, s_per_byte_noise=0.0)


@option
class StepTimes:
    """How long steps of one batch size take, while all workers take such steps. `drift` is by how much the second half
    of them took longer than the first, as a share; with `in_order` the times are all that there were, one by one."""

    batch: Count
    count: Count
    median_s: Positive
    mean_s: Positive
    noise_s: Duration  # half of the interval in which the median lies
    drift: float
    times_s: Annotated[tuple[Positive, ...], Field(min_length=1)]
    in_order: bool = False

    def at(self, level: float) -> float:
        """The quantile at this level."""
        if self.in_order:
            return quantile(sorted(self.times_s), level)
        above = next(k for k, known in enumerate(LEVELS) if known >= level)
        below = max(0, above - 1)
        share = (level - LEVELS[below]) / ((LEVELS[above] - LEVELS[below]) or 1.0)
        return self.times_s[below] + share * (self.times_s[above] - self.times_s[below])

    def __post_init__(self) -> None:
        if not self.in_order and len(self.times_s) != len(LEVELS):
            raise ValueError(f"has {len(self.times_s)} quantiles in times_s where {len(LEVELS)} are expected")


@option
class WorkerCosts:
    """Of one worker."""

    steps: Annotated[tuple[StepTimes, ...], Field(min_length=1)]  # the batch size of the profile first
    alone_s: Positive | None  # the mean of a step while nobody else computes; null = not measured
    push: Cost  # to the server while nobody else sends, and from there
    pull: Cost
    alone: StepTimes | None = None  # steps while nobody else computes
    used: Annotated[NonNegative, Field(le=1)] | None = None  # the share of a core that these were given
    halt_s: Duration | None = None  # ... from one time to the next that a quota took it away; 0 = none did
    empty_s: Duration | None = None  # a message without a body, one way
    cores: Count | None = None  # of the machine, as its system says


@option
class ServerCosts:
    """Of the server. Its port is held by each message for so long, whoever sends it; 0 = it is never the bottleneck.
    Its bytes may hold up what goes the other way, too."""

    apply_s: Duration
    apply_noise_s: Duration
    into: Cost
    out: Cost
    used: Annotated[NonNegative, Field(le=1)] | None = None  # the share of a core that it is given
    halt_s: Duration | None = None  # as a worker's
    crossed_s_per_byte: NonNegative | None = None


@option
class Sum:
    """What a sum over so many workers costs."""

    group: Count
    cost: Cost
    busy: Annotated[NonNegative, Field(le=1)] | None = None  # the share of it in which each member uses a core
    waited: Annotated[NonNegative, Field(le=1)] | None = None  # ... and waits for the last one, beyond its step


@option
class Coding:
    """What a codec costs by the bytes of the vector: at each worker, and of who takes a body apart and adds it up."""

    codec: str  # its class
    encode: Annotated[tuple[Cost, ...], Field(min_length=1)]
    decode: Cost
    decode_all: Cost | None = None  # each of all workers' bodies in a row; null = as one


@option
class Handling:
    """What a message costs the machine at each of its two ends, in seconds of a core, while all workers exchange
    without a pause, by the bytes of its body or without one. And how much more a worker's step (and each one's), its
    messages, and those at the server take of a core in each round where a step comes between: what was cached is gone,
    threads have gone to sleep. Then how long all together took for an exchange of the dense model, and for one after a
    step; and how many times as much messages and pauses cost where virtual time is to be as long
    (`ashl.planning.as_fast`)."""

    worker: Cost
    server: Cost
    resumed_s: Duration
    sender_resumed_s: Duration | None = None  # null = it is in the step's
    server_resumed_s: Duration | None = None
    empty_s: tuple[Duration, Duration] | None = None  # at a worker and at the server
    exchange_s: Duration | None = None
    round_s: Duration | None = None
    each_resumed_s: tuple[Duration, ...] | None = None
    slowed: NonNegative | None = None
    paused: NonNegative | None = None


@option
class Neighbours:
    """What messages between workers cost, where all are on a ring and have so many neighbours, whom they send to before
    each step: seconds of a core at each end of a message, and how long such a round takes, by the bytes of a body; and
    how many times as much an end costs where virtual time is to be as long."""

    count: Count
    end: Cost
    round: Cost
    slowed: NonNegative | None = None


@option
class Full:
    """All of it, and when and with what it was measured."""

    made: str
    versions: dict[str, str]
    workers: Annotated[tuple[WorkerCosts, ...], Field(min_length=1)]
    server: ServerCosts | None  # null = there was none
    sums: tuple[Sum, ...]
    codings: tuple[Coding, ...]
    gathering: Sum | None = None  # over all workers, by the bytes of all together
    handling: Handling | None = None
    neighbours: Neighbours | None = None

    def coding(self, codec: str | None) -> Coding | None:
        """Of this class, where it was timed."""
        return next((coding for coding in self.codings if coding.codec == codec), None)

    @property
    def by_worker(self) -> list[Sequence[object]]:
        """What has an entry for each worker."""
        resumed = None if self.handling is None else self.handling.each_resumed_s
        return [self.workers, *(coding.encode for coding in self.codings), *([resumed] if resumed else [])]

    @property
    def contended(self) -> bool:
        """Whether steps take longer while others compute: workers share a machine that has too few cores for them."""
        return len(self.workers) > 1 and any(
            w.alone_s is not None and w.steps[0].mean_s > 1.1 * w.alone_s for w in self.workers
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of numbers in order, linear from one to the next."""
    at, last = share * (len(ordered) - 1), len(ordered) - 1
    low = min(int(at), max(0, last - 1))
    return ordered[low] + (at - low) * (ordered[min(low + 1, last)] - ordered[low])


def quantiles(times: Sequence[float]) -> tuple[float, ...]:
    """Those at `LEVELS`."""
    ordered = sorted(times)
    return tuple(quantile(ordered, level) for level in LEVELS)


def fitted(full: Full, measured: Spec, dense_bytes: int, codec: str | None) -> Spec:
    """The spec of a cluster that costs this, over that of the profile's medians; encoding is that of this codec."""
    coding, server = full.coding(codec), full.server
    tables = [worker.steps[0] for worker in full.workers]
    steps = [[time_s / own.median_s for time_s in own.times_s] for own in tables]
    spread = max(max(own) - min(own) for own in steps)
    into, out = (FREE, FREE) if server is None else (server.into, server.out)
    apply_s = measured["server_step_s"] if server is None else server.apply_s
    return {
        **measured,
        "_target_": f"{Fitted.__module__}.{Fitted.__name__}",
        "compute": [own.median_s for own in tables],
        "jitter": min(10.0, spread),  # 0 stills them
        "jitters": [min(10.0, max(own) - min(own)) for own in steps],
        "steps": steps,
        "in_order": tables[0].in_order,
        "batches": [
            [[own.batch, own.median_s / table.median_s] for own in worker.steps]
            for worker, table in zip(full.workers, tables, strict=True)
        ],
        "latencies": [max(0.0, worker.push.latency_s - into.latency_s) for worker in full.workers],
        "pull_latencies": [max(0.0, worker.pull.latency_s - out.latency_s) for worker in full.workers],
        "up_bytes_s": [rate(worker.push) for worker in full.workers],
        "down_bytes_s": [rate(worker.pull) for worker in full.workers],
        "server_bytes_s": None,
        "server_in": held(into),
        "server_out": held(out),
        "server_crossed_s_per_byte": 0.0 if server is None else server.crossed_s_per_byte or 0.0,
        "crossed": crossed(full, dense_bytes),
        "empty_s": [own.empty_s for own in full.workers if own.empty_s is not None],
        "gathering": None if full.gathering is None else held(full.gathering.cost),
        "group_sums": [{"group": own.group, **held(own.cost)} for own in full.sums],
        "server_step_s": None if apply_s is None else apply_s + (coding.decode.seconds(dense_bytes) if coding else 0.0),
        **({} if coding is None else coded(coding, dense_bytes)),
    }


def crossed(full: Full, dense_bytes: int) -> float:
    """By which share of their time messages between workers hold up what goes the other way: a round between neighbours
    takes so much longer than the slowest link asks for, of which acknowledgements wait behind bytes. Nothing where
    bytes are not most of it."""
    near = full.neighbours
    if near is None:
        return 0.0
    own_s = near.count * dense_bytes * max(way.s_per_byte for own in full.workers for way in (own.push, own.pull))
    taken_s = near.round.seconds(dense_bytes)
    return taken_s / own_s - 1 if SLOWED * own_s < taken_s <= 2 * own_s else 0.0


def coded(coding: Coding, dense_bytes: int) -> dict[str, Any]:
    """What this codec costs workers, who take apart what all have sent."""
    encode_s = [cost.seconds(dense_bytes) for cost in coding.encode]
    return {"encode_s": encode_s, "decode_s": (coding.decode_all or coding.decode).seconds(dense_bytes)}


def rate(cost: Cost) -> float | None:
    """Bytes per second; None = no cost per byte."""
    return 1 / cost.s_per_byte if cost.s_per_byte else None


def held(cost: Cost) -> dict[str, float]:
    found = {key: value for key, value in asdict(cost).items() if not key.endswith(("noise", "noise_s"))}
    return {key: value for key, value in found.items() if value is not None}

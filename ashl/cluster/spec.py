"""What a cluster is, as a user declares it. Roles: workers are ranks 0 … n−1; a parameter server,
if any, is rank n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ashl.config.workers import MAX_WORKERS
from ashl.errors import NoEffectError, UsageError
from ashl.option import Count, Duration, Natural, NonNegative, Positive, Span, option

TICK_S = 1e-9  # of the clock
MBIT_BYTES = 125_000
FAST_GBIT_S = 10.0  # of a link between machines: few have more
Rate = Annotated[Positive, Field(ge=1e-6)]  # Mbit/s
Factor = Annotated[Positive, Field(le=1e9)]  # how many times as slow

FAIL, REJOIN, LINK_DOWN, SERVER_FAIL = "fail", "rejoin", "link_down", "server_fail"
BEFALLS = (FAIL, REJOIN, LINK_DOWN, SERVER_FAIL)  # what an event may bring beside another factor


@option
class Event:
    """At `time_s`: from then on a worker computes or communicates at another slowdown factor; or it
    fails, or comes back; or its link is down for so many seconds; or (without a worker) the server
    fails.
    """

    time_s: Duration
    worker: Natural | None = None
    compute: Factor | None = None
    link: Factor | None = None
    fail: bool = False
    rejoin: bool = False
    link_down: Duration | None = None
    server_fail: bool = False

    @property
    def what(self) -> list[str]:
        """All that it says, by name."""
        return [name for name in ("compute", "link", *BEFALLS) if getattr(self, name)]


@option
class Churn:
    """Each worker fails after an exponentially distributed time of this mean, and is back after one
    of that mean.
    """

    mtbf_s: Span
    mttr_s: Span


@option
class Cluster:
    """An emulated cluster: each worker is slower than the machine it runs on by a declared factor.

    A step of worker i takes `compute[i] · step_s`. A transfer takes `link[i] · exchange_s / 2 ·
    bytes / dense bytes` where `exchange_s` is declared, and otherwise latency + bytes / bandwidth
    with the ports of both ends occupied.
    """

    paced: ClassVar[bool] = True

    num_workers: Annotated[Count, Field(le=MAX_WORKERS)] | None
    compute: tuple[Factor, ...]
    compute_spread: Annotated[NonNegative, Field(le=3)]
    link: tuple[Factor, ...] | None
    step_s: Span | None
    exchange_s: Duration | None
    bandwidth_mbit_s: Rate | None
    latency_s: Duration | None
    server_bandwidth_mbit_s: Rate | None
    compress_s: Duration | None
    server_step_s: Duration | None
    node: tuple[Natural, ...] | None
    intra_node_bandwidth_mbit_s: Rate | None
    intra_node_latency_s: Duration | None
    jitter: Annotated[NonNegative, Field(le=10)]
    events: tuple[Event, ...]
    churn: Churn | None
    failure_detection_s: Duration | None
    trace: str | None = None  # a file, whose content planning puts among the events

    def __post_init__(self) -> None:
        n = len(self.compute)
        if not n:
            raise UsageError(
                "cluster.compute=[] is an empty cluster; give the slowdown factor of each worker,"
                " as in 'cluster.compute=[1,2]'"
            )
        if self.step_s is not None and self.step_s * min(self.compute) < TICK_S:
            raise UsageError(
                f"cluster.step_s={self.step_s:g} makes steps of {self.step_s * min(self.compute):g}"
                " s, and the clock counts nanoseconds; give a longer one"
            )
        if self.num_workers is None:
            object.__setattr__(self, "num_workers", n)
        elif self.num_workers != n:
            raise UsageError(
                f"cluster.compute has {n} entries and cluster.num_workers is {self.num_workers};"
                " drop one"
            )
        for name, values in (("link", self.link), ("node", self.node)):
            if values is not None and len(values) != n:
                raise UsageError(
                    f"cluster.{name} has {len(values)} entries and cluster.compute has {n}; give"
                    " one entry per worker"
                    + (", or cluster.link=null where all links are equal" if name == "link" else "")
                )
        for name in ("intra_node_bandwidth_mbit_s", "intra_node_latency_s"):
            if getattr(self, name) is not None and self.node is None:
                text = f"cluster.{name} needs cluster.node: which machine is each worker on?"
                raise NoEffectError(text, f"cluster.{name}")
        check_events(self.events, n)

    @property
    def links(self) -> tuple[float, ...]:
        return self.link or (1.0,) * len(self.compute)

    @property
    def fault_kinds(self) -> list[str]:
        """What happens to its workers beside other factors, by name."""
        named = {name for event in self.events for name in event.what} | (
            {"churn"} if self.churn else set()
        )
        return [name for name in (*BEFALLS, "churn") if name in named]

    @property
    def workers_fail(self) -> bool:
        """Whether workers may be lost."""
        return bool({FAIL, "churn"} & set(self.fault_kinds))

    @property
    def workers_rejoin(self) -> bool:
        """Whether workers come while others run."""
        return bool({REJOIN, "churn"} & set(self.fault_kinds))

    def jitter_of(self, worker: int) -> float:
        """Relative standard deviation of its step times."""
        return self.jitter

    def compress_of(self, rank: int) -> float | None:
        """Seconds to encode a dense vector."""
        return self.compress_s

    def decode_of(self, rank: int) -> float | None:
        """Seconds to take a body apart, where that is not the server's work, which `server_step_s`
        is.
        """
        return None if self.compress_of(rank) is None else 0.0

    def latency_of(self, rank: int, inner: bool = False) -> float:
        """Seconds at link factor 1, where ports are occupied."""
        assert self.latency_s is not None
        return (
            self.intra_node_latency_s
            if inner and self.intra_node_latency_s is not None
            else self.latency_s
        )

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        """Bytes per second through this rank's port at link factor 1, out of it or into it."""
        beyond = rank - len(self.compute)
        if beyond == 0 or (beyond > 0 and self.node is None):
            mbit_s = (
                math.inf if self.server_bandwidth_mbit_s is None else self.server_bandwidth_mbit_s
            )
        else:
            mbit_s = (self.intra_node_bandwidth_mbit_s if inner else self.bandwidth_mbit_s) or 0.0
        return mbit_s * MBIT_BYTES

    def missing(self) -> list[str]:
        """The costs that exact virtual time needs and nobody declared. A missing cost is an error,
        never zero.
        """
        names = [
            name
            for name in ("step_s", "compress_s", "server_step_s")
            if getattr(self, name) is None
        ]
        if self.failure_detection_s is None and self.workers_fail:
            names.append("failure_detection_s")
        if self.exchange_s is None:
            names += [
                name for name in ("bandwidth_mbit_s", "latency_s") if getattr(self, name) is None
            ]
            if self.node is not None and self.intra_node_bandwidth_mbit_s is None:
                names.append("intra_node_bandwidth_mbit_s")
        return names


def check_events(events: Sequence[Event], n: int) -> None:
    """Refuse events of which no cluster of n workers can be. Raises UsageError."""
    there = dict.fromkeys(range(n), True)
    for event in sorted(events, key=lambda event: event.time_s):
        at, what = f"cluster.events: the event at {event.time_s:g} s", event.what
        if not what:
            raise UsageError(
                f"{at} changes nothing; add compute=, link= or link_down=, fail: true, rejoin: true"
                " or server_fail: true"
            )
        if SERVER_FAIL in what:
            if len(what) > 1 or event.worker is not None:
                raise UsageError(
                    f"{at} says server_fail, and more; give the rest an event of its own"
                )
            continue
        if event.worker is None:
            raise UsageError(f"{at} ({', '.join(what)}) names no worker; add worker=")
        if event.worker >= n:
            raise UsageError(
                f"cluster.events names worker {event.worker}, but there are only workers 0 to"
                f" {n - 1}"
            )
        if {FAIL, REJOIN} & set(what):
            if len(what) > 1:
                raise UsageError(
                    f"{at} says {' and '.join(what)} at once; give each an event of its own"
                )
            if event.rejoin == there[event.worker]:
                found, other = ("is running", "fail") if event.rejoin else ("has failed", "rejoin")
                raise UsageError(
                    f"{at} says {what[0]}, and worker {event.worker} {found} at that time; add an"
                    f" event with {other}: true before it, or drop it"
                )
            there[event.worker] = event.rejoin


def note_implied_bandwidth(cluster: object, dense_bytes: int) -> list[str]:
    """What to note where `exchange_s`, which holds whatever the model's size, asks more of a link
    than links have.
    """
    if type(cluster) is not Cluster or not cluster.exchange_s:  # what was measured is as it is
        return []
    exchange_s = cluster.exchange_s * min(cluster.links)
    if (gbit_s := 8e-9 * dense_bytes / exchange_s) <= FAST_GBIT_S:
        return []
    return [
        f"cluster.exchange_s={cluster.exchange_s:g} holds for a model of any size:"
        f" {dense_bytes / 1e6:.3g} MB each way in {1e3 * exchange_s:g} ms are {gbit_s:.3g} Gbit/s,"
        f" and few links have more than {FAST_GBIT_S:g}; declare a longer one, or"
        " cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s"
    ]


@option
class Sums:
    """What a sum over all workers costs by its bytes."""

    latency_s: Duration
    s_per_byte: Duration

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.s_per_byte * nbytes


@option
class InParts:
    """What it costs that a gradient leaves in parts."""

    step_s: Duration  # a step takes so much longer, evenly spread over it
    part_s: Duration  # ... and so much for each part
    sum_s: Duration  # and each sum but that of the last part


@option
class ContentionCosts:
    """Compute-communication contention: how a collective and computing slow each other down while
    both are active.
    """

    pace_reduction: Annotated[NonNegative, Field(lt=1)]  # fraction of its pace that computing loses
    collective_slowdown: Annotated[
        Positive, Field(ge=1)
    ]  # factor by which the collective takes longer
    parts: InParts | None = None  # what it costs beyond that; null = nothing


@option
class Measured(Cluster):
    """A cluster as a profile has it: `compute` are each worker's seconds of a step, and links are
    as measured, each way. Where ports are not occupied, `link` are seconds of a transfer of the
    dense model.

    `steps` are quantiles of each worker's step at `ashl.cluster.speed.LEVELS`, in multiples of
    `compute`; empty where a profile has only medians and `jitters`.
    """

    jitters: tuple[NonNegative, ...]  # of each worker; `jitter` = 0 stills them all
    encode_s: tuple[Duration, ...]
    latencies: tuple[Duration, ...]  # seconds of a push beyond its bytes
    up_bytes_s: tuple[Positive | None, ...]  # null = no cost per byte
    down_bytes_s: tuple[Positive | None, ...]
    server_bytes_s: Positive | None  # of the server's own port; null = never the bottleneck
    all_reduce: Sums | None  # of all workers, as measured; null = by their links
    contention: ContentionCosts | None = (
        None  # what they cost whoever computes meanwhile; null = nothing
    )
    steps: tuple[tuple[Positive, ...], ...] = ()
    pull_latencies: tuple[
        Duration, ...
    ] = ()  # seconds of a pull beyond its bytes; empty = as of a push
    empty_s: tuple[
        Duration, ...
    ] = ()  # seconds of a message without a body, each way; empty = the latency
    decode_s: Duration = 0.0  # of each payload that a worker decodes

    def jitter_of(self, worker: int) -> float:
        return self.jitters[worker] if self.jitter else 0.0

    def compress_of(self, rank: int) -> float | None:
        return self.encode_s[rank] if rank < len(self.compute) else self.compress_s

    def decode_of(self, rank: int) -> float:
        return self.decode_s

    def latency_of(self, rank: int, inner: bool = False) -> float:
        return self.latencies[rank] if rank < len(self.compute) else 0.0

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        own = (
            (self.up_bytes_s if out else self.down_bytes_s)[rank]
            if rank < len(self.compute)
            else self.server_bytes_s
        )
        return math.inf if own is None else own

    def missing(self) -> list[str]:
        own = ("server_step_s", "failure_detection_s")
        return [name for name in super().missing() if name in own]


@option
class RealCluster:
    """The processes that are there, as fast as they are: nothing is paced and nothing is
    emulated.
    """

    paced: ClassVar[bool] = False
    node: ClassVar[tuple[int, ...] | None] = None  # nothing is known of machines
    fault_kinds: ClassVar[tuple[str, ...]] = ()
    workers_fail: ClassVar[bool] = False
    workers_rejoin: ClassVar[bool] = False
    num_workers: Count | None
    hosts: tuple[Annotated[str, Field(min_length=1)], ...] | None
    server_host: Annotated[str, Field(min_length=1)] | None

    def __post_init__(self) -> None:
        if self.hosts is None:
            return
        if not self.hosts:
            raise UsageError("cluster.hosts=[] names no host; give one for each worker, or null")
        if self.num_workers not in (None, n := len(self.hosts)):
            raise UsageError(
                f"cluster.hosts has {n} entr{'y' if n == 1 else 'ies'} and cluster.num_workers is"
                f" {self.num_workers}; name the host of each worker, a host of several workers"
                " several times, or drop one of them"
            )
        object.__setattr__(self, "num_workers", n)


@option
class ProfileCluster:
    """The cluster that `profile=FILE` measured, in virtual time; planning makes a
    `Measured` of it.
    """

    num_workers: Count | None

"""Cluster options, as a user declares them.

Workers are ranks 0 … n−1; a parameter server, if there is one, is rank n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ashl.config.workers import MAX_WORKERS
from ashl.errors import NoEffectError, UsageError
from ashl.option import Count, Duration, Natural, NonNegative, Positive, Span, option

TICK_S = 1e-9  # resolution of the experiment's clock, seconds
MBIT_BYTES = 125_000  # bytes of 1 Mbit
FAST_GBIT_S = 10.0  # Gbit/s that few links between nodes exceed
Rate = Annotated[Positive, Field(ge=1e-6)]  # Mbit/s
Factor = Annotated[Positive, Field(le=1e9)]  # slowdown factor

FAIL, REJOIN, LINK_DOWN, SERVER_FAIL = "fail", "rejoin", "link_down", "server_fail"
FAULTS = (FAIL, REJOIN, LINK_DOWN, SERVER_FAIL)  # kinds of events besides new factors


@option
class Event:
    """A change at `time_s`.

    A worker gets another slowdown factor for computing or for its link; or it fails, or rejoins; or
    its link is down for `link_down` seconds; or, without a worker, the server fails.
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
    def changes(self) -> list[str]:
        """Return the names of the changes of this event."""
        return [name for name in ("compute", "link", *FAULTS) if getattr(self, name)]


@option
class Churn:
    """Random failures: each worker fails after an exponentially distributed time of mean `mtbf_s`,
    and rejoins after one of mean `mttr_s`.
    """

    mtbf_s: Span
    mttr_s: Span


@option
class Cluster:
    """An emulated cluster: each worker is slower than its machine by a declared factor.

    A step of worker i takes `compute[i] · step_s`. If `exchange_s` is declared, a transfer takes
    `link[i] · exchange_s / 2 · bytes / dense bytes`. Otherwise it takes latency + bytes /
    bandwidth, and occupies the NICs of both ends.
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
    trace: str | None = None  # path of a trace; planning converts it to events

    def __post_init__(self) -> None:
        n = len(self.compute)
        if not n:
            raise UsageError(
                "cluster.compute=[] is an empty cluster; give the slowdown factor of each worker,"
                " for example 'cluster.compute=[1,2]'"
            )
        if self.step_s is not None and self.step_s * min(self.compute) < TICK_S:
            raise UsageError(
                f"cluster.step_s={self.step_s:g}: steps of {self.step_s * min(self.compute):g} s"
                " are shorter than the clock's nanosecond; set a larger value"
            )
        if self.num_workers is None:
            object.__setattr__(self, "num_workers", n)
        elif self.num_workers != n:
            raise UsageError(
                f"cluster.compute has {n} entries and cluster.num_workers is {self.num_workers};"
                " remove one of them"
            )
        for name, values in (("link", self.link), ("node", self.node)):
            if values is not None and len(values) != n:
                raise UsageError(
                    f"cluster.{name} has {len(values)} entries and cluster.compute has {n}; give"
                    " one entry per worker"
                    + (", or cluster.link=null if all links are equal" if name == "link" else "")
                )
        for name in ("intra_node_bandwidth_mbit_s", "intra_node_latency_s"):
            if getattr(self, name) is not None and self.node is None:
                text = (
                    f"cluster.{name}: no effect, it needs cluster.node; give the node of each"
                    " worker, for example cluster.node=[0,0,1,1]"
                )
                raise NoEffectError(text, f"cluster.{name}")
        check_events(self.events, n)

    @property
    def links(self) -> tuple[float, ...]:
        return self.link or (1.0,) * len(self.compute)

    @property
    def fault_kinds(self) -> list[str]:
        """Return the names of the injected faults."""
        named = {name for event in self.events for name in event.changes}
        if self.churn:
            named.add("churn")
        return [name for name in (*FAULTS, "churn") if name in named]

    @property
    def workers_fail(self) -> bool:
        """Return True if injected faults contain worker failures."""
        return bool({FAIL, "churn"} & set(self.fault_kinds))

    @property
    def workers_rejoin(self) -> bool:
        """Return True if injected faults contain rejoins."""
        return bool({REJOIN, "churn"} & set(self.fault_kinds))

    def jitter_of(self, worker: int) -> float:
        """Return the relative standard deviation of a worker's step times."""
        return self.jitter

    def compress_of(self, rank: int) -> float | None:
        """Return the seconds to encode a dense vector on this rank."""
        return self.compress_s

    def decode_of(self, rank: int) -> float | None:
        """Return the seconds to decode a payload on this rank.

        The server's decoding is part of `server_step_s`.
        """
        return None if self.compress_of(rank) is None else 0.0

    def latency_of(self, rank: int, inner: bool = False) -> float:
        """Return the seconds of latency at link factor 1, in the model with NICs."""
        assert self.latency_s is not None
        return (
            self.intra_node_latency_s
            if inner and self.intra_node_latency_s is not None
            else self.latency_s
        )

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        """Return the bytes per second of this rank's NIC at link factor 1, out of it or into it."""
        beyond = rank - len(self.compute)
        if beyond == 0 or (beyond > 0 and self.node is None):
            mbit_s = (
                math.inf if self.server_bandwidth_mbit_s is None else self.server_bandwidth_mbit_s
            )
        else:
            mbit_s = (self.intra_node_bandwidth_mbit_s if inner else self.bandwidth_mbit_s) or 0.0
        return mbit_s * MBIT_BYTES

    def missing_costs(self) -> list[str]:
        """Return the costs that virtual time needs and the cluster does not declare.

        A missing cost is an error, never zero.
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
    """Check that events are possible in a cluster of n workers.

    Raises: UsageError.
    """
    running = dict.fromkeys(range(n), True)
    for event in sorted(events, key=lambda event: event.time_s):
        at, what = f"cluster.events: the event at {event.time_s:g} s", event.changes
        if not what:
            raise UsageError(
                f"{at} changes nothing; add compute=, link= or link_down=, fail: true, rejoin: true"
                " or server_fail: true"
            )
        if SERVER_FAIL in what:
            if len(what) > 1 or event.worker is not None:
                raise UsageError(
                    f"{at} has server_fail together with another change; give each change an event"
                    " of its own"
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
                    f"{at} has {' and '.join(what)} at once; give each an event of its own"
                )
            if event.rejoin == running[event.worker]:
                found, other = ("is running", "fail") if event.rejoin else ("has failed", "rejoin")
                raise UsageError(
                    f"{at} has {what[0]}, and worker {event.worker} {found} at that time; add an"
                    f" event with {other}: true before it, or remove it"
                )
            running[event.worker] = event.rejoin


def note_implied_bandwidth(cluster: object, dense_bytes: int) -> list[str]:
    """Return a note if `exchange_s` implies a bandwidth that few links have.

    The declared `exchange_s` holds for a model of any size.
    """
    if type(cluster) is not Cluster or not cluster.exchange_s:  # a measured cluster needs no note
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
class AllReduceLine:
    """Measured cost of an all-reduce over all workers: latency, and seconds per byte."""

    latency_s: Duration
    s_per_byte: Duration

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.s_per_byte * nbytes


@option
class ContentionCosts:
    """Compute-communication contention: how a collective and computing slow each other down while
    both are active.
    """

    pace_reduction: Annotated[NonNegative, Field(lt=1)]  # fraction of its pace that computing loses
    # factor by which the collective takes longer
    collective_slowdown: Annotated[Positive, Field(ge=1)]
    # extra seconds of each all-reduce of a gradient, except that of the last message
    start_s: Duration = 0.0


@option
class Measured(Cluster):
    """The cluster of a profile.

    `compute` holds each worker's seconds of a step. Links are as measured, each direction by
    itself. In the model without NICs, `link` holds seconds of a transfer of the dense model.
    `steps` are quantiles of each worker's step at `ashl.cluster.speed.LEVELS`, in multiples of
    `compute`; empty if a profile has only medians and `jitters`.
    """

    jitters: tuple[NonNegative, ...]  # by worker; `jitter` = 0 turns all of them off
    encode_s: tuple[Duration, ...]
    latencies: tuple[Duration, ...]  # seconds of a push beyond its bytes
    up_bytes_s: tuple[Positive | None, ...]  # null = no cost per byte
    down_bytes_s: tuple[Positive | None, ...]
    server_bytes_s: Positive | None  # bytes/s of the server's NIC; null = never the bottleneck
    all_reduce: (
        AllReduceLine | None
    )  # measured all-reduce of all workers; null = computed from the links
    contention: ContentionCosts | None = None  # with collectives; null = none
    steps: tuple[tuple[Positive, ...], ...] = ()
    # seconds of a pull beyond its bytes; empty = equal to `latencies`
    pull_latencies: tuple[Duration, ...] = ()
    # seconds of a message without payload, each direction; empty = the latency
    empty_s: tuple[Duration, ...] = ()
    decode_s: Duration = 0.0  # seconds to decode one payload on a worker

    def jitter_of(self, worker: int) -> float:
        return self.jitters[worker] if self.jitter else 0.0

    def compress_of(self, rank: int) -> float | None:
        return self.encode_s[rank] if rank < len(self.compute) else self.compress_s

    def decode_of(self, rank: int) -> float:
        return self.decode_s

    def latency_of(self, rank: int, inner: bool = False) -> float:
        return self.latencies[rank] if rank < len(self.compute) else 0.0

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        rate = self.server_bytes_s
        if rank < len(self.compute):
            rate = (self.up_bytes_s if out else self.down_bytes_s)[rank]
        return math.inf if rate is None else rate

    def missing_costs(self) -> list[str]:
        declared = ("server_step_s", "failure_detection_s")  # a profile may lack these alone
        return [name for name in super().missing_costs() if name in declared]


@option
class RealCluster:
    """The processes of this job at their real speed: nothing is paced and nothing is emulated."""

    paced: ClassVar[bool] = False
    node: ClassVar[tuple[int, ...] | None] = None  # nodes are not declared
    fault_kinds: ClassVar[tuple[str, ...]] = ()
    workers_fail: ClassVar[bool] = False
    workers_rejoin: ClassVar[bool] = False
    num_workers: Count | None
    hosts: tuple[Annotated[str, Field(min_length=1)], ...] | None

    def __post_init__(self) -> None:
        if self.hosts is None:
            return
        if not self.hosts:
            raise UsageError("cluster.hosts=[]: no host; give one for each worker, or null")
        if self.num_workers not in (None, n := len(self.hosts)):
            raise UsageError(
                f"cluster.hosts has {n} entr{'y' if n == 1 else 'ies'} and cluster.num_workers is"
                f" {self.num_workers}; name the host of each worker (a host of several workers"
                " several times), or remove one of them"
            )
        object.__setattr__(self, "num_workers", n)


@option
class ProfileCluster:
    """The cluster that `profile=FILE` has measured, in virtual time; planning converts it to a
    `Measured`.
    """

    num_workers: Count | None

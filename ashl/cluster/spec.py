"""What a cluster is, as a user declares it. Roles: workers are ranks 0 … n−1; a parameter server, if any, is rank n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ashl.config.workers import MAX_WORKERS
from ashl.errors import UsageError
from ashl.option import Count, Duration, Natural, NonNegative, Positive, Span, option

TICK_S = 1e-9  # of the clock
MBIT_BYTES = 125_000
FAST_GBIT_S = 10.0  # of a link between machines: few have more
Rate = Annotated[Positive, Field(ge=1e-6)]  # Mbit/s
Factor = Annotated[Positive, Field(le=1e9)]  # how many times as slow

FAIL, COME, PAUSE, LINK_DOWN, SERVER_FAIL = "fail", "join", "pause", "link_down", "server_fail"
BEFALLS = (FAIL, COME, PAUSE, LINK_DOWN, SERVER_FAIL)  # what an event may bring beside another factor


@option
class Event:
    """At `time_s`: from then on a worker computes or communicates at another slowdown factor; or it fails, or comes
    back; or it stands still, or its link is down, for so many seconds; or (without a worker) the server fails."""

    time_s: Duration
    worker: Natural | None = None
    compute: Factor | None = None
    link: Factor | None = None
    fail: bool = False
    join: bool = False
    pause: Duration | None = None
    link_down: Duration | None = None
    server_fail: bool = False

    @property
    def what(self) -> list[str]:
        """All that it says, by name."""
        return [name for name in ("compute", "link", *BEFALLS) if getattr(self, name)]


@option
class Churn:
    """Each worker fails after an exponentially distributed time of this mean, and is back after one of that mean."""

    mtbf_s: Span
    mttr_s: Span


@option
class Cluster:
    """An emulated cluster: each worker is slower than the machine it runs on by a declared factor.

    A step of worker i takes `compute[i] · step_s`. A transfer takes `link[i] · exchange_s / 2 · bytes / dense bytes`
    where `exchange_s` is declared, and otherwise latency + bytes / bandwidth with the ports of both ends occupied.
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
    inner_bandwidth_mbit_s: Rate | None
    inner_latency_s: Duration | None
    jitter: Annotated[NonNegative, Field(le=10)]
    events: tuple[Event, ...]
    churn: Churn | None
    detect_s: Duration | None
    trace: str | None = None  # a file, whose content planning puts among the events

    def __post_init__(self) -> None:
        n = len(self.compute)
        if not n:
            raise UsageError(
                "cluster.compute=[] is an empty cluster; give the slowdown factor of each worker, as in "
                "'cluster.compute=[1,2]'"
            )
        if self.step_s is not None and self.step_s * min(self.compute) < TICK_S:
            raise UsageError(
                f"cluster.step_s={self.step_s:g} makes steps of {self.step_s * min(self.compute):g} s, and the clock "
                "counts nanoseconds; give a longer one"
            )
        if self.num_workers is None:
            object.__setattr__(self, "num_workers", n)
        elif self.num_workers != n:
            raise UsageError(f"cluster.compute has {n} entries and cluster.num_workers is {self.num_workers}; drop one")
        for name, values in (("link", self.link), ("node", self.node)):
            if values is not None and len(values) != n:
                raise UsageError(
                    f"cluster.{name} has {len(values)} entries and cluster.compute has {n}; give one entry per worker"
                    + (", or cluster.link=null where all links are equal" if name == "link" else "")
                )
        for name in ("inner_bandwidth_mbit_s", "inner_latency_s"):
            if getattr(self, name) is not None and self.node is None:
                raise UsageError(f"cluster.{name} needs cluster.node: which machine is each worker on?")
        check_events(self.events, n)

    @property
    def links(self) -> tuple[float, ...]:
        return self.link or (1.0,) * len(self.compute)

    @property
    def befalls(self) -> list[str]:
        """What happens to its workers beside other factors, by name."""
        named = {name for event in self.events for name in event.what} | ({"churn"} if self.churn else set())
        return [name for name in (*BEFALLS, "churn") if name in named]

    @property
    def loses(self) -> bool:
        """Whether workers may be lost."""
        return bool({FAIL, "churn"} & set(self.befalls))

    @property
    def joins(self) -> bool:
        """Whether workers come while others run."""
        return bool({COME, "churn"} & set(self.befalls))

    def jitter_of(self, worker: int) -> float:
        """Relative standard deviation of its step times."""
        return self.jitter

    def compress_of(self, rank: int) -> float | None:
        """Seconds to encode a dense vector."""
        return self.compress_s

    def decode_of(self, rank: int) -> float | None:
        """Seconds to take a body apart, where that is not the server's work, which `server_step_s` is."""
        return None if self.compress_of(rank) is None else 0.0

    def latency_of(self, rank: int, inner: bool = False) -> float:
        """Seconds at link factor 1, where ports are occupied."""
        assert self.latency_s is not None
        return self.inner_latency_s if inner and self.inner_latency_s is not None else self.latency_s

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        """Bytes per second through this rank's port at link factor 1, out of it or into it."""
        beyond = rank - len(self.compute)
        if beyond == 0 or (beyond > 0 and self.node is None):
            mbit_s = math.inf if self.server_bandwidth_mbit_s is None else self.server_bandwidth_mbit_s
        else:
            mbit_s = (self.inner_bandwidth_mbit_s if inner else self.bandwidth_mbit_s) or 0.0
        return mbit_s * MBIT_BYTES

    def missing(self) -> list[str]:
        """The costs that exact virtual time needs and nobody declared. A missing cost is an error, never zero."""
        names = [name for name in ("step_s", "compress_s", "server_step_s") if getattr(self, name) is None]
        if self.detect_s is None and self.loses:
            names.append("detect_s")
        if self.exchange_s is None:
            names += [name for name in ("bandwidth_mbit_s", "latency_s") if getattr(self, name) is None]
            if self.node is not None and self.inner_bandwidth_mbit_s is None:
                names.append("inner_bandwidth_mbit_s")
        return names


def check_events(events: Sequence[Event], n: int) -> None:
    """Refuse events of which no cluster of n workers can be. Raises UsageError."""
    there = dict.fromkeys(range(n), True)
    for event in sorted(events, key=lambda event: event.time_s):
        at, what = f"cluster.events: the event at {event.time_s:g} s", event.what
        if not what:
            raise UsageError(
                f"{at} changes nothing; add compute=, link=, pause= or link_down=, fail: true, join: true or "
                "server_fail: true"
            )
        if SERVER_FAIL in what:
            if len(what) > 1 or event.worker is not None:
                raise UsageError(f"{at} says server_fail, and more; give the rest an event of its own")
            continue
        if event.worker is None:
            raise UsageError(f"{at} ({', '.join(what)}) names no worker; add worker=")
        if event.worker >= n:
            raise UsageError(f"cluster.events names worker {event.worker}, but there are only workers 0 to {n - 1}")
        if {FAIL, COME} & set(what):
            if len(what) > 1:
                raise UsageError(f"{at} says {' and '.join(what)} at once; give each an event of its own")
            if event.join == there[event.worker]:
                found, other = ("there", "fail") if event.join else ("gone", "join")
                raise UsageError(
                    f"{at} says {what[0]}, and worker {event.worker} is {found} by then; add an event with {other}: "
                    "true before it, or drop it"
                )
            there[event.worker] = event.join


def implied(cluster: object, dense_bytes: int) -> list[str]:
    """What to note where `exchange_s`, which holds whatever the model's size, asks more of a link than links have."""
    if type(cluster) is not Cluster or not cluster.exchange_s:  # what was measured is as it is
        return []
    exchange_s = cluster.exchange_s * min(cluster.links)
    if (gbit_s := 8e-9 * dense_bytes / exchange_s) <= FAST_GBIT_S:
        return []
    return [
        f"cluster.exchange_s={cluster.exchange_s:g} holds for a model of any size: {dense_bytes / 1e6:.3g} MB each way "
        f"in {1e3 * exchange_s:g} ms are {gbit_s:.3g} Gbit/s, and few links have more than {FAST_GBIT_S:g}; declare a "
        "longer one, or cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s"
    ]


@option
class Sums:
    """What a sum over all workers costs by its bytes, and at least."""

    latency_s: Duration
    s_per_byte: Duration
    least_s: Duration = 0.0

    def seconds(self, nbytes: float) -> float:
        return max(self.least_s, self.latency_s + self.s_per_byte * nbytes)


@option
class InParts:
    """What it costs that a gradient leaves in parts."""

    step_s: Duration  # a step takes so much longer, evenly spread over it
    part_s: Duration  # ... and so much for each part
    sum_s: Duration  # and each sum but that of the last part


@option
class Beside:
    """What a sum and computing take from each other while both go on."""

    lost: Annotated[NonNegative, Field(lt=1)]  # the share of its pace that computing loses
    slowed: Annotated[Positive, Field(ge=1)]  # how many times as long the sum takes
    parts: InParts | None = None  # what it costs beyond that; null = nothing


@option
class Measured(Cluster):
    """A cluster as a profile has it: `compute` are each worker's seconds of a step, and links are as measured, each
    way. Where ports are not occupied, `link` are seconds of a transfer of the dense model."""

    jitters: tuple[NonNegative, ...]  # of each worker; `jitter` = 0 stills them all
    encode_s: tuple[Duration, ...]
    latencies: tuple[Duration, ...]
    up_bytes_s: tuple[Positive | None, ...]  # null = no cost per byte
    down_bytes_s: tuple[Positive | None, ...]
    server_bytes_s: Positive | None  # of the server's own port; null = never the bottleneck
    all_reduce: Sums | None  # of all workers, as measured; null = by their links
    beside: Beside | None = None  # what they cost whoever computes meanwhile; null = nothing

    def jitter_of(self, worker: int) -> float:
        return self.jitters[worker] if self.jitter else 0.0

    def compress_of(self, rank: int) -> float | None:
        return self.encode_s[rank] if rank < len(self.compute) else self.compress_s

    def latency_of(self, rank: int, inner: bool = False) -> float:
        return self.latencies[rank] if rank < len(self.compute) else 0.0

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        own = (self.up_bytes_s if out else self.down_bytes_s)[rank] if rank < len(self.compute) else self.server_bytes_s
        return math.inf if own is None else own

    def missing(self) -> list[str]:
        own = ("server_step_s", "detect_s")
        return [name for name in super().missing() if name in own]


@option
class GroupSum(Sums):
    """The same over so many of them."""

    group: Count


@option
class Quota:
    """So many cores are given to a machine in the mean, in every period anew, and so much of a core is kept that one
    which did nothing has left. That they are used up is seen when so much more is, which the next one lacks."""

    cores: Positive
    period_s: Positive
    kept_s: NonNegative = 0.0
    late_s: NonNegative = 0.0


@option
class SharedCores:
    """Machines that have too few cores for the ranks on them, see `ashl.cluster.cores`. Work is in seconds of a core.

    `machine` is that of each worker and of the server, and `ends` what a message costs them, whether it leaves or
    comes; both hold for whoever comes after them, too. The share `before` of it is in the time that a message takes
    alone. `busy` is the share of a collective's time in which each member of a group of so many keeps a core busy, and
    `waited` that in which it waits for the others, who come to it one after the other. Where machines slow each other
    down, as those of one computer do, work on each takes longer by `crowded` of it for each core in use on the others.
    """

    machine: tuple[Natural, ...]
    cores: tuple[Positive, ...]  # of each machine
    resumed_s: tuple[Duration, ...]  # what each worker's computing costs more when it has stood still
    quantum_s: Positive  # after which a task that others wait for goes to the end of their queue, in the mean
    ends: tuple[Sums, ...]
    before: Annotated[NonNegative, Field(le=1)]
    busy: tuple[tuple[Count, Annotated[NonNegative, Field(le=1)]], ...]
    quotas: tuple[Quota | None, ...] = ()  # of each machine; none = there is none anywhere
    empty_s: tuple[Duration, ...] = ()  # what a message without a body costs each end; none = as one of no bytes
    spread: Annotated[NonNegative, Field(lt=1)] = 0.0  # of quanta, each way, as a share
    between: Sums | None = None  # what messages from worker to worker cost either end; null = as others cost workers
    waited: tuple[tuple[Count, Annotated[NonNegative, Field(le=1)]], ...] = ()
    crowded: tuple[NonNegative, ...] = ()  # of each machine; none = none does

    def end_s(self, rank: int, nbytes: int, between: bool = False) -> float:
        """What a message costs there, perhaps one that goes from worker to worker."""
        at = min(rank, len(self.ends) - 1)
        if not nbytes and self.empty_s:
            return self.empty_s[at]
        return (self.between if between and self.between else self.ends[at]).seconds(nbytes)

    def busy_in(self, group: int) -> float:
        """Of the largest group that is no larger."""
        return next((share for count, share in reversed(self.busy) if count <= group), 1.0)

    def waited_in(self, group: int) -> float:
        return next((share for count, share in reversed(self.waited) if count <= group), 0.0)


@option
class Fitted(Measured):
    """A cluster as a full profile has it: steps are drawn, ways differ, and each message holds the server's port.

    `steps` are quantiles of each worker's step at `ashl.cluster.speed.LEVELS`, or with `in_order` the steps themselves,
    in multiples of `compute`; `batches` are what a step of other batch sizes takes, likewise: (samples, multiple).
    `server_in` and `server_out` are how long a message holds the port of the server, alike for all, and
    `server_crossed_s_per_byte` is by how much each of its bytes holds it longer while it is in use the other way, too.
    What goes from worker to worker holds their ports on the other way for the share `crossed` of its time.
    """

    steps: tuple[tuple[Positive, ...], ...]
    in_order: bool
    batches: tuple[tuple[tuple[Positive, Positive], ...], ...]
    pull_latencies: tuple[Duration, ...]  # `latencies` are those of pushes
    server_in: Sums
    server_out: Sums
    group_sums: tuple[GroupSum, ...]
    gathering: Sums | None = None  # of all, by the bytes of all together; null = half a sum
    empty_s: tuple[Duration, ...] = ()  # of each worker's messages without a body, both ways; none = as of no bytes
    decode_s: Duration = 0.0  # of each body that a worker takes apart
    shared: SharedCores | None = None  # null = there are cores for all
    server_crossed_s_per_byte: NonNegative = 0.0
    crossed: NonNegative = 0.0

    def decode_of(self, rank: int) -> float:
        return self.decode_s

    def bytes_s(self, rank: int, out: bool, inner: bool) -> float:
        if rank < len(self.compute):
            return super().bytes_s(rank, out, inner)
        s_per_byte = (self.server_out if out else self.server_in).s_per_byte
        return 1 / s_per_byte if s_per_byte else math.inf


@option
class RealCluster:
    """The processes that are there, as fast as they are: nothing is paced and nothing is emulated."""

    paced: ClassVar[bool] = False
    node: ClassVar[tuple[int, ...] | None] = None  # nothing is known of machines
    befalls: ClassVar[tuple[str, ...]] = ()
    loses: ClassVar[bool] = False
    joins: ClassVar[bool] = False
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
                f"cluster.hosts has {n} entr{'y' if n == 1 else 'ies'} and cluster.num_workers is {self.num_workers}; "
                "name the host of each worker, a host of several workers several times, or drop one of them"
            )
        object.__setattr__(self, "num_workers", n)


@option
class ProfileCluster:
    """The cluster that `profile=FILE` measured, in virtual time; planning makes a `Measured` of it."""

    num_workers: Count | None

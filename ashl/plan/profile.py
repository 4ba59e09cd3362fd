"""Profile: seconds of a step, a push, a pull and an encoding of each worker, measured or declared.

A missing cost is an error, never zero. A cost may be zero if it was declared so, and for latency
and encoding. A step always takes time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import ValidationError

from ashl.cluster.spec import Cluster, ContentionCosts, Measured
from ashl.cluster.speed import LEVELS
from ashl.config.construct import explain
from ashl.errors import UsageError, parsed
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.checks import check_line, check_names, is_count, is_number, is_seconds, require_keys
from ashl.plan.plan import Spec

T = TypeVar("T")
SCHEMA = 5
SOURCES = ("declared", "measured")
TICK_S = 1e-9  # resolution of the experiment's clock, seconds
# A link that reaches this share of the rate of the server's NIC may be faster than the NIC.
PORT_SHARE = 0.9
# cost → its noise
NOISES = {"step_s": "step_noise_s", "push_s": "push_noise_s", "pull_s": "pull_noise_s"}
LOADED = ("push_loaded_s", "pull_loaded_s")
PASSES = ("forward_s", "backward_s")
LINES = ("push_line", "pull_line")
TIMES = "step_times_s"
MAX_JITTER = 10.0  # upper bound of `cluster.jitter`


@dataclass(frozen=True, kw_only=True)
class WorkerProfile:
    """Costs of one worker, in seconds.

    Raises: ValueError on an invalid cost.
    """

    step_s: float  # one local step
    step_spread_s: float  # standard deviation of a step
    step_noise_s: float  # half of the 95 % interval of the median step; 0 = declared
    batch: int  # samples of that step
    push_s: float  # push of the dense model with its latency, without other traffic
    push_noise_s: float
    push_loaded_s: float | None  # the push while all workers push; None = not measured
    pull_s: float  # pull of the dense model with its latency, without other traffic
    pull_noise_s: float
    pull_loaded_s: float | None
    latency_s: float  # message without payload
    push_bytes_s: float | None  # bytes per second beyond the latency; None = no cost per byte
    pull_bytes_s: float | None
    compress_s: float  # encoding of the dense vector
    # by layer group, the last layers first; empty = not measured
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    push_line: AlphaBeta | None = None  # messages to the server by bytes; None = not measured
    pull_line: AlphaBeta | None = None
    host: str | None = None  # host of the measurement; None = not known
    device: str | None = None  # device of the measurement; None = not known
    # quantiles of a step at `ashl.cluster.speed.LEVELS`; empty = not measured
    step_times_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_seconds()
        self._check_rates()
        self._check_step_times()
        for name in LINES:
            check_line(getattr(self, name), name)
        check_names(self.host, self.device)
        if not is_count(self.batch):
            raise ValueError(f"batch is {self.batch!r}, where a whole number from 1 up is expected")

    def _check_seconds(self) -> None:
        seconds = (*NOISES, *NOISES.values(), "step_spread_s", "latency_s", "compress_s", *LOADED)
        for name in seconds:
            if name in LOADED and getattr(self, name) is None:
                continue
            if not is_seconds(getattr(self, name)):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, where seconds from 0 up are expected"
                )
        if self.step_s < TICK_S:
            raise ValueError(
                f"step_s is {self.step_s!r}, but a step takes at least the clock's nanosecond"
            )
        for name in PASSES:
            if not all(map(is_seconds, getattr(self, name))):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, where seconds of each layer group are"
                    " expected"
                )

    def _check_rates(self) -> None:
        for name in ("push_bytes_s", "pull_bytes_s"):
            rate = getattr(self, name)
            if rate is not None and not (is_number(rate) and rate > 0):
                raise ValueError(
                    f"{name} is {rate!r}, where bytes per second above 0, or null, are expected"
                )

    def _check_step_times(self) -> None:
        if not all(is_seconds(time_s) and time_s > 0 for time_s in self.step_times_s):
            raise ValueError(
                f"step_times_s is {self.step_times_s!r}, where seconds above 0 are expected"
            )
        if len(self.step_times_s) not in (0, len(LEVELS)):
            raise ValueError(
                f"step_times_s has {len(self.step_times_s)} quantiles, where {len(LEVELS)} are"
                " expected"
            )

    def push_of(self, payload: float) -> float:
        """Return the seconds of a push of `payload` · the dense bytes, linear between latency and
        dense push.
        """
        fixed = self.push_s if self.push_bytes_s is None else min(self.latency_s, self.push_s)
        return fixed + payload * (self.push_s - fixed)


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """Costs of one codec for the dense vector, in seconds.

    Raises: ValueError on an invalid cost.
    """

    codec: str  # dotted name of the codec's class
    encode_s: tuple[float, ...]  # by worker
    decode_s: float  # one payload, on the server

    def __post_init__(self) -> None:
        check_names(self.codec)
        if not all(map(is_seconds, (*self.encode_s, self.decode_s))):
            raise ValueError(
                f"the costs of {self.codec} are {self.encode_s!r} and {self.decode_s!r}, not"
                " seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of all workers of a cluster, in rank order, of its server and of its collectives."""

    schema: int
    model: str
    num_params: int
    dense_bytes: int
    device: str
    source: str  # "declared" | "measured"
    server_step_s: float | None  # seconds to apply one push; None = not known
    server_bytes_s: float | None  # bytes/s of the server's NIC; None = never the bottleneck
    ports: bool  # True if a transfer occupies the NICs of both ends
    workers: tuple[WorkerProfile, ...]
    # bytes of each layer group, the last layers first; empty = not measured
    group_bytes: tuple[int, ...] = ()
    all_reduce: AlphaBeta | None = None  # over all workers, by bytes; None = not measured
    contention: ContentionCosts | None = None  # of collectives and computing; None = not measured
    server_host: str | None = None
    codecs: tuple[CodecCost, ...] = ()  # one for each codec that was timed

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(
                f"the profile's schema is {self.schema!r} where {SCHEMA} was expected; profile"
                " again"
            )
        if self.source not in SOURCES:
            raise ValueError(
                f"the profile's source is {self.source!r}; it may be {' or '.join(SOURCES)}"
            )
        for name in ("num_params", "dense_bytes"):
            if not is_count(getattr(self, name)):
                raise ValueError(
                    f"the profile's {name} is {getattr(self, name)!r}, where a whole number is"
                    " expected"
                )
        if not isinstance(self.ports, bool):
            raise ValueError(
                f"the profile's ports is {self.ports!r}, where true or false is expected"
            )
        if not self.workers:
            raise ValueError("the profile has no workers; it needs one entry for each")
        check_line(self.all_reduce, "the profile's all_reduce")
        check_names(self.server_host, self.model, self.device)
        self._check_server()
        self._check_lengths()

    def _check_server(self) -> None:
        if self.server_step_s is not None and not is_seconds(self.server_step_s):
            raise ValueError(
                f"the profile's server_step_s is {self.server_step_s!r}, where seconds are expected"
            )
        if self.server_bytes_s is not None and not (
            is_number(self.server_bytes_s) and self.server_bytes_s > 0
        ):
            raise ValueError(
                f"the profile's server_bytes_s is {self.server_bytes_s!r}, where bytes/s are"
                " expected"
            )

    def _check_lengths(self) -> None:
        groups = len(self.group_bytes)
        if any(len(getattr(worker, name)) != groups for worker in self.workers for name in PASSES):
            raise ValueError(
                f"the profile has {groups} layer groups, and a worker with costs of another number"
                " of them; profile again"
            )
        if not all(map(is_count, self.group_bytes)) or sum(self.group_bytes) not in (
            0,
            self.dense_bytes,
        ):
            raise ValueError(
                f"the profile's group_bytes do not add up to the model's {self.dense_bytes}"
            )
        if other := [own.codec for own in self.codecs if len(own.encode_s) != len(self.workers)]:
            raise ValueError(
                f"the profile has {len(self.workers)} workers, and costs of {other[0]} for another"
                " number of them; profile again"
            )

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    def codec(self, name: str | None) -> CodecCost | None:
        """Return the costs of the codec of this class, or None if it was not timed."""
        return next((own for own in self.codecs if own.codec == name), None)

    @property
    def better_host(self) -> str | None:
        """Return a host whose link is at least as good as the server's by the measurements, or
        None.

        Workers on the server's host used no link. If no worker was slower while all pushed at once,
        the server's NIC is as fast as all other links together. If workers were slower, no link is
        known to be faster than the server's NIC.
        """
        bound = self.server_bytes_s
        if self.server_host is None or bound is None:
            return None
        rates = {
            worker.host: min(worker.push_bytes_s or bound, worker.pull_bytes_s or bound)
            for worker in self.workers
            if worker.host not in (None, self.server_host)
        }
        best = max(rates, key=lambda host: rates[host], default=None)
        return best if best is not None and rates[best] >= PORT_SHARE * bound else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of a step after which each layer group's gradient is ready, averaged
        over the workers.
        """
        return ready_shares(self.workers)

    @property
    def needed(self) -> tuple[float, ...]:
        """Return the share of a step after which the forward pass reaches each layer group,
        averaged over the workers.
        """
        there = []
        for worker in self.workers:
            step_s = math.fsum((*worker.forward_s, *worker.backward_s)) or 1.0
            there.append(
                [
                    math.fsum(worker.forward_s[k + 1 :]) / step_s
                    for k in range(len(self.group_bytes))
                ]
            )
        return tuple(math.fsum(column) / len(there) for column in zip(*there, strict=True))

    def without_parts(self) -> Profile:
        """Return the profile without costs by layer group and message, as a run measures it during
        profiling.
        """
        bare = dict.fromkeys((*PASSES, TIMES), ()) | dict.fromkeys((*LINES, "host", "device"))
        return replace(
            self,
            workers=tuple(replace(w, **bare) for w in self.workers),
            group_bytes=(),
            all_reduce=None,
            contention=None,
            codecs=(),
        )

    def check(self, num_workers: int, model: str, num_params: int, batch: int) -> None:
        """Check that the profile is of this number of workers, model and batch size.

        Raises: UsageError.
        """
        of = {worker.batch for worker in self.workers}
        if self.num_workers != num_workers:
            raise UsageError(self.crowd(num_workers))
        clashes = (
            (self.model != model, f"the model {self.model} and this one is {model}"),
            (
                self.num_params != num_params,
                f"{self.num_params} parameters and the model has {num_params}",
            ),
            (
                of != {batch},
                f"batches of {', '.join(map(str, sorted(of)))} and dataset.batch_size is {batch}",
            ),
        )
        for clash, what in clashes:
            if clash:
                raise UsageError(self.clash(what))

    @staticmethod
    def clash(what: str, fix: str = "") -> str:
        """Return the message about a profile that does not fit the configuration."""
        return (
            f"the profile is of {what}; {fix}profile again with `ashl profile`, or remove profile="
        )

    def crowd(self, num_workers: int) -> str:
        """Return the message about a profile of another number of workers."""
        fix = (
            f"set cluster.num_workers={self.num_workers}, or in virtual time take cluster=profile,"
            " or "
        )
        return self.clash(f"{self.num_workers} workers and the cluster has {num_workers}", fix)

    def cluster(self, codec: str | None = None) -> Spec:
        """Return the spec of a cluster with the costs of this profile, for virtual time.

        Encoding costs are those of the codec of this class if it was timed.
        """
        workers = self.workers
        pushes = [worker.push_s for worker in workers]
        known = self.codec(codec)
        # In the model without NICs a pull takes as long as a push.
        free = self.ports or not all(pushes)
        up = [self._latency_s(worker, worker.push_line, worker.push_s) for worker in workers]
        down = [self._latency_s(worker, worker.pull_line, worker.pull_s) for worker in workers]
        jitters = [min(MAX_JITTER, worker.step_spread_s / worker.step_s) for worker in workers]
        measured = {}
        if self.source == "measured" and all(
            worker.push_line and worker.pull_line for worker in workers
        ):
            measured |= {
                "pull_latencies": down,
                "empty_s": [worker.latency_s for worker in workers],
            }
        if all(worker.step_times_s for worker in workers):
            steps = [
                [time_s / worker.step_s for time_s in worker.step_times_s] for worker in workers
            ]
            jitters = [min(MAX_JITTER, max(own) - min(own)) for own in steps]
            measured["steps"] = steps
        if known is not None:
            measured["decode_s"] = known.decode_s
        server_step_s = self.server_step_s
        if server_step_s is not None and known is not None:
            server_step_s += known.decode_s
        return {
            **dict.fromkeys(field.name for field in fields(Cluster)),
            "compute_spread": 0.0,
            "_target_": f"{Measured.__module__}.{Measured.__name__}",
            "compute": [worker.step_s for worker in workers],
            "step_s": 1.0,
            "link": None if free else pushes,
            "exchange_s": None if self.ports else 2.0 * all(pushes),
            # the server's encoding, which is not measured
            "compress_s": max(worker.compress_s for worker in workers),
            "server_step_s": server_step_s,
            "jitter": max(jitters),
            "events": [],
            "jitters": jitters,
            "encode_s": (
                list(known.encode_s) if known else [worker.compress_s for worker in workers]
            ),
            "latencies": up,
            "up_bytes_s": [
                rate_of(w.push_s - s, self.dense_bytes) for w, s in zip(workers, up, strict=True)
            ],
            "down_bytes_s": [
                rate_of(w.pull_s - s, self.dense_bytes) for w, s in zip(workers, down, strict=True)
            ],
            "server_bytes_s": self.server_bytes_s,
            "all_reduce": (
                None
                if self.all_reduce is None or self.source == "declared"
                else asdict(self.all_reduce)
            ),
            "contention": None if self.contention is None else asdict(self.contention),
            **measured,
        }

    def _latency_s(self, worker: WorkerProfile, line: AlphaBeta | None, dense_s: float) -> float:
        """Return the latency of a message of any size.

        With the rate, it gives the dense model its measured time.
        """
        if line is None or self.source == "declared":
            return worker.latency_s
        return min(line.latency_s, dense_s)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Return the profile of a JSON text.

        Raises: ValueError, one sentence, if it is not a profile of this schema with valid costs.
        """
        data: Any = parsed(text)
        if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(
                f"the profile's schema is {data['schema']!r} where {SCHEMA} was expected; profile"
                " again"
            )
        require_keys(data, [field.name for field in fields(Profile)], "the profile")
        data["all_reduce"] = _line(data["all_reduce"], "the profile's all_reduce")
        data["contention"] = _option(
            ContentionCosts, data["contention"], "the profile's contention"
        )
        data["codecs"] = tuple(map(_codec, _list(data["codecs"], "the profile's codecs")))
        data["group_bytes"] = _list(data["group_bytes"], "the profile's group_bytes")
        if not isinstance(data["workers"], list):
            raise ValueError(
                "the profile's workers are no list; it needs one entry for each worker"
            )
        data["workers"] = tuple(
            _worker(entry, rank, data["source"] == "measured")
            for rank, entry in enumerate(data["workers"])
        )
        return Profile(**data)


def ready_shares(workers: Sequence[WorkerProfile]) -> tuple[float, ...]:
    """Return the share of a step after which each layer group's gradient is ready, averaged over
    the workers.
    """
    ready = []
    for worker in workers:
        _, *there_s = accumulate(worker.backward_s, initial=math.fsum(worker.forward_s))
        ready.append([at_s / there_s[-1] if there_s[-1] else 1.0 for at_s in there_s])
    return tuple(math.fsum(column) / len(ready) for column in zip(*ready, strict=True))


def _worker(entry: Any, rank: int, measured: bool) -> WorkerProfile:
    where = f"worker {rank} of the profile"
    require_keys(entry, [field.name for field in fields(WorkerProfile)], where)
    entry |= {name: _list(entry[name], f"{where}: {name}") for name in (*PASSES, TIMES)}
    entry |= {name: _line(entry[name], f"{where}: {name}") for name in LINES}
    try:
        worker = WorkerProfile(**entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    for name in ("push_s", "pull_s"):
        if measured and not entry[name]:
            raise ValueError(
                f"{where}: {name} is 0, which no measurement gives; profile again, or declare the"
                " costs"
            )
    return worker


def _codec(entry: Any) -> CodecCost:
    require_keys(entry, [field.name for field in fields(CodecCost)], "a codec of the profile")
    encode_s = _list(entry["encode_s"], "encode_s of a codec of the profile")
    return CodecCost(codec=entry["codec"], encode_s=encode_s, decode_s=entry["decode_s"])


def _option(cls: type[T], entry: Any, what: str) -> T | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is {entry!r}, where keys and values are expected")
    try:
        return cls(**entry)
    except ValidationError as error:
        raise ValueError(explain(error, what, cls)) from error


def _list(values: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{what} is {values!r}, where a list is expected")
    return tuple(values)


def _line(entry: Any, what: str) -> AlphaBeta | None:
    if entry is None:
        return None
    require_keys(entry, [field.name for field in fields(AlphaBeta)], what)
    return AlphaBeta(**entry)


def rate_of(seconds: float, dense_bytes: int) -> float | None:
    """Return bytes per second; None = no cost per byte."""
    return dense_bytes / seconds if seconds > 0 else None

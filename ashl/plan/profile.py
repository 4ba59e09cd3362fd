"""A profile: what a step, a push, a pull and an encoding cost each worker, measured or declared.

A missing cost is an error, never zero. Zero is possible where it was declared, and for what need
not cost anything (latency, encoding); a step always takes time.
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
TICK_S = 1e-9  # of the experiment's clock
PORT_SHARE = 0.9  # of what a server's port lets through: who is seen to have that may have more
NOISES = {
    "step_s": "step_noise_s",
    "push_s": "push_noise_s",
    "pull_s": "pull_noise_s",
}  # of each cost
LOADED = ("push_loaded_s", "pull_loaded_s")
PASSES = ("forward_s", "backward_s")
LINES = ("push_line", "pull_line")
TIMES = "step_times_s"
MAX_JITTER = 10.0  # what `cluster.jitter` may be


@dataclass(frozen=True, kw_only=True)
class WorkerProfile:
    """What one worker's work costs, in seconds. Raises ValueError on a cost that cannot be."""

    step_s: float  # one local step
    step_spread_s: float  # its standard deviation
    step_noise_s: float  # half of the interval in which its median lies; 0 = declared
    batch: int  # samples of that step
    push_s: float  # the dense model to the server, latency included, while nobody else does so
    push_noise_s: float
    push_loaded_s: float | None  # while all others do so, too; None = not measured
    pull_s: float  # and back
    pull_noise_s: float
    pull_loaded_s: float | None
    latency_s: float  # of a message without a body
    push_bytes_s: float | None  # bytes per second beyond the latency; None = no cost per byte
    pull_bytes_s: float | None
    compress_s: float  # encoding the dense vector
    forward_s: tuple[
        float, ...
    ] = ()  # of each layer group, the last layers first; empty = not measured
    backward_s: tuple[float, ...] = ()
    push_line: AlphaBeta | None = (
        None  # what messages to the server cost by their bytes; None = not measured
    )
    pull_line: AlphaBeta | None = None
    host: str | None = None  # where it was measured, and on which device; None = not known
    device: str | None = None
    step_times_s: tuple[
        float, ...
    ] = ()  # quantiles of a step at `ashl.cluster.speed.LEVELS`; empty = not measured

    def __post_init__(self) -> None:
        for name in (
            *NOISES,
            *NOISES.values(),
            "step_spread_s",
            "latency_s",
            "compress_s",
            *LOADED,
        ):
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
        for name in ("push_bytes_s", "pull_bytes_s"):
            rate = getattr(self, name)
            if rate is not None and not (is_number(rate) and rate > 0):
                raise ValueError(
                    f"{name} is {rate!r}, where bytes per second above 0, or null, are expected"
                )
        for name in PASSES:
            if not all(map(is_seconds, getattr(self, name))):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, where seconds of each layer group are"
                    " expected"
                )
        if not all(is_seconds(time_s) and time_s > 0 for time_s in self.step_times_s):
            raise ValueError(
                f"step_times_s is {self.step_times_s!r}, where seconds above 0 are expected"
            )
        if len(self.step_times_s) not in (0, len(LEVELS)):
            raise ValueError(
                f"step_times_s has {len(self.step_times_s)} quantiles, where {len(LEVELS)} are"
                " expected"
            )
        for name in LINES:
            check_line(getattr(self, name), name)
        check_names(self.host, self.device)
        if not is_count(self.batch):
            raise ValueError(f"batch is {self.batch!r}, where a whole number from 1 up is expected")

    def push_of(self, payload: float) -> float:
        """Seconds of a push of `payload` · the dense model's bytes: the line through the latency
        and the dense push.
        """
        fixed = self.push_s if self.push_bytes_s is None else min(self.latency_s, self.push_s)
        return fixed + payload * (self.push_s - fixed)


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """What one codec costs for the dense vector, in seconds. Raises ValueError on a cost that
    cannot be.
    """

    codec: str  # its class
    encode_s: tuple[float, ...]  # by worker
    decode_s: float  # of one payload

    def __post_init__(self) -> None:
        check_names(self.codec)
        if not all(map(is_seconds, (*self.encode_s, self.decode_s))):
            raise ValueError(
                f"the costs of {self.codec} are {self.encode_s!r} and {self.decode_s!r}, not"
                " seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All workers of a cluster, in the order of their ranks."""

    schema: int
    model: str
    num_params: int
    dense_bytes: int
    device: str
    source: str  # "declared" | "measured"
    server_step_s: float | None  # applying one push; None = not known
    server_bytes_s: (
        float | None
    )  # bytes per second of the server's own port; None = never the bottleneck
    ports: bool  # whether a transfer occupies the ports of both ends
    workers: tuple[WorkerProfile, ...]
    group_bytes: tuple[
        int, ...
    ] = ()  # of each layer group, the last layers first; empty = not measured
    all_reduce: AlphaBeta | None = (
        None  # what a sum over all workers costs by its bytes; None = not measured
    )
    contention: ContentionCosts | None = None  # of collectives and computing; None = none measured
    server_host: str | None = None
    codecs: tuple[CodecCost, ...] = ()  # of each codec that was timed

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
        if not isinstance(self.ports, bool):
            raise ValueError(
                f"the profile's ports is {self.ports!r}, where true or false is expected"
            )
        if not self.workers:
            raise ValueError("the profile has no workers; it needs one entry for each")
        check_line(self.all_reduce, "the profile's all_reduce")
        check_names(self.server_host, self.model, self.device)
        groups = len(self.group_bytes)
        if any(len(getattr(worker, name)) != groups for worker in self.workers for name in PASSES):
            raise ValueError(
                f"the profile has {groups} layer groups, and workers with another number of costs"
                " of them"
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
                f"the profile has {len(self.workers)} workers, and other numbers of costs of"
                f" {other[0]}"
            )

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    def codec(self, name: str | None) -> CodecCost | None:
        """Return what the codec of this class costs, or None where it was not timed."""
        return next((own for own in self.codecs if own.codec == name), None)

    @property
    def better_host(self) -> str | None:
        """The host whose link is at least as good as the server's, as far as the measurements tell;
        None = none is.

        Workers beside the server used no link. Where nobody was slowed down when all pushed at
        once, the server's port carries as much as all others together; where it did not, nobody is
        seen to have more than it lets through.
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
        """The share of a step after which each layer group's gradient is there, as a mean over the
        workers.
        """
        return ready_shares(self.workers)

    @property
    def needed(self) -> tuple[float, ...]:
        """The share of a step after which forward comes to each layer group, in the same way."""
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
        """The same without costs by layer group and message, as a run measures it for itself."""
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
        """Raises UsageError unless this is a profile of that cluster, model and batch size."""
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
        return f"the profile is of {what}; {fix}profile again with `ashl profile`, or drop profile="

    def crowd(self, num_workers: int) -> str:
        """Why this is no profile of so many workers."""
        fix = (
            f"say cluster.num_workers={self.num_workers}, or in virtual time cluster=profile; else "
        )
        return self.clash(f"{self.num_workers} workers and the cluster has {num_workers}", fix)

    def cluster(self, codec: str | None = None) -> Spec:
        """Return the spec of a cluster that costs what this profile says, for virtual time;
        encoding costs what the codec of this class does, where that was timed.
        """
        workers, pushes, known = (
            self.workers,
            [worker.push_s for worker in self.workers],
            self.codec(codec),
        )
        free = self.ports or not all(
            pushes
        )  # of ports that nothing occupies, each way takes as long
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
            "compress_s": max(
                worker.compress_s for worker in workers
            ),  # of the server, on whose machine none was
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
        """Return the latency of a message of any size; with the rate it gives the dense model what
        was measured.
        """
        if line is None or self.source == "declared":
            return worker.latency_s
        return min(line.latency_s, dense_s)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises ValueError, in one sentence, on anything that is not a profile of this schema with
        sensible costs.
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
    """The share of a step after which each layer group's gradient is there, as a mean over the
    workers.
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
    """Bytes per second; None = no cost per byte."""
    return dense_bytes / seconds if seconds > 0 else None

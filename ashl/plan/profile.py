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
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ashl.cluster.spec import Cluster, ContentionCosts, Measured
from ashl.cluster.speed import LEVELS
from ashl.errors import UsageError
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.checks import FILE, Count, Name, Rate, Seconds, read_json
from ashl.plan.plan import Spec

SCHEMA = 5
TICK_S = 1e-9  # resolution of the experiment's clock, seconds
# cost → its noise
NOISES = {"step_s": "step_noise_s", "push_s": "push_noise_s", "pull_s": "pull_noise_s"}
PASSES = ("forward_s", "backward_s")
LINES = ("push_line", "pull_line")
TIMES = "step_times_s"
MAX_JITTER = 10.0  # upper bound of `cluster.jitter`


@dataclass(frozen=True, kw_only=True)
class WorkerProfile:
    """Costs of one worker, in seconds."""

    __pydantic_config__: ClassVar = FILE
    step_s: Annotated[float, Field(ge=TICK_S, le=1e9)]  # one local step
    step_spread_s: Seconds  # standard deviation of a step
    step_noise_s: Seconds  # half of the 95 % interval of the median step; 0 = declared
    batch: Count  # samples of that step
    push_s: Seconds  # push of the dense model with its latency, without other traffic
    push_noise_s: Seconds
    push_loaded_s: Seconds | None  # the push while all workers push; None = not measured
    pull_s: Seconds  # pull of the dense model with its latency, without other traffic
    pull_noise_s: Seconds
    pull_loaded_s: Seconds | None
    latency_s: Seconds  # message without payload
    push_bytes_s: Rate | None  # bytes per second beyond the latency; None = no cost per byte
    pull_bytes_s: Rate | None
    compress_s: Seconds  # encoding of the dense vector
    # by layer group, the last layers first; empty = not measured
    forward_s: tuple[Seconds, ...] = ()
    backward_s: tuple[Seconds, ...] = ()
    push_line: AlphaBeta | None = None  # messages to the server by bytes; None = not measured
    pull_line: AlphaBeta | None = None
    host: Name | None = None  # host of the measurement; None = not known
    device: Name | None = None  # device of the measurement; None = not known
    # quantiles of a step at `ashl.cluster.speed.LEVELS`; empty = not measured
    step_times_s: tuple[Annotated[float, Field(gt=0, le=1e9)], ...] = ()

    def __post_init__(self) -> None:
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
    """Costs of one codec for the dense vector, in seconds."""

    __pydantic_config__: ClassVar = FILE
    codec: Name  # dotted name of the codec's class
    encode_s: tuple[Seconds, ...]  # by worker
    decode_s: Seconds  # one payload: the median over the workers


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of all workers of a cluster, in rank order, of its server and of its collectives."""

    __pydantic_config__: ClassVar = FILE
    schema: int
    model: Name
    num_params: Count
    dense_bytes: Count
    device: Name
    source: Literal["declared", "measured"]
    server_step_s: Seconds | None  # seconds to apply one push; None = not known
    server_bytes_s: Rate | None  # bytes/s of the server's NIC; None = never the bottleneck
    ports: bool  # True if a transfer occupies the NICs of both ends
    workers: Annotated[tuple[WorkerProfile, ...], Field(min_length=1)]
    # bytes of each layer group, the last layers first; empty = not measured
    group_bytes: tuple[Count, ...] = ()
    all_reduce: AlphaBeta | None = None  # over all workers, by bytes; None = not measured
    contention: ContentionCosts | None = None  # of collectives and computing; None = not measured
    server_host: Name | None = None
    codecs: tuple[CodecCost, ...] = ()  # one for each codec that was timed

    def __post_init__(self) -> None:
        groups = len(self.group_bytes)
        if any(len(getattr(worker, name)) != groups for worker in self.workers for name in PASSES):
            raise ValueError(
                f"the profile has {groups} layer groups, and a worker with costs of another number"
                " of them; profile again"
            )
        if sum(self.group_bytes) not in (0, self.dense_bytes):
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
    def shares(self) -> tuple[float, ...]:
        """Return the share of a step after which each layer group's gradient is ready, averaged
        over the workers.
        """
        return ready_shares(self.workers)

    @property
    def needed_shares(self) -> tuple[float, ...]:
        """Return the share of a step after which the forward pass reaches each layer group,
        averaged over the workers.
        """
        by_worker = []
        for worker in self.workers:
            step_s = math.fsum((*worker.forward_s, *worker.backward_s)) or 1.0
            groups = range(len(self.group_bytes))
            by_worker.append([math.fsum(worker.forward_s[k + 1 :]) / step_s for k in groups])
        return tuple(math.fsum(group) / len(by_worker) for group in zip(*by_worker, strict=True))

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
        batches = {worker.batch for worker in self.workers}
        if self.num_workers != num_workers:
            raise UsageError(self.explain_worker_count(num_workers))
        sizes = ", ".join(map(str, sorted(batches)))
        clashes = (
            (self.model != model, f"the model {self.model} and this one is {model}"),
            (
                self.num_params != num_params,
                f"{self.num_params} parameters and the model has {num_params}",
            ),
            (batches != {batch}, f"batches of {sizes} and dataset.batch_size is {batch}"),
        )
        for clash, what in clashes:
            if clash:
                raise UsageError(self.explain_mismatch(what))

    @staticmethod
    def explain_mismatch(what: str, fix: str = "") -> str:
        """Return the message about a profile that does not fit the configuration."""
        return (
            f"the profile is of {what}; {fix}profile again with `ashl profile`, or remove profile="
        )

    def explain_worker_count(self, num_workers: int) -> str:
        """Return the message about a profile of another number of workers."""
        fix = (
            f"set cluster.num_workers={self.num_workers}, or in virtual time take cluster=profile,"
            " or "
        )
        return self.explain_mismatch(
            f"{self.num_workers} workers and the cluster has {num_workers}", fix
        )

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
        profile = read_json(Profile, text, SCHEMA)
        for rank, worker in enumerate(profile.workers) if profile.source == "measured" else ():
            if not (worker.push_s and worker.pull_s):
                raise ValueError(
                    f"worker {rank} of the profile: a push or a pull takes 0 s, which no"
                    " measurement gives; profile again, or declare the costs"
                )
        return profile


def ready_shares(workers: Sequence[WorkerProfile]) -> tuple[float, ...]:
    """Return the share of a step after which each layer group's gradient is ready, averaged over
    the workers.
    """
    ready = []
    for worker in workers:
        ends_s = [*accumulate(worker.backward_s, initial=math.fsum(worker.forward_s))]
        step_s = ends_s[-1]
        ready.append([end_s / step_s if step_s else 1.0 for end_s in ends_s[1:]])
    return tuple(math.fsum(group) / len(ready) for group in zip(*ready, strict=True))


def rate_of(seconds: float, dense_bytes: int) -> float | None:
    """Return bytes per second; None = no cost per byte."""
    return dense_bytes / seconds if seconds > 0 else None

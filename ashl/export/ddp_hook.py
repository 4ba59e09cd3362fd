"""Compress the gradients of torch's `DistributedDataParallel` with a codec of the catalogue.

Rule: DDP emits the gradient in buckets, while backward continues. The update of a bucket is
(1/n)·Σ_i C(g_i), identical on all n workers, bit for bit. Each bucket has a codec state of its own:
with error feedback, g_i includes what worker i has not sent yet.

Data flow: linear codecs use an all-reduce of payloads. Codecs with a protocol of their own run it.
Payloads of other codecs are gathered, and every worker decodes them. On the CPU a thread carries
out the buckets in the order in which DDP emits them, which is the same on all workers. So encoding
and transfer overlap with backward.

Limits: codecs that need another gradient than that of a minibatch are refused. After the first
backward pass DDP rebuilds its buckets, and each new bucket begins without a residual. If a worker's
gradient is not finite, the codec passes that on, and the worker keeps its earlier residual.

Source: the hooks of torch.distributed.algorithms.ddp_comm_hooks, and `ashl.topology.exchange`.
"""

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ashl.compression.contract import Codec, Collective, EncodeContext, Layer, Layout
from ashl.compression.wrappers import wrap_codec
from ashl.config.compose import compose
from ashl.config.construct import construct
from ashl.config.session import keyword_overrides
from ashl.device import HOST
from ashl.errors import UsageError
from ashl.size_only import Vector
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.topology.local_work import all_finite

T = TypeVar("T")


@dataclass
class BucketState:
    """The codec of one bucket, with its state at this worker."""

    layout: Layout
    pipeline: CompressionPipeline
    ends: CodecState = field(default_factory=lambda: CodecState(gradients=True))
    steps: int = 0  # gradients encoded so far


@dataclass
class HookState:
    """State of the communication hook at this worker.

    `epoch` (passes over the data) and `lr` (learning rate) concern codecs that follow them: a user
    may set them before a step.
    """

    codec: Codec  # as chosen, without the layers of a bucket
    group: dist.ProcessGroup
    seed: int = 0
    epoch: float = 0.0
    lr: float = 1.0
    dense_nbytes: int = 0  # bytes of all gradients so far, as float32
    sent_nbytes: int = 0  # bytes of this worker's payloads so far
    buckets: dict[int, BucketState] = field(default_factory=dict)  # by number
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "compress"), repr=False
    )

    @property
    def density(self) -> float:
        """Sent bytes divided by dense bytes, 1 before the first gradient."""
        return self.sent_nbytes / self.dense_nbytes if self.dense_nbytes else 1.0


Hook = Callable[[HookState, dist.GradBucket], Future[Tensor]]


class Team:
    """The workers of a process group, as a codec's protocol uses them; every call blocks."""

    not_finite = False

    def __init__(self, state: HookState) -> None:
        self.state = state
        self.group = state.group
        self.size = dist.get_world_size(state.group)
        self.place = dist.get_rank(state.group)
        self.weight = 1 / self.size

    async def all_reduce(self, x: Tensor, weight: float = 1.0) -> Tensor:
        """Return Σ weight · x, identical on all workers."""
        self.state.sent_nbytes += x.nbytes
        total = x * weight if weight != 1 else x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    async def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the bytes of every worker; shorter ones are padded on the way."""
        self.state.sent_nbytes += x.nbytes
        own_size = torch.tensor([x.numel()], device=x.device)
        sizes = [torch.empty_like(own_size) for _ in range(self.size)]
        dist.all_gather(sizes, own_size, group=self.group)
        lengths = [int(size) for size in sizes]
        padded = x.new_zeros(max(lengths))
        padded[: x.numel()] = x
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.group)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    async def send(self, place: int, name: str, payload: Tensor, *numbers: float) -> None:
        """Send a payload to one worker."""
        self.state.sent_nbytes += payload.nbytes
        dist.send(torch.tensor([payload.numel()]), group=self.group, group_dst=place)
        dist.send(payload, group=self.group, group_dst=place)

    async def recv(
        self, place: int, name: str, final: bool = False
    ) -> tuple[Tensor, tuple[float, ...]]:
        """Receive (payload, no numbers) from one worker, in the order in which it sends."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, group=self.group, group_src=place)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, group=self.group, group_src=place)
        return payload, ()

    async def compute(self, fn: Callable[[], T], work: float = 0.0) -> T:
        """Run fn() and return its result."""
        return fn()


def ddp_hook(
    compression: str | Codec = "topk",
    *,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[HookState, Hook]:
    """Return state and hook for `DistributedDataParallel.register_comm_hook`.

    Args: compression: name of an option that `ashl list compression` shows, or a codec object.
    options: its keys, for example `ratio=0.01` or `error_feedback=False`.
    seed: of codecs that draw random numbers; equal on all workers.
    Raises: UsageError for an unknown codec or key, and for a codec that needs another gradient.
    """
    if not dist.is_initialized():
        raise UsageError(
            "ddp_hook: no process group; call torch.distributed.init_process_group first"
        )
    codec = compression if isinstance(compression, Codec) else make_codec(compression, options)
    if codec.estimator != "minibatch":
        raise UsageError(
            f"compression={compression}: needs the gradient estimator {codec.estimator!r}, and DDP"
            " has the gradient of a minibatch only; choose another codec"
        )
    group = process_group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    return HookState(codec, group, seed), compress_bucket


def make_codec(name: str, options: dict[str, Any]) -> Codec:
    """Return the codec of an option with these keys.   Raises: UsageError."""
    keys = keyword_overrides({f"compression.{key}": value for key, value in options.items()})
    return construct(compose([f"compression={name}", *keys])["compression"], "compression")


def compress_bucket(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the future of a bucket's mean gradient: the hook that DDP calls during backward."""
    own, gradient = bucket_state(state, bucket), bucket.buffer()
    future: Future[Tensor] = Future()

    def exchange() -> None:
        try:
            future.set_result(mean_gradient(state, own, gradient))
        except Exception as error:
            future.set_exception(error)  # ty: ignore[invalid-argument-type]

    if gradient.device.type == HOST:
        state.thread.submit(exchange)
    else:
        exchange()  # the device's stream keeps the order
    return future


def bucket_state(state: HookState, bucket: dist.GradBucket) -> BucketState:
    """Return the state of a bucket; a new one if DDP has rebuilt the buckets."""
    number = bucket.index()
    layout = tuple(
        Layer(f"bucket{number}.{place}", tuple(parameter.shape))
        for place, parameter in enumerate(bucket.parameters())
    )
    known = state.buckets.get(number)
    if known is None or known.layout != layout:
        buffer = bucket.buffer()
        pipeline = CompressionPipeline(
            wrap_codec(state.codec, layout), buffer.numel(), number, str(buffer.device)
        )
        known = state.buckets[number] = BucketState(layout, pipeline)
    return known


def mean_gradient(state: HookState, own: BucketState, gradient: Tensor) -> Tensor:
    """Return the mean of C(g) over all workers, with the dtype of the gradient."""
    pipeline, x = own.pipeline, gradient.float()
    team = Team(state)
    context = EncodeContext(
        ratio=pipeline.codec.ratio,
        seed=state.seed,
        worker=team.place,
        round=own.steps,
        layer=pipeline.layer,
        workers=team.size,
        epoch=state.epoch,
        lr=-state.lr,
        version=own.steps,
    )
    own.steps += 1
    state.dense_nbytes += x.nbytes
    before = own.ends.sender
    update = exchange_codec(team, pipeline, own.ends, x, context)
    if not all_finite(x):
        own.ends.sender = before
    return gradient.copy_(update)


def exchange_codec(
    team: Team, pipeline: CompressionPipeline, ends: CodecState, x: Tensor, context: EncodeContext
) -> Tensor:
    """Return (1/n)·Σ C(x), by all-reduce, by the codec's own protocol or by gathering payloads."""
    if pipeline.traits.lossless:
        return complete(team.all_reduce(x, team.weight))
    if isinstance(pipeline.inner_codec, Collective):
        return as_tensor(complete(pipeline.run_protocol(ends, team, x, context)))
    if pipeline.traits.linear:
        # the weight is applied before encoding, so that payloads may be added
        x, context = x * team.weight, context._replace(weight=team.weight)
    payload = as_tensor(pipeline.encode(ends, x, context))
    if pipeline.traits.linear:
        total = complete(team.all_reduce(as_tensor(pipeline.summand(payload, context))))
        return as_tensor(pipeline.decode_sum(ends, payload, total))
    payloads = complete(team.all_gather(payload))
    return as_tensor(pipeline.merge(ends, payloads, team.size * [team.weight], range(team.size)))


def as_tensor(x: Vector) -> Tensor:
    """Return x, which has content: a run that is only timed has no hook."""
    assert isinstance(x, Tensor)
    return x


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a protocol to its end; each of its messages blocks until it is done."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a message of the protocol did not block")

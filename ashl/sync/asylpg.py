"""AsyLPG: asynchronous SGD with variance reduction and few bits in both directions; it converges
linearly where SGD stalls.

Use when: messages must be few bits both ways, and variance-reduced gradients are affordable.
Avoid when: the data set is large: snapshots need a full gradient.
Alternatives: `asp` with `compression=qsgd`; `spy` for sparse models.

Rule: an epoch begins with a snapshot x̃ of the model, which the server sends to all workers. Each
worker pushes the gradient of its whole shard at x̃, and the mean over all samples is ∇f(x̃). Then
the epoch's steps begin. Worker a holds a model Q(x) of an earlier version and pushes C(ζ), ζ =
∇f_a(Q(x)) − ∇f_a(x̃) of its next minibatch. C is any unbiased codec; the paper's is
`compression=grid`. At each arrival the server steps along v = C(ζ) + ∇f(x̃), x ← prox_{γ·l1·‖·‖₁}(x
− γ·v), and answers with Q(x).
Q rounds every element at random to a multiple of Δ = ‖x‖_∞/(2^(b−1) − 1), with the fewest bits b
for which d·Δ²/4 ≤ μ·‖x − x̃‖². Payloads: 32·d bits in each direction once per epoch; with every
step b·d + 32 bits down and those of C up.
Waiting: all workers wait for the full gradients at the start of an epoch, and for each other after
its `epoch_steps` steps. Between these points no worker waits.

Failures: no worker waits for a failed one. The gradient that a failed worker pushed remains in
∇f(x̃) until the next snapshot. A rejoining worker receives x̃ and pushes its full gradient there,
which joins the mean; the steps of the others continue meanwhile. If the mean already contains a
gradient of this worker, the new one is dropped and counted.

Limits: with compression=none and mu=null it is asynchronous SVRG. Full passes cost time, so long
epochs have fewer of them. The nearer x is to x̃, the more bits Q needs; if 16 bits are not enough,
x is sent in 32. The step is the optimizer's: plain SGD in the paper. Linear convergence needs a
constant γ, and a smaller one the longer the delays.
Source: Yu, Wu and Huang, "Double Quantization for Communication-Efficient Distributed
Optimization", NeurIPS 2019, Algorithm 1; Reddi et al., "On Variance Reduction in Stochastic
Gradient Descent and its Asynchronous Variants", NIPS 2015 (without compression).

Family: asynchronous server.
Status: reproduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from ashl.compression.contract import EncodeContext, as_float32
from ashl.compression.grid import FLOAT32, MAX_BITS, Grid
from ashl.compression.kernels import packed_bytes
from ashl.compression.payload import HEADER, Parts, write_payload
from ashl.device import read_scalars, to_host
from ashl.option import Count, NonNegative, Positive, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly, Vector
from ashl.stage.contract import CODEC, FAULT_TOLERANT, StageConfig
from ashl.stage.progress import LATE, Progress
from ashl.sync.prox import shrink
from ashl.topology.local_work import (
    Anchor,
    Work,
    WorkerState,
    average_over_shard,
    encode_update,
    reduce_variance,
)
from ashl.topology.parameter_server import ServerRule, ServerState


@dataclass
class Epoch:
    """The server's state of an epoch.

    While `gathers`, no worker steps, and `gradient` is a sum over samples; later it is the mean
    ∇f(x̃).
    """

    anchor: Any  # x̃
    full_gradient_due: set[int]  # workers whose next push is a full gradient at x̃
    remaining_steps: int  # steps until the end of the epoch
    gradient: Any = None
    samples: int = 0  # samples behind `gradient`
    sent: set[int] = field(default_factory=set)  # workers whose full gradient is in `gradient`
    gathers: bool = True
    done: int = 0  # steps so far

    def admits(self, progress: Progress) -> bool:
        """Return True if waiting workers may proceed: all together before and after the full
        gradients, one by one between.
        """
        return len(progress.waiting) == progress.num_present or (
            not self.gathers and self.remaining_steps > 0
        )

    def add_gradient(self, worker: int, gradient: Any, samples: int) -> bool:
        """Add a full gradient; return False if one of this worker is already in the mean."""
        self.full_gradient_due.discard(worker)
        if worker in self.sent:
            return False
        self.sent.add(worker)
        total = (
            self.gradient if self.gathers or self.gradient is None else self.gradient * self.samples
        )
        part = gradient * samples
        self.gradient = part if total is None else total + part
        self.samples += samples
        if not self.gathers:
            self.gradient = self.gradient * (1 / self.samples)
        return True

    def finish_gathering(self) -> None:
        """Turn the sum of full gradients into their mean once no worker owes one."""
        if self.gathers and self.samples and not self.full_gradient_due:
            self.gathers, self.gradient = False, self.gradient * (1 / self.samples)


@option
class AsyLPG(ServerRule):
    """Steps along variance-reduced gradients at each arrival.

    A push holds a full gradient or an encoded difference, a pull a snapshot or a rounded model.
    """

    own_messages: ClassVar[bool] = True
    pushes_full_gradients: ClassVar[bool] = True
    exchange: ClassVar[str] = "gradient"
    estimator: ClassVar[str] = "minibatch"  # ζ is a difference of two minibatch gradients
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, FAULT_TOLERANT})
    epoch_steps: Count | None
    mu: Positive | None
    l1: NonNegative

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | {"unbiased": ""}

    def may_proceed(self, state: Epoch | None, progress: Progress) -> Iterable[int]:
        return progress.waiting if state is not None and state.admits(progress) else ()

    async def make_push(
        self, ctx: RankContext, stage: StageConfig, state: WorkerState
    ) -> tuple[Work, Any, float]:
        """Compute the full gradient at a new snapshot, else the encoded difference of a
        minibatch.
        """
        start = ctx.now
        if state.anchor is None:
            loss, gradient, samples = await average_over_shard(ctx, stage, state)
            state.anchor = Anchor(state.params, gradient, state.drawn)
            return Work(gradient, loss, 1, samples, ctx.now - start, state.version), gradient, loss
        loss, change = await reduce_variance(ctx, stage, state)
        work = Work(change, loss, 1, state.batch, ctx.now - start, state.version)
        return work, *await encode_update(ctx, stage, state, work)

    async def apply_push(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
    ) -> bool:
        """Add a full gradient to the mean, or take a step along an encoded difference."""
        return await ctx.compute(
            partial(self._fold_push, stage, state, message), work=1, kind="apply"
        )

    def _fold_push(self, stage: StageConfig, state: ServerState, message: Message) -> bool:
        """Apply a push to the server's state. Returns: True if the model changed."""
        progress, worker, (steps, samples) = state.progress, message.src, message.meta[:2]
        if state.rule_state is None:
            state.rule_state = self._open_epoch(stage, state)
        epoch = state.rule_state
        if stepped := worker not in epoch.full_gradient_due:
            progress.commit(worker, int(steps), int(samples))
            zeta = stage.pipeline.decode(state.codec_state, worker, message.payload)
            lr = stage.trainer.rate(progress.samples)
            exact = stage.pipeline.traits.lossless
            state.moments, x = stage.trainer.apply(
                state.params, state.moments, zeta + epoch.gradient, lr, exact
            )
            state.params = shrink(x, lr * self.l1)
            progress.merge()
            epoch.done, epoch.remaining_steps = epoch.done + 1, max(0, epoch.remaining_steps - 1)
        elif epoch.add_gradient(worker, message.payload, int(samples)):
            progress.commit(worker, int(steps), int(samples))
        else:
            progress.count_dropped(worker, int(steps), LATE)
            progress.waiting[worker] = progress.waiting[worker][0], True
        self._renew(stage, state)
        return stepped

    def _renew(self, stage: StageConfig, state: ServerState) -> None:
        """Complete the mean of full gradients, and begin a new epoch once all steps are done and
        all workers wait.
        """
        epoch, progress = state.rule_state, state.progress
        epoch.finish_gathering()
        if not epoch.remaining_steps and 0 < len(progress.waiting) == progress.num_present:
            state.rule_state = self._open_epoch(stage, state)

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        if state.rule_state is None:
            state.rule_state = self._open_epoch(stage, state)
        state.rule_state.full_gradient_due.discard(rank)
        self._renew(stage, state)

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        if state.rule_state is None:
            state.rule_state = self._open_epoch(stage, state)
        state.rule_state.full_gradient_due.add(rank)
        self._renew(stage, state)

    def admission_payload(self, stage: StageConfig, state: ServerState) -> Any:
        return state.params if state.rule_state is None else state.rule_state.anchor

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        """Return the snapshot, None if the model still is the snapshot, or the model in few
        bits.
        """
        return await ctx.compute(
            partial(self._payload, stage, state, rank), work=1, kind="compress"
        )

    def _payload(self, stage: StageConfig, state: ServerState, rank: int) -> Any:
        epoch = state.rule_state
        if epoch.gathers:
            return epoch.anchor
        if not epoch.done:
            return None
        context = EncodeContext(
            seed=stage.seed, worker=stage.server + 1 + rank, round=state.progress.version
        )
        return write_model(state.params, epoch.anchor, context, self.mu)

    def apply_pull(self, stage: StageConfig, state: WorkerState, payload: Any) -> Any:
        """Return the model after a pull; a dense payload is a snapshot."""
        if payload.nbytes == stage.trainer.dense_bytes and not is_encoded(payload):
            state.anchor = None
            return payload
        if isinstance(payload, SizeOnly):
            return state.params
        return stage.pipeline.move_from_codec(read_model(payload, stage.trainer.num_params))

    def _open_epoch(self, stage: StageConfig, state: ServerState) -> Epoch:
        """Begin an epoch; without `epoch_steps` it takes as many minibatches as the data set
        has.
        """
        batches = [worker.batch for worker in stage.plan.workers]
        one_pass = stage.epoch_samples * len(batches) // sum(batches)
        steps = self.epoch_steps or max(1, one_pass)
        return Epoch(state.params, set(stage.workers) - state.progress.failed, steps)


def write_model(x: Any, anchor: Any, context: EncodeContext, mu: float | None) -> Any:
    """Encode Q(x)."""
    if isinstance(x, SizeOnly):
        if mu is None:
            return SizeOnly(HEADER.size + x.nbytes)
        return SizeOnly(HEADER.size + 4 + packed_bytes(x.nbytes // 4, MAX_BITS // 2))
    model, bits = as_float32(to_host(x)), bits_of(x, anchor, mu)
    if bits is None:
        return write_payload(Grid.code, len(model), Parts(len(model), model, form=FLOAT32))
    return Grid(bits=bits).encode(None, model, context)[1]


def bits_of(x: Any, anchor: Any, mu: float | None) -> int | None:
    """Return the fewest bits for which E‖Q(x) − x‖² ≤ μ·‖x − x̃‖²; None if more than 16 are
    needed.
    """
    apart, top = read_scalars([torch.linalg.vector_norm(x.double() - anchor), x.abs().max()])
    if mu is None or not apart or not math.isfinite(top):
        return None
    steps = top * math.sqrt(x.numel() / mu) / (2 * apart)
    bits = 1 + max(1, math.ceil(math.log2(steps + 1)))
    return bits if bits <= MAX_BITS else None


def is_encoded(payload: Vector) -> bool:
    return not isinstance(payload, SizeOnly) and payload.dtype == torch.uint8


def read_model(payload: Any, d: int) -> Any:
    """Decode Q(x), as a vector of length d. Raises: PayloadError."""
    return Grid(bits=MAX_BITS).decode(None, payload, d)[1]

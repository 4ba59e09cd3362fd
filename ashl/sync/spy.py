"""SPY: training of sparse models, in which workers send the non-zero elements and a few random
ones.

Use when: a sparse model is the aim, and its messages should be as sparse.
Avoid when: accuracy of a dense model is the aim; the server stores a model per worker.
Alternatives: `asp` with `compression=topk`; `asylpg`.

Rule: worker i keeps its last point x_i, at first the initial model. The server keeps all of them,
and their weighted mean x̄ = Σ w_i·x_i. On the model x that it pulled, the worker computes p = x −
γ·∇f_i(x). It selects the coordinates S: all with x ≠ 0, and each other one with probability
`share`. It sends Δ = (p − x_i)_S with their indices, and sets x_i ← x_i + Δ. At each arrival, in
any order, x̄ ← x̄ + w_i·Δ. The reply is x = prox_{γ·l1·‖·‖₁}(x̄), each element of x̄ moved by γ·l1
towards zero; only its non-zero elements are sent.
Failures: x_i of a failed worker leaves x̄, with Σ w_i = 1 over the others. x_i of a rejoining
worker is the model that it receives.
Payloads: (32 + ⌈log2 d⌉) bits per element of S up and per non-zero element down; 32·d bits if that
is less.
Waiting: no worker waits for another one.

Limits: at a fixed point x minimises Σ w_i·f_i(x) + l1·‖x‖₁, for all shares, delays and
distributions of the shards. Messages are as short as the model is sparse, once its non-zero
elements have settled. Only the l1 term makes models sparse: with l1 = 0 all of x is sent. γ must be
constant, because earlier points depend on it. The noise of minibatches prevents elements from
staying zero.
Source: Grishchenko, Iutzeler, Malick and Amini, "Asynchronous Distributed Learning with Sparse
Communications and Identification", arXiv 1812.03871, 2018.

Family: asynchronous server.
Status: reproduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Elements, EncodeContext, as_float32
from ashl.compression.kernels import where_true
from ashl.compression.payload import Parts, read_payload, write_payload
from ashl.compression.sparse import SPARSE, WHOLE, Coded, SparseFormat
from ashl.device import to_device, to_host
from ashl.option import NonNegative, Ratio, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.contract import FAULT_TOLERANT, StageConfig
from ashl.sync.prox import shrink
from ashl.topology.local_work import Work, WorkerState, estimate_gradient
from ashl.topology.parameter_server import ServerRule, ServerState

CODE = 103  # code of its payloads on the wire
FORMAT = SparseFormat("fp32", Coded("packed"))  # format of its payloads


@dataclass(frozen=True)
class Points:
    """The points of all workers, at the server. Limit: x̄ = Σ w_i·x_i if Σ w_i = 1."""

    start: Any  # the model before the first push, from which each worker's point begins
    mean: Any  # x̄
    by_worker: dict[int, Any]  # x_i, if it differs from `start`

    def move(self, worker: int, change: Any, weight: float) -> Points:
        """Return the points after a worker's point has changed."""
        point = self.by_worker.get(worker, self.start) + change
        mean = self.mean + change * weight
        return Points(self.start, mean, self.by_worker | {worker: point})

    def weigh(self, weights: Sequence[float]) -> Points:
        """Return the points with another weight of each worker, 0 for one that is no member."""
        points = {rank: point for rank, point in self.by_worker.items() if weights[rank]}
        mean = self.start
        for rank in sorted(points):
            mean = mean + (points[rank] - self.start) * weights[rank]
        return Points(self.start, mean, points)


@option
class SPY(ServerRule):
    """Proximal steps on sparse messages.

    A push holds the change of a worker's point, a pull the non-zero elements of the model. The rule
    state is `Points` at the server, and x_i at a worker.
    """

    own_messages: ClassVar[bool] = True
    exchange: ClassVar[str] = "gradient"
    # messages are sparse without a codec
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    l1: NonNegative
    share: Ratio
    estimator: Literal["full", "minibatch"]

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | {"plain_steps": ""}

    async def make_push(
        self, ctx: RankContext, stage: StageConfig, state: WorkerState
    ) -> tuple[Work, Any, float]:
        """Compute a gradient and the encoded change of the worker's point."""
        start = ctx.now
        loss, gradient, samples = await estimate_gradient(ctx, stage, state)
        work = Work(gradient, loss, 1, samples, ctx.now - start, state.version)
        point = state.params if state.rule_state is None else state.rule_state
        context = EncodeContext(
            seed=stage.seed,
            worker=ctx.rank,
            round=state.round,
            lr=stage.trainer.rate(state.samples),
        )
        move = partial(model_and_push, state.params, gradient, point, context, self.share)
        state.rule_state, payload = await ctx.compute(move, work=1, kind="compress")
        return work, payload, loss

    async def apply_push(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
    ) -> bool:
        """Update x̄ and x by a push."""
        return await ctx.compute(
            partial(self._fold_push, stage, state, message), work=1, kind="apply"
        )

    def _fold_push(self, stage: StageConfig, state: ServerState, message: Message) -> bool:
        """Update x̄ and x in the server's state. Returns: True."""
        progress, worker, (steps, samples) = state.progress, message.src, message.meta[:2]
        progress.commit(worker, int(steps), int(samples))
        progress.merge()
        if isinstance(message.payload, SizeOnly):
            return True
        change = read_sparse(message.payload, stage.trainer.num_params)
        points = state.rule_state or Points(state.params, state.params, {})
        state.rule_state = points.move(
            worker, stage.pipeline.move_from_codec(change), state.work.weights[worker]
        )
        threshold = stage.trainer.rate(progress.samples) * self.l1
        state.params = shrink(state.rule_state.mean, threshold)
        return True

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        if state.rule_state is not None and state.progress.num_present:
            state.rule_state = state.rule_state.weigh(state.work.weights)

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        """Let the worker's point be the model that it receives."""
        if state.rule_state is not None:
            points = state.rule_state.by_worker | {rank: state.params}
            joined = replace(state.rule_state, by_worker=points)
            state.rule_state = joined.weigh(state.work.weights)

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        """Return the model, encoded by its non-zero elements."""
        return await ctx.compute(partial(whole_model, state.params), work=1, kind="compress")

    def apply_pull(self, stage: StageConfig, state: WorkerState, payload: Any) -> Any:
        if isinstance(payload, SizeOnly):
            return state.params
        return (
            stage.pipeline.move_from_codec(read_sparse(payload, stage.trainer.num_params))
            if payload.dtype == torch.uint8
            else payload
        )


def model_and_push(
    x: Any, gradient: Any, point: Any, context: EncodeContext, share: float
) -> tuple[Any, Any]:
    """Return (the new x_i, the encoded Δ)."""
    if isinstance(x, SizeOnly):
        return point, SizeOnly(FORMAT.nbytes(max(1, round(share * (x.nbytes // 4))), x.nbytes // 4))
    drawn = context.stream().integers(0, 2**32, x.numel(), np.uint32) < share * 2**32
    change = x - gradient * context.lr - point
    change[(x == 0) & ~to_device(torch.from_numpy(drawn), str(x.device))] = 0
    return point + change, write_sparse(change)


def whole_model(x: Any) -> Any:
    """Encode a model by its non-zero elements."""
    return (
        SizeOnly(FORMAT.nbytes(x.nbytes // 4, x.nbytes // 4))
        if isinstance(x, SizeOnly)
        else write_sparse(x)
    )


def write_sparse(x: Tensor) -> Tensor:
    """Encode a vector by its non-zero elements, or whole if that is not longer; NaN counts as
    non-zero.
    """
    x = as_float32(to_host(x))
    d, nonzero = len(x), where_true(x != 0)
    if FORMAT.form(len(nonzero), d) != SPARSE:
        return write_payload(CODE, d, Parts(d, x, form=WHOLE))
    elements = Elements(nonzero, x[nonzero])
    return write_payload(CODE, d, FORMAT.pack_elements(elements, d, ENCODE_CONTEXT))


def read_sparse(payload: Tensor, d: int) -> Tensor:
    """Decode a vector of length d. Raises: PayloadError."""
    parts = read_payload(payload, CODE, d)
    return FORMAT.unpack(parts, d, may_be_empty=True).to_dense(d)

"""Weighted sum of the workers' vectors under all-reduce, with and without compression.

Rule: every worker ends with Σ_j c_j·C(x_j), identical on all, bit for bit. Lossless and linear
codecs use an all-reduce: 2(n − 1)/n of a payload each way. Payloads of other codecs are gathered: n
− 1 of them each way, padded to the longest. Every worker decodes all of them and sums in rank
order. That traffic grows with n, and beats a dense all-reduce while a payload is shorter than 2/n
of the vector. A `Collective` codec has a protocol of its own.

`ashl.stage.process_group` piggybacks loss and signal on these messages.

Source: gathering as in Alistarh et al., "QSGD", NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ashl.compression.contract import Collective, EncodeContext
from ashl.compression.wrappers import join_states, slice_state
from ashl.runtime.effects import Encoding
from ashl.runtime.sums import concatenate
from ashl.size_only import SizeOnly, Vector
from ashl.stage.compression_pipeline import CodecState, Payload
from ashl.stage.contract import StageConfig
from ashl.stage.process_group import ProcessGroup
from ashl.stage.progress import Progress
from ashl.topology.local_work import (
    WorkerState,
    all_finite,
    context_of,
    report_health,
    report_not_finite,
)


async def exchange_update(
    team: ProcessGroup,
    stage: StageConfig,
    state: WorkerState,
    progress: Progress,
    tick: int,
    x: Vector,
) -> Vector:
    """Return Σ_j c_j·C(x_j), or Σ_j c_j·x_j if the codec is lossless or the sync mode asks for it.

    Args: tick: number of the merge; x: this worker's update.
    Afterwards `team.loss` and `team.signal` are sums. An update that is not finite is replaced by
    zeros and makes the mean loss NaN.
    """
    ctx = team.ctx
    if stage.pipeline.traits.lossless or stage.sync.sums_whole(stage, progress):
        return await team.all_reduce(x, team.weight)
    if not isinstance(x, SizeOnly) and report_not_finite(ctx, stage, state, x):
        x, team.loss = torch.zeros_like(x), math.nan
    return await exchange_compressed(team, stage, state, tick, x)


async def exchange_compressed(
    team: ProcessGroup, stage: StageConfig, state: WorkerState, tick: int, x: Vector
) -> Vector:
    """Sum the updates as the codec requires: its own protocol, an all-reduce, or an all-gather."""
    pipeline, context = stage.pipeline, context_of(stage, team.ctx.rank, state, tick)
    if isinstance(pipeline.inner_codec, Collective):
        return await pipeline.run_protocol(state.codec_state, team, x, context)
    # payloads that are added must have equal shapes, so all workers use one density
    if pipeline.traits.linear:
        x, context = x * team.weight, context._replace(ratio=least_ratio(stage), weight=team.weight)
    payload = await team.compute(partial(pipeline.encode, state.codec_state, x, context), work=1)
    report_health(team.ctx, stage, state, x, [(pipeline, state.codec_state, payload)])
    if pipeline.traits.linear:
        total = await team.all_reduce(pipeline.summand(payload, context))
        return await team.decode(partial(pipeline.decode_sum, state.codec_state, payload, total), 1)
    return await gather_payloads(team, stage, state, x, payload)


async def gather_payloads(
    team: ProcessGroup, stage: StageConfig, state: WorkerState, x: Vector, payload: Payload
) -> Vector:
    """Gather the payloads of all workers, decode and sum them."""
    payloads = await team.all_gather(payload)
    if isinstance(x, SizeOnly):
        return await team.decode(lambda: x, team.size)
    if team.not_finite:
        return torch.zeros_like(x)
    return await team.decode(
        partial(stage.pipeline.merge, state.codec_state, payloads, team.weights, team.ranks),
        team.size,
    )


def least_ratio(stage: StageConfig) -> float:
    """Return the least density of all workers, which is common to payloads that are added."""
    return min(worker.compression_ratio for worker in stage.plan.workers)


# Bucketed encoding: a codec that encodes each bucket of a gradient separately
#
# Rule: the elements x_k of bucket k are encoded as soon as they are computed, before backward
# continues, with their part of the sender's residual: p_k = x_k + e_k is sent as C(p_k), and
# e_k ← p_k − C(p_k). Linear payloads are summed by all-reduce, others are gathered. All buckets are
# decoded once the last one has arrived.
#
# Limits: the sum equals that of one message whose codec is applied bucket by bucket, bit for bit;
# with one bucket nothing overlaps. Source: Shi et al., "Layer-wise Adaptive Gradient Sparsification
# for Distributed Deep Learning with Convergence Guarantees", ECAI 2020.


@dataclass
class BucketEncoder:
    """Encoding of the buckets of one gradient, numbered from 0 in backward order."""

    team: ProcessGroup
    stage: StageConfig
    state: WorkerState
    version: int
    codec_states: list[CodecState]  # by bucket
    contexts: list[EncodeContext]
    vectors: dict[int, Vector] = field(default_factory=dict)  # gradient by bucket
    payloads: dict[int, Payload] = field(default_factory=dict)  # payload by bucket
    finite: bool = True

    @classmethod
    def prepare(
        cls, team: ProcessGroup, stage: StageConfig, state: WorkerState, version: int
    ) -> BucketEncoder:
        """Prepare the encoding, before the gradient is computed."""
        codec_states = [
            replace(
                state.codec_state, sender=slice_state(state.codec_state.sender, m.start, m.stop)
            )
            for m in stage.buckets
        ]
        context, contexts = context_of(stage, team.ctx.rank, state, version), []
        # payloads that are added must have equal shapes, so all workers use one density
        if stage.pipeline.traits.linear:
            context = context._replace(ratio=least_ratio(stage), weight=team.weight)
        for k, pipeline in enumerate(stage.pipelines):
            ratio = stage.buckets[k].ratio or context.ratio
            contexts.append(context._replace(ratio=ratio, layer=pipeline.layer))
        return cls(team, stage, state, version, codec_states, contexts)

    @property
    def encoding(self) -> Encoding:
        """Return the work of encoding as an effect: each bucket takes its part of the work of the
        whole.
        """
        d, sizes = self.stage.pipeline.d, (pipeline.d for pipeline in self.stage.pipelines)
        return Encoding(self.encode, tuple(done / d for done in accumulate(sizes)))

    def encode(self, k: int, x: Vector) -> Payload:
        """Encode bucket k. Returns: its payload.

        A bucket that is not finite is replaced by zeros, see `finish_encoding`.
        """
        self.vectors[k], pipeline = x, self.stage.pipelines[k]
        if not isinstance(x, SizeOnly) and not all_finite(x):
            x, self.finite = torch.zeros_like(x), False
        if pipeline.traits.linear:
            x = x * self.team.weight
        self.payloads[k] = pipeline.encode(self.codec_states[k], x, self.contexts[k])
        return self.payloads[k]

    def finish_encoding(self) -> bool:
        """Store the residual and report the compression error, once all buckets are encoded.

        Returns: True if the gradient was finite.
        """
        ctx, stage, state = self.team.ctx, self.stage, self.state
        every = stage.compression_stats_every
        state.codec_state.sender = join_states(
            [codec_state.sender for codec_state in reversed(self.codec_states)]
        )
        if isinstance(self.vectors[0], SizeOnly):
            return True
        if not self.finite:
            report_not_finite(ctx, stage, state, join_slices(self.vectors))
        elif every is not None and not (state.round % every and self.version % every):
            x = join_slices(self.vectors)
            weight = self.team.weight if stage.pipeline.traits.linear else 1.0
            sent = [
                (pipeline, self.codec_states[k], self.payloads[k])
                for k, pipeline in enumerate(stage.pipelines)
            ]
            report_health(ctx, stage, state, x * weight, sent[::-1])
        return self.finite

    async def exchange_bucket(self, team: ProcessGroup, k: int, payload: Payload) -> Any:
        """Exchange bucket k. Returns: the sum of its payloads, or the gathered payloads."""
        pipeline = self.stage.pipelines[k]
        if pipeline.traits.linear:
            return await team.all_reduce(pipeline.summand(payload, self.contexts[k]))
        return await team.all_gather(payload)

    async def decode_buckets(self, results: Sequence[Any]) -> Vector:
        """Return the weighted sum of all gradients, from the results of `exchange_bucket`."""
        team, stage = self.team, self.stage
        if isinstance(self.vectors[0], SizeOnly):
            return SizeOnly(4 * stage.pipeline.d)
        if team.not_finite:
            return torch.zeros_like(join_slices(self.vectors))
        return await team.compute(partial(self.decode_sums, results))

    def decode_sums(self, results: Sequence[Any]) -> Vector:
        """Decode the result of each bucket, and return the sum of the whole gradient."""
        sums = {}
        for k, (pipeline, codec_state) in enumerate(
            zip(self.stage.pipelines, self.codec_states, strict=True)
        ):
            if pipeline.traits.linear:
                sums[k] = pipeline.decode_sum(codec_state, self.payloads[k], results[k])
            else:
                sums[k] = pipeline.merge(
                    codec_state, results[k], self.team.weights, self.team.ranks
                )
        return join_slices(sums)


def join_slices(slices: dict[int, Any]) -> Any:
    """Return the flat vector of all buckets, which are numbered in backward order."""
    return concatenate([slices[k] for k in reversed(range(len(slices)))])

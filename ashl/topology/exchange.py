"""How the workers of an all-reduce come to the weighted sum of what they have, with and without
compression.

Rule: everybody ends with Σ_j c_j·C(x_j), the same to the bit on all. A codec without loss, or one
that is linear, is summed on its way: 2(n − 1)/n of a body each way. The bodies of any other are
gathered, (n − 1) each way, all padded to the length of the longest, and every worker decodes and
sums all of them in rank order: it grows with n, and beats a dense sum while a body is shorter than
2/n of the vector. A `Collective` codec has a protocol of its own.

What rides along is the team's, see `ashl.stage.process_group`.

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
from ashl.compression.wrappers.state_slices import join_states, slice_state
from ashl.runtime.effects import Encoding
from ashl.runtime.sums import concatenate
from ashl.size_only import SizeOnly, Vector
from ashl.stage.compression_pipeline import Body, CodecState
from ashl.stage.process_group import GroupBrokenError, ProcessGroup
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.local_work import (
    WorkerState,
    all_finite,
    context_of,
    not_finite,
    report_health,
    reports_mean,
)


async def exchange_update(
    team: ProcessGroup, stage: Stage, state: WorkerState, progress: Progress, tick: int, x: Vector
) -> Vector:
    """Σ c·C(x), or Σ c·x where the rule says so, at the merge of this number; `team.loss` and
    `team.word` are sums then. Of an update that is not finite nothing is made: the mean loss says
    so.
    """
    ctx = team.ctx
    if stage.link.traits.lossless or stage.sync.sums_whole(stage, progress):
        return await team.all_reduce(x, team.weight)
    if not isinstance(x, SizeOnly) and not_finite(ctx, stage, state, x):
        x, team.loss = torch.zeros_like(x), math.nan
    looks = reports_mean(stage, tick) and not isinstance(x, SizeOnly)
    if looks:
        ctx.show_update(x, of=ctx.rank, tick=tick, weight=team.weight)
    update = await exchange_compressed(team, stage, state, tick, x)
    if looks and ctx.rank == stage.lead_rank:
        ctx.show_update(update, of=None, tick=tick)
    return update


async def exchange_compressed(
    team: ProcessGroup, stage: Stage, state: WorkerState, tick: int, x: Vector
) -> Vector:
    """The same by the codec's own way."""
    link, context = stage.link, context_of(stage, team.ctx.rank, state, tick)
    if isinstance(link.innermost, Collective):
        return await run_collective_codec(team, stage, state, link.innermost, x, context)
    if link.traits.linear:  # what adds up is alike in shape
        x, context = x * team.weight, context._replace(ratio=least_ratio(stage), weight=team.weight)
    body = await team.compute(partial(link.encode, state.ends, x, context), work=1)
    report_health(team.ctx, stage, state, x, [(link, state.ends, body)])
    if link.traits.linear:
        total = await team.all_reduce(link.summand(body, context))
        return await team.decode(partial(link.decode_sum, state.ends, body, total), 1)
    return await gather_payloads(team, stage, state, x, body)


async def run_collective_codec(
    team: ProcessGroup,
    stage: Stage,
    state: WorkerState,
    codec: Collective,
    x: Vector,
    context: EncodeContext,
) -> Vector:
    """What a protocol over all workers comes to. Raises TeamBrokenError where a worker is lost."""
    link = stage.link
    try:
        if isinstance(x, SizeOnly):
            await codec.simulate_collective(team, link.codec.share(context), link.d)
            await team.confirm_all_complete()
            return x
        outcome = await codec.collective(team, link.before(state.ends, x, context))
        await team.confirm_all_complete()
    except GroupBrokenError:
        await team.give_up(codec.peers(team.place, team.size))
        raise
    return await team.compute(partial(link.after, state.ends, x, context, outcome))


async def gather_payloads(
    team: ProcessGroup, stage: Stage, state: WorkerState, x: Vector, body: Body
) -> Vector:
    """Everybody's bodies, decoded and summed by everybody alike."""
    bodies = await team.all_gather(body)
    if isinstance(x, SizeOnly):
        return await team.decode(lambda: x, team.size)
    if team.not_finite:
        return torch.zeros_like(x)
    return await team.decode(
        partial(stage.link.merge, state.ends, bodies, team.weights, team.ranks), team.size
    )


def least_ratio(stage: Stage) -> float:
    """The density that all workers of a sum agree on."""
    return min(worker.compression_ratio for worker in stage.plan.workers)


# Parts of a vector, encoded one by one  A codec in each message of a gradient that travels in
# parts: each selects, and keeps what it left out, by itself.  Rule: the elements x_k of message k
# are encoded as soon as they are there, before backward goes on, with their own part of what the
# sender keeps: p_k = x_k + e_k is sent as C(p_k), and e_k ← p_k − C(p_k). Messages that add up are
# summed on their way, the others are gathered, and all are decoded once the last one is there.
# Limits: the sum is the same to the bit as that of one message in which the codec is applied part
# by part; one part is no overlap. Source: Shi et al., "Layer-wise Adaptive Gradient Sparsification
# for Distributed Deep Learning with
# Convergence Guarantees", ECAI 2020.


@dataclass
class Coding:
    """The messages of one gradient, counted from 0 as backward comes to them."""

    team: ProcessGroup
    stage: Stage
    state: WorkerState
    version: int
    ends: list[CodecState]  # of each message
    contexts: list[EncodeContext]
    vectors: dict[int, Vector] = field(default_factory=dict)  # what was to be sent
    bodies: dict[int, Body] = field(default_factory=dict)  # ... and what is
    finite: bool = True

    @classmethod
    def of(cls, team: ProcessGroup, stage: Stage, state: WorkerState, version: int) -> Coding:
        """Before the gradient is computed."""
        ends = [
            replace(state.ends, sender=slice_state(state.ends.sender, m.start, m.stop))
            for m in stage.messages
        ]
        context, contexts = context_of(stage, team.ctx.rank, state, version), []
        if stage.link.traits.linear:  # what adds up is alike in shape
            context = context._replace(ratio=least_ratio(stage), weight=team.weight)
        for k, link in enumerate(stage.links):
            ratio = stage.overlap.shares[k] if stage.overlap.shares else context.ratio
            contexts.append(context._replace(ratio=ratio, layer=link.layer))
        return cls(team, stage, state, version, ends, contexts)

    @property
    def encoding(self) -> Encoding:
        """Of all elements it is one encoding, of each message its part of it."""
        d, sizes = self.stage.link.d, (link.d for link in self.stage.links)
        return Encoding(self.encode, tuple(done / d for done in accumulate(sizes)))

    def encode(self, k: int, x: Vector) -> Body:
        """The body of message k. Of a gradient that is not finite nothing is made, see `ended`."""
        self.vectors[k], link = x, self.stage.links[k]
        if not isinstance(x, SizeOnly) and not all_finite(x):
            x, self.finite = torch.zeros_like(x), False
        if link.traits.linear:
            x = x * self.team.weight
        self.bodies[k] = link.encode(self.ends[k], x, self.contexts[k])
        return self.bodies[k]

    def all_encoded(self, vectors: Sequence[Vector]) -> list[Body]:
        """The bodies of all messages, where these are there."""
        return [self.encode(k, x) for k, x in enumerate(vectors)]

    def finish_encoding(self) -> bool:
        """Everything has been encoded: whether it was finite."""
        ctx, stage, state, every = (
            self.team.ctx,
            self.stage,
            self.state,
            self.stage.compression_stats_every,
        )
        state.ends.sender = join_states([ends.sender for ends in reversed(self.ends)])
        if isinstance(self.vectors[0], SizeOnly):
            return True
        if not self.finite:
            not_finite(ctx, stage, state, join_slices(self.vectors))
        elif every is not None and not (state.round % every and self.version % every):
            x, weight = (
                join_slices(self.vectors),
                self.team.weight if stage.link.traits.linear else 1.0,
            )
            sent = [(link, self.ends[k], self.bodies[k]) for k, link in enumerate(stage.links)]
            report_health(ctx, stage, state, x * weight, sent[::-1])
            if reports_mean(stage, self.version):
                ctx.show_update(x, of=ctx.rank, tick=self.version, weight=self.team.weight)
        return self.finite

    async def exchange_bucket(self, team: ProcessGroup, k: int, body: Body) -> Any:
        """The sum of everybody's message k, or everybody's."""
        link = self.stage.links[k]
        if link.traits.linear:
            return await team.all_reduce(link.summand(body, self.contexts[k]))
        return await team.all_gather(body)

    async def decode_buckets(self, came: Sequence[Any]) -> Vector:
        """The weighted sum of everybody's gradients, of what came of each message."""
        team, stage = self.team, self.stage
        if isinstance(self.vectors[0], SizeOnly):
            return SizeOnly(4 * stage.link.d)
        if team.not_finite:
            return torch.zeros_like(join_slices(self.vectors))
        update = await team.compute(partial(self.sum, came))
        if reports_mean(stage, self.version) and team.ctx.rank == stage.lead_rank:
            team.ctx.show_update(update, of=None, tick=self.version)
        return update

    def sum(self, came: Sequence[Any]) -> Vector:
        sums = {}
        for k, (link, ends) in enumerate(zip(self.stage.links, self.ends, strict=True)):
            if link.traits.linear:
                sums[k] = link.decode_sum(ends, self.bodies[k], came[k])
            else:
                sums[k] = link.merge(ends, came[k], self.team.weights, self.team.ranks)
        return join_slices(sums)


def join_slices(slices: dict[int, Any]) -> Any:
    """The flat vector of the slices of messages, the last one first."""
    return concatenate([slices[k] for k in reversed(range(len(slices)))])

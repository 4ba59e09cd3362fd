"""HALoS: a server in every region, near its workers, and one above them; momentum at both.

Rule: the server of a region merges the pushes of its workers as they come, as a parameter server
does (`aggregate` weighs over the region, `outer` steps), and answers with its own model w. When it
has merged K pushes since it last mixed, and none of its differences is on its way, it sends what
they made of w up. The global server steps on it, with delayed Nesterov momentum: x = γ·Δ, at each
merge v ← v + x, at every N-th first m ← β·m + Σx of the last N, then v ← v + x + β·m
(`outer=delayed_nesterov`). Its answer is v, and the region mixes: w ← (1 − α)·w + α·v. Meanwhile
the region has gone on; as in the released code, what it merges while its difference is away stays
in its own model alone, but for a stage's end, where all is handed in. Model, counts, targets and
limits are the global server's; a push counts once its region has handed it in, and staleness is
counted in merges of the region.

Processes: the global server is rank n, and the region's are the ranks from n + 1 on, in the order
of their numbers in `cluster.node`. In virtual time the server of a region is on its machine, and
shares its port to the outside; what a region hands in is a whole difference and a few numbers per
worker. A stage is over when the last region has heard so; what came after the global server's word
is dropped.

Limit: one region has no server above it, and is the parameter server, bit for bit, outer momentum
included.
Source: Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for
Geo-Distributed Large Language Model Training", ICML 2025; rule and defaults as in the released code
(utnslab/halos: α = 0.25, K = 32; γ = 0.15, β =
0.5, N = 2 above; 0.2, 0.9 and 16 in a region; H by speed). The paper's own pseudocode could not be
read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ashl.errors import UsageError
from ashl.optimizer.schedule import Decay
from ashl.option import Count, Fraction, Natural, option
from ashl.outer.contract import Rate
from ashl.outer.delayed_nesterov import DelayedNesterov
from ashl.runtime.effects import Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.progress import Progress
from ashl.stage.stage import (
    CODEC,
    GO,
    NEXT,
    OUTER,
    STOP,
    WEIGHTS,
    Loop,
    Members,
    Network,
    Rule,
    Stage,
    Topology,
)
from ashl.topology.ending import drop_reason, end_time_ns, record_end, stop_decision
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import (
    ServerRule,
    ServerState,
    Updates,
    apply_merge,
    finish_stage,
    on_push,
    reply,
    rule_of,
    server,
    worker,
)

REPORTED = (
    "commits",
    "steps_by",
    "dropped_by",
    "stale_sum",
    "stale_max",
)  # of a region's progress, by worker


@option
class Halos(Topology):
    """A tree of servers: one in each region, and one above them."""

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, OUTER})
    has_server: ClassVar[bool] = True
    regions: tuple[Natural, ...] | None
    updates: Count
    mixing: Fraction
    lr: Rate
    beta: Decay
    buffer: Count

    def members(self, nodes: tuple[int, ...] | None) -> tuple[Members, ...]:
        """The workers of each region. Raises UsageError where nothing says who is where."""
        where = self.regions or nodes
        if where is None or (nodes is not None and where != nodes):
            known = "says otherwise" if nodes else "says nothing"
            raise UsageError(
                "topology=halos has a server in every region, and"
                f" topology.regions={self.regions or 'null'} while cluster.node {known}; give"
                " cluster.node=[0,0,1,1], say, for virtual time, or topology.regions on machines"
                " that are there"
            )
        return tuple(
            tuple(r for r, own in enumerate(where) if own == region)
            for region in sorted(set(where))
        )

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        regions = len(self.members(nodes))
        return 1 if regions == 1 else 1 + regions

    def server_of(self, stage: Stage, rank: int) -> int:
        regions = self.members(stage.nodes)
        if len(regions) == 1:
            return stage.server
        return stage.server + 1 + next(r for r, members in enumerate(regions) if rank in members)

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        if self.regions is not None and len(self.regions) != num_workers:
            raise UsageError(
                f"topology.regions has {len(self.regions)} entries for {num_workers} workers; give"
                " the region of each"
            )

    def check_tree(self, sync: Rule, nodes: tuple[int, ...] | None, follows: bool) -> None:
        """Refuse what only one server can do; `follows`: whether the plan follows what is measured.
        UsageError.
        """
        if len(self.members(nodes)) == 1 or not isinstance(sync, ServerRule):
            return
        if follows:
            raise UsageError(
                "topology=halos: no server sees all workers, and a planner that replans needs one;"
                " take another"
            )
        waits = sync.in_rounds or type(sync).closes_s is not ServerRule.closes_s
        if waits or type(sync).loop is not Rule.loop or type(sync.messages()) is not Updates:
            raise UsageError(
                "with topology=halos the server of a region merges updates as they come, and this"
                " sync mode wants rounds or messages of its own; take sync=async_local_sgd,"
                " sync=asp or sync=ssp, or topology=parameter_server"
            )

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        if rank < stage.server:
            return (self.server_of(stage, rank),)
        if len(regions := self.members(stage.nodes)) == 1:
            return stage.workers
        return (
            region_servers(stage)
            if rank == stage.server
            else (*regions[rank - stage.server - 1], stage.server)
        )

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a push to the region's server and a pull take, uncontended."""
        near = self.server_of(stage, rank)
        up = stage.codec.encoded_nbytes(stage.worker(rank).compression_ratio, stage.link.d)
        return network.transfer_ns(rank, near, up) + network.transfer_ns(
            near, rank, stage.link.pull_bytes(None)
        )

    def begin(self, ctx: RankContext, stage: Stage) -> WorkerState | ServerState:
        params, moments = stage.trainer.init()
        if ctx.rank < stage.server:
            return WorkerState(params, moments)
        if ctx.rank == stage.server:
            return GlobalServerState(params, moments, Progress(stage.num_workers))
        progress = Progress(stage.num_workers)
        for rank in set(stage.workers) - set(
            self.members(stage.nodes)[ctx.rank - stage.server - 1]
        ):
            progress.remove_worker(
                rank
            )  # of another region: nobody here waits for it, or weighs it
        return RegionState(params, moments, progress)

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank < stage.server:
            return worker
        if len(self.members(stage.nodes)) == 1:
            return server
        return global_server if rank == stage.server else region_server


@dataclass
class RegionState(ServerState):
    """All that the server of a region needs to go on."""

    # the model at the last mixing, or as it was last handed in: what comes next is relative to it
    sent: Any = None
    away: bool = False  # whether a difference of it is on its way
    merges: int = 0  # the version at the last mixing
    samples: int = 0  # of its own workers, merged
    behind: tuple[int, int] = (0, 0)  # steps and samples of its own when it last handed in
    losses: tuple[float, int] = (0.0, 0)  # sum and number of those heard since


@dataclass
class GlobalServerState(ServerState):
    """All that the global server needs to go on; `called` are the regions that have closed."""

    samples: dict[int, int] = field(default_factory=dict)  # that each region has handed in


def region_servers(stage: Stage) -> tuple[int, ...]:
    """The servers of the regions."""
    assert isinstance(stage.topology, Halos)
    return tuple(stage.server + 1 + r for r in range(len(stage.topology.members(stage.nodes))))


def signal_tag(stage: Stage) -> Tag:
    """Of what the global server says to a region while it is open."""
    return stage.tag("global")


async def region_server(ctx: RankContext, stage: Stage, state: RegionState) -> int:
    """Merge and answer as a parameter server does, hand in every K merges and mix; returns the last
    word.
    """
    topology, progress, push = stage.topology, state.progress, stage.tag("push")
    assert isinstance(topology, Halos)
    if state.entered != stage.index:
        state.enter(stage, ctx.now)
        state.sent, state.away, state.merges = state.params, False, progress.version
    while True:
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(push, signal_tag(stage), before_s=stage.stop_criteria.deadline_s)
        ctx.time_accounting.end_round()
        if message is None:
            state.signal = STOP
        elif message.tag == push:
            before, losses = progress.samples, state.losses
            await on_push(ctx, stage, state, message)
            state.samples += progress.samples - before
            state.losses = losses[0] + message.meta[2], losses[1] + 1
        else:
            state.signal = int(message.meta[0])
            if state.signal == GO:
                state.params = state.params * (1 - topology.mixing) + message.body * topology.mixing
                state.sent, state.away, state.merges = state.params, False, progress.version
                here = sum(progress.steps_by), state.samples
                ahead = [own - handed for own, handed in zip(here, state.behind, strict=True)]
                progress.steps, progress.samples = (
                    int(message.meta[1 + k]) + ahead[k] for k in (0, 1)
                )
        if state.signal == STOP or (
            state.signal == NEXT and len(progress.waiting) == progress.present
        ):
            break
        if state.signal == GO:
            if (
                progress.version - state.merges >= topology.updates and not state.away
            ) or progress.diverged:
                await push_to_global(ctx, stage, state)
            for rank in sorted(rule_of(stage).may_proceed(state.rule_state, progress)):
                await reply(ctx, stage, state, rank)
    return await close_region(ctx, stage, state)


async def close_region(ctx: RankContext, stage: Stage, state: RegionState) -> int:
    """The last of a region's stage: hand in what there is, hear when it ended, and tell the
    workers.
    """
    before = state.progress.samples
    if state.signal == NEXT and state.buffer:
        await ctx.compute(partial(apply_merge, stage, state, None), work=1, kind="apply")
    state.samples += state.progress.samples - before
    await push_to_global(ctx, stage, state, last=True)
    message = await ctx.recv(stage.tag("end"))
    signal, end_ns, steps, samples = map(int, message.meta)
    state.params = state.params if message.body is None else message.body
    state.progress.steps, state.progress.samples = steps, samples
    await finish_stage(ctx, stage, state, signal, end_ns)
    await ctx.send(stage.server, stage.tag("counts"), region_counts(state.progress))
    return signal


async def push_to_global(
    ctx: RankContext, stage: Stage, state: RegionState, last: bool = False
) -> None:
    """Tell the global server what has come of this region's model since, and of whose work; the
    last time nothing of it where the run is over.
    """
    progress, (total, heard) = state.progress, state.losses
    body = None if last and state.signal == STOP else state.params - state.sent
    about = (last, total / max(1, heard), heard, progress.latest, state.samples, progress.max_lead)
    state.sent, state.away, state.losses = state.params, True, (0.0, 0)
    state.behind = sum(progress.steps_by), state.samples
    await ctx.send(stage.server, stage.tag("update"), body, about)
    await ctx.send(stage.server, stage.tag("counts"), region_counts(progress))


def region_counts(progress: Progress) -> Tensor:
    """What a region has counted so far of each worker."""
    return torch.tensor([getattr(progress, name) for name in REPORTED], dtype=torch.int64).flatten()


async def global_server(ctx: RankContext, stage: Stage, state: GlobalServerState) -> int:
    """At the global server: merge what regions hand in, and answer with the model, until the stage
    is over and all regions have closed; returns the last word.
    """
    progress, deadline_s, update = (
        state.progress,
        stage.stop_criteria.deadline_s,
        stage.tag("update"),
    )
    state.enter(stage, ctx.now)
    regions = region_servers(stage)
    while len(state.flush_requested) < len(regions):
        ctx.safe_point(stage.index, state)
        message = await ctx.recv(update, before_s=math.inf if state.signal == STOP else deadline_s)
        ctx.time_accounting.end_round()
        if message is None:
            state.signal, state.reason = STOP, "seconds"
            continue
        counts = (await ctx.recv(stage.tag("counts"), src=message.src)).body
        last, loss, heard, latest, samples, lead = message.meta
        if last:
            state.flush_requested += (message.src,)
        if state.signal == STOP or message.body is None:
            continue
        await ctx.compute(
            partial(apply_region_update, stage, state, message.body), work=1, kind="apply"
        )
        adopt_counts(
            stage, state, message.src, counts.view(len(REPORTED), -1).tolist(), int(samples)
        )
        progress.max_lead = max(progress.max_lead, int(lead))
        for _ in range(int(heard)):
            progress.record_loss(loss, int(latest))
        if stage.stop_criteria.take_evaluation(state, ctx.now):
            ctx.snapshot(state.params, counts=progress.report())
        before, (signal, reason) = state.signal, stop_decision(ctx, stage, progress)
        if signal == STOP or before == GO:
            state.signal, state.reason = signal, reason
        receivers = (
            (message.src,) if state.signal == GO else regions if before != state.signal else ()
        )
        for rank in receivers:
            body = state.params if state.signal == GO else None
            await ctx.send(
                rank, signal_tag(stage), body, (state.signal, progress.steps, progress.samples)
            )
    return await end_regions(ctx, stage, state, regions)


def apply_region_update(stage: Stage, state: ServerState, difference: Any) -> None:
    """A step of the global model, on what a region's made of its own."""
    topology = stage.topology
    assert isinstance(topology, Halos)
    momentum = DelayedNesterov(buffer=topology.buffer, beta=topology.beta, spread=0.0)
    state.outer_state, state.params = momentum.step(
        state.outer_state, state.params, difference * topology.lr, 0.0
    )
    state.progress.merge()


def adopt_counts(
    stage: Stage, state: GlobalServerState, src: int, counts: Sequence[Sequence[int]], samples: int
) -> None:
    """Count what is part of the global model now, as the region has counted it."""
    progress = state.progress
    assert isinstance(stage.topology, Halos)
    members = stage.topology.members(stage.nodes)[src - stage.server - 1]
    commits, steps = sum(progress.commits), sum(progress.steps_by)
    for name, row in zip(REPORTED, counts, strict=True):
        for rank in members:
            getattr(progress, name)[rank] = row[rank]
    more = samples - state.samples.get(src, 0)
    progress.advance(sum(progress.steps_by) - steps, more, sum(progress.commits) - commits)
    state.samples[src] = samples


async def end_regions(
    ctx: RankContext, stage: Stage, state: ServerState, regions: Sequence[int]
) -> int:
    """At the global server, once all regions have closed: the stage ended now; what they have
    counted beyond the model is dropped.
    """
    progress, end_ns = state.progress, end_time_ns(stage, ctx.now_ns)
    progress.end_ns = end_ns
    body = state.params if state.signal == NEXT else None
    for rank in regions:
        await ctx.send(
            rank, stage.tag("end"), body, (state.signal, end_ns, progress.steps, progress.samples)
        )
    for place, rank in enumerate(regions):
        counts = (
            (await ctx.recv(stage.tag("counts"), src=rank)).body.view(len(REPORTED), -1).tolist()
        )
        found = dict(zip(REPORTED, counts, strict=True))
        assert isinstance(stage.topology, Halos)
        for member in stage.topology.members(stage.nodes)[place]:
            beyond = found["steps_by"][member] - progress.steps_by[member]
            progress.dropped_by[member] = found["dropped_by"][member] + beyond
            if beyond:
                reason = drop_reason(state.signal)
                progress.dropped_for[reason] = progress.dropped_for.get(reason, 0) + beyond
    record_end(ctx, stage, progress, state.reason)
    if state.signal == STOP:
        ctx.time_accounting.close_at(end_ns)
    return state.signal

"""HALoS: a server in every region, near its workers, and a global server, each with momentum.

Use when: links inside a region are much faster than those between regions.
Avoid when: there is one region, or the sync mode needs a barrier.
Alternatives: `parameter_server`; `all_reduce` with `algorithm=hierarchical`.

Rule: the server of a region merges the pushes of its workers as they arrive, as a parameter server
does: `aggregate` weighs them, and `outer` takes the step. It answers with its own model w. Once it
has made K merges since its last mixing, it sends the difference Δ to the global server. Δ is the
change of w since the last mixing. It sends none while an earlier difference is in flight.

The global server steps on Δ with delayed Nesterov momentum (`outer=delayed_nesterov`): x = γ·Δ; at
each merge v ← v + x; at every N-th merge first m ← β·m + Σx of the last N, then v ← v + x + β·m.
Its answer is v, and the region mixes: w ← (1 − α)·w + α·v. The region continues meanwhile. As in
the released code, pushes that it merges while its difference is in flight stay in its own model
only. At the end of a stage they are sent, too. K is `updates`, α is `mixing`, γ is `lr`, β is
`beta`, and N is `buffer`.

Model, counts, targets and limits are those of the global server. A push counts once its region has
sent it to the global server, and staleness is counted in merges of the region. A stage ends when
the global server has the last push of every region. Before another stage it merges the rest of
every region. At the end of the run it drops the steps that it has not merged.

Processes: with n workers, rank n is the global server. The servers of the regions are the ranks
from n + 1 on, in the order of their numbers in `cluster.node` or `regions`. In virtual time the
server of a region is on its node and shares that node's NIC. A region sends a whole difference and
a few numbers per worker.

Limit: with one region there is no global server, and the run equals the parameter server, bit for
bit, outer momentum included.
Source: Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for
Geo-Distributed Large Language Model Training", ICML 2025. Rule and defaults are those of the
released code (utnslab/halos): α = 0.25, K = 32; at the global server γ = 0.15, β = 0.5, N = 2; in a
region γ = 0.2, β = 0.9, N = 16; local steps H by speed. The paper's own pseudocode could not be
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
from ashl.runtime.effects import JOIN, PEER_FAILED, Message, Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import (
    CODEC,
    FAULT_TOLERANT,
    GO,
    NEXT,
    OUTER,
    PAUSE,
    STOP,
    WEIGHTS,
    Loop,
    Ranks,
    Rule,
    StageConfig,
    Topology,
)
from ashl.stage.program import check_min_workers
from ashl.stage.progress import Progress
from ashl.topology.ending import (
    drop_reason,
    end_time_ns,
    overrides,
    record_end,
    stop_decision,
)
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import (
    ServerRule,
    ServerState,
    admit_all,
    finish_stage,
    join,
    merge_buffered,
    on_membership,
    on_push,
    record_join,
    reply,
    reply_to_all,
    server,
    worker,
)

# counts by worker that a region reports
REPORTED = ("commits", "steps_by", "dropped_by", "stale_sum", "stale_max")


@option
class Halos(Topology):
    """A tree of servers: one in each region, and a global one."""

    policy_type: ClassVar[type[Rule]] = ServerRule
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, OUTER, FAULT_TOLERANT})
    has_server: ClassVar[bool] = True
    regions: tuple[Natural, ...] | None  # the region of each worker; None = by cluster.node
    updates: Count  # K
    mixing: Fraction  # α
    lr: Rate  # γ
    beta: Decay  # β
    buffer: Count  # N

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | {"merges_by_region": "", "fixed_plan": ""}

    def members(self, nodes: tuple[int, ...] | None) -> tuple[Ranks, ...]:
        """Return the workers of each region. Raises: UsageError if no key assigns workers to
        regions.
        """
        where = self.regions or nodes
        if where is None or (nodes is not None and where != nodes):
            known = "differs" if nodes else "is null"
            raise UsageError(
                f"topology.regions={self.regions or 'null'}: topology=halos has a server in every"
                f" region, and cluster.node {known}; set cluster.node, for example"
                " cluster.node=[0,0,1,1], in virtual time, or topology.regions on real nodes"
            )
        return tuple(
            tuple(r for r, own in enumerate(where) if own == region)
            for region in sorted(set(where))
        )

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        regions = len(self.members(nodes))
        return 1 if regions == 1 else 1 + regions

    def server_of(self, stage: StageConfig, rank: int) -> int:
        regions = self.members(stage.nodes)
        if len(regions) == 1:
            return stage.server
        return stage.server + 1 + next(r for r, members in enumerate(regions) if rank in members)

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        if self.regions is not None and len(self.regions) != num_workers:
            raise UsageError(
                f"topology.regions has {len(self.regions)} entries for {num_workers} workers; give"
                " the region of each worker"
            )

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        """Return the ranks that this rank is connected to. A worker is connected to its region's
        server, and to the global server, which counts the workers that have not failed.
        """
        regions = self.members(stage.nodes)
        if len(regions) == 1:
            return stage.workers if rank == stage.server else (stage.server,)
        if rank < stage.server:
            return self.server_of(stage, rank), stage.server
        if rank == stage.server:
            return (*region_servers(stage), *stage.workers)
        return (*regions[rank - stage.server - 1], stage.server)

    async def join(
        self, ctx: RankContext, stages: Sequence[StageConfig]
    ) -> tuple[int, WorkerState] | None:
        return await join(ctx, stages)

    def begin(self, stage: StageConfig, rank: int) -> WorkerState | ServerState:
        params, moments = stage.trainer.init()
        if rank < stage.server:
            return WorkerState(params, moments)
        if rank == stage.server:
            return GlobalServerState(params, moments, Progress(stage.num_workers))
        progress = Progress(stage.num_workers)
        members = self.members(stage.nodes)[rank - stage.server - 1]
        for other in set(stage.workers) - set(members):
            progress.remove_worker(other)  # workers of other regions neither wait nor weigh here
        return RegionState(params, moments, progress)

    def role(self, stage: StageConfig, rank: int) -> Loop:
        if rank < stage.server:
            return worker
        if len(self.members(stage.nodes)) == 1:
            return server
        return global_server if rank == stage.server else region_server


@dataclass
class RegionState(ServerState):
    """State of the server of a region, complete for a checkpoint."""

    # its model at the last mixing or push to the global server; the next difference is the change
    # since then
    sent: Any = None
    is_sending: bool = False  # True while a difference is in flight, until the answer has arrived
    merges: int = 0  # its number of merges at the last mixing
    samples: int = 0  # merged samples of its own workers
    # its workers' (steps, samples) at its last push, which the global counts include
    sent_counts: tuple[int, int] = (0, 0)
    # (sum, number) of its workers' losses since its last push
    losses: tuple[float, int] = (0.0, 0)


@dataclass
class GlobalServerState(ServerState):
    """State of the global server, complete for a checkpoint."""

    samples: dict[int, int] = field(default_factory=dict)  # samples pushed by each region's server


def region_servers(stage: StageConfig) -> tuple[int, ...]:
    """Return the ranks of the servers of the regions."""
    return tuple(stage.server + 1 + r for r in range(len(stage.topology.members(stage.nodes))))


def signal_tag(stage: StageConfig) -> Tag:
    """Return the tag of the global server's messages to a region that is open."""
    return stage.tag("global")


async def region_server(ctx: RankContext, stage: StageConfig, state: RegionState) -> int:
    """Run the server of a region: merge and answer its workers, push every K merges, and mix.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    progress = state.progress
    if state.entered != stage.index:
        state.enter(stage, ctx.now)
        state.sent = state.params
        state.is_sending = False
        state.merges = progress.version
    pause, is_ready = stage.tag("pause"), False
    incoming = stage.tag("push"), signal_tag(stage), pause, PEER_FAILED, JOIN
    await admit_all(ctx, stage, state)
    while True:
        ctx.safe_point(stage.index, state)
        # once it is ready to pause, the global server decides for it
        before_s = math.inf if is_ready else stage.stop_criteria.deadline_s
        message = await ctx.recv(*incoming, before_s=before_s)
        ctx.time_accounting.fold_if_many()
        if message is not None and message.tag == pause:
            await reply_to_all(ctx, stage, state, progress.waiting, PAUSE)
            return PAUSE
        if is_ready and message is not None and message.tag == JOIN:
            record_join(state, message)  # its worker has no part in this pause
            continue
        await handle_message(ctx, stage, state, message)
        all_wait = len(progress.waiting) == progress.num_present
        if state.signal == PAUSE and all_wait and not (state.is_sending or is_ready):
            is_ready = True
            await ctx.send(stage.server, stage.tag("ready"))
        if state.signal == STOP or (state.signal == NEXT and all_wait):
            break
        if state.signal == GO:
            await answer_in_region(ctx, stage, state)
    return await close_region(ctx, stage, state)


async def merge_in_region(
    ctx: RankContext, stage: StageConfig, state: RegionState, message: Message
) -> None:
    """Merge a push of a worker of the region, and count its samples and loss."""
    before, (total, pushes) = state.progress.samples, state.losses
    await on_push(ctx, stage, state, message)
    state.samples += state.progress.samples - before
    state.losses = total + message.meta[2], pushes + 1


async def answer_in_region(ctx: RankContext, stage: StageConfig, state: RegionState) -> None:
    """Push to the global server if K merges are made, or the region has diverged; then answer the
    workers that may proceed.
    """
    topology, progress = stage.topology, state.progress
    is_due = progress.version - state.merges >= topology.updates and not state.is_sending
    if is_due or progress.diverged:
        await push_to_global(ctx, stage, state)
    for rank in sorted(stage.sync.may_proceed(state.rule_state, progress)):
        await reply(ctx, stage, state, rank)


async def handle_message(
    ctx: RankContext, stage: StageConfig, state: RegionState, message: Message | None
) -> None:
    """Handle a message at the server of a region.

    Args: message, None at the end of the time budget.
    """
    if message is None:
        state.signal = STOP
    elif message.tag == stage.tag("push"):
        await merge_in_region(ctx, stage, state, message)
    elif message.tag in (PEER_FAILED, JOIN):
        await on_membership(ctx, stage, state, message)
    elif message.meta[0] == GO:
        mix_global_model(stage, state, message)
    else:
        state.signal = int(message.meta[0])


def mix_global_model(stage: StageConfig, state: RegionState, message: Message) -> None:
    """Mix the global model into that of a region, and adopt the global counts."""
    topology, progress = stage.topology, state.progress
    state.params = state.params * (1 - topology.mixing) + message.payload * topology.mixing
    state.sent = state.params
    state.is_sending = False
    state.merges = progress.version
    _, global_steps, global_samples = map(int, message.meta)
    # the region's own work since its last push is not part of the global counts
    progress.steps = global_steps + sum(progress.steps_by) - state.sent_counts[0]
    progress.samples = global_samples + state.samples - state.sent_counts[1]


async def close_region(ctx: RankContext, stage: StageConfig, state: RegionState) -> int:
    """End a region's stage: push the rest, receive the end time, and answer the workers.

    Returns: the final signal, NEXT or STOP.
    """
    before = state.progress.samples
    if state.signal == NEXT and state.buffer:
        await merge_buffered(ctx, stage, state)
    state.samples += state.progress.samples - before
    await push_to_global(ctx, stage, state, last=True)
    message = await ctx.recv(stage.tag("end"), src=stage.server)
    signal, end_ns, steps, samples = map(int, message.meta)
    state.params = state.params if message.payload is None else message.payload
    state.progress.steps, state.progress.samples = steps, samples
    await finish_stage(ctx, stage, state, signal, end_ns)
    await ctx.send(stage.server, stage.tag("counts"), region_counts(state.progress))
    return signal


async def push_to_global(
    ctx: RankContext, stage: StageConfig, state: RegionState, last: bool = False
) -> None:
    """Push the region's difference and its counts to the global server.

    Args: last: True for the last push of a stage, which has no difference if the run is over.
    """
    progress, (total, pushes) = state.progress, state.losses
    payload = None if last and state.signal == STOP else state.params - state.sent
    mean_loss = total / max(1, pushes)
    meta = (last, mean_loss, pushes, progress.latest, state.samples, progress.max_lead)
    state.sent = state.params
    state.is_sending = True
    state.losses = (0.0, 0)
    state.sent_counts = sum(progress.steps_by), state.samples
    await ctx.send(stage.server, stage.tag("update"), payload, meta)
    await ctx.send(stage.server, stage.tag("counts"), region_counts(progress))


def region_counts(progress: Progress) -> Tensor:
    """Return a region's counts by worker, int64 [len(REPORTED) · num_workers]."""
    return torch.tensor([getattr(progress, name) for name in REPORTED], dtype=torch.int64).flatten()


async def global_server(ctx: RankContext, stage: StageConfig, state: GlobalServerState) -> int:
    """Run the global server: merge the regions' differences and answer with the model.

    It ends once the stage is over, or pauses, and all regions are ready. Returns: the final signal.
    """
    deadline_s = stage.stop_criteria.deadline_s
    update, ready = stage.tag("update"), stage.tag("ready")
    state.enter(stage, ctx.now)
    regions, are_ready = region_servers(stage), set[int]()
    closed = 0  # regions whose last push of the stage has arrived
    while closed < len(regions):
        ctx.safe_point(stage.index, state)
        before_s = math.inf if state.signal == STOP else deadline_s
        message = await ctx.recv(update, ready, PEER_FAILED, JOIN, before_s=before_s)
        ctx.time_accounting.fold_if_many()
        if message is None:
            await change_signal(ctx, stage, state, STOP, "seconds", notify=state.signal == PAUSE)
            continue
        if message.tag in (PEER_FAILED, JOIN):
            count_member(ctx, stage, state, message)
            continue
        if message.tag == update:
            closed += await merge_region_update(ctx, stage, state, message)
            continue
        are_ready.add(message.src)
        if state.signal == PAUSE and len(are_ready) == len(regions):
            for rank in regions:
                await ctx.send(rank, stage.tag("pause"))
            return PAUSE
    return await end_regions(ctx, stage, state, regions)


async def merge_region_update(
    ctx: RankContext, stage: StageConfig, state: GlobalServerState, message: Message
) -> bool:
    """Merge a region's difference, adopt its counts, decide for all regions, and answer it.

    A difference that arrives after the signal STOP is dropped.
    Returns: True if it is the region's last push of the stage.
    """
    progress = state.progress
    counts = (await ctx.recv(stage.tag("counts"), src=message.src)).payload
    last, loss, pushes, latest, samples, lead = message.meta
    if last and state.signal in (GO, PAUSE):  # the time budget has ended in that region
        await change_signal(ctx, stage, state, STOP, "seconds")
    if state.signal == STOP or message.payload is None:
        return bool(last)
    await ctx.compute(
        partial(apply_region_update, stage, state, message.payload), work=1, kind="apply"
    )
    rows = counts.view(len(REPORTED), -1).tolist()
    adopt_counts(stage, state, message.src, rows, int(samples))
    progress.max_lead = max(progress.max_lead, int(lead))
    for _ in range(int(pushes)):
        progress.record_loss(loss, int(latest))
    if stage.stop_criteria.begin_due_evaluation(state, ctx.now):
        ctx.snapshot(state.params, counts=progress.report())
    signal, reason = stop_decision(ctx, stage, progress)
    if {state.signal, signal} <= {GO, PAUSE}:
        meta = (GO, progress.steps, progress.samples)
        await ctx.send(message.src, signal_tag(stage), state.params, meta)
    if signal != state.signal and overrides(signal, state.signal):
        await change_signal(ctx, stage, state, signal, reason)
    return bool(last)


async def change_signal(
    ctx: RankContext,
    stage: StageConfig,
    state: GlobalServerState,
    signal: int,
    reason: str | None,
    *,
    notify: bool = True,
) -> None:
    """Set the signal of the stage, and tell all regions."""
    state.signal, state.reason = signal, reason
    for rank in region_servers(stage) if notify else ():
        meta = (signal, state.progress.steps, state.progress.samples)
        await ctx.send(rank, signal_tag(stage), None, meta)


def count_member(
    ctx: RankContext, stage: StageConfig, state: GlobalServerState, message: Message
) -> None:
    """Count a worker that has failed or rejoins at the global server. The server of its region
    continues without it, or admits it.

    Raises: AshlError if too few workers remain.
    """
    rank, progress = message.src, state.progress
    if message.tag == JOIN:
        progress.join(rank)
    elif rank not in progress.failed:
        progress.remove_worker(rank)
        check_min_workers(ctx, stage, [rank], progress.num_present)


def apply_region_update(stage: StageConfig, state: ServerState, difference: Any) -> None:
    """Step the global model on a region's difference."""
    topology = stage.topology
    momentum = DelayedNesterov(buffer=topology.buffer, beta=topology.beta, spread=0.0)
    state.outer_state, state.params = momentum.step(
        state.outer_state, state.params, difference * topology.lr, 0.0
    )
    state.progress.merge()


def adopt_counts(
    stage: StageConfig,
    state: GlobalServerState,
    src: int,
    counts: Sequence[Sequence[int]],
    samples: int,
) -> None:
    """Adopt a region's counts by worker: their work is part of the global model now.

    Args: src, the rank of the region's server; counts, a row for each name of `REPORTED`; samples,
    those that the region has merged so far.
    """
    progress = state.progress
    members = stage.topology.members(stage.nodes)[src - stage.server - 1]
    commits, steps = sum(progress.commits), sum(progress.steps_by)
    for name, row in zip(REPORTED, counts, strict=True):
        for rank in members:
            getattr(progress, name)[rank] = row[rank]
    more = samples - state.samples.get(src, 0)
    progress.advance(sum(progress.steps_by) - steps, more, sum(progress.commits) - commits)
    state.samples[src] = samples


async def end_regions(
    ctx: RankContext, stage: StageConfig, state: ServerState, regions: Sequence[int]
) -> int:
    """End the stage at the global server once all regions have closed.

    Steps that regions have counted beyond the global model are dropped. Returns: the final signal.
    """
    progress, end_ns = state.progress, end_time_ns(stage, ctx.now_ns)
    progress.end_ns = end_ns
    payload = state.params if state.signal == NEXT else None
    for rank in regions:
        await ctx.send(
            rank,
            stage.tag("end"),
            payload,
            (state.signal, end_ns, progress.steps, progress.samples),
        )
    for place, rank in enumerate(regions):
        counts = (await ctx.recv(stage.tag("counts"), src=rank)).payload
        rows = counts.view(len(REPORTED), -1).tolist()
        found = dict(zip(REPORTED, rows, strict=True))
        for member in stage.topology.members(stage.nodes)[place]:
            beyond = found["steps_by"][member] - progress.steps_by[member]
            progress.dropped_by[member] = found["dropped_by"][member] + beyond
            if beyond:
                reason = drop_reason(state.signal)
                progress.dropped_for[reason] = progress.dropped_for.get(reason, 0) + beyond
    record_end(ctx, stage, progress, state.reason)
    if state.signal == STOP:
        ctx.time_accounting.close(end_ns)
    return state.signal

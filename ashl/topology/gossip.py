"""Gossip: every worker holds a model of its own and exchanges it with its neighbours on a graph.

Use when: workers are unequal or many, and messages between neighbours are cheaper than a server.
Avoid when: one model for all workers is needed during training, or a codec outside `sync=choco`.
Alternatives: `all_reduce` for exact averages; `partial_all_reduce` for groups.

Rule (D-PSGD): x_i ← Σ_j w_ij·x_j + Δ_i, with Δ_i the progress of the worker's own optimizer between
two exchanges. The sync mode decides from which workers a worker receives and how it merges. The
mean of all models is evaluated; momentum stays local.

Synchronous modes (`RoundRule`) work in rounds, without a server or a barrier. A worker proceeds
once it has received the messages of its round. Counts are functions of the round, so all ranks
count identically. The lead rank (rank 0, or another worker after its failure) alone judges time,
evaluations, and that a loss is not finite. It piggybacks its decision on its messages, and every
worker passes it on. The decision applies after the round in which it has reached every rank, which
the lead rank computes from the graph.

If messages are delayed (`RoundRule.lag`), those of the last `lag` rounds are in flight after each
round. At the end of a stage a worker receives and merges them. At a pause it receives them, and
keeps them for the rounds that merge them.

Asynchronous modes (`RoamingRule`) have loops of their own, and the coordinator of
`ashl.topology.coordinator`.

After a failure or a rejoin all members continue at the highest round of any of them, on the graph
for their number. Each keeps its model, and work that no round has merged. A member that was behind
skips rounds, which do not count for it. A joining worker receives a model. It has no work in the
first round if another member keeps work. The state of a sync mode begins again, because it belongs
to the edges of a graph.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ashl.option import Count, option
from ashl.plan.assignments import Assignments, Members
from ashl.runtime.effects import Epoch, Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly, Vector
from ashl.stage.contract import (
    FAULT_TOLERANT,
    GO,
    PAUSE,
    Loop,
    Ranks,
    Rule,
    StageConfig,
    Topology,
)
from ashl.stage.members import (
    is_truncated,
    members_with_work,
    shared_members,
    survivors,
    truncate_round,
    without_work,
)
from ashl.stage.program import apply_assignments
from ashl.stage.progress import RUN_START, Progress, ProgressMark, RunProgress
from ashl.topology.coordinator import (
    CoordinatorState,
    RoamingState,
    apply_signal,
    coordinator,
    gather_members,
    rejoin_members,
)
from ashl.topology.ending import (
    CHECKPOINT,
    REASONS,
    StateWithinBudget,
    end_piggybacked,
    local_stop,
    save_within_budget,
)
from ashl.topology.epochs import (
    NO_MODEL,
    Standing,
    compare_members,
    receive_state,
    send_state,
    with_members,
)
from ashl.topology.graph import (
    ANY_SIZE,
    MemberGraph,
    Round,
    graph_among,
    rounds_of,
)
from ashl.topology.local_work import (
    WorkerState,
    kept_work,
    mark_round,
    no_work,
    suits_round,
)

DECISIONS = (*REASONS, "diverged")
Received = Mapping[int, Message]  # by sender
Outgoing = dict[int, tuple[Any, tuple[float, ...]]]  # by receiver: payload, and numbers beside it


class GossipHeader(NamedTuple):
    """Header of every message: what the sender knows about the run."""

    loss: float  # mean of the sender's loss and of the losses it has received
    not_finite: float = 0  # 1 + the rank whose loss is not finite; 0: none
    decision: float = 0  # decision of the lead rank, as a position in DECISIONS; 0: none
    last: float = 0  # the round after which the decision applies
    snapshot_after: float = -1  # the round after which all workers emit their models


NO_HEADER = GossipHeader(math.nan)
HEADER_FIELDS = len(GossipHeader._fields)


def header_of(message: Message) -> GossipHeader:
    """Return the header of a message."""
    return GossipHeader(*message.meta[:HEADER_FIELDS])


def numbers_of(message: Message) -> tuple[float, ...]:
    """Return the numbers that the sync mode sent with a model, after the header."""
    return message.meta[HEADER_FIELDS:]


def mix_models(
    row: Mapping[int, float], rank: int, own: Any, received: Mapping[int, Message]
) -> Any:
    """Return Σ_j w_ij·x_j, summed in rank order into a new vector.

    If all rows are equal, so are the results on all ranks, bit for bit.
    """
    if isinstance(own, SizeOnly):
        return own
    total = None
    for j, weight in row.items():
        payload = own if j == rank else received[j].payload
        total = payload * weight if total is None else total.add_(payload, alpha=weight)
    return total


class GossipRule(Rule, contract=True):
    """Common base of synchronous and asynchronous gossip."""

    columns: ClassVar[bool] = False  # if True, weights are those of push-sum: columns add up to 1

    def check(self, rounds: Sequence[Round]) -> None:
        """Raise UsageError if the graph does not suit the mode."""


class GossipRound(NamedTuple):
    """One round at one worker, as a synchronous sync mode sees it."""

    ctx: RankContext
    stage: StageConfig
    graph: MemberGraph
    k: int  # number of the round in this stage

    @property
    def rank(self) -> int:
        return self.ctx.rank

    @property
    def targets(self) -> tuple[int, ...]:
        """Return the ranks that receive from this one."""
        return self.graph.round(self.k).targets[self.ctx.rank]

    @property
    def row(self) -> dict[int, float]:
        """Return the weight of each model in this worker's average, its own included."""
        return self.graph.round(self.k).rows[self.ctx.rank]


class RoundRule(GossipRule, contract=True):
    """Synchronous sync mode of gossip.

    By default a worker receives from all neighbours, and each round merges its own messages.
    `state.rule_state` holds the mode's state of this stage.
    """

    in_rounds: ClassVar[bool] = True
    early: ClassVar[bool] = False  # if True, models are sent before the local work
    lag: ClassVar[int] = 0  # round k merges the messages of round k − lag
    suspect: ClassVar[str] = ""  # another likely cause, for the message of a run that diverges

    def begin(self, stage: StageConfig, state: RoundState, rank: int) -> Any:
        """Return the mode's state at the start of a stage, or of an epoch in it."""
        return None

    def sources(self, graph: MemberGraph, rank: int, k: int) -> tuple[int, ...]:
        """Return the ranks from which this one receives in round k."""
        return graph.round(k).sources[rank]

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        """Return the messages of a round by receiver.

        Args: delta: the local progress Δ; None if models are sent before the local work.
        """
        raise NotImplementedError

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        """Merge the messages of round k − lag and the local progress Δ into the model."""
        raise NotImplementedError

    def merge_in_flight(self, state: RoundState, received: Received) -> None:
        """Merge the messages of a round that are in flight at the end of a stage."""


class RoamingRule(GossipRule, contract=True):
    """Asynchronous sync mode of gossip."""

    coordinated: ClassVar[bool] = True

    async def worker(self, ctx: RankContext, stage: StageConfig, state: RoamingState) -> int:
        """Run a worker. Returns: the final signal, NEXT, STOP or PAUSE."""
        raise NotImplementedError

    def peers(self, graph: MemberGraph, rank: int) -> tuple[int, ...] | None:
        """Return the workers that a worker may ask for an answer; None if it only receives from
        neighbours.
        """
        return None


@dataclass
class NeighbourModels:
    """State of an asynchronous worker that counts iterations: its neighbours' models that may still
    be used.
    """

    models: dict[int, dict[int, Any]]  # by neighbour: iteration → model, ascending
    received: dict[int, int]  # by neighbour: models that have arrived from it
    k: int = 0  # iteration
    sent: int = 0  # models sent to each neighbour in this stage
    # by neighbour: models that it has sent, once it has announced that it sends no more
    announced: dict[int, int] = field(default_factory=dict)


async def send_model(ctx: RankContext, stage: StageConfig, state: RoamingState) -> None:
    """Send the model of the present iteration to all neighbours."""
    heard: NeighbourModels = state.rule_state
    for peer in heard.models:
        await ctx.send(peer, stage.tag("model"), state.params, (heard.k,))
    heard.sent += 1


async def receive_model(
    ctx: RankContext, stage: StageConfig, state: RoamingState, before_s: float = math.inf
) -> bool:
    """Receive a neighbour's model, the count of its models, or a signal of the coordinator.

    Returns: False if no message arrived before `before_s` (run time in seconds).
    """
    message = await ctx.recv(stage.tag("model"), stage.tag("signal"), before_s=before_s)
    heard: NeighbourModels = state.rule_state
    if message is None:
        return False
    if message.tag == stage.tag("signal"):
        apply_signal(ctx, state, message)
    elif message.payload is None:
        heard.announced[message.src] = int(message.meta[0])
    else:
        heard.models[message.src][int(message.meta[0])] = message.payload
        heard.received[message.src] += 1
    return True


async def receive_arrived(ctx: RankContext, stage: StageConfig, state: RoamingState) -> None:
    """Receive every message that has arrived by now."""
    while await receive_model(ctx, stage, state, before_s=ctx.now):
        pass


async def receive_in_flight(ctx: RankContext, stage: StageConfig, state: RoamingState) -> None:
    """Announce that this worker sends no more models; receive all that neighbours have sent."""
    heard: NeighbourModels = state.rule_state
    for peer in heard.models:
        await ctx.send(peer, stage.tag("model"), None, (heard.sent,))
    while heard.announced != heard.received:
        await receive_model(ctx, stage, state)
    heard.announced = {}


@option
class Gossip(Topology):
    """Workers exchange models with their neighbours on a graph only."""

    policy_type: ClassVar[type[Rule]] = GossipRule
    regroups: ClassVar[bool] = True
    # models travel whole, and no server adds up updates
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    replicas: ClassVar[bool] = True
    graph: str
    degree: Count

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        """Raise UsageError if the graph does not suit the number of workers or the sync mode."""
        assert isinstance(sync, GossipRule)
        sync.check(self.rounds(sync, num_workers, seed))

    def rounds(self, sync: GossipRule, num_workers: int, seed: int) -> tuple[Round, ...]:
        """Return the graph by round, with the weights that the sync mode needs."""
        return rounds_of(self.graph, weights_for(sync), self.degree, num_workers, seed)

    @property
    def has_fixed_size(self) -> bool:
        return self.graph not in ANY_SIZE

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        """Return the neighbours of all rounds, and the coordinator."""
        return self.links_among(stage, rank, stage.workers)

    def links_among(self, stage: StageConfig, rank: int, members: Ranks) -> tuple[int, ...]:
        others = members if stage.lead_rank == stage.server else ()
        if rank == stage.server:
            return others
        near = graph_of(stage, members).neighbours[rank]
        return near + ((stage.server,) if others else ())

    def begin(self, stage: StageConfig, rank: int) -> CoordinatorState | RoamingState | RoundState:
        n = stage.num_workers
        if rank == stage.server:
            return CoordinatorState(Progress(n))
        if stage.lead_rank == stage.server:
            return RoamingState(*stage.trainer.init())
        counts = rank == stage.lead_rank or stage.elastic  # another rank may become the lead
        return RoundState(*stage.trainer.init(), progress=Progress(n) if counts else RunProgress(n))

    async def reform(
        self,
        ctx: RankContext,
        stages: Sequence[StageConfig],
        saved: tuple[int, Any] | None,
        epoch: Epoch,
    ) -> tuple[int, Any]:
        first = stages[0]
        if first.lead_rank != first.server:
            return await reform_rounds(ctx, stages, saved, epoch)
        if ctx.rank == first.server:
            return await gather_members(ctx, stages, saved, epoch)
        index, state, _ = await rejoin_members(ctx, stages, saved, epoch)
        state.begin_epoch()
        return index, state

    def role(self, stage: StageConfig, rank: int) -> Loop:
        if rank == stage.server:
            return coordinator
        return stage.sync.worker if isinstance(stage.sync, RoamingRule) else worker


def graph_of(stage: StageConfig, members: Ranks) -> MemberGraph:
    """Return the graph on these workers, see `Gossip.rounds`."""
    topology, sync = stage.topology, stage.sync
    return graph_among(
        topology.graph, weights_for(sync), topology.degree, members, stage.num_workers, stage.seed
    )


def weights_for(sync: GossipRule) -> str:
    """Return the kind of weights that a sync mode needs, see `ashl.topology.graph`."""
    return "columns" if sync.columns else "metropolis"


@dataclass
class RoundState(WorkerState):
    """State of a worker that works in rounds and counts identically on all ranks.

    The lead rank also counts by worker. If the run tolerates failures, every rank does, because it
    may become the lead rank.
    """

    progress: RunProgress = field(default_factory=lambda: RunProgress(0))
    evaluated: ProgressMark = RUN_START  # the last evaluation
    in_time: StateWithinBudget | None = None  # None until a round ends after the budget
    header: GossipHeader = NO_HEADER
    k: int = 0  # rounds of this stage so far
    first: int = 0  # the round with which this epoch began: older messages do not arrive
    # messages that were received before a pause, by the round in which they were sent
    early: dict[int, dict[int, Message]] = field(default_factory=dict)

    def enter(self, stage: StageConfig, members: Members, rank: int, now_s: float = 0.0) -> None:
        is_resumed = self.entered == stage.index
        super().enter(stage, members, rank)
        if not is_resumed:
            self.progress.begin(now_s)
            self.k = 0
            self.begin_epoch(stage, rank)

    def begin_epoch(self, stage: StageConfig, rank: int) -> None:
        """Begin at round k, without messages in flight."""
        self.first = self.k
        self.header = NO_HEADER
        self.early = {}
        self.rule_state = stage.sync.begin(stage, self, rank)

    def copy_to_restart(self) -> Self:
        before = super().copy_to_restart()
        before.progress = self.progress.copy()
        before.early = dict(self.early)
        return before


async def worker(ctx: RankContext, stage: StageConfig, state: RoundState) -> int:
    """Run a worker in rounds: compute, send, receive, merge, until a limit or the lead rank ends
    the stage.

    Returns: the final signal, NEXT, STOP or PAUSE.
    """
    rule, rank, members = stage.sync, ctx.rank, ctx.members
    graph = graph_of(stage, members.ranks)
    state.enter(stage, members, rank, ctx.now)
    while True:
        counted = members.planned
        if state.idle or is_truncated(state.rest):
            moment = "work", stage.index, state.k, state.idle
            work_of_round = partial(work_of_all, stage, members, state)
            counted = ctx.compute_once(members.ranks, moment, work_of_round)
        mark_round(ctx, stage, state)
        k, params = state.k, state.params
        now = GossipRound(ctx, stage, graph, k)
        if rule.early:
            await send_models(ctx, stage, state, await rule.outgoing(now, state, None))
        work = await kept_work(ctx, stage, state)
        if not rule.early:
            await send_models(ctx, stage, state, await rule.outgoing(now, state, work.payload))
        received = await receive_models(ctx, stage, graph, state, k - rule.lag)
        rule.merge(now, state, work.payload, received)
        state.pending = state.before_work = None
        state.idle = ()
        merge_headers(state, rank, [work.loss] if work.steps else [], received)
        late = save_within_budget(ctx, stage, state, params)
        count_round(stage, state, members, counted)
        state.plan_round(stage, members, rank)
        asked = state.header.snapshot_after == k  # read before the lead asks for the next snapshot
        if rank == members.lead_rank:
            decide_ahead(ctx, stage, graph, state, k)
        due = stage.limits.eval_every_s is None and stage.stop_criteria.begin_due_evaluation(
            state, ctx.now
        )
        if (due or asked) and not late:
            emit_model(ctx, state)
        signal = await end_signal(ctx, stage, graph, state)
        if work.steps:
            ctx.record_round(
                stage.index, state.round, work.steps, rule.lag, dropped=late, loss=work.loss
            )
            state.round += 1
        state.k += signal in (GO, PAUSE)
        if signal != GO:
            return signal


def emit_model(ctx: RankContext, state: RoundState) -> None:
    """Emit this rank's model for an evaluation, at the lead rank together with the counts."""
    progress, counts = state.progress, None
    if ctx.rank == ctx.members.lead_rank and isinstance(progress, Progress):
        counts = progress.report()
    ctx.snapshot(state.params, tick=progress.version, counts=counts, without=progress.failed)


def work_of_all(stage: StageConfig, members: Members, state: RoundState) -> Assignments:
    """Return the work of a round, in which the workers in `state.idle` have none."""
    working = members_with_work(stage, members, state.idle)
    work = truncate_round(stage, working, working.planned, state.rest)
    return without_work(work, state.idle)


async def end_signal(
    ctx: RankContext, stage: StageConfig, graph: MemberGraph, state: RoundState
) -> int:
    """End the stage, or pause, if that was decided for this round. All ranks end at the time of the
    last one. Returns: the final signal, or GO.
    """
    reason = stop_reason(stage, state)
    if not reason or (reason == CHECKPOINT and is_truncated(state.rest)):
        return GO
    in_flight = {
        k: await receive_models(ctx, stage, graph, state, k)
        for k in range(max(0, state.k + 1 - stage.sync.lag), state.k + 1)
    }
    if reason == CHECKPOINT:
        state.early = in_flight
        return PAUSE
    for received in in_flight.values():
        stage.sync.merge_in_flight(state, received)
    now_ns = torch.tensor([ctx.now_ns])
    end_ns = await ctx.all_reduce(now_ns, ctx.members.ranks, "max", piggybacked=1)
    return end_piggybacked(ctx, stage, state, reason, int(end_ns))


def stop_reason(stage: StageConfig, state: RoundState) -> str | None:
    """Return the reason if the stage ends, or pauses for a checkpoint, after this round, else None:
    a limit on counts, or the decision of the lead rank.
    """
    if reason := stage.stop_criteria.reached_limit(state.progress):
        return reason
    return DECISIONS[int(state.header.decision)] if state.k >= state.header.last else None


async def send_models(
    ctx: RankContext, stage: StageConfig, state: RoundState, messages: Outgoing
) -> None:
    """Send the messages of this round with the header."""
    for rank, (payload, numbers) in messages.items():
        await ctx.send(rank, stage.tag("gossip", state.k), payload, (*state.header, *numbers))


async def receive_models(
    ctx: RankContext, stage: StageConfig, graph: MemberGraph, state: RoundState, k: int
) -> dict[int, Message]:
    """Receive the messages of round k from all sources, or take those that were received before a
    pause. Return them by sender, in rank order; none from before this epoch.
    """
    if k in state.early:
        return state.early.pop(k)
    sources = stage.sync.sources(graph, ctx.rank, k) if k >= state.first else ()
    return {rank: await ctx.recv(stage.tag("gossip", k), src=rank) for rank in sources}


def merge_headers(state: RoundState, rank: int, own: Sequence[float], received: Received) -> None:
    """Merge the header of this rank and those that it has received into its next header.

    Args: own, the loss of this rank if it has work, else empty.
    """
    header = state.header
    losses = [loss for loss in own if math.isfinite(loss)]
    not_finite = max(header.not_finite, 0 if len(losses) == len(own) else rank + 1)
    # a decision that applied after an earlier round was a pause, which is over
    decided = (header.decision, header.last) if header.last >= state.k else (0, 0)
    snapshot_after = header.snapshot_after
    for message in received.values():
        other = header_of(message)
        if math.isfinite(other.loss):
            losses.append(other.loss)
        if other.last >= state.k:
            decided = max(decided, (other.decision, other.last))
        not_finite = max(not_finite, other.not_finite)
        snapshot_after = max(snapshot_after, other.snapshot_after)
    loss = sum(losses) / len(losses) if losses else math.nan
    state.header = GossipHeader(loss, not_finite, *decided, snapshot_after)


def count_round(stage: StageConfig, state: RoundState, members: Members, work: Assignments) -> None:
    """Count one more round: a merge, and a commit of each worker that has steps in `work`."""
    progress, loss = state.progress, state.header.loss
    if isinstance(progress, Progress):
        # a joining worker without work may have received no loss
        if state.header.not_finite or math.isfinite(loss):
            progress.observe_all(stage.sync.lag, loss, "the workers' loss", commits=1)
        progress.commit_all(work.steps, work.total_samples)
        progress.merge()
    else:
        progress.advance(work.total_steps, work.total_samples, len(members.ranks))
        progress.version += 1
    copy_counts(state, progress)


def copy_counts(state: RoundState, progress: RunProgress) -> None:
    """Set the copies of the counts that local work reads."""
    state.version, state.steps, state.samples = progress.version, progress.steps, progress.samples


def decide_ahead(
    ctx: RankContext, stage: StageConfig, graph: MemberGraph, state: RoundState, k: int
) -> None:
    """Decide at the lead rank whether the stage ends or pauses and whether models are evaluated.
    Put both into the header, with the round after which every rank knows them.
    """
    progress, header = state.progress, state.header
    if header.not_finite:
        why = (
            f"the loss of worker {int(header.not_finite) - 1} became not finite near step"
            f" {progress.steps}"
        )
        progress.diverged = why + stage.sync.suspect
    reason = None  # a decision stands until it has been carried out
    if not header.decision:
        reason = "diverged" if progress.diverged else local_stop(ctx, stage, progress)
    timed = header.snapshot_after <= k and stage.limits.eval_every_s is not None
    snapshot = timed and stage.stop_criteria.begin_due_evaluation(state, ctx.now)
    if reason or snapshot:
        known = k + rounds_to_all(stage.sync, graph, ctx.rank, k + 1)
        if reason:
            header = header._replace(decision=DECISIONS.index(reason), last=known)
        state.header = header._replace(snapshot_after=known) if snapshot else header


def rounds_to_all(rule: RoundRule, graph: MemberGraph, lead_rank: int, first: int) -> int:
    """Return how many rounds a decision of the lead rank takes from round `first`, in which it is
    first sent, until it has reached every rank.
    """
    k = first - rule.lag
    since = {lead_rank: first}  # by informed rank: the first round in which it sends the decision
    unaware = [rank for rank in graph.ranks if rank != lead_rank]
    while unaware:
        informed = {rank for rank, start in since.items() if start <= k}
        reached = [
            rank
            for rank in unaware
            if k >= 0 and not informed.isdisjoint(rule.sources(graph, rank, k))
        ]
        since |= dict.fromkeys(reached, k + rule.lag + 1)
        unaware = [rank for rank in unaware if rank not in since]
        k += 1
    return k + rule.lag - first


class RoundsDone(NamedTuple):
    """Counts that the state donor sends to members without them."""

    index: int  # stage index; beyond the last stage once the run has ended
    k: int  # rounds of that stage
    progress: Progress
    assigned: Any  # as planned after profiling
    in_time: Any  # counts of the last merge within the budget, once a merge has ended later


async def reform_rounds(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    saved: tuple[int, RoundState] | None,
    epoch: Epoch,
) -> tuple[int, RoundState]:
    """Continue as a member of a new epoch: all members go on at the highest round of any of them.

    Args: saved: (stage, state) of this rank's last safe point; None for a joining worker.
    Returns: (stage, state) to continue with.
    """
    is_new = saved is None
    index, state = saved or (0, stages[0].topology.begin(stages[0], ctx.rank))
    version = NO_MODEL if is_new else state.progress.version
    standing = await compare_members(ctx, stages, epoch, index, version)
    counts, decision = await gather_counts(ctx, index, state, epoch, standing)
    if ctx.rank == standing.donor:
        assert isinstance(state.progress, Progress)
        in_time = state.in_time and state.in_time.progress
        known = RoundsDone(index, state.k, state.progress, state.assigned, in_time)
        for rank in standing.outdated:
            model = state.params if rank in standing.joined else None
            await send_state(ctx, rank, epoch, model, known)
    elif ctx.rank in standing.outdated:
        model, known = await receive_state(ctx, stages[0], standing.donor, epoch)
        state.params = model if is_new else state.params
        index, state.progress, state.assigned = known.index, known.progress, known.assigned
        if known.in_time is not None:
            state.in_time = state.in_time or StateWithinBudget(state.params, known.in_time)
        if index < len(stages):
            ranks = survivors(stages[index], state.progress.failed)
            members = shared_members(ctx, stages[index], ranks, epoch.number)
            if state.entered != index and state.before_work is not None:
                state.repeat_work()
            state.enter(stages[index], members, ctx.rank, ctx.now)
            state.progress, state.k = known.progress.copy(), known.k
    if index >= len(stages):
        ctx.time_accounting.close(state.progress.end_ns)
        return index, state
    if state.assigned is not None:
        stages = apply_assignments(stages, *state.assigned)
    correct_counts(ctx, stages[index], state, counts, epoch)
    enter_epoch(ctx, stages[index], state, epoch, standing)
    if decision:  # all members know it, so it holds after this round
        state.header = NO_HEADER._replace(decision=decision, last=state.k)
    return index, state


async def gather_counts(
    ctx: RankContext, index: int, state: RoundState, epoch: Epoch, standing: Standing
) -> tuple[list[list[int]], int]:
    """Exchange how far each worker is, and the decision of the lead rank.

    A member that continues counts its own rounds. A failed or joining worker has the fewest rounds
    that any of these members has counted for it. A decision to pause is taken again, and a decision
    of an earlier stage has been carried out: both are sent as 0.
    Returns: (rounds and steps of each worker, decision as a position in DECISIONS).
    """
    progress = state.progress
    decision = int(state.header.decision) if index == standing.stage else 0
    counts = torch.full((progress.num_workers + 1, 2), torch.iinfo(torch.int64).min)
    counts[-1] = 0 if DECISIONS[decision] == CHECKPOINT else decision
    if ctx.rank not in standing.joined:
        assert isinstance(progress, Progress)
        gone = {*range(progress.num_workers)}.difference(epoch.workers)
        for rank in gone.union(standing.joined, [ctx.rank]):
            counts[rank] = -torch.tensor(progress.rounds_and_steps_of(rank))
    total = await ctx.all_reduce(counts, epoch.workers, "max", piggybacked=counts.numel())
    return (-total[:-1]).tolist(), int(total[-1, 0])


def correct_counts(
    ctx: RankContext, stage: StageConfig, state: RoundState, counts: list[list[int]], epoch: Epoch
) -> None:
    """Set the rounds and steps of each worker, also in the counts saved within the budget."""
    assert isinstance(state.progress, Progress)
    correct = partial(with_counts, state.progress, stage, counts)
    state.progress = ctx.compute_once(epoch.workers, ("counts", epoch.number), correct)
    if state.in_time is not None:
        in_time = with_counts(state.in_time.progress, stage, counts, at_most=True)
        state.in_time = state.in_time._replace(progress=in_time)


def with_counts(
    progress: Progress, stage: StageConfig, counts: list[list[int]], at_most: bool = False
) -> Progress:
    """Return the progress with these rounds and steps of each worker.

    Args: at_most: True if a worker with fewer keeps its own.
    """
    progress = progress.copy()
    for rank, (rounds, steps) in enumerate(counts):
        counted_rounds, counted = progress.rounds_and_steps_of(rank)
        if at_most and steps >= counted:
            continue
        samples = (counted - steps) * stage.worker(rank).batch
        progress.subtract_rounds(rank, counted_rounds - rounds, counted - steps, samples)
    return progress


def enter_epoch(
    ctx: RankContext, stage: StageConfig, state: RoundState, epoch: Epoch, standing: Standing
) -> None:
    """Set the state for a stage with the members of this epoch."""
    is_new = ctx.rank in standing.joined
    before = shared_members(ctx, stage, survivors(stage, state.progress.failed), epoch.number)
    copy_counts(state, state.progress)
    state.plan_round(stage, before, ctx.rank)
    steps = truncate_round(stage, before, before.planned, state.rest).steps
    assert isinstance(state.progress, Progress)
    state.progress = with_members(state.progress, epoch, standing.joined, steps)
    members = shared_members(ctx, stage, survivors(stage, state.progress.failed), epoch.number)
    if is_new:
        state.round, state.step = state.progress.rounds_and_steps_of(ctx.rank)
        state.drawn = state.step * state.batch
    state.begin_epoch(stage, ctx.rank)
    state.idle = standing.idle
    state.plan_round(stage, members_with_work(stage, members, state.idle), ctx.rank)
    if ctx.rank in state.idle:
        state.pending = no_work(stage, state)
    elif state.pending is not None and not state.pending.steps:
        state.pending = None
    elif state.before_work is not None and not suits_round(
        state, work_of_all(stage, members, state), ctx.rank
    ):
        state.repeat_work()
    is_new_lead = is_new or members.lead_rank != before.lead_rank
    if ctx.rank == members.lead_rank and is_new_lead:
        state.evaluated = state.progress.current_mark(ctx.now)

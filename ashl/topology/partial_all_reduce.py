"""Partial all-reduce (P-Reduce): models are averaged in small groups, and who meets whom is a scheduler's choice.

Rule: every H local steps x_i ← (1/g)·Σ_j x_j over the g members of a group; momentum stays local. As a matrix this is
symmetric, doubly stochastic and idempotent, so the mean of all models is conserved. A thin coordinator (rank n) makes
the groups (`ashl.topology.group_generator`) and tells each member to begin once all have asked; no model passes it.

Limit: one group of all workers is local SGD by all-reduce, bit for bit. Source: Luo et al., "Prague: High-Performance
Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples").
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.stage.stage import GO, STOP, Stage, Tally
from ashl.topology import coordinator as judge
from ashl.topology import group_generator as generator
from ashl.topology.group_generator import Group, Groups, Members
from ashl.topology.local_work import Work, WorkerState, local_work

Done = tuple[int, int]  # (steps, samples)
BITS = 52  # of a number in a header that hold members
HEAD = 7  # numbers of a `GroupReply`
PER_NODE = 4  # workers of a machine where nobody says


@option
class PartialAllReduce:
    """Every worker has a model of its own; a group's members average theirs."""

    has_server: ClassVar[bool] = False
    coordinated: ClassVar[bool] = True
    replicas: ClassVar[bool] = True
    workers_per_node: Count | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Words go between the workers and the coordinator; models by all-reduce."""
        return stage.workers if rank == stage.home else (stage.home,)

    def exchange_ns(self, stage: Stage, network: Any, rank: int) -> int:
        """What averaging in the largest possible group takes: all workers."""
        return network.all_reduce_ns(stage.workers, stage.trainer.dense_bytes, 0)

    def begin(self, stage: Stage, rank: int) -> Replica | MakerState:
        """A rank's state before the first stage: the initial model, alike on all workers."""
        if rank == stage.home:
            n = stage.num_workers
            tally = Tally(n, groups=[0] * n, conflicts=0)
            return MakerState(tally, groups=generator.opened(self.nodes(stage), stage.seed), last=[-1] * n)
        return Replica(*stage.trainer.init())

    def nodes(self, stage: Stage) -> tuple[int, ...]:
        """The machine of each worker."""
        if self.workers_per_node is None and stage.nodes is not None:
            return stage.nodes
        return tuple(worker // (self.workers_per_node or PER_NODE) for worker in stage.workers)

    def listed(self, stage: Stage) -> Sequence[Members]:
        """Groups that are known before the run."""
        return stage.sync.listed(self.nodes(stage)) if hasattr(stage.sync, "listed") else ()

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        return coordinator if rank == stage.home else worker


@dataclass
class Replica(WorkerState):
    """A worker with a model of its own."""

    tick: int = 0  # of the last evaluation that it gave its model to


@dataclass(kw_only=True)
class MakerState(judge.CoordinatorState):
    """A coordinator that also makes the groups."""

    entered: int | None = None  # the stage that it is in
    groups: Groups
    last: list[int]  # the group in which each worker was last
    asked: dict[int, Done] = field(default_factory=dict)  # what those who have no group yet have computed
    running: dict[int, tuple[Group, list[Done]]] = field(
        default_factory=dict
    )  # with what its members have, until it is counted


class GroupReply(NamedTuple):
    """What a worker is told, followed by the members of its group. With STOP its work is not used; without members it
    leaves."""

    word: float  # GO or STOP
    group: float
    samples: float  # applied once this group is done: the learning rate follows them
    staleness: float  # how many commits it is behind the foremost worker
    common: float  # whether all members come from the same group, so that they share the model that they started from
    tick: float  # of the evaluation that wants its model
    end_ns: float  # of the stage, with STOP


def as_numbers(members: Members) -> tuple[float, ...]:
    """A set of workers in as few numbers of a header as will do."""
    bits = sum(1 << member for member in members)
    return tuple(float(bits >> low & ((1 << BITS) - 1)) for low in range(0, bits.bit_length(), BITS))


def as_members(numbers: Sequence[float]) -> Members:
    bits = sum(int(number) << (BITS * i) for i, number in enumerate(numbers))
    return tuple(worker for worker in range(bits.bit_length()) if bits >> worker & 1)


async def worker(node: Node, stage: Stage, state: Replica) -> int:
    """Compute on its own model, average with whom it is told to, go on; returns the last word."""
    state.enter(stage, node.rank)
    word = GO
    while word == GO:
        node.mark(stage.index, state)
        work = await local_work(node, stage, state)
        reply, members = await meet(node, stage, state, work)
        word = int(reply.word)
        if word == STOP:
            node.ledger.close(int(reply.end_ns))
        what = {"steps": work.steps, "staleness": int(reply.staleness), "dropped": word == STOP, "loss": work.loss}
        node.round(stage=stage.index, round=state.round, group=list(members), **what)
        state.round += 1
    return word


async def meet(node: Node, stage: Stage, state: Replica, work: Work) -> tuple[GroupReply, Members]:
    """Ask for a group and average in it. Once the stage is over the work is dropped, and the worker takes part in all
    that is still in its buffer: others may wait for it there."""
    body, meta = work.body, (work.steps, work.samples, work.loss)
    while True:
        await node.send(stage.home, stage.tag("ask"), meta=meta)
        message = await node.recv(stage.tag("group"))
        reply, members = GroupReply(*message.meta[:HEAD]), as_members(message.meta[HEAD:])
        if reply.word == STOP:
            body, meta = None, (0, 0, 0.0)
        state.params = await averaged(node, state.params, body, members, bool(reply.common))
        state.samples = int(reply.samples)
        if len(members) > 1 and node.rank == members[0]:
            await node.send(stage.home, stage.tag("done"), meta=(reply.group,))
        if reply.word == GO and reply.tick > state.tick:
            state.tick = int(reply.tick)
            node.snapshot(state.params, tick=state.tick)
        if reply.word == GO or not members:
            return reply, members


async def averaged(node: Node, params: Any, body: Any, members: Members, common: bool) -> Any:
    """(1/g)·Σ_j (x_j + Δ_j), summed in rank order. Members who share x exchange Δ alone: that is the sum of all-reduce,
    to the last bit."""
    mine = params if body is None else params + body
    if len(members) < 2:
        return mine
    if common:
        return params + await node.all_reduce(body * (1 / len(members)), members)
    return await node.all_reduce(mine * (1 / len(members)), members)


async def coordinator(node: Node, stage: Stage, state: MakerState) -> int:
    """Make groups until the stage is over, then serve those that were made; returns the last word."""
    tally = state.tally
    if state.entered != stage.index:
        state.entered = stage.index
        tally.begin(node.now)
    reason = ahead = None
    while reason is None:
        node.mark(stage.index, state)
        wakes = stage.sync.wakes(state.groups) if hasattr(stage.sync, "wakes") else None
        before_s = stage.deadline_s if wakes is None else min(stage.deadline_s, wakes / 1e9)
        message = await node.recv(stage.tag("done"), stage.tag("ask"), before_s=before_s)
        node.ledger.cut()  # nobody asks for the coordinator's rounds, so they are not kept
        if message is None and before_s == stage.deadline_s:
            reason = "seconds"
            break
        if message is not None and message.tag[0] == "ask":
            tally.observe(message.src, max(tally.clocks) - tally.clocks[message.src], message.meta[2])
        elif message is not None:
            count(node, stage, state, int(message.meta[0]))
        _, reason = judge.verdict(node, stage, tally)
        if reason:
            ahead = message  # judged before anybody is told to go on
            break
        await take_in(node, stage, state, message)
        _, reason = judge.verdict(node, stage, tally)
    await drain(node, stage, state, ahead)
    end = {"end_ns": tally.end_ns, "reason": reason}
    node.emit("stage", stage=stage.index, name=stage.plan.name, **end, **tally.report())
    node.ledger.close(tally.end_ns)
    return STOP


async def take_in(node: Node, stage: Stage, state: MakerState, message: Message | None) -> None:
    """A worker asks, a group is done, or (None) a moment has come that the scheduler waited for."""
    now_ns = node.now_ns
    if message is None:
        state.groups, started = generator.woken(state.groups, stage.sync, now_ns)
    elif message.tag[0] == "done":
        group, _ = state.running.pop(int(message.meta[0]))
        state.groups, started = generator.done(state.groups, stage.sync, group, now_ns)
    else:
        state.asked[message.src] = (int(message.meta[0]), int(message.meta[1]))
        state.groups, started = generator.request(state.groups, stage.sync, message.src, now_ns)
    while started:
        group, *started = started
        work = [state.asked.pop(member) for member in group.members]
        state.running[group.id] = (group, [] if state.groups.closed else work)
        await begin(node, stage, state, group, sum(samples for _, samples in work))
        if len(group.members) == 1:  # nobody to wait for
            count(node, stage, state, group.id)
            del state.running[group.id]
            state.groups, more = generator.done(state.groups, stage.sync, group, now_ns)
            started += more


async def begin(node: Node, stage: Stage, state: MakerState, group: Group, samples: int) -> None:
    """Tell the members, who have all come."""
    tally, over = state.tally, state.groups.closed
    common = not over and len({state.last[member] for member in group.members}) == 1
    for member in group.members:
        state.last[member] = group.id
        behind = max(tally.clocks) - tally.clocks[member]
        word = STOP if over else GO
        applied = tally.samples + (0 if over else samples)
        reply = GroupReply(word, group.id, applied, behind, common, state.ticks, tally.end_ns)
        await node.send(member, stage.tag("group"), meta=(*reply, *as_numbers(group.members)))


def count(node: Node, stage: Stage, state: MakerState, number: int) -> None:
    """What the members of this group had computed is now part of their models."""
    tally, (group, work) = state.tally, state.running[number]
    if not work:  # counted already, or dropped
        return
    assert tally.groups is not None
    tally.version += 1
    tally.conflicts = state.groups.conflicts
    for member, (steps, samples) in zip(group.members, work, strict=True):
        tally.commit(member, steps, samples)
        tally.groups[member] += len(group.members) > 1
    state.running[number] = (group, [])
    if stage.due(tally, node.now):
        state.ticks += 1
        node.snapshot(None, tick=state.ticks, **tally.report())


async def drain(node: Node, stage: Stage, state: MakerState, message: Message | None) -> None:
    """The stage ended now, with this message not taken in yet. Groups that run count, what else was computed is
    dropped; who is still expected in a group averages in it, which leaves the mean of all models as it is, then leaves.
    """
    tally, end_ns = state.tally, node.now_ns
    tally.end_ns = end_ns
    for number in state.running:
        count(node, stage, state, number)
    for worker, (steps, _) in state.asked.items():
        tally.drop(worker, steps)
    state.groups, left = generator.dismissed(generator.closed(state.groups))
    gone = 0
    while True:
        for worker in left:
            reply = GroupReply(STOP, -1, tally.samples, 0, False, state.ticks, end_ns)
            await node.send(worker, stage.tag("group"), meta=reply)
        gone += len(left)
        if gone == stage.num_workers:
            return
        message = message or await node.recv(stage.tag("done"), stage.tag("ask"))
        if message.tag[0] == "ask" and message.start_ns <= end_ns:
            tally.drop(message.src, int(message.meta[0]))
        await take_in(node, stage, state, message)
        state.groups, left = generator.dismissed(state.groups)
        message = None

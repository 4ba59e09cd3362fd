"""Several servers: each holds a piece of the model behind a port of its own, and merges what comes for it.

Rule: the model is cut into as many pieces as there are servers. Each of them is a parameter server for its piece, with
counts of its own: it takes in a worker's piece of an update, merges, and answers with its piece of the model; a worker
goes on once all have answered. So n pushes of S bytes at once take n·S/s at each of s ports instead of n·S at one; who
sends to whom first goes round, so that all ports are busy from the start. What a worker does next is the first
server's to say, and so is when the run ends, or is evaluated: it tells the others, and each shows its piece as it was
after as many merges. What is merged elsewhere beyond that, is in no model.

Limit: one server is the parameter server; and where all wait for all, so are several, bit for bit. Where nobody waits,
each piece has its own order of pushes, as in such systems: the counts are the first server's.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; pieces without a common
order as in Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.runtime.effects import Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.sums import piece, together
from ashl.stage.rule import OUTER, WEIGHTS, Loop, Network, Rule, Topology
from ashl.stage.stage import GO, STOP, Stage
from ashl.stage.tally import Tally
from ashl.topology.dismissal import dismiss
from ashl.topology.ending import leave, record_end, verdict, within
from ashl.topology.local_work import WorkerState
from ashl.topology.merging import receive, reply, rule_of
from ashl.topology.parameter_server import UPDATES, ServerRule, ServerState
from ashl.topology.replies import Pull


@option
class ShardedServer(Topology):
    """Ranks n, n + 1 … hold a piece of the model each."""

    asks: ClassVar[type[Rule]] = ServerRule
    carries: ClassVar[frozenset[str]] = frozenset({WEIGHTS, OUTER})
    has_server: ClassVar[bool] = True
    servers: Count
    cut: Literal["bytes", "layers"]

    def bounds(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The piece [start, stop) of each server, for layers of these sizes. Raises UsageError."""
        d = sum(sizes)
        ends = list(range(d + 1))
        if self.cut == "layers":
            ends = [0]
            for size in sizes:
                ends.append(ends[-1] + size)
        if self.servers >= len(ends):
            raise UsageError(
                f"topology.servers={self.servers}, and the model has {len(ends) - 1} "
                f"{'layers' if self.cut == 'layers' else 'parameters'} to share out; take no more servers than that"
                + (", or topology.cut=bytes" if self.cut == "layers" else "")
            )
        cuts = [0]
        for k in range(1, self.servers):  # as near to equal as can be, and nothing empty
            left = range(cuts[-1] + 1, len(ends) - (self.servers - k))
            cuts.append(min(left, key=lambda at: abs(ends[at] - d * k / self.servers)))
        return list(pairwise(ends[at] for at in (*cuts, len(ends) - 1)))

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        return self.servers

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        servers = all_servers(stage)
        if rank < stage.server:
            return servers
        return (*stage.workers, *(servers[1:] if rank == stage.server else servers[:1]))

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a push and a pull take, uncontended: all pieces go through the worker's port."""
        nbytes = stage.trainer.dense_bytes
        return network.transfer_ns(rank, stage.server, nbytes) + network.transfer_ns(stage.server, rank, nbytes)

    def begin(self, node: Node, stage: Stage) -> ShardedWorker | ServerState:
        params, moments = stage.trainer.init()
        if node.rank < stage.server:
            return ShardedWorker(params, moments, versions=[0] * self.servers)
        start, stop = stage.once(pieces_of)[node.rank - stage.server]
        own = tuple(moment[start:stop] if moment.dim() else moment for moment in moments)
        return ServerState(piece(params, start, stop), own, Tally(stage.num_workers))

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank < stage.server:
            return worker
        return first if rank == stage.server else other


@dataclass
class ShardedWorker(WorkerState):
    """A worker with a model whose pieces come from several servers."""

    versions: list[int] = field(default_factory=list)  # of each piece


def pieces_of(stage: Stage) -> list[tuple[int, int]]:
    """The piece [start, stop) of the model that each server holds."""
    assert isinstance(stage.topology, ShardedServer)
    return stage.topology.bounds([layer.size for layer in stage.layout])


def own_part(stage: Stage, rank: int) -> Stage:
    """The stage as it is for the piece of one server."""
    start, stop = stage.once(pieces_of)[rank - stage.server]
    return replace(stage, size=stop - start)


def all_servers(stage: Stage) -> tuple[int, ...]:
    return tuple(range(stage.server, stage.server + stage.topology.servers))


def told(stage: Stage) -> Tag:
    """Of what the first server says to the others: (version, 0) that it is evaluated; (version, STOP, when) the end."""
    return stage.tag("first")


async def worker(node: Node, stage: Stage, state: ShardedWorker) -> int:
    """Compute on the model last pulled, push its pieces, wait for all answers; returns the last word."""
    state.enter(stage, node.rank)
    servers, pieces, push, pull = all_servers(stage), stage.once(pieces_of), stage.tag("push"), stage.tag("pull")
    turn = [(node.rank + k) % len(servers) for k in range(len(servers))]
    word = GO
    while word == GO:
        work, body, loss = await UPDATES.produce(node, stage, state)
        for k in turn:
            meta = (work.steps, work.samples, loss, state.versions[k], work.step_s, state.pull_s)
            await node.send(servers[k], push, piece(body, *pieces[k]), meta)
        asked, answers = node.now, [await node.recv(pull, src=server) for server in servers]
        said = [Pull(*answer.meta) for answer in answers]
        word = int(max(reply.word for reply in said))
        if any(answer.body is not None for answer in answers):
            parts = zip(answers, pieces, strict=True)
            state.params = together([piece(state.params, *at) if m.body is None else m.body for m, at in parts])
        state.pull_s = node.now - max(asked, min(answer.start_ns for answer in answers) / 1e9)
        state.versions = [int(reply.version) for reply in said]
        reply = said[0]
        state.version, state.steps, state.samples = state.versions[0], int(reply.steps), int(reply.samples)
        state.local_steps, state.ratio, state.interval_s = int(reply.local_steps), reply.ratio, reply.interval_s
        state.batch = int(reply.batch) or state.batch
        if word == STOP:
            for k in (k for k, reply in enumerate(said) if reply.word == GO):  # it has not heard that the run is over
                await node.send(servers[k], push, None, (0, 0, 0.0, state.versions[k], 0.0, 0.0))
                said.append(Pull(*(await node.recv(pull, src=servers[k])).meta))
            leave(node, stage, word, int(max(reply.end_ns for reply in said)))
        node.round(stage.index, state.round, work.steps, int(reply.staleness), dropped=bool(reply.dropped), loss=loss)
        state.round += 1
    return word


async def answer(node: Node, stage: Stage, state: ServerState, without: Sequence[int] = ()) -> None:
    """Let go who may. Each server begins with other workers, lest all servers send to one at once."""
    n, place = stage.num_workers, node.rank - stage.server
    shift = place * n // stage.topology.servers
    ranks = set(rule_of(stage).admit(state.rule_state, state.tally)) - set(without)
    for rank in sorted(ranks, key=lambda rank: (rank - shift) % n):
        await reply(node, stage, state, rank)


async def first(node: Node, stage: Stage, state: ServerState) -> int:
    """At the server that counts and judges: merge and answer until the run is over; returns the last word."""
    tally, push, others = state.tally, stage.tag("push"), all_servers(stage)[1:]
    stage = own_part(stage, node.rank)
    state.enter(stage, node.now)
    while state.word == GO:
        message = await node.recv(push, before_s=stage.judge.deadline_s)
        node.ledger.cut()
        if message is None:
            state.word, state.reason = STOP, "seconds"
            break
        if await receive(node, stage, state, message) and stage.judge.take(state, node.now):
            for server in others:
                await node.send(server, told(stage), None, (tally.version, GO))
            node.snapshot(state.params, tick=tally.version if others else None, counts=tally.report())
        state.word, state.reason = verdict(node, stage, tally)
        if state.word == GO:
            await answer(node, stage, state)
    end_ns = within(stage, node.now_ns)
    for server in others:
        await node.send(server, told(stage), None, (tally.version, STOP, end_ns))
    await dismiss(node, stage, state, STOP, end_ns)
    record_end(node, stage, tally, state.reason)
    return state.word


async def other(node: Node, stage: Stage, state: ServerState) -> int:
    """At the others: merge and answer, until the first one says that the run is over and as much is merged here, or
    nobody is left who could push."""
    tally, push, stage = state.tally, stage.tag("push"), own_part(stage, node.rank)
    state.enter(stage, node.now)
    kept, due, last, leaving = {tally.version: state.params}, list[int](), None, list[int]()
    while last is None or not (tally.version >= last[0] or tally.diverged or len(tally.waiting) == stage.num_workers):
        message: Message = await node.recv(push, told(stage))
        node.ledger.cut()
        if message.tag == push and not message.meta[0]:  # of a worker that has heard of the end
            leaving.append(message.src)
            tally.arrive(message.src, 0, late=True)
        elif message.tag == push:
            if await receive(node, stage, state, message):
                kept[tally.version] = state.params
                kept.pop(tally.version - 2 * stage.num_workers, None)  # nobody is further behind
        elif message.meta[1] == STOP:
            last = int(message.meta[0]), int(message.meta[2])
        else:
            due.append(int(message.meta[0]))
        for version in [version for version in due if version <= tally.version]:
            node.snapshot(kept.get(version, state.params), tick=version)
            due.remove(version)
        if last is None:
            await answer(node, stage, state, leaving)
    for version in due:  # what was dropped here, and not at the first one, never comes
        node.snapshot(state.params, tick=version)
    state.params, state.word = kept.get(last[0], state.params), STOP
    await dismiss(node, stage, state, STOP, last[1])
    return STOP

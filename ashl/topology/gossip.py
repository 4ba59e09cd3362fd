"""Gossip: every worker holds a model of its own and exchanges it with its neighbours on a graph.

Rule (D-PSGD): x_i ← Σ_j w_ij·x_j + Δ_i, with Δ_i what the worker's own optimizer did between two exchanges. Whom to
hear from and what to make of it is the sync mode's. What is evaluated is the mean of all models; momentum stays local.

Synchronous modes go round by round, each worker as soon as it has heard from its sources of that round: no server, no
barrier. Counts are functions of the round, so that all ranks count alike. What rank 0 alone can know (seconds,
evaluations, that a loss is no number) rides on the messages: its verdict holds after the round by which it has reached
everyone, which rank 0 works out from the graph. Such a mode has

    columns, early, lag         push-sum weights; models leave before the local work; rounds that messages may be late
    check(rounds)               where a graph may be wrong for it
    begin(stage, state, rank)   the rule's own state in this stage
    sources(stage, rank, k)                           whom a rank hears from in round k
    tell(node, stage, state, k, delta)                awaited; {rank: (body, numbers)} to send in round k
    merge(stage, state, rank, k, delta, heard)        {rank: message} of round k − lag and Δ become the model
    settle(state, heard)        where messages may be late: the last ones, at the end of a stage

Asynchronous modes are `coordinated`: they have their own `worker`, and the coordinator of `ashl.topology.coordinator`.

Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage, Tally
from ashl.topology.all_reduce import REASONS, ended, judge
from ashl.topology.coordinator import CoordinatorState, RoamingState, coordinator
from ashl.topology.graph import Edge, Round, edges_of, rounds_of, sources_of
from ashl.topology.local_work import WorkerState, local_work

VERDICTS = (*REASONS, "diverged")


@option
class Gossip:
    """Workers talk to their neighbours on a graph, and to nobody else."""

    has_server: ClassVar[bool] = False
    replicas: ClassVar[bool] = True
    graph: str
    weights: Literal["metropolis", "uniform"]
    degree: Count

    def check(self, sync: Any, num_workers: int, seed: int) -> None:
        """Raises UsageError where the graph is wrong for so many workers or for this sync mode."""
        weights = "columns" if getattr(sync, "columns", False) else self.weights
        rounds = rounds_of(self.graph, weights, self.degree, num_workers, seed)
        if hasattr(sync, "check"):
            sync.check(rounds)

    def round(self, stage: Stage, k: int) -> Round:
        """The graph of round k, with the weights that the stage's sync mode needs."""
        weights = "columns" if getattr(stage.sync, "columns", False) else self.weights
        rounds = rounds_of(self.graph, weights, self.degree, stage.num_workers, stage.seed)
        return rounds[k % len(rounds)]

    def edges(self, stage: Stage) -> tuple[Edge, ...]:
        """The edges of all rounds, whatever their direction."""
        return edges_of(self.graph, self.degree, stage.num_workers, stage.seed)

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The neighbours of all rounds, and the coordinator."""
        others = stage.workers if stage.home == stage.server else ()
        if rank == stage.server:
            return others
        edges = self.edges(stage)
        return tuple(sorted(i + j - rank for i, j in edges if rank in (i, j))) + ((stage.server,) if others else ())

    def exchange_ns(self, stage: Stage, network: Any, rank: int) -> int:
        """What one exchange takes, uncontended: the slowest transfer from a neighbour, or there and back from whom a
        worker asks."""
        asks = hasattr(stage.sync, "peers")
        near = stage.sync.peers(stage, rank) if asks else sources_of(self.edges(stage), stage.num_workers)[rank]
        dense = stage.trainer.dense_bytes
        return (1 + asks) * max((network.transfer_ns(peer, rank, dense) for peer in near), default=0)

    def begin(self, stage: Stage, rank: int) -> CoordinatorState | RoamingState | RoundState:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        if rank == stage.server:
            return CoordinatorState(Tally(stage.num_workers))
        if stage.home == stage.server:
            return RoamingState(*stage.trainer.init())
        return RoundState(*stage.trainer.init(), tally=Tally(stage.num_workers))

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        if rank == stage.server:
            return coordinator
        return stage.sync.worker if stage.home == stage.server else worker


class GossipHeader(NamedTuple):
    """What rides on every message: all that is known of the run so far."""

    loss: float  # mean of the sender's loss and of those that it heard of
    not_finite: float = 0  # 1 + the rank whose loss is no number; 0 = none
    verdict: float = 0  # of rank 0, as a place in VERDICTS
    last: float = 0  # the round after which it holds
    snapshot_after: float = -1  # the round after which all hand in their models


NOTHING_HEARD = GossipHeader(math.nan)


@dataclass
class RoundState(WorkerState):
    """A worker that goes round by round, and counts as all others do."""

    tally: Tally = field(default_factory=lambda: Tally(0))
    header: GossipHeader = NOTHING_HEARD
    k: int = 0  # rounds of this stage so far

    def enter(self, stage: Stage, rank: int, now_s: float = 0.0) -> None:
        again = self.entered == stage.index
        super().enter(stage, rank)
        if not again:
            self.tally.begin(now_s)
            self.k, self.header = 0, NOTHING_HEARD
            self.rule_state = stage.sync.begin(stage, self, rank)


async def worker(node: Node, stage: Stage, state: RoundState) -> int:
    """Work, tell, hear, merge; round by round, until the counts or a verdict of rank 0 say otherwise. Returns the last
    word."""
    state.enter(stage, node.rank, node.now)
    rule, rank = stage.sync, node.rank
    while True:
        node.mark(stage.index, state)
        k = state.k
        if rule.early:
            await post(node, stage, state, k, None)
        work = await local_work(node, stage, state)
        if not rule.early:
            await post(node, stage, state, k, work.body)
        heard = await hear(node, stage, state, k - rule.lag)
        rule.merge(stage, state, rank, k, work.body, heard)
        learn(state, rank, work.loss, heard)
        count(stage, state, rank)
        if rank == 0:
            look_ahead(node, stage, state, k)
        due = stage.limits.eval_every_s is None and stage.due(state.tally, node.now)
        if due or state.header.snapshot_after == k:
            node.snapshot(state.params, tick=state.tally.version, **(state.tally.report() if rank == 0 else {}))
        reason = stage.spent(state.tally)
        if not reason and state.header.verdict and k >= state.header.last:
            reason = VERDICTS[int(state.header.verdict)]
        if reason:
            for late in range(max(0, k + 1 - rule.lag), k + 1):
                rule.settle(state, await hear(node, stage, state, late))
            word = await leave(node, stage, state, reason)
        what = {"steps": work.steps, "staleness": rule.lag, "dropped": False, "loss": work.loss}
        node.round(stage=stage.index, round=state.round, **what)
        state.round += 1
        if reason:
            return word
        state.k += 1


async def post(node: Node, stage: Stage, state: RoundState, k: int, delta: Any) -> None:
    """Tell whoever listens in round k, and pass on what rank 0 has decided."""
    told = await stage.sync.tell(node, stage, state, k, delta)
    for rank, (body, numbers) in told.items():
        await node.send(rank, stage.tag("gossip", k), body, (*state.header, *numbers))


async def hear(node: Node, stage: Stage, state: RoundState, k: int) -> dict[int, Message]:
    """The messages of round k, in rank order."""
    sources = stage.sync.sources(stage, node.rank, k) if k >= 0 else ()
    return {rank: await node.recv(stage.tag("gossip", k), src=rank) for rank in sources}


def numbers_of(message: Message) -> tuple[float, ...]:
    """What the sync rule sent beside the body."""
    return message.meta[len(GossipHeader._fields) :]


def learn(state: RoundState, rank: int, loss: float, heard: Mapping[int, Message]) -> None:
    """Put together what this rank knows and what it was told."""
    tales = [GossipHeader(*message.meta[: len(GossipHeader._fields)]) for message in heard.values()]
    known = [state.header, *tales]
    losses = [value for value in (loss, *(told.loss for told in tales)) if math.isfinite(value)]
    verdict, last = max((told.verdict, told.last) for told in known)
    state.header = GossipHeader(
        loss=sum(losses) / len(losses) if losses else math.nan,
        not_finite=max(0 if math.isfinite(loss) else rank + 1, *(told.not_finite for told in known)),
        verdict=verdict,
        last=last,
        snapshot_after=max(told.snapshot_after for told in known),
    )


def count(stage: Stage, state: RoundState, rank: int) -> None:
    """All workers have merged once more. Rank 0 keeps the books by worker, the others only what ends a stage."""
    tally, workers = state.tally, stage.plan.workers
    if rank == 0:
        for i, worker in enumerate(workers):
            tally.observe(i, stage.sync.lag, state.header.loss)
            tally.commit(i, worker.local_steps, worker.local_steps * worker.batch)
    else:
        tally.steps += sum(worker.local_steps for worker in workers)
        tally.samples += sum(worker.local_steps * worker.batch for worker in workers)
        tally.total_commits += len(workers)
    tally.version += 1
    state.samples = tally.samples


def look_ahead(node: Node, stage: Stage, state: RoundState, k: int) -> None:
    """Rank 0 alone: what all others have to know, and the round after which they do."""
    tally, told = state.tally, state.header
    if told.not_finite:
        why = f"the loss of worker {int(told.not_finite) - 1} became no number near step {tally.steps}"
        tally.diverged = why + getattr(stage.sync, "suspect", "")
    word = "diverged" if tally.diverged else judge(node, stage, tally)
    look = told.snapshot_after <= k and stage.limits.eval_every_s is not None and stage.due(tally, node.now)
    if (word and not told.verdict) or look:
        known = k + rounds_to_all(stage, k + 1)
        if word and not told.verdict:
            told = told._replace(verdict=VERDICTS.index(word), last=known)
        state.header = told._replace(snapshot_after=known) if look else told


def rounds_to_all(stage: Stage, first: int) -> int:
    """How many rounds it takes what rank 0 sends from round `first` on to reach everyone."""
    rule, n, k = stage.sync, stage.num_workers, first
    since = {0: first}  # the round from which on a rank passes it on
    while len(since) < n:
        knew = {rank for rank, start in since.items() if start <= k - rule.lag}
        for rank in set(stage.workers) - set(since):
            if k - rule.lag >= 0 and knew & set(rule.sources(stage, rank, k - rule.lag)):
                since[rank] = k + 1
        k += 1
    return k - first


async def leave(node: Node, stage: Stage, state: RoundState, reason: str) -> int:
    """The stage ended with this round; at the moment when the last worker had finished it."""
    moment = await node.all_reduce(torch.tensor([node.now_ns]), stage.workers, "max", riders=1)
    state.tally.end_ns = int(moment)
    return ended(node, stage, state.tally, reason)


def mixed(row: Mapping[int, float], rank: int, own: Any, heard: Mapping[int, Message]) -> Any:
    """Σ_j w_ij·x_j in rank order, a new vector: where all rows are equal, so are the results, bit for bit."""
    if isinstance(own, SizeOnly):
        return own
    total = None
    for j, weight in row.items():
        body = own if j == rank else heard[j].body
        total = body * weight if total is None else total.add_(body, alpha=weight)
    return total

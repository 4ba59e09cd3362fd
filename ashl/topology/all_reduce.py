"""All-reduce: every worker holds the model, and each merge is one sum over all of them.

Rule: w_i ← w_i + Σ_j c_j·Δ_j, or one optimizer step on Σ_j c_j·g_j, the same on every worker. A ring moves
2(n − 1)/n of the model each way. Nobody can be late: a merge waits for the slowest.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ashl.option import option
from ashl.runtime.node import Node
from ashl.stage.stage import NEXT, STOP, Stage, Tally
from ashl.topology.exchange import exchanged
from ashl.topology.local_work import WorkerState, local_work

# What rank 0 alone can know, as the number that rides on the next exchange: why the run ends, or that the stage does
REASONS = (None, "seconds", "target_accuracy", "target_loss", "interrupted", "next")


@option
class AllReduce:
    """No server: the workers' bodies are summed in rank order, or gathered where they do not add up (see
    `topology.exchange`), and everybody keeps the sum."""

    has_server: ClassVar[bool] = False

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Collectives only, and no point-to-point links, unless the codec's own protocol needs some."""
        return stage.codec.links(stage, rank) if hasattr(stage.codec, "links") else ()

    def exchange_ns(self, stage: Stage, network: Any, rank: int) -> int:
        """What a merge takes: a sum on its way, or a ring of bodies that goes round once."""
        flags, n = stage.codec.flags, stage.num_workers
        nbytes = stage.codec.payload(stage.worker(rank).compression_ratio, stage.trainer.dense_bytes // 4)
        if flags.lossless or flags.linear or hasattr(stage.codec, "collective"):
            return network.all_reduce_ns(stage.workers, nbytes, 0)
        return network.all_reduce_ns(stage.workers, n * nbytes, 0) // 2

    def begin(self, stage: Stage, rank: int) -> PeerState:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        return PeerState(*stage.trainer.init(), tally=Tally(stage.num_workers))

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        return worker


@dataclass
class PeerState(WorkerState):
    """A worker that also counts, alike on every rank."""

    tally: Tally = field(default_factory=lambda: Tally(0))
    word: str | None = None  # what rank 0 will tell the others with the next exchange
    outer_state: Any = None  # of the aggregation rule
    receivers: dict[int, Any] = field(default_factory=dict)  # the codec's state by worker, where bodies are gathered
    reduced: Any = None  # of a codec that reduces

    def enter(self, stage: Stage, rank: int, now_s: float = 0.0) -> None:
        if self.entered != stage.index:
            self.tally.begin(now_s)
            self.receivers, self.reduced = {}, None
            if stage.resets:
                self.outer_state = None
        super().enter(stage, rank)


async def worker(node: Node, stage: Stage, state: PeerState) -> int:
    """Compute, sum with all others, merge; until the counts, or a word of rank 0, say otherwise. Returns the last word.

    What rank 0 alone can know (seconds, evaluations) reaches the others one exchange later.
    """
    state.enter(stage, node.rank, node.now)
    tally, group = state.tally, stage.workers
    weight = stage.weights(group)[node.rank]
    workers = [stage.worker(rank) for rank in group]
    sizes = [stage.samples_of(rank) for rank in group]
    counts = [1 if stage.sync.exchange == "gradient" else w.local_steps for w in workers]
    while True:
        node.mark(stage.index, state)
        work = await local_work(node, stage, state)
        body = stage.aggregate.clip(work.body)
        said = REASONS.index(state.word) if node.rank == 0 else 0
        update, mean_loss, word = await exchanged(node, stage, state, body, weight, (work.loss / len(group), said))
        for rank in group:
            tally.observe(rank, 0, mean_loss, mean=True)
        if not tally.diverged:
            merge(stage, state, update)
            for rank, steps in zip(group, counts, strict=True):
                tally.commit(rank, steps, steps * sizes[rank])
            tally.version += 1
            state.samples = tally.samples
        reason = stage.over(tally) or REASONS[word]
        if reason and stage.topology.links(stage, node.rank):  # messages do not end everywhere at once, but stages do
            await node.all_reduce(torch.zeros(1), group, riders=1)
        what = {"steps": work.steps, "staleness": 0, "dropped": False, "loss": work.loss}
        node.round(stage=stage.index, round=state.round, **what)
        state.round += 1
        if node.rank == 0 and stage.due(tally, node.now):
            node.snapshot(state.params, **tally.report())
        if reason:
            return leave(node, stage, state, reason)
        if node.rank == 0:
            state.word = judge(node, stage, tally)


def judge(node: Node, stage: Stage, tally: Tally) -> str | None:
    """Rank 0 alone: what it tells the others with the next exchange."""
    if word := node.stopping or ("seconds" if node.now >= stage.deadline_s else None):
        return word
    return "next" if stage.reached(tally, node.now, node.scores) else None


def leave(node: Node, stage: Stage, state: PeerState, reason: str) -> int:
    """The stage ended with this merge."""
    state.tally.end_ns, state.word = node.now_ns, None
    return ended(node, stage, state.tally, reason)


def ended(node: Node, stage: Stage, tally: Tally, reason: str) -> int:
    """Close the books of a stage that rank 0 judges; returns the last word."""
    word = NEXT if reason == "next" and stage.following else STOP
    if node.rank == 0:
        rule = stage.reached(tally, node.now, node.scores) or next(iter(stage.plan.until), reason)
        end = {"end_ns": tally.end_ns, "reason": rule if reason == "next" else reason}
        node.emit("stage", stage=stage.index, name=stage.plan.name, **end, **tally.report())
    if word == NEXT:
        node.emit("border", stage=stage.index, totals_ns=node.ledger.until(tally.end_ns))
    else:
        node.ledger.close(tally.end_ns)
    return word


def merge(stage: Stage, state: PeerState, total: Any) -> None:
    """The same arithmetic on every rank, and the same as a server's."""
    state.outer_state, update = stage.aggregate.outer(state.outer_state, total)
    if stage.sync.exchange == "gradient":
        lr = stage.trainer.rate(state.tally.samples)
        state.moments, state.params = stage.trainer.apply(state.params, state.moments, update, lr)
    else:
        state.params = state.params + update

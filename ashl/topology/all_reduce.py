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
from ashl.runtime.effects import Hollow
from ashl.runtime.node import Node
from ashl.stage import Clock, Stage
from ashl.topology.local_work import WorkerState, local_work

# What rank 0 alone can know, as the number that rides on the next exchange
WORDS = (None, "seconds", "target_accuracy", "target_loss", "interrupted")
RIDERS = 2


@option
class AllReduce:
    """No server: the workers' bodies are summed in rank order and everybody keeps the sum."""

    has_server: ClassVar[bool] = False

    def links(self, rank: int, num_workers: int) -> tuple[int, ...]:
        """Collectives only: no point-to-point links."""
        return ()

    def begin(self, stage: Stage, rank: int) -> PeerState:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        return PeerState(*stage.trainer.init(), clock=Clock(stage.num_workers))

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        return worker


@dataclass
class PeerState(WorkerState):
    """A worker that also counts, alike on every rank."""

    clock: Clock = field(default_factory=lambda: Clock(0))
    word: str | None = None  # what rank 0 will tell the others with the next exchange


async def worker(node: Node, stage: Stage, state: PeerState) -> str:
    """Compute, sum with all others, merge; until the counts, or a word of rank 0, say otherwise."""
    clock, group = state.clock, stage.workers
    weight = stage.weights(group)[node.rank]
    batches = [stage.worker(rank).batch for rank in group]
    steps_by = [1 if stage.sync.exchange == "gradient" else stage.worker(rank).local_steps for rank in group]
    while True:
        body, loss, steps = await local_work(node, stage, state)
        packed = pack(body, weight, loss / len(group), WORDS.index(state.word) if node.rank == 0 else 0)
        total = await node.all_reduce(packed, group, riders=RIDERS)
        update, mean_loss, word = unpack(total)
        for rank in group:
            clock.observe(rank, 0, mean_loss)
        if not clock.diverged:
            merge(stage, state, update)
            for rank in group:
                clock.commit(rank, steps_by[rank], steps_by[rank] * batches[rank])
            clock.version += 1
            state.samples = clock.samples
        node.round(stage=stage.index, round=state.round, steps=steps, staleness=0, dropped=False, loss=loss)
        state.round += 1
        if node.rank == 0 and stage.due(clock, node.now):
            node.snapshot(state.params, **clock.report())
        if reason := stage.over(clock) or WORDS[word]:
            clock.end_ns = node.now_ns
            if node.rank == 0:
                end = {"end_ns": clock.end_ns, "reason": reason}
                node.emit("stage", stage=stage.index, name=stage.plan.name, **end, **clock.report())
            node.ledger.close(clock.end_ns)
            return reason
        if node.rank == 0:
            state.word = node.stopping or ("seconds" if node.now >= stage.deadline_s else None)


def merge(stage: Stage, state: PeerState, update: Any) -> None:
    """The same arithmetic on every rank, and the same as a server's."""
    if stage.sync.exchange == "gradient":
        lr = stage.trainer.rate(state.clock.samples)
        state.moments, state.params = stage.trainer.apply(state.params, state.moments, update, lr)
    else:
        state.params = state.params + update


def pack(body: Any, weight: float, loss: float, word: int) -> Any:
    """c·body and two scalars that ride along, in one vector."""
    if isinstance(body, Hollow):
        return body
    packed = torch.empty(body.numel() + RIDERS)
    torch.mul(body, weight, out=packed[:-RIDERS])
    packed[-2], packed[-1] = loss, word
    return packed


def unpack(total: Any) -> tuple[Any, float, int]:
    """(update, mean loss, word)."""
    if isinstance(total, Hollow):
        return total, 0.0, 0
    loss, word = total[-RIDERS:].tolist()
    return total[:-RIDERS], loss, int(word)

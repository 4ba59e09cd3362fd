"""Parameter server: workers push what they computed, the server merges it and answers with the model.

Rule: on a push of worker i the server folds it into the model (`aggregate`), then answers every worker that may go on
(`sync.admit`). Traffic per exchange and worker: one push and one pull of the model.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ashl.option import option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.stage import GO, STOP, Clock, Push, Stage
from ashl.topology.local_work import WorkerState, local_work


@option
class ParameterServer:
    """One server (rank n) holds the model; workers talk to it alone."""

    has_server: ClassVar[bool] = True

    def links(self, rank: int, num_workers: int) -> tuple[int, ...]:
        """The ranks that this one exchanges messages with."""
        return tuple(range(num_workers)) if rank == num_workers else (num_workers,)

    def begin(self, stage: Stage, rank: int) -> WorkerState | ServerState:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        params, moments = stage.trainer.init()
        if rank == stage.server:
            return ServerState(params, moments, Clock(stage.num_workers))
        return WorkerState(params, moments)

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        return server if rank == stage.server else worker


@dataclass
class ServerState:
    """All that the server needs to go on."""

    params: Any
    moments: Any  # of the optimizer, where gradients are exchanged
    clock: Clock
    buffer: tuple[Push, ...] = ()  # pushes that came and are not merged yet
    receivers: dict[int, Any] = field(default_factory=dict)  # the codec's state by worker


async def worker(node: Node, stage: Stage, state: WorkerState) -> int:
    """Compute on the model last pulled, push what came of it, wait for the reply; returns the last word."""
    batch = stage.worker(node.rank).batch
    word = GO
    while word == GO:
        update, loss, steps = await local_work(node, stage, state)
        state.sender, body = stage.codec.encode(state.sender, update)
        await node.send(stage.server, stage.tag("push"), body, meta=(steps, steps * batch, loss, state.version))
        reply = await node.recv(stage.tag("pull"))
        word, state.version, state.samples, staleness, dropped, end_ns = (int(x) for x in reply.meta)
        if dropped:
            state.sender = stage.codec.undo(state.sender, body)
        if reply.body is not None:
            state.params = reply.body
        if word != GO:
            node.ledger.close(end_ns)
        node.round(
            stage=stage.index, round=state.round, steps=steps, staleness=staleness, dropped=bool(dropped), loss=loss
        )
        state.round += 1
    return word


async def server(node: Node, stage: Stage, state: ServerState) -> str:
    """Merge and answer until the stage is over, then answer every worker once more; returns why it ended."""
    clock = state.clock
    while True:
        message = await node.recv(stage.tag("push"), before_s=stage.deadline_s)
        if message is None:
            reason = "seconds"
            break
        if await receive(node, stage, state, message) and stage.due(clock, node.now):
            node.snapshot(state.params, **clock.report())
        if reason := stage.over(clock) or node.stopping:
            break
        for rank in sorted(stage.sync.admit(clock)):
            await reply(node, stage, state, rank)
    await dismiss(node, stage, state)
    node.emit("stage", stage=stage.index, name=stage.plan.name, end_ns=clock.end_ns, reason=reason, **clock.report())
    return reason


async def receive(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one push; returns whether the model changed. At a barrier, work on an older model is late."""
    clock, worker = state.clock, message.src
    steps, samples, loss, version = message.meta
    staleness = clock.version - int(version)
    late = stage.sync.barrier and staleness > 0
    clock.observe(worker, staleness, loss)
    clock.waiting[worker] = (staleness, late)
    if late or clock.diverged:
        clock.drop(worker, int(steps))
        return False
    state.receivers[worker], body = stage.codec.decode(state.receivers.get(worker), message.body)
    push = Push(worker, body, int(steps), int(samples))
    return await node.compute(partial(merge, stage, state, push), work=1, kind="apply")


def merge(stage: Stage, state: ServerState, push: Push) -> bool:
    """Fold a push into the model: w ← w + Σ c_i·Δ_i, or one optimizer step on Σ c_i·g_i."""
    clock = state.clock
    members = (*state.buffer, push)
    state.buffer, update = stage.aggregate.fold(stage, state.buffer, push)
    if update is None:
        return False
    if stage.sync.exchange == "gradient":
        lr = stage.trainer.rate(clock.samples)
        state.moments, state.params = stage.trainer.apply(state.params, state.moments, update, lr)
    else:
        state.params = state.params + update
    clock.version += 1
    for member in members:
        clock.commit(member.worker, member.steps, member.samples)
    return True


async def reply(node: Node, stage: Stage, state: ServerState, rank: int) -> None:
    """Go on, on this model."""
    clock = state.clock
    staleness, late = clock.waiting[rank]
    clock.release(rank)
    meta = (GO, clock.version, clock.samples, staleness, late, 0)
    await node.send(rank, stage.tag("pull"), state.params, meta)


async def dismiss(node: Node, stage: Stage, state: ServerState) -> None:
    """Tell every worker that the stage ended now. What came before and was not merged is dropped."""
    clock, end_ns = state.clock, node.now_ns
    clock.end_ns = end_ns
    for push in state.buffer:
        clock.drop(push.worker, push.steps)
    state.buffer = ()
    working = set(stage.workers) - set(clock.waiting)
    for rank in sorted(clock.waiting):
        staleness, late = clock.waiting.pop(rank)
        await node.send(rank, stage.tag("pull"), None, (STOP, clock.version, clock.samples, staleness, late, end_ns))
    while working:
        message = await node.recv(stage.tag("push"))
        working.remove(message.src)
        if message.start_ns <= end_ns:
            clock.drop(message.src, int(message.meta[0]))
        meta = (STOP, clock.version, clock.samples, 0, True, end_ns)
        await node.send(message.src, stage.tag("pull"), None, meta)
    node.ledger.close(end_ns)

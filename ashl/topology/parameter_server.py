"""Parameter server: workers push what they computed, the server merges it and answers with the model.

Rule: on a push of worker i the server folds it into the model (`aggregate`), then answers every worker that may go on
(`sync.admit`). Traffic per exchange and worker: one push and one pull of the model.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ashl.compression.around import pulls
from ashl.compression.contract import Turn
from ashl.option import Ratio, option
from ashl.plan.plan import WorkerPlan, assigned
from ashl.plan.profile import Profile
from ashl.planner.online import Averages
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.stage.stage import GO, NEXT, STOP, Push, Stage, Tally
from ashl.topology.local_work import Work, WorkerState, encoded, local_work, reports_mean


@option
class ParameterServer:
    """One server (rank n) holds the model; workers talk to it alone.

    With `pull_ratio` a pull carries that share of the difference to the worker's last pull, by the chosen codec.
    """

    has_server: ClassVar[bool] = True
    pull_ratio: Ratio | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The ranks that this one exchanges messages with."""
        return stage.workers if rank == stage.server else (stage.server,)

    def exchange_ns(self, stage: Stage, network: Any, rank: int) -> int:
        """What a push and a pull take, uncontended."""
        dense, ratio = stage.trainer.dense_bytes, stage.worker(rank).compression_ratio
        up = stage.codec.payload(ratio, dense // 4)
        down = dense if self.pull_ratio is None else min(dense, stage.pull_codec.payload(self.pull_ratio, dense // 4))
        return network.transfer_ns(rank, stage.server, up) + network.transfer_ns(stage.server, rank, down)

    def begin(self, stage: Stage, rank: int) -> WorkerState | ServerState:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        params, moments = stage.trainer.init()
        if rank == stage.server:
            return ServerState(params, moments, Tally(stage.num_workers))
        return WorkerState(params, moments)

    def role(self, stage: Stage, rank: int) -> Callable[..., Coroutine]:
        return server if rank == stage.server else worker


@dataclass
class ServerState:
    """All that the server needs to go on."""

    params: Any
    moments: Any  # of the optimizer, where gradients are exchanged
    tally: Tally
    buffer: tuple[Push, ...] = ()  # pushes that came and are not merged yet
    receivers: dict[int, Any] = field(default_factory=dict)  # the codec's state by worker
    outer_state: Any = None  # of the aggregation rule
    reduced: Any = None  # of a codec that reduces
    held: dict[int, Any] = field(default_factory=dict)  # the model that each worker holds, where pulls are compressed
    profile: Profile | None = None  # as measured by a profiling stage
    assigned: tuple[int, Any] | None = None  # what profiling has planned, from this stage on
    entered: int | None = None  # the stage that it is in
    averages: Any = None  # what an online planner has seen
    word: int = GO  # NEXT while the work that is under way is waited for
    reason: str | None = None
    ahead: Message | None = None  # a push that has come already
    workers: tuple[WorkerPlan, ...] = ()  # what each worker does now: the plan's, until it is planned anew

    def enter(self, stage: Stage, now_s: float) -> None:
        """A stage begins: its workers, codecs that begin anew at both ends, and momentum as it is handed over."""
        if self.entered == stage.index:
            return  # it goes on from a checkpoint
        self.entered, self.word, self.reason, self.ahead = stage.index, GO, None, None
        self.tally.begin(now_s)
        self.workers, self.receivers, self.reduced = stage.plan.workers, {}, None
        if stage.resets:
            self.moments, self.outer_state = stage.trainer.moments(), None


class Pull(NamedTuple):
    """What every reply says beside the model."""

    word: float  # GO, NEXT or STOP
    version: float
    samples: float  # applied so far: the learning rate follows them
    staleness: float  # of the push that this answers
    dropped: float  # whether that push was dropped
    end_ns: float  # of the stage, with NEXT and STOP
    local_steps: float
    ratio: float
    interval_s: float
    batch: float = 0.0  # 0 = as before


async def worker(node: Node, stage: Stage, state: WorkerState) -> int:
    """Compute on the model last pulled, push what came of it, wait for the reply; returns the last word."""
    state.enter(stage, node.rank)
    word = GO
    while word == GO:
        node.mark(stage.index, state)
        work, body, loss = await produced(node, stage, state)
        meta = (work.steps, work.samples, loss, state.version, work.step_s, state.pull_s)
        await node.send(stage.server, stage.tag("push"), body, meta)
        message = await node.recv(stage.tag("pull"))
        reply = Pull(*message.meta)
        word, end_ns = int(reply.word), int(reply.end_ns)
        if reply.dropped and not stage.codec.flags.lossless and not math.isnan(loss):
            state.sender = stage.codec.undo(state.sender, body)
        if message.body is not None:
            state.params = taken(stage, state, message.body)
        state.pull_s = 0.0 if message.body is None else node.now - message.start_ns / 1e9
        state.version, state.samples = int(reply.version), int(reply.samples)
        state.local_steps, state.ratio, state.interval_s = int(reply.local_steps), reply.ratio, reply.interval_s
        state.batch = int(reply.batch) or state.batch
        if word == NEXT:
            node.emit("border", stage=stage.index, totals_ns=node.ledger.until(end_ns))
        elif word == STOP:
            node.ledger.close(end_ns)
        staleness, dropped = int(reply.staleness), bool(reply.dropped)
        what = {"steps": work.steps, "staleness": staleness, "dropped": dropped, "loss": loss}
        node.round(stage=stage.index, round=state.round, **what)
        state.round += 1
    return word


async def produced(node: Node, stage: Stage, state: WorkerState) -> tuple[Work, Any, float]:
    """(work, body, loss) of one push, where the sync mode has no say in it: local work, encoded."""
    if hasattr(stage.sync, "produce"):
        return await stage.sync.produce(node, stage, state)
    work = await local_work(node, stage, state)
    return work, *await encoded(node, stage, state, work)


def taken(stage: Stage, state: WorkerState, body: Any) -> Any:
    """The model after a pull."""
    if hasattr(stage.sync, "take"):
        return stage.sync.take(stage, state, body)
    return pulls.advance(stage.pull_codec, state.params, body)


async def server(node: Node, stage: Stage, state: ServerState) -> int:
    """Merge and answer until the stage is over, then answer every worker once more; returns the last word.

    Before the next stage begins, the work that is under way is waited for and merged; at the end of the run it is not.
    """
    tally = state.tally
    state.enter(stage, node.now)
    while True:
        node.mark(stage.index, state)
        message = state.ahead or await node.recv(stage.tag("push"), before_s=stage.deadline_s)
        state.ahead = None
        node.ledger.cut()  # nobody asks for the server's rounds, so they are not kept
        if message is None:
            state.word, state.reason = STOP, "seconds"
            break
        if await receive(node, stage, state, message) and stage.due(tally, node.now):
            node.snapshot(state.params, **tally.report())
        if over := stage.over(tally) or node.stopping:
            state.word, state.reason = STOP, over
            break
        if state.word == GO and (rule := stage.reached(tally, node.now, node.scores)):
            state.word, state.reason = NEXT if stage.following else STOP, rule
            if state.word == STOP:
                break
        if state.word == NEXT:
            if len(tally.waiting) == stage.num_workers:
                if state.buffer:
                    await node.compute(partial(merge, stage, state, None), work=1, kind="apply")
                break
            continue
        if hasattr(stage.sync, "takes_all"):
            state.ahead = await node.recv(stage.tag("push"), before_s=node.now)
        if state.ahead is None:
            for rank in sorted(stage.sync.admit(tally)):
                await reply(node, stage, state, rank)
    await dismiss(node, stage, state, state.word)
    end = {"end_ns": tally.end_ns, "reason": state.reason}
    node.emit("stage", stage=stage.index, name=stage.plan.name, **end, **tally.report())
    return state.word


async def receive(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one push; returns whether the model changed."""
    tally, worker = state.tally, message.src
    steps, samples, loss, version, step_s, pull_s = message.meta
    staleness = tally.version - int(version)
    late = not (stage.sync.accepts(staleness) and stage.aggregate.accepts(staleness))
    tally.observe(worker, 0 if late else staleness, loss)  # staleness is told of what was applied
    tally.waiting[worker] = (staleness, late)
    if late or tally.diverged:
        tally.drop(worker, int(steps))
        return False
    if hasattr(stage.sync, "absorb"):
        return await node.compute(partial(stage.sync.absorb, stage, state, message), work=1, kind="apply")
    body, d = message.body, stage.trainer.num_params
    if not stage.codec.flags.reduces:
        state.receivers[worker], body = stage.codec.decode(state.receivers.get(worker), body, d)
    times = (step_s, node.now - message.start_ns / 1e9, pull_s)
    push = Push(worker, body, int(steps), int(samples), staleness, loss, *times)
    update = await node.compute(partial(merge, stage, state, push), work=1, kind="apply")
    if update is not None and not stage.codec.flags.lossless and reports_mean(stage, tally.version - 1):
        node.snapshot(update, of=None, tick=tally.version - 1)
    if hasattr(stage.sync, "observe"):
        stage.sync.observe(stage, tally, push, node.now)
    if stage.plan.h_preset is not None and hasattr(stage.planner, "observe"):
        replan(node, stage, state, push)
    return update is not None


def merge(stage: Stage, state: ServerState, push: Push | None) -> Any:
    """Fold a push into the model: w ← w + Σ c_i·Δ_i, or one optimizer step on Σ c_i·g_i; returns that sum. Until a
    quorum has come it is kept (None); at a border (push None) those that were kept are folded in, however few."""
    tally = state.tally
    members = state.buffer if push is None else (*state.buffer, push)
    if push is not None and len(members) < stage.quorum:
        state.buffer = members
        return None
    now = stage.doing(state.workers)
    if stage.codec.flags.reduces:
        members = tuple(sorted(members, key=lambda push: push.worker))
        bodies, weights = [member.body for member in members], now.weights_of(members)
        state.reduced, total = stage.codec.reduce(state.reduced, bodies, weights, stage.trainer.num_params)
        state.outer_state, update = stage.aggregate.outer(state.outer_state, total)
    else:
        state.outer_state, update = stage.aggregate.fold(now, state.outer_state, members)
    state.buffer = ()
    if stage.sync.exchange != "difference":
        lr = stage.trainer.rate(tally.samples) * (stage.sync.anneal(tally) if hasattr(stage.sync, "anneal") else 1.0)
        state.moments, state.params = stage.trainer.apply(state.params, state.moments, update, lr)
    else:
        state.params = state.params + update
    tally.version += 1
    for member in members:
        tally.commit(member.worker, member.steps, member.samples)
    return update


def replan(node: Node, stage: Stage, state: ServerState, push: Push) -> None:
    """Let an online planner see this commit and, where it is worth it, change H, ratios and weights from now on."""
    payload = stage.payload(state.workers[push.worker].compression_ratio)
    if state.averages is None:
        profile = state.profile or stage.profile
        assert profile is not None, "an online planner starts from a profile"
        state.averages = Averages(profile)
    seen = (push.step_s, push.push_s, push.pull_s, payload)
    averages = stage.planner.observe(state.averages, push.worker, *seen)
    preset = (stage.plan.h_preset, stage.plan.r_preset)
    state.averages, rows = stage.planner.replan(averages, state.workers, *preset, stage.payload)
    if rows is not None:
        state.workers = assigned(state.workers, rows)
        what = {"local_steps": [w.local_steps for w in state.workers], "time_ns": node.now_ns}
        node.emit("replan", stage=stage.index, ratios=[w.compression_ratio for w in state.workers], **what)


async def reply(node: Node, stage: Stage, state: ServerState, rank: int) -> None:
    """Go on, on this model."""
    tally, plan = state.tally, state.workers[rank]
    staleness, late = tally.waiting[rank]
    held = tally.pulled[rank] == tally.version  # the model has not changed since this worker's last pull
    tally.release(rank)
    if hasattr(stage.sync, "steer"):
        what = stage.sync.steer(stage, tally, rank, node.now)
    else:
        what = (plan.local_steps, plan.compression_ratio, 0.0)
    meta = Pull(GO, tally.version, tally.samples, staleness, late, 0, *what)
    body = None if held else state.params
    if hasattr(stage.sync, "answer"):
        body = await node.compute(partial(stage.sync.answer, stage, state, rank), work=1, kind="compress")
    elif body is not None and (ratio := stage.topology.pull_ratio) is not None:
        turn = Turn(ratio, stage.seed, stage.server + 1 + rank, tally.version)
        pull = partial(pulls.pull, stage.pull_codec, state.held.get(rank), state.params, turn)
        state.held[rank], body = await node.compute(pull, work=1, kind="compress")
    await node.send(rank, stage.tag("pull"), body, meta)


async def dismiss(node: Node, stage: Stage, state: ServerState, word: int) -> None:
    """Tell every worker that the stage ended now. What came before and was not merged is dropped."""
    tally, end_ns = state.tally, node.now_ns
    tally.end_ns = end_ns
    unmerged = {push.worker for push in state.buffer}
    for push in state.buffer:
        tally.drop(push.worker, push.steps)
    state.buffer = ()
    working = set(stage.workers) - set(tally.waiting)
    for rank in sorted(tally.waiting):
        staleness, late = tally.waiting.pop(rank)
        tally.pulled[rank] = tally.version
        state.held[rank] = state.params
        meta = Pull(word, tally.version, tally.samples, staleness, late or rank in unmerged, end_ns, 1, 1.0, 0.0)
        await node.send(rank, stage.tag("pull"), state.params if word == NEXT else None, meta)
    while working:
        message = await node.recv(stage.tag("push"))
        working.remove(message.src)
        if message.start_ns <= end_ns:
            tally.drop(message.src, int(message.meta[0]))
        meta = Pull(word, tally.version, tally.samples, 0, True, end_ns, 1, 1.0, 0.0)
        await node.send(message.src, stage.tag("pull"), None, meta)
    if word == STOP:
        node.ledger.close(end_ns)

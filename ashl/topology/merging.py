"""What a parameter server makes of pushes: taken in, folded into the model, and answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import quoted
from ashl.plan.plan import assigned
from ashl.planner.assignment import Planner
from ashl.planner.online import Averages
from ashl.runtime.effects import Message, Tag
from ashl.runtime.node import Node
from ashl.runtime.records import Replan
from ashl.stage.stage import GO, Stage
from ashl.stage.tally import DIVERGED, LATE
from ashl.topology.by_priority import counted
from ashl.topology.by_slice import after_slices, joined
from ashl.topology.local_work import reports_mean
from ashl.topology.members import away
from ashl.topology.replies import AS_PLANNED, Pull
from ashl.topology.sliced import head, put_together

if TYPE_CHECKING:
    from ashl.topology.parameter_server import ServerRule, ServerState

CLOSE: Tag = ("close", 0, 0)  # from a server to itself: what has come is merged now


def rule_of(stage: Stage) -> ServerRule:
    """The stage's sync mode, as a server asks it."""
    rule: Any = stage.sync  # planning has seen to it
    return rule


async def receive(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Take in one push; returns whether the model changed."""
    tally, worker, rule = state.tally, message.src, rule_of(stage)
    if stage.messages:
        message, stage = await put_together(node, stage, message), await after_slices(node, stage, state)
    steps, loss, version = int(message.meta[0]), message.meta[2], int(message.meta[3])
    staleness = tally.version - version
    all_late = staleness > 0 and rule.in_rounds and stage.delayed is not None  # by one round, so that nobody is
    beyond = staleness - 1 if all_late else staleness
    late = not (rule.accepts(beyond) and stage.aggregate.accepts(beyond))
    tally.observe(worker, 0 if late else staleness, loss)  # staleness is counted of what was applied
    tally.arrive(worker, staleness, late)
    if late or tally.diverged:
        tally.drop(worker, steps, LATE if late else DIVERGED)
        return False
    if stage.by_priority:
        return counted(stage, state, message)
    return await rule.messages().absorb(node, stage, state, message)


async def more(node: Node, stage: Stage, state: ServerState, tags: Sequence[Tag]) -> Message | None:
    """What else has come, where the rule takes in all of it, or comes until what has come is merged."""
    closes_s, deadline_s = rule_of(stage).closes_s(state.rule_state, state.tally), stage.judge.deadline_s
    message = await node.recv(*tags, before_s=max(node.now, min(closes_s, deadline_s)))
    due = message is None and -math.inf < closes_s <= deadline_s
    return Message(node.rank, CLOSE, None, (), int(node.now_ns)) if due else message


async def close(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Merge what has come, however few."""
    await node.compute(partial(merge, stage, state, None), work=1, kind="apply")
    return True


async def merged(node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
    """Decode an update, fold it in, and let the rule and the planner see it; returns whether the model changed."""
    tally, worker = state.tally, message.src
    steps, samples, loss, version, step_s, pull_s = message.meta
    body = stage.link.arrived(state.ends, worker, message.body)
    staleness, push_s = tally.version - int(version), node.now - message.start_ns / 1e9
    push = Push(worker, body, int(steps), int(samples), staleness, loss, step_s, push_s, pull_s)
    update = await node.compute(partial(merge, stage, state, push), stage.push_share, "apply")
    if update is not None and not stage.codec.flags.lossless and reports_mean(stage, tally.version - 1):
        node.show_update(update, of=None, tick=tally.version - 1)
    tally.now_s = node.now
    state.rule_state = rule_of(stage).observe(stage, state.rule_state, tally, push)
    if stage.plan.h_preset is not None and stage.planner is not None and stage.planner.follows:
        replan(node, stage, state, push, stage.planner)
    return update is not None


def merge(stage: Stage, state: ServerState, push: Push | None) -> Any:
    """Fold a push into the model: one outer step on Σ c_i·Δ_i, or one optimizer step on Σ c_i·g_i; returns that sum.
    Until a quorum has come it is kept (None); with push None those that were are folded in, however few: at a border,
    or where the others of the quorum are gone."""
    tally = state.tally
    members = state.buffer
    if push is not None:
        members.append(push)
        if len(members) < state.quorum:
            return None
    if len(members) > 1:
        members.sort(key=attrgetter("worker"))
    weights = stage.doing(state.workers).handed(tally.gone).weights_of(members, tally.gone)
    if stage.codec.flags.reduces:
        update: Any = stage.link.reduce(state.ends, [member.body for member in members], weights)
    else:
        update = stage.aggregate.fold(members, weights)
    state.buffer = []
    lr = stage.trainer.rate(tally.samples) * rule_of(stage).anneal(state.rule_state)
    step = joined if state.made else stage.sync.step
    moments, state.outer_state, state.params = step(stage, state, update, lr)
    if moments is not None:
        state.moments = moments
    tally.merge()
    for member in members:
        tally.commit(member.worker, member.steps, member.samples)
    return update


def replan(node: Node, stage: Stage, state: ServerState, push: Push, planner: Planner) -> None:
    """Let an online planner see this commit and, where it is worth it, change H, ratios and weights from now on, of
    those who are there."""
    payload = stage.payload(state.workers[push.worker].compression_ratio)
    if state.averages is None:
        profile = state.profile or stage.profile
        assert profile is not None, "an online planner starts from a profile"
        state.averages = Averages(profile)
    averages = planner.observe(state.averages, push.worker, push.step_s, push.push_s, push.pull_s, payload)
    averages = planner.hear(averages, push.worker, push.body, push.steps, push.samples)
    assert stage.plan.h_preset is not None
    presets = (stage.plan.h_preset, stage.plan.r_preset)
    there = [rank for rank in stage.workers if rank not in state.tally.gone]
    current = [state.workers[rank] for rank in there]
    seen, rows = planner.replan(averages.of(there), current, *presets, stage.payload)
    state.averages = replace(averages, commits=seen.commits)
    if rows is not None:
        anew = dict(zip(there, assigned(current, rows, resharded=False), strict=True))  # shards are cut at borders only
        state.workers = tuple(anew.get(rank, worker) for rank, worker in enumerate(state.workers))
        ratios = [w.compression_ratio for w in state.workers]
        node.emit(Replan(node.rank, stage.index, ratios, [w.local_steps for w in state.workers], node.now_ns))


async def reply(node: Node, stage: Stage, state: ServerState, rank: int) -> bool:
    """Go on, on this model; returns whether it is another one than before.

    Raises UsageError where the rule lets go who does not wait.
    """
    tally = state.tally
    if rank not in tally.waiting:
        who = f"{quoted(type(stage.sync))} lets worker {rank} go on, which does not wait"
        raise UsageError(f"{who}; let its `admit` return some of `tally.waiting`.")
    changed = tally.pulled[rank] != tally.version  # since this worker's last pull
    staleness, late = tally.release(rank)
    tally.now_s = node.now
    local_steps, ratio, interval_s, batch = orders_of(stage, state, rank)
    body = await rule_of(stage).messages().answer(node, stage, state, rank, changed)
    body = head(stage, body) if stage.messages and changed else body
    counts = tally.version, tally.steps, tally.samples
    meta = Pull(GO, *counts, staleness, late, 0, local_steps, ratio, interval_s, batch)
    await node.send(rank, state.pulls[rank], body, (*meta, *away(stage, tally.gone)) if stage.reshards else meta)
    return changed


def orders_of(stage: Stage, state: ServerState, rank: int) -> tuple[int, float, float, int]:
    """What this worker, which goes on now, does next: `Orders` in full."""
    tally, plan = state.tally, state.workers[rank]
    orders = rule_of(stage).steer(stage, state.rule_state, tally, rank) or AS_PLANNED
    planned = plan.local_steps if orders.local_steps is None else orders.local_steps
    ahead = int(stage.delayed is not None)
    rest = None if planned == 1 else stage.rest(tally.steps, tally.samples, ahead, tally.gone)
    ratio = plan.compression_ratio if orders.ratio is None else orders.ratio
    return stage.at_most(planned, rank, rest), ratio, orders.interval_s, orders.batch

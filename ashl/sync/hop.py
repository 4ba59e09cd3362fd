"""Hop: gossip with bounded staleness and backup workers; a worker needs neither all of its
neighbours' models nor their latest ones.

Use when: a worker of a graph falls behind now and then: bounded staleness and skipped steps.
Avoid when: workers are equally fast.
Alternatives: `d_psgd`; `ad_psgd`.

Rule: in its iteration k worker i sends x_i, computes Δ_i at x_i, and then averages by age
    x_i ← Σ_j a_j·x_j / Σ_j a_j + Δ_i,   a_j = s + 1 − (age of j's model in iterations)
over its own model (age 0) and the newest model up to iteration k of each neighbour, if its age is
at most s.
Waiting: iteration k ends once all neighbours except `backups` have sent a model of iteration k − s
or later, and no neighbour is more than `max_lead` iterations behind.
Skipping: with `skip_lead`, a worker that is that many iterations or more behind all of its
neighbours skips to the iteration of the slowest of them. It starts there from the mean by age of
their models, and of its own if its age is at most s. Skipped iterations count as no steps, and no
neighbour waits for them.
Pause: a worker whose iteration may not end yet keeps its work for later. Each worker tells its
neighbours how many models it has sent, and waits until it has as many from each of them.

Limits: s = backups = 0 is D-PSGD (`awc` on a regular graph), up to rounding. Only there does
averaging preserve the mean of all models. Equally fast workers never skip.
Source: Luo et al., "Hop: Heterogeneity-Aware Decentralized Training", ASPLOS 2019, arXiv
1902.01064.
Differs: no tokens travel, because each model carries the iteration of its sender.

Family: gossip.
Status: reproduction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ashl.errors import UsageError
from ashl.option import Count, Natural, option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.contract import GO, PAUSE, STOP, StageConfig
from ashl.topology.coordinator import (
    RoamingState,
    await_answer,
    close_worker,
    report_done,
    report_merge,
)
from ashl.topology.gossip import (
    NeighbourModels,
    RoamingRule,
    graph_of,
    receive_arrived,
    receive_in_flight,
    receive_model,
    send_model,
)
from ashl.topology.graph import Round
from ashl.topology.local_work import Work, kept_work

Sent = dict[int, Any]  # iteration → model, of one neighbour; ascending


@dataclass
class Models(NeighbourModels):
    """A worker's state."""

    sent_at: int = -1  # the latest iteration whose model was sent


@option
class Hop(RoamingRule):
    """Bounded staleness and backup workers on a graph."""

    local_steps: Count | Literal["plan"]
    staleness: Natural
    backups: Natural
    max_lead: Count
    skip_lead: Count | None

    def check(self, rounds: Sequence[Round]) -> None:
        fewest = min(len(row) - 1 for row in rounds[0].rows)
        if self.backups and self.backups >= fewest:
            raise UsageError(
                f"sync.backups={self.backups}: leaves a worker with {fewest} neighbours no"
                f" neighbour to wait for; take at most {max(0, fewest - 1)}, or a graph with more"
                " edges"
            )
        if self.max_lead < self.staleness:
            raise UsageError(
                f"sync.max_lead={self.max_lead}: below sync.staleness={self.staleness}, so no model"
                " could be that stale; take a larger max_lead"
            )
        most = 1 + (self.max_lead if self.backups else self.staleness)
        if self.skip_lead is not None and self.skip_lead > most:
            raise UsageError(
                f"sync.skip_lead={self.skip_lead}: a worker leads a neighbour by at most {most}"
                f" iterations, so no worker would ever skip; take at most {most}"
                + ("" if self.backups else ", or sync.backups=1")
            )

    async def worker(self, ctx: RankContext, stage: StageConfig, state: RoamingState) -> int:
        return await worker(ctx, stage, state, self)


def may_end_iteration(rule: Hop, k: int, heard: Mapping[int, Sent]) -> bool:
    """Return True if iteration k may end."""
    newest = [max(sent, default=-1) for sent in heard.values()]
    fresh = sum(iteration >= k - rule.staleness for iteration in newest)
    return fresh >= len(newest) - rule.backups and all(
        k - iteration <= rule.max_lead for iteration in newest
    )


def mix_by_age(
    rule: Hop, k: int, own: Any, rank: int, heard: Mapping[int, Sent], age: int = 0
) -> Any:
    """Return the mean weighted by age, added in rank order, over the models that are at most s
    iterations old.

    Args: `own` is this worker's model, `age` iterations old; `heard` has each neighbour's models by
    iteration.
    """
    if isinstance(own, SizeOnly):
        return own
    parts = {rank: (own, rule.staleness + 1 - age)} if age <= rule.staleness else {}
    for j, sent in heard.items():
        iteration = max((i for i in sent if i <= k), default=-1)
        if iteration >= max(0, k - rule.staleness):
            parts[j] = (sent[iteration], rule.staleness + 1 - (k - iteration))
    total = sum(share for _, share in parts.values())
    result = own * 0.0
    for j in sorted(parts):
        result.add_(parts[j][0], alpha=parts[j][1] / total)
    return result


async def worker(ctx: RankContext, stage: StageConfig, state: RoamingState, rule: Hop) -> int:
    """Iterate until the coordinator ends the stage. Returns: the final signal."""
    state.enter(stage, ctx.members, ctx.rank)
    near = graph_of(stage, ctx.members.ranks).neighbours[ctx.rank]
    known = state.rule_state = state.rule_state or Models(
        {j: {} for j in near}, dict.fromkeys(near, 0)
    )
    heard = known.models
    dropped = 0
    while state.signal == GO:
        ctx.safe_point(stage.index, state, before_work=state.keeps_steps)
        if known.sent_at < known.k:
            await begin_iteration(ctx, stage, state, rule)
        work = state.pending = await kept_work(ctx, stage, state)
        k = known.k
        await await_answer(ctx, stage, state)
        await receive_arrived(ctx, stage, state)
        while state.signal == GO and not may_end_iteration(rule, k, heard):
            await receive_model(ctx, stage, state)
        if state.signal == PAUSE and not may_end_iteration(rule, k, heard):
            break
        state.pending = None
        if state.signal == STOP:
            dropped = work.steps
            break
        await end_iteration(ctx, stage, state, rule, work)
    if state.signal == PAUSE:
        await receive_in_flight(ctx, stage, state)
    await report_done(ctx, stage, state, dropped)
    while not state.may_leave:
        await receive_model(ctx, stage, state)
    await ctx.discard(stage.tag("model"))
    return close_worker(ctx, stage, state, dropped)


async def begin_iteration(
    ctx: RankContext, stage: StageConfig, state: RoamingState, rule: Hop
) -> None:
    """Skip iterations if this worker is far behind, and send the model."""
    known: Models = state.rule_state
    ahead = min((max(sent, default=-1) for sent in known.models.values()), default=known.k)
    if rule.skip_lead is not None and ahead - known.k >= rule.skip_lead:
        age, known.k = ahead - known.k, ahead
        state.params = mix_by_age(rule, ahead, state.params, ctx.rank, known.models, age)
    await send_model(ctx, stage, state)
    known.sent_at = known.k


async def end_iteration(
    ctx: RankContext, stage: StageConfig, state: RoamingState, rule: Hop, work: Work
) -> None:
    """Average by age, and drop models that are no longer needed."""
    known: Models = state.rule_state
    k, heard = known.k, known.models
    state.params = mix_by_age(rule, k, state.params, ctx.rank, heard) + work.payload
    state.version = k + 1
    oldest = min(
        (max((i for i in sent if i <= k), default=k) for sent in heard.values()), default=k
    )
    for j, sent in heard.items():
        heard[j] = {
            i: model for i, model in sent.items() if i > k - rule.staleness or i == max(sent)
        }
    known.k = k + 1
    await report_merge(ctx, stage, state, work, max(0, k - oldest))

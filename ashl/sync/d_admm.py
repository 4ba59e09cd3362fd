"""D-ADMM: neighbours are held together by a penalty and by dual variables, instead of by averaging.

Rule: neighbours have different colours. In iteration k worker p waits for the newest models of its
D neighbours, of lower colours those of this iteration, then takes H steps of its own optimizer from
x_p on
    f_p(x) + γ_p·x + ρ·Σ_j ‖x − (x_p + x_j)/2‖²,   gradient g + γ_p + 2ρ·D·(x − mean_j (x_p +
    x_j)/2)
and sends x_p. Once both ends of an edge know both models of an iteration, each adds γ_p ← γ_p +
ρ·(x_p − x_j). What one end adds the other subtracts, at whatever moment, so Σ_p γ_p = 0; at a fixed
point Σ_p ∇f_p = 0 at one model, whatever each worker's shard.

Synchronous, colour by colour: delay = 0; where a count ends the run, nobody begins more iterations
than it has room for and the models are the same on whatever machines. Asynchronous: a worker goes
on when `barrier` of its neighbours have sent what it needs (the partial barrier) and none is more
than `delay` iterations behind that (the bounded delay); it takes a smaller ρ, as duals follow late.

On processes a checkpoint is of one iteration: all are kept at its begin, once the models before it
have come, and what has come of later ones is to come again. So both ends of an edge know the same
pairs, and its duals add up to zero.

Limit: without neighbours it is SGD. Departs from the papers in that the argmin is H steps of SGD,
which the term ρ·D·‖x − x_p‖²/2 in the above keeps from going too far, and in that asynchrony is on
a graph, without their master.
Sources: Mota et al., "D-ADMM: A Communication-Efficient Distributed Algorithm for Separable
Optimization", IEEE TSP 2013; Zhang and Kwok, "Asynchronous Distributed ADMM for Consensus
Optimization", ICML 2014 (barrier and delay).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ashl.errors import UsageError
from ashl.optimizer.absent import plus
from ashl.option import Count, Natural, Positive, option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.stage import GO, STOP, Stage
from ashl.topology.coordinator import (
    Kept,
    RoamingState,
    apply_signal,
    await_answer,
    close_worker,
    report_done,
    report_merge,
)
from ashl.topology.gossip import RoamingRule, graph_of
from ashl.topology.graph import Edge, Round, sources_of
from ashl.topology.local_work import local_work

Versions = dict[int, Any]  # iteration → model; −1 is the initial one


@option
class DADMM(RoamingRule):
    """Penalties and duals on the edges of a graph."""

    kept: ClassVar[Kept] = "round"
    local_steps: Count | Literal["plan"]
    rho: Positive
    delay: Natural
    barrier: Count | None

    def resume_state(self, state: RoamingState) -> None:
        edges: Edges | None = state.rule_state
        if edges is not None:
            before = {
                j: {m: x for m, x in versions.items() if m < edges.k}
                for j, versions in edges.heard.items()
            }
            edges.heard, edges.ends = before, {}

    def check(self, rounds: Sequence[Round]) -> None:
        super().check(rounds)
        most = max(len(row) - 1 for row in rounds[0].rows)
        if self.barrier is not None and self.barrier > most:
            raise UsageError(
                f"sync.barrier={self.barrier} is more than the {most} neighbours that a worker has;"
                " take fewer, or null for all of them"
            )

    async def worker(self, ctx: RankContext, stage: Stage, state: RoamingState) -> int:
        return await worker(ctx, stage, state, self)


def may_iterate(rule: DADMM, behind: Sequence[int]) -> bool:
    """Whether an iteration may begin, by how many iterations each neighbour is behind what is
    needed of it.
    """
    wanted = len(behind) if rule.barrier is None else min(rule.barrier, len(behind))
    return sum(b <= 0 for b in behind) >= wanted and all(b <= rule.delay for b in behind)


@dataclass
class Edges:
    """What a worker knows of its edges."""

    dual: Any  # γ_p
    lower: dict[int, bool]  # neighbour → whether its colour is lower
    own: Versions
    heard: dict[int, Versions]
    matched: dict[int, int]  # neighbour → the last iteration that is in the dual
    ends: dict[int, int] = field(
        default_factory=dict
    )  # neighbour → its last iteration, once it has said so
    k: int = 0  # its iteration

    def behind(self, k: int) -> list[int]:
        """By neighbour: how many iterations it is behind what iteration k needs."""
        return [k - (not self.lower[j]) - max(versions) for j, versions in self.heard.items()]

    def newest(self) -> int:
        """Up to which iteration all neighbours' models have come."""
        return min(max(versions) for versions in self.heard.values())

    def match(self, rho: float) -> None:
        """Add to the dual what both ends of an edge know by now, in the order of iterations and
        ranks.
        """
        pairs = [
            (m, j)
            for j, versions in self.heard.items()
            for m in versions
            if self.matched[j] < m <= max(self.own)
        ]
        for m, j in sorted(pairs):
            step = (self.own[m] - self.heard[j][m]) * rho
            self.dual, self.matched[j] = self.dual + step, m
        for j, versions in self.heard.items():
            self.heard[j] = {
                m: x for m, x in versions.items() if m > self.matched[j] or m == max(versions)
            }
        oldest = min(self.matched.values(), default=max(self.own))
        self.own = {m: x for m, x in self.own.items() if m > oldest or m == max(self.own)}


@dataclass(frozen=True)
class Augmented:
    """The stage's trainer with the gradient of the augmented Lagrangian. `weight` is 2ρ·D."""

    trainer: Any
    dual: Any
    weight: float
    target: Any
    weighs: ClassVar[bool] = False  # models are averaged, without weights

    def rate(self, samples: int) -> float:
        return self.trainer.rate(samples)

    def handed(self, gone: frozenset[int]) -> Augmented:
        """With a part of the data of those who are gone."""
        return replace(self, trainer=self.trainer.handed(gone))

    def local_step(
        self, params: Any, moments: Any, worker: int, step: int, lr: float, span: range
    ) -> tuple[Any, Any, Any]:
        loss, grad = self.trainer.gradient(params, worker, step, span)
        grad = plus(plus(grad, self.dual), (params - self.target) * self.weight)
        return (loss, *self.trainer.apply(self.trainer.stepped_from(params), moments, grad, lr))


def colours_in(stage: Stage) -> tuple[int, ...]:
    return colours(graph_of(stage).edges(stage), stage.num_workers)


def colours(edges: tuple[Edge, ...], n: int) -> tuple[int, ...]:
    """The lowest colour that no neighbour of lower rank has, rank by rank."""
    chosen: list[int] = []
    for rank, neighbours in enumerate(sources_of(edges, n)):
        taken = {chosen[j] for j in neighbours if j < rank}
        chosen.append(next(c for c in range(n) if c not in taken))
    return tuple(chosen)


def open_edges(stage: Stage, state: RoamingState, rank: int) -> Edges:
    """Everybody begins at the same model, with duals of zero."""
    colour, params, neighbours = (
        stage.cached(colours_in),
        state.params,
        graph_of(stage).neighbours(stage, rank),
    )
    return Edges(
        dual=params - params,
        lower={j: colour[j] < colour[rank] for j in neighbours},
        own={-1: params},
        heard={j: {-1: params} for j in neighbours},
        matched=dict.fromkeys(neighbours, -1),
    )


def augment_stage(stage: Stage, edges: Edges, params: Vector, rho: float) -> Stage:
    """The stage, with what its neighbours want of this worker in every gradient."""
    if not edges.heard:
        return stage
    nearest = [versions[max(versions)] for _, versions in sorted(edges.heard.items())]
    total = nearest[0]
    for model in nearest[1:]:
        total = total + model
    target = (params + total * (1 / len(nearest))) * 0.5
    return replace(
        stage, trainer=Augmented(stage.trainer, edges.dual, 2 * rho * len(nearest), target)
    )


def iterations_left(stage: Stage, rule: DADMM) -> float:
    """How many iterations the counts leave room for, where all are in step from the run's begin."""
    left = stage.stop_criteria.remaining_rounds(0, 0, stage.round_totals)
    in_step = not rule.delay and rule.barrier is None and stage.index == 0
    return math.ceil(left[0] / left[1]) if left and in_step else math.inf


async def worker(ctx: RankContext, stage: Stage, state: RoamingState, rule: DADMM) -> int:
    """Wait for enough, work, send; until the coordinator says that the stage is over. Returns the
    last word.
    """
    state.enter(stage, ctx.rank)
    edges = state.rule_state = state.rule_state or open_edges(stage, state, ctx.rank)
    dropped, last = 0, iterations_left(stage, rule)
    while state.signal == GO:
        k = edges.k
        while (
            state.signal == GO
            and ctx.checkpoint_due(state.version)
            and edges.heard
            and edges.newest() < k - 1
        ):
            await on_message(ctx, stage, state)
        ctx.safe_point(stage.index, state)
        while await on_message(ctx, stage, state, before_s=ctx.now):
            pass  # what has come meanwhile
        while state.signal == GO and (k >= last or not may_iterate(rule, edges.behind(k))):
            await on_message(ctx, stage, state)
        if state.signal != GO:
            break
        edges.match(rule.rho)
        late = max([0, *edges.behind(k)])
        work = await local_work(ctx, augment_stage(stage, edges, state.params, rule.rho), state)
        await await_answer(ctx, stage, state)
        while await on_message(ctx, stage, state, before_s=ctx.now):
            pass
        if state.signal == STOP:
            dropped = work.steps
            break
        state.params = edges.own[k] = state.params + work.body
        for peer in edges.heard:
            await ctx.send(peer, stage.tag("model"), state.params, (k,))
        state.version += 1
        edges.k += 1
        await report_merge(ctx, stage, state, work, late)
    for peer in edges.heard:
        await ctx.send(peer, stage.tag("model"), None, (edges.k - 1,))
    while any(max(versions) < edges.ends.get(j, math.inf) for j, versions in edges.heard.items()):
        await on_message(ctx, stage, state)
    edges.match(rule.rho)
    await report_done(ctx, stage, state, dropped)
    while not state.gone:
        await on_message(ctx, stage, state)
    return close_worker(ctx, stage, state, dropped)


async def on_message(
    ctx: RankContext, stage: Stage, state: RoamingState, before_s: float = math.inf
) -> bool:
    """Take in a neighbour's model, its last iteration, or a word of the coordinator; False when
    none came before this moment.
    """
    message, edges = (
        await ctx.recv(stage.tag("model"), stage.tag("word"), before_s=before_s),
        state.rule_state,
    )
    if message is None:
        return False
    if message.tag == stage.tag("word"):
        apply_signal(ctx, state, message)
    elif message.body is None:
        edges.ends[message.src] = int(message.meta[0])
    else:
        edges.heard[message.src][int(message.meta[0])] = message.body
    return True

"""D-ADMM: a penalty and dual variables pull the models of neighbours together, where gossip
averages them.

Use when: neighbours should agree without averaging, on a convex loss over a fixed graph.
Avoid when: a network is deep, or models are averaged in any case.
Alternatives: `d_psgd`; `easgd` with a server.

Rule: the graph is coloured so that neighbours have different colours. In iteration k worker p waits
for the models of its D neighbours: those of iteration k from neighbours of lower colour, of k − 1
from the others. Then it takes H steps of its own optimizer from x_p on the function
    f_p(x) + γ_p·x + ρ·Σ_j ‖x − (x_p + x_j)/2‖²
with the gradient
    g + γ_p + 2ρ·D·(x − mean_j (x_p + x_j)/2)
and sends the new x_p. Once both ends of an edge know both models of an iteration, each of them sets
γ_p ← γ_p + ρ·(x_p − x_j). One end adds exactly what the other end subtracts, so Σ_p γ_p = 0. At a
fixed point all models are equal and Σ_p ∇f_p = 0, however the data is sharded.
Waiting: synchronous (`delay` = 0, `barrier` = null): a worker waits for all of its neighbours,
colour by colour. If a number of steps or samples ends the run, no worker starts more iterations
than fit in; the models are then the same on every machine. Asynchronous: `barrier` of its
neighbours must have sent the models above (the partial barrier), and none may be more than `delay`
iterations behind (the bounded delay). Duals are then updated later, so ρ has to be smaller.
Pause, and end of a stage: each worker tells its neighbours its last iteration, and waits for all
models up to theirs. So both ends of an edge know the same pairs.

Limit: a worker without neighbours runs SGD.
Sources: Mota et al., "D-ADMM: A Communication-Efficient Distributed Algorithm for Separable
Optimization", IEEE TSP 2013; Zhang and Kwok, "Asynchronous Distributed ADMM for Consensus
Optimization", ICML 2014 (barrier and delay).
Differs: the papers solve for the argmin; here H steps of SGD approximate it. The penalty contains
the term ρ·D·‖x − x_p‖²/2, which keeps these steps near x_p. The asynchronous paper has a master;
here asynchrony is on a graph.

Family: gossip.
Status: reproduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from ashl.errors import UsageError
from ashl.optimizer.absent import add_gradients
from ashl.option import Count, Natural, Positive, option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.contract import GO, STOP, StageConfig
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
from ashl.topology.graph import Edge, MemberGraph, Round, sources_of
from ashl.topology.local_work import local_work, trainer_of


@option
class DADMM(RoamingRule):
    """Penalties and dual variables on the edges of a graph."""

    local_steps: Count | Literal["plan"]
    rho: Positive
    delay: Natural
    barrier: Count | None

    def check(self, rounds: Sequence[Round]) -> None:
        super().check(rounds)
        most = max(len(row) - 1 for row in rounds[0].rows)
        if self.barrier is not None and self.barrier > most:
            raise UsageError(
                f"sync.barrier={self.barrier}: more than the {most} neighbours of a worker; take"
                f" at most {most}, or null for all of them"
            )

    async def worker(self, ctx: RankContext, stage: StageConfig, state: RoamingState) -> int:
        return await worker(ctx, stage, state, self)


def may_iterate(rule: DADMM, behind: Sequence[int]) -> bool:
    """Return True if an iteration may begin.

    Args: behind: by neighbour, the iterations that its newest model is behind the required one.
    """
    wanted = len(behind) if rule.barrier is None else min(rule.barrier, len(behind))
    return sum(b <= 0 for b in behind) >= wanted and all(b <= rule.delay for b in behind)


@dataclass(kw_only=True)
class Edges(NeighbourModels):
    """A worker's state of its edges."""

    dual: Any  # γ_p
    lower: dict[int, bool]  # neighbour → True if its colour is lower
    own: dict[int, Any]  # its own models by iteration; −1 is the initial one
    matched: dict[int, int]  # neighbour → the last iteration that is in the dual

    def iterations_behind(self, k: int) -> list[int]:
        """Return by how many iterations each neighbour's newest model is behind the one that
        iteration k requires.
        """
        return [k - (not self.lower[j]) - max(versions) for j, versions in self.models.items()]

    def update_dual(self, rho: float) -> None:
        """Add to the dual the pairs of models that both ends of an edge know, then drop models that
        are no longer needed.

        The order of iterations and ranks fixes the bits of the sum.
        """
        pairs = [
            (m, j)
            for j, versions in self.models.items()
            for m in versions
            if self.matched[j] < m <= max(self.own)
        ]
        for m, j in sorted(pairs):
            step = (self.own[m] - self.models[j][m]) * rho
            self.dual = self.dual + step
            self.matched[j] = m
        for j, versions in self.models.items():
            self.models[j] = {
                m: x for m, x in versions.items() if m > self.matched[j] or m == max(versions)
            }
        oldest = min(self.matched.values(), default=max(self.own))
        self.own = {m: x for m, x in self.own.items() if m > oldest or m == max(self.own)}


@dataclass(frozen=True)
class Augmented:
    """The stage's trainer with the gradient of the augmented Lagrangian."""

    trainer: Any
    dual: Any  # γ_p
    weight: float  # 2ρ·D
    target: Any  # mean_j (x_p + x_j)/2
    weighs: ClassVar[bool] = False  # neighbours' models have no weights

    def rate(self, samples: int) -> float:
        return self.trainer.rate(samples)

    def local_step(
        self, params: Any, moments: Any, worker: int, step: int, lr: float, span: range
    ) -> tuple[Any, Any, Any]:
        loss, grad = self.trainer.gradient(params, worker, step, span)
        grad = add_gradients(add_gradients(grad, self.dual), (params - self.target) * self.weight)
        return (loss, *self.trainer.apply(self.trainer.stepped_from(params), moments, grad, lr))


@lru_cache(maxsize=16)
def member_colours(graph: MemberGraph) -> tuple[int, ...]:
    """Return the colour of each rank of a graph."""
    return graph.by_rank(choose_colours(graph.places, len(graph.ranks)), 0)


def choose_colours(edges: tuple[Edge, ...], n: int) -> tuple[int, ...]:
    """Return the colour of each rank: the lowest one that no neighbour of lower rank has."""
    chosen: list[int] = []
    for rank, neighbours in enumerate(sources_of(edges, n)):
        taken = {chosen[j] for j in neighbours if j < rank}
        chosen.append(next(c for c in range(n) if c not in taken))
    return tuple(chosen)


def open_edges(graph: MemberGraph, state: RoamingState, rank: int) -> Edges:
    """Return the state at the start of a stage: the same model on all workers, and duals of
    zero.
    """
    colour = member_colours(graph)
    params = state.params
    neighbours = graph.neighbours[rank]
    return Edges(
        dual=params - params,
        lower={j: colour[j] < colour[rank] for j in neighbours},
        own={-1: params},
        models={j: {-1: params} for j in neighbours},
        received=dict.fromkeys(neighbours, 0),
        matched=dict.fromkeys(neighbours, -1),
    )


def augment_trainer(trainer: Any, edges: Edges, params: Vector, rho: float) -> Any:
    """Return the trainer with the penalty and the dual in every gradient."""
    if not edges.models:
        return trainer
    nearest = [versions[max(versions)] for _, versions in sorted(edges.models.items())]
    total = nearest[0]
    for model in nearest[1:]:
        total = total + model
    target = (params + total * (1 / len(nearest))) * 0.5
    return Augmented(trainer, edges.dual, 2 * rho * len(nearest), target)


def iterations_left(ctx: RankContext, stage: StageConfig, rule: DADMM) -> float:
    """Return how many iterations the stop limits leave; infinity unless all workers are synchronous
    from the start of the run.
    """
    planned = ctx.members.planned
    totals = planned.total_steps, planned.total_samples
    left = stage.stop_criteria.remaining_rounds(0, 0, totals)
    in_step = not rule.delay and rule.barrier is None and stage.index == 0
    return math.ceil(left[0] / left[1]) if left and in_step else math.inf


async def worker(ctx: RankContext, stage: StageConfig, state: RoamingState, rule: DADMM) -> int:
    """Iterate until the coordinator ends the stage. Returns: the final signal."""
    state.enter(stage, ctx.members, ctx.rank)
    graph = graph_of(stage, ctx.members.ranks)
    edges = state.rule_state = state.rule_state or open_edges(graph, state, ctx.rank)
    dropped = 0
    last = iterations_left(ctx, stage, rule)
    while state.signal == GO:
        await await_iteration(ctx, stage, state, rule, last)
        if state.signal != GO:
            break
        edges.update_dual(rule.rho)
        late = max([0, *edges.iterations_behind(edges.k)])
        trainer = augment_trainer(trainer_of(stage, state), edges, state.params, rule.rho)
        work = await local_work(ctx, stage, state, trainer)
        await await_answer(ctx, stage, state)
        await receive_arrived(ctx, stage, state)
        if state.signal == STOP:
            dropped = work.steps
            break
        state.params = edges.own[edges.k] = state.params + work.payload
        await send_model(ctx, stage, state)
        state.version += 1
        edges.k += 1
        await report_merge(ctx, stage, state, work, late)
    await receive_in_flight(ctx, stage, state)
    edges.update_dual(rule.rho)
    await report_done(ctx, stage, state, dropped)
    while not state.may_leave:
        await receive_model(ctx, stage, state)
    return close_worker(ctx, stage, state, dropped)


async def await_iteration(
    ctx: RankContext, stage: StageConfig, state: RoamingState, rule: DADMM, last: float
) -> None:
    """Reach the safe point, then wait until the next iteration may begin or the stage ends."""
    edges: Edges = state.rule_state
    k = edges.k
    ctx.safe_point(stage.index, state)
    await receive_arrived(ctx, stage, state)
    while state.signal == GO and (k >= last or not may_iterate(rule, edges.iterations_behind(k))):
        await receive_model(ctx, stage, state)

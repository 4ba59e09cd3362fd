"""PR-SGD with momentum: H local steps with momentum on each worker, then an average of models and
of momenta.

Use when: shards are skewed and momentum is high, so that local momenta pull models apart.
Avoid when: links cannot carry twice the bytes.
Alternatives: `local_sgd` with local momenta.

Rule: w ← w + Σ w_i·(w_i^H − w) and m ← m + Σ w_i·(m_i^H − m). All workers continue from both
averages. Each message holds a model and a momentum, so payloads are twice those of local SGD. Local
SGD does not average momenta: on non-IID shards a worker's momentum then still points at its own
optimum after an average.
Waiting: every worker waits for all others at each average.

Failures: the round in which a worker fails averages the surviving workers, Σ w_i = 1. A rejoining
worker receives both averages of the last round.

Limits: H = 1 is BSP, up to rounding. Without momentum it is local SGD, which is cheaper then.
Source: Yu, Jin and Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD
for Distributed Non-Convex Optimization", ICML 2019 (PR-SGD-Momentum).

Family: local SGD.
Status: reproduction.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from ashl.option import Count, option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly, join_vectors, split_vectors
from ashl.stage.contract import FAULT_TOLERANT, OUTER, WEIGHTS, StageConfig
from ashl.topology.all_reduce import StepRule
from ashl.topology.local_work import Work, WorkerState, local_work
from ashl.topology.parameter_server import BarrierRule, ServerState


@option
class PRSGDMomentum(BarrierRule, StepRule):
    """An average of models and momenta every H steps."""

    momentum_travels: ClassVar[bool] = True
    own_messages: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({WEIGHTS, OUTER, FAULT_TOLERANT})
    local_steps: Count

    def work(self) -> Callable[[RankContext, StageConfig, WorkerState], Awaitable[Work]]:
        return compute_with_momentum

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        moved, turned = split_vectors(update)
        moments = state.moments if isinstance(turned, SizeOnly) else (state.moments[0] + turned,)
        return moments, *stage.outer.step(state.outer_state, state.params, moved, lr)

    async def make_push(
        self, ctx: RankContext, stage: StageConfig, state: WorkerState
    ) -> tuple[Work, Any, float]:
        work = await compute_with_momentum(ctx, stage, state)
        return work, stage.aggregate.clip(work.payload), work.loss

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        return self.admission_payload(stage, state) if changed else None

    def admission_payload(self, stage: StageConfig, state: ServerState) -> Any:
        return join_vectors(state.params, state.moments[0] if state.moments else state.params)

    def apply_admission(self, state: WorkerState, payload: Any) -> None:
        params, momentum = split_vectors(payload)
        state.params, state.moments = params, state.moments and (momentum,)

    def apply_pull(self, stage: StageConfig, state: WorkerState, payload: Any) -> Any:
        self.apply_admission(state, payload)
        return state.params


async def compute_with_momentum(ctx: RankContext, stage: StageConfig, state: WorkerState) -> Work:
    """Compute local work, with the change of the momentum appended to its payload.

    The state keeps the momentum from before the work, from which both averages are taken.
    """
    before = state.moments if state.begun is None else state.begun.moments
    work = await local_work(ctx, stage, state)
    turned = state.moments[0] - before[0] if before else work.payload
    state.moments = before
    return work._replace(payload=join_vectors(work.payload, turned))

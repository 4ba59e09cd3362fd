"""EASGD, elastic averaging: each worker keeps a model of its own, which a spring ties to the
server's.

Rule: a worker takes H steps from its own x_i and sends it; with x̃ the server's model, x̃ ← x̃ +
α·(x_i − x̃), and the worker goes on from x_i − α·(x_i − x̃) with x̃ as it was before. Both ends
move by the same, so that x_i + x̃ stays what it was. Workers may explore, the further apart the
smaller α; what is evaluated is x̃. Nobody waits for anybody. In the paper α = 0.9/n, with n
workers; with momentum at the workers it is EAMSGD. The model of a worker that is lost is gone with
it, and what it had pulled at x̃ stays; who comes begins at x̃, and α is what it was.

Limit: on one worker α = 1/2 leaves both ends at one model, x̃ + Δ/2: ASP with aggregate.scale=0.5,
to rounding. Source: Zhang, Choromanska and LeCun, "Deep Learning with Elastic Averaging SGD", NIPS
2015, Algorithm 1. Differs: there the step after an exchange has its gradient at x_i as it was
before the exchange; here it is at the model that x_i became.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from ashl.option import Count, Ratio, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.stage.stage import FAULT_TOLERANT, Stage
from ashl.topology.local_work import Work, WorkerState, local_work
from ashl.topology.parameter_server import ServerRule, ServerState, Updates


@option
class EASGD(ServerRule):
    """Models on springs."""

    # whole models travel, and each moves the server's by itself
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    local_steps: Count | Literal["plan"]
    alpha: Ratio

    def messages(self) -> Springs:
        return Springs(self.alpha)


@dataclass(frozen=True)
class Springs(Updates):
    """A worker's own model goes up, how far the spring pulls comes down. The server's rule state is
    the latter.
    """

    alpha: float

    async def make_push(
        self, ctx: RankContext, stage: Stage, state: WorkerState
    ) -> tuple[Work, Any, float]:
        work = await local_work(ctx, stage, state)
        state.params = state.params + work.body
        return work, state.params, work.loss

    async def apply_push(
        self, ctx: RankContext, stage: Stage, state: ServerState, message: Message
    ) -> bool:
        return await ctx.compute(partial(self.pulled_to, state, message), work=1, kind="apply")

    def pulled_to(self, state: ServerState, message: Message) -> bool:
        steps, samples = message.meta[:2]
        state.rule_state = (message.body - state.params) * self.alpha
        state.params = state.params + state.rule_state
        state.progress.commit(message.src, int(steps), int(samples))
        state.progress.merge()
        return True

    async def answer(
        self, ctx: RankContext, stage: Stage, state: ServerState, rank: int, changed: bool
    ) -> Any:
        return state.rule_state

    def apply_admission(self, state: WorkerState, body: Any, kept: WorkerState | None) -> None:
        """Where it goes on from a checkpoint, its own model is there."""
        state.params = kept.params if kept is not None and kept.entered == state.entered else body

    def apply_pull(self, stage: Stage, state: WorkerState, body: Any) -> Any:
        return state.params - body

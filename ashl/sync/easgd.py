"""EASGD, elastic averaging: each worker keeps its own model, which an elastic force ties to the
server's model x̃.

Use when: workers should explore on their own, behind a server that they reach now and then.
Avoid when: a model is needed early: the server's model moves slowly.
Alternatives: `local_sgd`; `async_local_sgd`.

Rule: a worker takes H steps from its own x_i and pushes x_i. The server computes d = α·(x_i − x̃)
and sets x̃ ← x̃ + d; the worker sets x_i ← x_i − d. So x_i + x̃ does not change by an exchange. The
smaller α, the further workers may explore from x̃. The evaluated model is x̃. The paper has α =
0.9/n for n workers; with momentum on the workers it is EAMSGD.
Waiting: a worker waits for the reply to its own push only.

Failures: the effect of a failed worker's pushes on x̃ remains. A rejoining worker starts from x̃,
without the model that it had. α does not change.

Limit: on one worker α = 1/2 sets both models to x̃ + Δ/2, which is ASP with aggregate.scale=0.5, up
to rounding.
Source: Zhang, Choromanska and LeCun, "Deep Learning with Elastic Averaging SGD", NIPS 2015,
Algorithm 1.
Differs: in the paper the first gradient after an exchange is at x_i before the exchange. Here it is
at x_i after it.

Family: local SGD.
Status: reproduction.
"""

from functools import partial
from typing import Any, ClassVar, Literal

from ashl.option import Count, Ratio, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import FAULT_TOLERANT, StageConfig
from ashl.topology.local_work import Work, WorkerState, local_work
from ashl.topology.parameter_server import ServerRule, ServerState


@option
class EASGD(ServerRule):
    """Worker models tied elastically to the server's model.

    A push holds a worker's model, a pull d = α·(x_i − x̃), which is the server's rule state.
    """

    own_messages: ClassVar[bool] = True
    # pushes are whole models, which neither a codec nor weights apply to
    supports: ClassVar[frozenset[str]] = frozenset({FAULT_TOLERANT})
    local_steps: Count | Literal["plan"]
    alpha: Ratio

    async def make_push(
        self, ctx: RankContext, stage: StageConfig, state: WorkerState
    ) -> tuple[Work, Any, float]:
        work = await local_work(ctx, stage, state)
        state.params = state.params + work.payload
        return work, state.params, work.loss

    async def apply_push(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
    ) -> bool:
        return await ctx.compute(partial(self._pull_model, state, message), work=1, kind="apply")

    def _pull_model(self, state: ServerState, message: Message) -> bool:
        steps, samples = message.meta[:2]
        state.rule_state = (message.payload - state.params) * self.alpha
        state.params = state.params + state.rule_state
        state.progress.commit(message.src, int(steps), int(samples))
        state.progress.merge()
        return True

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        return state.rule_state

    def apply_pull(self, stage: StageConfig, state: WorkerState, payload: Any) -> Any:
        return state.params - payload

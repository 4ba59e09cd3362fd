"""1-bit Adam, once the variance has settled: momenta are exchanged in a bit an element, and the
variance is frozen.

Rule: with m and v as Adam left them in the stage before, after T steps, each worker sends C(β1·m +
(1 − β1)·g_i), with what C left out before added to it; the mean of these is the new m on all, and w
← w − η·m̂/(√v̂ + ε), the bias of T steps taken out of both. Adam's own steps cannot be compressed
so, since v is not linear in gradients; v changes little once training is under way. Weight decay is
decoupled, as in AdamW.

Limits: C = identity is Adam with a frozen variance; `schedule=one_bit_adam` with a warm-up to the
end is Adam. Departs from the paper in that bodies are gathered and not compressed a second time on
their way back. Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", ICML 2021, Algorithm 1.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import torch

from ashl.optimizer.adam import descended as stepped
from ashl.option import option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.stage import CODEC, WEIGHTS, Stage
from ashl.topology.all_reduce import StepRule
from ashl.topology.local_work import Work, WorkerState, local_work


@option
class OneBitAdam(StepRule):
    """Sums of momenta."""

    exchange: ClassVar[str] = "gradient"
    after_adam: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS})

    def work(self) -> Callable[[RankContext, Stage, WorkerState], Awaitable[Work]]:
        return momentum

    def step(self, stage: Stage, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        if isinstance(update, SizeOnly):
            return state.moments, state.outer_state, state.params
        count, _, second = state.moments
        return (
            (count, update, second),
            state.outer_state,
            descend(stage, state.params, state.moments, update, lr),
        )


def descend(
    stage: Stage, params: Any, moments: Any, momentum: Any, lr: float, steps: int = 1
) -> Any:
    """The model after so many steps along momenta of this sum, over the variance as it is."""
    adam = stage.plan.optimizer
    kept = params * (1 - lr * float(adam["weight_decay"])) ** steps
    beta1, beta2, eps = (float(adam[key]) for key in ("beta1", "beta2", "eps"))
    return stepped(kept, momentum, moments[2], lr, moments[0], beta1, beta2, eps)


async def momentum(ctx: RankContext, stage: Stage, state: WorkerState) -> Work:
    """What all would have as m if their gradients were this worker's."""
    work = await local_work(ctx, stage, state)
    if isinstance(work.body, SizeOnly):
        return work
    return work._replace(
        body=torch.lerp(state.moments[1], work.body, 1 - float(stage.plan.optimizer["beta1"]))
    )

"""1-bit Adam after its warm-up: workers exchange momenta in about one bit per element, over a
frozen variance.

Use when: the optimizer is Adam and links are slow; the first part of the run may be dense.
Avoid when: another optimizer is used, or no dense stage is affordable.
Alternatives: `zero_one_adam`, which learns the variance on the way; `bsp` with
`compression=one_bit`.

Rule: m and v are Adam's moments after the T warm-up steps of the stage before. Worker i sends
C(β1·m + (1 − β1)·g_i) with error feedback. The mean of these is the new m on all workers, and w ← w
− η·m̂/(√v̂ + ε). Both bias corrections remain those of T steps. v is frozen because it is not linear
in the gradients, so that compressed gradients would not add up to it; after the warm-up it changes
little. Weight decay is decoupled, as in AdamW.
Waiting: every worker waits for all others at each step (all-reduce).

Limits: C = identity is Adam with a frozen variance. `schedule=one_bit_adam` with a warm-up until
the end is Adam.
Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed", ICML 2021, Algorithm 1.
Differs: workers gather all payloads, where the paper compresses the mean a second time. DeepSpeed's
implementation has no bias correction.

Family: adaptive optimizers.
Status: internal.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import torch

from ashl.optimizer.adam import adam_step
from ashl.option import option
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.contract import CODEC, FAULT_TOLERANT, WEIGHTS, StageConfig
from ashl.topology.all_reduce import StepRule
from ashl.topology.local_work import Work, WorkerState, local_work


@option
class OneBitAdam(StepRule):
    """All-reduce of compressed momenta, for Adam with a frozen variance."""

    exchange: ClassVar[str] = "gradient"
    after_adam: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, FAULT_TOLERANT, WEIGHTS})

    def work(self) -> Callable[[RankContext, StageConfig, WorkerState], Awaitable[Work]]:
        return compute_momentum

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        if isinstance(update, SizeOnly):
            return state.moments, state.outer_state, state.params
        count, _, second = state.moments
        return (
            (count, update, second),
            state.outer_state,
            descend(stage, state.params, state.moments, update, lr),
        )


def descend(
    stage: StageConfig, params: Any, moments: Any, momentum: Any, lr: float, steps: int = 1
) -> Any:
    """Return the model after `steps` steps of Adam whose momenta add up to `momentum`, with the
    variance and step count in `moments`.
    """
    adam = stage.plan.optimizer
    decayed = params * (1 - lr * float(adam["weight_decay"])) ** steps
    beta1, beta2, eps = (float(adam[key]) for key in ("beta1", "beta2", "eps"))
    return adam_step(decayed, momentum, moments[2], lr, moments[0], beta1, beta2, eps)


async def compute_momentum(ctx: RankContext, stage: StageConfig, state: WorkerState) -> Work:
    """Return this worker's local work with its momentum β1·m + (1 − β1)·g_i as the payload."""
    work = await local_work(ctx, stage, state)
    if isinstance(work.payload, SizeOnly):
        return work
    return work._replace(
        payload=torch.lerp(state.moments[1], work.payload, 1 - float(stage.plan.optimizer["beta1"]))
    )

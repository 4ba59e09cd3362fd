"""0/1 Adam: the variance is learned at some steps only; momenta travel in about one bit per
element, later only every H steps.

Use when: the optimizer is Adam, and links are so slow that even one-bit messages should be rare.
Avoid when: another optimizer is used, or links are fast.
Alternatives: `one_bit_adam` with a dense first stage; `local_sgd`.

Rule: step t before `freeze_step` is one of two kinds. In a whole step workers sum their gradients
uncompressed and take a step of Adam, which updates the variance v. In any other step they exchange
compressed momenta over the present v, as 1-bit Adam does. The first κ = `update_scaler` steps are
whole. Then every second step is whole, κ times; then every fourth one, κ times; and so on.
From `freeze_step` on v is frozen. Each worker takes H steps x ← x − η·m̂/(√v̂ + ε), with its own m
← β1·m + (1 − β1)·g_i. It sends C(u), u = Σ m over these steps, with error feedback. All workers
continue from x of the round's start with the mean ū of u: x − η·ū/(√v̂ + ε), m = ū/H. H is 1 at
first and doubles every `local_step_scaler` steps, up to `local_step_clipper`.
Both bias corrections are those of the number of whole steps. In all other steps weight decay is
decoupled.
Waiting: every worker waits for all others at each exchange (all-reduce).

Limits: with `update_scaler` ≥ `freeze_step` ≥ the steps of the run it is Adam, bit for bit. With
`update_scaler` ≥ `freeze_step` and `local_step_clipper` = 1 it is 1-bit Adam after a warm-up of
`freeze_step` steps, bit for bit.
Source: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR
2023 (arXiv 2202.06009), Algorithm 1; its policies, and their names, as in DeepSpeed.
Differs: u is the sum of momenta without their η, which is constant within a round. A whole step
updates m from uncompressed gradients too. Workers gather all payloads, where the paper compresses
the mean a second time. DeepSpeed compresses gradients before `freeze_step`, where this follows the
paper with momenta; and it has no bias correction.

Family: adaptive optimizers.
Status: situational.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

import torch

from ashl.device import read_scalars
from ashl.option import Count, option
from ashl.plan.plan import WorkerPlan
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly
from ashl.stage.contract import CODEC, FAULT_TOLERANT, WEIGHTS, StageConfig
from ashl.stage.members import with_local_steps
from ashl.stage.progress import Progress
from ashl.sync.one_bit_adam import descend
from ashl.topology.all_reduce import PeerState, StepRule
from ashl.topology.local_work import Work, WorkerState, next_batch, trainer_of


@option
class ZeroOneAdam(StepRule):
    """Whole gradients, compressed momenta or local steps, by step counts."""

    exchange: ClassVar[str] = "accumulated"
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, FAULT_TOLERANT, WEIGHTS})
    freeze_step: Count
    update_scaler: Count
    local_step_scaler: Count
    local_step_clipper: Count

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | {"adam": ""}

    def work(self) -> Callable[[RankContext, StageConfig, WorkerState], Awaitable[Work]]:
        return compute_momenta

    def sums_whole(self, stage: StageConfig, progress: Progress) -> bool:
        # every merge advances all clocks, which begin at 0 in each stage
        at, gap = progress.slowest, 1
        if at >= self.freeze_step:
            return False
        while at >= self.update_scaler * gap:
            at -= self.update_scaler * gap
            gap *= 2
        return at % gap == gap - 1

    def in_round(
        self, stage: StageConfig, state: None, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        steps = self._frozen_local_steps(progress.slowest - self.freeze_step)
        return with_local_steps(stage.plan.workers, repeat(steps))

    def _frozen_local_steps(self, merges: int) -> int:
        """Return H after `merges` merges with a frozen variance."""
        steps = 1
        while steps < self.local_step_clipper:
            merges -= max(1, self.local_step_scaler // steps)
            if merges < 0:
                break
            steps = min(2 * steps, self.local_step_clipper)
        return steps

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        if isinstance(update, SizeOnly):
            return state.moments, state.outer_state, state.params
        if self.sums_whole(stage, state.progress):
            moments, params = stage.trainer.apply(state.params, state.moments, update, lr)
            return moments, state.outer_state, params
        (count, _, second), steps = state.moments, state.local_steps
        params = descend(stage, state.params, state.moments, update, lr, steps)
        return (count, update / steps, second), state.outer_state, params


async def compute_momenta(ctx: RankContext, stage: StageConfig, state: WorkerState) -> Work:
    """Compute a gradient for a whole step, else the sum of the momenta of H steps."""
    assert isinstance(state, PeerState)
    start, lr = ctx.now, stage.trainer.rate(state.samples)
    losses, total, trainer = [], None, trainer_of(stage, state)
    params, moments = state.params, state.moments
    whole = stage.sync.sums_whole(stage, state.progress)
    for last in range(1 - state.local_steps, 1):
        batch = (ctx.rank, *next_batch(state))
        work = partial(compute_step, stage, trainer, params, moments, whole, bool(last), batch, lr)
        loss, params, moments, payload = await ctx.compute(work, work=state.batch)
        losses.append(loss)
        total = payload if total is None else total + payload
    steps = len(losses)
    loss = sum(read_scalars(losses)) / steps
    return Work(total, loss, steps, steps * state.batch, (ctx.now - start) / steps, state.version)


def compute_step(
    stage: StageConfig,
    trainer: Any,
    params: Any,
    moments: Any,
    whole: bool,
    goes_on: bool,
    batch: tuple[int, int, range],
    lr: float,
) -> tuple[Any, Any, Any, Any]:
    """Return (loss, model, moments, payload) of one local step.

    The model moves only if another step follows before the exchange (`goes_on`).
    """
    loss, payload = trainer.gradient(params, *batch)
    if whole or isinstance(payload, SizeOnly):
        return loss, params, moments, payload
    payload = torch.lerp(moments[1], payload, 1 - float(stage.plan.optimizer["beta1"]))
    if goes_on:
        params = descend(stage, params, moments, payload, lr)
    return loss, params, (moments[0], payload, moments[2]), payload

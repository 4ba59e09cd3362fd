"""QSR, the quadratic synchronisation rule: local SGD whose H grows as the learning rate decays.

Use when: local SGD with a learning rate that decays to zero, for example a cosine.
Avoid when: the rate is constant: H then stays the same.
Alternatives: `local_sgd`; `adacomm` if the loss should decide.

Rule: local SGD with H = max(H_base, ⌊(α/η)²⌋), at most `h_max`, with η the learning rate at the
last average. While the learning rate warms up, η is its value after the warm-up. The first round of
a stage takes H_base steps. With `local_steps=plan` H_base is the stage's `h_preset`, and worker i
takes ⌊H_i·H/H_base⌋ steps, so that equal cycles remain equal.
Waiting: every worker waits for all others at each average, at a server or under all-reduce.

Limits: a constant learning rate with (α/η)² < H_base + 1 is local SGD with H_base; so is `h_max` =
H_base.
Source: Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024.

Family: local SGD.
Status: situational.
"""

from typing import Literal

from ashl.option import Count, Positive, option
from ashl.plan.plan import WorkerPlan
from ashl.stage.contract import StageConfig
from ashl.stage.members import with_local_steps
from ashl.stage.progress import Progress
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


@option
class QSR(BarrierRule, StepRule):
    """An average every H steps, with H growing."""

    local_steps: Count | Literal["plan"]
    alpha: Positive
    h_max: Count

    def next_assignment(
        self, stage: StageConfig, state: None, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=self._steps(stage, progress, stage.worker(rank).local_steps))

    def in_round(
        self, stage: StageConfig, state: None, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        workers = stage.plan.workers
        if not progress.slowest:
            return workers
        steps = (self._steps(stage, progress, worker.local_steps) for worker in workers)
        return with_local_steps(workers, steps)

    def _steps(self, stage: StageConfig, progress: Progress, planned: int) -> int:
        """Return the present H of a worker whose planned H is `planned`."""
        base = stage.plan.h_preset or planned
        lr = stage.trainer.rate(max(progress.samples, stage.trainer.warmup_samples))
        return planned * self._steps_at_rate(base, lr) // base

    def _steps_at_rate(self, base: int, lr: float) -> int:
        """Return H at this learning rate; `base` at a learning rate of 0."""
        limit = max(base, self.h_max)
        if lr == 0:
            return base
        if self.alpha / lr >= limit:  # its square is larger still, and might overflow
            return limit
        return min(max(base, int((self.alpha / lr) ** 2)), limit)

"""QSR, the quadratic synchronisation rule: local SGD whose H grows as the learning rate decays.

Rule: local SGD with H = max(H_base, ⌊(α/η)²⌋), at most `h_max`, for the η at the last average. With
`local_steps=plan` H_base is the stage's `h_preset`, and worker i takes ⌊H_i·H/H_base⌋ steps, so
that equal cycles stay equal. The first round of a stage takes H_base steps. At a server or under
all-reduce. While the rate warms up, η is what it will be after that.

Limits: a constant rate with (α/η)² < H_base + 1 is local SGD with H_base; `h_max` = H_base is too.
Source: Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024.
"""

from typing import Literal

from ashl.option import Count, Positive, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


@option
class QSR(BarrierRule, StepRule):
    """A barrier at every H steps, and ever fewer of them."""

    local_steps: Count | Literal["plan"]
    alpha: Positive
    h_max: Count

    def next_assignment(
        self, stage: Stage, state: None, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=self._steps(stage, progress, stage.worker(rank).local_steps))

    def in_round(self, stage: Stage, state: None, progress: Progress) -> Stage:
        if not progress.slowest:
            return stage
        steps = tuple(
            self._steps(stage, progress, worker.local_steps) for worker in stage.plan.workers
        )
        return stage.cached(
            lambda whole: whole.with_steps_by_worker(lambda rank, planned: steps[rank]),
            ("grown", steps),
        )

    def _steps(self, stage: Stage, progress: Progress, planned: int) -> int:
        """H now of a worker that is planned to take so many steps."""
        base = stage.plan.h_preset or planned
        return (
            planned
            * self._grown(
                base, stage.trainer.rate(max(progress.samples, stage.trainer.warmup_samples))
            )
            // base
        )

    def _grown(self, base: int, lr: float) -> int:
        """H at this learning rate; a rate of 0, where nothing is learned, leaves it."""
        limit = max(base, self.h_max)
        if lr == 0 or self.alpha / lr >= limit:  # the square of what is that large is larger still
            return base if lr == 0 else limit
        return min(max(base, int((self.alpha / lr) ** 2)), limit)

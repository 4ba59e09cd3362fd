"""CR-PSGD-Catalyst: repeated runs of CR-PSGD, each with a penalty on the distance from its start,
for non-convex losses.

Use when: rounds are expensive, gradient noise limits training, and the loss is not convex.
Avoid when: the loss is convex or rounds are cheap.
Alternatives: `cr_psgd` without the penalty; `local_sgd`.

Rule: run k minimises f(x) + θ/2·‖x − y‖², with y the model at the start of the run. It does so by
CR-PSGD from the first batch size on: w ← w − γ·(Σ_i b_i·g_i / Σ_j b_j + θ·(w − y)). A run ends
before its next step would exceed `budget` samples of all workers together. The next run starts from
its model, with the first batch size again. Momentum continues across runs.
Waiting: every worker waits for all others at each step.

Limits: a budget of one step is BSP for every θ, because then w = y. A budget beyond the end of the
run with θ → 0 is CR-PSGD.
Source: Yu and Jin, ICML 2019, Algorithm 2; after Lin, Mairal and Harchaoui, "A Universal Catalyst
for First-Order Optimization", NIPS 2015.
Differs: `budget` is a parameter; the paper's is √(n·T) samples for n workers with T samples each,
and as many runs.

Family: synchronous steps.
Status: reproduction.
"""

from typing import Any

from ashl.aggregate.weighted import Push
from ashl.optimizer.absent import add_gradients
from ashl.option import Count, Positive, option
from ashl.stage.contract import StageConfig
from ashl.stage.members import survivors
from ashl.stage.progress import Progress
from ashl.sync.cr_psgd import CRPSGD, Growth
from ashl.topology.all_reduce import RoundReport


@option
class CRPSGDCatalyst(CRPSGD):
    """Growing batches in repeated runs."""

    theta: Positive
    budget: Count  # samples

    def observe(self, stage: StageConfig, state: Growth, progress: Progress, push: Push) -> Growth:
        grown = super().observe(stage, state, progress, push)
        return grown if grown == state else self._within_budget(stage, grown, progress)

    def observe_round(
        self, stage: StageConfig, state: Growth, progress: Progress, report: RoundReport
    ) -> Growth:
        return self._within_budget(
            stage, super().observe_round(stage, state, progress, report), progress
        )

    def _within_budget(self, stage: StageConfig, grown: Growth, progress: Progress) -> Growth:
        """Return the growth after a merge: that of this run, or the start of the next one."""
        present = survivors(stage, progress.failed)
        following = sum(self._batch(stage, grown.t, rank) for rank in present)
        over = progress.samples - grown.since + following > self.budget
        return Growth(0, progress.version, progress.samples) if over else grown

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        """Take the optimizer step. The outer state, unused when gradients are merged, holds y."""
        y = state.outer_state if state.rule_state.t else state.params
        update = add_gradients(update, (state.params - y) * self.theta)
        exact = stage.pipeline.traits.lossless
        moments, params = stage.trainer.apply(state.params, state.moments, update, lr, exact)
        return moments, y, params

"""CR-PSGD-Catalyst: CR-PSGD again and again, each time held to where it began, for losses that are
not convex.

Rule: run k minimises f(x) + θ/2·‖x − y‖², y the model that it begins with, by CR-PSGD from the
first batch on: w ← w − γ·(Σ_i b_i·g_i / Σ_j b_j + θ·(w − y)). A run ends before it would take more
than `budget` samples of all workers together, and the next one begins with its model, and with
small batches again. Momentum goes on from one to the next. In the paper that is √(n·T) of n workers
with T samples each, hence as many runs.

Limits: a budget of one step is BSP, whatever θ, since then w = y; without an end (a large budget)
and θ → 0 it is CR-PSGD. Source: Yu and Jin, ICML 2019, Algorithm 2; after Lin, Mairal and
Harchaoui, "A Universal Catalyst for First-Order Optimization", NIPS 2015.
"""

from typing import Any

from ashl.aggregate.weighted import Push
from ashl.optimizer.absent import plus
from ashl.option import Count, Positive, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.sync.cr_psgd import CRPSGD, Growth
from ashl.topology.all_reduce import RoundReport


@option
class CRPSGDCatalyst(CRPSGD):
    """Growing batches, again and again."""

    theta: Positive
    budget: Count

    def observe(self, stage: Stage, state: Growth, progress: Progress, push: Push) -> Growth:
        grown = super().observe(stage, state, progress, push)
        return grown if grown == state else self._within_budget(stage, grown, progress)

    def observe_round(
        self, stage: Stage, state: Growth, progress: Progress, report: RoundReport
    ) -> Growth:
        return self._within_budget(
            stage, super().observe_round(stage, state, progress, report), progress
        )

    def _within_budget(self, stage: Stage, grown: Growth, progress: Progress) -> Growth:
        """After a merge: this run goes on, or the next one begins."""
        following = sum(self._batch(stage, grown.t, rank) for rank in stage.workers)
        over = progress.samples - grown.since + following > self.budget
        return Growth(0, progress.version, progress.samples) if over else grown

    def step(self, stage: Stage, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        """y takes the place of an outer optimizer's moments, which merged gradients have no other
        use for.
        """
        y = state.outer_state if state.rule_state.t else state.params
        update, exact = plus(update, (state.params - y) * self.theta), stage.link.traits.lossless
        moments, params = stage.trainer.apply(state.params, state.moments, update, lr, exact)
        return moments, y, params

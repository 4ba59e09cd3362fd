"""AdaComm: local SGD whose H shrinks as the loss falls.

Rule: every `every_s` seconds τ ← ⌈√(F(x_l)/F(x_0))·τ_0⌉, and where that would not shrink it, τ ←
⌈τ/2⌉; F is the running mean of the workers' minibatch losses, F(x_0) that of the first round. A
learning rate below its highest so far stretches this by √(η_max/η_l), at most to τ_0: only decay
counts, not warm-up, and the stretch is put on top of the τ that the loss has earned, so that under
a falling rate halving still comes to an end. Everybody waits at each average. Under all-reduce the
clock is that of the lead rank, which says with the next average that it is time.

Limits: τ_0 = 1 is local SGD with H = 1, so BSP. Source: Wang and Joshi, "Adaptive Communication
Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, arXiv
1810.08313. Differs: there τ is set at fixed times, l·T_0; here `every_s` counts from the average at
which it was last set, so that the times drift by up to a round each.
"""

import math
from dataclasses import dataclass, replace

from ashl.aggregate.weighted import Push
from ashl.option import Count, Span, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


@dataclass(frozen=True)
class Period:
    """The communication period now."""

    earned: int  # τ by the loss alone
    local_steps: int  # τ
    since_s: float  # when it was last set
    first_loss: float = math.nan  # F(x_0)
    top_rate: float = 0.0  # highest learning rate so far


@option
class AdaComm(BarrierRule, StepRule):
    """A barrier at every τ steps, τ adapted to the loss."""

    local_steps: Count
    every_s: Span

    def begin(self, stage: Stage, progress: Progress) -> Period:
        return Period(self.local_steps, self.local_steps, progress.now_s)

    def on_rescale(self, stage: Stage, state: Period, progress: Progress) -> Period:
        return state

    def observe(self, stage: Stage, state: Period, progress: Progress, push: Push) -> Period:
        """At a merge: is it time for another τ? Judged here, so that all workers that it lets go
        get the same.
        """
        if len(progress.waiting) < progress.present:
            return state
        return self._adapted(
            stage, state, progress, progress.now_s, self.due(state, progress.now_s)
        )

    def due(self, state: Period, now_s: float) -> bool:
        return now_s - state.since_s >= self.every_s

    def observe_round(
        self, stage: Stage, state: Period, progress: Progress, report: RoundReport
    ) -> Period:
        return self._adapted(stage, state, progress, report.now_s, report.due)

    def in_round(self, stage: Stage, state: Period, progress: Progress) -> Stage:
        return stage.with_local_steps(state.local_steps)

    def _adapted(
        self, stage: Stage, state: Period, progress: Progress, now_s: float, due: bool
    ) -> Period:
        rate = stage.trainer.rate(progress.samples)
        top_rate = max(state.top_rate, rate)
        first_loss = progress.loss if math.isnan(state.first_loss) else state.first_loss
        state = replace(state, top_rate=top_rate, first_loss=first_loss)
        if not due or not first_loss:  # without gradients there is no loss
            return state
        by_loss = math.ceil(math.sqrt(progress.loss / first_loss) * self.local_steps)
        earned = by_loss if by_loss < state.earned else math.ceil(state.earned / 2)
        stretch = math.sqrt(top_rate / rate) if rate else 1.0
        steps = min(self.local_steps, math.ceil(stretch * earned))
        return replace(state, earned=earned, local_steps=steps, since_s=now_s)

    def next_assignment(
        self, stage: Stage, state: Period, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=state.local_steps)

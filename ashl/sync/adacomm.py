"""AdaComm: local SGD with rare averages at first, and more frequent ones the lower the loss is.

Use when: links are slow and no good H is known: early rounds may be long, late ones short.
Avoid when: workers are very unequal, because each average is a barrier.
Alternatives: `local_sgd` with a fixed H; `qsr` if the learning rate decays.

Rule: local SGD with H = τ, which starts at τ_0 = `local_steps`. At the first average that is
`every_s` seconds or more after the last change, τ ← ⌈√(F(x_l)/F(x_0))·τ_0⌉. If that is not smaller
than before, τ ← ⌈τ/2⌉. F is the running mean of the workers' minibatch losses, and F(x_0) its value
at the first average.
If the learning rate η is below its highest value so far, this τ is multiplied by √(η_max/η), up to
τ_0. So a learning rate that decays increases τ, and its warm-up does not. The next change starts
from τ without this factor, so that halving reaches 1 under a decaying rate too.
Waiting: every worker waits for all others at each average. Under all-reduce the clock of the lead
rank decides, and its decision is piggybacked on the next average.

Limits: τ_0 = 1 is local SGD with H = 1, so BSP.
Source: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime
Trade-off in Local-Update SGD", MLSys 2019, arXiv 1810.08313.
Differs: in the paper τ changes at fixed times, l·T_0. Here `every_s` counts from the average of the
last change, so each change may be up to one round later. The paper's factor of the learning rate,
√(η_0/η), has no limit, so a decay may make τ longer than τ_0. It shortens τ in a warm-up.

Family: local SGD.
Status: situational.
"""

import math
from dataclasses import dataclass, replace
from itertools import repeat

from ashl.aggregate.weighted import Push
from ashl.option import Count, Span, option
from ashl.plan.plan import WorkerPlan
from ashl.stage.contract import StageConfig
from ashl.stage.members import with_local_steps
from ashl.stage.progress import Progress
from ashl.topology.all_reduce import RoundReport, StepRule
from ashl.topology.parameter_server import Assignment, BarrierRule


@dataclass(frozen=True)
class Period:
    """The present communication period."""

    earned: int  # τ without the factor of the learning rate
    local_steps: int  # τ
    since_s: float  # run time of the last change
    first_loss: float = math.nan  # F(x_0)
    top_rate: float = 0.0  # highest learning rate so far


@option
class AdaComm(BarrierRule, StepRule):
    """Averages after τ local steps, with τ adapted to the loss."""

    local_steps: Count
    every_s: Span

    def begin(self, stage: StageConfig, progress: Progress) -> Period:
        return Period(self.local_steps, self.local_steps, progress.now_s)

    def observe(self, stage: StageConfig, state: Period, progress: Progress, push: Push) -> Period:
        """Adapt τ once all workers wait, so that all of them receive the same value."""
        if len(progress.waiting) < progress.num_present:
            return state
        return self._adapt(stage, state, progress, progress.now_s, self.due(state, progress.now_s))

    def due(self, state: Period, now_s: float) -> bool:
        return now_s - state.since_s >= self.every_s

    def observe_round(
        self, stage: StageConfig, state: Period, progress: Progress, report: RoundReport
    ) -> Period:
        return self._adapt(stage, state, progress, report.now_s, report.due)

    def in_round(
        self, stage: StageConfig, state: Period, progress: Progress
    ) -> tuple[WorkerPlan, ...]:
        return with_local_steps(stage.plan.workers, repeat(state.local_steps))

    def _adapt(
        self, stage: StageConfig, state: Period, progress: Progress, now_s: float, due: bool
    ) -> Period:
        rate = stage.trainer.rate(progress.samples)
        top_rate = max(state.top_rate, rate)
        first_loss = progress.loss if math.isnan(state.first_loss) else state.first_loss
        state = replace(state, top_rate=top_rate, first_loss=first_loss)
        if not due or not first_loss:  # a run that is only timed has a loss of 0
            return state
        by_loss = math.ceil(math.sqrt(progress.loss / first_loss) * self.local_steps)
        earned = by_loss if by_loss < state.earned else math.ceil(state.earned / 2)
        stretch = math.sqrt(top_rate / rate) if rate else 1.0
        steps = min(self.local_steps, math.ceil(stretch * earned))
        return replace(state, earned=earned, local_steps=steps, since_s=now_s)

    def next_assignment(
        self, stage: StageConfig, state: Period, progress: Progress, rank: int
    ) -> Assignment:
        return Assignment(local_steps=state.local_steps)

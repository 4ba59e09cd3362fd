"""AdaComm: local SGD whose H shrinks as the loss falls.

Rule: every `every_s` seconds τ ← ⌈√(F(x_l)/F(x_0))·τ_0⌉, and where that would not shrink it, τ ← ⌈τ/2⌉; F is the
running mean of the workers' minibatch losses, F(x_0) that of the first round. A learning rate below its highest so
far stretches this by √(η_max/η_l), at most to τ_0: only decay counts, not warm-up, and the stretch is put on top of
the τ that the loss has earned, so that under a falling rate halving still comes to an end. Everybody waits at each
average.

Limits: τ_0 = 1 is local SGD with H = 1, so BSP. Source: Wang and Joshi, "Adaptive Communication Strategies to
Achieve the Best Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, arXiv 1810.08313.
"""

import math
from dataclasses import dataclass

from ashl.aggregate.weighted import Push
from ashl.option import Count, Span, option
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.topology.parameter_server import BarrierRule, Orders


@dataclass
class Period:
    """The communication period now."""

    earned: int  # τ by the loss alone
    local_steps: int  # τ
    since_s: float  # when it was last set
    first_loss: float = math.nan  # F(x_0)
    top_rate: float = 0.0  # highest learning rate so far


@option
class AdaComm(BarrierRule):
    """A barrier at every τ steps, τ adapted to the loss."""

    local_steps: Count
    every_s: Span

    def begin(self, stage: Stage, tally: Tally) -> Period:
        return Period(self.local_steps, self.local_steps, tally.now_s)

    def rescaled(self, stage: Stage, state: Period, tally: Tally) -> Period:
        return state

    def observe(self, stage: Stage, state: Period, tally: Tally, push: Push) -> Period:
        """At a merge: is it time for another τ? Judged here, so that all workers that it lets go get the same."""
        if len(tally.waiting) < tally.present:
            return state
        rate = stage.trainer.rate(tally.samples)
        state.top_rate = max(state.top_rate, rate)
        if math.isnan(state.first_loss):
            state.first_loss = tally.loss
        if tally.now_s - state.since_s < self.every_s or not state.first_loss:  # without gradients there is no loss
            return state
        state.since_s = tally.now_s
        by_loss = math.ceil(math.sqrt(tally.loss / state.first_loss) * self.local_steps)
        state.earned = by_loss if by_loss < state.earned else math.ceil(state.earned / 2)
        stretch = math.sqrt(state.top_rate / rate) if rate else 1.0
        state.local_steps = min(self.local_steps, math.ceil(stretch * state.earned))
        return state

    def steer(self, stage: Stage, state: Period, tally: Tally, rank: int) -> Orders:
        return Orders(local_steps=state.local_steps)

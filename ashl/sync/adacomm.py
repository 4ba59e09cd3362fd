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
from typing import ClassVar

from ashl.option import Count, Positive, option
from ashl.stage.stage import Push, Stage, Tally


@dataclass
class Period:
    """The communication period now."""

    earned: int  # τ by the loss alone
    local_steps: int  # τ
    since_s: float  # when it was last set
    first_loss: float = math.nan  # F(x_0)
    top_rate: float = 0.0  # highest learning rate so far


@option
class AdaComm:
    """A barrier at every τ steps, τ adapted to the loss."""

    averages: ClassVar[bool] = True
    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("parameter_server",)
    local_steps: Count
    every_s: Positive

    def quorum(self, num_workers: int) -> int:
        return num_workers

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

    def admit(self, tally: Tally) -> list[int]:
        return tally.behind()

    def observe(self, stage: Stage, tally: Tally, push: Push, now_s: float) -> None:
        """At a merge: is it time for another τ? Judged here, so that all workers that it lets go get the same."""
        period = self._period(tally)
        if len(tally.waiting) < stage.num_workers:
            return
        rate = stage.trainer.rate(tally.samples)
        period.top_rate = max(period.top_rate, rate)
        if math.isnan(period.first_loss):
            period.first_loss = tally.loss
        if now_s - period.since_s < self.every_s or not period.first_loss:  # a run without gradients has no loss
            return
        period.since_s = now_s
        by_loss = math.ceil(math.sqrt(tally.loss / period.first_loss) * self.local_steps)
        period.earned = by_loss if by_loss < period.earned else math.ceil(period.earned / 2)
        stretch = math.sqrt(period.top_rate / rate) if rate else 1.0
        period.local_steps = min(self.local_steps, math.ceil(stretch * period.earned))

    def steer(self, stage: Stage, tally: Tally, rank: int, now_s: float) -> tuple[int, float, float]:
        return self._period(tally).local_steps, stage.worker(rank).compression_ratio, 0.0

    def _period(self, tally: Tally) -> Period:
        """The state; it begins with the stage."""
        if not isinstance(tally.rule_state, Period):
            tally.rule_state = Period(self.local_steps, self.local_steps, tally.start["seconds"])
        return tally.rule_state

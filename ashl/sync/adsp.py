"""ADSP: everybody commits at one common rate, and the fast take more local steps between two commits.

Rule: time is cut into check periods Γ, and at the end of each all workers should have committed C times more. A
worker commits every Γ/ΔC_i − O_i seconds, with ΔC_i what it still owes and O_i the last measured push and pull, and
takes real local steps in between; nobody waits. Here the interval is (what is left of Γ)/(what is left of ΔC_i) −
O_i, the same at a period's start, so that rounding up to whole steps does not add up. The server adds Δ_i / M
(`aggregate=uniform`).

C is searched on the run's tally: one period at C, one at C + 1, … while the reward grows. A period's reward is a² /
(1/(l_target − c) − b), one over the predicted time to the target, from l(t) = 1/(a²t + b) + c through the running
loss at the period's start, middle and end; t counts from the search's start, so that no period has a head start.
The search begins anew every `search_s`, or when the running loss has risen by `rise`.

Limits: equal workers and Γ/C of exactly H steps is ASP with H local steps. Departs from the paper in that the loss
is the running mean of the workers' minibatches, not the server's own evaluation, and in that a rate which no
interval of `floor_s` can hold ends the search.

Source: Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI 2020, arXiv
1911.06949.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ashl.aggregate.weighted import Push
from ashl.option import Count, Positive, option
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.topology.parameter_server import Orders, ServerRule

Sample = tuple[float, float]  # (seconds, loss)


@dataclass
class Search:
    """The common rate and the search for it."""

    rate: int  # C, commits of each worker in a period
    start_s: float  # of this period
    target: int  # commits of each worker at its end, counted from the stage's start
    begun_s: float  # of the last search
    overhead_s: list[float]  # O by worker
    samples: list[Sample] = field(default_factory=list)  # of this period
    reward: float = -math.inf  # of the period before, in this search
    lowest: float = math.inf  # running loss at a check since the last search
    searching: bool = True
    searches: int = 1


@option
class ADSP(ServerRule):
    """A common commit rate, searched online."""

    gamma_s: Positive
    commits: Count
    floor_s: Positive
    loss_target: Positive
    search_s: Positive
    rise: Positive

    @property
    def interval_s(self) -> float:
        """Seconds of the first local work, before anything is measured."""
        return max(self.floor_s, self.gamma_s / self.commits)

    def begin(self, stage: Stage, tally: Tally) -> Search:
        """The first period begins with the stage."""
        return Search(self.commits, tally.now_s, self.commits, tally.now_s, [0.0] * tally.num_workers)

    def observe(self, stage: Stage, state: Search, tally: Tally, push: Push) -> Search:
        now_s = tally.now_s
        state.overhead_s[push.worker] = push.push_s + push.pull_s
        if len(state.samples) * self.gamma_s / 2 <= now_s - state.start_s:
            state.samples.append((now_s - state.begun_s, tally.loss))
        if now_s >= state.start_s + self.gamma_s:
            self._check(state, tally.loss, now_s)
        return state

    def steer(self, stage: Stage, state: Search, tally: Tally, rank: int) -> Orders:
        left_s, owed = state.start_s + self.gamma_s - tally.now_s, state.target - tally.clocks[rank]
        while owed <= 0 or left_s <= 0:  # it has done its part of this period
            left_s, owed = left_s + self.gamma_s, owed + state.rate
        return Orders(local_steps=1, interval_s=max(self.floor_s, left_s / owed - state.overhead_s[rank]))

    def _check(self, search: Search, loss: float, now_s: float) -> None:
        """A period is over: judge its rate, and say how often everybody is to commit in the next one."""
        periods = int((now_s - search.start_s) // self.gamma_s)
        if search.searching:
            self._judge(search)
        search.lowest = min(search.lowest, loss)
        risen = loss > (1 + self.rise) * search.lowest
        if not search.searching and (risen or now_s - search.begun_s >= self.search_s):
            search.searching, search.searches = True, search.searches + 1
            search.rate, search.reward, search.begun_s, search.lowest = self.commits, -math.inf, now_s, loss
        search.start_s += periods * self.gamma_s
        search.target += periods * search.rate
        search.samples = [(now_s - search.begun_s, loss)]

    def _judge(self, search: Search) -> None:
        """One more commit a period while that pays; else back to the rate before, and the search ends."""
        gain = reward(search.samples, self.loss_target)
        if gain <= search.reward:
            search.rate, search.searching = search.rate - 1, False
        elif (search.rate + 1) * self.floor_s > self.gamma_s:
            search.searching = False
        else:
            search.rate, search.reward = search.rate + 1, gain


def reward(samples: Sequence[Sample], target: float) -> float:
    """One over the predicted seconds to the target loss; 0 where the loss does not fall, or never gets there."""
    if len(samples) < 3 or samples[-1][1] >= samples[0][1] or samples[-1][0] <= samples[0][0]:
        return 0.0
    if samples[-1][1] <= target:
        return math.inf
    a2, b, c = fit(samples)
    return a2 / (1 / (target - c) - b) if c < target else 0.0


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """(a², b, c) of l(t) = 1/(a²t + b) + c through three samples of a falling loss.

    1/(l − c) is a line in t, which gives c in closed form. A loss that does not fall ever more slowly has no such
    c > 0: there, c = 0 and the curve goes through the first and the last sample.
    """
    (t0, l0), (t1, l1), (t2, l2) = samples
    early, whole = (l0 - l1) / (t1 - t0) if t1 > t0 else 0.0, (l0 - l2) / (t2 - t0)
    c = max(0.0, (early * l2 - whole * l1) / (early - whole)) if early > whole else 0.0
    b0, b2 = 1 / (l0 - c), 1 / (l2 - c)
    a2 = (b2 - b0) / (t2 - t0)
    return a2, b0 - a2 * t0, c

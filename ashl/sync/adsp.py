"""ADSP: everybody commits at one common rate, and the fast take more local steps between two
commits.

Rule: time is cut into check periods Γ, and at the end of each all workers should have committed C
times more. A worker commits every Γ/ΔC_i − O_i seconds, with ΔC_i what it still owes and O_i the
last measured push and pull, and takes real local steps in between; nobody waits. Here the interval
is (what is left of Γ)/(what is left of ΔC_i) − O_i, the same at a period's start, so that rounding
up to whole steps does not add up. The server adds Δ_i / M (`aggregate=uniform`).

C is searched on the run's counters: one period at C, one at C + 1, … while the reward grows, then
back to the last C that paid. A period's reward is a² / (1/(l_target − c) − b), one over the
predicted seconds from the search's start to the target, by l(t) = 1/(a²t + b) + c through the
running loss at the period's start, middle and end. Where that curve never gets there (c ≥ l_target)
the reward is no more than 0: t counts from the period's start, and the nearer c comes to the target
the better. A period in which the loss falls ever faster is on no such curve and does not count: its
rate gets another. The search begins anew, from the C of now, `search_s` after it has ended, or when
the running loss has risen by `rise` since the last check.

Limits: equal workers and Γ/C of exactly H steps is ASP with H local steps. Departs from the paper
in that the loss is the running mean of the workers' minibatches, not the server's own evaluation,
in that nobody stops for a period to begin, and in that a rate which no interval of `floor_s` can
hold ends the search. The released code fits by least squares, which makes of a period that speeds
up a straight line, and one without a fall is worth about 0 there; here it is the worst there is.

Source: Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI
2020, arXiv
1911.06949; the released code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ashl.aggregate.weighted import Push
from ashl.option import Count, Positive, Span, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.parameter_server import Assignment, ServerRule

Sample = tuple[float, float]  # (seconds, loss)


@dataclass
class Search:
    """The common rate and the search for it."""

    rate: int  # C, commits of each worker in a period
    start_s: float  # of this period
    target: int  # commits of each worker at its end, counted from the stage's start
    since_s: float  # this search's start; where there is none under way, the last one's end
    searching: bool
    overhead_s: list[float]  # O by worker
    samples: list[Sample] = field(default_factory=list)  # of this period
    reward: float | None = None  # of the period before, in this search
    loss: float = math.nan  # running, at the last check
    searches: int = 1


@option
class ADSP(ServerRule):
    """A common commit rate, searched online."""

    gamma_s: Span
    commits: Count
    floor_s: Span
    loss_target: Positive
    search_s: Span | None
    rise: Positive

    @property
    def interval_s(self) -> float:
        """Seconds of the first local work, before anything is measured."""
        return max(self.floor_s, self.gamma_s / self.commits)

    def begin(self, stage: Stage, progress: Progress) -> Search:
        """The first period begins with the stage."""
        now_s, searching = progress.now_s, self.search_s is not None
        return Search(
            self.commits, now_s, self.commits, now_s, searching, [0.0] * progress.num_workers
        )

    def on_rescale(self, stage: Stage, state: Search, progress: Progress) -> Search:
        """Other workers are searched for anew."""
        return replace(self.begin(stage, progress), searches=state.searches)

    def observe(self, stage: Stage, state: Search, progress: Progress, push: Push) -> Search:
        now_s = progress.now_s
        state.overhead_s[push.worker] = push.push_s + push.pull_s
        if len(state.samples) * self.gamma_s / 2 <= now_s - state.start_s:
            state.samples.append((now_s - state.since_s, progress.loss))
        if now_s >= state.start_s + self.gamma_s:
            self._check(state, progress.loss, now_s)
        return state

    def next_assignment(
        self, stage: Stage, state: Search, progress: Progress, rank: int
    ) -> Assignment:
        left_s, owed = (
            state.start_s + self.gamma_s - progress.now_s,
            state.target - progress.clocks[rank],
        )
        while owed <= 0 or left_s <= 0:  # it has done its part of this period
            left_s, owed = left_s + self.gamma_s, owed + state.rate
        return Assignment(
            local_steps=1, interval_s=max(self.floor_s, left_s / owed - state.overhead_s[rank])
        )

    def _check(self, search: Search, loss: float, now_s: float) -> None:
        """A period is over: judge its rate, and say how often everybody is to commit in the next
        one.
        """
        periods = int((now_s - search.start_s) // self.gamma_s)
        if search.searching:
            self._judge(search, now_s)
        elif self.search_s is not None:
            risen = loss >= (1 + self.rise) * search.loss
            if risen or now_s - search.since_s >= self.search_s:
                search.searching, search.searches = True, search.searches + 1
                search.since_s, search.reward = now_s, None
        search.loss = loss
        search.start_s += periods * self.gamma_s
        search.target += periods * search.rate
        search.samples = [(now_s - search.since_s, loss)]

    def _judge(self, search: Search, now_s: float) -> None:
        """One more commit a period while that pays; else back to the rate before, and the search
        ends.
        """
        gain = reward(search.samples, self.loss_target)
        if gain is None:
            return
        worse = search.reward is not None and gain <= search.reward
        if worse or (search.rate + 1) * self.floor_s > self.gamma_s:
            search.rate -= worse
            search.searching, search.since_s = False, now_s
        else:
            search.rate, search.reward = search.rate + 1, gain


def reward(samples: Sequence[Sample], target: float) -> float | None:
    """One over the seconds at which the curve through three samples gets to the target, the better
    the larger.

    At most 0 where it never does, −∞ where the loss did not fall, ∞ where it is there already; None
    where it fell ever faster, so that 1/(a²t + b) + c goes through no three of them.
    """
    if len(samples) < 3:
        return -math.inf  # too few commits in a period to judge by
    (t0, l0), (t1, l1), (t2, l2) = samples
    if not (t0 < t1 < t2 and l2 < min(l0, l1)):
        return -math.inf
    if l2 <= target:
        return math.inf
    early, whole = (l0 - l1) / (t1 - t0), (l0 - l2) / (t2 - t0)
    if early <= whole:
        return None
    c = (early * l2 - whole * l1) / (early - whole)  # as 1/(l − c) is a line in t
    if c == target:
        return 0.0
    left_s = (
        (l0 - target) / whole * (l2 - c) / (target - c)
    )  # from t0; the same as (1/(target − c) − b)/a²
    return 1 / (t0 + left_s) if c < target else 1 / left_s

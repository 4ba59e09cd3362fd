"""ADSP: all workers commit equally often per second, so a fast worker takes more local steps
between two commits.

Use when: workers are unequal and an exchange is longer than a step: fast workers compute, and none
waits.
Avoid when: runs are shorter than the search for the commit rate; set `search_s=null` then.
Alternatives: `ssp` with planned H, which equalises cycles without a search; `asp` if exchanges are
short.

Rule: time is divided into check periods of Γ seconds. At the end of each period every worker should
have C more commits. A worker takes local steps until its interval is over, then pushes Δ_i. The
interval is (remaining seconds of the period)/(remaining commits ΔC_i) − O_i, with O_i the measured
time of its last push and pull, and at least `floor_s`. The server adds Δ_i/n at each arrival
(`aggregate=uniform`).
Waiting: no worker waits for another one.

Search for C: the server tries one period at C, then one at C + 1, and so on while the reward
increases; then it returns to the last C with an increase. The reward of a period is a²/(1/(l_target
− c) − b). It is one over the predicted seconds from the start of the search until the loss is
l_target, by the curve l(t) = 1/(a²t + b) + c. The curve goes through the running loss at the
period's start, middle and end.
If the curve never reaches the target (c ≥ l_target), the reward is at most 0, and higher the nearer
c is to the target. If the loss decreases faster and faster, no such curve exists: the period does
not count, and C gets another one. A new search starts from the present C `search_s` seconds after
the end of the last one. It also starts if the running loss rose by the fraction `rise` since the
last check.

Limit: with `search_s=null`, equal workers whose interval is H local steps long are ASP with H local
steps and `aggregate=uniform`.
Source: Hu, Wang and Wu, "Distributed Machine Learning through Heterogeneous Edge Systems", AAAI
2020, arXiv 1911.06949; the released code.
Differs: the paper's interval is Γ/ΔC_i − O_i. Ours is equal to it at the start of a period; later
it uses the remaining time and commits, so that rounding up to whole steps does not accumulate. The
loss is the running mean of the workers' minibatch losses, where the paper evaluates the model at
the server. No worker stops at the start of a period. A search ends before a C with Γ/C below
`floor_s`. The released code fits the curve by least squares: it makes a straight line of a loss
that decreases faster and faster. It gives a period without a decrease a reward of about 0, where
ours gives −∞.

Family: asynchronous server.
Status: reproduction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ashl.aggregate.weighted import Push
from ashl.option import Count, Positive, Span, option
from ashl.stage.contract import StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import Assignment, ServerRule

Sample = tuple[float, float]  # (seconds, loss)


@dataclass
class Search:
    """The common commit rate and the state of the search for it."""

    rate: int  # C, commits of each worker in a period
    start_s: float  # start of this period
    target: int  # commits of each worker at the end of this period, counted from the stage's start
    since_s: float  # start of this search; without one, end of the last search
    searching: bool
    overhead_s: list[float]  # O_i by worker
    samples: list[Sample] = field(default_factory=list)  # of this period
    reward: float | None = None  # of the period before, in this search
    loss: float = math.nan  # running loss at the last check
    searches: int = 1  # searches so far


@option
class ADSP(ServerRule):
    """A common commit rate, searched during the run."""

    gamma_s: Span
    commits: Count
    floor_s: Span
    loss_target: Positive
    search_s: Span | None
    rise: Positive

    @property
    def interval_s(self) -> float:
        """Return the seconds of the first local work, before an exchange is measured."""
        return max(self.floor_s, self.gamma_s / self.commits)

    def begin(self, stage: StageConfig, progress: Progress) -> Search:
        """Begin the first period with the stage."""
        return Search(
            rate=self.commits,
            start_s=progress.now_s,
            target=self.commits,
            since_s=progress.now_s,
            searching=self.search_s is not None,
            overhead_s=[0.0] * progress.num_workers,
        )

    def observe(self, stage: StageConfig, state: Search, progress: Progress, push: Push) -> Search:
        now_s = progress.now_s
        state.overhead_s[push.worker] = push.push_s + push.pull_s
        if len(state.samples) * self.gamma_s / 2 <= now_s - state.start_s:
            state.samples.append((now_s - state.since_s, progress.loss))
        if now_s >= state.start_s + self.gamma_s:
            self._check(state, progress.loss, now_s)
        return state

    def next_assignment(
        self, stage: StageConfig, state: Search, progress: Progress, rank: int
    ) -> Assignment:
        left_s = state.start_s + self.gamma_s - progress.now_s
        owed = state.target - progress.clocks[rank]
        while owed <= 0 or left_s <= 0:  # all commits of this period are done, or it is over
            left_s += self.gamma_s
            owed += state.rate
        interval_s = max(self.floor_s, left_s / owed - state.overhead_s[rank])
        return Assignment(local_steps=1, interval_s=interval_s)

    def _check(self, search: Search, loss: float, now_s: float) -> None:
        """End a period: let the search judge its rate, and set the commits of the next period."""
        periods = int((now_s - search.start_s) // self.gamma_s)
        if search.searching:
            self._judge(search, now_s)
        elif self.search_s is not None:
            risen = loss >= (1 + self.rise) * search.loss
            if risen or now_s - search.since_s >= self.search_s:
                search.searching = True
                search.searches += 1
                search.since_s = now_s
                search.reward = None
        search.loss = loss
        search.start_s += periods * self.gamma_s
        search.target += periods * search.rate
        search.samples = [(now_s - search.since_s, loss)]

    def _judge(self, search: Search, now_s: float) -> None:
        """Increase the rate by one if the last increase paid; else return to the rate before and
        end the search.
        """
        gain = reward(search.samples, self.loss_target)
        if gain is None:
            return
        worse = search.reward is not None and gain <= search.reward
        if worse or (search.rate + 1) * self.floor_s > self.gamma_s:
            search.rate -= worse
            search.searching = False
            search.since_s = now_s
        else:
            search.rate += 1
            search.reward = gain


def reward(samples: Sequence[Sample], target: float) -> float | None:
    """Return one over the seconds until the curve through three samples reaches the target loss.

    Higher is better. Returns: at most 0 if the curve never reaches it; −∞ if the loss did not
    decrease; ∞ if the loss is there already; None if it decreased faster and faster, so that no
    curve 1/(a²t + b) + c exists.
    """
    if len(samples) < 3:
        return -math.inf  # too few commits in the period
    (t0, l0), (t1, l1), (t2, l2) = samples
    if not (t0 < t1 < t2 and l2 < min(l0, l1)):
        return -math.inf
    if l2 <= target:
        return math.inf
    early, whole = (l0 - l1) / (t1 - t0), (l0 - l2) / (t2 - t0)
    if early <= whole:
        return None
    c = (early * l2 - whole * l1) / (early - whole)  # 1/(l − c) is a straight line in t
    if c == target:
        return 0.0
    # seconds from t0, equal to (1/(target − c) − b)/a²
    left_s = (l0 - target) / whole * (l2 - c) / (target - c)
    return 1 / (t0 + left_s) if c < target else 1 / left_s

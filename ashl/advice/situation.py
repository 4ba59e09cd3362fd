"""What decides which methods make sense on a cluster, in a few numbers, and the conditions that the
rules name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ashl.plan.plan import Plan
from ashl.plan.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A cluster and a task. Exchanges are of the dense model at a barrier, contention included, in
    slowest steps.
    """

    num_workers: int
    fast_step_s: float
    slow_step_s: float
    second_step_s: float  # of the slowest worker but one
    slow_exchange_s: float  # the longest push and pull, while nobody else does so
    server: float  # an exchange of all with a server
    ring: float  # a sum over all
    layers: int
    skewed: bool  # whether workers see different classes
    first_loss: float  # before anything is learned

    @property
    def unequal(self) -> float:
        """The slowest worker's step by the fastest one's."""
        return self.slow_step_s / self.fast_step_s

    @property
    def exchange(self) -> float:
        """The cheaper way."""
        return min(self.server, self.ring)

    @property
    def values(self) -> dict[str, float]:
        """What the overrides of a rule may name in braces: constants that are published for steps
        of other lengths, as seconds of this cluster, and losses of other tasks, as shares of this
        one's first.
        """
        period_s = 2 * self.slow_step_s + self.slow_exchange_s
        return {
            "gamma_s": 4 * period_s,
            "floor_s": period_s / 8,
            "early_loss": 0.75 * self.first_loss,
            "late_loss": 0.13 * self.first_loss,
        }


def situation(
    profile: Profile, plan: Plan, rates: tuple[float, float], first_loss: float
) -> Situation:
    """From a profile, any plan on that cluster, and BSP's predicted steps per second at a server
    and in a ring.
    """
    steps = sorted(worker.step_s for worker in profile.workers)
    server, ring = (max(0.0, profile.num_workers / rate / steps[-1] - 1) for rate in rates)
    return Situation(
        num_workers=profile.num_workers,
        fast_step_s=steps[0],
        slow_step_s=steps[-1],
        second_step_s=steps[max(0, len(steps) - 2)],
        slow_exchange_s=max(worker.push_s + worker.pull_s for worker in profile.workers),
        server=server,
        ring=ring,
        layers=len(plan.layers),
        skewed=plan.dataset.get("partition") == "dirichlet",
        first_loss=first_loss,
    )


class Condition(NamedTuple):
    """A fact that a rule asks for: `yes` and `no` are what is said of it, with the situation as
    {s}.
    """

    holds: Callable[[Situation], bool]
    yes: str
    no: str

    def reason(self, s: Situation) -> str:
        return (self.yes if self.holds(s) else self.no).format(s=s)


CONDITIONS = {
    "always": Condition(lambda s: True, "it belongs to every comparison", ""),
    "unequal": Condition(
        lambda s: s.unequal >= 1.25,
        "the slowest worker takes {s.unequal:.3g} times as long for a step as the fastest",
        "the workers are about equally fast (the slowest takes {s.unequal:.3g} times as long as the"
        " fastest)",
    ),
    "very_unequal": Condition(
        lambda s: s.unequal >= 4,
        "the slowest worker takes {s.unequal:.3g} times as long for a step as the fastest",
        "the slowest worker takes {s.unequal:.3g} times as long as the fastest, and this is for 4"
        " times and more",
    ),
    "uncentral": Condition(
        lambda s: s.unequal >= 1.25 or (s.num_workers >= 6 and s.server >= 0.3),
        "nobody has to wait for the slowest, nor to queue at a server",
        "the workers are about equally fast, and a server serves them all",
    ),
    "straggler": Condition(
        lambda s: s.num_workers >= 4 and s.slow_step_s >= 2 * s.second_step_s,
        "one worker is far behind all others",
        "no single worker is far behind all others",
    ),
    "equal_crowd": Condition(
        lambda s: s.num_workers >= 4 and s.unequal < 1.25,
        "the workers are about equally fast, so that a barrier costs little",
        "it has a barrier at every step, and the workers are few or unequal",
    ),
    "noticeable": Condition(
        lambda s: s.exchange >= 0.05,
        "an exchange takes {s.exchange:.2g} of the slowest step",
        "an exchange takes no more than {s.exchange:.2g} of the slowest step",
    ),
    "costly": Condition(
        lambda s: s.exchange >= 0.3,
        "an exchange takes {s.exchange:.2g} of the slowest step",
        "an exchange takes {s.exchange:.2g} of the slowest step, and this pays from 0.3 on",
    ),
    "slow_server": Condition(
        lambda s: s.server >= 0.3,
        "an exchange of all with a server takes {s.server:.2g} of the slowest step",
        "an exchange of all with a server takes {s.server:.2g} of the slowest step, and this pays"
        " from 0.3 on",
    ),
    "slow_links": Condition(
        lambda s: s.server >= 1,
        "an exchange of all with a server takes longer than the slowest step ({s.server:.2g}"
        " times)",
        "an exchange of all with a server takes {s.server:.2g} of the slowest step (this is for"
        " slower links)",
    ),
    "several": Condition(
        lambda s: s.num_workers >= 3,
        "there are {s.num_workers} workers to meet",
        "there are only {s.num_workers} workers",
    ),
    "many": Condition(
        lambda s: s.num_workers >= 6,
        "there are {s.num_workers} workers",
        "there are only {s.num_workers} workers",
    ),
    "deep": Condition(
        lambda s: s.layers > 1,
        "the model has {s.layers} tensors that can travel apart",
        "the model is one tensor",
    ),
    "even": Condition(
        lambda s: not s.skewed,
        "every worker sees all classes",
        "workers see different classes (dirichlet), and models that meet rarely drift apart",
    ),
    "skewed": Condition(
        lambda s: s.skewed,
        "workers see different classes (dirichlet)",
        "every worker sees all classes, so there is no bias",
    ),
}
ALWAYS = CONDITIONS["always"]

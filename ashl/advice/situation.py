"""Describe a cluster and a task by the few numbers on which the rules of `rules.yaml` depend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ashl.plan.plan import Plan
from ashl.plan.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A cluster and a task in numbers.

    `server` and `ring` are the time of a barrier exchange of the dense model, with contention,
    divided by the slowest worker's step.
    """

    num_workers: int
    fast_step_s: float
    slow_step_s: float
    second_step_s: float  # step time of the second slowest worker
    slow_exchange_s: float  # longest push and pull of a worker, without contention
    server: float  # exchange of all workers with a server, in slowest steps
    ring: float  # all-reduce over all workers, in slowest steps
    layers: int
    skewed: bool  # True if workers see different classes
    first_loss: float  # loss before training

    @property
    def unequal(self) -> float:
        """The slowest worker's step time divided by the fastest one's."""
        return self.slow_step_s / self.fast_step_s

    @property
    def exchange(self) -> float:
        """The cheaper of both exchanges, in slowest steps."""
        return min(self.server, self.ring)

    @property
    def values(self) -> dict[str, float]:
        """The numbers that a rule's overrides may name in braces.

        Published constants depend on the length of a step or on the task. They are converted to
        seconds of this cluster, and losses to shares of this task's first loss.
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
    """Return the situation of a cluster.

    Args: plan is any plan on that cluster; rates are the predicted steps per second of BSP with a
    server and in a ring.
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
    """A fact that a rule depends on; `yes` and `no` describe it, with the situation as {s}."""

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

"""Choose candidates by rules: read `rules.yaml`, and the few numbers on which its conditions
depend.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ashl.planning.compile_plan import PreparedPlan
from ashl.planning.instantiate import declared_profile

BSP = "BSP"
COMPARE = {">=": operator.ge, ">": operator.gt, "<": operator.lt}


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
    def lag(self) -> float:
        """The slowest worker's step time divided by that of the second slowest."""
        return self.slow_step_s / self.second_step_s

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


def situation_of(plain: Sequence[PreparedPlan], first_loss: float) -> Situation:
    """Return the situation, from the plans of BSP with a server and with a ring."""
    plan, parts, _ = plain[0]
    batch = plan.stages[0].workers[0].batch
    profile = declared_profile(parts.cluster, plan.choices["model"], plan.num_params, batch)
    assert profile is not None  # virtual time has costs
    steps = sorted(worker.step_s for worker in profile.workers)
    rates = [prepared.plan.stages[0].predicted_steps_per_s or 0.0 for prepared in plain]
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


@dataclass(frozen=True)
class Condition:
    """A fact that a rule depends on; `yes` and `no` describe it, with the situation as {s}.

    `holds` is, for example, "unequal >= 1.25 or num_workers >= 6 and server >= 0.3".
    """

    holds: str
    yes: str
    no: str

    def is_met(self, s: Situation) -> bool:
        def compare(clause: str) -> bool:
            name, sign, bound = clause.split()
            return COMPARE[sign](getattr(s, name), float(bound))

        return any(all(map(compare, part.split(" and "))) for part in self.holds.split(" or "))

    def reason(self, s: Situation) -> str:
        return (self.yes if self.is_met(s) else self.no).format(s=s)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A candidate of the race: name, overrides, conditions, and its reason as a clause."""

    name: str
    overrides: str
    why: str
    when: tuple[str, ...] = ("always",)  # names of conditions
    same: str = ""  # the rule that makes the same updates, up to the rounding of sums
    departs: str = ""  # the rule against which it gives something up
    gives_up: str = ""  # property that the candidate gives up

    def applies(self, s: Situation) -> bool:
        return all(CONDITIONS[name].is_met(s) for name in self.when)

    def reason(self, s: Situation) -> str:
        """Return a sentence on why the rule applies or not."""
        conditions = [CONDITIONS[name] for name in self.when]
        unmet = [condition for condition in conditions if not condition.is_met(s)]
        if unmet:
            return f"{unmet[0].reason(s)}."
        return f"{self.why}: {'; '.join(condition.reason(s) for condition in conditions)}."


_read = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CONDITIONS = {name: Condition(**entry) for name, entry in _read["conditions"].items()}
RULES = tuple(Rule(**entry) for entry in _read["rules"])

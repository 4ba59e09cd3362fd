"""Read the rules of `rules.yaml`."""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ashl.advice.situation import ALWAYS, CONDITIONS, Condition, Situation

BSP = "BSP"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A candidate of the race: name, overrides, conditions, and its reason as a clause."""

    name: str
    overrides: str
    why: str
    when: tuple[Condition, ...] = (ALWAYS,)
    same: str = ""  # the rule that makes the same updates, up to the rounding of sums
    departs: str = ""  # the rule against which it gives something up
    gives_up: str = ""  # property that the candidate gives up

    def taken(self, s: Situation) -> bool:
        return all(condition.holds(s) for condition in self.when)

    def reason(self, s: Situation) -> str:
        """Return a sentence on why the rule applies or not."""
        if self.taken(s):
            return f"{self.why}: {'; '.join(condition.reason(s) for condition in self.when)}."
        return f"{next(c for c in self.when if not c.holds(s)).reason(s)}."


def read() -> tuple[Rule, ...]:
    lines = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    rules = (Rule(**{key: value for key, value in line.items() if key != "when"}) for line in lines)
    when = (tuple(CONDITIONS[name] for name in line.get("when", ("always",))) for line in lines)
    return tuple(
        replace(rule, when=conditions) for rule, conditions in zip(rules, when, strict=True)
    )


RULES = read()

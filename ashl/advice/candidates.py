"""Plan the candidates: apply each rule to the typed overrides, and remove candidates that cannot
win.

A rule of `rules.yaml` becomes a candidate if its conditions hold on this cluster and the command
line does not contradict it. A candidate is removed if its
configuration or its updates equal those of another one. It is also removed if it gives up something
and is predicted to be no faster. Every removed rule keeps its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ashl.advice.rules import BSP, RULES, Rule, Situation, situation_of
from ashl.config.compose import compose
from ashl.config.identity import config_hash
from ashl.config.override import group_of, index_by_key, key_of
from ashl.errors import NoEffectError, UsageError
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import prepare_plan
from ashl.planning.settings import STAGE_GROUPS
from ashl.report.records import LeftOut
from ashl.run.host_time import Costs, measure_costs
from ashl.study.grid import check_point

RATE = "optimizer.lr"
CHOSEN = (
    "schedule",
    "planner",
    *(group for group in STAGE_GROUPS if group != "optimizer"),
)  # the keys that rules choose
# Least ratio of predicted steps per second for which a candidate may give something up.
GAIN = 1.01
MOST = 24  # most candidates of a race
PLAIN = (("sync=bsp", "topology=parameter_server"), ("sync=bsp", "topology=all_reduce"))
TYPED = Rule(name="as typed", overrides="", why="what the command line says")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A rule that applies here, with its configuration for virtual time and its plan.

    `overrides` are the rule's own. `dropped` maps each typed override that has no effect to the
    reason.
    """

    rule: Rule
    overrides: tuple[str, ...]
    config: dict[str, Any]
    plan: Plan
    reason: str
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def rate(self) -> float:
        """Predicted steps per second of the slowest stage."""
        return min(
            (s.predicted_steps_per_s for s in self.plan.stages if s.predicted_steps_per_s),
            default=0.0,
        )


@dataclass(frozen=True)
class Selection:
    """The candidates of a race, the baseline first and the others by predicted speed.

    `left_out` has the other rules, and `costs` those of a run on this machine.
    """

    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]
    costs: Costs


def select_candidates(
    typed: tuple[str, ...], config_dir: Path | None, progress: Callable[[int, int, str], None]
) -> Selection:
    """Plan every rule and return those that compete, all with the typed overrides.

    Raises: UsageError if fewer than two candidates remain.
    """
    progress(0, len(RULES), "this cluster and this machine")
    free = [text for text in typed if group_of(text) not in CHOSEN]
    plain = [
        prepare_plan(with_effect((*free, *texts), config_dir)[1], None, texts) for texts in PLAIN
    ]
    costs = measure_costs(plain[0])
    if costs is None:
        raise UsageError(
            "runtime.gradients=false: no model is trained, so that no candidate is better;"
            " remove this override"
        )
    found = situation_of(plain, costs.first_loss)
    rules = RULES if len(free) == len(typed) else (*RULES, TYPED)
    taken, left_out = list[Candidate](), list[LeftOut]()
    for number, rule in enumerate(rules):
        progress(number, len(rules), rule.name)
        try:
            taken.append(candidate_from(rule, found, typed, config_dir))
        except UsageError as error:
            left_out.append(LeftOut(rule.name, str(error)))
    taken, worse = remove_inferior(taken)
    if len(taken) < 2:
        only = f"only {taken[0].name} is possible" if taken else "no candidate is possible"
        why = f" ({left_out[0].name}: {left_out[0].reason.rstrip('.')})" if left_out else ""
        raise UsageError(
            f"nothing is left to compare: {only} with {' '.join(typed)}{why}; remove some of"
            " these overrides, or use `ashl sweep`"
        )
    return Selection(tuple(taken), (*left_out, *worse), costs)


def candidate_from(
    rule: Rule, s: Situation, typed: tuple[str, ...], config_dir: Path | None
) -> Candidate:
    """Return the candidate of a rule.

    Raises: UsageError if the rule does not apply; its text is the reason in the list of rules left
    out.
    """
    if not rule.applies(s):
        raise UsageError(rule.reason(s))
    own = tuple(rule.overrides.format(**s.values).split())
    chosen = index_by_key(typed)
    has_preset = "experiment" in chosen and rule is not TYPED
    if has_preset and "topology" not in {*chosen, *map(key_of, own)}:
        own = ("topology=parameter_server", *own)  # the preset may have changed it
    for text in own:
        if (other := chosen.get(key_of(text), text)) != text:
            raise UsageError(f"the command line has {other}, and this rule needs {text}.")
    if "schedule" in map(key_of, own) and "sync" in chosen:
        raise UsageError(
            "the command line names a sync mode, and this schedule names that of each stage."
        )
    own = tuple(text for text in own if text not in typed)
    reasons = dict[str, str]()
    point, config, plan = with_effect((*typed, *own), config_dir, reasons)
    dropped = {text: reasons[key_of(text)] for text in typed if text not in point}
    return Candidate(
        rule, tuple(text for text in own if text in point), config, plan, rule.reason(s), dropped
    )


def with_effect(
    overrides: tuple[str, ...], config_dir: Path | None, reasons: dict[str, str] | None = None
) -> tuple[tuple[str, ...], dict[str, Any], Plan]:
    """Return the overrides without those that have no effect, the configuration and its plan.

    Args: reasons receives, by key, why an override has no effect.
    Raises: UsageError for everything else, and so for a key that the chosen option lacks.
    """
    return check_point(
        overrides, partial(compose, config_dir=config_dir), {}, reasons=reasons, drops=NoEffectError
    )


def dropped_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence for each typed override that has no effect in some candidates, with their
    names.
    """
    found = dict[str, dict[str, str]]()
    for own in candidates:
        for text, reason in own.dropped.items():
            found.setdefault(text, {})[own.name] = reason
    notes = []
    for text, by_name in found.items():
        where = "every candidate" if len(by_name) == len(candidates) else ", ".join(by_name)
        reason = next(iter(by_name.values())).removeprefix(f"{text}: no effect here, ")
        notes.append(
            f"{text} was removed from {where}: {reason.removesuffix('; otherwise remove it')}."
        )
    return notes


def remove_inferior(
    candidates: Sequence[Candidate],
) -> tuple[list[Candidate], list[LeftOut]]:
    """Remove candidates that cannot be the best, judged by predicted steps per second.

    Returns: the others, the baseline first and then by speed, and the removed ones with the reason.
    """
    left_out = list[LeftOut]()

    def leave_out(own: Candidate, reason: str) -> None:
        left_out.append(LeftOut(own.name, reason))

    by_config = dict[str, Candidate]()
    for own in candidates:
        equal = by_config.setdefault(config_hash(own.config), own)
        if equal is not own:
            leave_out(own, f"with the typed overrides it equals {equal.name}.")
    # the fastest candidate of each group of candidates that make the same updates
    fastest = dict[str, Candidate]()
    for own in by_config.values():
        group = own.rule.same or own.name
        fastest[group] = max(fastest.get(group, own), own, key=lambda c: c.rate)
    remaining = list[Candidate]()
    for own in by_config.values():
        best = fastest[own.rule.same or own.name]
        sources = [fastest[name] for name in origins(own.rule) if name in fastest]
        source = max(sources, key=lambda c: c.rate, default=None)
        if best is not own:
            leave_out(own, f"it makes the same updates as {best.name}, and {rates(own, best)}.")
        elif source is not None and own.rate <= GAIN * source.rate:
            given_up = f"it gives up {own.rule.gives_up} against {source.name}"
            leave_out(own, f"{given_up} for no more than 1 %: {rates(own, source)}.")
        else:
            remaining.append(own)
    base = next((own for own in remaining if BSP in (own.name, own.rule.same)), None)
    remaining.sort(key=lambda own: (own is not base, -own.rate))
    for own in remaining[MOST:]:
        faster = f"{MOST} others are predicted to take more steps per second"
        leave_out(own, f"{faster}, and no more are compared.")
    return remaining[:MOST], left_out


def origins(rule: Rule) -> list[str]:
    """Return the chain of rules that this rule departs from, the nearest first."""
    by_name, found, known = {known.name: known for known in RULES}, list[str](), rule
    while known is not None and known.departs:
        found.append(known.departs)
        known = by_name.get(known.departs)
    return found


def rates(own: Candidate, than: Candidate) -> str:
    """Return both predicted speeds as a clause."""
    return f"{own.rate:.4g} steps/s are predicted, against {than.rate:.4g}"

"""Size the race for the budget: the length of its runs, and the number of learning rates of each
candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ashl.advice.candidates import Candidate, Field
from ashl.errors import UsageError
from ashl.run.host_time import OVERHEAD, START_S

SEEDS = 3
RACING = 0.88  # of the budget, at the latest; the rest is for the answer
READINGS = 200  # evaluations of the fastest candidate's whole run, where eval.* is not typed
# host seconds of evaluations, divided by those of steps, at most; of a run twice as long as the
# fastest
EVALUATING = 1.0
LEAST = 40  # evaluations of the fastest candidate's whole run, whatever they take
RATES = (1.0, 0.5, 2.0)  # multiples of the learning rate
SCALES = (
    (1.0, RATES),
    (0.5, RATES),
    (0.25, RATES),
    (0.125, RATES),
    (0.125, (1.0,)),
    (1 / 16, (1.0,)),
)
ENDING = (
    0.3,
    0.5,
)  # share of a whole run that runs take which a target ends: in the tuning, and after it
WHOLE = (0.6, 0.8)  # the same of runs that no target ends


@dataclass(frozen=True)
class Scale:
    """Length and learning rates of the runs of a race.

    `length` is a share of the whole run. `target` is an accuracy that the tuning has found, for
    runs without a target.
    """

    length: float
    rates: tuple[float, ...]  # multiples of the configured learning rate
    every_s: float | None  # experiment seconds between two evaluations; None = as configured
    target: float | None = None


@dataclass(frozen=True)
class Load:
    """What a race costs on this host, as predicted."""

    candidates: int
    whole_s: float  # host seconds of a whole run without its start
    every_s: float | None  # experiment seconds between two evaluations; None = as configured
    slots: int  # runs at a time
    ends_early: bool  # True if a target ends the runs
    slower: float = 1.0  # host seconds of the runs of an earlier race, divided by those predicted

    def run_s(self, length: float) -> float:
        """Host seconds of one run that nothing ends early."""
        return self.slower * (START_S + length * self.whole_s)

    def shares(self, length: float) -> tuple[float, float]:
        """The share of a run that is run on average, in the tuning and after it. Short runs seldom
        reach a target.
        """
        return ENDING if self.ends_early and length == 1 else WHOLE

    def race_s(self, length: float, tries: int) -> float:
        """Host seconds of the whole race, with so many learning rates."""
        tuning, final = self.shares(length)
        tuned = tuning * self.candidates * (1 + (tries - 1) / 3)
        seeded = final * SEEDS * (self.candidates if tries == 1 else self.candidates / 5 + 4)
        return (seeded if tries == 1 else tuned + seeded) * self.run_s(length) / self.slots


def steps_of(own: Candidate, epoch_samples: int) -> float:
    """Steps of the whole run: by its count, or by its seconds."""
    limits, count = own.plan.limits, own.plan.num_steps(epoch_samples)
    timed = None if limits.seconds is None or not own.rate else limits.seconds * own.rate
    return min((float(found) for found in (count, timed) if found is not None), default=0.0)


def load_of(
    field: Field, step_s: float, slots: int, *, target: bool, evaluates: bool, slower: float = 1.0
) -> Load:
    """What a race of these candidates costs here.

    Args: step_s is a step on this host [s]; target is True if runs have one; evaluates is True if
    eval.* was typed.
    """
    epoch = len(field.host.data.train)
    steps = fmean(steps_of(own, epoch) for own in field.candidates)
    times = [own.plan.predicted_s for own in field.candidates if own.plan.predicted_s] or [0.0]
    most = EVALUATING * steps * step_s / max(field.evaluation_s, 1e-6) / 2
    every_s = (
        None
        if evaluates or not all(times)
        else float(f"{min(times) / min(READINGS, max(LEAST, most)):.2g}")
    )
    evaluated_s = field.evaluation_s * fmean(times) / every_s if every_s else 0.0
    whole_s = steps * step_s * OVERHEAD + evaluated_s
    return Load(len(field.candidates), whole_s, every_s, slots, target, slower)


def scale_of(load: Load, typed: Sequence[float], left_s: float, budget_s: float) -> Scale:
    """The largest race that fits into the seconds that remain.

    Raises UsageError where not even one run does.
    """
    for length, rates in SCALES:
        if load.race_s(length, len(typed) or len(rates)) <= left_s:
            break
    if load.run_s(length) > left_s:
        raise UsageError(
            f"--budget {budget_s:g} is too small: a single run of a sixteenth of this task takes"
            f" about {load.run_s(length):.2g} s here, and {max(0, left_s):.2g} s are left for runs;"
            f" give --budget {budget_s - left_s + 10 * load.run_s(length):.0f} or more"
        )
    return Scale(length, tuple(rate / typed[0] for rate in typed) or rates, load.every_s)

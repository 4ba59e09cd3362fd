"""Choose the size of a race from the budget: the length of its runs, and the learning rates per
candidate.
"""

from dataclasses import dataclass
from statistics import fmean

from ashl.advice.candidates import Selection
from ashl.errors import UsageError
from ashl.plan.plan import TARGETS
from ashl.run.host_time import OVERHEAD, START_S, predict_host_s, predict_length

SEEDS = 3  # runs of each candidate after the tuning; an answer needs them of the first two
# Latest end of the race, as a share of the budget; the remaining time is for the answer.
RACING = 0.88
# Evaluations of the fastest candidate's whole run, if no key of eval.* is typed. The first
# candidates reach the target within some tenth of it, and seldom tie at one of 20 evaluations.
READINGS = 200
# Most host seconds of evaluations divided by those of steps, for a run twice as long as the
# fastest.
EVALUATING = 1.0
LEAST = 40  # least number of evaluations of the fastest candidate's whole run
RATES = (1.0, 2.0, 0.5)  # multiples of the configured learning rate, in the order of trying
SCALES = (
    (1.0, RATES),
    (0.5, RATES),
    (0.25, RATES),
    (0.125, RATES),
    (0.125, (1.0,)),
    (1 / 16, (1.0,)),
)
# Mean share of its length that a run takes, in the tuning and after it: if a target ends runs, and
# if none does.
ENDING = (0.3, 0.5)
WHOLE = (0.6, 0.8)


@dataclass(frozen=True)
class Scale:
    """The length of the runs of a race, and its learning rates.

    `length` is a share of the whole run. `target` is an accuracy that the tuning found, if none was
    typed.
    """

    length: float
    rates: tuple[float, ...]  # multiples of the configured learning rate
    every_s: float | None  # experiment seconds between two evaluations; None = as configured
    target: float | None = None


@dataclass(frozen=True)
class Load:
    """The predicted cost of a race on this host."""

    candidates: int
    whole_s: float  # host seconds of a whole run without its start
    every_s: float | None  # experiment seconds between two evaluations; None = as configured
    slots: int  # runs at a time
    ends_early: bool  # True if a target ends the runs
    began_s: float  # seconds of the budget that are spent when the race begins

    def run_s(self, length: float) -> float:
        """Return the host seconds of one run that nothing ends early."""
        return START_S + length * self.whole_s

    def race_s(self, length: float, tries: int) -> float:
        """Return the host seconds of the whole race, with `tries` learning rates per candidate."""
        # A target ends whole runs only: short runs seldom reach it.
        tuning, final = ENDING if self.ends_early and length == 1 else WHOLE
        tuned = tuning * self.candidates * (1 + (tries - 1) / 3)
        seeded = final * SEEDS * (self.candidates if tries == 1 else self.candidates / 5 + 4)
        return (seeded if tries == 1 else tuned + seeded) * self.run_s(length) / self.slots


def load_of(selection: Selection, slots: int, began_s: float) -> Load:
    """Return the predicted cost of a race of these candidates, with `slots` runs at a time."""
    plans = [own.plan for own in selection.candidates]
    step_s, evaluation_s, _, epoch_samples = selection.costs
    limits, evaluation = (selection.candidates[0].config[key] for key in ("stop", "eval"))
    lengths = [predict_length(plan, epoch_samples) for plan in plans]
    steps = fmean(length.steps if length else 0.0 for length in lengths)
    times = [plan.predicted_s for plan in plans if plan.predicted_s] or [0.0]
    most = EVALUATING * steps * step_s / max(evaluation_s, 1e-6) / 2
    is_typed = any(value is not None for value in evaluation.values())
    every_s = (
        None
        if is_typed or not all(times)
        else float(f"{min(times) / min(READINGS, max(LEAST, most)):.2g}")
    )
    if every_s is None:
        found = [predict_host_s(plan, selection.costs) for plan in plans]
        whole_s = fmean(START_S if run_s is None else run_s for run_s in found) - START_S
    else:
        whole_s = steps * step_s * OVERHEAD + evaluation_s * fmean(times) / every_s
    return Load(
        candidates=len(plans),
        whole_s=whole_s,
        every_s=every_s,
        slots=slots,
        ends_early=any(limits.get(key) is not None for key in TARGETS),
        began_s=began_s,
    )


def scale_of(load: Load, *, tunes: bool, left_s: float, budget_s: float) -> Scale:
    """Return the largest race that fits into `left_s` seconds.

    Args: tunes is False if a learning rate was typed, which all candidates use.
    Raises: UsageError if not even one run fits.
    """
    for length, rates in SCALES:
        rates = rates if tunes else (1.0,)
        if load.race_s(length, len(rates)) <= left_s:
            break
    if load.run_s(length) > left_s:
        raise UsageError(
            f"--budget {budget_s:g} is too small: a single run of a sixteenth of this task takes"
            f" about {load.run_s(length):.2g} s here, and {max(0, left_s):.2g} s are left for runs;"
            f" give --budget {budget_s - left_s + 10 * load.run_s(length):.0f} or more"
        )
    return Scale(length, rates, load.every_s)

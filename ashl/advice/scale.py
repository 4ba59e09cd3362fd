"""How large a race the budget allows: how long its runs are, how many learning rates each candidate tries."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ashl.advice.candidates import Candidate, Field
from ashl.errors import UsageError

START_S = 0.7  # of host time, to begin a run and to end it
OVERHEAD = 1.4  # of a step in a run, against the step alone
SEEDS = 3
READINGS = 200  # evaluations of the fastest candidate's whole run, where nothing is said
EVALUATING = 1.0  # of the host time of steps, evaluations may take, of a run twice as long as the fastest
LEAST = 40  # evaluations of the fastest, whatever they take
RATES = (1.0, 0.5, 2.0)  # of the learning rate
SCALES = ((1.0, RATES), (0.5, RATES), (0.25, RATES), (0.125, RATES), (0.125, (1.0,)), (1 / 16, (1.0,)))


@dataclass(frozen=True)
class Scale:
    """`length` is the share of the whole run that each run has; below 1 it is a proxy, with a target of its own."""

    length: float
    rates: tuple[float, ...]  # multiples of the configured learning rate
    every_s: float | None  # between two evaluations; None = as configured
    target: float | None = None  # an accuracy that the tuning has found, where none was asked for, or runs are a proxy


def steps_of(own: Candidate, epoch_samples: int) -> float:
    """Steps of the whole run: by its count, or by its seconds."""
    limits, count = own.plan.limits, own.plan.num_steps(epoch_samples)
    timed = None if limits.seconds is None or not own.rate else limits.seconds * own.rate
    return min((float(found) for found in (count, timed) if found is not None), default=0.0)


def scale_of(
    field: Field,
    typed: Sequence[float],
    step_s: float,
    left_s: float,
    budget_s: float,
    cores: int,
    *,
    target: bool,
    evaluates: bool,
) -> Scale:
    """The largest race that fits, by the share of whole runs that races have taken with a target that ends runs, and
    without. `step_s` is a step on this host, `evaluates` whether the user said when.

    Raises UsageError where not even one run does.
    """
    count, epoch = len(field.candidates), len(field.host.data.train)
    steps = fmean(steps_of(own, epoch) for own in field.candidates)
    times = [own.plan.predicted_s for own in field.candidates if own.plan.predicted_s] or [0.0]
    most = EVALUATING * steps * step_s / max(field.evaluation_s, 1e-6) / 2
    every_s = None if evaluates or not all(times) else float(f"{min(times) / min(READINGS, max(LEAST, most)):.2g}")

    def run_s(length: float) -> float:
        evaluated_s = field.evaluation_s * fmean(times) / every_s if every_s else 0.0
        return START_S + length * (steps * step_s * OVERHEAD + evaluated_s)

    tuning, final = (0.3, 0.5) if target else (0.6, 0.8)
    for length, rates in SCALES:
        tries = len(typed) or len(rates)
        tuned = tuning * count * (1 + (tries - 1) / 3)
        runs = final * SEEDS * count if tries == 1 else tuned + final * SEEDS * (count / 5 + 4)
        if runs * run_s(length) / cores <= left_s:
            break
    if run_s(length) > left_s:
        raise UsageError(
            f"--budget {budget_s:g} is too small: a single run of a sixteenth of this task takes about "
            f"{run_s(length):.2g} s here, and {max(0, left_s):.2g} s are left for runs; give --budget "
            f"{budget_s - left_s + 10 * run_s(length):.0f} or more"
        )
    return Scale(length, tuple(rate / typed[0] for rate in typed) or rates, every_s)

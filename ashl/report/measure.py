"""Define the measures by which settings are ranked.

The first choice is the time to a target. Without a target, it is the state at a time that all runs
have reached.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ashl.errors import UsageError
from ashl.plan.plan import TARGETS
from ashl.report.records import BrokenRecordError, LeftOut, Run
from ashl.tracking.console import number, percent, seconds

# Settings whose accuracy is this far below the median do not decide which target all reach.
BEHIND = 0.1
STEPS = 200  # an accuracy is rounded down to a multiple of 1 / STEPS, half a point


class Target(NamedTuple):
    """The bounds of a target, any of which a run must reach in `hold` consecutive evaluations.

    `metric` is the task's own: bound, name, and True if higher is better.
    """

    accuracy: float | None = None
    loss: float | None = None
    metric: tuple[float, str, bool] | None = None
    hold: int = 1

    def is_met(self, row: Mapping[str, Any]) -> bool:
        """Return True if this evaluation reaches a bound."""
        if is_at_least(row.get("test/acc"), self.accuracy):
            return True
        if is_at_least(self.loss, row.get("train/loss")):
            return True
        if self.metric is None:
            return False
        bound, name, higher = self.metric
        found = row.get(f"test/{name}")
        return is_at_least(found, bound) if higher else is_at_least(bound, found)


def is_at_least(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value >= bound


@dataclass(frozen=True)
class Measure:
    """A rule that gives each run a value.

    A value that does not exist (target not reached, loss not finite) is infinitely bad.
    """

    title: str
    unit: str
    lower_is_better: bool
    ratio: bool  # True if settings are compared by quotients, False by differences
    value: Callable[[Run], float]
    show: Callable[[float], str]
    worst: str  # text of an infinite value
    better: str  # words after a ratio, for example "times as fast"
    is_time: bool = False

    def text(self, value: float | None, bound: float | None = None) -> str:
        """Return a value as text; of a value that does not exist, its lower bound."""
        if value is None or math.isfinite(value):
            return "-" if value is None else self.show(value)
        if self.is_time and bound is not None and math.isfinite(bound):
            return f"> {self.show(bound)}"
        return self.worst

    def gain(self, own: float, base: float) -> float | None:
        """Return how much better one value is than another, as a quotient or a difference.

        Returns None unless both are finite, and positive for a quotient.
        """
        if not (math.isfinite(own) and math.isfinite(base)) or (self.ratio and min(own, base) <= 0):
            return None
        better, worse = (base, own) if self.lower_is_better else (own, base)
        return better / worse if self.ratio else better - worse

    def gain_text(self, gain: float) -> str:
        """Return a gain in words: "1.8 times as fast as" or "2.3 points better than"."""
        if not self.ratio:
            return f"{round(100 * gain, 1):.1f} {self.better} than"
        return f"{gain:.2f} {self.better} {'as' if self.better.endswith('fast') else 'than'}"

    def order(self, value: float) -> float:
        """Return the value's sort key: the best comes first."""
        return value if self.lower_is_better else -value


def target_of(runs: Sequence[Run], target: float | None) -> Target | None:
    """Return the requested target, or the target that all runs share.

    A requested number is a value of the task's own metric if all runs have the same one, else an
    accuracy.

    Raises: UsageError if the runs have different targets.
    """
    if target is not None:
        hold = common_hold(runs)
        if own := common_metric(runs):
            return Target(metric=(target, *own), hold=hold)
        if not 0 < target <= 1:
            problem = "is no accuracy; give a share, as in --target 0.9."
            raise UsageError(f"--target {target:g} {problem}")
        return Target(target, hold=hold)
    example = {own_target(run): run.name for run in reversed(runs)}
    found = sorted(example, key=str)
    if len(found) > 1:
        named = ", ".join(f"{describe(of)} ({example[of]})" for of in found[:4])
        raise UsageError(
            f"These runs have different targets: {named}; judge them all by one, as in --target"
            " 0.9."
        )
    return found[0] if any(bound is not None for bound in found[0][:3]) else None


def best_that_all_reach(settings: Sequence[Sequence[Run]]) -> tuple[Target, int] | None:
    """Return the best accuracy that every run of every setting reaches, rounded down to half a
    point.

    Each run reaches it in `common_hold` consecutive evaluations.

    Returns: the target and the number of settings that are ignored: those with a diverged run and,
    of three or more, those that stay `BEHIND` the median. None if there are no accuracies.
    """
    hold = common_hold([run for runs in settings for run in runs])
    floors = [
        min(best_held_accuracy(run, hold) for run in runs)
        for runs in settings
        if runs and not any(run.dropped or run.summary["status"] == "diverged" for run in runs)
    ]
    if not any(floors):
        return None
    near = [floor for floor in floors if len(floors) < 3 or floor >= median(floors) - BEHIND]
    share = math.floor(min(near) * STEPS + 1e-9) / STEPS
    return (Target(share, hold=hold), len(settings) - len(near)) if share > 0 else None


def best_held_accuracy(run: Run, hold: int) -> float:
    """Return the best accuracy that a run reaches in `hold` consecutive evaluations."""
    found = [row.get("test/acc") or 0.0 for row in evaluations(run)]
    windows = (found[place : place + hold] for place in range(len(found) - hold + 1))
    return max(map(min, windows), default=0.0)


def own_target(run: Run) -> Target:
    accuracy, loss, bound = (run.summary.get(target) for target in TARGETS)
    metric = None if bound is None or run.metric is None else (bound, *run.metric)
    if accuracy is None and metric is None:  # the task's metric is accuracy
        accuracy = bound
    if all(found is None for found in (accuracy, loss, metric)):
        return Target()
    return Target(accuracy, loss, metric, own_hold(run))


def own_hold(run: Run) -> int:
    """Return the number of consecutive evaluations that must reach a run's target."""
    return int(run.config.get("stop.target_consecutive_evals") or 1)


def common_hold(runs: Sequence[Run]) -> int:
    """Return the number of consecutive evaluations that must reach a target of all these runs.

    If the runs have different numbers it is the least one, because a run may end at its own.
    """
    return min(map(own_hold, runs), default=1)


def evaluations(run: Run) -> Sequence[Mapping[str, Any]]:
    """Return the evaluations of a run, without its last line if that repeats the one before."""
    rows = run.metrics
    repeats = len(rows) > 1 and rows[-1].get("step") == rows[-2].get("step")
    return rows[:-1] if repeats else rows


def describe(target: Target) -> str:
    parts = [
        f"{percent(target.accuracy)} accuracy" if target.accuracy is not None else "",
        f"a loss of {target.loss:g}" if target.loss is not None else "",
        f"{target.metric[1]} {target.metric[0]:g}" if target.metric is not None else "",
    ]
    held = f", {target.hold} times in a row" if target.hold > 1 else ""
    return (" or ".join(filter(None, parts)) or "none") + held


def time_reached(run: Run, target: Target) -> tuple[float, float]:
    """Return the time at which a run reached a target, and the time of the evaluation before it.

    It is reached by `hold` consecutive evaluations, and the time is that of the first of them. The
    time is infinite if the target was not reached. A run that has several targets counts the
    evaluations of each by itself; here an evaluation counts that meets any of them.
    """
    rows = evaluations(run)
    times = [0.0, *(row["time_s"] for row in rows)]
    met = [target.is_met(row) for row in rows]
    for place in range(len(met) - target.hold + 1):
        if all(met[place : place + target.hold]):
            return times[place + 1], times[place]
    return math.inf, times[-1]


def time_to_target(target: Target, recomputed: bool) -> Measure:
    """Return the measure "time to target" in seconds on the experiment's clock.

    Args: recomputed=True computes it from the evaluations, False reads it from the summary.
    """

    def value(run: Run) -> float:
        if recomputed:
            return time_reached(run, target)[0]
        time_s = run.summary.get("time_to_target_s")
        return math.inf if time_s is None else time_s

    words = ("not reached", "times as fast")
    return Measure(f"time to {describe(target)}", "s", True, True, value, seconds, *words, True)


def value_at_equal_time(runs: Sequence[Run]) -> Measure:
    """Return the measure of runs without a target: their state when the first of them ended.

    It is the first of these that exists: accuracy, the task's own metric, test loss, training loss.
    Without evaluations the measure is the speed.
    """
    timed = [run for run in runs if run.metrics]
    if not timed:

        def speed(run: Run) -> float:
            return run.summary.get("samples_per_s") or 0.0

        return Measure("speed", "samples/s", False, True, speed, number, "none", "times as fast")
    sound = [run for run in timed if run.summary["status"] != "diverged" and not run.dropped]
    time_s = min(run.metrics[-1]["time_s"] for run in sound or timed)
    own = common_metric(timed)
    key, name = first_metric(timed)
    accuracy = key == "test/acc"
    higher = accuracy or bool(own and own[1] and key == f"test/{own[0]}")

    def value(run: Run) -> float:
        rows = [row for row in run.metrics if row.get(key) is not None]
        if run.summary["status"] == "diverged" or not rows or rows[0]["time_s"] > time_s:
            return -math.inf if higher else math.inf
        times, values = zip(*((row["time_s"], row[key]) for row in rows), strict=True)
        return float(np.interp(time_s, times, values))

    title = f"{name} after {seconds(time_s)}"
    better = "points better" if accuracy else "times higher" if higher else "times lower"
    show = percent if accuracy else number
    return Measure(title, "", not higher, not accuracy, value, show, "none", better)


def common_metric(runs: Sequence[Run]) -> tuple[str, bool] | None:
    """Return the metric of the runs' task, see `Run.metric`; None without one or with several."""
    found = {run.metric for run in runs}
    return found.pop() if len(found) == 1 else None


def first_metric(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the key and the name of the first metric that a run has: accuracy, the task's own
    metric, test loss, training loss.
    """
    own = common_metric(runs)
    names = {"test/acc": "accuracy"} | ({f"test/{own[0]}": own[0]} if own else {})
    names |= {"test/loss": "test loss", "train/loss": "training loss"}
    recorded = {key for run in runs for row in run.metrics for key in row if row[key] is not None}
    return next(
        (found for found in names.items() if found[0] in recorded), ("test/loss", "test loss")
    )


def split_readable(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """Return the runs whose evaluations can be read, and the others by name with the reason."""
    good, bad = [], []
    for run in runs:
        try:
            _ = run.metrics
            good.append(run)
        except BrokenRecordError as error:
            bad.append(LeftOut(str(run.folder), str(error)))
    return good, bad

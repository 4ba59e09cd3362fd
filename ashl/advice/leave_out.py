"""Answer whether training is faster without the slowest worker.

Rule: the workers considered are the one with the longest steps and the one with the slowest link.
The one with the shorter predicted time without it is removed from the cluster. The winner of the
race runs again there, and the candidate that is predicted to be the fastest there. A worker should
be left out if the shorter of their median times is shorter than the time with it. Without these
runs, and below the time between two evaluations, the answer is undecided.
Its break-even speed is the speed at which both are equal, in times of the median of the others.

A prediction begins with the measured time on the whole cluster. It divides each stage's part of it
by the ratio of the stage's predicted steps per second. So it assumes that learning needs the same
number of steps in total. With fewer workers it often needs fewer, which only the runs show.
Limits: one worker at a time; the break-even speed is that of its steps, and its link stays.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ashl.advice.candidates import Candidate
from ashl.errors import AshlError
from ashl.planning.compile_plan import compile_plan
from ashl.tracking.console import seconds

# The break-even speed is searched from the median's speed down to this share of it.
SLOWEST = 1 / 64
ROUNDING = 1.001  # so that a difference of one evaluation counts as one after rounding
FEWEST_WORKERS = 3  # with two, nothing is distributed without one
HALVINGS = 7  # halvings of the logarithmic interval; they leave 3 % of the break-even speed

Spec = dict[str, Any]


class Racer(NamedTuple):
    """A candidate, its time to the target [s], and the share of it that each planned stage took.

    `rate` is the learning rate, and `seeds` are the seeds of its runs.
    """

    candidate: Candidate
    time_s: float
    shares: tuple[float, ...]
    rate: float
    seeds: tuple[int, ...]


class LeaveOut(NamedTuple):
    """The effect of leaving a worker out.

    `pays_from` is its break-even speed in times of the others' median; None = not known,
    undecided, or none in the range searched. `runs` is the number of runs without the worker; at 0,
    `without_s` is predicted. `without_s` is None if those runs did not reach the target.
    `undecided` is the reason why no answer is given; empty if there is one.
    """

    worker: int
    with_s: float
    without_s: float | None
    pays_from: float | None
    runs: int
    undecided: str

    @property
    def is_advised(self) -> bool:
        if self.undecided or self.without_s is None:
            return False
        return self.without_s < self.with_s

    def record(self) -> dict[str, Any]:
        """Return the values for advice.json."""
        return {**self._asdict(), "leave_out": self.is_advised}

    def sentence(self) -> str:
        source = f"in {self.runs} run{'s' * (self.runs > 1)}" if self.runs else "as predicted"
        without = "not reached" if self.without_s is None else seconds(self.without_s)
        text = f"worker {self.worker}: with it {seconds(self.with_s)},"
        text += f" without it {without} {source}"
        if self.pays_from is not None:
            text += f"; keeping it is faster if its speed is at least {self.pays_from:.2g} times"
            text += " the median of the others"
        if self.undecided:
            return f"undecided about {text}; {self.undecided}"
        return ("leave out " if self.is_advised else "keep ") + text


# Runs racers on a changed cluster, and returns the shortest median time; None if a run is missing.
RaceOn = Callable[[Sequence[Racer], Spec], float | None]


def leave_out_of(
    racers: Sequence[Racer], over: Callable[[], bool], race_on: RaceOn, apart_s: float
) -> LeaveOut | None:
    """Return the worker whose absence gains most, or costs least; None if no time can be predicted.

    Args: racers, the best one first; over returns True once no time is left; apart_s, seconds
    between two evaluations.
    """
    plan = racers[0].candidate.plan
    spec: Spec = {**plan.cluster, "num_workers": plan.num_workers}
    if plan.num_workers < FEWEST_WORKERS or spec["events"] or over():
        return None

    def best_s(changed: Spec, among: Sequence[Racer] = racers) -> tuple[float, Racer]:
        """Return the shortest time on a changed cluster, and its racer."""
        times = [(predicted_s(own, changed), -k, own) for k, own in enumerate(among)]
        time_s, _, own = min(times, key=lambda one: one[:2])
        return time_s, own

    found = [
        (*best_s(without_worker(spec, worker)), worker) for worker in workers_to_consider(spec)
    ]
    without_s, own, worker = min(found, key=lambda one: one[0])
    if over() or not math.isfinite(without_s):
        return None
    with_s = racers[0].time_s
    two, less = list(dict.fromkeys([racers[0], own])), without_worker(spec, worker)
    able = [racer for racer in two if math.isfinite(predicted_s(racer, less))]
    measured_s, runs = race_on(able, less), 0
    if measured_s is not None:
        without_s, runs = measured_s, sum(len(racer.seeds) for racer in able)
    if not math.isfinite(without_s):
        return LeaveOut(worker, with_s, None, None, runs, "")
    undecided = ""
    if not runs:
        undecided = "no time was left for runs without it"
    elif abs(with_s - without_s) <= ROUNDING * apart_s:
        undecided = f"the difference is within one evaluation interval, {seconds(apart_s)}"
    pays_from = None
    if not undecided and worker == slowest_worker(spec["compute"]):
        pays_from = break_even(
            lambda speed: best_s(with_speed(spec, worker, speed), two)[0] <= without_s, over
        )
    return LeaveOut(worker, with_s, without_s, pays_from, runs, undecided)


def predicted_s(own: Racer, spec: Spec) -> float:
    """Return the time of a racer on another cluster; infinity if it cannot be predicted.

    A stage whose speed is not predicted keeps its time.
    """
    config = {**own.candidate.config, "cluster": spec, "profile": None}
    try:
        plan = compile_plan(config, None, [])
    except AshlError:
        return math.inf
    # by name: without a profile, the plan may begin with a stage that measures one
    there = {stage.name: stage.predicted_steps_per_s for stage in plan.stages}
    time_s = 0.0
    for stage, share in zip(own.candidate.plan.stages, own.shares, strict=True):
        if stage.predicted_steps_per_s:
            rate = there.get(stage.name)
            share = share * stage.predicted_steps_per_s / rate if rate else math.inf
        time_s += own.time_s * share
    return time_s


def slowest_worker(factors: Sequence[float]) -> int:
    """Return the worker with the largest factor; the last one of equal workers."""
    return max(range(len(factors)), key=lambda rank: (factors[rank], rank))


def workers_to_consider(spec: Mapping[str, Any]) -> list[int]:
    """Return the worker with the longest steps and the one with the slowest link."""
    found = [slowest_worker(spec["compute"])]
    if spec.get("link"):
        found.append(slowest_worker(spec["link"]))
    if spec.get("up_bytes_s") and all(spec["up_bytes_s"]):
        found.append(slowest_worker([1 / rate for rate in spec["up_bytes_s"]]))
    return list(dict.fromkeys(found))


def without_worker(spec: Spec, worker: int) -> Spec:
    """Return the cluster without a worker; each list by worker is shorter by its entry.

    The measured cost of an all-reduce is removed, because it holds for its number of workers only.
    """
    found: Spec = {
        key: [*own[:worker], *own[worker + 1 :]]
        for key, own in spec.items()
        if isinstance(own, list) and len(own) == spec["num_workers"]
    }
    found |= {"all_reduce": None} if "all_reduce" in spec else {}
    return {**spec, **found, "num_workers": spec["num_workers"] - 1}


def with_speed(spec: Spec, worker: int, speed: float) -> Spec:
    """Return the cluster with this worker's speed in times of the median of the others."""
    compute = list(spec["compute"])
    others = [factor for rank, factor in enumerate(compute) if rank != worker]
    compute[worker] = median(others) / speed
    return {**spec, "compute": compute}


def break_even(pays: Callable[[float], bool], over: Callable[[], bool]) -> float | None:
    """Return the speed from which on `pays` holds, to 3 %; None if there is none in the range."""
    low, high = SLOWEST, 1.0
    if pays(low) or not pays(high):
        return None
    for _ in range(HALVINGS):
        if over():
            return None
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high

"""Predict the host seconds of a run in virtual time.

A step and an evaluation are timed in this process. They are multiplied by the numbers of steps and
evaluations that the plan predicts for a run that no target ends.
"""

import math
from typing import NamedTuple

from ashl.config.cores import usable_cores
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import PreparedPlan
from ashl.run.rank import evaluation_here, step_here_s
from ashl.runtime.parallel_sim import MIN_PARALLEL_S, count_cores

START_S = 0.7  # host seconds to begin a run and to end it
OVERHEAD = 1.4  # host seconds of a step in a run, divided by those of the step alone


class Costs(NamedTuple):
    """Host seconds of a step and of an evaluation, the loss of that evaluation, which is before
    training, and the samples of an epoch.
    """

    step_s: float
    evaluation_s: float
    first_loss: float
    epoch_samples: int


class RunLength(NamedTuple):
    """The predicted length of a run that no target ends."""

    steps: float  # steps of all workers
    seconds: float | None  # on the run's clock; None if no stage has a predicted rate


def measure_costs(prepared: PreparedPlan) -> Costs | None:
    """Time a step and an evaluation of this run; return None with runtime.gradients=false."""
    if not getattr(prepared.parts.runtime, "gradients", True):
        return None
    evaluation_s, first_loss = evaluation_here(*prepared)
    samples = len(prepared.data.train)
    return Costs(step_here_s(*prepared), evaluation_s, first_loss, samples)


def predict_length(plan: Plan, epoch_samples: int) -> RunLength | None:
    """Predict the largest number of steps of a run, and its longest time.

    The run ends at its number of steps or epochs, or after `stop.seconds`. The steps within
    `stop.seconds` are those at the rate of the fastest stage. The time is that of these steps at
    the rate of the slowest stage, at most `stop.seconds`.
    Returns: None if no count limits the steps, and no predicted rate tells those in `stop.seconds`.
    """
    rates = [stage.predicted_steps_per_s for stage in plan.stages if stage.predicted_steps_per_s]
    counted = plan.num_steps(epoch_samples)
    if not rates:
        return None if counted is None else RunLength(counted, None)
    limit_s = math.inf if plan.limits.seconds is None else plan.limits.seconds
    steps = min(math.inf if counted is None else counted, limit_s * max(rates))
    return RunLength(steps, min(limit_s, steps / min(rates))) if math.isfinite(steps) else None


def predict_host_s(plan: Plan, costs: Costs, cores: int = 1) -> float | None:
    """Predict the host seconds of a run that no target ends; None if its steps are unknown.

    Args: cores, the number of steps computed at once if a step takes `MIN_PARALLEL_S` or longer.
    """
    length = predict_length(plan, costs.epoch_samples)
    if length is None:
        return None
    steps, run_s = length
    batch = sum(worker.batch for worker in plan.stages[-1].workers) / plan.num_workers
    evaluations = steps * batch / costs.epoch_samples
    limits = plan.limits
    if limits.eval_every_s is not None and run_s is not None:
        evaluations = run_s / limits.eval_every_s
    elif limits.eval_every_commits is not None:
        local_steps = (
            sum(worker.local_steps for worker in plan.stages[-1].workers) / plan.num_workers
        )
        evaluations = steps / max(1.0, local_steps) / limits.eval_every_commits
    at_once = cores if costs.step_s >= MIN_PARALLEL_S else 1
    return START_S + steps * costs.step_s * OVERHEAD / at_once + evaluations * costs.evaluation_s


def predict_host_s_here(prepared: PreparedPlan) -> float | None:
    """Time a step and an evaluation, and predict the host seconds of this run on this machine.

    Returns: None if they are unknown: with runtime.gradients=false, or if the steps are unknown.
    """
    costs = measure_costs(prepared)
    if costs is None:
        return None
    num_workers = prepared.plan.num_workers
    asked = getattr(prepared.parts.runtime, "cores", 1)
    # more threads than cores or workers save no time
    cores = min(count_cores(asked, num_workers), usable_cores(), num_workers)
    return predict_host_s(prepared.plan, costs, cores)

"""Predict the host seconds of a run in virtual time, from a few steps and an evaluation in this
process.
"""

from typing import NamedTuple

from ashl.plan.plan import Plan
from ashl.planning.compile_plan import PreparedPlan
from ashl.run.rank import evaluation_here, step_here_s
from ashl.runtime.parallel_sim import WORTH_S, count_cores

START_S = 0.7  # host seconds to begin a run and to end it
OVERHEAD = 1.4  # host seconds of a step in a run, divided by those of the step alone


class Costs(NamedTuple):
    """Host seconds of a step and of an evaluation, and the samples of an epoch."""

    step_s: float
    evaluation_s: float
    epoch_samples: int


def measured_costs(first: PreparedPlan) -> Costs | None:
    """Time a step and an evaluation of this run; None with runtime.gradients=false."""
    if not getattr(first.parts.runtime, "gradients", True):
        return None
    return Costs(step_here_s(*first), evaluation_here(*first)[0], len(first.data.train))


def steps_of(plan: Plan, epoch_samples: int) -> float | None:
    """Steps of the whole run: by its count, or by its seconds at the rate of its slowest stage;
    None without both.
    """
    rates = [stage.predicted_steps_per_s for stage in plan.stages if stage.predicted_steps_per_s]
    timed = plan.limits.seconds * min(rates) if plan.limits.seconds is not None and rates else None
    counts = [count for count in (plan.num_steps(epoch_samples), timed) if count is not None]
    return min(counts, default=None)


def host_s(plan: Plan, costs: Costs, cores: int = 1) -> float | None:
    """Return the host seconds of a run that no target ends; None if its steps are unknown.

    Args: cores, the number of steps computed at once if a step is longer than `WORTH_S`.
    """
    steps = steps_of(plan, costs.epoch_samples)
    if steps is None:
        return None
    batch = sum(worker.batch for worker in plan.stages[-1].workers) / plan.num_workers
    evaluations = steps * batch / costs.epoch_samples
    limits = plan.limits
    rates = [stage.predicted_steps_per_s for stage in plan.stages if stage.predicted_steps_per_s]
    if limits.eval_every_s is not None and rates:
        evaluations = steps / min(rates) / limits.eval_every_s
    elif limits.eval_every_commits is not None:
        local_steps = (
            sum(worker.local_steps for worker in plan.stages[-1].workers) / plan.num_workers
        )
        evaluations = steps / max(1.0, local_steps) / limits.eval_every_commits
    at_once = cores if costs.step_s >= WORTH_S else 1
    return START_S + steps * costs.step_s * OVERHEAD / at_once + evaluations * costs.evaluation_s


def host_here_s(first: PreparedPlan) -> float | None:
    """Return the predicted host seconds of a run on this machine; None if they are unknown."""
    costs = measured_costs(first)
    asked = getattr(first.parts.runtime, "cores", 1)
    return (
        None
        if costs is None
        else host_s(first.plan, costs, count_cores(asked, first.plan.num_workers))
    )

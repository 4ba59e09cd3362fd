"""Online planner: replans during a run from moving averages of the observed times.

Rule: with each commit of worker i, x_i ← x_i + alpha · (observed − x_i) for its step, push and pull
time. Every `cooldown_commits` commits per worker the current assignment is judged on the averages
by its pace, Σ H / max_i T_i. The pace is the long-run rate of a stage with bounded staleness. If
`balanced` on the same averages has a pace of more than (1 + threshold) times that, its assignment
is taken. So the pace of a run stays within 1 / (1 + threshold) of a new plan once the averages have
followed, and noise below the threshold changes nothing.

A worker that becomes slower would, as the anchor with H_preset, lengthen the cycle of all workers.
h_max bounds that cycle, and the slow worker's own H shrinks instead. The push time of a compressed
update is scaled to that of the dense update.

Source: departs from Shen et al., "ASHL", IEEE TC 73(1), 2024, with its single plan; moving averages
as in FedCompass (Li et al., ICLR 2024, arXiv 2309.14675).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Count, NonNegative, option
from ashl.plan.profile import Profile, WorkerProfile
from ashl.planner.assignment import Assignment, CurrentWork, Planner, assignments, costs_of
from ashl.planner.balanced import Balanced


@dataclass(frozen=True)
class Averages:
    """State of an online planner: the profile with moving averages as its costs."""

    profile: Profile
    commits: int = 0  # commits since the last decision
    noise: Any = None  # estimates of gradient noise, for planners that use them

    def restrict_to(self, ranks: Sequence[int]) -> Averages:
        """Return the state of these workers."""
        workers = self.profile.workers
        if len(ranks) == len(workers):
            return self  # the common case at every commit: constructing a profile checks it
        return replace(
            self, profile=replace(self.profile, workers=tuple(workers[rank] for rank in ranks))
        )


@option
class Online(Planner):
    """The planner `balanced` on moving averages, with hysteresis."""

    replans: ClassVar[bool] = True
    h_max: Count | None
    alpha: Annotated[float, Field(gt=0, le=1)]
    threshold: NonNegative
    cooldown_commits: Count

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        """Return the assignment of `balanced`."""
        return Balanced(h_max=self.h_max).assign(profile, h_preset, r_preset, payload)

    def observe(
        self,
        state: Averages,
        worker: int,
        step_s: float,
        push_s: float,
        pull_s: float,
        payload: float = 1.0,
    ) -> Averages:
        """Return the state with one commit.

        Args: seconds of a step, of the push of `payload` · dense bytes, and of the pull; 0 = not
        observed.
        """
        known = state.profile.workers[worker]
        expected = known.push_of(payload)
        dense_s = push_s * known.push_s / expected if expected else push_s
        seen = self._average_costs(known, step_s, dense_s, pull_s)
        workers = (*state.profile.workers[:worker], seen, *state.profile.workers[worker + 1 :])
        return replace(
            state, profile=replace(state.profile, workers=workers), commits=state.commits + 1
        )

    def _average_costs(
        self, known: WorkerProfile, step_s: float, push_s: float, pull_s: float
    ) -> WorkerProfile:
        def average(old: float, new: float) -> float:
            """Return the moving average with a new time; 0 = not observed."""
            return old + self.alpha * (new - old) if new else old

        push = average(known.push_s, push_s)
        latency_s = known.latency_s * push / known.push_s if known.push_s else known.latency_s
        return replace(
            known,
            step_s=average(known.step_s, step_s),
            push_s=push,
            pull_s=average(known.pull_s, pull_s),
            latency_s=latency_s,
        )

    def replan(
        self,
        state: Averages,
        current: Sequence[CurrentWork],
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Averages, tuple[Assignment, ...] | None]:
        """Return the state, and a new assignment if it is better by more than the threshold, else
        None.
        """
        if state.commits < self.cooldown_commits * len(current):
            return state, None
        plans = [
            self.assign(state.profile, h, r_preset, payload) for h in self.presets(state, h_preset)
        ]
        best = max(plans, key=lambda plan: self.score(state, plan))
        steps, ratios = [w.local_steps for w in current], [w.compression_ratio for w in current]
        present = assignments(costs_of(state.profile, r_preset is not None), steps, ratios, payload)
        better = self.score(state, best) > (1 + self.threshold) * self.score(state, present)
        return replace(state, commits=0), best if better else None

    def presets(self, state: Averages, h_preset: int) -> Iterable[int]:
        """Yield the candidates for the slowest worker's H."""
        return (h_preset,)

    def score(self, state: Averages, plan: Sequence[Assignment]) -> float:
        """Return the score by which assignments are compared: steps per second."""
        return pace(plan)


def pace(plan: Sequence[Assignment]) -> float:
    """Return the steps per second of all workers if each commits once per longest cycle: Σ H / max
    T.
    """
    return sum(worker.local_steps for worker in plan) / max(
        worker.predicted_cycle_s for worker in plan
    )

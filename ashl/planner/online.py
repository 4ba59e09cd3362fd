"""Plans anew during a run, from moving averages of what each worker is seen to take.

Rule: with each commit of worker i, x_i ← x_i + alpha · (observed − x_i) for its step, push and
pull. Every `cooldown_commits` commits per worker the present assignment is judged on the averages
by its pace, Σ H / max_i T_i, which is what a bounded stage reaches in the long run; when `balanced`
on the same averages promises more than (1 + threshold) times that, its assignment is taken. So a
run stays within 1 / (1 + threshold) of a fresh plan's pace once the averages have followed, and
noise below the threshold moves nothing.

A worker that turns slower would, by H_preset as its anchor, stretch everybody's cycle; h_max bounds
it, and the slow worker's own H shrinks instead. Commits of compressed updates are seen as what the
dense push would have taken.

Source: departs from Shen et al., "ASHL", IEEE TC 73(1), 2024, whose plan is made once; moving
averages as in FedCompass (Li et al., ICLR 2024, arXiv 2309.14675).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Count, NonNegative, option
from ashl.plan.profile import Profile, WorkerProfile
from ashl.planner.assignment import Assigned, Assignment, Planner, assignments, costs_of
from ashl.planner.balanced import Balanced


@dataclass(frozen=True)
class Averages:
    """What is known now: the profile with moving averages as its costs."""

    profile: Profile
    commits: int = 0  # since the assignment was last judged
    noise: Any = None  # of gradients, where a planner follows it

    def of(self, ranks: Sequence[int]) -> Averages:
        """What is known of these workers."""
        workers = self.profile.workers
        if len(ranks) == len(workers):
            return self  # as mostly, at every commit: a profile is checked whenever it is made
        return replace(
            self, profile=replace(self.profile, workers=tuple(workers[rank] for rank in ranks))
        )


@option
class Online(Planner):
    """Balanced, on moving averages, with hysteresis."""

    follows: ClassVar[bool] = True
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
        """As `balanced` does."""
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
        """One commit: seconds of a step, of pushing `payload` · dense bytes, of the pull; 0 = not
        seen this time.
        """
        known = state.profile.workers[worker]
        expected = known.push_of(payload)
        dense_s = push_s * known.push_s / expected if expected else push_s
        seen = self._towards(known, step_s, dense_s, pull_s)
        workers = (*state.profile.workers[:worker], seen, *state.profile.workers[worker + 1 :])
        return replace(
            state, profile=replace(state.profile, workers=workers), commits=state.commits + 1
        )

    def _towards(
        self, known: WorkerProfile, step_s: float, push_s: float, pull_s: float
    ) -> WorkerProfile:
        def follow(old: float, new: float) -> float:
            return old + self.alpha * (new - old) if new else old

        push = follow(known.push_s, push_s)
        latency_s = known.latency_s * push / known.push_s if known.push_s else known.latency_s
        return replace(
            known,
            step_s=follow(known.step_s, step_s),
            push_s=push,
            pull_s=follow(known.pull_s, pull_s),
            latency_s=latency_s,
        )

    def replan(
        self,
        state: Averages,
        current: Sequence[Assigned],
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Averages, tuple[Assignment, ...] | None]:
        """Judge the present assignment: the state, and a new assignment where that is worth it,
        else None.
        """
        if state.commits < self.cooldown_commits * len(current):
            return state, None
        plans = [
            self.assign(state.profile, h, r_preset, payload) for h in self.presets(state, h_preset)
        ]
        best = max(plans, key=lambda plan: self.worth(state, plan))
        steps, ratios = [w.local_steps for w in current], [w.compression_ratio for w in current]
        present = assignments(costs_of(state.profile, r_preset is not None), steps, ratios, payload)
        better = self.worth(state, best) > (1 + self.threshold) * self.worth(state, present)
        return replace(state, commits=0), best if better else None

    def presets(self, state: Averages, h_preset: int) -> Iterable[int]:
        """The H of the slowest that are in question."""
        return (h_preset,)

    def worth(self, state: Averages, plan: Sequence[Assignment]) -> float:
        """By which plans are compared: steps per second."""
        return pace(plan)


def pace(plan: Sequence[Assignment]) -> float:
    """Steps per second of all workers together when each commits as often as the slowest: Σ H / max
    T.
    """
    return sum(worker.local_steps for worker in plan) / max(
        worker.predicted_cycle_s for worker in plan
    )

"""Planner of stages whose exchanges overlap with computing: H alone equalises the cycles.

Rule: another planner assigns H to workers whose transfers take no time. All workers send the preset
density: a larger one would save no time, and would lengthen exchanges that are already longer than
the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, CurrentWork, Planner


@dataclass(frozen=True)
class Hidden(Planner):
    """Another planner, applied to stages with hidden exchanges."""

    planner: Planner
    replans: bool

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        return with_preset_density(
            self.planner.assign(without_transfers(profile), h_preset, r_preset, payload), r_preset
        )

    def observe(
        self,
        state: Any,
        worker: int,
        step_s: float,
        push_s: float,
        pull_s: float,
        payload: float = 1.0,
    ) -> Any:
        return self.planner.observe(state, worker, step_s, 0.0, 0.0, payload)

    def observe_update(self, state: Any, worker: int, update: Any, steps: int, samples: int) -> Any:
        return self.planner.observe_update(state, worker, update, steps, samples)

    def replan(
        self,
        state: Any,
        current: Sequence[CurrentWork],
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Any, tuple[Assignment, ...] | None]:
        state = replace(state, profile=without_transfers(state.profile))
        state, rows = self.planner.replan(state, current, h_preset, r_preset, payload)
        return state, rows and with_preset_density(rows, r_preset)


def without_transfers(profile: Profile) -> Profile:
    workers = (replace(worker, push_s=0.0, pull_s=0.0, latency_s=0.0) for worker in profile.workers)
    return replace(profile, workers=tuple(workers))


def with_preset_density(rows: Sequence[Assignment], ratio: float | None) -> tuple[Assignment, ...]:
    return tuple(replace(row, compression_ratio=1.0 if ratio is None else ratio) for row in rows)

"""Input and contract of a schedule: the chosen options of the other groups, and what is known of
the workers.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

from ashl.errors import UsageError
from ashl.option import Contract
from ashl.plan.plan import Spec, StagePlan, WorkerPlan, assign_work
from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, Planner


@dataclass(frozen=True)
class Choices:
    """The specs that a stage has unless its schedule overrides them, and the means to plan its
    workers.
    """

    names: Mapping[str, str]  # chosen option by group
    specs: dict[str, Spec]  # spec of the chosen option by group
    local_steps: int | str  # H of the chosen sync mode; "plan" = the planner decides
    batch: int
    num_workers: int
    planner: Planner
    profile: Profile | None  # None = not known before the run
    # bytes of a compressed update at a ratio, as a fraction of those of a dense one
    payload: Callable[[float | None], float]
    ratio: float | None  # the codec's own density; None = it sends every element
    profiled: bool  # True if the user gave the profile, so that the run does not measure one

    def stage(
        self,
        name: str,
        *,
        until: dict[str, float] | None = None,
        local_steps: int | str | None = None,
        h_preset: int | None = None,
        r_preset: float | None = None,
        handover: dict[str, str] | None = None,
        **specs: Spec,
    ) -> StagePlan:
        """Return a stage with the chosen specs, or with those given here.

        With local_steps="plan" the planner derives each worker's H from `h_preset`, the slowest
        worker's H, and its compression ratio from `r_preset` (None: the codec's own). Raises:
        UsageError if there is no `h_preset` then.
        """
        r_preset = None if self.ratio is None else self.ratio if r_preset is None else r_preset
        specs = {**self.specs, **specs}
        planned = (self.local_steps if local_steps is None else local_steps) == "plan"
        if planned and h_preset is None:
            raise UsageError(
                "sync.local_steps=plan: needs a schedule that plans H per worker; give a number,"
                " schedule=ashl, or schedule.h_preset=[8] with schedule=single"
            )
        steps = h_preset if planned else (self.local_steps if local_steps is None else local_steps)
        worker = WorkerPlan(
            local_steps=int(steps or 1),
            batch=self.batch,
            data_share=1 / self.num_workers,
            compression_ratio=1.0 if r_preset is None else r_preset,
            predicted_cycle_s=None,
        )
        stage = StagePlan(
            name=name,
            sync=specs["sync"],
            topology=specs["topology"],
            aggregate=specs["aggregate"],
            outer=specs["outer"],
            compression=specs["compression"],
            overlap=specs["overlap"],
            optimizer=specs["optimizer"],
            until=until or {},
            workers=(worker,) * self.num_workers,
            handover=handover or {},
            h_preset=h_preset if planned else None,
            r_preset=r_preset,
        )
        if planned and self.profile is not None:
            return with_assignments(stage, self.planner, self.profile, self.payload)
        return stage


class Schedule(Contract, group="schedule"):
    """A list of the stages of a run."""

    names_sync: ClassVar[bool]  # True if it defines the sync mode of each stage
    h_preset: ClassVar[tuple[int, ...] | None] = None  # the slowest worker's H, by stage
    r_preset: ClassVar[tuple[float | None, ...] | None] = None  # preset ratio, by stage

    def stages(self, choices: Choices) -> list[StagePlan]:
        """Return the stages in order."""
        raise NotImplementedError


def with_assignments(
    stage: StagePlan, planner: Planner, profile: Profile, payload: Callable[[float | None], float]
) -> StagePlan:
    """Return the stage with the planner's H, data share and ratio of each worker."""
    assert stage.h_preset is not None
    rows = planner.assign(profile, stage.h_preset, stage.r_preset, payload)
    check_assignments(planner, rows, len(stage.workers))
    return replace(stage, workers=assign_work(stage.workers, rows))


def check_assignments(planner: Planner, rows: Any, num_workers: int) -> None:
    """Refuse what a planner of the user's own may return in place of assignments.

    Raises: UsageError.
    """
    name = f"planner {type(planner).__module__}.{type(planner).__name__}: assign()"
    if (
        not isinstance(rows, Sequence)
        or len(rows) != num_workers
        or not all(isinstance(row, Assignment) for row in rows)
    ):
        raise UsageError(
            f"{name} should return an Assignment for each of {num_workers} workers, and returned"
            f" {reprlib.repr(rows)}"
        )
    for rank, row in enumerate(rows):
        if not isinstance(row.local_steps, Integral) or row.local_steps < 1:
            raise UsageError(
                f"{name} gives worker {rank} local_steps={row.local_steps}; give a whole number"
                " from 1 on"
            )
        if not 0 < row.compression_ratio <= 1:
            raise UsageError(
                f"{name} gives worker {rank} compression_ratio={row.compression_ratio}; give a"
                " density above 0, at most 1"
            )

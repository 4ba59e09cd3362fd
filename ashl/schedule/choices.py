"""What a schedule is given to make stages of: the other groups' choices, and what is known of the
workers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ashl.errors import UsageError
from ashl.option import Contract
from ashl.plan.plan import Spec, StagePlan, WorkerPlan, assigned
from ashl.plan.profile import Profile
from ashl.planner.assignment import Planner


@dataclass(frozen=True)
class Choices:
    """The specs that a stage takes over unless its schedule says otherwise, and the means to plan
    its workers.
    """

    names: Mapping[str, str]  # of the chosen options, by group
    specs: dict[str, Spec]
    local_steps: int | str  # of the chosen sync mode; "plan" = as the planner says
    batch: int
    num_workers: int
    planner: Planner
    profile: Profile | None  # None = not known before the run
    payload: Callable[
        [float | None], float
    ]  # bytes on the wire of a compressed update / of a dense one
    ratio: float | None  # the codec's own; None = it sends everything
    profiled: (
        bool  # whether the user gave the profile, so that it need not be measured during the run
    )

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
        """A stage with the chosen specs, or those given here. With local_steps="plan" its workers'
        H follow from `h_preset`, the slowest worker's, and their compression ratios from `r_preset`
        (None = the codec's own).
        """
        r_preset = None if self.ratio is None else self.ratio if r_preset is None else r_preset
        specs = {**self.specs, **specs}
        planned = (self.local_steps if local_steps is None else local_steps) == "plan"
        if planned and h_preset is None:
            raise UsageError(
                "sync.local_steps=plan needs a schedule that plans H per worker; give a number,"
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
    """Which stages a run has."""

    names_sync: ClassVar[bool]  # whether it says which sync mode each stage has
    h_preset: ClassVar[tuple[int, ...] | None] = None  # by stage: the slowest worker's H
    r_preset: ClassVar[tuple[float | None, ...] | None] = (
        None  # ... and the preset compression ratio
    )

    def stages(self, choices: Choices) -> list[StagePlan]:
        """The stages in order."""
        raise NotImplementedError


def with_assignments(
    stage: StagePlan, planner: Planner, profile: Profile, payload: Callable[[float | None], float]
) -> StagePlan:
    """The stage with its workers' H, shares and ratios as the planner says."""
    assert stage.h_preset is not None
    rows = planner.assign(profile, stage.h_preset, stage.r_preset, payload)
    return replace(stage, workers=assigned(stage.workers, rows))

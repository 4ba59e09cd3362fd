"""One stage from start to stop, with the chosen sync mode, topology and compression.

With `sync.local_steps=plan` the planner derives each worker's H from `h_preset`, so that AHL or SHL
can run alone.
"""

from typing import ClassVar

from ashl.option import Count, Ratio, option
from ashl.plan.plan import StagePlan
from ashl.schedule.choices import Choices, Schedule


@option
class Single(Schedule):
    """One stage for the whole run."""

    names_sync: ClassVar[bool] = False
    h_preset: tuple[Count] | None
    r_preset: tuple[Ratio] | None

    def stages(self, choices: Choices) -> list[StagePlan]:
        h_preset = None if self.h_preset is None else self.h_preset[0]
        r_preset = None if self.r_preset is None else self.r_preset[0]
        return [choices.stage(choices.names["sync"], h_preset=h_preset, r_preset=r_preset)]

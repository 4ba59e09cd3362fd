"""Profiling alone: the schedule of `ashl profile`.

Source: Shen et al., "ASHL", IEEE TC 2024.
"""

from typing import Any, ClassVar

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.plan.plan import StagePlan
from ashl.schedule.ashl import profiling_stage
from ashl.schedule.choices import Choices, Schedule


@option
class ProfileOnly(Schedule):
    """One profiling stage."""

    names_sync: ClassVar[bool] = True
    profile_steps: Count
    per_layer_group: bool
    codecs: tuple[dict[str, Any], ...]

    def stages(self, choices: Choices) -> list[StagePlan]:
        if choices.profiled:
            raise UsageError(
                "profile: costs are given, so there is nothing to measure; drop profile="
            )
        return profiling_stage(choices, self.profile_steps, self.per_layer_group, self.codecs)

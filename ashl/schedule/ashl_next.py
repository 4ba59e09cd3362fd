"""ASHL-next: ASHL with hidden exchanges, the smallest H, and a server learning rate that decays
each time the loss rises.

Rule: as in `decay_on_rise`, the server multiplies each update by `decay_factor`^k in stage k = 0,
1, … A stage ends at the first evaluation with a higher training loss than the evaluation before.
All stages but the last are AHL, in which no worker waits. The last one is SHL, with the bound
`staleness`. `h_preset` and `r_preset` list H and the preset ratio of the slowest worker by stage;
the last value holds for all later stages. The planner makes cycles equal and shards proportional to
speed. Pushes and pulls are sparse with error feedback, as in `ashl_plus`. With `overlap=delayed`
they travel while the next steps are computed, so that H = 1 costs no time. Only costs that are not
declared are profiled beforehand, because the online planner corrects both kinds.

Limits: two stages with `loss_switch` are `ashl_plus` of that loss, with `shl_scale` =
`decay_factor` and the same overlap. One stage is `single` with sync=shl.
Source: ours, from Shen et al., "ASHL", IEEE TC 2024, Algorithms 1 to 3; an H and a step that follow
the loss, as in AdaComm (Wang and Joshi, MLSys 2019).
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ashl.option import Count, Natural, Ratio, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.ashl import profiling_stage
from ashl.schedule.ashl_plus import with_compressed_pulls
from ashl.schedule.choices import Choices, Schedule
from ashl.schedule.decay_on_rise import DecayStages


@option
class ASHLNext(Schedule, DecayStages):
    """Hidden exchanges, small H, and a decaying server learning rate."""

    names_sync: ClassVar[bool] = True
    h_preset: Annotated[tuple[Count, ...], Field(min_length=1)]
    r_preset: Annotated[tuple[Ratio | None, ...], Field(min_length=1)]
    pull_ratio: Ratio | None
    staleness: Natural
    profile_steps: Count

    def stages(self, choices: Choices) -> list[StagePlan]:
        choices = with_compressed_pulls(choices, self.pull_ratio)

        def stage_of(k: int) -> StagePlan:
            sync: Spec = {"_target_": "ashl.sync.ahl.AHL"}
            if k == self.decay_stages - 1:
                sync = {"_target_": "ashl.sync.shl.SHL", "staleness": self.staleness}
            h, r = self.h_preset[: k + 1][-1], self.r_preset[: k + 1][-1]
            return choices.stage("", sync=sync, local_steps="plan", h_preset=h, r_preset=r)

        return [
            *profiling_stage(choices, 0 if choices.profile else self.profile_steps),
            *self.with_decay(stage_of),
        ]

"""ASHL as a ladder: exchanges that are hidden, the smallest H, and a step that falls each time the loss rises.

Rule: as in `falling`, rung k = 0, 1, … has the server add `fall`^k times what it would and gives way at the first
evaluation in which the training loss is above that of the one before. All rungs but the last are AHL's, where nobody
waits; the last one is SHL, with the bound `staleness`. H and the preset ratio of the slowest worker follow the rungs
as `h_preset` and `r_preset` list them, the last of which holds for all further ones, and the planner makes cycles
equal and shards as large as their worker is quick. Push and pull keep a share with error feedback, as in `ashl_plus`,
and with `overlap=late` they travel while the next steps are computed, so that H = 1 costs no time. Only costs that
nobody declares are profiled beforehand: the online planner goes on from either.

Limits: two rungs with `loss_switch` are `ashl_plus` of that loss, with `shl_scale` = `fall` and the same overlap; one
rung is `single` with sync=shl.

Source: departs from Shen et al., "ASHL", IEEE TC 2024, Algorithms 1 to 3; an H and a step that follow the loss, as in
AdaComm (Wang and Joshi, MLSys 2019).
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ashl.option import Count, Natural, Ratio, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.ashl import profiling
from ashl.schedule.ashl_plus import pulling
from ashl.schedule.choices import Choices, Schedule
from ashl.schedule.falling import Ladder


@option
class ASHLNext(Schedule, Ladder):
    """Hidden exchanges, small H, ever smaller steps."""

    names_sync: ClassVar[bool] = True
    h_preset: Annotated[tuple[Count, ...], Field(min_length=1)]
    r_preset: Annotated[tuple[Ratio | None, ...], Field(min_length=1)]
    pull_ratio: Ratio | None
    staleness: Natural
    profile_steps: Count

    def stages(self, choices: Choices) -> list[StagePlan]:
        choices = pulling(choices, self.pull_ratio)

        def rung(k: int) -> StagePlan:
            sync: Spec = {"_target_": "ashl.sync.ahl.AHL"}
            if k == self.rungs - 1:
                sync = {"_target_": "ashl.sync.shl.SHL", "staleness": self.staleness}
            h, r = self.h_preset[: k + 1][-1], self.r_preset[: k + 1][-1]
            return choices.stage("", sync=sync, local_steps="plan", h_preset=h, r_preset=r)

        return [*profiling(choices, 0 if choices.profile else self.profile_steps), *self.laddered(rung)]

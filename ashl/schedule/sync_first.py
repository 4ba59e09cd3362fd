"""A short synchronous warm-up, then ASHL.

Rule: BSP for `warmup_epochs`, then AHL until the loss is at most `loss_switch`, then SHL. The
warm-up sends all elements. It exchanges differences, so that momentum is on the workers from the
start.

Source: Li et al., "Sync-Switch", ICDCS 2021 (synchronous for the first part, asynchronous after
it); Shen et al., "ASHL", IEEE TC 2024.
"""

from ashl.option import Positive, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.ashl import ASHL, ahl_stage, profiling_stage, shl_stage
from ashl.schedule.choices import Choices
from ashl.schedule.handover import Handover


@option
class SyncFirst(ASHL, Handover):
    """BSP first, then ASHL."""

    warmup_epochs: Positive

    def stages(self, choices: Choices) -> list[StagePlan]:
        return self.with_handover(
            [
                *profiling_stage(choices, self.profile_steps),
                bsp_stage(choices, {"epochs": self.warmup_epochs}, r=1.0),
                ahl_stage(choices, self.h_preset[0], self.r_preset[0], until=self.low_enough),
                shl_stage(choices, self.h_preset[1], self.r_preset[1], self.staleness),
            ]
        )


def bsp_stage(choices: Choices, until: dict[str, float], r: float | None = None) -> StagePlan:
    """Return a BSP stage in which each worker takes the optimizer step itself."""
    spec: Spec = {"_target_": "ashl.sync.bsp.BSP", "exchange": "difference"}
    return choices.stage("bsp", sync=spec, local_steps=1, r_preset=r, until=until)

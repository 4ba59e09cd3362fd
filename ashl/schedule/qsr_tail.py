"""ASHL with a last stage in which H grows as the learning rate decays.

Rule: AHL until the loss is at most `loss_switch`, then SHL for `shl_epochs`. Then averages after H
steps by the quadratic rule H = max(H_SHL, ⌊(alpha/η)²⌋) ≤ `h_max`, with each worker's H in
proportion to its planned H. With a constant learning rate H is constant.

Source: Shen et al., "ASHL", IEEE TC 2024; Gu et al., "A Quadratic Synchronization Rule", ICLR 2024.
"""

from ashl.option import Count, Positive, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.ashl import ASHL, ahl_stage, profiling_stage, shl_stage
from ashl.schedule.choices import Choices
from ashl.schedule.handover import Handover


@option
class QSRTail(ASHL, Handover):
    """A large H, a small H, and a growing H at the end."""

    shl_epochs: Positive
    alpha: Positive
    h_max: Count

    def stages(self, choices: Choices) -> list[StagePlan]:
        h, r = self.h_preset[1], self.r_preset[1]
        spec: Spec = {
            "_target_": "ashl.sync.qsr.QSR",
            "local_steps": "plan",
            "alpha": self.alpha,
            "h_max": self.h_max,
        }
        return self.with_handover(
            [
                *profiling_stage(choices, self.profile_steps),
                ahl_stage(choices, self.h_preset[0], self.r_preset[0], until=self.low_enough),
                shl_stage(choices, h, r, self.staleness, until={"epochs": self.shl_epochs}),
                choices.stage("qsr", sync=spec, local_steps="plan", h_preset=h, r_preset=r),
            ]
        )

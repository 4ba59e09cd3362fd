"""ASHL's stages in the other order: SHL with a small H first, then AHL with a large one.

Rule: SHL until the loss ≤ `loss_switch`, as in ASHL, then AHL to the end. Fine first keeps the
early, steep part in step; coarse later spends fewest exchanges where the model moves least.

Source: stages of Shen et al., "ASHL", IEEE TC 2024, in the order of Sync-Switch (Li et al., ICDCS
2021), whose runs are more accurate the stricter stage first.
"""

from ashl.option import option
from ashl.plan.plan import StagePlan
from ashl.schedule.ashl import ASHL, ahl_stage, profiling_stage, shl_stage
from ashl.schedule.choices import Choices
from ashl.schedule.handover import Handover


@option
class ASHLReversed(ASHL, Handover):
    """Fine and bounded first, coarse and asynchronous later."""

    def stages(self, choices: Choices) -> list[StagePlan]:
        return self.with_handover(
            [
                *profiling_stage(choices, self.profile_steps),
                shl_stage(
                    choices,
                    self.h_preset[1],
                    self.r_preset[1],
                    self.staleness,
                    until=self.low_enough,
                ),
                ahl_stage(choices, self.h_preset[0], self.r_preset[0]),
            ]
        )

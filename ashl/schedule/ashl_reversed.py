"""ASHL's stages in reverse order: SHL with a small H first, then AHL with a large one.

Rule: SHL until the loss is at most `loss_switch`, as in ASHL, then AHL until the end. A bounded
lead keeps workers close in the early, steep part; later, when the model moves least, AHL needs the
fewest exchanges.

Source: stages of Shen et al., "ASHL", IEEE TC 2024, in the order of Sync-Switch (Li et al., ICDCS
2021). There the stricter stage first gives the higher accuracy.
"""

from ashl.option import option
from ashl.plan.plan import StagePlan
from ashl.schedule.ashl import ASHL, ahl_stage, profiling_stage, shl_stage
from ashl.schedule.choices import Choices
from ashl.schedule.handover import Handover


@option
class ASHLReversed(ASHL, Handover):
    """A small H with a bounded lead first, a large H without waiting later."""

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

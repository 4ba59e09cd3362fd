"""Post-local SGD: BSP until a switch, then local SGD.

Rule: BSP for `switch_epochs`, then averages after H = `local_steps` local steps until the end. BSP
exchanges differences, so that momentum is on the workers in both stages; for SGD that equals
averaging gradients. With topology=all_reduce the workers receive the switch one round later.

Limit: `local_steps` = 1 is BSP throughout.
Source: Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020.
Differs: the paper switches at the first decay of the learning rate.
"""

from typing import ClassVar

from ashl.option import Count, Positive, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.choices import Choices, Schedule
from ashl.schedule.handover import Handover
from ashl.schedule.sync_first import bsp_stage


@option
class PostLocal(Schedule, Handover):
    """Synchronous steps first, local steps later."""

    names_sync: ClassVar[bool] = True
    switch_epochs: Positive
    local_steps: Count

    def stages(self, choices: Choices) -> list[StagePlan]:
        h = self.local_steps
        spec: Spec = {"_target_": "ashl.sync.local_sgd.LocalSGD", "local_steps": h}
        local = choices.stage("local_sgd", sync=spec, local_steps=h)
        return self.with_handover([bsp_stage(choices, {"epochs": self.switch_epochs}), local])

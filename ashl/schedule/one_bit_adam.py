"""1-bit Adam: Adam on whole gradients until its variance has settled, then momenta in about one bit
per element.

Rule: BSP by all-reduce for `warmup_epochs`, with uncompressed gradients and Adam. Then
`sync=one_bit_adam` with the chosen compression until the end. The paper's warm-up takes 15 to 25 %
of the run.

Limit: a warm-up until the end is Adam.
Source: Tang et al., "1-bit Adam", ICML 2021.
"""

from typing import ClassVar

from ashl.option import Positive, option
from ashl.plan.plan import Spec, StagePlan
from ashl.schedule.choices import Choices, Schedule


@option
class OneBitAdam(Schedule):
    """Uncompressed Adam first, compressed momenta later."""

    names_sync: ClassVar[bool] = True
    warmup_epochs: Positive

    def stages(self, choices: Choices) -> list[StagePlan]:
        bsp: Spec = {"_target_": "ashl.sync.bsp.BSP", "exchange": "gradient"}
        whole: Spec = {"_target_": "ashl.compression.none.Dense"}
        until = {"epochs": self.warmup_epochs}
        return [
            choices.stage(
                "adam", sync=bsp, compression=whole, local_steps=1, r_preset=1.0, until=until
            ),
            choices.stage(
                "one_bit", sync={"_target_": "ashl.sync.one_bit_adam.OneBitAdam"}, local_steps=1
            ),
        ]

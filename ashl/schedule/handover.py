"""What goes with a worker over the border between two stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ashl.option import option
from ashl.plan.plan import StagePlan


@option
class Handover:
    """The fields of a schedule that declares it, for all of its borders.

    momentum: the moments of the optimizer and of the outer one are kept, or start from zero.
    residual: what error feedback holds back is kept and sent in the next stage, or dropped.
    """

    momentum: Literal["keep", "reset"]
    residual: Literal["keep", "drop"]

    def with_handover(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with the hand-over declared for each but the first."""
        first, *others = stages
        declared = {"momentum": self.momentum, "residual": self.residual}
        return [first, *(replace(stage, handover=declared) for stage in others)]

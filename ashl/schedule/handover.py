"""State that workers keep across a stage boundary."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ashl.option import option
from ashl.plan.plan import StagePlan


@option
class Handover:
    """Fields of a schedule that declares the handover, for all of its stage boundaries.

    momentum: keep or reset the moments of the optimizer and of the outer optimizer. residual: keep
    what error feedback holds back for the next stage, or drop it.
    """

    momentum: Literal["keep", "reset"]
    residual: Literal["keep", "drop"]

    def with_handover(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """Return the stages with the handover declared for each except the first."""
        first, *others = stages
        declared = {"momentum": self.momentum, "residual": self.residual}
        return [first, *(replace(stage, handover=declared) for stage in others)]

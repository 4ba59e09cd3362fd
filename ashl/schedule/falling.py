"""The chosen sync mode, with a step that falls each time the evaluated loss has risen.

Rule: the stages are rungs of a ladder. On rung k = 0, 1, … the server adds `fall`^k times what it would, and the rung
gives way at the first evaluation in which the training loss is above that of the one before: what swings about a
minimum comes nearer to it with a smaller step. No horizon is known beforehand, and no loss; `loss_switch`, where it is
given, says for each rung but the last the evaluated loss at which it gives way instead. How soon a swing is seen is how
often is evaluated (`eval.*`).

Limits: one rung is `single`; `fall` = 1 changes no step, and a border is a barrier still. Where nobody adds up updates,
as in gossip, there is no step of a server to fall, and it is refused; so it is where gradients are merged, as in
`bsp`, on which the optimizer steps.

Source: ours.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from ashl.errors import UsageError
from ashl.option import Count, Positive, Ratio, option
from ashl.plan.plan import StagePlan
from ashl.schedule.choices import Choices, Schedule


@option
class Ladder:
    """The fields of a schedule that declares it, for its rungs."""

    rungs: Count
    fall: Ratio
    loss_switch: tuple[Positive, ...] | None

    def laddered(self, rung: Callable[[int], StagePlan]) -> list[StagePlan]:
        """All rungs, of those that `rung` makes by number, each with its name, its step and the rule by which it ends.
        Raises UsageError."""
        borders: list[dict[str, float]] = [{"rises": float(k)} for k in range(1, self.rungs)]
        if (losses := self.loss_switch) is not None:
            if len(losses) != self.rungs - 1 or list(losses) != sorted(set(losses), reverse=True):
                raise UsageError(
                    f"schedule.loss_switch={list(losses)} is no way down {self.rungs} rungs: each but the last gives "
                    f"way at a lower loss than the one before; give {self.rungs - 1} falling losses, or null"
                )
            borders = [{"evaluated_loss": loss} for loss in losses]
        stages, last = [], rung(self.rungs - 1).aggregate["scale"] * self.fall ** (self.rungs - 1)
        if not last:
            raise UsageError(
                f"with schedule.fall={self.fall:g} no step is left on the last of schedule.rungs={self.rungs}; take "
                "fewer rungs, or let the step fall by less"
            )
        for k, until in enumerate([*borders, {}]):
            stage = rung(k)
            aggregate = {**stage.aggregate, "scale": self.fall**k * stage.aggregate["scale"]}
            stages.append(replace(stage, name=f"rung{k + 1}", until=until, aggregate=aggregate))
        return stages


@option
class Falling(Schedule, Ladder):
    """One sync mode, ever smaller steps."""

    names_sync: ClassVar[bool] = False
    h_preset: tuple[Count] | None

    def stages(self, choices: Choices) -> list[StagePlan]:
        h_preset = None if self.h_preset is None else self.h_preset[0]
        return self.laddered(lambda k: choices.stage("", h_preset=h_preset))

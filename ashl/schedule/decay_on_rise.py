"""Run the chosen sync mode with a server learning rate that decays each time the evaluated loss
rises.

Rule: in decay stage k = 0, 1, … the server multiplies each update by `decay_factor`^k. A stage ends
at the first evaluation whose training loss is above that of the evaluation before: a smaller rate
brings a model that oscillates about a minimum nearer to it. Neither a horizon nor a loss needs to
be known in advance. With `loss_switch` each stage but the last ends at the given evaluated loss
instead. `eval.*` sets how soon a rise is seen.

Limits: one stage is `single`. `decay_factor` = 1 changes no rate, and a stage boundary remains a
barrier. Modes without a server learning rate are not supported: gossip, and modes that merge
gradients, such as `bsp`.
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
class DecayStages:
    """The fields that schedules with decay stages share."""

    decay_stages: Count
    decay_factor: Ratio
    loss_switch: tuple[Positive, ...] | None

    def with_decay(self, stage_of: Callable[[int], StagePlan]) -> list[StagePlan]:
        """Return all decay stages, each with its name, server learning rate and end.

        Args: `stage_of` makes a stage by its number. Raises: UsageError.
        """
        ends: list[dict[str, float]] = [{"rises": float(k)} for k in range(1, self.decay_stages)]
        if (losses := self.loss_switch) is not None:
            if len(losses) != self.decay_stages - 1 or list(losses) != sorted(
                set(losses), reverse=True
            ):
                raise UsageError(
                    f"schedule.loss_switch={list(losses)}: {self.decay_stages} stages need"
                    f" {self.decay_stages - 1} losses, each lower than the one before; give that"
                    " many, or null"
                )
            ends = [{"evaluated_loss": loss} for loss in losses]
        factor = self.decay_factor ** (self.decay_stages - 1)
        if not stage_of(self.decay_stages - 1).aggregate["scale"] * factor:
            raise UsageError(
                f"schedule.decay_factor={self.decay_factor:g}: the server learning rate of the last"
                f" of schedule.decay_stages={self.decay_stages} stages is 0; take fewer stages, or"
                " a larger factor"
            )
        stages = []
        for k, until in enumerate([*ends, {}]):
            stage = stage_of(k)
            aggregate = {
                **stage.aggregate,
                "scale": self.decay_factor**k * stage.aggregate["scale"],
            }
            stages.append(replace(stage, name=f"decay{k + 1}", until=until, aggregate=aggregate))
        return stages


@option
class DecayOnRise(Schedule, DecayStages):
    """One sync mode with a decaying server learning rate."""

    names_sync: ClassVar[bool] = False
    h_preset: tuple[Count] | None

    def stages(self, choices: Choices) -> list[StagePlan]:
        h_preset = None if self.h_preset is None else self.h_preset[0]
        return self.with_decay(lambda k: choices.stage("", h_preset=h_preset))

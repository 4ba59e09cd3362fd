"""ASHL: profile the workers, then AHL with a large H until the loss is low, then SHL with a small H
and Top-K.

Rule: AHL until the global loss ≤ `loss_switch`, then SHL with the bound `staleness` in commits to
the end. The global loss is that of the global model on the training set, as last evaluated (the
released code evaluates every 30 s); `loss=running` takes the mean of the workers' minibatch losses
instead, which is at hand at each commit, but lags, and is of models that have just fitted their own
shards. Each stage's H_i, data share and compression ratio follow from its presets by the planner.
Momentum and residuals stay on the workers. Profiling is a stage of its own on the experiment's
clock, unless a profile or a plan is given.

Source: Shen et al., "ASHL", IEEE TC 2024, Algorithms 1 to 3; the released constants. Differs from
both the paper and the released code in three things:
    border     all workers cross from AHL to SHL together, at a barrier that lets all pushes in;
               printed, each worker
               changes its H at its next commit. A stage has one plan, and its counts and times are
               of that stage alone.
    SHL        the server applies a push and then has its worker wait, as SSP does; printed, a push
               of a worker that is
               too far ahead waits unapplied. So no finished work grows stale at the server.
    feedback   `compression=topk` keeps what Top-K leaves out for the next push; printed, it is lost
               as the worker takes
               the server's model. `compression.error_feedback=false` is as printed, and slower
               (`docs/ashl_table.md`).
Printed, Top-K is in both stages, with each worker's own ratio; the released code compresses in SHL
alone, with one ratio for all. Here `r_preset` says it by stage, and each worker has its ratio.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ashl.option import Count, Natural, Positive, Ratio, option
from ashl.plan.plan import SERIAL, Spec, StagePlan
from ashl.schedule.choices import Choices, Schedule


@option
class ASHL(Schedule):
    """Coarse and asynchronous first, fine and bounded later."""

    names_sync: ClassVar[bool] = True
    h_preset: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2)]
    r_preset: Annotated[tuple[Ratio | None, ...], Field(min_length=2, max_length=2)]
    loss_switch: Positive
    loss: Literal["evaluated", "running"]
    staleness: Natural
    profile_steps: Natural

    def stages(self, choices: Choices) -> list[StagePlan]:
        return [
            *profiling_stage(choices, self.profile_steps),
            ahl_stage(choices, self.h_preset[0], self.r_preset[0], until=self.low_enough),
            shl_stage(choices, self.h_preset[1], self.r_preset[1], self.staleness),
        ]

    @property
    def low_enough(self) -> dict[str, float]:
        """The rule by which a stage gives way once the loss is low."""
        return {"evaluated_loss" if self.loss == "evaluated" else "loss": self.loss_switch}


def profiling_stage(
    choices: Choices, steps: int, per_layer_group: bool = False, codecs: Sequence[Spec] = ()
) -> list[StagePlan]:
    """The stage that measures, where it is wanted."""
    spec: Spec = {
        "_target_": "ashl.sync.profiling.Profiling",
        "steps": steps,
        "per_layer_group": per_layer_group,
    }
    spec |= {"codecs": list(codecs)}
    return (
        [choices.stage("profile", sync=spec, local_steps=1, overlap=SERIAL.copy())]
        if steps and not choices.profiled
        else []
    )


def ahl_stage(
    choices: Choices, h: int, r: float | None, until: dict[str, float] | None = None
) -> StagePlan:
    spec: Spec = {"_target_": "ashl.sync.ahl.AHL"}
    return choices.stage("ahl", sync=spec, local_steps="plan", h_preset=h, r_preset=r, until=until)


def shl_stage(
    choices: Choices, h: int, r: float | None, staleness: int, until: dict[str, float] | None = None
) -> StagePlan:
    spec: Spec = {"_target_": "ashl.sync.shl.SHL", "staleness": staleness}
    return choices.stage("shl", sync=spec, local_steps="plan", h_preset=h, r_preset=r, until=until)

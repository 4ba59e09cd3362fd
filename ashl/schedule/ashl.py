"""ASHL: profile the workers, then AHL with a large H until the loss is low, then SHL with a small H
and Top-K.

Rule: AHL until the global loss is at most `loss_switch`, then SHL with the bound `staleness` in
commits until the end. The global loss is that of the global model on the training set at the last
evaluation; the released code evaluates every 30 s. `loss=running` takes the running mean of the
workers' minibatch losses instead. That is known at each commit, but it lags, and belongs to models
that have just trained on their own shards. The planner computes each worker's H_i, data share and
compression ratio from the presets of a stage. Momentum and residuals remain on the workers across
stages. Profiling is a stage of its own on the run's clock, unless a profile or a plan is given.

Source: Shen et al., "ASHL", IEEE TC 2024, Algorithms 1 to 3; the released constants.
Differs in three things from both the paper and the released code:
    boundary   all workers change from AHL to SHL together, at a barrier that merges all pushes in
               flight; in the paper each worker changes its H at its next commit. So a stage has one
               plan, and its counts and times belong to that stage alone.
    SHL        the server applies a push and then lets its worker wait, as SSP does; in the paper
               the push of a worker that leads by too much waits unapplied. So no finished work
               becomes stale at the server.
    feedback   `compression=topk` adds what Top-K leaves out to the next push; in the paper it is
               lost as the worker takes the server's model. `compression.error_feedback=false` is
               the paper's rule, and slower (`docs/results/ashl_vs_adsp.md`).
In the paper Top-K is in both stages, with a ratio per worker. The released code compresses in SHL
alone, with one ratio for all workers. Here `r_preset` lists the ratio by stage, and each worker has
a ratio of its own.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ashl.option import Count, Natural, Positive, Ratio, option
from ashl.plan.plan import SERIAL, Spec, StagePlan
from ashl.schedule.choices import Choices, Schedule


@option
class ASHL(Schedule):
    """A large H without waiting first, a small H with a bounded lead later."""

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
        """Return the condition that ends a stage once the loss is low."""
        return {"evaluated_loss" if self.loss == "evaluated" else "loss": self.loss_switch}


def profiling_stage(
    choices: Choices, steps: int, per_layer_group: bool = False, codecs: Sequence[Spec] = ()
) -> list[StagePlan]:
    """Return the profiling stage in a list; an empty list if `steps` is 0 or the user gave a
    profile.
    """
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

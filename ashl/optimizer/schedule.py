"""The learning rate as a function of the samples applied."""

import math
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ashl.errors import UsageError
from ashl.optimizer.contract import Optimizer
from ashl.option import NonNegative, Positive, option

Decay = Annotated[float, Field(ge=0, lt=1)]  # what a running mean keeps of itself at each step

WARMUP_START = 0.1  # share of the full rate at the first sample
MILESTONES, DROP = (
    (0.5, 0.75),
    0.1,
)  # step: shares of the horizon at which the rate falls to a tenth


@option
class Scheduled(Optimizer, contract=True):
    """The fields that every optimizer has, and the rate that follows from them.

    `constant` stays; `linear` and `cosine` fall to zero at the horizon (cosine: Loshchilov and
    Hutter, SGDR, 2017); `step` falls to a tenth at a half and again at three quarters of it (He et
    al., 2015). Warm-up rises in a straight line from a tenth (Goyal et al., 2017) and the decay
    begins where it ends; `step` counts from the start.
    """

    lr: Annotated[Positive, Field(le=1e38)]  # of what float32 can hold
    weight_decay: Annotated[NonNegative, Field(le=1e38)]
    schedule: Literal["constant", "cosine", "linear", "step"]
    warmup_epochs: NonNegative
    horizon_epochs: Positive | None

    def __post_init__(self) -> None:
        falls = self.schedule != "constant" and self.horizon_epochs is not None
        if falls and self.horizon_epochs <= self.warmup_epochs:
            raise UsageError(
                f"optimizer.horizon_epochs={self.horizon_epochs} must be more than "
                f"optimizer.warmup_epochs={self.warmup_epochs}."
            )

    def rate(self, samples: int, epoch_samples: int) -> float:
        """The learning rate once `samples` samples are applied; `epoch_samples` is the size of the
        training set.
        """
        epochs = samples / epoch_samples
        if epochs < self.warmup_epochs:
            return self.lr * (WARMUP_START + (1 - WARMUP_START) * epochs / self.warmup_epochs)
        return self.lr * self._decay(epochs)

    def _decay(self, epochs: float) -> float:
        if self.schedule == "constant":
            return 1.0
        if self.horizon_epochs is None:
            raise _no_horizon(self.schedule)
        if self.schedule == "step":
            return DROP ** sum(epochs >= share * self.horizon_epochs for share in MILESTONES)
        done = min((epochs - self.warmup_epochs) / (self.horizon_epochs - self.warmup_epochs), 1.0)
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


S = TypeVar("S", bound=Optimizer)


def with_horizon(optimizer: S, run_epochs: float | None) -> S:
    """The optimizer with the run's own length as its horizon, where it needs one and was given
    none.

    Raises UsageError when the rate decays, no horizon is given, and the run ends otherwise
    (`run_epochs` is None).
    """
    if optimizer.schedule == "constant" or optimizer.horizon_epochs is not None:
        return optimizer
    if run_epochs is None:
        raise _no_horizon(optimizer.schedule)
    assert isinstance(optimizer, Scheduled)
    return replace(optimizer, horizon_epochs=run_epochs)


def _no_horizon(schedule: str) -> UsageError:
    return UsageError(
        f"optimizer.schedule={schedule} must know where the rate reaches its end, as this run does"
        " not end by epochs; add for example optimizer.horizon_epochs=20, or take"
        " optimizer.schedule=constant."
    )

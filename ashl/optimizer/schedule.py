"""Compute the learning rate from the samples applied."""

import math
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ashl.errors import UsageError
from ashl.optimizer.contract import Optimizer
from ashl.option import NonNegative, Positive, option

# share of itself that a running mean keeps at each step
Decay = Annotated[float, Field(ge=0, lt=1)]

WARMUP_START = 0.1  # share of the full rate at the first sample
# schedule=step: shares of the horizon at which the rate falls, each time to a tenth.
MILESTONES = (0.5, 0.75)
DROP = 0.1


@option
class Scheduled(Optimizer, contract=True):
    """The fields of every optimizer with a learning rate, and the rate that follows from them.

    `constant` stays; `linear` and `cosine` fall to zero at the horizon; `step` falls to a tenth at
    one half and again at three quarters of it. Warm-up rises linearly from a tenth. The decay
    begins at its end, except for `step`, which counts from the start.

    Source: cosine, Loshchilov and Hutter, SGDR, 2017; step, He et al., 2015; warm-up, Goyal et al.,
    2017.
    """

    lr: Annotated[Positive, Field(le=1e38)]  # at most what float32 can represent
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
        """Return the learning rate after `samples` applied samples.

        Args: epoch_samples is the size of the training set.
        """
        epochs = samples / epoch_samples
        if epochs < self.warmup_epochs:
            return self.lr * (WARMUP_START + (1 - WARMUP_START) * epochs / self.warmup_epochs)
        return self.lr * self._decay(epochs)

    def _decay(self, epochs: float) -> float:
        if self.schedule == "constant":
            return 1.0
        assert self.horizon_epochs is not None, "see `with_horizon`"
        if self.schedule == "step":
            return DROP ** sum(epochs >= share * self.horizon_epochs for share in MILESTONES)
        done = min((epochs - self.warmup_epochs) / (self.horizon_epochs - self.warmup_epochs), 1.0)
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


S = TypeVar("S", bound=Optimizer)


def with_horizon(optimizer: S, run_epochs: float | None) -> S:
    """Return the optimizer with the run's own length as horizon, if it needs one and has none.

    Raises: UsageError if the rate decays without a horizon and the run has no length in epochs
    (`run_epochs` is None).
    """
    if optimizer.schedule == "constant" or optimizer.horizon_epochs is not None:
        return optimizer
    if run_epochs is None:
        raise UsageError(
            f"optimizer.schedule={optimizer.schedule} must know where the rate reaches its end, as"
            " this run does not end by epochs; add for example optimizer.horizon_epochs=20, or"
            " take optimizer.schedule=constant."
        )
    assert isinstance(optimizer, Scheduled)
    return replace(optimizer, horizon_epochs=run_epochs)

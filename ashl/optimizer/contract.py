"""Define an optimizer: pure functions on flat vectors [d]; its moments are passed and returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ashl.option import Contract

Moments = tuple[Tensor, ...]
Layers = Sequence[tuple[str, tuple[int, ...]]]  # name and shape of each tensor


class Optimizer(Contract, group="optimizer"):
    """An optimizer that steps on gradients, or, if it has `statistics`, on other sums over
    workers.
    """

    elementwise: ClassVar[bool] = False  # True if an element's step depends on that element alone
    schedule: ClassVar[str] = "constant"  # of the learning rate
    horizon_epochs: ClassVar[float | None] = None
    warmup_epochs: ClassVar[float] = 0.0
    momentum: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.0

    @property
    def needs(self) -> dict[str, str]:
        if type(self).statistics is Optimizer.statistics:
            return {}
        return dict.fromkeys(("mlp", "closed_form", "statistics", "lossless", "plain_mean"), "")

    def for_layers(self, layers: Layers) -> Optimizer:
        """Return the optimizer of this model, for an optimizer that has to know the layers."""
        return self

    def init(self, num_params: int) -> Moments:
        """Return empty moments."""
        return ()

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters; the arguments are unchanged."""
        raise NotImplementedError

    def rate(self, samples: int, epoch_samples: int) -> float:
        """Return the learning rate after `samples` applied samples."""
        raise NotImplementedError

    def statistics(self, layers: Layers) -> int:
        """Return how many elements workers exchange instead of a gradient; 0 = gradients."""
        return 0

    def init_for_layers(self, layers: Layers) -> Moments:
        """Return empty moments of an optimizer with `statistics`."""
        raise NotImplementedError

    def sweep(
        self, params: Tensor, moments: Moments, blocks: Any, inputs: Tensor, targets: Tensor
    ) -> tuple[float, Any, Tensor]:
        """Return the loss, the variables that the worker keeps, and the statistics of all its
        samples.
        """
        raise NotImplementedError

"""What an optimizer is: pure functions on flat vectors [d], with its moments passed and
returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ashl.option import Contract

Moments = tuple[Tensor, ...]
Layers = Sequence[tuple[str, tuple[int, ...]]]  # name and shape


class Optimizer(Contract, group="optimizer"):
    """Makes steps of gradients; or, where it has `statistics`, of something else that
    workers sum.
    """

    elementwise: ClassVar[bool] = False  # whether an element's step depends on that element alone
    schedule: ClassVar[str] = "constant"  # of the learning rate
    horizon_epochs: ClassVar[float | None] = None
    warmup_epochs: ClassVar[float] = 0.0
    momentum: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.0

    def for_layers(self, layers: Layers) -> Optimizer:
        """The optimizer of this model, where it has to know its layers."""
        return self

    def init(self, num_params: int) -> Moments:
        """Empty moments."""
        return ()

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """(new moments, new parameters); the arguments stay as they are."""
        raise NotImplementedError

    def rate(self, samples: int, epoch_samples: int) -> float:
        """The learning rate once so many samples are applied."""
        raise NotImplementedError

    def statistics(self, layers: Layers) -> int:
        """How many elements workers exchange instead of a gradient; 0 = it wants gradients."""
        return 0

    def shaped(self, layers: Layers) -> Moments:
        """Empty moments of an optimizer with `statistics`."""
        raise NotImplementedError

    def sweep(
        self, params: Tensor, moments: Moments, blocks: Any, inputs: Tensor, targets: Tensor
    ) -> tuple[float, Any, Tensor]:
        """(loss, what the worker keeps, its statistics) of all its samples."""
        raise NotImplementedError

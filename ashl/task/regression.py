"""Regression: training minimises the squared error; R² or the mean absolute error is reported.

Rule: loss = ½·mean (output − target)², R² = 1 − Σ (output − target)² / Σ (target − mean target)²
over the test set.
Source: Wright, "Correlation and causation", Journal of Agricultural Research 20, 1921.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ashl.errors import UsageError
from ashl.option import option
from ashl.task.contract import Task


@option
class Regression(Task):
    """Values."""

    metric: Literal["r2", "mae"]

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "r2"

    def output_shape(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        if not targets.is_floating_point():
            raise UsageError(
                "task=regression needs values (float32), and this data set's targets are classes;"
                " take task=classification"
            )
        return tuple(targets.shape)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * functional.mse_loss(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error, or [squared error, target, target²], the last two for each
        output.
        """
        errors, targets = (outputs - targets).double().flatten(1), targets.double().flatten(1)
        if self.metric == "mae":
            return errors.abs().mean(1)
        return torch.cat([errors.square().sum(1, keepdim=True), targets, targets.square()], dim=1)

    def value(self, means: Tensor) -> float:
        if self.metric == "mae":
            return means[0].item()
        mean, square = means[1:].chunk(2)
        return (1 - means[0] / (square - mean.square()).sum()).item()

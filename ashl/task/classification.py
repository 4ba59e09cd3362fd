"""Classification: training minimises cross entropy, and accuracy is reported.

Rule: loss = −log softmax(outputs)[class], accuracy = share of samples whose largest output is that
of their class. Samples of the class `ignore_index` do not count.
Source: Bridle, "Probabilistic interpretation of feedforward classification network outputs", 1990.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ashl.errors import UsageError
from ashl.option import option
from ashl.task.contract import ACCURACY, Task, refuse_negative


@option
class Classification(Task):
    """One of several classes."""

    metric: ClassVar[str] = ACCURACY
    ignore_index: int

    def output_shape(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        if targets.is_floating_point():
            raise UsageError(
                "task=classification: this data set's targets are values, not classes; take"
                " task=regression"
            )
        if targets.ndim > 1:
            raise UsageError(
                "task=classification needs one class a sample, and this data set has several; take"
                " task=language_model"
            )
        return len(targets), num_classes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, ignore_index=self.ignore_index)

    def counts(self, targets: Tensor) -> Tensor | None:
        refuse_negative(targets, self.ignore_index)
        return super().counts(targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [1 if correct, 1 if it counts] for each sample."""
        counted = targets != self.ignore_index
        return torch.stack([(outputs.argmax(dim=1) == targets) & counted, counted], dim=1)

    def value(self, means: Tensor) -> float:
        return (means[0] / means[1]).item()

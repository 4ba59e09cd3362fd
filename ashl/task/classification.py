"""Classification: cross entropy is learned, accuracy is reported.

Rule: loss = −log softmax(outputs)[class], accuracy = share of samples whose largest output is that of their class.
Source: Bridle, "Probabilistic interpretation of feedforward classification network outputs", 1990.
"""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from ashl.errors import UsageError
from ashl.option import option
from ashl.task.contract import ACCURACY, Task


@option
class Classification(Task):
    """One of several classes."""

    metric: ClassVar[str] = ACCURACY

    def expected(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        if targets.is_floating_point():
            raise UsageError(
                "task=classification: this data set's targets are values, not classes; take task=regression"
            )
        if targets.ndim > 1:
            raise UsageError(
                "task=classification needs one class a sample, and this data set has several; take task=language_model"
            )
        return len(targets), num_classes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(dim=1) == targets

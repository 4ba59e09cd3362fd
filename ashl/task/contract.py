"""What a task is: the loss that is learned, and the metric that is reported on the test set."""

from typing import ClassVar

from torch import Tensor

from ashl.option import Contract

ACCURACY = "accuracy"  # the metric that `stop.target_accuracy` and stages that end by accuracy ask for


class Task(Contract, group="task", strict=True):
    """The loss of a batch, and a metric that is a function of means over the test set's samples.

    `metric` is the metric's name in records and tables, and "" where the loss alone is reported.
    """

    metric: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True

    def expected(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        """The shape that outputs for these targets have; None = whatever the loss takes. Raises UsageError for targets
        that cannot be learned like this."""
        return None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over a batch, a scalar []."""
        raise NotImplementedError

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the metric is made of, for each sample: [b] or [b, k]."""
        raise NotImplementedError

    def value(self, means: Tensor) -> float:
        """The metric, of the means of the scores over all samples, float64 [k]."""
        return means[0].item()

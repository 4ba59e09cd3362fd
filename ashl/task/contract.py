"""What a task is: the loss that is learned, and the metric that is reported on the test set."""

import re
from typing import ClassVar

from torch import Tensor

from ashl.errors import UsageError
from ashl.option import Contract

TAKEN = ("loss", "acc", "accuracy")  # in lower case: figures that every run has under test/
LONGEST = 100  # characters of a metric's name
ACCURACY = (  # the metric that `stop.target_accuracy` and stages that end by accuracy ask for
    "accuracy"
)


class Task(Contract, group="task", strict=True):
    """The loss of a batch, and a metric that is a function of means over the test set's samples.

    `metric` is the metric's name in records and tables, and "" where the loss alone is reported.
    """

    metric: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True
    ignore_index: ClassVar[
        int
    ] = -100  # whole-number targets of this value do not count, as in torch's cross_entropy

    def expected(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        """The shape that outputs for these targets have; None = whatever the loss takes. Raises
        UsageError for targets that cannot be learned like this.
        """
        return None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over a batch, a scalar []."""
        raise NotImplementedError

    def counts(self, targets: Tensor) -> Tensor | None:
        """How many targets of each sample count, [n]; None where all do. Batches are weighed by it
        in the loss of an evaluation and between workers. Raises UsageError for targets that cannot
        be learned.
        """
        if targets.is_floating_point():
            return None
        kept = targets != self.ignore_index
        return None if bool(kept.all()) else kept.reshape(len(targets), -1).sum(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the metric is made of, for each sample: [b] or [b, k]."""
        raise NotImplementedError

    def value(self, means: Tensor) -> float:
        """The metric, of the means of the scores over all samples, float64 [k]."""
        return means[0].item()


def recorded_name(metric: str) -> str:
    """Return the name of a metric in records and tables.

    Signs that MLflow refuses become underscores, and a name of a figure that every run has gets an
    ending.
    """
    if metric in ("", ACCURACY):
        return metric
    name = re.sub(r"[^A-Za-z0-9_. :-]", "_", metric).strip(". ")[:LONGEST] or "metric"
    return f"{name}_metric" if name.lower() in TAKEN else name


def renamed(metric: str) -> tuple[str, ...]:
    """Return a note where a metric is recorded by another name than its own."""
    name = recorded_name(metric)
    return (
        ()
        if name == metric
        else (f"the metric {metric!r} is recorded as {name!r}, as test/{name}",)
    )


def refuse_negative(targets: Tensor, ignore_index: int) -> None:
    """Raises UsageError for a class below 0 that is not the one to be ignored."""
    if targets.is_floating_point():
        return
    wrong = targets[(targets < 0) & (targets != ignore_index)]
    if len(wrong):
        raise UsageError(
            f"dataset: a class is {int(wrong.min())}; number classes from 0 on, or mark what does"
            f" not count with {ignore_index} (task.ignore_index)"
        )

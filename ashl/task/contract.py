"""Define a task: the loss for training, and the metric that is reported on the test set."""

import re
from typing import ClassVar

from torch import Tensor

from ashl.errors import UsageError
from ashl.option import Contract

# Names that a metric of a task must not have, in lower case. Every run records values with some of
# them under test/; the others are titles of columns and facts in tables and in the outcome.
TAKEN_NAMES = {
    *("loss", "acc", "accuracy", "best", "consensus distance"),
    *("setting", "where", "between", "reached", "seeds", "against", "pace lost"),
    *("time", "steps", "dropped", "target", "waiting", "straggler", "failed", "goodput", "hidden"),
    *("pace", "traffic", "messages", "measures", "mb up", "mb down", "eta"),
}
MAX_NAME = 100  # most characters of a metric's name
# The metric of `stop.target_accuracy` and of stages that end by accuracy.
ACCURACY = "accuracy"


class Task(Contract, group="task", strict=True):
    """The loss of a batch, and a metric that is a function of means over the test set's samples.

    `metric` is the metric's name in records and tables; "" if only the loss is reported.
    """

    metric: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True
    # Integer targets of this value do not count, as in torch's cross_entropy.
    ignore_index: ClassVar[int] = -100

    def output_shape(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        """Return the shape of the outputs for these targets; None if the loss accepts any.

        Raises: UsageError for targets that this task cannot learn.
        """
        return None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over a batch, a scalar []."""
        raise NotImplementedError

    def counts(self, targets: Tensor) -> Tensor | None:
        """Return how many targets of each sample count, [n]; None if all do.

        Batches are weighted by it in the loss of an evaluation and between workers.

        Raises: UsageError for targets that cannot be learned.
        """
        if targets.is_floating_point():
            return None
        kept = targets != self.ignore_index
        return None if bool(kept.all()) else kept.reshape(len(targets), -1).sum(1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the terms of the metric for each sample: [b] or [b, k]."""
        raise NotImplementedError

    def value(self, means: Tensor) -> float:
        """Return the metric, given the means of the scores over all samples, float64 [k]."""
        return means[0].item()


def recorded_name(metric: str) -> str:
    """Return the name of a metric in records and tables.

    Characters that MLflow refuses become underscores. A name that every run already records gets a
    suffix.
    """
    if metric in ("", ACCURACY):
        return metric
    name = re.sub(r"[^A-Za-z0-9_. :-]", "_", metric).strip(". ")[:MAX_NAME] or "metric"
    return f"{name}_metric" if name.lower() in TAKEN_NAMES else name


def renaming_note(metric: str) -> tuple[str, ...]:
    """Return a note if a metric is recorded under another name."""
    name = recorded_name(metric)
    return (
        ()
        if name == metric
        else (f"the metric {metric!r} is recorded as {name!r}, as test/{name}",)
    )


def refuse_negative(targets: Tensor, ignore_index: int) -> None:
    """Raise UsageError for a class below 0 other than `ignore_index`."""
    if targets.is_floating_point():
        return
    wrong = targets[(targets < 0) & (targets != ignore_index)]
    if len(wrong):
        raise UsageError(
            f"dataset: a class is {int(wrong.min())}; number classes from 0 on, or mark what does"
            f" not count with {ignore_index} (task.ignore_index)"
        )

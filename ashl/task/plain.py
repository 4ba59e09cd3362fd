"""Use a loss of plain torch: a function of outputs and targets, or a `torch.nn.Module` class.

Source: none, this is the user's own loss.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ashl.config.catalog import catalog, target, values
from ashl.config.construct import Maker, construct
from ashl.errors import UsageError
from ashl.option import option
from ashl.task.contract import Task


@option
class PlainTask(Task):
    """The loss of a function or a module, made with `keys`; everything else is that of the task
    `judged`.
    """

    make: Maker
    keys: dict[str, Any]
    judged: Task

    @property
    def metric(self) -> str:
        return self.judged.metric

    @property
    def higher_is_better(self) -> bool:
        return self.judged.higher_is_better

    @property
    def ignore_index(self) -> int:
        return self.judged.ignore_index

    def output_shape(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        return self.judged.output_shape(targets, num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.make, type):
            return self._module.to(outputs.device)(outputs, targets)
        return self.make(outputs, targets, **self.keys)

    def counts(self, targets: Tensor) -> Tensor | None:
        return self.judged.counts(targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.judged.scores(outputs, targets)

    def value(self, means: Tensor) -> float:
        return self.judged.value(means)

    @cached_property
    def _module(self) -> nn.Module:
        return self.make(**self.keys)


def plain_task(part: Maker, keys: Mapping[str, Any]) -> PlainTask | None:
    """Return the task of a loss; None for a class that is no module. Raises UsageError."""
    if isinstance(part, type) and not issubclass(part, nn.Module):
        return None
    own = {key: value for key, value in keys.items() if key != "judged"}
    return PlainTask(
        make=part, keys=own, judged=construct(spec_of_judge(keys.get("judged"), part), "task")
    )


def spec_of_judge(judged: object, part: Maker) -> dict[str, Any]:
    """Return the spec of the task that judges a loss.

    `judged` is the name of a shipped task, or a `_target_` with keys. A missing key has the default
    of the task's file.

    Raises: UsageError if `judged` is neither.
    """
    tasks = catalog()["task"]
    if isinstance(judged, str) and judged in tasks:
        return values(tasks[judged])
    if isinstance(judged, Mapping):
        files = [file for file in tasks.values() if target(file) == judged.get("_target_")]
        return {**(values(files[0]) if files else {}), **judged}
    raise UsageError(
        f"task names '{part.__module__}.{part.__name__}', a loss; its file says by which task it is"
        f" judged, as judged: classification; there are {', '.join(tasks)}"
    )

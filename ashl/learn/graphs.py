"""CUDA graphs of a step: the kernels of forward and backward, captured once for a shape of batch
and launched as one from then on, which saves what launching each costs where models are small.

Rule: a batch whose shape comes for the tenth time is captured, of eight shapes at most; all others,
as the last of an epoch, are computed as without graphs. To capture, a copy of the batch is gone
through three times on a side stream, so that libraries have chosen their kernels and taken their
memory, and once more while launches are written down. From then on a batch is copied to where that
one lies, the graph is launched, and loss and gradient are copied out. The parameters are those of
the resident module, whose place does not change (`ashl.learn.replica`); the optimizer's step stays
outside, since moments and models are each worker's own and would have to be copied in and out.

Not for models that draw random numbers: these are drawn anew from a seed for each step, which a
graph does not see.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.errors import UsageError

OFTEN = 10  # times that a shape has come when it is captured
SHAPES = 8
WARM_UP = 3
CUDA: Any = torch.cuda  # where streams and graphs are made

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # inputs, targets -> loss, gradient


class Captured(NamedTuple):
    """A graph, and where it reads and writes."""

    graph: Any
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    gradient: Tensor


class Graphs:
    """Those of one module."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen = Counter[tuple[object, ...]]()
        self._captured: dict[tuple[object, ...], Captured] = {}

    def run(self, step: Step, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """step(inputs, targets), in new tensors. Raises UsageError where it cannot be captured."""
        shape = (inputs.shape, inputs.dtype, targets.shape, targets.dtype)
        captured = self._captured.get(shape)
        if captured is None:
            self._seen[shape] += 1
            if self._seen[shape] < OFTEN or len(self._captured) == SHAPES:
                return step(inputs, targets)
            captured = self._captured[shape] = self._capture(step, inputs.clone(), targets.clone())
        captured.inputs.copy_(inputs)
        captured.targets.copy_(targets)
        captured.graph.replay()
        return captured.loss.clone(), captured.gradient.clone()

    def _capture(self, step: Step, inputs: Tensor, targets: Tensor) -> Captured:
        side, here = CUDA.Stream(self._device), CUDA.current_stream(self._device)
        side.wait_stream(here)
        with CUDA.stream(side):
            for _ in range(WARM_UP):
                step(inputs, targets)
        here.wait_stream(side)
        graph = CUDA.CUDAGraph()
        try:
            with CUDA.graph(
                graph, capture_error_mode="thread_local"
            ):  # other threads may copy meanwhile
                loss, gradient = step(inputs, targets)
        except RuntimeError as error:
            raise UsageError(
                "runtime.graphs=on: a step of this model cannot be captured"
                f" ({str(error).splitlines()[0]}); take runtime.graphs=off"
            ) from error
        return Captured(graph, inputs, targets, loss, gradient)

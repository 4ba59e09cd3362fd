"""Capture a step as a CUDA graph: all kernels of forward and backward, launched at once.

This saves the cost of each launch, which matters for small models.

Rule: a batch shape that occurs for the tenth time is captured, at most eight shapes. All others,
for example the last batch of an epoch, are computed without graphs. Before the capture, a copy of
the batch runs three times on a side stream, so that libraries have chosen their kernels and taken
their memory. Then one more run is captured. After that, a batch is copied to the memory of the
captured one, the graph is launched, and loss and gradient are copied out. The parameters are those
of the resident module, which stay in one place (`ashl.learn.replica`). The optimizer's step is not
captured: moments and models belong to each worker and would have to be copied in and out.

Limits: not for models that draw random numbers, because each step seeds them again, which a graph
does not see.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.errors import UsageError

OFTEN = 10  # occurrences of a shape until it is captured
SHAPES = 8
WARM_UP = 3
CUDA: Any = torch.cuda  # creates streams and graphs

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # inputs, targets -> loss, gradient


class Captured(NamedTuple):
    """A graph, and the tensors that it reads and writes."""

    graph: Any
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    gradient: Tensor


class Graphs:
    """The captured steps of one module."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen = Counter[tuple[object, ...]]()
        self._captured: dict[tuple[object, ...], Captured] = {}

    def run(self, step: Step, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return step(inputs, targets) in new tensors. Raises UsageError if it cannot be
        captured.
        """
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
            # Other threads may copy during the capture.
            with CUDA.graph(graph, capture_error_mode="thread_local"):
                loss, gradient = step(inputs, targets)
        except RuntimeError as error:
            raise UsageError(
                "runtime.graphs=on: a step of this model cannot be captured"
                f" ({str(error).splitlines()[0]}); take runtime.graphs=off"
            ) from error
        return Captured(graph, inputs, targets, loss, gradient)

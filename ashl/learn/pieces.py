"""Bring a vector of parameters piece by piece, during the forward pass that needs it.

Rule: before a function of torch receives a parameter, the piece with that parameter must have
arrived. So it does not matter which module owns a parameter, or how many use it. Some code hides
its parameters from torch's functions (a compiled module). It runs again with all pieces in place,
and from then on its parameters arrive before it starts.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn
from torch.overrides import TorchFunctionMode


class Pieces(NamedTuple):
    """The pieces of a vector: take(k) waits for the elements [start, stop) = slices[k] and returns
    them.

    Pieces consist of whole tensors.
    """

    slices: Sequence[tuple[int, int]]
    take: Callable[[int], Any]


class Arriving(TorchFunctionMode):
    """A mode in which each parameter is brought at its first use."""

    def __init__(self, pieces: Pieces, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        bounds = [0, *accumulate(p.numel() for p in parameters)]
        self._take = pieces.take
        self._held = [
            parameters[bounds.index(start) : bounds.index(stop)] for start, stop in pieces.slices
        ]
        self._piece = {id(p): k for k, held in enumerate(self._held) for p in held}
        self._here: set[int] = set()
        self.unseen = set(self._piece)  # ids of parameters that no function has received

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        self._await_parameters(args)
        if kwargs:
            self._await_parameters(kwargs.values())
        return func(*args, **(kwargs or {}))

    def await_all(self, parameters: Iterable[int]) -> None:
        """Bring the pieces with these parameters."""
        for k in sorted({self._piece[parameter] for parameter in parameters} - self._here):
            self._here.add(k)
            values = self._take(k)
            for parameter, own in zip(
                self._held[k], values.split([p.numel() for p in self._held[k]]), strict=True
            ):
                parameter.data.copy_(own.view_as(parameter))

    def _await_parameters(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                if id(value) in self.unseen:
                    self.unseen.remove(id(value))
                    self.await_all([id(value)])
            elif isinstance(value, list | tuple):
                self._await_parameters(value)

"""A vector of parameters that comes piece by piece, while the forward pass that needs it goes on.

Rule: before a function of torch is handed a parameter, the piece that holds the parameter has to be
there. So it does not matter which module owns a parameter, or how many use it. Code that torch's
functions do not show the parameters of (a compiled module) is run again with everything in place,
and from then on those parameters are there before it starts.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Pieces(NamedTuple):
    """The elements [start, stop) = slices[k] are take(k), which waits for them. Pieces are of whole
    tensors.
    """

    slices: Sequence[tuple[int, int]]
    take: Callable[[int], Any]


class Arriving(TorchFunctionMode):
    """Inside, each parameter is brought when it is first used."""

    def __init__(
        self,
        pieces: Pieces,
        parameters: Sequence[nn.Parameter],
        bring: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        """`bring` gives a parameter its values."""
        super().__init__()
        bounds = [0, *accumulate(p.numel() for p in parameters)]
        self._take, self._bring = pieces.take, bring
        self._held = [
            parameters[bounds.index(start) : bounds.index(stop)] for start, stop in pieces.slices
        ]
        self._piece = {id(p): k for k, held in enumerate(self._held) for p in held}
        self._here: set[int] = set()
        self.unseen = set(self._piece)  # ids of parameters that no function was handed

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        self._meet(args)
        if kwargs:
            self._meet(kwargs.values())
        return func(*args, **(kwargs or {}))

    def await_all(self, parameters: Iterable[int]) -> None:
        """Bring the pieces that hold these."""
        for k in sorted({self._piece[parameter] for parameter in parameters} - self._here):
            self._here.add(k)
            values = self._take(k)
            for parameter, own in zip(
                self._held[k], values.split([p.numel() for p in self._held[k]]), strict=True
            ):
                self._bring(parameter, own.view_as(parameter))

    def _meet(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                if id(value) in self.unseen:
                    self.unseen.remove(id(value))
                    self.await_all([id(value)])
            elif isinstance(value, list | tuple):
                self._meet(value)

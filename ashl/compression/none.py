"""No compression: the dense float32 vector, 32 bits per element. Source: the baseline of every compression paper."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ashl.compression.contract import TURN, BodyError, Flags, Turn
from ashl.option import option
from ashl.size_only import SizeOnly


@option
class Dense:
    """What goes in comes out."""

    flags: ClassVar[Flags] = Flags(unbiased=True, contraction=True, linear=True, lossless=True)

    def encode(self, sender: Any, x: Any, turn: Turn = TURN) -> tuple[Any, Any]:
        return sender, x

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]:
        if body.nbytes != 4 * d or not (isinstance(body, SizeOnly) or body.dtype == torch.float32):
            raise BodyError(f"a body of {body.nbytes} bytes came where a dense one of {d} float32 was expected")
        return receiver, body

    def undo(self, sender: Any, body: Any) -> Any:
        return sender

    def payload(self, ratio: float | None, d: int) -> int:
        return 4 * d

    def bound(self, ratio: float | None, d: int) -> float:
        return 0.0

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None:
        _, x = self.decode(None, body, out.numel())
        out.add_(x, alpha=scale)

"""No compression: the dense float32 vector, 32 bits per element. Source: the baseline of every compression paper."""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression.contract import TURN, BodyError, Codec, Flags, State, Turn
from ashl.option import option


@option
class Dense(Codec):
    """What goes in comes out."""

    flags: ClassVar[Flags] = Flags(unbiased=True, contraction=True, linear=True, lossless=True)
    on_host: ClassVar[bool] = False

    def encode(self, sender: State, x: Tensor, turn: Turn = TURN) -> tuple[State, Tensor]:
        return sender, x

    def decode(self, receiver: State, body: Tensor, d: int) -> tuple[State, Tensor]:
        if body.nbytes != 4 * d or body.dtype != torch.float32:
            raise BodyError(f"a body of {body.nbytes} bytes came where a dense one of {d} float32 was expected")
        return receiver, body

    def payload(self, ratio: float | None, d: int) -> int:
        return 4 * d

    def bound(self, ratio: float | None, d: int) -> float:
        return 0.0

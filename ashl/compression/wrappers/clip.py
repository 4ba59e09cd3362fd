"""Local gradient clipping: each worker shortens its own update before the other wrappers see it.

Rule: x ← x · min(1, θ·n^(−1/2) / ‖x‖) with n workers, which bounds the norm of their sum by about
θ. If x already contains the worker's weight, as in an all-reduce, the bound contains it, too.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, EncodeContext, State
from ashl.compression.wrappers.wrapper import Wrapper
from ashl.learn.device import numbers


@dataclass(frozen=True)
class Clipped(Wrapper):
    """Wrapper that shortens the input of a codec."""

    norm: float

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        length = numbers([torch.linalg.vector_norm(x, dtype=torch.float64)])[0]
        bound = abs(context.weight) * self.norm / context.workers**0.5
        return self.codec.encode(sender, x if length <= bound else x * (bound / length), context)

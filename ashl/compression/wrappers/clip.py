"""Local gradient clipping: every worker shortens its own update before anything is added to it.

Rule: x ← x · min(1, θ·n^(−1/2) / ‖x‖) with n workers, so that the norm of their sum is about
bounded by θ. Where x has been multiplied with the worker's weight already, as for a sum on its way,
so is the bound.

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
    """Shortens what goes into a codec."""

    norm: float

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        length = numbers([torch.linalg.vector_norm(x, dtype=torch.float64)])[0]
        bound = abs(context.weight) * self.norm / context.workers**0.5
        return self.codec.encode(sender, x if length <= bound else x * (bound / length), context)

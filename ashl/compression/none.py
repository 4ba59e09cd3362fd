"""No compression: send the dense float32 vector, 32 bits per element.

Use when: links are fast: an exchange takes less than 0.3 steps.
Avoid when: an exchange takes longer than a step.
Alternatives: `cast`, `topk`, `power_sgd`.

Source: the baseline of every compression paper.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Codec, EncodeContext, State, Traits
from ashl.compression.payload import PayloadError
from ashl.option import option


@option
class Dense(Codec):
    """Sends the vector unchanged."""

    traits: ClassVar[Traits] = Traits(unbiased=True, contraction=True, linear=True, lossless=True)
    on_host: ClassVar[bool] = False

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        return sender, x

    def content(self, payload: Tensor, d: int) -> Tensor:
        if payload.nbytes != 4 * d or payload.dtype != torch.float32:
            raise PayloadError(
                f"expected a dense payload of {d} float32 elements; received {payload.nbytes} bytes"
                f" of {payload.dtype}"
            )
        return payload

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return 4 * d

    def bound(self, ratio: float | None, d: int) -> float:
        return 0.0

"""What codecs without state have in common: each is two functions on arrays, and the form of a
body.

    pack(x, turn)    -> Parts    x float32 [d], finite or not, never changed
    unpack(parts, d) -> x        float32 [d]; of a `Sparse` codec (places, values), of which the
                                 others are 0

Where a codec is not `on_host`, x and the parts may be tensors on a device instead: it takes kernels
and operators that arrays and tensors both have, and what it says of x is the same to the bit.
`parts` come from anywhere: `unpack` checks each length and index before it believes them, and
raises BodyError. What is not finite in x must show in what is decoded, as NaN or infinity
somewhere, except where `traits.scale_free`.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Codec, EncodeContext, State
from ashl.compression.wire.arrays import Array, array_of, tensor_of, zeros
from ashl.compression.wire.payload_format import Parts, read_payload, write_payload


class Code(Codec, contract=True):
    """A codec without state."""

    code: ClassVar[int]  # its number on the wire, one for each codec

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        raise NotImplementedError

    def unpack(self, parts: Parts, d: int) -> Any:
        raise NotImplementedError

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # of a run that diverges
            parts = self.pack(array_of(x), context)
        return sender, write_payload(self.code, x.numel(), parts)

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        parts = read_payload(payload, self.code, d)
        with np.errstate(over="ignore", invalid="ignore"):
            return receiver, tensor_of(self.unpack(parts, d))


class Sparse(Code):
    """A codec without state that sends some elements and their places."""

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        parts = read_payload(payload, self.code, d)
        with np.errstate(over="ignore", invalid="ignore"):
            places, values = self.unpack(parts, d)
        x = zeros(values, d)
        x[places] = values
        return receiver, tensor_of(x)

    def add(self, out: Tensor, payload: Tensor, scale: float = 1.0) -> None:
        parts = read_payload(payload, self.code, out.numel())
        if out.dtype != torch.float32:
            super().add(out, payload, scale)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            places, values = self.unpack(parts, out.numel())
            array_of(out)[places] += values * float(scale)


def kept_count(share: float, d: int) -> int:
    """k of a density: at least one element. Raises ValueError where it is no share."""
    if not 0 < share <= 1:
        raise ValueError(
            f"a compression ratio of {share}: it is the density, above 0 and at most 1"
        )
    return max(1, round(share * d))

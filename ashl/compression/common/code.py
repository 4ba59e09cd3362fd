"""Base classes of stateless codecs: each is two functions on arrays and a payload format.

    pack(x, context) -> Parts    x float32 [d], finite or not, never changed
    unpack(parts, d) -> x        float32 [d]; a `Sparse` codec returns (indices, values) instead,
                                 all other elements being 0

If a codec is not `on_host`, x and the parts may be tensors on a device. It then uses the kernels
and operators that arrays and tensors share, and produces the same bits for both. `parts` are not
trusted: `unpack` checks each length and index before it uses them, and raises PayloadError. If x is
not finite, the decoded vector contains a NaN or an infinity, except with `traits.scale_free`.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import ENCODE_CONTEXT, Codec, EncodeContext, State
from ashl.compression.wire.arrays import Array, array_of, tensor_of, zeros
from ashl.compression.wire.payload_format import Parts, read_payload, write_payload


class Code(Codec, contract=True):
    """Codec without state."""

    code: ClassVar[int]  # number of the codec in the header, unique among codecs

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        """Encode a vector x, float32 [d]."""
        raise NotImplementedError

    def unpack(self, parts: Parts, d: int) -> Any:
        """Decode the parts of a payload of d elements.   Raises: PayloadError if they are
        malformed.
        """
        raise NotImplementedError

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        # A run that diverges encodes infinities and NaNs.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            parts = self.pack(array_of(x), context)
        return sender, write_payload(self.code, x.numel(), parts)

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        parts = read_payload(payload, self.code, d)
        with np.errstate(over="ignore", invalid="ignore"):
            return receiver, tensor_of(self.unpack(parts, d))


class Sparse(Code):
    """Stateless codec that sends some elements and their indices."""

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
    """Return k = max(1, round(density · d)).

    Raises: ValueError if the density is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"compression.ratio={share}: the density must be above 0 and at most 1")
    return max(1, round(share * d))

"""Natural compression: round each element at random to a neighbouring power of two, unbiased.

Use when: an unbiased codec with 9 bits per element and cheap decoding is wanted.
Avoid when: links are very slow: 9 bits are many.
Alternatives: `qsgd`; `cast`.

Rule: for 2^a ≤ |x_j| < 2^(a+1), C(x)_j = sign(x_j)·2^(a+1) with probability |x_j|/2^a − 1, else
sign(x_j)·2^a. E C(x) = x, E‖C(x) − x‖² ≤ ‖x‖²/8. No multiplication is needed: 23 random bits are
added to the bits of a float32, and its mantissa is dropped.
Bits: 9·d, for sign and exponent.

Limits: a subnormal element becomes 0 or 2⁻¹²⁶, unbiased but without the bound. Beyond 2¹²⁷ there is
no power of two to round up to, so larger elements become 2¹²⁷. NaN becomes infinity.

Source: Horváth et al., "Natural Compression for Distributed Deep Learning", 2019.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression.coding import OMEGA
from ashl.compression.contract import EncodeContext, Traits, Wrappable
from ashl.compression.kernels import natural_bytes, read_natural, write_natural
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.option import option


@option
class NaturalCompression(Wrappable):
    """Sends signs and exponents."""

    code: ClassVar[int] = 17
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(unbiased=True, contraction=True)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        return Parts(len(x), write_natural(x, context.words()))

    def unpack(self, parts: Parts, d: int) -> Tensor:
        size = natural_bytes(d)
        return read_natural(
            typed_part(all_values(parts, d), torch.uint8, size, "signs and exponents"), d
        )

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + natural_bytes(d)

    def bound(self, ratio: float | None, d: int) -> float:
        return OMEGA

"""Symmetric grid: round each element at random to a neighbouring multiple of one step, unbiased.

Rule: L = 2^(b−1) − 1, Δ = ‖x‖_∞ / L; q_j = ⌊x_j/Δ + u_j⌋ in −L … L with u_j uniform in [0, 1);
C(x)_j = Δ·q_j. E C(x) = x and E‖C(x) − x‖² ≤ d·Δ²/4 ≤ d/(4L²)·‖x‖².
Bits: b·d + 32. A payload states its b, which may differ from message to message; a payload of
float32 is valid, too.

Limits: one large element makes the grid coarse for all. If an element is not finite, all become
NaN.

Source: Yu, Wu and Huang, "Double Quantization for Communication-Efficient Distributed
Optimization", NeurIPS 2019 (AsyLPG, with `sync=asylpg`); the bound as for stochastic rounding,
Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017.
"""

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, divide
from ashl.compression.wire.bits import BLOCK, pack, packed_bytes, unpack, unpack_bytes
from ashl.compression.wire.levels import TOGETHER, reach_of
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.stochastic_rounding import round_to_int32, rounding_noise
from ashl.option import Number, option

MOST = 16  # largest b
WHOLE = 0  # form of a payload of float32; the form of all others is b


@option
class Grid(Code):
    """Rounds to a grid of 2^b − 1 points."""

    code: ClassVar[int] = 102
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(unbiased=True)
    bits: Annotated[int, Number, Field(ge=2, le=MOST)]

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        return quantize_to_grid(x, self.bits, context)

    def unpack(self, parts: Parts, d: int) -> Array:
        return read_grid(parts, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + packed_bytes(d, self.bits)

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (4 * largest_level(self.bits) ** 2) + 1e-9


def largest_level(bits: int) -> int:
    """Return L, the number of steps from zero to the end of the grid."""
    return 2 ** (bits - 1) - 1


def quantize_to_grid(x: Array, bits: int, context: EncodeContext) -> Parts:
    """Return x on the grid of `bits` bits."""
    steps, top = largest_level(bits), reach_of(x)
    noise = rounding_noise(x, context.words(), steps)
    end = steps * noise.unit
    scales = np.array([top if np.isfinite(top) else np.nan], "<f4")
    if isinstance(x, Tensor):
        lowest = x.new_zeros(len(x), dtype=torch.int32)
        if scales[0] > 0:
            levels = round_to_int32(divide(x, float(top)) * end, noise, 0, steps)
        else:
            levels = lowest
        return Parts(len(x), pack(levels, bits), scales=scales, form=bits)
    stream, step = np.zeros(packed_bytes(x.size, bits), np.uint8), TOGETHER * BLOCK
    for start in range(0, x.size if scales[0] > 0 else 0, step):
        y = x[start : start + step] / top
        y *= np.float32(end)
        piece = pack(round_to_int32(y, noise, start, steps), bits)
        stream[start * bits // 8 :][: piece.size] = piece
    return Parts(x.size, stream, scales=scales, form=bits)


def read_grid(parts: Parts, d: int) -> Array:
    """Decode a payload of the grid.   Raises: PayloadError if it is malformed."""
    bits, count = parts.form, parts.count
    if count != d or len(parts.indices) or not (bits == WHOLE or 2 <= bits <= MOST):
        raise PayloadError(
            f"expected a grid of {d} elements; received form {bits} with {count} values"
        )
    if bits == WHOLE:
        typed_part(parts.scales, "<f4", 0, "scales")
        values = typed_part(parts.values, "<f4", d, "values")
        return values.clone() if isinstance(values, Tensor) else values.copy()
    if len(parts.values) != packed_bytes(d, bits):
        raise PayloadError(
            f"received {len(parts.values)} bytes, which do not hold {d} numbers of {bits} bits"
        )
    top, steps = typed_part(parts.scales, "<f4", 1, "scales"), np.float32(largest_level(bits))
    numbers = (unpack_bytes if bits <= 8 else unpack)(parts.values, bits, d)
    if isinstance(numbers, Tensor):
        return divide(numbers.to(torch.float32) - largest_level(bits), largest_level(bits)) * top
    x = numbers.astype(np.float32)
    x -= steps
    x /= steps
    x *= top
    return x

"""Symmetric grid: round each element at random to a neighbouring multiple of one step, unbiased.

Use when: an unbiased quantizer with one step for the whole vector is wanted.
Avoid when: links are slow: by default it sends 8 bits per element.
Alternatives: `qsgd`, with a step for each bucket of elements; `uniform`.

Rule: L = 2^(b−1) − 1, Δ = ‖x‖_∞ / L; q_j = ⌊x_j/Δ + u_j⌋ in −L … L with u_j uniform in [0, 1);
C(x)_j = Δ·q_j. E C(x) = x and E‖C(x) − x‖² ≤ d·Δ²/4 ≤ d/(4L²)·‖x‖².
Bits: b·d + 32. A payload states its b, which may differ from message to message. A payload may also
hold x as float32.

Limits: one large element makes the grid coarse for all. If an element is not finite, all become
NaN.

Source: Yu, Wu and Huang, "Double Quantization for Communication-Efficient Distributed
Optimization", NeurIPS 2019 (AsyLPG, with `sync=asylpg`); the bound as for stochastic rounding,
Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017.
"""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import read_levels, write_levels
from ashl.compression.contract import Codec, EncodeContext, Traits
from ashl.compression.kernels import (
    Array,
    as_native,
    divide,
    largest_magnitude,
    packed_bytes,
    round_levels,
    rounding_noise,
)
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part
from ashl.option import Number, option

MAX_BITS = 16
FLOAT32 = 0  # form of a payload of float32; the form of all others is b


@option
class Grid(Codec):
    """Rounds to a grid of 2^b − 1 points."""

    code: ClassVar[int] = 102
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(unbiased=True)
    bits: Annotated[int, Number, Field(ge=2, le=MAX_BITS)]

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        steps, top = largest_level(self.bits), largest_magnitude(x)
        scales = torch.tensor([top if math.isfinite(top) else math.nan])
        if not 0 < top < math.inf:
            stream = x.new_zeros(packed_bytes(len(x), self.bits), dtype=torch.uint8)
            return Parts(len(x), stream, scales=scales, form=self.bits)
        noise = rounding_noise(x, context.words(), steps)

        def to_levels(where: slice, rows: Array) -> Array:
            y = divide(rows, top)
            y *= steps * noise.unit
            return round_levels(y, noise, where.start, steps)

        stream = write_levels(x, 1, len(x), 2 * steps, "none", to_levels)
        return Parts(len(x), stream, scales=scales, form=self.bits)

    def unpack(self, parts: Parts, d: int) -> Tensor:
        bits, count = parts.form, parts.count
        if count != d or len(parts.indices) or not (bits == FLOAT32 or 2 <= bits <= MAX_BITS):
            raise PayloadError(
                f"expected a grid of {d} elements; received form {bits} with {count} values"
            )
        if bits == FLOAT32:
            typed_part(parts.scales, torch.float32, 0, "scales")
            return typed_part(parts.values, torch.float32, d, "values").clone()
        top, steps = typed_part(parts.scales, torch.float32, 1, "scales"), largest_level(bits)

        def to_values(_: slice, rows: Array) -> None:
            rows -= steps
            rows[:] = divide(rows, steps)
            rows *= as_native(top)

        return read_levels(parts.values, 1, d, 2 * steps, "none", to_values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + packed_bytes(d, self.bits)

    def bound(self, ratio: float | None, d: int) -> float:
        return d / (4 * largest_level(self.bits) ** 2) + 1e-9


def largest_level(bits: int) -> int:
    """Return L, the number of steps from zero to the end of the grid."""
    return 2 ** (bits - 1) - 1

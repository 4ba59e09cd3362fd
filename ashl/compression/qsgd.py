"""QSGD: round each element at random to one of s levels of either sign, unbiased, in buckets.

Rule: m is the ℓ2 norm or the largest magnitude of each `bucket` of b elements. q_j = ⌊s·x_j/m +
u_j⌋ with u_j uniform in [0, 1); C(x)_j = m·q_j/s. E C(x) = x, and E‖C(x) − x‖² ≤ ω‖x‖² with ω =
min(b/s², √b/s) for the ℓ2 norm and min(b/4s², (1 + √b)/2s) for the largest magnitude.
Bits: d·⌈log2(2s + 1)⌉, and 32 per bucket. For a small s with the ℓ2 norm, most levels are 0, and
entropy coding is shorter still.

Limits: ω depends on the bucket, not on the model. The codec is a contraction, and may have error
feedback, only if ω < 1; with a large ω, error feedback is unstable. If an element is not finite,
its bucket becomes NaN.

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, divide, zeros
from ashl.compression.wire.entropy_code import EntropyCode
from ashl.compression.wire.levels import (
    all_levels,
    block_rows,
    level_bytes,
    pack_levels,
    rows_of,
    scale_levels,
    unpack_levels,
)
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wire.stochastic_rounding import round_to_uint8, rounding_noise
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Count, Number, option

LARGEST = np.finfo(np.float32).max


@option
class QSGD(Code, Wrappers):
    """Levels of a bucket's norm."""

    code: ClassVar[int] = 15
    on_host: ClassVar[bool] = False
    levels: Annotated[int, Number, Field(ge=1, le=127)]
    bucket: Count
    norm: Literal["l2", "max"]
    entropy: EntropyCode

    @property
    def traits(self) -> Traits:
        small, variable = self.bound(None, self.bucket) < 1, self.entropy != "none"
        return Traits(unbiased=True, contraction=small, variable=variable)

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        row = min(self.bucket, len(x))
        top = 2 * self.levels
        noise = rounding_noise(x, context.words(), self.levels)
        norms = zeros(x, -(-len(x) // row), 1)

        def numbers(where: slice, block: Array) -> Array:
            norms[where] = lengths(block) if self.norm == "l2" else largest(block)
            y = scale_levels(block, norms[where], self.levels * noise.unit)
            return round_to_uint8(y, noise, where.start * row, self.levels)

        stream = pack_levels(
            len(x), top, (numbers(where, block) for where, block in rows_of(x, row)), self.entropy
        )
        return Parts(len(x), stream, scales=norms)

    def unpack(self, parts: Parts, d: int) -> Array:
        row = min(self.bucket, d)
        steps = divide(typed_part(parts.scales, "<f4", -(-d // row), "norms")[:, None], self.levels)

        def to_values(where: slice, block: Array) -> None:
            block -= self.levels
            block *= steps[where]

        return unpack_levels(all_levels(parts, d), d, row, 2 * self.levels, to_values, self.entropy)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        buckets = -(-d // min(self.bucket, d))
        return HEADER.size + level_bytes(d, 2 * self.levels, self.entropy) + 4 * buckets

    def bound(self, ratio: float | None, d: int) -> float:
        b, s = min(self.bucket, d), self.levels
        if self.norm == "l2":
            return min(b / s**2, b**0.5 / s)
        return min(b / (2 * s) ** 2, (1 + b**0.5) / (2 * s))


def largest(rows: Array) -> Array:
    """Return the largest magnitude of each row [n, m], as [n, 1]."""
    if isinstance(rows, Tensor):
        return rows.abs().amax(1, keepdim=True)
    return np.abs(rows).max(1, keepdims=True)


def lengths(rows: Array) -> Array:
    """Return ‖·‖₂ of each row [n, m], float32 [n, 1]; finite rows are limited to the largest
    float32.

    On a device, the last bit may differ.
    """
    if isinstance(rows, Tensor):
        return device_kernels.lengths(rows)
    step = block_rows(rows.shape[1])
    return np.concatenate(
        [_lengths(rows[start : start + step]) for start in range(0, len(rows), step)]
    )


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Return the norms of a block of rows, in float64 if one of them needs it."""
    squares = np.einsum("ij,ij->i", rows, rows)
    if not ((squares > 2.0**-80) & (squares < 2.0**120)).all():
        wide = rows.astype(np.float64)
        squares = np.einsum("ij,ij->i", wide, wide)
        squares = np.where(np.isfinite(squares), np.minimum(squares, float(LARGEST) ** 2), squares)
    return np.sqrt(squares).astype(np.float32)[:, None]

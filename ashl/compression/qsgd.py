"""QSGD: round each element at random to one of s levels of either sign, unbiased, in buckets.

Use when: an unbiased codec of few bits is wanted, without state.
Avoid when: density below one bit per element is needed.
Alternatives: `terngrad`; `natural`; `rotated` for outliers.

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

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import EntropyCode, level_bytes, read_levels, write_levels
from ashl.compression.contract import EncodeContext, Traits, Wrappable
from ashl.compression.kernels import (
    Array,
    allocate,
    as_native,
    as_tensor,
    divide,
    round_levels,
    rounding_noise,
    row_maxima,
    row_norms,
    scale_levels,
)
from ashl.compression.payload import HEADER, Parts, all_values, typed_part
from ashl.option import Count, Number, option


@option
class QSGD(Wrappable):
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

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        d, s, row = len(x), self.levels, min(self.bucket, len(x))
        noise = rounding_noise(x, context.words(), s)
        norms = allocate(as_native(x), -(-d // row), 1)

        def to_levels(where: slice, rows: Array) -> Array:
            length = row_norms(rows) if self.norm == "l2" else row_maxima(rows)
            norms[where] = length
            y = scale_levels(rows, length, s * noise.unit)
            return round_levels(y, noise, where.start * row, s)

        stream = write_levels(x, row, d, 2 * s, self.entropy, to_levels)
        return Parts(d, stream, scales=as_tensor(norms))

    def unpack(self, parts: Parts, d: int) -> Tensor:
        row = min(self.bucket, d)
        norms = typed_part(parts.scales, torch.float32, -(-d // row), "norms")
        steps = divide(as_native(norms)[:, None], self.levels)

        def to_values(where: slice, rows: Array) -> None:
            rows -= self.levels
            rows *= steps[where]

        return read_levels(all_values(parts, d), row, d, 2 * self.levels, self.entropy, to_values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        buckets = -(-d // min(self.bucket, d))
        return HEADER.size + level_bytes(d, 2 * self.levels, self.entropy) + 4 * buckets

    def bound(self, ratio: float | None, d: int) -> float:
        b, s = min(self.bucket, d), self.levels
        if self.norm == "l2":
            return min(b / s**2, b**0.5 / s)
        return min(b / (2 * s) ** 2, (1 + b**0.5) / (2 * s))

"""Signs: one bit per element. signSGD, its majority vote, Signum, and EF-signSGD.

Rule: C(x)_j = m·sign(x_j). `scale=none` (signSGD): m = 1. `scale=mean` (EF-signSGD): m = ‖x‖₁/d, of
each layer with `per_layer`; then ‖C(x) − x‖² = ‖x‖² − ‖x‖₁²/d ≤ (1 − 1/d)‖x‖². `vote=majority`: the
update is sign(Σ c_i·sign(x_i)) over the workers i instead of the mean of the signs; a tie is 0.
`beta` (Signum): the sender replaces x by the momentum u ← β·u + (1 − β)·x.
Bits: d, and 32 for m.

Limits: sign(±0) is ±1, by the sign bit, because a bit has no third value; NaN counts by its sign
bit, too. Without a scale, all steps have the same length, independent of x, and training may
diverge: set a small, decaying learning rate. A majority vote takes d bits up, but a dense model
32·d bits down. With `topology.pull_ratio=1`, pulls are signs with a scale, d bits. Under
all-reduce, signs are gathered with (n − 1)·d bits; up to 15 workers, this is less than an
all-reduce of 8-bit integers. Set optimizer.momentum=0 with Signum, which replaces it.

Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, and
"signSGD with Majority Vote", ICLR 2019; Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Code
from ashl.compression.contract import EncodeContext, Reduces, State, Traits
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.bits import apply_signs, pack_signs, packed_bytes
from ashl.compression.wire.levels import all_levels, mean_magnitude
from ashl.compression.wire.payload_format import EMPTY, HEADER, Parts, typed_part
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Fraction, option

ONE = np.ones(1, np.float32)


@option
class Sign(Code, Reduces, Wrappers):
    """Sends signs."""

    code: ClassVar[int] = 11
    on_host: ClassVar[bool] = False
    scale: Literal["none", "mean"]
    vote: Literal["mean", "majority"]
    beta: Fraction | None
    per_layer: bool

    @property
    def traits(self) -> Traits:
        scaled, votes = self.scale == "mean", self.vote == "majority"
        return Traits(
            contraction=scaled and not votes, reduces=votes, scale_free=not scaled or votes
        )

    def for_pulls(self) -> Sign:
        """Return the codec of pulls; differences between models need a scale."""
        return replace(self, scale="mean", vote="mean")

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        return Parts(
            len(x), pack_signs(x), scales=mean_magnitude(x) if self.scale == "mean" else EMPTY
        )

    def unpack(self, parts: Parts, d: int) -> Array:
        bits = typed_part(all_levels(parts, d), "u1", packed_bytes(d, 1), "signs")
        scale = typed_part(parts.scales, "<f4", 1 if self.scale == "mean" else 0, "scales")
        return apply_signs(bits, d, scale if len(scale) else ONE)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + packed_bytes(d, 1) + (4 if self.scale == "mean" else 0)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / d if self.traits.contraction else float("inf")

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """Return the sign of the weighted sum of signs."""
        total, most = torch.zeros(d, device=str(payloads[0].device)), max(weights)
        # Relative weights: with equal weights, all are exactly 1, so a tie gives exactly 0.
        for payload, weight in zip(payloads, weights, strict=True):
            replace(self, scale="none").add(total, payload, weight / most)
        return memory, torch.sign(total)

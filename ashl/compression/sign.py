"""Signs: one bit per element. signSGD, its majority vote, Signum, and EF-signSGD.

Use when: 32 times fewer bits with the cheapest encoding is wanted.
Avoid when: the learning rate is large and constant, without a scale.
Alternatives: `one_bit`; `terngrad`; `stc`.

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

import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, Reduces, State, Traits, Wrappable
from ashl.compression.kernels import flip_signs, mean_magnitude, pack_signs, packed_bytes
from ashl.compression.payload import EMPTY, HEADER, Parts, all_values, typed_part
from ashl.option import Fraction, option

ONE = torch.ones(1)


@option
class Sign(Reduces, Wrappable):
    """Sends signs."""

    code: ClassVar[int] = 11
    on_host: ClassVar[bool] = False
    scale: Literal["none", "mean"]
    vote: Literal["mean", "majority"]
    beta: Fraction | None
    per_layer: bool

    @property
    def needs(self) -> dict[str, str]:
        needs = super().needs
        if self.vote == "majority":
            needs["no_scale"] = "vote"
        if self.per_layer:
            needs["scale"] = "per_layer"
        return needs

    @property
    def traits(self) -> Traits:
        scaled, votes = self.scale == "mean", self.vote == "majority"
        return Traits(
            contraction=scaled and not votes, reduces=votes, scale_free=not scaled or votes
        )

    def for_pulls(self) -> Sign:
        """Return the codec of pulls; differences between models need a scale."""
        return replace(self, scale="mean", vote="mean")

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        scale = mean_magnitude(x) if self.scale == "mean" else EMPTY
        return Parts(len(x), pack_signs(x), scales=scale)

    def unpack(self, parts: Parts, d: int) -> Tensor:
        signs = typed_part(all_values(parts, d), torch.uint8, packed_bytes(d, 1), "signs")
        scales = 1 if self.scale == "mean" else 0
        scale = typed_part(parts.scales, torch.float32, scales, "scales")
        return flip_signs(signs, scale if scales else ONE, d)

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

"""HeLoCo: the part of a stale update that points against the momentum is corrected, layer by layer,
before MLA's step.

Use when: asynchronous local steps of a language model, with skewed shards.
Avoid when: shards are equal: `mla` is simpler.
Alternatives: `mla`; `delayed_nesterov`.

Rule: for each layer c is the cosine between its update Δ and the momentum m, v = m/‖m‖ and q =
‖Δ‖/(‖Δ‖ + κ·‖m‖):
    c ≥ align_threshold    Δ unchanged
    c < 0    Δ − β·c·‖Δ‖·v with β = min(shrink_gain·(−c)·q, max_shrink): a shorter component against
             the momentum
    else     ‖Δ‖·u/‖u‖ with u = (1 − λ)·Δ/‖Δ‖ + λ·v, λ = min(rotate_gain·(1 − c)·q, 1): rotated
             towards the momentum
Then the step is `mla`'s. A merge of several updates is corrected as one. If each rank of an
all-reduce takes the step itself, all machines have to compute the same bits of a norm.

Limits: align_threshold = −1 is `mla`, bit for bit.
Source: Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data and
device heterogeneity", arXiv 2606.00271, 2026, by a description of its rule. Its constants were not
available to us; the defaults are ours.
"""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ashl.device import read_scalars
from ashl.option import Fraction, NonNegative, Number, option
from ashl.outer.contract import Layers, Moments
from ashl.outer.mla import MLA


@option
class HeLoCo(MLA):
    """Corrects the direction of updates, then takes MLA's step."""

    linear: ClassVar[bool] = False
    _layers: ClassVar[Layers] = ()
    align_threshold: Annotated[float, Number, Field(ge=-1, le=1)]
    shrink_gain: NonNegative
    max_shrink: Fraction
    rotate_gain: NonNegative
    kappa: NonNegative

    def for_layers(self, layers: Layers) -> HeLoCo:
        shaped = copy(self)
        object.__setattr__(shaped, "_layers", tuple(layers))
        return shaped

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        if moments is not None and self.align_threshold > -1:
            sizes = [prod(shape) for _, shape in self._layers] or [update.numel()]
            pairs = zip(update.split(sizes), moments[0].split(sizes), strict=True)
            update = torch.cat([self._correct(own, momentum) for own, momentum in pairs])
        return super().step(moments, params, update, inner_lr)

    def _correct(self, update: Tensor, momentum: Tensor) -> Tensor:
        norms = [torch.linalg.vector_norm(x) for x in (update, momentum)]
        length, pace, along = read_scalars([*norms, torch.dot(update, momentum)])
        if not length * pace > 0:  # no direction: a norm is zero or not a number
            return update
        cosine = along / (length * pace)
        share = length / (length + self.kappa * pace)  # q
        if cosine >= self.align_threshold:
            return update
        if cosine < 0:
            less = min(self.shrink_gain * -cosine * share, self.max_shrink)
            return torch.add(update, momentum, alpha=-less * cosine * length / pace)
        turned = min(self.rotate_gain * (1 - cosine) * share, 1.0)
        mixed = torch.add(update * ((1 - turned) / length), momentum, alpha=turned / pace)
        return mixed * (length / read_scalars([torch.linalg.vector_norm(mixed)])[0])

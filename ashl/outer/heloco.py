"""HeLoCo: what of a late update points against the momentum is shortened, layer by layer, then MLA's step.

Rule: of each layer, with c the cosine between its update Δ and the momentum m, v = m/‖m‖ and q = ‖Δ‖/(‖Δ‖ + κ·‖m‖):
    c ≥ keep        Δ as it is
    c < 0           Δ − β·c·‖Δ‖·v with β = min(shrink·(−c)·q, most): less of what goes back along the momentum
    0 ≤ c < keep    ‖Δ‖·u/‖u‖ with u = (1 − λ)·Δ/‖Δ‖ + λ·v, λ = min(turn·(1 − c)·q, 1): as long, turned towards it
then `mla`'s step. Merges of several updates are judged as one. Where each rank of an all-reduce makes the step itself,
norms need machines that add up alike.

Limits: keep = −1 is `mla`, bit for bit. Source: Al Asif et al., "HeLoCo: Efficient asynchronous low-communication
training under data and device heterogeneity", arXiv 2606.00271, 2026, by a description of its rule; the published
constants were not at hand, and the defaults are ours.
"""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ashl.learn.device import numbers
from ashl.option import Fraction, NonNegative, Number, option
from ashl.outer.contract import Layers, Moments
from ashl.outer.mla import MLA


@option
class HeLoCo(MLA):
    """Corrects directions, then steps ahead."""

    linear: ClassVar[bool] = False
    _layers: ClassVar[Layers] = ()
    keep: Annotated[float, Number, Field(ge=-1, le=1)]
    shrink: NonNegative
    most: Fraction
    turn: NonNegative
    kappa: NonNegative

    def codec_for_layers(self, layers: Layers) -> HeLoCo:
        shaped = copy(self)
        object.__setattr__(shaped, "_layers", tuple(layers))
        return shaped

    def step(
        self, moments: Moments | None, params: Tensor, update: Tensor, inner_lr: float
    ) -> tuple[Moments | None, Tensor]:
        if moments is not None and self.keep > -1:
            sizes = [prod(shape) for _, shape in self._layers] or [update.numel()]
            pairs = zip(update.split(sizes), moments[0].split(sizes), strict=True)
            update = torch.cat([self._corrected(own, momentum) for own, momentum in pairs])
        return super().step(moments, params, update, inner_lr)

    def _corrected(self, update: Tensor, momentum: Tensor) -> Tensor:
        norms = [torch.linalg.vector_norm(x) for x in (update, momentum)]
        length, pace, along = numbers([*norms, torch.dot(update, momentum)])
        if not length * pace > 0:  # nothing to go by; also where something is no number
            return update
        cosine, share = along / (length * pace), length / (length + self.kappa * pace)
        if cosine >= self.keep:
            return update
        if cosine < 0:
            less = min(self.shrink * -cosine * share, self.most)
            return torch.add(update, momentum, alpha=-less * cosine * length / pace)
        turned = min(self.turn * (1 - cosine) * share, 1.0)
        mixed = torch.add(update * ((1 - turned) / length), momentum, alpha=turned / pace)
        return mixed * (length / numbers([torch.linalg.vector_norm(mixed)])[0])

"""Muon: momentum whose matrices are made orthogonal, and AdamW for all other tensors."""

from __future__ import annotations

import math
from copy import copy
from itertools import accumulate
from math import prod
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ashl.optimizer.adam import AdamW
from ashl.optimizer.contract import Layers, Moments
from ashl.optimizer.schedule import Decay
from ashl.option import Count, option

QUINTIC = (3.4445, -4.775, 2.0315)  # of the polynomial a·X + b·(XXᵀ)X + c·(XXᵀ)²X
ALIKE = 0.2  # root mean square of an element's step, about that of AdamW
TINY = 1e-7


@option
class Muon(AdamW):
    """Momentum orthogonalised by the Newton–Schulz iteration, with steps as long as AdamW's.

    So one learning rate serves both. Vectors, and layers whose names contain a part in `others`,
    take AdamW's steps.

    Rule: for a matrix W [r, c] (of a convolution, all but the first axis are one), M ← μM + G and W
    ← (1 − ηλ)W − η·0.2·√max(r, c)·O(G + μM). O is five steps of a polynomial that brings all
    singular values near 1.
    Limits: a model without matrices, or with all layers in `others`, is AdamW, bit for bit. With
    all-reduce of gradients each replica makes the step, which needs nodes whose matrix products
    have the same bits.
    Source: Jordan et al., "Muon", 2024; step lengths: Liu et al., "Muon is scalable for LLM
    training", arXiv 2502.16982. On workers with outer=nesterov it is MuLoCo, Thérien et al., arXiv
    2505.23725.
    """

    elementwise: ClassVar[bool] = False
    _layers: ClassVar[Layers] = ()
    momentum: Decay
    steps: Annotated[Count, Field(le=100)]
    others: tuple[str, ...]

    def for_layers(self, layers: Layers) -> Muon:
        shaped = copy(self)
        object.__setattr__(shaped, "_layers", tuple(layers))
        return shaped

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters after one step on flat vectors [d]; arguments
        are unchanged.
        """
        (count, first, second), moved = super().step(moments, params, grad, lr)
        ends = accumulate(prod(shape) for _, shape in self._layers)
        for (name, shape), end in zip(self._layers, ends, strict=True):
            if len(shape) < 2 or any(part in name for part in self.others):
                continue
            part = slice(end - prod(shape), end)
            momentum = torch.add(grad[part], moments[1][part], alpha=self.momentum)
            ahead = torch.add(grad[part], momentum, alpha=self.momentum).view(shape[0], -1)
            turn = orthogonalize(ahead, self.steps).view(-1)
            first[part], second[part] = momentum, 0
            kept = params[part] * (1 - lr * self.weight_decay)
            moved[part] = kept.add_(turn, alpha=-lr * ALIKE * math.sqrt(max(ahead.shape)))
        return (count, first, second), moved


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Return about U·Vᵀ of x = U·S·Vᵀ, by the Newton–Schulz iteration."""
    a, b, c = QUINTIC
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (torch.linalg.matrix_norm(wide) + TINY)
    for _ in range(steps):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[0] <= x.shape[1] else wide.T.contiguous()

"""Sparse binary compression: send either the largest or the smallest elements, as one number.

Use when: the shortest messages are wanted, at 1 Mbit/s or less.
Avoid when: encoding time counts, or both signs matter in every message.
Alternatives: `stc`; `adacomp`.

Rule: μ⁺ is the mean of the positive elements among the k largest; −μ⁻ is the mean of the negative
ones among the k smallest. If μ⁺ ≥ μ⁻, C(x)_j = μ⁺ at the former, else −μ⁻ at the latter, and 0
elsewhere. ‖C(x) − x‖² = ‖x‖² − m·μ² for m elements with mean ±μ.
Bits: m·b̄ + 32, with b̄ the bits of an index.

Limits: a vector without one of the signs is top-k with one magnitude. It is made for error feedback
and for updates of many local steps (sync=local_sgd). The elements of the other sign wait in the
residual, for many rounds if one side keeps winning.

Source: Sattler, Wiedemann, Müller and Samek, "Sparse Binary Compression: Towards Distributed Deep
Learning with minimal Communication", IJCNN 2019.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import IndexCode, max_index_bytes, read_indices, write_indices
from ashl.compression.contract import Elements, EncodeContext, Traits, WithDensity
from ashl.compression.kernels import (
    Order,
    largest_indices,
    negatives,
    positives,
    to_device_of,
    view_as,
)
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part
from ashl.device import to_host
from ashl.option import option


@option
class SBC(WithDensity):
    """Sends the mean of one side."""

    code: ClassVar[int] = 58
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True, variable=True)
    indices: IndexCode
    per_layer: bool

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        k = self.num_selected(context.ratio, len(x))
        (up, above), (down, below) = choose_side(x, k, positives), choose_side(x, k, negatives)
        upper = abs(above) >= abs(below) or math.isnan(above)
        indices, mean = (up, above) if upper else (down, below)
        if not len(indices):
            return Parts(0, x[:0])
        coded = write_indices(self.indices, indices, len(x))
        return Parts(len(indices), x[:0], coded, torch.tensor([mean]))

    def unpack(self, parts: Parts, d: int) -> Elements:
        empty = len(parts.indices) + len(parts.scales) == 0
        if len(parts.values) or parts.form or not (parts.count or empty):
            raise PayloadError(
                f"expected one number for {parts.count} indices; received a payload of another form"
            )
        if not parts.count:
            return Elements(slice(0), view_as(parts.values, torch.float32))
        mean = typed_part(parts.scales, torch.float32, 1, "scales")
        return Elements(read_indices(self.indices, parts.indices, parts.count, d), mean)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + max_index_bytes(self.indices, self.num_selected(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / (d * self.num_selected(ratio, d) ** 2)


def choose_side(x: Tensor, k: int, order: Order) -> tuple[Tensor, float]:
    """Return the indices of the k largest elements of one sign, and their mean, 0 if there are
    none.

    If the sign has fewer than k elements, all of them are returned.
    """
    indices = largest_indices(x, k, order)
    values = to_host(x.index_select(0, indices))
    of_side = (torch.signbit(values) == (order is negatives)) & (values != 0)
    if not of_side.all():
        indices, values = indices[to_device_of(indices, of_side)], values[of_side]
    return indices, float(values.numpy().mean(dtype=np.float64)) if len(values) else 0.0

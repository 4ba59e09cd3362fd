"""Adaptive quantization: send the same fraction of positive and of negative elements, at one level
each.

Use when: density must be exact and values short: one level of either sign.
Avoid when: encoding time counts: 19 copies of the vector.
Alternatives: `stc`; `topk` with `values=int8`.

Rule: of the d⁺ positive elements, the k⁺ = max(1, round(ratio · d⁺)) largest are sent; τ⁺ is the
smallest of them. The d⁻ negative elements are treated in the same way. A side without elements
sends none. Each side decodes to the mean of its selected elements.
Bits: for each selected element its index and 1 for the side; 32 for each mean.

Limits: ‖C(x) − x‖² ≤ (1 − δ)‖x‖², with δ about 1/k if one element dominates: error feedback carries
the rest. Thresholds are exact here; the paper takes them from a sample. If a side is not finite, it
decodes to values that are not finite.

Source: Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural
Networks", MLHPC 2016.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import (
    IndexCode,
    index_bytes,
    max_index_bytes,
    read_indices,
    write_indices,
)
from ashl.compression.contract import Elements, EncodeContext, Traits, WithDensity, selected_count
from ashl.compression.kernels import (
    as_native,
    as_tensor,
    blocks,
    count_true,
    extremes_of,
    largest_indices,
    look_up,
    negatives,
    pack,
    packed_bytes,
    positives,
    take_elements,
    to_device_of,
    unpack,
)
from ashl.compression.payload import EMPTY, HEADER, Parts, PayloadError, typed_part
from ashl.compression.sparse import DENSE, SPARSE
from ashl.device import is_on_host, read_scalars, to_host
from ashl.option import option


@option
class Dryden(WithDensity):
    """Two thresholds by proportion, with a mean for each side."""

    code: ClassVar[int] = 31
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True, variable=True)
    indices: IndexCode
    per_layer: bool

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        share = self.ratio if context.ratio is None else context.ratio
        if math.isnan(
            read_scalars([extremes_of(x).sum()])[0]
        ):  # all NaNs positive: one side has them
            x = torch.where(x.isnan(), math.nan, x)
        array = as_native(x)
        not_above = sum(count_true(array[where] <= 0) for where in blocks(array))
        num_negative = sum(count_true(array[where] < 0) for where in blocks(array))
        counts = len(x) - not_above, num_negative
        chosen = [
            largest_indices(x, selected_count(share, size), order) if size else x[:0].long()
            for size, order in zip(counts, (positives, negatives), strict=True)
        ]
        k, d = sum(map(len, chosen)), len(x)
        if self._sparse_bytes(k, d) >= 4 * d:
            return Parts(d, x, form=DENSE)
        # The elements are few, so the host encodes them.
        means = [
            float(to_host(take_elements(x, side)).abs().numpy().mean(dtype=np.float64))
            if len(side)
            else 0.0
            for side in chosen
        ]
        indices = np.concatenate([to_host(side).numpy() for side in chosen])
        order = np.argsort(indices)  # in a quarter of the time of torch
        indices = torch.from_numpy(indices[order])
        values = pack(np.repeat([0, 1], list(map(len, chosen)))[order], 1)
        coded = write_indices(self.indices, indices, d) if k else EMPTY
        return Parts(k, to_device_of(x, values), coded, torch.tensor(means), SPARSE)

    def unpack(self, parts: Parts, d: int) -> Elements:
        k, form = parts.count, parts.form
        if form == DENSE and k == d and not (len(parts.scales) or len(parts.indices)):
            values = typed_part(parts.values, torch.float32, d, "values")
            return Elements(slice(None), values)
        if not is_on_host(parts.values):  # few elements: the host decodes
            few = Parts(k, *(to_host(part) for part in parts[1:4]), form)
            indices, values = self.unpack(few, d)
            return Elements(to_device_of(parts.values, indices), to_device_of(parts.values, values))
        above, below = typed_part(parts.scales, torch.float32, 2, "means")
        if form != SPARSE or len(parts.values) != packed_bytes(k, 1):
            raise PayloadError(
                f"expected a vector of two means; received form {form} with {k} values in"
                f" {len(parts.values)} bytes"
            )
        indices = EMPTY.long()
        if k or len(parts.indices):
            indices = read_indices(self.indices, parts.indices, k, d)
        negative = as_tensor(unpack(parts.values, 1, k))
        return Elements(indices, look_up(torch.stack([above, -below]), negative))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        share = self.ratio if ratio is None else ratio
        selected_count(share, d)
        most = min(d, int(share * d) + 2)  # each side is rounded separately
        indices = max_index_bytes(self.indices, most, d)
        return HEADER.size + min(4 * d, 8 + packed_bytes(most, 1) + indices)

    def bound(self, ratio: float | None, d: int) -> float:
        # A side sends k of its n elements, with sum S. Their mean reduces the squared error by
        # S²/k, and the squares of the side sum to at most S²·max(1, n/k²).
        share = self.ratio if ratio is None else ratio
        return 1 - min(1 / max(1, int(share * d) + 1), 1 / min(d, 1.5 / share))

    def _sparse_bytes(self, k: int, d: int) -> int:
        return 8 + packed_bytes(k, 1) + (index_bytes(self.indices, k, d) if k else 0)

"""AdaComp: in each bin, send the signs of the elements that such an update would make the largest.

Use when: links are very slow, and the density should follow each layer's activity.
Avoid when: encoding time counts: 27 copies of the vector.
Alternatives: `topk` with a fixed density; `dryden`.

Rule: with the residual e and the update g, G = e + g. Element j is sent if |G_j + g_j| ≥ max |G|
over its bin. Its value is sign(G_j)·s, with s the mean over the layer's bins of max |G|; e ← G −
sent. A bin has `conv_bin` elements in layers of more than two dimensions and `dense_bin` in others;
the last bin of a layer may be shorter. A bin with G = 0 sends nothing. If a message is dropped, its
content returns to e.
Bits: 1 per sign, its index, and 32 per layer. The density is a result, not a setting: it is high
where residuals and updates agree. The declared size is that of sending all elements. The paper
writes sign and index within a bin in 8 bits; Golomb's code takes about as many or fewer.

Limits: with bins of one element, an element is sent unless its residual opposes the update and
exceeds 1.5 times its magnitude. Error feedback is part of the method. s may exceed the elements
that it replaces, so the codec is not a contraction.

Source: Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
Training", 2018.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import IndexCode, max_index_bytes, read_indices, write_indices
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    ByLayers,
    Elements,
    EncodeContext,
    State,
    Traits,
    as_float32,
)
from ashl.compression.kernels import (
    BLOCK,
    Array,
    as_native,
    concatenate,
    flip_signs,
    pack_signs,
    packed_bytes,
    row_maxima,
    rows_of,
    silence_warnings,
    to_device_of,
    where_true,
)
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    as_bytes,
    typed_part,
    write_payload,
)
from ashl.compression.wrappers import Residual, Sent, add_content, rescale
from ashl.device import to_host
from ashl.option import Count, option


@option
class AdaComp(ByLayers):
    """Sends the outstanding elements of each bin."""

    code: ClassVar[int] = 57
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(variable=True)
    conv_bin: Count
    dense_bin: Count
    indices: IndexCode

    def encode(
        self, sender: Residual | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Residual, Tensor]:
        error, lr = sender or Residual()
        g, old = as_float32(x), rescale(error, lr, context.lr)
        whole = g if old is None else g + old
        parts, indices = self.choose(whole, g)
        rest = g.clone() if whole is g else whole
        values = self.decode_values(parts, indices, len(g))
        with silence_warnings():
            as_native(rest)[as_native(indices)] -= as_native(values)
        return Residual(rest, context.lr), write_payload(self.code, len(g), parts)

    def restore_dropped(self, sender: Residual, payload: Tensor) -> Residual:
        return sender._replace(error=add_content(sender.error, Sent(self, payload)))

    def residual(self, sender: Residual | None) -> Tensor | None:
        return sender and sender.error

    def import_state(self, kept: State) -> State:
        return kept if isinstance(kept, Residual) else None

    def choose(self, whole: Tensor, g: Tensor) -> tuple[Parts, Tensor]:
        """Return the parts of a payload of G = `whole`, and the indices of the elements sent."""
        scales, found, start = [], [], 0
        for size, longest in self.bins(len(whole)):
            layer, length, maxima = slice(start, start + size), min(size, longest), []
            blocks = zip(rows_of(whole[layer], length), rows_of(g[layer], length), strict=True)
            for (where, rows), (_, updates) in blocks:
                outstanding, largest = select_outstanding(rows, updates)
                found.append(where_true(outstanding.reshape(-1)) + start + where.start * length)
                maxima.append(largest)
            # The order of additions is fixed: groups of full bins, then a shorter last bin.
            each, full = to_host(concatenate(maxima, whole)), size // length
            groups = [*each[:full].split(max(1, BLOCK // length)), each[full:]]
            total = sum(float(group.numpy().sum(dtype=np.float64)) for group in groups)
            scales.append(total / -(-size // length))
            start += size
        indices, levels = torch.cat(found), torch.tensor(scales)
        if not len(indices):
            return Parts(0, whole[:0], scales=levels), indices
        coded = write_indices(self.indices, indices, len(whole))
        return Parts(len(indices), pack_signs(whole[indices]), coded, levels), indices

    def unpack(self, parts: Parts, d: int) -> Elements:
        k = parts.count
        typed_part(parts.scales, torch.float32, len(self.bins(d)), "scales")
        typed_part(parts.values, torch.uint8, packed_bytes(k, 1), "signs")
        if parts.form or not (k or not len(parts.indices)):
            raise PayloadError(f"expected {k} signs; received a payload of another form")
        indices = parts.values[:0].long()
        if k:
            indices = read_indices(self.indices, parts.indices, k, d)
        return Elements(indices, self.decode_values(parts, indices, d))

    def decode_values(self, parts: Parts, indices: Tensor, d: int) -> Tensor:
        """Return the values of the elements at these indices."""
        ends = torch.tensor([0, *(size for size, _ in self.bins(d))]).cumsum(0)
        counts = torch.searchsorted(indices.long(), to_device_of(indices, ends)).diff()
        scales = to_device_of(indices, as_bytes(parts.scales).clone().view(torch.float32))
        values = scales.repeat_interleave(counts, output_size=len(indices))
        return flip_signs(as_bytes(parts.values), values, len(indices))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        indices = max_index_bytes(self.indices, d, d)
        return HEADER.size + 4 * len(self.bins(d)) + packed_bytes(d, 1) + indices

    def bins(self, d: int) -> list[tuple[int, int]]:
        """Return (number of elements, length of a bin) of each layer."""
        return [
            (layer.size, self.conv_bin if len(layer.shape) > 2 else self.dense_bin)
            for layer in self.layers(d)
        ]


@silence_warnings()
def select_outstanding(whole: Array, g: Array) -> tuple[Array, Array]:
    """Return (True for elements to send [n, length], largest |G| of each bin) for bins of G."""
    largest = row_maxima(whole)
    outstanding = abs(whole + g) >= largest
    outstanding &= whole != 0
    if isinstance(whole, Tensor) or not (largest < math.inf).all():
        outstanding |= ~(abs(whole) < math.inf)
    return outstanding, largest

"""AdaComp: in each bin, send the signs of the elements that such an update would make the largest.

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

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Sparse
from ashl.compression.contract import (
    ENCODE_CONTEXT,
    EncodeContext,
    Layer,
    Layout,
    PayloadError,
    State,
    Traits,
    size_of,
)
from ashl.compression.wire.arrays import (
    Array,
    array_of,
    as_bytes,
    beside,
    concatenate,
    look_up,
    ops,
    read,
    tensor_of,
    to_device_index,
    where_true,
)
from ashl.compression.wire.bits import BLOCK, pack_signs, packed_bytes, unpack_truths
from ashl.compression.wire.index_code import IndexCode, max_index_bytes, read_indices, write_indices
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part, write_payload
from ashl.compression.wrappers.feedback import Residual, rescale, restore_error
from ashl.compression.wrappers.layers import with_layout
from ashl.option import Count, option


@option
class AdaComp(Sparse):
    """Sends the outstanding elements of each bin."""

    code: ClassVar[int] = 57
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(variable=True)
    layout: ClassVar[Layout | None] = None
    conv_bin: Count
    dense_bin: Count
    indices: IndexCode

    def for_layout(self, layout: Layout) -> AdaComp:
        return with_layout(self, layout)

    def encode(
        self, sender: Residual | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Residual, Tensor]:
        error, _, lr = sender or Residual()
        g = array_of(x)
        old = rescale(error, lr, context.lr)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = g if old is None else g + array_of(old)
            parts, indices = self.choose(whole, g)
            rest = array_of(x.clone()) if whole is g else whole
            rest[indices] -= self.decode_values(parts, indices, len(g))
        return Residual(tensor_of(rest), None, context.lr), write_payload(self.code, len(g), parts)

    def restore_dropped(self, sender: Residual, payload: Tensor) -> Residual:
        return sender._replace(error=restore_error(self, sender.error, payload))

    def residual(self, sender: Residual | None) -> Tensor | None:
        return sender and sender.error

    def import_state(self, kept: State) -> State:
        return kept if isinstance(kept, Residual) else None

    def choose(self, whole: Array, g: Array) -> tuple[Parts, Array]:
        """Return the parts of a payload of G = `whole`, and the indices of the elements sent."""
        scales, found, start = [], [], 0
        for size, length in self.bins(len(whole)):
            total = 0.0
            rows_at_once = max(1, BLOCK // length)
            for part in split_bins(whole, start, start + size, length):
                shape = -1, min(length, part.stop - part.start)
                outstanding, largest = select_outstanding(
                    whole[part].reshape(shape), g[part].reshape(shape)
                )
                found.append(where_true(outstanding.reshape(-1)) + part.start)
                largest = read(largest)
                for row in range(0, len(largest), rows_at_once):
                    total += float(largest[row : row + rows_at_once].sum(dtype=np.float64))
            scales.append(total / -(-size // length))
            start += size
        indices, levels = concatenate(found), np.array(scales, "<f4")
        if not len(indices):
            return Parts(0, whole[:0], scales=levels), indices
        signs = pack_signs(whole[indices])
        coded = write_indices(self.indices, indices, len(whole))
        return Parts(len(indices), signs, coded, levels), indices

    def unpack(self, parts: Parts, d: int) -> Any:
        sizes, k = [size for size, _ in self.bins(d)], parts.count
        typed_part(parts.scales, "<f4", len(sizes), "scales")
        typed_part(parts.values, "u1", packed_bytes(k, 1), "signs")
        if parts.form or not (k or not len(parts.indices)):
            raise PayloadError(f"expected {k} signs; received a payload of another form")
        if k:
            indices = read_indices(self.indices, parts.indices, k, d)
        else:
            indices = to_device_index(parts.values, np.empty(0, np.int64))
        return indices, self.decode_values(parts, indices, d)

    def decode_values(self, parts: Parts, indices: Array, d: int) -> Array:
        """Return the values of the elements at these indices."""
        ends, scales = np.cumsum([size for size, _ in self.bins(d)]), read(parts.scales).view("<f4")
        negative = unpack_truths(as_bytes(parts.values), len(indices))
        if isinstance(indices, Tensor):
            values = look_up(
                scales, torch.searchsorted(beside(indices, ends), indices.long(), side="right")
            )
        else:
            values = np.repeat(scales, np.diff(np.searchsorted(indices, ends), prepend=0))
        return ops(indices).where(negative, -values, values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return (
            HEADER.size
            + 4 * len(self.bins(d))
            + packed_bytes(d, 1)
            + max_index_bytes(self.indices, d, d)
        )

    def bins(self, d: int) -> list[tuple[int, int]]:
        """Return (number of elements, length of a bin) of each layer."""
        layout = self.layout or (Layer("all", (d,)),)
        if d != size_of(layout):
            raise PayloadError(
                f"expected a vector of {size_of(layout)} elements, as the layers have; received {d}"
            )
        return [
            (layer.size, self.conv_bin if len(layer.shape) > 2 else self.dense_bin)
            for layer in layout
        ]


def split_bins(whole: Array, start: int, end: int, length: int) -> Iterator[slice]:
    """Yield the full bins of elements [start, end) in blocks, and then a shorter last bin.

    A block fits the cache; on a device, it has all full bins.
    """
    step = end - start if isinstance(whole, Tensor) else length * max(1, BLOCK // length)
    for first in range(start, end, step):
        stop = min(first + step, end)
        last = stop - (stop - first) % length  # start of a shorter bin
        for part in (slice(first, last), slice(last, stop)):
            if part.stop > part.start:
                yield part


def select_outstanding(whole: Array, g: Array) -> tuple[Array, Array]:
    """Return (True for elements to send [n, length], largest |G| of each bin) for bins of G."""
    if isinstance(whole, Tensor):
        largest = whole.abs().amax(1, keepdim=True)
        return ((whole + g).abs() >= largest) & (whole != 0) | ~whole.isfinite(), largest
    magnitudes = np.abs(whole)
    largest = magnitudes.max(axis=1, keepdims=True)
    np.add(whole, g, out=magnitudes)
    outstanding = np.abs(magnitudes, out=magnitudes) >= largest
    outstanding &= whole != 0
    if not np.isfinite(largest).all():
        outstanding |= ~np.isfinite(whole)
    return outstanding, largest

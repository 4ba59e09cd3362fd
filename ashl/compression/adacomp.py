"""AdaComp: in each bin of neighbours what would soon be the largest is sent, as a sign and one
scale for the layer.

Rule: with the residual e and the update g, G = e + g; element j is sent where |G_j + g_j| ≥ max |G|
over its bin, as sign(G_j)·s, s the mean over the layer's bins of max |G|; e ← G − sent. Bins have
`conv_bin` elements in layers of more than two dimensions and `dense_bin` in others; the last bin of
a layer may be shorter. How much is sent is an outcome: much where residuals and updates agree.
Bits: 1 for each sign, its place, and 32 for each layer; declared beforehand is that all is sent.
The paper writes sign and place in a bin as 8 bits; Golomb's code takes about as many or fewer.

Limit: bins of one element send all whose residual does not oppose the update. Error feedback is
part of it, and s may be larger than what it stands for: it is no contraction. A dropped message
returns its content to e. A bin whose G is 0 sends nothing.

Source: Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
Training", 2018.
"""

from __future__ import annotations

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
from ashl.compression.wire.index_code import IndexCode, index_room, read_indices, write_indices
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part, write_payload
from ashl.compression.wrappers.feedback import Residual, rescale, restore_error
from ashl.compression.wrappers.layers import with_layout
from ashl.option import Count, option


@option
class AdaComp(Sparse):
    """Sends what stands out among its neighbours."""

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
            parts, places = self.choose(whole, g)
            rest = array_of(x.clone()) if whole is g else whole
            rest[places] -= self.meant(parts, places, len(g))
        return Residual(tensor_of(rest), None, context.lr), write_payload(self.code, len(g), parts)

    def restore_dropped(self, sender: Residual, payload: Tensor) -> Residual:
        return sender._replace(error=restore_error(self, sender.error, payload))

    def residual(self, sender: Residual | None) -> Tensor | None:
        return sender and sender.error

    def import_state(self, kept: State) -> State:
        return kept if isinstance(kept, Residual) else None

    def choose(self, whole: Array, g: Array) -> tuple[Parts, Array]:
        """What of G is sent, and the places of that."""
        scales, found, start = [], [], 0
        for size, length in self.bins(len(whole)):
            total, end, together = 0.0, start + size, max(1, BLOCK // length)
            step = size if isinstance(whole, Tensor) else length * together
            for at in range(start, end, step):
                cut = min(at + step, end)
                last = cut - (cut - at) % length  # where a shorter bin begins
                for part in (slice(at, last), slice(last, cut)):
                    if part.stop > part.start:
                        rows = -1, min(length, part.stop - part.start)
                        stands_out, largest = select_outstanding(
                            whole[part].reshape(rows), g[part].reshape(rows)
                        )
                        found.append(where_true(stands_out.reshape(-1)) + part.start)
                        largest = read(largest)
                        for row in range(0, len(largest), together):
                            total += float(largest[row : row + together].sum(dtype=np.float64))
            scales.append(total / -(-size // length))
            start = end
        places, levels = concatenate(found), np.array(scales, "<f4")
        if not len(places):
            return Parts(0, whole[:0], scales=levels), places
        signs, coded = pack_signs(whole[places]), write_indices(self.indices, places, len(whole))
        return Parts(len(places), signs, coded, levels), places

    def unpack(self, parts: Parts, d: int) -> Any:
        sizes, k = [size for size, _ in self.bins(d)], parts.count
        typed_part(parts.scales, "<f4", len(sizes), "scales")
        typed_part(parts.values, "u1", packed_bytes(k, 1), "signs")
        if parts.form or not (k or not len(parts.indices)):
            raise PayloadError(f"what came are not {k} signs")
        places = (
            read_indices(self.indices, parts.indices, k, d)
            if k
            else to_device_index(parts.values, np.empty(0, np.int64))
        )
        return places, self.meant(parts, places, d)

    def meant(self, parts: Parts, places: Array, d: int) -> Array:
        """The values at these places."""
        ends, scales = np.cumsum([size for size, _ in self.bins(d)]), read(parts.scales).view("<f4")
        negative = unpack_truths(as_bytes(parts.values), len(places))
        if isinstance(places, Tensor):
            values = look_up(
                scales, torch.searchsorted(beside(places, ends), places.long(), side="right")
            )
        else:
            values = np.repeat(scales, np.diff(np.searchsorted(places, ends), prepend=0))
        return ops(places).where(negative, -values, values)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return (
            HEADER.size
            + 4 * len(self.bins(d))
            + packed_bytes(d, 1)
            + index_room(self.indices, d, d)
        )

    def bins(self, d: int) -> list[tuple[int, int]]:
        """The size of each layer, and how long its bins are."""
        layout = self.layout or (Layer("all", (d,)),)
        if d != size_of(layout):
            raise PayloadError(f"a vector of {d} elements came for layers of another size")
        return [
            (layer.size, self.conv_bin if len(layer.shape) > 2 else self.dense_bin)
            for layer in layout
        ]


def select_outstanding(whole: Array, g: Array) -> tuple[Array, Array]:
    """Of bins [n, length]: what is sent, and the largest |G| of each."""
    if isinstance(whole, Tensor):
        largest = whole.abs().amax(1, keepdim=True)
        return ((whole + g).abs() >= largest) & (whole != 0) | ~whole.isfinite(), largest
    magnitudes = np.abs(whole)
    largest = magnitudes.max(axis=1, keepdims=True)
    np.add(whole, g, out=magnitudes)
    stands_out = np.abs(magnitudes, out=magnitudes) >= largest
    stands_out &= whole != 0
    if not np.isfinite(largest).all():
        stands_out |= ~np.isfinite(whole)
    return stands_out, largest

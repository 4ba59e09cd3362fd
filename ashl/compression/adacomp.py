"""AdaComp: in each bin of neighbours what would soon be the largest is sent, as a sign and one scale for the layer.

Rule: with the residual e and the update g, G = e + g; element j is sent where |G_j + g_j| ≥ max |G| over its bin, as
sign(G_j)·s, s the mean over the layer's bins of max |G|; e ← G − sent. Bins have `conv_bin` elements in layers of more
than two dimensions and `dense_bin` in others; the last bin of a layer may be shorter. How much is sent is an outcome:
much where residuals and updates agree. Bits: 1 for each sign, its place, and 32 for each layer; declared beforehand is
that all is sent. The paper writes sign and place in a bin as 8 bits; Golomb's code takes about as many or fewer.

Limit: bins of one element send all whose residual does not oppose the update. Error feedback is part of it, and s may
be larger than what it stands for: it is no contraction. A dropped message returns its content to e. A bin whose G is 0
sends nothing.

Source: Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training", 2018.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.around.feedback import Residual, rescaled, restored
from ashl.compression.around.layers import with_layout
from ashl.compression.base.code import Sparse
from ashl.compression.contract import TURN, BodyError, Flags, Layer, Layout, State, Turn, size_of
from ashl.compression.wire.arrays import array_of
from ashl.compression.wire.bits import BLOCK, pack_signs, packed_bytes
from ashl.compression.wire.body import EMPTY, HEADER, Parts, typed, write_body
from ashl.compression.wire.index_code import IndexCode, index_room, read_indices, write_indices
from ashl.option import Count, option


@option
class AdaComp(Sparse):
    """Sends what stands out among its neighbours."""

    code: ClassVar[int] = 57
    flags: ClassVar[Flags] = Flags(variable=True)
    layout: ClassVar[Layout | None] = None
    conv_bin: Count
    dense_bin: Count
    indices: IndexCode

    def shaped(self, layout: Layout) -> AdaComp:
        return with_layout(self, layout)

    def encode(self, sender: Residual | None, x: Tensor, turn: Turn = TURN) -> tuple[Residual, Tensor]:
        error, _, lr = sender or Residual()
        g = array_of(x)
        old = rescaled(error, lr, turn.lr)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = g if old is None else g + array_of(old)
            parts, places = self.chosen(whole, g)
            rest = whole.copy() if whole is g else whole
            rest[places] -= self.meant(parts, places, g.size)
        return Residual(torch.from_numpy(rest), None, turn.lr), write_body(self.code, g.size, parts)

    def undo(self, sender: Residual, body: Tensor) -> Residual:
        return sender._replace(error=restored(self, sender.error, body))

    def residual(self, sender: Residual | None) -> Tensor | None:
        return sender and sender.error

    def adopt(self, kept: State) -> State:
        return kept if isinstance(kept, Residual) else None

    def chosen(self, whole: np.ndarray, g: np.ndarray) -> tuple[Parts, np.ndarray]:
        """What of G is sent, and the places of that."""
        scales, found, start = [], [], 0
        for size, length in self.bins(whole.size):
            total, end, step = 0.0, start + size, length * max(1, BLOCK // length)
            for at in range(start, end, step):
                cut = min(at + step, end)
                last = cut - (cut - at) % length  # where a shorter bin begins
                for part in (slice(at, last), slice(last, cut)):
                    if part.stop > part.start:
                        rows = -1, min(length, part.stop - part.start)
                        stands_out, largest = outstanding(whole[part].reshape(rows), g[part].reshape(rows))
                        found.append(np.flatnonzero(stands_out) + part.start)
                        total += float(largest.sum(dtype=np.float64))
            scales.append(total / -(-size // length))
            start = end
        places, levels = np.concatenate(found), np.array(scales, "<f4")
        if not places.size:
            return Parts(0, EMPTY, scales=levels), places
        signs, coded = pack_signs(whole[places]), write_indices(self.indices, places, whole.size)
        return Parts(places.size, signs, coded, levels), places

    def unpack(self, parts: Parts, d: int) -> Any:
        sizes, k = [size for size, _ in self.bins(d)], parts.count
        typed(parts.scales, "<f4", len(sizes), "scales")
        typed(parts.values, "u1", packed_bytes(k, 1), "signs")
        if parts.form or not (k or not parts.indices.size):
            raise BodyError(f"what came are not {k} signs")
        places = read_indices(self.indices, parts.indices, k, d) if k else np.empty(0, np.int64)
        return places, self.meant(parts, places, d)

    def meant(self, parts: Parts, places: np.ndarray, d: int) -> np.ndarray:
        """The values at these places."""
        ends = np.cumsum([size for size, _ in self.bins(d)])
        negative = np.unpackbits(parts.values, count=places.size, bitorder="little").view(bool)
        values = np.repeat(parts.scales.view("<f4"), np.diff(np.searchsorted(places, ends), prepend=0))
        return np.where(negative, -values, values)

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 * len(self.bins(d)) + packed_bytes(d, 1) + index_room(self.indices, d, d)

    def bins(self, d: int) -> list[tuple[int, int]]:
        """The size of each layer, and how long its bins are."""
        layout = self.layout or (Layer("all", (d,)),)
        if d != size_of(layout):
            raise BodyError(f"a vector of {d} elements came for layers of another size")
        return [(layer.size, self.conv_bin if len(layer.shape) > 2 else self.dense_bin) for layer in layout]


def outstanding(whole: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of bins [n, length]: what is sent, and the largest |G| of each."""
    magnitudes = np.abs(whole)
    largest = magnitudes.max(axis=1, keepdims=True)
    np.add(whole, g, out=magnitudes)
    stands_out = np.abs(magnitudes, out=magnitudes) >= largest
    stands_out &= whole != 0
    if not np.isfinite(largest).all():
        stands_out |= ~np.isfinite(whole)
    return stands_out, largest

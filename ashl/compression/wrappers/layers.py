"""Layers of a model, and a codec that encodes each layer separately.

Rule: C(x) = (C(x_1), …, C(x_L)) with x_l the elements of layer l. Each layer has a scale and a
density of its own, so that a layer with small gradients is sent, too. This is a different algorithm
than C on the whole vector.
Bits: 32 for each layer and those of the layers' payloads. Format: the size of each layer's payload
in bytes, uint32; then the payloads in order.
Source: Aji and Heafield, EMNLP 2017 (local and global thresholds).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import (
    ENCODE_CONTEXT,
    Codec,
    EncodeContext,
    Layout,
    PayloadError,
    State,
    Traits,
)
from ashl.compression.wire.arrays import bytes_of, read, tensor_of
from ashl.compression.wire.payload_format import (
    HEADER,
    Parts,
    read_payload,
    typed_part,
    write_payload,
)

C = TypeVar("C", bound=Codec)


def layer_at(layout: Layout, place: int) -> str:
    """Return the name of the layer that contains an element of the flat vector."""
    end = 0
    for layer in layout:
        end += layer.size
        if place < end:
            return layer.name
    raise IndexError(place)


def with_layout(option: C, layout: Layout) -> C:
    """Return a copy of an option with the layers of the model as its `layout`."""
    shaped = copy(option)
    object.__setattr__(shaped, "layout", layout)
    return shaped


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return the position of each layer in the flat vector."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Layerwise(Codec):
    """A stateless codec, applied to each layer."""

    code: ClassVar[int] = 1
    codec: Codec
    sizes: tuple[int, ...]

    @property
    def traits(self) -> Traits:
        return self.codec.traits._replace(linear=False, reduces=False)

    @property
    def on_host(self) -> bool:
        return self.codec.on_host

    @property
    def ratio(self) -> float | None:
        return self.codec.ratio

    def encode(
        self, sender: State, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[State, Tensor]:
        payloads = [
            self.codec.encode(None, x[part], context._replace(layer=context.layer + layer))[1]
            for layer, part in enumerate(slices(self.sizes))
        ]
        lengths = np.array([len(payload) for payload in payloads])
        parts = Parts(x.numel(), bytes_of(torch.cat(payloads)), scales=lengths.astype("<u4"))
        return sender, write_payload(self.code, x.numel(), parts)

    def decode(self, receiver: State, payload: Tensor, d: int) -> tuple[State, Tensor]:
        pieces = [
            self.codec.decode(None, piece, part.stop - part.start)[1]
            for part, piece in self._pieces(payload, d)
        ]
        return receiver, torch.cat(pieces)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + sum(4 + self.codec.encoded_nbytes(ratio, size) for size in self.sizes)

    def add(self, out: Tensor, payload: Tensor, scale: float = 1.0) -> None:
        pieces = list(self._pieces(payload, out.numel()))
        for part, piece in pieces:  # decode all layers first: an error must leave `out` unchanged
            self.codec.decode(None, piece, part.stop - part.start)
        for part, piece in pieces:
            self.codec.add(out[part], piece, scale)

    def bound(self, ratio: float | None, d: int) -> float:
        return max(self.codec.bound(ratio, size) for size in self.sizes)

    def _pieces(self, payload: Tensor, d: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the position and the payload of each layer."""
        parts = read_payload(payload, self.code, d)
        lengths = typed_part(read(parts.scales), "<u4", len(self.sizes), "lengths").astype(np.int64)
        if lengths.sum() != len(parts.values) or len(parts.indices):
            raise PayloadError(
                f"the payloads of the layers declare {lengths.sum()} bytes, but"
                f" {len(parts.values)} were received"
            )
        payloads = tensor_of(parts.values).split(lengths.tolist())
        return zip(slices(self.sizes), payloads, strict=True)

"""Sparse binary compression: of the largest and of the smallest elements one side is sent, as one number.

Rule: of the k largest elements the positive ones have the mean μ⁺, of the k smallest the negative ones −μ⁻. Where μ⁺ ≥
μ⁻, C(x)_j = μ⁺ at the former, else −μ⁻ at the latter, and 0 elsewhere. What is sent lies in the span of its error:
‖C(x) − x‖² = ‖x‖² − m·μ² with m elements sent. Bits: m·b̄ + 32, b̄ those of a place.

Limit: a vector without one sign is top-k with one magnitude. Made for error feedback and for updates of many local
steps (sync=local_sgd): the other side waits in the residual, for many rounds where one side keeps winning.

Source: Sattler, Wiedemann, Müller and Samek, "Sparse Binary Compression: Towards Distributed Deep Learning with minimal
Communication", IJCNN 2019.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ashl.compression.base.code import Sparse
from ashl.compression.base.select import NEGATIVE, POSITIVE, Order, largest
from ashl.compression.base.sparsifier import Share
from ashl.compression.contract import BodyError, Flags, Turn
from ashl.compression.wire.body import EMPTY, HEADER, Parts, typed
from ashl.compression.wire.index_code import IndexCode, index_room, read_indices, write_indices
from ashl.option import option


@option
class SBC(Sparse, Share):
    """Keeps one side, as its mean."""

    code: ClassVar[int] = 58
    flags: ClassVar[Flags] = Flags(contraction=True, variable=True)
    indices: IndexCode
    layers: bool

    def pack(self, x: np.ndarray, turn: Turn) -> Parts:
        k = self.kept(turn.ratio, x.size)
        (up, above), (down, below) = side(x, k, POSITIVE), side(x, k, NEGATIVE)
        places, mean = (up, above) if abs(above) >= abs(below) or np.isnan(above) else (down, below)
        if not places.size:
            return Parts(0, EMPTY)
        return Parts(places.size, EMPTY, write_indices(self.indices, places, x.size), np.array([mean], "<f4"))

    def unpack(self, parts: Parts, d: int) -> Any:
        if parts.values.size or parts.form or not (parts.count or parts.indices.size + parts.scales.size == 0):
            raise BodyError(f"what came is not one number at {parts.count} places")
        if not parts.count:
            return slice(0), EMPTY.view(np.float32)
        mean = typed(parts.scales, "<f4", 1, "scales")
        return read_indices(self.indices, parts.indices, parts.count, d), mean

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + index_room(self.indices, self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / (d * self.kept(ratio, d) ** 2)


def side(x: np.ndarray, k: int, order: Order) -> tuple[np.ndarray, float]:
    """The places of the k largest elements of one sign, or of all, and their mean; 0 where there are none."""
    places = largest(x, k, order)
    values = x[places]
    of_it = np.signbit(values) == (order is NEGATIVE)
    of_it &= values != 0
    if not of_it.all():
        places, values = places[of_it], values[of_it]
    return places, float(values.mean(dtype=np.float64)) if values.size else 0.0

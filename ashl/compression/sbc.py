"""Sparse binary compression: of the largest and of the smallest elements one side is sent, as one
number.

Rule: of the k largest elements the positive ones have the mean μ⁺, of the k smallest the negative
ones −μ⁻. Where μ⁺ ≥ μ⁻, C(x)_j = μ⁺ at the former, else −μ⁻ at the latter, and 0 elsewhere. What is
sent lies in the span of its error: ‖C(x) − x‖² = ‖x‖² − m·μ² with m elements sent. Bits: m·b̄ + 32,
b̄ those of a place.

Limit: a vector without one sign is top-k with one magnitude. Made for error feedback and for
updates of many local steps (sync=local_sgd): the other side waits in the residual, for many rounds
where one side keeps winning.

Source: Sattler, Wiedemann, Müller and Samek, "Sparse Binary Compression: Towards Distributed Deep
Learning with minimal Communication", IJCNN 2019.
"""

from typing import Any, ClassVar

import numpy as np

from ashl.compression.common.code import Sparse
from ashl.compression.common.select import NEGATIVE, POSITIVE, Order, largest
from ashl.compression.common.sparsifier import Share
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, beside, read, view_as
from ashl.compression.wire.index_code import IndexCode, index_room, read_indices, write_indices
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.option import option


@option
class SBC(Sparse, Share):
    """Keeps one side, as its mean."""

    code: ClassVar[int] = 58
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True, variable=True)
    indices: IndexCode
    per_layer: bool

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        k = self.kept(context.ratio, len(x))
        (up, above), (down, below) = choose_side(x, k, POSITIVE), choose_side(x, k, NEGATIVE)
        places, mean = (up, above) if abs(above) >= abs(below) or np.isnan(above) else (down, below)
        if not len(places):
            return Parts(0, x[:0])
        return Parts(
            len(places), x[:0], write_indices(self.indices, places, len(x)), np.array([mean], "<f4")
        )

    def unpack(self, parts: Parts, d: int) -> Any:
        if (
            len(parts.values)
            or parts.form
            or not (parts.count or len(parts.indices) + len(parts.scales) == 0)
        ):
            raise PayloadError(f"what came is not one number at {parts.count} places")
        if not parts.count:
            return slice(0), view_as(parts.values, "<f4")
        mean = typed_part(parts.scales, "<f4", 1, "scales")
        return read_indices(self.indices, parts.indices, parts.count, d), mean

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + index_room(self.indices, self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / (d * self.kept(ratio, d) ** 2)


def choose_side(x: Array, k: int, order: Order) -> tuple[Array, float]:
    """The places of the k largest elements of one sign, or of all, and their mean; 0 where there
    are none.
    """
    places = largest(x, k, order)
    values = read(x[places])
    of_it = np.signbit(values) == (order is NEGATIVE)
    of_it &= values != 0
    if not of_it.all():
        places, values = places[beside(places, of_it)], values[of_it]
    return places, float(values.mean(dtype=np.float64)) if values.size else 0.0

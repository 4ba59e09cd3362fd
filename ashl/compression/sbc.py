"""Sparse binary compression: send either the largest or the smallest elements, as one number.

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

from typing import Any, ClassVar

import numpy as np

from ashl.compression.common.code import Sparse
from ashl.compression.common.select import NEGATIVE, POSITIVE, Order, largest
from ashl.compression.common.sparsifier import Share
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, beside, read, view_as
from ashl.compression.wire.index_code import IndexCode, max_index_bytes, read_indices, write_indices
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.option import option


@option
class SBC(Sparse, Share):
    """Sends the mean of one side."""

    code: ClassVar[int] = 58
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(contraction=True, variable=True)
    indices: IndexCode
    per_layer: bool

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        k = self.kept(context.ratio, len(x))
        (up, above), (down, below) = choose_side(x, k, POSITIVE), choose_side(x, k, NEGATIVE)
        indices, mean = (down, below)
        if abs(above) >= abs(below) or np.isnan(above):
            indices, mean = (up, above)
        if not len(indices):
            return Parts(0, x[:0])
        coded = write_indices(self.indices, indices, len(x))
        return Parts(len(indices), x[:0], coded, np.array([mean], "<f4"))

    def unpack(self, parts: Parts, d: int) -> Any:
        if (
            len(parts.values)
            or parts.form
            or not (parts.count or len(parts.indices) + len(parts.scales) == 0)
        ):
            raise PayloadError(
                f"expected one number for {parts.count} indices; received a payload of another form"
            )
        if not parts.count:
            return slice(0), view_as(parts.values, "<f4")
        mean = typed_part(parts.scales, "<f4", 1, "scales")
        return read_indices(self.indices, parts.indices, parts.count, d), mean

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + max_index_bytes(self.indices, self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1 - 1 / (d * self.kept(ratio, d) ** 2)


def choose_side(x: Array, k: int, order: Order) -> tuple[Array, float]:
    """Return the indices of the k largest elements of one sign, and their mean, 0 if there are
    none.

    If the sign has fewer than k elements, all of them are returned.
    """
    indices = largest(x, k, order)
    values = read(x[indices])
    of_side = np.signbit(values) == (order is NEGATIVE)
    of_side &= values != 0
    if not of_side.all():
        indices, values = indices[beside(indices, of_side)], values[of_side]
    return indices, float(values.mean(dtype=np.float64)) if values.size else 0.0

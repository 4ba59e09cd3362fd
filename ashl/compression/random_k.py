"""Random-k: each worker sends k random elements of its own.

Rule: C(x)_j = x_j at k indices that each worker draws without replacement in each round, else 0.
E‖C(x) − x‖² = (1 − k/d)‖x‖².
Bits: those of k values, and 64 for the seed from which the receiver draws the indices; with another
`indices` code, those of the indices.

Limits: ratio = 1 is no compression. Unscaled and therefore biased, it is made for error feedback;
`subsampling` is its unbiased form.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from typing import ClassVar, Literal

from ashl.compression.common.seeded import Seeded, draw_distinct
from ashl.compression.common.sparsifier import SPARSE
from ashl.compression.contract import EncodeContext, Traits
from ashl.compression.wire.arrays import Array, to_device_index
from ashl.compression.wire.index_code import (
    VARIABLE,
    IndexCode,
    index_bytes,
    read_indices,
    write_indices,
)
from ashl.compression.wire.payload_format import Parts
from ashl.option import option


@option
class RandomK(Seeded):
    """Random elements, different on each worker."""

    code: ClassVar[int] = 51
    indices: Literal["seed"] | IndexCode

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, variable=self.indices in VARIABLE)

    def place_bytes(self, k: int, d: int) -> int:
        if self.indices == "seed":
            return super().place_bytes(k, d)
        return index_bytes(self.indices, k, d)

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        if self.indices == "seed":
            return super().read_places(buffer, k, d)
        return read_indices(self.indices, buffer, k, d)

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        if self.indices == "seed":
            return self.draw_places(x, context.stream(), context)
        k = self.kept(context.ratio, len(x))
        if self.form(k, len(x)) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        indices = to_device_index(x, draw_distinct(context.stream(), k, len(x)))
        coded = write_indices(self.indices, indices, len(x))
        return self.parts_of(x, k, x[indices], coded, context)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.error_bound(self.kept(ratio, d), d)

"""What sparse codecs have in common: a share of the elements is kept, their values in one code and their places in
another. The value code makes of a selection a chain: select, quantize, code.

Source: the split follows Sattler et al., "Sparse Binary Compression", IJCNN 2019: which elements, how fine, how coded.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ashl.compression import BodyError, Turn
from ashl.compression.aids import Aids
from ashl.compression.body import EMPTY, HEADER, Parts
from ashl.compression.code import Sparse, kept
from ashl.compression.index_code import IndexCode, index_bytes, read_indices, write_indices
from ashl.compression.value_code import ValueCode, read_values, value_bound, value_bytes, write_values
from ashl.option import Natural, Ratio, option

SPARSE, WHOLE, DENSE = 0, 1, 2  # forms of a body: some values with their places, all of them, all of them as float32


@option
class Sparsifier(Sparse, Aids):
    """The fields of all, and the writing and reading of what was selected; each says how it selects."""

    scheduled: ClassVar[bool] = True  # its ratio may follow a schedule
    ratio: Ratio
    values: ValueCode
    indices: IndexCode
    layers: bool
    warmup_epochs: Natural
    critical_ratio: Ratio | None

    def kept(self, ratio: float | None, d: int) -> int:
        """k, of a share or of the option's own."""
        return kept(self.ratio if ratio is None else ratio, d)

    def form(self, k: int, d: int) -> int:
        """How k of d elements are sent; as float32 where that is no longer."""
        return WHOLE if k == d else SPARSE if self._sparse_bytes(k, d) < 4 * d else DENSE

    def size(self, k: int, d: int) -> int:
        """Bytes of a body of k elements."""
        content = {SPARSE: self._sparse_bytes(k, d), WHOLE: value_bytes(self.values, d), DENSE: 4 * d}
        return HEADER.size + content[self.form(k, d)]

    def payload(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.kept(ratio, d)
        return 0.0 if self.form(k, d) == DENSE else 1 - k / d * (1 - value_bound(self.values, k))

    def _sparse_bytes(self, k: int, d: int) -> int:
        return value_bytes(self.values, k) + index_bytes(self.indices, k, d)

    def written(self, x: np.ndarray, k: int, places: Any, turn: Turn) -> Parts:
        """x at these k ascending places; of `places` nothing is read where all of x is sent."""
        form = self.form(k, x.size)
        if form == DENSE:
            return Parts(x.size, x, form=form)
        values, scales = write_values(self.values, x if form == WHOLE else x[places], turn)
        indices = write_indices(self.indices, places, x.size) if form == SPARSE else EMPTY
        return Parts(k, values, indices, scales, form)

    def unpack(self, parts: Parts, d: int) -> Any:
        k, form = parts.count, parts.form
        if form in (WHOLE, DENSE):
            if k != d or parts.indices.size:
                raise BodyError(f"a whole vector of {d} elements says that it holds {k}")
            code = self.values if form == WHOLE else "fp32"
            return slice(None), read_values(code, parts.values, parts.scales, d)
        if form != SPARSE or not (k or self.flags.variable):
            raise BodyError(f"what came is no sparse vector: form {form}, {k} values of {d}")
        values = read_values(self.values, parts.values, parts.scales, k)
        return read_indices(self.indices, parts.indices, k, d), values

"""Base classes of sparse codecs: select elements, quantize their values, encode their indices.

The three steps are independent, so each selection rule can have any value code and any index code.

Source: the separation follows Sattler et al., "Sparse Binary Compression", IJCNN 2019.
"""

from typing import Any, ClassVar

from ashl.compression.common.code import Sparse, kept_count
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, view_as
from ashl.compression.wire.index_code import (
    VARIABLE,
    IndexCode,
    index_bytes,
    max_index_bytes,
    read_indices,
    write_indices,
)
from ashl.compression.wire.payload_format import EMPTY, HEADER, Parts
from ashl.compression.wire.value_code import (
    ValueCode,
    read_values,
    value_bound,
    value_bytes,
    write_values,
)
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Natural, Ratio, option

# Forms of a payload: selected values with indices; all values in the value code; all as float32.
SPARSE, WHOLE, DENSE = 0, 1, 2


@option
class Share(Wrappers):
    """Fields of the density and of its schedule."""

    ratio: Ratio
    warmup_epochs: Natural
    critical_ratio: Ratio | None

    def kept(self, ratio: float | None, d: int) -> int:
        """Return k for a density; None selects the option's own density."""
        return kept_count(self.ratio if ratio is None else ratio, d)


@option
class Selection(Sparse, Wrappers):
    """Payload of a sparse codec; a subclass selects elements and encodes their indices."""

    on_host: ClassVar[bool] = False
    values: ValueCode
    per_layer: bool

    def place_bytes(self, k: int, d: int) -> int:
        """Return the size in bytes of the indices of k of d elements."""
        raise NotImplementedError

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        """Decode indices [k] as an array index.   Raises: PayloadError if they are malformed."""
        raise NotImplementedError

    def form(self, k: int, d: int) -> int:
        """Return the form of a payload of k of d elements; float32 if that is not longer."""
        return WHOLE if k == d else SPARSE if self._sparse_bytes(k, d) < 4 * d else DENSE

    def size(self, k: int, d: int) -> int:
        """Return the size in bytes of a payload of k of d elements."""
        content = {
            SPARSE: self._sparse_bytes(k, d),
            WHOLE: value_bytes(self.values, d),
            DENSE: 4 * d,
        }
        return HEADER.size + content[self.form(k, d)]

    def error_bound(self, k: int, d: int) -> float:
        """Return the error bound if the k selected elements hold at least k/d of ‖x‖²."""
        return 0.0 if self.form(k, d) == DENSE else 1 - k / d * (1 - value_bound(self.values, k))

    def _sparse_bytes(self, k: int, d: int) -> int:
        return value_bytes(self.values, k) + self.place_bytes(k, d)

    def parts_of(self, x: Array, k: int, kept: Any, coded: Any, context: EncodeContext) -> Parts:
        """Return the parts of a payload with k values `kept` of x and with encoded indices `coded`.

        If all of x is sent, `kept` and `coded` are ignored.
        """
        form = self.form(k, len(x))
        if form == DENSE:
            return Parts(len(x), x, form=form)
        if not k:
            return Parts(0, x[:0])
        values, scales = write_values(self.values, x if form == WHOLE else kept, context)
        return Parts(k, values, coded if form == SPARSE else EMPTY, scales, form)

    def unpack(self, parts: Parts, d: int) -> Any:
        k, form = parts.count, parts.form
        if form in (WHOLE, DENSE):
            if k != d or len(parts.indices):
                raise PayloadError(f"a whole vector of {d} elements declares {k} values")
            code = self.values if form == WHOLE else "fp32"
            return slice(None), read_values(code, parts.values, parts.scales, d)
        if form != SPARSE or not (k or self.traits.variable):
            raise PayloadError(
                f"expected a sparse vector; received form {form} with {k} values of {d}"
            )
        if not k:
            if len(parts.values) or len(parts.indices) or len(parts.scales):
                raise PayloadError("a sparse vector with 0 values is followed by data")
            return slice(0), view_as(parts.values, "<f4")
        values = read_values(self.values, parts.values, parts.scales, k)
        return self.read_places(parts.indices, k, d), values


@option
class Indexed(Selection):
    """Sparse codec that sends its indices in an index code."""

    promises: ClassVar[Traits]  # traits of the selection; the index code may add `variable`
    indices: IndexCode

    @property
    def traits(self) -> Traits:
        return self.promises._replace(variable=self.promises.variable or self.indices in VARIABLE)

    def place_bytes(self, k: int, d: int) -> int:
        return index_bytes(self.indices, k, d)

    def max_nbytes(self, k: int, d: int) -> int:
        """Return an upper bound in bytes of all payloads with at most k elements."""
        sparse = value_bytes(self.values, k) + max_index_bytes(self.indices, k, d)
        return HEADER.size + min(sparse, max(4 * d, value_bytes(self.values, d)))

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        return read_indices(self.indices, buffer, k, d)

    def pack_selected(self, x: Array, k: int, places: Any, context: EncodeContext) -> Parts:
        """Encode x at k ascending indices; if all of x is sent, the indices are ignored."""
        if self.form(k, len(x)) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        return self.parts_of(x, k, x[places], write_indices(self.indices, places, len(x)), context)


@option
class Sparsifier(Indexed, Share):
    """Sparse codec with a fixed density."""

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.error_bound(self.kept(ratio, d), d)

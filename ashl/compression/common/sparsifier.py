"""What sparse codecs have in common: a share of the elements is kept, their values in one code and
their places in another. The value code makes of a selection a chain: select, quantize, code.

Source: the split follows Sattler et al., "Sparse Binary Compression", IJCNN 2019: which elements,
how fine, how coded.
"""

from typing import Any, ClassVar

from ashl.compression.common.code import Sparse, kept_count
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, view_as
from ashl.compression.wire.index_code import (
    VARIABLE,
    IndexCode,
    index_bytes,
    index_room,
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

SPARSE, WHOLE, DENSE = (
    0,
    1,
    2,
)  # forms of a body: some values with their places, all of them, all of them as float32


@option
class Share(Wrappers):
    """The share of the elements that is kept, and its schedule."""

    ratio: Ratio
    warmup_epochs: Natural
    critical_ratio: Ratio | None

    def kept(self, ratio: float | None, d: int) -> int:
        """k, of a share or of the option's own."""
        return kept_count(self.ratio if ratio is None else ratio, d)


@option
class Selection(Sparse, Wrappers):
    """The writing and reading of what was selected; each says how it selects, and how its places
    are written.
    """

    on_host: ClassVar[bool] = False
    values: ValueCode
    per_layer: bool

    def place_bytes(self, k: int, d: int) -> int:
        """The size of what says where k of d elements are."""
        raise NotImplementedError

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        """The places [k] again, as an index of an array. Raises BodyError."""
        raise NotImplementedError

    def form(self, k: int, d: int) -> int:
        """How k of d elements are sent; as float32 where that is no longer."""
        return WHOLE if k == d else SPARSE if self._sparse_bytes(k, d) < 4 * d else DENSE

    def size(self, k: int, d: int) -> int:
        """Bytes of a body of k elements."""
        content = {
            SPARSE: self._sparse_bytes(k, d),
            WHOLE: value_bytes(self.values, d),
            DENSE: 4 * d,
        }
        return HEADER.size + content[self.form(k, d)]

    def loss(self, k: int, d: int) -> float:
        """The bound where k of d elements are kept that hold at least k/d of ‖x‖²."""
        return 0.0 if self.form(k, d) == DENSE else 1 - k / d * (1 - value_bound(self.values, k))

    def _sparse_bytes(self, k: int, d: int) -> int:
        return value_bytes(self.values, k) + self.place_bytes(k, d)

    def parts_of(self, x: Array, k: int, kept: Any, coded: Any, context: EncodeContext) -> Parts:
        """k values `kept` of x, whose places are written as `coded`; neither is read where all of x
        is sent.
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
                raise PayloadError(f"a whole vector of {d} elements says that it holds {k}")
            code = self.values if form == WHOLE else "fp32"
            return slice(None), read_values(code, parts.values, parts.scales, d)
        if form != SPARSE or not (k or self.traits.variable):
            raise PayloadError(f"what came is no sparse vector: form {form}, {k} values of {d}")
        if not k:
            if len(parts.values) or len(parts.indices) or len(parts.scales):
                raise PayloadError("a vector without values says something all the same")
            return slice(0), view_as(parts.values, "<f4")
        values = read_values(self.values, parts.values, parts.scales, k)
        return self.read_places(parts.indices, k, d), values


@option
class Indexed(Selection):
    """Whose places are written as they are."""

    promises: ClassVar[Traits]  # its flags, whatever the index code
    indices: IndexCode

    @property
    def traits(self) -> Traits:
        return self.promises._replace(variable=self.promises.variable or self.indices in VARIABLE)

    def place_bytes(self, k: int, d: int) -> int:
        return index_bytes(self.indices, k, d)

    def room(self, k: int, d: int) -> int:
        """Bytes that no body of k elements or fewer exceeds."""
        sparse = value_bytes(self.values, k) + index_room(self.indices, k, d)
        return HEADER.size + min(sparse, max(4 * d, value_bytes(self.values, d)))

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        return read_indices(self.indices, buffer, k, d)

    def pack_selected(self, x: Array, k: int, places: Any, context: EncodeContext) -> Parts:
        """x at these k ascending places; of `places` nothing is read where all of x is sent."""
        if self.form(k, len(x)) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        return self.parts_of(x, k, x[places], write_indices(self.indices, places, len(x)), context)


@option
class Sparsifier(Indexed, Share):
    """A share of the elements is kept."""

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.loss(self.kept(ratio, d), d)

"""Sparse codecs: select elements, encode their values, encode their indices.

The three steps are independent, so each selection rule can have any value code and any index code.

Source: the separation follows Sattler et al., "Sparse Binary Compression", IJCNN 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import (
    SEED_BYTES,
    VALUES,
    VARIABLE,
    IndexCode,
    ValueCode,
    index_bytes,
    indices_of_seed,
    max_index_bytes,
    new_seed,
    read_indices,
    read_values,
    value_bound,
    value_bytes,
    write_indices,
    write_values,
)
from ashl.compression.contract import Elements, EncodeContext, Linear, Traits, WithDensity
from ashl.compression.kernels import to_device_of, view_as
from ashl.compression.payload import EMPTY, HEADER, Parts, PayloadError
from ashl.device import to_host
from ashl.option import option

# Forms of a payload: selected values with indices; all values in the value code; all as float32.
SPARSE, WHOLE, DENSE = 0, 1, 2


class Indices(Protocol):
    """A code of k ascending indices below d."""

    def nbytes(self, k: int, d: int) -> int: ...
    def write(self, indices: Tensor, d: int) -> Tensor: ...
    def read(self, buffer: Tensor, k: int, d: int) -> Tensor: ...


class Coded(NamedTuple):
    """Indices in one of the codes of `ashl.compression.coding`."""

    code: IndexCode

    def nbytes(self, k: int, d: int) -> int:
        return index_bytes(self.code, k, d)

    def write(self, indices: Tensor, d: int) -> Tensor:
        return write_indices(self.code, indices, d)

    def read(self, buffer: Tensor, k: int, d: int) -> Tensor:
        return read_indices(self.code, buffer, k, d)


class Seed(NamedTuple):
    """Indices that both ends draw from a seed of 8 bytes in the payload."""

    seed: Tensor = EMPTY

    def nbytes(self, k: int, d: int) -> int:
        return SEED_BYTES

    def write(self, indices: Tensor, d: int) -> Tensor:
        return self.seed

    def read(self, buffer: Tensor, k: int, d: int) -> Tensor:
        return to_device_of(buffer, indices_of_seed(to_host(buffer), k, d))


class SparseFormat(NamedTuple):
    """Format of payloads of k of d elements."""

    values: ValueCode
    indices: Indices

    def form(self, k: int, d: int) -> int:
        """Return the form of a payload of k of d elements; float32 if that is not longer."""
        return WHOLE if k == d else SPARSE if self._sparse_bytes(k, d) < 4 * d else DENSE

    def nbytes(self, k: int, d: int) -> int:
        """Return the size in bytes of a payload of k of d elements."""
        content = self._sparse_bytes(k, d), value_bytes(self.values, d), 4 * d
        return HEADER.size + content[self.form(k, d)]

    def bound(self, k: int, d: int) -> float:
        """Return the error bound if the k selected elements hold at least k/d of ‖x‖²."""
        return 0.0 if self.form(k, d) == DENSE else 1 - k / d * (1 - value_bound(self.values, k))

    def _sparse_bytes(self, k: int, d: int) -> int:
        return value_bytes(self.values, k) + self.indices.nbytes(k, d)

    def pack(
        self,
        x: Tensor,
        k: int,
        select: Callable[[], Tensor],
        context: EncodeContext,
        scale: float = 1.0,
    ) -> Parts:
        """Return the parts of a payload with k elements of x, times `scale` unless all are sent.

        `select` returns the ascending indices; it is not called if all of x is sent.
        """
        d, form = len(x), self.form(k, len(x))
        if form == DENSE:
            return Parts(d, x, form=form)
        if form == WHOLE:
            values, scales = write_values(self.values, x, partial(context.words, VALUES))
            return Parts(k, values, EMPTY, scales, form)
        indices = select()
        kept = x.index_select(0, indices)
        kept = kept if scale == 1 else kept * scale
        return self.pack_elements(Elements(indices, kept), d, context)

    def pack_elements(self, elements: Elements, d: int, context: EncodeContext) -> Parts:
        """Return the parts of a payload with some of d elements, dense if that is not longer."""
        indices, values = elements
        k = len(indices)
        if self._sparse_bytes(k, d) >= 4 * d:
            return Parts(d, elements.to_dense(d), form=DENSE)
        if not k:
            return Parts(0, values)
        values, scales = write_values(self.values, values, partial(context.words, VALUES))
        return Parts(k, values, self.indices.write(indices, d), scales)

    def unpack(self, parts: Parts, d: int, may_be_empty: bool = False) -> Elements:
        """Decode the parts of a payload.   Raises: PayloadError if they are malformed."""
        k, form = parts.count, parts.form
        if form in (WHOLE, DENSE):
            if k != d or len(parts.indices):
                raise PayloadError(f"a whole vector of {d} elements declares {k} values")
            code: ValueCode = self.values if form == WHOLE else "fp32"
            return Elements(slice(None), read_values(code, parts.values, parts.scales, d))
        if form != SPARSE or not (k or may_be_empty):
            raise PayloadError(
                f"expected a sparse vector; received form {form} with {k} values of {d}"
            )
        if not k:
            if len(parts.values) or len(parts.indices) or len(parts.scales):
                raise PayloadError("a sparse vector with 0 values is followed by data")
            return Elements(slice(0), view_as(parts.values, torch.float32))
        values = read_values(self.values, parts.values, parts.scales, k)
        return Elements(self.indices.read(parts.indices, k, d), values)


def max_nbytes(values: ValueCode, indices: IndexCode, k: int, d: int) -> int:
    """Return an upper bound in bytes of all payloads with at most k elements."""
    sparse = value_bytes(values, k) + max_index_bytes(indices, k, d)
    return HEADER.size + min(sparse, max(4 * d, value_bytes(values, d)))


def most_drawn(expected: float, count: int) -> int:
    """Return the largest number of elements of a message if each of `count` is drawn by itself.

    Without this limit, one message in 10^10 would have more; it drops the last ones.
    """
    return min(count, math.ceil(expected + 7 * math.sqrt(expected)) + 16)


def unbiased_bound(k: int, d: int, coded: float) -> float:
    """Return the error bound of k elements scaled up by d/k, with the bound `coded` of values."""
    return (math.sqrt(d / k - 1) + math.sqrt(coded * d / k)) ** 2


@option
class SparseCodec(WithDensity):
    """Codec that sends k elements, in `format`; a subclass selects them, in `pack`."""

    on_host: ClassVar[bool] = False
    values: ValueCode
    per_layer: bool

    @property
    def format(self) -> SparseFormat:
        """The format of the payloads."""
        raise NotImplementedError

    def unpack(self, parts: Parts, d: int) -> Elements:
        return self.format.unpack(parts, d, self.traits.variable)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.format.nbytes(self.num_selected(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        return self.format.bound(self.num_selected(ratio, d), d)


@option
class Sparsifier(SparseCodec):
    """Codec that selects elements by a rule, and sends their indices in a code."""

    promises: ClassVar[Traits]  # traits of the selection; the index code may add `variable`
    indices: IndexCode

    @property
    def traits(self) -> Traits:
        return self.promises._replace(variable=self.promises.variable or self.indices in VARIABLE)

    @property
    def format(self) -> SparseFormat:
        return SparseFormat(self.values, Coded(self.indices))


@option
class Seeded(SparseCodec, Linear):
    """Codec that sends random elements; with a shared seed, payloads can be summed."""

    @property
    def format(self) -> SparseFormat:
        return SparseFormat(self.values, Seed())

    def pack_drawn(
        self, x: Tensor, rng: np.random.Generator, context: EncodeContext, scale: float = 1.0
    ) -> Parts:
        """Encode x at indices drawn from a new seed of `rng`, times `scale`."""
        k, d, seed = self.num_selected(context.ratio, len(x)), len(x), new_seed(rng)
        coded = SparseFormat(self.values, Seed(seed))
        return coded.pack(
            x, k, lambda: to_device_of(x, indices_of_seed(seed, k, d)), context, scale
        )

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """Return the size of the summed part of a payload in bytes: its values."""
        seed = SEED_BYTES if self.format.form(self.num_selected(ratio, d), d) == SPARSE else 0
        return self.encoded_nbytes(ratio, d) - HEADER.size - seed

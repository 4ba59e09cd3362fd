"""SparseLoCo: send the largest elements of each chunk in two bits each, with decaying error
feedback.

Rule: C(x) keeps the k' = max(1, round(ratio · chunk)) elements of largest magnitude of each chunk
of `chunk` elements; of the last chunk the same fraction, rounded up. With the feedback e ← β·e + x
− C(β·e + x) of the paper, β = `feedback_gain` = `feedback_decay`. ‖C(x) − x‖² ≤ (1 − k'/chunk)‖x‖²
before values are rounded.
Bits: those of the values, ⌈log2 chunk⌉ for each index, and 32 for k': 2 + 12 per element with chunk
= 4096. If that is not less than 32·d, the whole vector is sent.

Limits: made for the differences of many local steps (sync=local_sgd). chunk ≥ d is top-k; β = 1 is
plain error feedback.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
Differs: the paper splits each tensor into chunks; here the whole update is split, so a chunk may
contain the end of one layer and the start of the next. `compression.per_layer=true` splits each
layer.
"""

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.common.code import kept_count
from ashl.compression.common.select import largest_of_rows
from ashl.compression.common.sparsifier import DENSE, SPARSE, Selection, Share
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, as_index, beside, concatenate, is_true, read
from ashl.compression.wire.bits import pack, packed_bytes, unpack
from ashl.compression.wire.index_code import width
from ashl.compression.wire.payload_format import Parts
from ashl.compression.wire.value_code import value_bound
from ashl.option import Count, option


@option
class SparseLoCo(Selection, Share):
    """Sends the largest elements of each chunk."""

    code: ClassVar[int] = 61
    traits: ClassVar[Traits] = Traits(contraction=True)
    chunk: Annotated[Count, Field(le=2**20)]

    def kept(self, ratio: float | None, d: int) -> int:
        return self.count_selected(self.chunk_count(ratio), d)

    def chunk_count(self, ratio: float | None) -> int:
        """Return k' of a full chunk."""
        return kept_count(self.ratio if ratio is None else ratio, self.chunk)

    def count_selected(self, each: int, d: int) -> int:
        """Return k of d elements."""
        chunks, rest = divmod(d, self.chunk)
        return chunks * each + -(-each * rest // self.chunk)

    def place_bytes(self, k: int, d: int) -> int:
        return 4 + packed_bytes(k, width(self.chunk))

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        each, d = self.chunk_count(context.ratio), len(x)
        k = self.count_selected(each, d)
        if self.form(k, d) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        whole = d - d % self.chunk
        columns = (
            [largest_of_rows(x[:whole].reshape(-1, self.chunk), each).reshape(-1)] if whole else []
        )
        if d > whole:
            columns.append(largest_of_rows(x[None, whole:], k - whole // self.chunk * each)[0])
        inside = concatenate(columns)
        coded = concatenate(
            [beside(x, np.array([each], "<u4").view(np.uint8)), pack(inside, width(self.chunk))]
        )
        return self.parts_of(x, k, x[inside + self.chunk_starts(x, each, k)], coded, context)

    def chunk_starts(self, like: Array, each: int, k: int) -> Array:
        """Return the start of the chunk of each of the k values."""
        numbers = (
            torch.arange(k, device=str(like.device)) if isinstance(like, Tensor) else np.arange(k)
        )
        return numbers // each * self.chunk

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        each = int.from_bytes(read(buffer[:4]).tobytes(), "little")
        if (
            len(buffer) != self.place_bytes(k, d)
            or not 1 <= each <= self.chunk
            or self.count_selected(each, d) != k
        ):
            raise PayloadError(
                f"received {len(buffer)} bytes of indices with {each} per chunk of {self.chunk},"
                f" which do not match {k} values of {d} elements"
            )
        indices = as_index(unpack(buffer[4:], width(self.chunk), k))
        inside = (indices < self.chunk).all()
        indices += self.chunk_starts(indices, each, k)
        if not is_true(inside & (indices[-1] < d) & (indices[1:] > indices[:-1]).all()):
            raise PayloadError(f"the received indices are not {k} ascending numbers below {d}")
        return indices

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.kept(ratio, d)
        if self.form(k, d) == DENSE:
            return 0.0
        share = 1.0 if k == d else self.chunk_count(ratio) / self.chunk
        return 1 - share * (1 - value_bound(self.values, k))

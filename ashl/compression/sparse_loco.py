"""SparseLoCo: the largest of every 4096 elements, two bits each, with an error feedback that
forgets.

Rule: C(x) keeps in each chunk of `chunk` elements the k' = max(1, round(ratio · chunk)) of largest
magnitude, of the last chunk that share of it, rounded up. With the feedback e ← β·e + x − C(β·e +
x) of the paper, β = `feedback_gain` = `feedback_decay`. ‖C(x) − x‖² ≤ (1 − k'/chunk)‖x‖² before
values are rounded. Bits: those of the values, and ⌈log2 chunk⌉ for each place: 2 + 12 with 4096,
and 32 for k'.

It is made for the differences of many local steps (sync=local_sgd). Limit: chunk ≥ d is top-k; β =
1 is plain error feedback. Where that is no less than 32·d the whole vector is sent.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. Differs:
there each tensor is cut into chunks by itself; here the update as a whole is, so that a chunk may
hold the end of one layer and the start of the next. `compression.per_layer=true` cuts each layer by
itself.
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
    """Keeps a share of each chunk."""

    code: ClassVar[int] = 61
    traits: ClassVar[Traits] = Traits(contraction=True)
    chunk: Annotated[Count, Field(le=2**20)]

    def kept(self, ratio: float | None, d: int) -> int:
        return self.total(self.each(ratio), d)

    def each(self, ratio: float | None) -> int:
        """k' of a full chunk."""
        return kept_count(self.ratio if ratio is None else ratio, self.chunk)

    def total(self, each: int, d: int) -> int:
        """k of d elements."""
        chunks, rest = divmod(d, self.chunk)
        return chunks * each + -(-each * rest // self.chunk)

    def place_bytes(self, k: int, d: int) -> int:
        return 4 + packed_bytes(k, width(self.chunk))

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        each, d = self.each(context.ratio), len(x)
        k = self.total(each, d)
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
        return self.parts_of(x, k, x[inside + self.starts(x, each, k)], coded, context)

    def starts(self, like: Array, each: int, k: int) -> Array:
        """Where the chunk of each of the k values begins."""
        numbers = (
            torch.arange(k, device=str(like.device)) if isinstance(like, Tensor) else np.arange(k)
        )
        return numbers // each * self.chunk

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        each = int.from_bytes(read(buffer[:4]).tobytes(), "little")
        if (
            len(buffer) != self.place_bytes(k, d)
            or not 1 <= each <= self.chunk
            or self.total(each, d) != k
        ):
            raise PayloadError(
                f"{k} places in chunks of {self.chunk} came as {each} each in {len(buffer)} bytes"
            )
        places = as_index(unpack(buffer[4:], width(self.chunk), k))
        inside = (places < self.chunk).all()
        places += self.starts(places, each, k)
        if not is_true(inside & (places[-1] < d) & (places[1:] > places[:-1]).all()):
            raise PayloadError(f"the places that came are not {k} ascending numbers below {d}")
        return places

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.kept(ratio, d)
        if self.form(k, d) == DENSE:
            return 0.0
        share = 1.0 if k == d else self.each(ratio) / self.chunk
        return 1 - share * (1 - value_bound(self.values, k))

"""SparseLoCo: send the largest elements of each chunk in two bits each, with decaying error
feedback.

Use when: local steps with AdamW over thin links: error feedback replaces outer momentum.
Avoid when: an exchange takes less time than the local steps.
Alternatives: `topk`; `outer=nesterov` without compression.

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

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ashl.compression.coding import check_ascending, index_width, value_bound
from ashl.compression.contract import EncodeContext, Traits, selected_count
from ashl.compression.kernels import (
    as_native,
    as_tensor,
    convert,
    is_true,
    largest_of_rows,
    pack,
    packed_bytes,
    to_device_of,
    unpack,
)
from ashl.compression.payload import Parts, PayloadError, as_bytes
from ashl.compression.sparse import DENSE, SparseCodec, SparseFormat
from ashl.device import to_host
from ashl.option import Count, option


class ChunkIndices(NamedTuple):
    """Code of indices: k' of a full chunk, and each index within its chunk."""

    chunk: int
    each: int = 0  # k', for writing

    def nbytes(self, k: int, d: int) -> int:
        return 4 + packed_bytes(k, index_width(self.chunk))

    def write(self, indices: Tensor, d: int) -> Tensor:
        inside = pack(indices % self.chunk, index_width(self.chunk))
        each = as_bytes(torch.tensor([self.each], dtype=torch.int32))
        return torch.cat([to_device_of(inside, each), inside])

    def read(self, buffer: Tensor, k: int, d: int) -> Tensor:
        each = int.from_bytes(to_host(buffer[:4]).numpy().tobytes(), "little")
        if (
            len(buffer) != self.nbytes(k, d)
            or not 1 <= each <= self.chunk
            or count_selected(self.chunk, each, d) != k
        ):
            raise PayloadError(
                f"received {len(buffer)} bytes of indices with {each} per chunk of {self.chunk},"
                f" which do not match {k} values of {d} elements"
            )
        indices = convert(unpack(buffer[4:], index_width(self.chunk), k), torch.int64)
        if not is_true((indices < self.chunk).all()):
            raise PayloadError(f"received an index beyond its chunk of {self.chunk}")
        chunks = as_native(torch.arange(k, device=str(buffer.device)))
        chunks //= each
        chunks *= self.chunk
        indices += chunks
        check_ascending(as_tensor(indices), k, d)
        return as_tensor(indices)


def count_selected(chunk: int, each: int, d: int) -> int:
    """Return k of d elements with k' = `each` of a full chunk."""
    chunks, rest = divmod(d, chunk)
    return chunks * each + -(-each * rest // chunk)


@option
class SparseLoCo(SparseCodec):
    """Sends the largest elements of each chunk."""

    code: ClassVar[int] = 61
    traits: ClassVar[Traits] = Traits(contraction=True)
    chunk: Annotated[Count, Field(le=2**20)]

    @property
    def format(self) -> SparseFormat:
        return SparseFormat(self.values, ChunkIndices(self.chunk))

    def num_selected(self, ratio: float | None, d: int) -> int:
        return count_selected(self.chunk, self.chunk_count(ratio), d)

    def chunk_count(self, ratio: float | None) -> int:
        """Return k' of a full chunk."""
        return selected_count(self.ratio if ratio is None else ratio, self.chunk)

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        each, k = self.chunk_count(context.ratio), self.num_selected(context.ratio, len(x))

        def select() -> Tensor:
            full = len(x) // self.chunk
            whole = full * self.chunk
            inside = largest_of_rows(x[:whole].view(-1, self.chunk), each) if full else x[:0, None]
            starts = torch.arange(full, device=str(x.device))[:, None] * self.chunk
            pieces = [(inside + starts).view(-1).long()]
            if k > full * each:
                pieces.append(largest_of_rows(x[None, whole:], k - full * each)[0] + whole)
            return torch.cat(pieces)

        coded = self.format._replace(indices=ChunkIndices(self.chunk, each))
        return coded.pack(x, k, select, context)

    def bound(self, ratio: float | None, d: int) -> float:
        k = self.num_selected(ratio, d)
        if self.format.form(k, d) == DENSE:
            return 0.0
        share = 1.0 if k == d else self.chunk_count(ratio) / self.chunk
        return 1 - share * (1 - value_bound(self.values, k))

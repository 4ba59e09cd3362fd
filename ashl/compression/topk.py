"""Top-K: the k elements of largest magnitude are sent as they are, with their places; the others are not.

Rule: C(x)_j = x_j for the k largest |x_j| of the whole vector, else 0, with k = max(1, round(ratio · d)). Of equal
magnitudes the first are kept. ‖C(x) − x‖² ≤ (1 − k/d)‖x‖². Bits: 32·k and those of the places. Where that is no less
than 32·d the whole vector is sent, which loses nothing.

Limit: ratio = 1 is no compression. A NaN or an infinity counts as large and is sent among the first, as torch.topk has
it: a run that diverges is then seen at the server, where a residual would hide it, and bodies keep their size.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; with error feedback Stich
et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from ashl.compression import BodyError, Flags
from ashl.compression.body import HEADER, read_body, write_body
from ashl.compression.index_code import INDEX_CODES, IndexCode, index_bytes, read_indices, write_indices
from ashl.compression.select import largest
from ashl.option import option
from ashl.runtime.effects import Hollow

DENSE = 0  # kinds of a body: the whole vector, or with indices in the code of this number
SPARSE: dict[int, IndexCode] = dict(enumerate(INDEX_CODES, start=1))


@option
class TopK:
    """Keeps a share of the elements."""

    flags: ClassVar[Flags] = Flags(contraction=True)
    ratio: Annotated[float, Field(gt=0, le=1)]
    indices: IndexCode
    feedback: bool  # read by `with_feedback`

    def kept(self, ratio: float | None, d: int) -> int:
        """k; d where the whole vector is no longer than k values with their places."""
        share = self.ratio if ratio is None else ratio
        if not 0 < share <= 1:
            raise ValueError(f"a compression ratio of {share}: it is the kept share, above 0 and at most 1")
        k = max(1, round(share * d))
        return k if 4 * k + index_bytes(self.indices, k, d) < 4 * d else d

    def payload(self, ratio: float | None, d: int) -> int:
        k = self.kept(ratio, d)
        return HEADER.size + 4 * k + (index_bytes(self.indices, k, d) if k < d else 0)

    def encode(self, sender: Any, x: Any, ratio: float | None = None) -> tuple[Any, Any]:
        if isinstance(x, Hollow):
            return sender, Hollow(self.payload(ratio, x.nbytes // 4))
        values, d = x.numpy(), x.numel()
        k = self.kept(ratio, d)
        if k == d:
            return sender, write_body(DENSE, d, values)
        places = largest(values, k)
        kind = 1 + INDEX_CODES.index(self.indices)
        return sender, write_body(kind, d, values[places], write_indices(self.indices, places, d))

    def decode(self, receiver: Any, body: Any, d: int) -> tuple[Any, Any]:
        if isinstance(body, Hollow):
            return receiver, Hollow(4 * d)
        places, values = content(body, d)
        x = torch.zeros(d)
        x.numpy()[places] = values
        return receiver, x

    def undo(self, sender: Any, body: Any) -> Any:
        return sender

    def add(self, out: Any, body: Any, scale: float = 1.0) -> None:
        places, values = content(body, out.numel())
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            out.numpy()[places] += np.float32(scale) * values


def content(body: Any, d: int) -> tuple[np.ndarray | slice, np.ndarray]:
    """(places, values) of a body. Raises BodyError."""
    kind, values, rest = read_body(body, d)
    if kind == DENSE and values.size == d and not rest.size:
        return slice(None), values
    if kind not in SPARSE:
        raise BodyError(f"what came is no Top-K vector of {d} elements: kind {kind}, {values.size} values")
    return read_indices(SPARSE[kind], rest, values.size, d), values

"""Strom's fixed threshold: send each element beyond ±τ as ±τ, index and sign in one word.

Rule: with v = x + e of error feedback, C(v)_j = τ·sign(v_j) if |v_j| > τ, else 0.
Bits: 32 for the scale, and 32 for each element sent: 31 for its index and 1 for its sign
(`indices=words`). With an index code, 1 for its sign and those of the code. If 2 bits for every
element are fewer, or with `dense=true`, each element is sent as 0, τ or −τ, which is the form of
MXNet.

Limits: ‖C(x) − x‖ ≤ ‖x‖, but it is not a contraction: if all |x_j| ≤ τ, no element is sent. With
error feedback, |e_j| ≤ τ while |x_j| ≤ τ: the residual stays bounded, and everything is sent in the
end. An element whose updates exceed τ drains by only τ per message, and lags behind. τ has the unit
of the exchanged vectors, gradients or differences between models, and depends on the model. If an
element is NaN or infinite, all elements that are sent become NaN.

Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
2015; dense form: MXNet's 2-bit gradient compression, 2017.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Sparse
from ashl.compression.contract import EncodeContext, PayloadError, Traits
from ashl.compression.wire.arrays import Array, as_bytes, is_true, look_up, ops, read, where_true
from ashl.compression.wire.bits import BLOCK, pack, pack_truths, packed_bytes, unpack, unpack_truths
from ashl.compression.wire.index_code import index_bytes, read_indices, write_indices
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Positive, option

WORDS, INDICES, DENSE = 0, 1, 2  # forms of a payload
SIGN = 1 << 31  # bit of the sign in a word
LARGEST = np.float32(3.4028235e38)  # largest float32


@option
class Strom(Sparse, Wrappers):
    """Sends ±τ."""

    code: ClassVar[int] = 30
    on_host: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(drains=True, variable=True)
    threshold: Positive
    indices: Literal["words", "int32", "packed", "bitmap", "golomb"]
    dense: bool

    def pack(self, x: Array, context: EncodeContext) -> Parts:
        indices, finite = beyond(x, self.threshold)
        scales = np.array([self.threshold if finite else np.nan], "<f4")
        negative = x[indices] < 0
        k, d = len(indices), len(x)
        if self.dense or self._sparse_bytes(k, d) >= packed_bytes(d, 2):
            codes = ops(x).zeros_like(x, dtype=ops(x).uint8)
            codes[indices] = as_bytes(negative) + 1
            return Parts(d, pack(codes, 2), scales=scales, form=DENSE)
        if self.indices == "words":
            return Parts(k, pack(indices | negative * SIGN, 32), scales=scales, form=WORDS)
        return Parts(
            k, pack_truths(negative), write_indices(self.indices, indices, d), scales, INDICES
        )

    def unpack(self, parts: Parts, d: int) -> Any:
        (tau,) = typed_part(read(parts.scales), "<f4", 1, "scales").tolist()
        k, form = parts.count, parts.form
        if form == DENSE and k == d:
            _expect(parts, packed_bytes(d, 2), indices=False)
            codes = unpack(parts.values, 2, d)
            if not is_true(codes.max() <= 2):
                raise PayloadError("received an element of 3; elements of two bits are 0, 1 or 2")
            return slice(None), look_up(np.array([0, tau, -tau], np.float32), codes)
        if form == WORDS:
            _expect(parts, 4 * k, indices=False)
            words = typed_part(parts.values, "<i4", k, "words")
            return read_indices("int32", as_bytes(words & SIGN - 1), k, d), signs_of_sent(
                words < 0, tau
            )
        if form != INDICES or self.indices == "words":
            raise PayloadError(
                f"expected elements of ±τ; received form {form} with {k} values of {d}"
            )
        _expect(parts, -(-k // 8), indices=True)
        negative = unpack_truths(parts.values, k)
        return read_indices(self.indices, parts.indices, k, d), signs_of_sent(negative, tau)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 + packed_bytes(d, 2)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1.0

    def _sparse_bytes(self, k: int, d: int) -> int:
        return 4 * k if self.indices == "words" else -(-k // 8) + index_bytes(self.indices, k, d)


def signs_of_sent(negative: Array, tau: float) -> Array:
    """Return −τ for negative elements, else τ."""
    if isinstance(negative, Tensor):
        return torch.where(negative, -tau, tau)
    return np.where(negative, np.float32(-tau), np.float32(tau))


def beyond(x: Array, threshold: float) -> tuple[Array, bool]:
    """Return the ascending indices of elements with |x| > threshold or NaN, and whether x is
    finite.
    """
    if isinstance(x, Tensor):
        return where_true(~(x.abs() <= float(np.float32(threshold)))), is_true(x.isfinite().all())
    buffer, found = np.empty(BLOCK, np.float32), []
    finite = True
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        size = np.abs(part, out=buffer[: part.size])
        indices = np.flatnonzero(~(size <= np.float32(threshold)))
        finite = finite and bool((size[indices] <= LARGEST).all())
        found.append(indices + start)
    return np.concatenate(found), finite


def _expect(parts: Parts, size: int, indices: bool) -> None:
    if len(parts.values) != size or (len(parts.indices) and not indices):
        raise PayloadError(
            f"received {len(parts.values)} bytes of values and {len(parts.indices)} of indices,"
            f" which do not hold {parts.count} signs"
        )

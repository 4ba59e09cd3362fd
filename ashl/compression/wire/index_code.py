"""Codes of the indices of the selected elements: k ascending indices below d.

int32: 32 bits per index; nothing to compute. packed: ⌈log2 d⌉ bits per index. bitmap: one bit per
element; shorter than packed if k/d > 1/⌈log2 d⌉, which is 4-5 % for millions of elements. golomb:
for each gap between selected elements, its low b bits, and the other bits in unary. If each element
is selected independently, its size is within 2 % of the entropy. The size depends on the indices,
and `index_bytes` is an upper bound.

Format of golomb: b as one byte, the low bits of all gaps, then the unary numbers of all gaps, so
that both can be decoded as whole arrays.

Source: Golomb, "Run-Length Encodings", 1966, with the b of Sattler et al., "Sparse Binary
Compression", IJCNN 2019.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import PayloadError
from ashl.compression.wire.arrays import (
    Array,
    beside,
    concatenate,
    is_true,
    read,
    view_as,
    where_true,
)
from ashl.compression.wire.bits import pack, pack_truths, packed_bytes, unpack, unpack_truths

IndexCode = Literal["int32", "packed", "bitmap", "golomb"]
INDEX_CODES: Sequence[IndexCode] = ("int32", "packed", "bitmap", "golomb")
VARIABLE: Sequence[IndexCode] = ("golomb",)  # codes whose size depends on the indices


def width(d: int) -> int:
    """Return ⌈log2 d⌉, at least 1."""
    return max(1, (d - 1).bit_length())


def low_bits(k: int, d: int) -> int:
    """Return b of Golomb's code: 2^b is the best power of two for the gaps of k of d elements."""
    if k == d:
        return 0
    golden = (math.sqrt(5) - 1) / 2  # φ − 1
    return max(0, 1 + math.floor(math.log2(math.log(golden) / math.log1p(-k / d))))


def index_bytes(code: IndexCode, k: int, d: int) -> int:
    """Return the size in bytes of k indices below d; an upper bound for golomb."""
    if code == "golomb":
        return 1 + packed_bytes(k, b := low_bits(k, d)) + _unary_bytes(k, d, b) if k else 0
    return {"int32": 4 * k, "packed": packed_bytes(k, width(d)), "bitmap": -(-d // 8)}[code]


def max_index_bytes(code: IndexCode, k: int, d: int) -> int:
    """Return an upper bound in bytes of at most k indices.

    Golomb's upper bound is not monotonic: it falls by up to 7 % where a larger k makes b smaller.
    """
    if code == "golomb":
        return -(-27 * index_bytes(code, k, d) // 25) + 1
    return index_bytes(code, k, d)


def write_indices(code: IndexCode, indices: Array, d: int) -> Array:
    """Encode indices as an array of at most `index_bytes` bytes."""
    if code == "int32":
        if isinstance(indices, Tensor):
            return indices.to(torch.int32)
        return indices.astype("<i4").view(np.uint8)
    if code == "packed":
        return pack(indices, width(d))
    if code == "golomb":
        return _write_golomb(indices, d)
    return _bitmap(indices, d)


def read_indices(code: IndexCode, buffer: Array, k: int, d: int) -> Array:
    """Decode k ascending indices.

    Raises: PayloadError if their size is wrong, or if they are not ascending or not below d.
    """
    size = index_bytes(code, k, d)
    if len(buffer) > size or (len(buffer) < size and code not in VARIABLE):
        raise PayloadError(
            f"{k} {code} indices below {d} take {size} bytes; received {len(buffer)}"
        )
    if code == "int32":
        indices = view_as(buffer, "<i4")
    elif code == "packed":
        indices = unpack(buffer, width(d), k)
    elif code == "golomb":
        indices = _read_golomb(buffer, k, d)
    else:
        indices = where_true(unpack_truths(buffer, d))
    if k == 0 and not len(indices):
        return indices if isinstance(indices, Tensor) else np.empty(0, np.int64)
    if len(indices) != k or not is_true(
        # one condition, because each transfer from a device takes time
        (indices[0] >= 0) & (indices[-1] < d) & (indices[1:] > indices[:-1]).all()
    ):
        raise PayloadError(f"the received indices are not {k} ascending numbers below {d}")
    return indices


def _unary_bytes(k: int, d: int, b: int) -> int:
    """Return an upper bound in bytes of the unary numbers: k ends, and gaps that sum to at most d −
    k.
    """
    return -(-(k + ((d - k) >> b)) // 8)


def _bitmap(indices: Array, size: int) -> Array:
    """Return a stream of `size` bits with ones at these indices."""
    if isinstance(indices, Tensor):
        mask = torch.zeros(size, dtype=torch.bool, device=str(indices.device)).index_fill_(
            0, indices, True
        )
    else:
        mask = np.zeros(size, bool)
        mask[indices] = True
    return pack_truths(mask)


def _write_golomb(indices: Array, d: int) -> Array:
    if not len(indices):
        return np.empty(0, np.uint8)
    b = low_bits(len(indices), d)
    gaps = indices.clone() if isinstance(indices, Tensor) else indices.astype(np.int64)
    gaps[1:] -= indices[:-1]
    gaps[1:] -= 1
    low = [pack(gaps, b)] if b else []
    gaps >>= b
    gaps += 1
    ends = gaps.cumsum(0)
    unary = _bitmap(ends - 1, int(read(ends[-1:])[0]))
    return concatenate([beside(unary, np.array([b], np.uint8)), *low, unary])


def _read_golomb(buffer: Array, k: int, d: int) -> Array:
    if not k:
        return np.empty(0, np.int64)
    b = int(read(buffer[:1])[0]) if len(buffer) else -1
    if b != low_bits(k, d) or len(buffer) < (first := 1 + packed_bytes(k, b)):
        raise PayloadError(
            f"received {k} golomb indices below {d} with {b} low bits in {len(buffer)} bytes"
        )
    ends = where_true(unpack_truths(buffer[first:], 8 * (len(buffer) - first)))
    if len(ends) != k or not is_true(ends[-1] // 8 == len(buffer) - first - 1):
        raise PayloadError(f"expected {k} golomb indices below {d}; received {len(ends)}")
    # The bits below an end are the ends before it and the high bits of all gaps up to it.
    before = beside(ends, np.arange(k))
    indices = ends - before
    indices <<= b
    indices += before
    if b:
        low = unpack(buffer[1:first], b, k)
        indices += low.cumsum(0) if isinstance(low, Tensor) else low.cumsum(dtype=np.int64)
    return indices

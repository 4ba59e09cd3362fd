"""How the places of the kept elements are written: k ascending indices below d.

int32: 32 bits an index, nothing to compute. packed: ⌈log2 d⌉ bits an index. bitmap: one bit an element, shorter than
packed where k/d > 1/⌈log2 d⌉, which is 4-5 % for millions of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ashl.compression import BodyError
from ashl.compression.bits import pack, packed_bytes, unpack

IndexCode = Literal["int32", "packed", "bitmap"]
INDEX_CODES: Sequence[IndexCode] = ("int32", "packed", "bitmap")


def width(d: int) -> int:
    """⌈log2 d⌉, and 1 where d is 1."""
    return max(1, (d - 1).bit_length())


def index_bytes(code: IndexCode, k: int, d: int) -> int:
    """The size of k indices below d."""
    return {"int32": 4 * k, "packed": packed_bytes(k, width(d)), "bitmap": -(-d // 8)}[code]


def write_indices(code: IndexCode, indices: np.ndarray, d: int) -> np.ndarray:
    """uint8 [index_bytes]."""
    if code == "int32":
        return indices.astype("<i4").view(np.uint8)
    if code == "packed":
        return pack(indices, width(d))
    mask = np.zeros(d, bool)
    mask[indices] = True
    return np.packbits(mask, bitorder="little")


def read_indices(code: IndexCode, buffer: np.ndarray, k: int, d: int) -> np.ndarray:
    """The indices [k], ascending. Raises BodyError where they are of another size, out of order or beyond d."""
    if buffer.size != index_bytes(code, k, d):
        raise BodyError(f"{k} {code} indices below {d} take {index_bytes(code, k, d)} bytes, but {buffer.size} came")
    if code == "int32":
        indices = buffer.view("<i4")
    elif code == "packed":
        indices = unpack(buffer, width(d), k)
    else:
        indices = np.flatnonzero(np.unpackbits(buffer, count=d, bitorder="little").view(bool))
    if k == 0 and not indices.size:
        return np.empty(0, np.int64)
    if indices.size != k or indices[0] < 0 or indices[-1] >= d or not (indices[1:] > indices[:-1]).all():
        raise BodyError(f"the indices that came are not {k} ascending numbers below {d}")
    return indices

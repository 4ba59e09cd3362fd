"""The flat buffer of an encoded vector: a header of 16 bytes, then float32 values, then what the kind adds to them.

     0  signature and version
     4  kind: how the rest is to be read, and how long it is
     8  d, the elements of the vector
    12  k, the values that follow

All numbers are little-endian. Values come first so that they are aligned whatever follows.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ashl.compression import BodyError

HEADER = struct.Struct("<4sIII")
SIGNATURE = b"ASC\x01"


def write_body(kind: int, d: int, values: np.ndarray, extra: np.ndarray | None = None) -> Tensor:
    """A new body: header, `values` [k] float32, and `extra`, uint8."""
    end = HEADER.size + values.nbytes
    body = np.empty(end + (0 if extra is None else extra.size), np.uint8)
    HEADER.pack_into(body.data, 0, SIGNATURE, kind, d, values.size)
    body[HEADER.size : end].view("<f4")[:] = values
    if extra is not None:
        body[end:] = extra
    return torch.from_numpy(body)


def read_body(body: Any, d: int) -> tuple[int, np.ndarray, np.ndarray]:
    """(kind, values [k], the bytes after them), views of the body. Raises BodyError unless it is one of d elements."""
    if not isinstance(body, Tensor) or body.dtype != torch.uint8 or body.dim() != 1 or body.numel() < HEADER.size:
        raise BodyError(f"what came is no encoded vector: {HEADER.size} bytes of header or more were expected")
    memory = np.ascontiguousarray(body.numpy())
    signature, kind, elements, count = HEADER.unpack_from(memory.data)
    if signature != SIGNATURE:
        raise BodyError("what came was encoded by another version or program")
    if elements != d:
        raise BodyError(f"an encoded vector of {elements} elements came where {d} were expected")
    end = HEADER.size + 4 * count
    if not 1 <= count <= d or end > memory.size:
        raise BodyError(f"an encoded vector says that it holds {count} values of {d}, in {memory.size} bytes")
    return kind, memory[HEADER.size : end].view("<f4"), memory[end:]

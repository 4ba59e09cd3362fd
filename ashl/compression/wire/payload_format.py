"""The flat buffer of an encoded vector: a header of 20 bytes, then scales, values and places, each
as bytes.

     0  version
     1  the codec: its `code`
     2  form: how the codec is to read the rest, where it has several ways
     3  the element type of the vector: 0, float32
     4  d, the elements of the vector
     8  k, the values that follow
    12  bytes of scales
    16  bytes of values; what follows them are the places of the values

All numbers are little-endian. What is float32 is aligned as long as scales are.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import PayloadError
from ashl.compression.wire.arrays import Array, as_bytes, beside, view_as
from ashl.errors import UsageError
from ashl.learn.device import at_home, to_host

HEADER = struct.Struct("<BBBBIIII")
VERSION = 0xA2
FLOAT32 = 0
MOST = 2**32 - 1  # of whatever the header counts
EMPTY = np.empty(0, np.uint8)


class Parts(NamedTuple):
    """What a body holds. When written: arrays of any type, on a device beside tensors; when read:
    uint8 views of the body. 0 ≤ count ≤ d.
    """

    count: int
    values: Array
    indices: Array = EMPTY
    scales: Array = EMPTY
    form: int = 0


class Split(NamedTuple):
    """Where the bytes of a body go."""

    headers: int
    scales: int
    values: int
    indices: int


def write_payload(code: int, d: int, parts: Parts) -> Tensor:
    """A new body, uint8, where the values lie. Raises UsageError where it is longer than its header
    can say.
    """
    count, values, indices, scales, form = parts
    if max(d, scales.nbytes, values.nbytes) > MOST:
        raise UsageError(
            f"a message of {d} elements has {values.nbytes} bytes of values, and its header counts"
            f" up to {MOST}; take compression=none, or a smaller model"
        )
    said = VERSION, code, form, FLOAT32, d, count, scales.nbytes, values.nbytes
    if isinstance(values, Tensor):
        head = np.frombuffer(bytearray(HEADER.pack(*said)), np.uint8)
        there = [beside(values, part) for part in (head, scales, values, indices)]
        return torch.cat([as_bytes(part) for part in there])
    payload = np.empty(HEADER.size + scales.nbytes + values.nbytes + indices.nbytes, np.uint8)
    HEADER.pack_into(payload.data, 0, *said)
    start = HEADER.size
    for part in (scales, values, indices):
        if part.nbytes:
            payload[start : start + part.nbytes].view(part.dtype)[:] = part.reshape(-1)
            start += part.nbytes
    return torch.from_numpy(payload)


def read_payload(payload: Any, code: int, d: int) -> Parts:
    """What a body holds. Raises BodyError unless it is one of this codec with d elements."""
    if (
        not isinstance(payload, Tensor)
        or payload.dtype != torch.uint8
        or payload.dim() != 1
        or payload.numel() < HEADER.size
    ):
        raise PayloadError(
            f"what came is no encoded vector: {HEADER.size} bytes of header or more were expected"
        )
    memory = np.ascontiguousarray(payload.numpy()) if at_home(payload) else payload
    said = header_of(payload) if isinstance(memory, Tensor) else HEADER.unpack_from(memory.data)
    version, codec, form, dtype, elements, count, scale_bytes, value_bytes = said
    if version != VERSION:
        raise PayloadError("what came was encoded by another version or program")
    if dtype != FLOAT32:
        raise PayloadError(
            f"an encoded vector of element type {dtype} came where float32 was expected"
        )
    if codec != code:
        raise PayloadError(f"what came was encoded by codec {codec} where {code} was expected")
    if elements != d:
        raise PayloadError(f"an encoded vector of {elements} elements came where {d} were expected")
    values = HEADER.size + scale_bytes
    indices = values + value_bytes
    if count > d or indices > len(memory):
        raise PayloadError(
            f"an encoded vector of {d} elements says that it holds {count} values and {scale_bytes}"
            f" and {value_bytes} bytes, in {len(memory)} bytes"
        )
    return Parts(
        count, memory[values:indices], memory[indices:], memory[HEADER.size : values], form
    )


def header_of(payload: Tensor) -> tuple[int, ...]:
    """The numbers of a body's header, which the host reads."""
    return HEADER.unpack(to_host(payload[: HEADER.size]).numpy().tobytes())


def typed_part(part: Array, dtype: str, count: int, what: str) -> Array:
    """`count` elements of a numpy type, as a view of a body's bytes. Raises BodyError where there
    are more or fewer.
    """
    size = np.dtype(dtype).itemsize
    if len(part) != size * count:
        raise PayloadError(
            f"an encoded vector holds {len(part)} bytes of {what} where {size * count} were"
            " expected"
        )
    return view_as(part, dtype)

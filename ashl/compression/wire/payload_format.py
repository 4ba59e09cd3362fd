"""Format of a payload: a header of 20 bytes, then scales, values and indices, each as bytes.

     0  version
     1  the `code` of the codec
     2  form: which of its formats the codec has used
     3  element type of the vector: 0 is float32
     4  d, the number of elements of the vector
     8  k, the number of values
    12  size of the scales in bytes
    16  size of the values in bytes; the remaining bytes are the indices

All numbers are little-endian. float32 values are aligned if the size of the scales is a multiple of
4.
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
MOST = 2**32 - 1  # largest number in the header
EMPTY = np.empty(0, np.uint8)


class Parts(NamedTuple):
    """Content of a payload, 0 ≤ count ≤ d.

    For writing: arrays of any type, or tensors on a device. From reading: uint8 views of the
    payload.
    """

    count: int
    values: Array
    indices: Array = EMPTY
    scales: Array = EMPTY
    form: int = 0


class Split(NamedTuple):
    """Bytes of a payload by purpose."""

    headers: int
    scales: int
    values: int
    indices: int


def write_payload(code: int, d: int, parts: Parts) -> Tensor:
    """Return a new payload, uint8, on the device of the values.

    Raises: UsageError if a size exceeds the range of the header.
    """
    count, values, indices, scales, form = parts
    if max(d, scales.nbytes, values.nbytes) > MOST:
        raise UsageError(
            f"a message of {d} elements has {values.nbytes} bytes of values, but its header counts"
            f" up to {MOST}; set compression=none, or use a smaller model"
        )
    fields = VERSION, code, form, FLOAT32, d, count, scales.nbytes, values.nbytes
    if isinstance(values, Tensor):
        header = np.frombuffer(bytearray(HEADER.pack(*fields)), np.uint8)
        on_device = [beside(values, part) for part in (header, scales, values, indices)]
        return torch.cat([as_bytes(part) for part in on_device])
    payload = np.empty(HEADER.size + scales.nbytes + values.nbytes + indices.nbytes, np.uint8)
    HEADER.pack_into(payload.data, 0, *fields)
    start = HEADER.size
    for part in (scales, values, indices):
        if part.nbytes:
            payload[start : start + part.nbytes].view(part.dtype)[:] = part.reshape(-1)
            start += part.nbytes
    return torch.from_numpy(payload)


def read_payload(payload: Any, code: int, d: int) -> Parts:
    """Return the parts of a payload.

    Raises: PayloadError unless it is a payload of this codec with d elements.
    """
    if (
        not isinstance(payload, Tensor)
        or payload.dtype != torch.uint8
        or payload.dim() != 1
        or payload.numel() < HEADER.size
    ):
        raise PayloadError(
            f"expected an encoded vector with a header of {HEADER.size} bytes; received a value"
            " of another type or size"
        )
    memory = np.ascontiguousarray(payload.numpy()) if at_home(payload) else payload
    fields = header_of(payload) if isinstance(memory, Tensor) else HEADER.unpack_from(memory.data)
    version, codec, form, dtype, elements, count, scale_bytes, value_bytes = fields
    if version != VERSION:
        raise PayloadError("the received payload was encoded by another version or program")
    if dtype != FLOAT32:
        raise PayloadError(f"expected an encoded vector of float32; received element type {dtype}")
    if codec != code:
        raise PayloadError(f"expected a payload of codec {code}; received one of codec {codec}")
    if elements != d:
        raise PayloadError(f"expected an encoded vector of {d} elements; received {elements}")
    values = HEADER.size + scale_bytes
    indices = values + value_bytes
    if count > d or indices > len(memory):
        raise PayloadError(
            f"an encoded vector of {d} elements declares {count} values, {scale_bytes} bytes of"
            f" scales and {value_bytes} bytes of values, in {len(memory)} bytes"
        )
    return Parts(
        count, memory[values:indices], memory[indices:], memory[HEADER.size : values], form
    )


def header_of(payload: Tensor) -> tuple[int, ...]:
    """Return the numbers of a payload's header, read by the host."""
    return HEADER.unpack(to_host(payload[: HEADER.size]).numpy().tobytes())


def typed_part(part: Array, dtype: str, count: int, what: str) -> Array:
    """Return `count` elements of a NumPy type as a view of bytes of a payload.

    Raises: PayloadError if there are more or fewer.
    """
    size = np.dtype(dtype).itemsize
    if len(part) != size * count:
        raise PayloadError(
            f"expected {size * count} bytes of {what} in an encoded vector; received {len(part)}"
        )
    return view_as(part, dtype)

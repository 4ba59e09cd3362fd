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

import torch
from torch import Tensor

from ashl.compression.kernels import to_device_of, view_as
from ashl.device import is_on_host, to_host
from ashl.errors import AshlError, UsageError

HEADER = struct.Struct("<BBBBIIII")
VERSION = 0xA2
FLOAT32 = 0
MOST = 2**32 - 1  # largest number in the header
EMPTY = torch.empty(0, dtype=torch.uint8)


class PayloadError(AshlError):
    """The received payload is not one that this codec can decode."""


class Parts(NamedTuple):
    """Content of a payload, 0 ≤ count ≤ d.

    For writing: tensors of any type, of which the values are on the vector's device. From reading:
    uint8 views of the payload.
    """

    count: int
    values: Tensor
    indices: Tensor = EMPTY
    scales: Tensor = EMPTY
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
    header = tensor_of_bytes(HEADER.pack(*fields))
    content = [part for part in (header, scales, values, indices) if part.numel()]
    return torch.cat([as_bytes(to_device_of(values, part)) for part in content])


def tensor_of_bytes(content: bytes) -> Tensor:
    """Return a copy of bytes, uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_bytes(part: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8."""
    if not part.numel():
        return part.new_empty(0, dtype=torch.uint8)
    return part.reshape(-1).view(torch.uint8)


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
    payload = payload.contiguous()
    version, codec, form, dtype, elements, count, scale_bytes, value_bytes = header_of(payload)
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
    if count > d or indices > len(payload):
        raise PayloadError(
            f"an encoded vector of {d} elements declares {count} values, {scale_bytes} bytes of"
            f" scales and {value_bytes} bytes of values, in {len(payload)} bytes"
        )
    return Parts(
        count, payload[values:indices], payload[indices:], payload[HEADER.size : values], form
    )


def header_of(payload: Tensor) -> tuple[int, ...]:
    """Return the numbers of a payload's header, read by the host."""
    head = payload if is_on_host(payload) else to_host(payload[: HEADER.size])
    return HEADER.unpack_from(head.numpy().data)


def typed_part(part: Tensor, dtype: torch.dtype, count: int, what: str) -> Tensor:
    """Return `count` elements of a type as a view of bytes of a payload.

    Raises: PayloadError if there are more or fewer.
    """
    size = dtype.itemsize * count
    if len(part) != size:
        raise PayloadError(
            f"expected {size} bytes of {what} in an encoded vector; received {len(part)}"
        )
    return view_as(part, dtype)


def all_values(parts: Parts, d: int, form: int = 0) -> Tensor:
    """Return the values of a payload that has a value for all d elements, and no indices.

    Raises: PayloadError for any other payload.
    """
    if parts.count != d or parts.form != form or len(parts.indices):
        raise PayloadError(
            f"expected a vector of {d} elements; received form {parts.form} with"
            f" {parts.count} values"
        )
    return parts.values

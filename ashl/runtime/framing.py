"""Encode and decode the headers of messages between processes.

A message is a header of 26 int64, then the payload as uint8, if there is one. Numbers of `meta`
that do not fit into the header follow it, ahead of the payload. Nothing is unpickled.

| word | content |
| --- | --- |
| 0 | magic number with the version of the format |
| 1, 2 | the tag's name, up to 16 ASCII bytes |
| 3, 4 | the tag's stage and iteration |
| 5 | kind: a message, a goodbye, or a grant, which begins the transfer of a payload |
| 6, 7 | bytes of the payload, position of its element type in `DTYPES` |
| 8 | number of the sender's next pause for a checkpoint |
| 9 | count of the numbers in `meta` |
| 10-23 | the first 14 numbers, as the bits of float64 |
| 24, 25 | receipt: payloads received from the addressed rank, ns from header to end of the last |

`ashl.runtime.transport` explains grants and receipts. If the pause differs from the receiver's, the
receiver drops an earlier message, and keeps a later one until its own pause. `decode` checks every
value against bounds before memory is allocated for it.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.runtime.effects import Tag

FIXED_FIELDS = struct.Struct("<q16s7q")  # words 0 to 9
NUMBERS_IN_HEADER = 14
MAX_NUMBERS = 4096  # bound on the numbers in `meta`, which may list the members of a group
# word of the receipt, which is filled in as the header leaves
RECEIPT = FIXED_FIELDS.size // 8 + NUMBERS_IN_HEADER
HEADER_WORDS = RECEIPT + 2
MAGIC = 0x4153484C0003
MESSAGE, BYE, GRANT = range(3)
HEADERS, PAYLOADS = 1, 2  # gloo tags of headers and of payloads
DTYPES = (
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
)
NO_PAYLOAD = len(DTYPES)


class FramingError(Exception):
    """A header that no rank of this program sends."""


class Header(NamedTuple):
    kind: int
    tag: Tag
    nbytes: int
    dtype: torch.dtype | None  # None = no payload
    meta: tuple[float, ...]
    pauses: int = 0
    receipt: tuple[int, int] = (0, 0)


def encode(
    kind: int, tag: Tag, payload: Any = None, meta: tuple[float, ...] = (), pauses: int = 0
) -> Tensor:
    """Return a header with the numbers that follow it, and a receipt of zeros. Raises ValueError if
    the tag's name is too long or `meta` has too many numbers.
    """
    name, stage, iteration = tag
    text = name.encode("ascii")
    if len(text) > 16 or len(meta) > MAX_NUMBERS:
        raise ValueError(f"tag {name!r} with {len(meta)} numbers does not fit a header")
    nbytes, dtype = 0, NO_PAYLOAD
    if payload is not None:
        nbytes, dtype = payload.nbytes, DTYPES.index(payload.dtype)
    fixed = FIXED_FIELDS.pack(MAGIC, text, stage, iteration, kind, nbytes, dtype, pauses, len(meta))
    numbers, size = struct.pack(f"<{len(meta)}d", *meta), 8 * NUMBERS_IN_HEADER
    words = fixed + numbers[:size].ljust(size, b"\0") + bytes(16) + numbers[size:]
    return torch.frombuffer(bytearray(words), dtype=torch.int64)


def decode(header: Tensor, max_bytes: int, receive_more: Callable[[int], Tensor]) -> Header:
    """Return the decoded header. If its numbers do not fit into it, `receive_more(n)` receives the
    n words that follow. Raises FramingError for a value out of bounds.
    """
    content, fixed = header.numpy().tobytes(), FIXED_FIELDS.size
    magic, name, stage, iteration, kind, nbytes, dtype, pauses, count = FIXED_FIELDS.unpack_from(
        content
    )
    if (
        magic != MAGIC
        or kind not in (MESSAGE, BYE, GRANT)
        or not 0 <= count <= MAX_NUMBERS
        or not 0 <= dtype <= NO_PAYLOAD
        or not 0 <= pauses < 2**62
    ):
        raise FramingError("received a header of another version or program")
    element = None if dtype == NO_PAYLOAD else DTYPES[dtype]
    if not 0 <= nbytes <= max_bytes or (nbytes % element.itemsize if element else nbytes):
        raise FramingError(
            f"a payload has {nbytes} bytes of {element}, but at most {max_bytes} are expected"
        )
    name = name.rstrip(b"\0")
    if not name.isascii() or not 0 <= stage < 2**31 or not 0 <= iteration < 2**62:
        raise FramingError("received an invalid tag")
    received, took_ns = header[RECEIPT:].tolist()
    if received < 0 or took_ns < 0:
        raise FramingError("received an invalid receipt")
    numbers = content[fixed : fixed + 8 * min(count, NUMBERS_IN_HEADER)]
    if count > NUMBERS_IN_HEADER:
        numbers += receive_more(count - NUMBERS_IN_HEADER).numpy().tobytes()
    meta = struct.unpack(f"<{count}d", numbers)
    tag = name.decode("ascii"), stage, iteration
    return Header(kind, tag, nbytes, element, meta, pauses, (received, took_ns))

"""Encode and decode the header of a message between processes: 26 int64, then one flat payload of
uint8.

Nothing is unpickled. Numbers that do not fit into the header follow it, ahead of the payload.

| word | content |
| --- | --- |
| 0 | magic and version |
| 1, 2 | the tag's name, up to 16 ASCII bytes |
| 3, 4 | the tag's stage and iteration |
| 5 | kind of the header: a message, a goodbye, or the grant for a payload |
| 6, 7 | bytes of the payload, code of its element type |
| 8 | number of the pause after which it was sent, see `ashl.topology.ending` |
| 9 | number of numbers in `meta` |
| 10-23 | the first of them, as the bits of float64 |
| 24, 25 | payloads received from the addressed rank, nanoseconds of the latest from header to end |

Every value is checked against bounds before memory is allocated for it.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.runtime.effects import Tag

# words 0 to 9: magic, name, stage, iteration, kind, bytes, element type, pauses, count of numbers
FIRST = struct.Struct("<q16s7q")
META = 14  # numbers of `meta` in a header
# bound on all numbers of `meta`, which may list the members of a group
MAX_NUMBERS = 4096
RECEIPT = FIRST.size // 8 + META  # position of the receipt, which is filled in as the header leaves
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
    pauses: int = 0  # pauses of the sender before it sent this
    receipt: tuple[int, int] = (0, 0)


def encode(
    kind: int, tag: Tag, payload: Any = None, meta: tuple[float, ...] = (), pauses: int = 0
) -> Tensor:
    """Return the header of a message, and the numbers that follow it. Raises ValueError if the
    tag's name is too long or `meta` has too many numbers.
    """
    name, stage, iteration = tag
    text = name.encode("ascii")
    if len(text) > 16 or len(meta) > MAX_NUMBERS:
        raise ValueError(f"tag {name!r} with {len(meta)} numbers does not fit a header")
    nbytes, dtype = 0, NO_PAYLOAD
    if payload is not None:
        nbytes, dtype = payload.nbytes, DTYPES.index(payload.dtype)
    first = FIRST.pack(MAGIC, text, stage, iteration, kind, nbytes, dtype, pauses, len(meta))
    numbers = struct.pack(f"<{len(meta)}d", *meta)
    inside = numbers[: 8 * META].ljust(8 * META, b"\0")
    words = bytearray(first + inside + bytes(16) + numbers[8 * META :])
    return torch.frombuffer(words, dtype=torch.int64)


def decode(header: Tensor, max_bytes: int, receive_more: Callable[[int], Tensor]) -> Header:
    """Return a decoded header; `receive_more` waits for the given count of words that follow it.
    Raises FramingError for a value out of bounds.
    """
    content = header.numpy().tobytes()
    magic, name, stage, iteration, kind, nbytes, dtype, pauses, count = FIRST.unpack_from(content)
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
        raise FramingError(f"a payload has {nbytes} bytes, but at most {max_bytes} are expected")
    name = name.rstrip(b"\0")
    if not name.isascii() or not 0 <= stage < 2**31 or not 0 <= iteration < 2**62:
        raise FramingError("received an invalid tag")
    received, took_ns = header[RECEIPT:].tolist()
    if received < 0 or took_ns < 0:
        raise FramingError("received an invalid receipt")
    numbers = content[FIRST.size : FIRST.size + 8 * min(count, META)]
    if count > META:
        numbers += receive_more(count - META).numpy().tobytes()
    meta = struct.unpack(f"<{count}d", numbers)
    tag = name.decode("ascii"), stage, iteration
    return Header(kind, tag, nbytes, element, meta, pauses, (received, took_ns))

"""Encode and decode the header of a message between processes: 26 int64, then one flat payload of
uint8.

Nothing is unpickled. Numbers that do not fit into the header follow it, ahead of the payload.

    0      magic and version
    1, 2   the tag's name, up to 16 ASCII bytes
    3, 4   the tag's stage and iteration
    5      kind of the header: a message, a goodbye, or the grant for a payload
    6, 7   bytes of the payload, code of its element type
    8      how many numbers of meta there are
    9-23   the first of them, as the bits of float64
    24, 25 payloads received so far from the addressed rank, and nanoseconds from header to last
    byte of the latest

Every value is checked against bounds before memory is allocated for it.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ashl.runtime.effects import Tag

META = 15  # numbers in a header
MOST = 4096  # ... and in all: more than who is there, among 100,000 workers, takes
RECEIPT = 9 + META  # where it stands: it is filled in as the header leaves
HEADER_WORDS = RECEIPT + 2
MAGIC = 0x4153484C0002
MESSAGE, BYE, GRANT = range(3)
HEADERS, BODIES = 1, 2  # tags of the two planes
DTYPES = (
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
)
NO_BODY = len(DTYPES)


class FramingError(Exception):
    """A header that none of ours would send."""


class Header(NamedTuple):
    kind: int
    tag: Tag
    nbytes: int
    dtype: torch.dtype | None  # None: there is no body
    meta: tuple[float, ...]
    receipt: tuple[int, int] = (0, 0)


def encode(kind: int, tag: Tag, body: Any = None, meta: tuple[float, ...] = ()) -> Tensor:
    """The header of a message, and the numbers that follow it. Raises ValueError where a name is
    too long or there are too many numbers.
    """
    name, stage, iteration = tag
    text = name.encode("ascii")
    if len(text) > 16 or len(meta) > MOST:
        raise ValueError(f"tag {name!r} with {len(meta)} numbers does not fit a header")
    nbytes, dtype = (0, NO_BODY) if body is None else (body.nbytes, DTYPES.index(body.dtype))
    words = [
        MAGIC,
        *struct.unpack("<2q", text.ljust(16, b"\0")),
        stage,
        iteration,
        kind,
        nbytes,
        dtype,
        len(meta),
    ]
    words += struct.unpack(f"<{len(meta)}q", struct.pack(f"<{len(meta)}d", *meta))
    words[RECEIPT:RECEIPT] = [0] * max(2, HEADER_WORDS - len(words))
    return torch.tensor(words, dtype=torch.int64)


def decode(header: Tensor, max_bytes: int, rest: Callable[[int], Tensor]) -> Header:
    """`rest` waits for as many words that follow the header. Raises WireError on anything out of
    bounds.
    """
    words = header.tolist()
    magic, name_a, name_b, stage, iteration, kind, nbytes, dtype, count = words[:9]
    if (
        magic != MAGIC
        or kind not in (MESSAGE, BYE, GRANT)
        or not 0 <= count <= MOST
        or not 0 <= dtype <= NO_BODY
    ):
        raise FramingError("a header of another version or program")
    element = None if dtype == NO_BODY else DTYPES[dtype]
    if not 0 <= nbytes <= max_bytes or (nbytes % element.itemsize if element else nbytes):
        raise FramingError(f"a body of {nbytes} bytes, where at most {max_bytes} were expected")
    text = struct.pack("<2q", name_a, name_b).rstrip(b"\0")
    if not text.isascii() or not 0 <= stage < 2**31 or not 0 <= iteration < 2**62:
        raise FramingError("a tag that is none")
    bodies, took_ns = words[RECEIPT:]
    if bodies < 0 or took_ns < 0:
        raise FramingError("a receipt that is none")
    numbers = words[9 : min(9 + count, RECEIPT)] + (
        rest(count - META).tolist() if count > META else []
    )
    meta = struct.unpack(f"<{count}d", struct.pack(f"<{count}q", *numbers))
    return Header(
        kind, (text.decode("ascii"), stage, iteration), nbytes, element, meta, (bodies, took_ns)
    )

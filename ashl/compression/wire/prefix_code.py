"""Codewords of unequal length, one after the other in a stream of bits, the first bit the highest
of its byte.

Writing: codewords are shifted to their places and or-ed into words of 64 bits, many at once.
Reading: where a codeword begins depends on all before it; here the length of a codeword is looked
up at every bit of a block, as if one began there, and the beginnings are found by doubling: from
those of every second, fourth, … codeword. No side information is needed, and no loop over
codewords.

The Elias omega code writes n ≥ 1 in about log2 n + log2 log2 n + … bits: each group of bits is the
length of the next one, less one. Source: Elias, "Universal codeword sets and representations of the
integers", IEEE Transactions on Information Theory, 1975.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from ashl.compression.contract import PayloadError

BLOCK = 1 << 14  # codewords written, or bits read, at a time
WINDOW = 57  # bits that a codeword may have
SHORT = 16  # bits of an omega codeword that is looked up
Coder = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def write_prefix(symbols: np.ndarray, encode: Coder) -> np.ndarray:
    """uint8, whole bytes. encode(symbols) -> (codewords uint64, their lengths in bits, 1 to
    WINDOW).
    """
    words: list[np.ndarray] = []
    carry, used = np.uint64(0), 0  # of the word that is not full yet
    for start in range(0, symbols.size, BLOCK):
        codes, lengths = encode(symbols[start : start + BLOCK])
        ends = np.cumsum(lengths, dtype=np.int64) + used
        begins = ends - lengths
        place, room = begins >> 6, 64 - (begins & 63) - lengths
        over = np.flatnonzero(room < 0)
        first = codes << np.maximum(room, 0).astype(np.uint64)
        first[over] = codes[over] >> (-room[over]).astype(np.uint64)
        block = np.zeros((int(ends[-1]) >> 6) + 1, np.uint64)
        groups = np.concatenate([[0], np.flatnonzero(place[1:] != place[:-1]) + 1])
        block[place[groups]] = np.bitwise_or.reduceat(first, groups)
        block[place[over] + 1] |= codes[over] << (64 + room[over]).astype(np.uint64)
        block[0] |= carry
        carry, used = block[-1], int(ends[-1]) & 63
        words.append(block[:-1].astype(">u8"))
    tail = np.array([carry], ">u8").view(np.uint8)[: -(-used // 8)]
    return np.concatenate([*(word.view(np.uint8) for word in words), tail])


def read_prefix(buffer: np.ndarray, count: int, decode: Coder) -> np.ndarray:
    """`count` symbols of a stream of exactly these bytes. Raises BodyError where it is longer or
    shorter.

    decode(windows) -> (symbols, lengths ≥ 1) of the codewords that WINDOW high bits of uint64 begin
    with.
    """
    if count > 8 * buffer.size:
        raise PayloadError(f"{buffer.size} bytes cannot hold {count} codewords")
    found: list[np.ndarray] = []
    at, left = 0, count
    while left and at < 8 * buffer.size:
        base = at & ~7
        symbols, lengths = decode(_windows(buffer, base >> 3))
        places = _chain(at - base, lengths)[:left]
        found.append(symbols[places])
        left -= places.size
        at = base + int(places[-1]) + int(lengths[places[-1]])
    if left or -(-at // 8) != buffer.size:
        raise PayloadError(f"{buffer.size} bytes are not those of {count} codewords")
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _windows(buffer: np.ndarray, start: int) -> np.ndarray:
    """The bits from each bit of a block on, uint64: at most BLOCK, and none that begins beyond the
    buffer.
    """
    count = min(BLOCK // 8, buffer.size - start)
    padded = np.zeros(count + 8, np.uint64)
    part = buffer[start : start + count + 8]
    padded[: part.size] = part
    words = np.zeros(count, np.uint64)
    for byte in range(8):
        words |= padded[byte : byte + count] << np.uint64(56 - 8 * byte)
    return (words[:, None] << np.arange(8, dtype=np.uint64)).reshape(-1)


def _chain(first: int, lengths: np.ndarray) -> np.ndarray:
    """Where codewords begin: first, first + its length, and so on to the end of the block."""
    end = lengths.size
    jump = np.minimum(np.arange(end) + lengths, end).astype(np.int32)
    jumps = [np.append(jump, np.int32(end))]  # by 1, 2, 4, … codewords; from the end nowhere
    while jumps[-1][first] < end:
        jumps.append(jumps[-1].take(jumps[-1]))
    places = np.array([first], np.int32)
    for jump in reversed(jumps):
        places = np.stack([places, jump.take(places)], axis=1).reshape(-1)
    return places[places < end]


def omega(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elias omega codewords of numbers from 1 to 2^32 − 1, and their lengths."""
    group = numbers.astype(np.uint64)
    codes, lengths = np.zeros(group.size, np.uint64), np.ones(group.size, np.int64)
    while (more := group > 1).any():
        codes |= np.where(more, group << lengths.astype(np.uint64), np.uint64(0))
        size = _bit_length(group)
        lengths += np.where(more, size, 0)
        group = np.where(more, size.astype(np.uint64) - np.uint64(1), group)
    return codes, lengths


def read_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, lengths) of the codewords that uint64 windows begin with; 0 for what is none of 32
    bits.
    """
    numbers, lengths = (
        table.take((windows >> np.uint64(64 - SHORT)).view(np.int64)) for table in _short()
    )
    longer = np.flatnonzero(lengths > SHORT)
    numbers[longer], lengths[longer] = _read_omega(windows[longer])
    return numbers, lengths


@cache
def _short() -> tuple[np.ndarray, np.ndarray]:
    """What `read_omega` finds in each window of SHORT bits; those whose length is beyond SHORT say
    no more.
    """
    return _read_omega(np.arange(1 << SHORT, dtype=np.uint64) << np.uint64(64 - SHORT))


def _read_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `read_omega`, group by group."""
    numbers, lengths, rest = (
        np.ones(windows.size, np.int64),
        np.ones(windows.size, np.int64),
        windows,
    )
    more = rest >> np.uint64(63) == 1
    while more.any():
        size = np.where(more, numbers + 1, 1)
        numbers[size > 32] = 0
        more &= size <= 32
        group = rest >> np.where(more, 64 - size, 0).astype(np.uint64)
        numbers = np.where(more, group.view(np.int64), numbers)
        lengths += np.where(more, size, 0)
        rest = rest << np.where(more, size, 0).astype(np.uint64)
        more &= rest >> np.uint64(63) == 1
    return numbers, lengths


def _bit_length(numbers: np.ndarray) -> np.ndarray:
    """Of integers from 1 to 2^53."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)

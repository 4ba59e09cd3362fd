"""Streams of codewords of unequal length; the first bit of a codeword is the highest of its byte.

Writing: many codewords at once are shifted to their positions and combined by "or" into 64-bit
words.

Reading: the start of a codeword depends on all codewords before it. So this module looks up the
length of a codeword at every bit of a block, as if one started there. It then finds the true starts
by doubling: from the starts of every second, fourth, … codeword. No side information is needed, and
no loop over codewords.

The Elias omega code writes n ≥ 1 in about log2 n + log2 log2 n + … bits: each group of bits is the
length of the next one, minus one. Source: Elias, "Universal codeword sets and representations of
the integers", IEEE Transactions on Information Theory, 1975.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from ashl.compression.contract import PayloadError

BLOCK = 1 << 14  # codewords written, or bits read, at a time
WINDOW = 57  # largest length of a codeword in bits
SHORT = 16  # largest length in bits of an omega codeword that a table decodes
Coder = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def write_prefix(symbols: np.ndarray, encode: Coder) -> np.ndarray:
    """Encode symbols as whole bytes, uint8.

    Args: encode(symbols) -> (codewords uint64, their lengths in bits, 1 to WINDOW).
    """
    words: list[np.ndarray] = []
    carry, used = np.uint64(0), 0  # content and number of bits of the incomplete word
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
    """Decode `count` symbols from a stream of exactly these bytes.

    Args: decode(windows) -> (symbols, lengths ≥ 1) of the codeword at the start of each window, a
    uint64 whose WINDOW high bits are valid.
    Raises: PayloadError if the stream is longer or shorter.
    """
    if count > 8 * buffer.size:
        raise PayloadError(f"{buffer.size} bytes cannot hold {count} codewords")
    found: list[np.ndarray] = []
    at, left = 0, count
    while left and at < 8 * buffer.size:
        base = at & ~7
        symbols, lengths = decode(_windows(buffer, base >> 3))
        starts = _chain(at - base, lengths)[:left]
        found.append(symbols[starts])
        left -= starts.size
        at = base + int(starts[-1]) + int(lengths[starts[-1]])
    if left or -(-at // 8) != buffer.size:
        raise PayloadError(f"{buffer.size} bytes do not hold exactly {count} codewords")
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _windows(buffer: np.ndarray, start: int) -> np.ndarray:
    """Return the bits from each bit of a block on, uint64: at most BLOCK windows.

    No window starts beyond the end of the buffer.
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
    """Return the starts of codewords from `first` to the end of the block, given a length at each
    bit.
    """
    end = lengths.size
    jump = np.minimum(np.arange(end) + lengths, end).astype(np.int32)
    jumps = [np.append(jump, np.int32(end))]  # by 1, 2, 4, … codewords; the end maps to itself
    while jumps[-1][first] < end:
        jumps.append(jumps[-1].take(jumps[-1]))
    starts = np.array([first], np.int32)
    for jump in reversed(jumps):
        starts = np.stack([starts, jump.take(starts)], axis=1).reshape(-1)
    return starts[starts < end]


def omega(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Elias omega codewords of numbers from 1 to 2^32 − 1, and their lengths in bits."""
    group = numbers.astype(np.uint64)
    codes, lengths = np.zeros(group.size, np.uint64), np.ones(group.size, np.int64)
    while (more := group > 1).any():
        codes |= np.where(more, group << lengths.astype(np.uint64), np.uint64(0))
        size = _bit_length(group)
        lengths += np.where(more, size, 0)
        group = np.where(more, size.astype(np.uint64) - np.uint64(1), group)
    return codes, lengths


def read_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (numbers, lengths) of the codeword at the start of each uint64 window.

    The number is 0 if the codeword is not one of a 32-bit number.
    """
    numbers, lengths = (
        table.take((windows >> np.uint64(64 - SHORT)).view(np.int64)) for table in _short()
    )
    longer = np.flatnonzero(lengths > SHORT)
    numbers[longer], lengths[longer] = _read_omega(windows[longer])
    return numbers, lengths


@cache
def _short() -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `_read_omega` for all windows of SHORT bits.

    An entry whose length exceeds SHORT is not valid.
    """
    return _read_omega(np.arange(1 << SHORT, dtype=np.uint64) << np.uint64(64 - SHORT))


def _read_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode omega codewords group by group; same arguments and results as `read_omega`."""
    numbers = np.ones(windows.size, np.int64)
    lengths = np.ones(windows.size, np.int64)
    rest = windows
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
    """Return the number of bits of integers from 1 to 2^53."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)

"""Pack integers of a few bits into a little-endian bit stream.

Widths of 1, 2 and 4 bits are packed by joining pairs. Other widths up to 8 are packed eight numbers
at a time: the eight bytes of a 64-bit word are compacted in three shifts.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array

GROUP = 32  # so many numbers of w bits fill w words of 32 bits
BLOCK = 1 << 16  # elements; a block stays in the L2 cache between two passes over it
HALVES = (1, 2, 4)  # widths that are packed by joining pairs
LANES = (16, 32, 64)  # bits of a pair of bytes, of two pairs, of four pairs
Read = Callable[[np.ndarray, int, int], np.ndarray]


def blocks(d: int) -> Iterator[slice]:
    """Return consecutive slices of d elements that fit the cache."""
    return (slice(start, min(start + BLOCK, d)) for start in range(0, d, BLOCK))


def packed_bytes(count: int, width: int) -> int:
    """Return the size in bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(numbers: Array, width: int) -> Array:
    """Return the low `width` bits (1 to 32) of each number as a stream, uint8 [packed_bytes]."""
    if isinstance(numbers, Tensor):
        return device_kernels.pack(numbers, width)
    if width in (8, 16, 32):
        return numbers.astype(f"<u{width // 8}").view(np.uint8)
    write = _pack_bytes if width < 8 else _pack_words
    packed = np.empty(packed_bytes(numbers.size, width), np.uint8)
    for start in range(0, numbers.size, BLOCK):
        piece = write(numbers[start : start + BLOCK], width)
        packed[start * width // 8 :][: piece.size] = piece
    return packed


def unpack(buffer: Array, width: int, count: int) -> Array:
    """Return the first `count` numbers of a stream, uint32, or int32 on a device.

    Limits: the caller checks that the stream is long enough.
    """
    if isinstance(buffer, Tensor):
        return device_kernels.unpack(buffer, width, count).to(torch.int32)
    if width in (16, 32):
        return buffer[: count * width // 8].view(f"<u{width // 8}").astype(np.uint32)
    return _unpack_blocks(
        _unpack_bytes if width <= 8 else _unpack_words, buffer, width, np.empty(count, np.uint32)
    )


def unpack_bytes(buffer: Array, width: int, count: int) -> Array:
    """Return the first `count` numbers of a stream as uint8, for a width of at most 8."""
    if isinstance(buffer, Tensor):
        return device_kernels.unpack(buffer, width, count)
    return _unpack_blocks(_unpack_bytes, buffer, width, np.empty(count, np.uint8))


def pack_signs(x: Array) -> Array:
    """Return the sign bits of x, uint8 [⌈d/8⌉]; 1 is negative, also for −0 and negative NaNs."""
    if isinstance(x, Tensor):
        return device_kernels.pack_signs(x)
    packed, signs = np.empty(-(-x.size // 8), np.uint8), np.empty(min(BLOCK, x.size), bool)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        bits = np.signbit(part, out=signs[: part.size])
        packed[start // 8 : (start + part.size + 7) // 8] = np.packbits(bits, bitorder="little")
    return packed


def pack_truths(truths: Array) -> Array:
    """Return bool [d] as a stream of bits, uint8 [⌈d/8⌉]."""
    if isinstance(truths, Tensor):
        return device_kernels.pack(truths, 1)
    return np.packbits(truths, bitorder="little")


def unpack_truths(stream: Array, count: int) -> Array:
    """Return bool [count] from a stream of bits."""
    if isinstance(stream, Tensor):
        return device_kernels.unpack(stream, 1, count).view(torch.bool)
    return np.unpackbits(stream, count=count, bitorder="little").view(bool)


def apply_signs(buffer: Array, count: int, magnitude: Array) -> Array:
    """Return a magnitude, float32 [1], with each sign of a stream: float32 [count]."""
    if isinstance(buffer, Tensor):
        return device_kernels.apply_signs(buffer, count, magnitude)
    x = np.empty(count, np.uint32)
    pattern = magnitude.astype(np.float32).view(np.uint32)
    for start in range(0, count, BLOCK):
        part = x[start : start + BLOCK]
        part[:] = np.unpackbits(
            buffer[start // 8 :][: BLOCK // 8], count=part.size, bitorder="little"
        )
        part <<= np.uint32(31)
        part ^= pattern
    return x.view(np.float32)


def _unpack_blocks(read: Read, buffer: np.ndarray, width: int, numbers: np.ndarray) -> np.ndarray:
    for start in range(0, numbers.size, BLOCK):
        part = numbers[start : start + BLOCK]
        part[:] = read(buffer[start * width // 8 :], width, part.size)
    return numbers


def _pack_words(numbers: np.ndarray, width: int) -> np.ndarray:
    groups = -(-numbers.size // GROUP)
    columns = np.zeros((groups, GROUP), np.uint32)
    columns.reshape(-1)[: numbers.size] = numbers
    columns &= np.uint32((1 << width) - 1)
    words = np.zeros((groups, width), "<u4")
    for j in range(GROUP):
        word, shift = divmod(j * width, 32)
        words[:, word] |= columns[:, j] << np.uint32(shift)
        if shift + width > 32:
            words[:, word + 1] |= columns[:, j] >> np.uint32(32 - shift)
    return words.reshape(-1).view(np.uint8)[: packed_bytes(numbers.size, width)]


def _unpack_words(buffer: np.ndarray, width: int, count: int) -> np.ndarray:
    groups = -(-count // GROUP)
    words = np.zeros((groups, width), "<u4")
    stream = buffer[: words.nbytes]
    words.reshape(-1).view(np.uint8)[: stream.size] = stream
    columns = np.empty((groups, GROUP), np.uint32)
    for j in range(GROUP):
        word, shift = divmod(j * width, 32)
        columns[:, j] = words[:, word] >> np.uint32(shift)
        if shift + width > 32:
            columns[:, j] |= words[:, word + 1] << np.uint32(32 - shift)
    columns &= np.uint32((1 << width) - 1)
    return columns.reshape(-1)[:count]


def _pack_bytes(numbers: np.ndarray, width: int) -> np.ndarray:
    size, words = packed_bytes(numbers.size, width), np.zeros(-(-numbers.size // 8), "<u8")
    single = words.view(np.uint8)
    np.bitwise_and(
        numbers.astype(np.uint8, copy=False), np.uint8((1 << width) - 1), out=single[: numbers.size]
    )
    if width in HALVES:
        while width < 8:  # two numbers become one of twice the width
            pairs = single.view("<u2")
            single, width = (pairs | pairs >> np.uint16(8 - width)).astype(np.uint8), 2 * width
        return single[:size]
    for lane in LANES:  # shift the upper half of each lane down to the end of the lower half
        lower, upper, apart = _halves(lane, width)
        moved = words >> apart
        moved &= upper
        words &= lower
        words |= moved
    return np.ascontiguousarray(single.reshape(-1, 8)[:, :width]).reshape(-1)[:size]


def _unpack_bytes(buffer: np.ndarray, width: int, count: int) -> np.ndarray:
    if width == 8:
        return buffer[:count]
    groups, size = -(-count // 8), packed_bytes(count, width)
    if width in HALVES:
        single, wide = buffer[:size], 8
        while wide > width:
            wide //= 2
            pairs = single.astype("<u2")
            pairs |= pairs << np.uint16(8 - wide)
            pairs &= np.uint16(0x0101 * ((1 << wide) - 1))
            single = pairs.view(np.uint8)
        return single[:count]
    if size == groups * width:
        stream = buffer[:size]
    else:
        stream = np.append(buffer[:size], np.zeros(width, np.uint8))
    words = np.zeros(groups, "<u8")
    words.view(np.uint8).reshape(-1, 8)[:, :width] = stream[: groups * width].reshape(-1, width)
    for lane in reversed(LANES):
        lower, upper, apart = _halves(lane, width)
        moved = words & upper
        moved <<= apart
        words &= lower
        words |= moved
    return words.view(np.uint8)[:count]


@cache
def _halves(lane: int, width: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return the masks of the lower and the upper half of a lane after packing, and the shift
    between.
    """
    used = lane * width // 16
    return (
        _repeat((1 << used) - 1, lane),
        _repeat(((1 << used) - 1) << used, lane),
        np.uint64(lane // 2 - used),
    )


def _repeat(pattern: int, lane: int) -> np.uint64:
    """Return a 64-bit word with the pattern in every lane."""
    return np.uint64(sum(pattern << shift for shift in range(0, 64, lane)))

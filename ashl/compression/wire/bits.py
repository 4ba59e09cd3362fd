"""Numbers of a few bits each, one after the other in a little-endian stream.

1, 2 and 4 bits are pushed together in pairs; others up to 8 bits by eights: as the bytes of one
word of 64 bits, in three shifts.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array

GROUP = 32  # numbers of w bits fill w words of 32 bits
BLOCK = 1 << 16  # elements: what lies between two passes over a block stays in the L2 cache
HALVES = (1, 2, 4)
LANES = (16, 32, 64)  # bits of a pair of numbers, of two pairs, of four
Read = Callable[[np.ndarray, int, int], np.ndarray]


def blocks(d: int) -> Iterator[slice]:
    """The parts of d elements, one after the other, that fit the cache."""
    return (slice(start, min(start + BLOCK, d)) for start in range(0, d, BLOCK))


def packed_bytes(count: int, width: int) -> int:
    """The size of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(numbers: Array, width: int) -> Array:
    """uint8 [packed_bytes] of the low `width` bits, 1 to 32, of each number."""
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
    """The first `count` numbers of such a stream, uint32, on a device int32; the stream must be
    long enough.
    """
    if isinstance(buffer, Tensor):
        return device_kernels.unpack(buffer, width, count).to(torch.int32)
    if width in (16, 32):
        return buffer[: count * width // 8].view(f"<u{width // 8}").astype(np.uint32)
    return _unpack_blocks(
        _unpack_bytes if width <= 8 else _unpack_words, buffer, width, np.empty(count, np.uint32)
    )


def unpack_bytes(buffer: Array, width: int, count: int) -> Array:
    """As `unpack`, for a width of at most 8: uint8."""
    if isinstance(buffer, Tensor):
        return device_kernels.unpack(buffer, width, count)
    return _unpack_blocks(_unpack_bytes, buffer, width, np.empty(count, np.uint8))


def pack_signs(x: Array) -> Array:
    """uint8 [⌈d/8⌉]: 1 where x is negative; of zeros and NaNs it is the sign bit that counts."""
    if isinstance(x, Tensor):
        return device_kernels.pack_signs(x)
    packed, signs = np.empty(-(-x.size // 8), np.uint8), np.empty(min(BLOCK, x.size), bool)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        bits = np.signbit(part, out=signs[: part.size])
        packed[start // 8 : (start + part.size + 7) // 8] = np.packbits(bits, bitorder="little")
    return packed


def pack_truths(truths: Array) -> Array:
    """uint8 [⌈d/8⌉] of bool [d]."""
    return (
        device_kernels.pack(truths, 1)
        if isinstance(truths, Tensor)
        else np.packbits(truths, bitorder="little")
    )


def unpack_truths(stream: Array, count: int) -> Array:
    """bool [count] again."""
    if isinstance(stream, Tensor):
        return device_kernels.unpack(stream, 1, count).view(torch.bool)
    return np.unpackbits(stream, count=count, bitorder="little").view(bool)


def apply_signs(buffer: Array, count: int, magnitude: Array) -> Array:
    """float32 [count]: a magnitude, float32 [1], with the signs of such a stream."""
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
    for lane in LANES:  # the upper half of each lane moves down to where the lower one ends
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
    stream = (
        buffer[:size]
        if size == groups * width
        else np.append(buffer[:size], np.zeros(width, np.uint8))
    )
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
    """Masks of a lane's lower and upper half of numbers, pushed together, and how far the upper one
    had to move.
    """
    used = lane * width // 16
    return (
        _repeat((1 << used) - 1, lane),
        _repeat(((1 << used) - 1) << used, lane),
        np.uint64(lane // 2 - used),
    )


def _repeat(pattern: int, lane: int) -> np.uint64:
    """A pattern in every lane of a word of 64 bits."""
    return np.uint64(sum(pattern << shift for shift in range(0, 64, lane)))

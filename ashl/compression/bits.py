"""Numbers of a few bits each, one after the other in a little-endian stream."""

from __future__ import annotations

import numpy as np

GROUP = 32  # numbers of w bits fill w words of 32 bits


def packed_bytes(count: int, width: int) -> int:
    """The size of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(numbers: np.ndarray, width: int) -> np.ndarray:
    """uint8 [packed_bytes] of the low `width` bits, 1 to 32, of each number."""
    groups = -(-numbers.size // GROUP)
    columns = np.zeros((groups, GROUP), np.uint32)
    columns.reshape(-1)[: numbers.size] = numbers
    words = np.zeros((groups, width), "<u4")
    for j in range(GROUP):
        word, shift = divmod(j * width, 32)
        words[:, word] |= columns[:, j] << np.uint32(shift)
        if shift + width > 32:
            words[:, word + 1] |= columns[:, j] >> np.uint32(32 - shift)
    return words.reshape(-1).view(np.uint8)[: packed_bytes(numbers.size, width)]


def unpack(buffer: np.ndarray, width: int, count: int) -> np.ndarray:
    """The first `count` numbers of such a stream, uint32; the stream must be long enough."""
    groups = -(-count // GROUP)
    words = np.zeros((groups, width), "<u4")
    words.reshape(-1).view(np.uint8)[: buffer.size] = buffer
    columns = np.empty((groups, GROUP), np.uint32)
    for j in range(GROUP):
        word, shift = divmod(j * width, 32)
        columns[:, j] = words[:, word] >> np.uint32(shift)
        if shift + width > 32:
            columns[:, j] |= words[:, word + 1] << np.uint32(32 - shift)
    columns &= np.uint32((1 << width) - 1)
    return columns.reshape(-1)[:count]

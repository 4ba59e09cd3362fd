"""Evenly spaced levels: map elements to levels, and levels to bit streams, in blocks for the cache.

Rule: a level takes ⌈log2(top + 1)⌉ bits, at most 8, or fewer with an entropy code. For an entropy
code, levels are counted from the middle one.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import PayloadError
from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, beside, is_true, read
from ashl.compression.wire.bits import BLOCK, blocks, pack, packed_bytes, unpack_bytes
from ashl.compression.wire.entropy_code import (
    EntropyCode,
    bound_bytes,
    fold,
    read_levels,
    unfold,
    write_levels,
)
from ashl.compression.wire.payload_format import Parts

SMALL = np.float32(2.0**-64)  # below it the reciprocal may exceed float32
ENLARGED = np.float32(2.0**64)  # factor for spans below SMALL
SHORT = 1 - 2.0**-22  # factor that keeps rounding errors from exceeding the top level
TOGETHER = 4  # blocks that are processed at once; larger steps are faster with many passes


def width(top: int) -> int:
    """Return the number of bits of a number from 0 to top."""
    return top.bit_length()


def rows_of(x: Array, row: int) -> Iterator[tuple[slice, Array]]:
    """Yield (positions of the rows, block [n, row]) of x; zeros complete the last row."""
    if isinstance(x, Tensor):  # on a device, all of x is one block
        yield (
            slice(0, -(-len(x) // row)),
            torch.nn.functional.pad(x, (0, -len(x) % row)).view(-1, row),
        )
        return
    step = row_step(row)
    for start in range(0, -(-x.size // row), step):
        part = x[start * row : (start + step) * row]
        if missing := -part.size % row:
            part = np.concatenate([part, np.zeros(missing, np.float32)])
        yield slice(start, start + part.size // row), part.reshape(-1, row)


def scale_levels(x: Array, span: Array, top: float) -> Array:
    """Return x/span·top for rows x [n, m] and spans [n, 1] or [1, 1]; 0 for spans of 0, ∞, NaN."""
    if isinstance(x, Tensor):
        return device_kernels.spread(x, span, SHORT * top, float(SMALL), float(ENLARGED))
    if span.min() >= SMALL and span.max() < np.inf:
        return x * (np.float32(SHORT * top) / span)
    small = span < SMALL
    if small.any():
        factor = np.where(small, ENLARGED, np.float32(1))
        x, span = x * factor, span * factor
    y = x * np.where(
        span > 0, np.float32(SHORT * top) / np.where(span > 0, span, np.float32(1)), np.float32(0)
    )
    if not (finite := np.isfinite(span)).all():
        np.copyto(y, 0, where=~finite)  # the span itself makes the decoded row NaN
    return y


def level_bytes(count: int, top: int, entropy: EntropyCode) -> int:
    """Return the size in bytes of a stream of `count` numbers; an upper bound if entropy-coded."""
    return bound_bytes(entropy, count, top + 1)


def pack_levels(
    count: int, top: int, blocks: Iterator[Array], entropy: EntropyCode = "none"
) -> Array:
    """Return the numbers of consecutive blocks as one stream of `count` numbers.

    The size of each block but the last is a multiple of 8. Entropy codes run on the host.
    """
    if entropy != "none":
        from_middle = fold(np.arange(top + 1) - (top + 1) // 2).astype(np.uint8)
        pieces = list(blocks)
        levels = np.concatenate([from_middle.take(read(numbers).reshape(-1)) for numbers in pieces])
        return beside(pieces[0], write_levels(entropy, levels[:count], top + 1))
    bits, start = width(top), 0
    stream = np.empty(packed_bytes(count, bits), np.uint8)
    for numbers in blocks:
        piece = pack(numbers.reshape(-1)[: count - start], bits)
        if isinstance(piece, Tensor):
            return piece
        stream[start * bits // 8 :][: piece.size] = piece
        start += numbers.size
    return stream


def unpack_levels(
    stream: Array,
    count: int,
    row: int,
    top: int,
    to_values: Callable[[slice, Array], object],
    entropy: EntropyCode = "none",
) -> Array:
    """Decode a stream to float32 [count].

    `to_values` converts the numbers [n, row] of some rows to values, in place.

    Raises: PayloadError if there are more or fewer numbers, or if one exceeds top.
    """
    bits, rows = width(top), -(-count // row)
    if entropy != "none":
        to_middle = (unfold(np.arange(top + 1)) + (top + 1) // 2).astype(np.uint8)
        levels = read_levels(entropy, read(stream), count, top + 1)
        stream = beside(stream, to_middle.take(levels))
        bits = 8
    if len(stream) != packed_bytes(count, bits):
        raise PayloadError(
            f"received {len(stream)} bytes, which do not hold {count} numbers of {bits} bits"
        )
    on_device = isinstance(stream, Tensor)
    if on_device:
        x = torch.empty((rows, row), device=str(stream.device))
    else:
        x = np.empty((rows, row), np.float32)
    step = rows if on_device else row_step(row)
    for start in range(0, rows, step):
        part = x[start : start + step]
        flat = part.reshape(-1)
        numbers = unpack_bytes(
            stream[start * row * bits // 8 :], bits, min(len(flat), count - start * row)
        )
        if not is_true(numbers.max() <= top):
            raise PayloadError(f"received a number above {top}; numbers are from 0 to {top}")
        flat[: len(numbers)] = numbers
        flat[len(numbers) :] = 0
        to_values(slice(start, start + len(part)), part)
    return x.reshape(-1)[:count]


def all_levels(parts: Parts, d: int) -> Array:
    """Return the values of a payload that has a value for all d elements, and no indices.

    Raises: PayloadError for any other payload.
    """
    if parts.count != d or parts.form or len(parts.indices):
        raise PayloadError(
            f"expected a vector of {d} elements; received form {parts.form} with"
            f" {parts.count} values"
        )
    return parts.values


def row_step(row: int) -> int:
    """Return the number of rows that are processed at once: a multiple of 8, so that bytes are
    full.
    """
    return TOGETHER * block_rows(row)


def block_rows(row: int) -> int:
    """Return the number of rows of a block."""
    return max(8, BLOCK // row // 8 * 8)


def ends_of(x: Array) -> Array:
    """Return the least and the largest element, float32 [2]; NaN if an element is NaN."""
    if isinstance(x, Tensor):
        return device_kernels.ends_of(x)
    return np.array(
        [float(end) for end in torch.aminmax(torch.from_numpy(x))], np.float32
    ) + np.float32(0)  # turns −0 into 0


def reach_of(x: Array) -> np.float32:
    """Return max |x_j|, in host memory; NaN if an element is NaN."""
    return read(abs(ends_of(x)).max()[None])[0]


def mean_magnitude(x: Array) -> np.ndarray:
    """Return ‖x‖₁/d as float32 [1], in host memory; 0 if d = 0."""
    if isinstance(x, Tensor):
        return np.array(
            [sum(device_kernels.block_sums(x.abs(), BLOCK)) / max(1, len(x))], np.float32
        )
    total, buffer = 0.0, np.empty(min(BLOCK, x.size), np.float32)
    for where in blocks(x.size):
        part = x[where]
        total += float(row_sums(np.abs(part, out=buffer[: part.size])[None])[0])
    return np.array([total / max(1, x.size)], np.float32)


def row_sums(rows: np.ndarray) -> np.ndarray:
    """Return the sum of each row, in float64 only if float32 overflows."""
    sums = rows.sum(1)
    return sums if np.isfinite(sums).all() else rows.sum(1, dtype=np.float64)

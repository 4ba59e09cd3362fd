"""Evenly spaced levels, in blocks that fit the cache: where elements lie among them, and numbers of
levels as streams.

Rule: numbers take ⌈log2(top + 1)⌉ bits, 8 at most, or what an entropy code makes of them, for which
they are counted from the one in the middle.
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

SMALL = np.float32(2.0**-64)  # below it float32 may have no reciprocal
ENLARGED = np.float32(2.0**64)
SHORT = 1 - 2.0**-22  # so that what is rounded on the way is not rounded up beyond the top level
TOGETHER = 4  # blocks: with so many passes over each, fewer and larger ones win


def width(top: int) -> int:
    """Bits of a number from 0 to top."""
    return top.bit_length()


def rows_of(x: Array, row: int) -> Iterator[tuple[slice, Array]]:
    """Blocks of x as [n, row], and where their rows lie among all; the last row is filled up with
    zeros.
    """
    if isinstance(x, Tensor):  # on a device all is one block
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
    """x/span·top, for spans [n, 1] or [1, 1] of the rows of x [n, m]; 0 where a span is none."""
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
        np.copyto(y, 0, where=~finite)  # the span says it
    return y


def level_bytes(count: int, top: int, entropy: EntropyCode) -> int:
    """The size of a stream of so many numbers, at most."""
    return bound_bytes(entropy, count, top + 1)


def pack_levels(
    count: int, top: int, blocks: Iterator[Array], entropy: EntropyCode = "none"
) -> Array:
    """The numbers of blocks, each but the last a multiple of 8 long, as one stream of `count`.
    Entropy codes are the host's work.
    """
    if entropy != "none":
        from_middle = fold(np.arange(top + 1) - (top + 1) // 2).astype(np.uint8)
        pieces = list(blocks)
        levels = np.concatenate([from_middle.take(read(numbers).reshape(-1)) for numbers in pieces])
        return beside(pieces[0], write_levels(entropy, levels[:count], top + 1))
    stream, bits, start = np.empty(packed_bytes(count, width(top)), np.uint8), width(top), 0
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
    meant: Callable[[slice, Array], object],
    entropy: EntropyCode = "none",
) -> Array:
    """float32 [count]: `meant` makes of the numbers [n, row] of some rows, in place, what they
    stand for.

    Raises BodyError where there are more or fewer numbers, or one beyond top.
    """
    bits, rows = width(top), -(-count // row)
    if entropy != "none":
        to_middle = (unfold(np.arange(top + 1)) + (top + 1) // 2).astype(np.uint8)
        stream, bits = (
            beside(stream, to_middle.take(read_levels(entropy, read(stream), count, top + 1))),
            8,
        )
    if len(stream) != packed_bytes(count, bits):
        raise PayloadError(f"{count} numbers of {bits} bits came in {len(stream)} bytes")
    there = isinstance(stream, Tensor)
    x = (
        torch.empty((rows, row), device=str(stream.device))
        if there
        else np.empty((rows, row), np.float32)
    )
    step = rows if there else row_step(row)
    for start in range(0, rows, step):
        part = x[start : start + step]
        flat = part.reshape(-1)
        numbers = unpack_bytes(
            stream[start * row * bits // 8 :], bits, min(len(flat), count - start * row)
        )
        if not is_true(numbers.max() <= top):
            raise PayloadError(f"a number from 0 to {top} is larger")
        flat[: len(numbers)] = numbers
        flat[len(numbers) :] = 0
        meant(slice(start, start + len(part)), part)
    return x.reshape(-1)[:count]


def all_levels(parts: Parts, d: int) -> Array:
    """The values of a body that says something of all d elements, and of no places. Raises
    BodyError.
    """
    if parts.count != d or parts.form or len(parts.indices):
        raise PayloadError(
            f"what came is no vector of {d} elements: form {parts.form}, {parts.count} values"
        )
    return parts.values


def row_step(row: int) -> int:
    """Rows that are worked on together: a multiple of 8, so that their bits end with a byte."""
    return TOGETHER * block_rows(row)


def block_rows(row: int) -> int:
    """Rows of a block."""
    return max(8, BLOCK // row // 8 * 8)


def ends_of(x: Array) -> Array:
    """The least and the largest element, float32 [2]; NaN where one is."""
    if isinstance(x, Tensor):
        return device_kernels.ends_of(x)
    return np.array(
        [float(end) for end in torch.aminmax(torch.from_numpy(x))], np.float32
    ) + np.float32(0)  # no -0


def reach_of(x: Array) -> np.float32:
    """max |x_j|, in the host's memory; NaN where one is."""
    return read(abs(ends_of(x)).max()[None])[0]


def mean_magnitude(x: Array) -> np.ndarray:
    """‖x‖₁/d as float32 [1], in the host's memory; 0 of nothing."""
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
    """Of each row, as float64 only where float32 does not suffice."""
    sums = rows.sum(1)
    return sums if np.isfinite(sums).all() else rows.sum(1, dtype=np.float64)

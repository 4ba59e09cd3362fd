"""Ternary numbers: rounded at random, and written five to a byte.

Rule: of every block of 81920 numbers 0, 1 and 2, byte j holds those at j, j + s, …, j + 4s as t_0 + 3·t_1 + … + 81·t_4,
with s = ⌈block/5⌉, so that reading and writing are sums of whole vectors.

Source: the rounding of Wen et al., "TernGrad", NeurIPS 2017.
"""

import numpy as np
from torch import Tensor

from ashl.compression.contract import BodyError
from ashl.compression.wire import there
from ashl.compression.wire.arrays import Array, holds, ops
from ashl.compression.wire.dither import Dither, rounded
from ashl.compression.wire.levels import TOGETHER, spread

TRITS = 5  # in a byte, since 3⁵ ≤ 256
BLOCK = TRITS << 14


def trit_bytes(count: int) -> int:
    """The size of so many ternary numbers."""
    return -(-count // TRITS)


def ternary(x: Array, top: Array, dither: Dither, start: int = 0, beyond: bool = False) -> Array:
    """uint8: 1 + sign(x)·[drawn], with probability |x|/top; where there are any `beyond` ±top, these for sure. top is
    float32 [1]."""
    y = spread(x[None], top[None], dither.unit)[0]
    if beyond:
        y = ops(y).clip(y, -dither.unit, dither.unit, out=y)
    return rounded(y, dither, start, 1)


def pack_trits(numbers: np.ndarray) -> np.ndarray:
    """uint8 [trit_bytes] of numbers 0, 1 and 2, uint8, as one block."""
    if missing := -numbers.size % TRITS:
        numbers = np.concatenate([numbers, np.zeros(missing, np.uint8)])
    planes = numbers.reshape(TRITS, -1)
    packed = planes[-1].copy()
    for plane in planes[-2::-1]:
        packed *= np.uint8(3)
        packed += plane
    return packed


def unpack_trits(packed: np.ndarray, count: int) -> np.ndarray:
    """The numbers [count] of a block. Raises BodyError where a byte holds something else."""
    if packed.size and packed.max() >= 3**TRITS:
        raise BodyError(f"five ternary numbers are {packed.max()}")
    planes = np.empty((TRITS, packed.size), np.uint8)
    for plane in planes:
        rest = packed // np.uint8(3)
        np.subtract(packed, rest * np.uint8(3), out=plane)
        packed = rest
    return planes.reshape(-1)[:count]


def write_ternary(x: Array, top: Array, dither: Dither, beyond: bool) -> Array:
    """uint8 [trit_bytes]: x as ternary numbers."""
    if isinstance(x, Tensor):
        return there.pack_trits(ternary(x, top, dither, 0, beyond), TRITS, BLOCK)
    stream = np.empty(trit_bytes(x.size), np.uint8)
    for first in range(0, x.size, TOGETHER * BLOCK):
        numbers = ternary(x[first : first + TOGETHER * BLOCK], top, dither, first, beyond)
        for start in range(0, numbers.size, BLOCK):
            packed = pack_trits(numbers[start : start + BLOCK])
            stream[(first + start) // TRITS :][: packed.size] = packed
    return stream


def read_ternary(stream: Array, top: Array, count: int) -> Array:
    """float32 [count]: −top, 0 and top. Raises BodyError where the stream is of another length."""
    if len(stream) != trit_bytes(count):
        raise BodyError(f"{count} ternary numbers came in {len(stream)} bytes")
    if isinstance(stream, Tensor):
        if not holds(stream.max() < 3**TRITS):
            raise BodyError(f"five ternary numbers are {3**TRITS} or more")
        return (there.unpack_trits(stream, count, TRITS, BLOCK).to(top.dtype) - 1) * top
    x = np.empty(count, np.float32)
    for start in range(0, count, BLOCK):
        part = x[start : start + BLOCK]
        part[:] = unpack_trits(stream[start // TRITS :][: trit_bytes(part.size)], part.size)
        part -= np.float32(1)
        part *= top
    return x

"""Ternary numbers: rounded at random, and written five to a byte.

Rule: of every block of 81920 numbers 0, 1 and 2, byte j holds those at j, j + s, …, j + 4s as t_0 +
3·t_1 + … + 81·t_4, with s = ⌈block/5⌉, so that reading and writing are sums of whole vectors.

Source: the rounding of Wen et al., "TernGrad", NeurIPS 2017.
"""

import numpy as np
from torch import Tensor

from ashl.compression.contract import PayloadError
from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, is_true, ops
from ashl.compression.wire.levels import TOGETHER, scale_levels
from ashl.compression.wire.stochastic_rounding import RoundingNoise, round_to_uint8

DIGITS_PER_BYTE = 5  # in a byte, since 3⁵ ≤ 256
BLOCK = DIGITS_PER_BYTE << 14


def ternary_nbytes(count: int) -> int:
    """The size of so many ternary numbers."""
    return -(-count // DIGITS_PER_BYTE)


def round_ternary(
    x: Array, top: Array, noise: RoundingNoise, start: int = 0, beyond: bool = False
) -> Array:
    """uint8: 1 + sign(x)·[drawn], with probability |x|/top; where there are any `beyond` ±top,
    these for sure. top is float32 [1].
    """
    y = scale_levels(x[None], top[None], noise.unit)[0]
    if beyond:
        y = ops(y).clip(y, -noise.unit, noise.unit, out=y)
    return round_to_uint8(y, noise, start, 1)


def pack_ternary(numbers: np.ndarray) -> np.ndarray:
    """uint8 [trit_bytes] of numbers 0, 1 and 2, uint8, as one block."""
    if missing := -numbers.size % DIGITS_PER_BYTE:
        numbers = np.concatenate([numbers, np.zeros(missing, np.uint8)])
    planes = numbers.reshape(DIGITS_PER_BYTE, -1)
    packed = planes[-1].copy()
    for plane in planes[-2::-1]:
        packed *= np.uint8(3)
        packed += plane
    return packed


def unpack_ternary(packed: np.ndarray, count: int) -> np.ndarray:
    """The numbers [count] of a block. Raises BodyError where a byte holds something else."""
    if packed.size and packed.max() >= 3**DIGITS_PER_BYTE:
        raise PayloadError(f"five ternary numbers are {packed.max()}")
    planes = np.empty((DIGITS_PER_BYTE, packed.size), np.uint8)
    for plane in planes:
        rest = packed // np.uint8(3)
        np.subtract(packed, rest * np.uint8(3), out=plane)
        packed = rest
    return planes.reshape(-1)[:count]


def write_ternary(x: Array, top: Array, noise: RoundingNoise, beyond: bool) -> Array:
    """uint8 [trit_bytes]: x as ternary numbers."""
    if isinstance(x, Tensor):
        return device_kernels.pack_ternary(
            round_ternary(x, top, noise, 0, beyond), DIGITS_PER_BYTE, BLOCK
        )
    stream = np.empty(ternary_nbytes(x.size), np.uint8)
    for first in range(0, x.size, TOGETHER * BLOCK):
        numbers = round_ternary(x[first : first + TOGETHER * BLOCK], top, noise, first, beyond)
        for start in range(0, numbers.size, BLOCK):
            packed = pack_ternary(numbers[start : start + BLOCK])
            stream[(first + start) // DIGITS_PER_BYTE :][: packed.size] = packed
    return stream


def read_ternary(stream: Array, top: Array, count: int) -> Array:
    """float32 [count]: −top, 0 and top. Raises BodyError where the stream is of another length."""
    if len(stream) != ternary_nbytes(count):
        raise PayloadError(f"{count} ternary numbers came in {len(stream)} bytes")
    if isinstance(stream, Tensor):
        if not is_true(stream.max() < 3**DIGITS_PER_BYTE):
            raise PayloadError(f"five ternary numbers are {3**DIGITS_PER_BYTE} or more")
        return (
            device_kernels.unpack_ternary(stream, count, DIGITS_PER_BYTE, BLOCK).to(top.dtype) - 1
        ) * top
    x = np.empty(count, np.float32)
    for start in range(0, count, BLOCK):
        part = x[start : start + BLOCK]
        part[:] = unpack_ternary(
            stream[start // DIGITS_PER_BYTE :][: ternary_nbytes(part.size)], part.size
        )
        part -= np.float32(1)
        part *= top
    return x

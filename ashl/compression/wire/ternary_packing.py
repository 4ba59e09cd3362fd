"""Ternary numbers: stochastic rounding to −1, 0 or 1, and five numbers in a byte.

Rule: in every block of 81920 numbers 0, 1 and 2, byte j holds those at j, j + s, …, j + 4s as t_0 +
3·t_1 + … + 81·t_4, with s = ⌈block/5⌉. So packing and unpacking are operations on whole vectors.
Bits: 1.6 per number.

Source: the rounding of Wen et al., "TernGrad", NeurIPS 2017.
"""

import numpy as np
from torch import Tensor

from ashl.compression.contract import PayloadError
from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, is_true, ops
from ashl.compression.wire.levels import TOGETHER, scale_levels
from ashl.compression.wire.stochastic_rounding import RoundingNoise, round_to_uint8

DIGITS_PER_BYTE = 5  # 3⁵ ≤ 256
BLOCK = DIGITS_PER_BYTE << 14  # numbers


def ternary_nbytes(count: int) -> int:
    """Return the size of `count` ternary numbers in bytes."""
    return -(-count // DIGITS_PER_BYTE)


def round_ternary(
    x: Array, top: Array, noise: RoundingNoise, start: int = 0, beyond: bool = False
) -> Array:
    """Return 1 + sign(x_j)·b_j as uint8, with b_j = 1 at probability |x_j|/top.

    Args: top float32 [1]. beyond says that |x_j| > top may occur; then b_j = 1.
    """
    y = scale_levels(x[None], top[None], noise.unit)[0]
    if beyond:
        y = ops(y).clip(y, -noise.unit, noise.unit, out=y)
    return round_to_uint8(y, noise, start, 1)


def pack_ternary(numbers: np.ndarray) -> np.ndarray:
    """Pack one block of numbers 0, 1 and 2, uint8, into bytes, uint8 [ternary_nbytes]."""
    if missing := -numbers.size % DIGITS_PER_BYTE:
        numbers = np.concatenate([numbers, np.zeros(missing, np.uint8)])
    planes = numbers.reshape(DIGITS_PER_BYTE, -1)
    packed = planes[-1].copy()
    for plane in planes[-2::-1]:
        packed *= np.uint8(3)
        packed += plane
    return packed


def unpack_ternary(packed: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers [count] of one block.   Raises: PayloadError if a byte exceeds 242."""
    if packed.size and packed.max() >= 3**DIGITS_PER_BYTE:
        raise PayloadError(
            f"received {packed.max()} as five ternary numbers; the largest is"
            f" {3**DIGITS_PER_BYTE - 1}"
        )
    planes = np.empty((DIGITS_PER_BYTE, packed.size), np.uint8)
    for plane in planes:
        rest = packed // np.uint8(3)
        np.subtract(packed, rest * np.uint8(3), out=plane)
        packed = rest
    return planes.reshape(-1)[:count]


def write_ternary(x: Array, top: Array, noise: RoundingNoise, beyond: bool) -> Array:
    """Round x to ternary numbers and pack them, uint8 [ternary_nbytes]."""
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
    """Decode a stream to −top, 0 and top, float32 [count].

    Raises: PayloadError if the stream is malformed.
    """
    if len(stream) != ternary_nbytes(count):
        raise PayloadError(
            f"received {len(stream)} bytes, which do not hold {count} ternary numbers"
        )
    if isinstance(stream, Tensor):
        if not is_true(stream.max() < 3**DIGITS_PER_BYTE):
            raise PayloadError(
                "received a byte that is not five ternary numbers; the largest is"
                f" {3**DIGITS_PER_BYTE - 1}"
            )
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

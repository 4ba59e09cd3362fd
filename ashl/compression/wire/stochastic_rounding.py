"""Stochastic rounding: q = ⌊y + u⌋ with u uniform in [0, 1), so that E q = y. Kernel of quantizers.

Rule: y and u are multiples of 2^−bits. Of 31 bits, those that the largest level does not need
follow the point: 30 for levels ±1, 24 for 127. The first 16 bits of u are drawn for each element,
which costs half as much as drawing a float. The other bits of u decide for one element in 65,536
only, and elements 2¹⁴ apart share them: their correlation is at most 2⁻¹⁶. The part of y below
2^−bits is cut off, so E q is y to within 2^−bits.

Source: stochastic rounding as in Alistarh et al., "QSGD", NeurIPS 2017.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, view_as
from ashl.data.counter_rng import CounterRng

FIRST = 16  # leading bits of u, drawn for each element
LANES = 64 // FIRST  # elements whose leading bits fill one word of 64 bits
SHARED = 1 << 14  # elements after which the trailing bits of u repeat
REST = 1 << 62  # index of the first word with trailing bits


class RoundingNoise(NamedTuple):
    """The random numbers u of a message."""

    words: CounterRng
    bits: int  # number of bits of y and u behind the point
    rest: Array  # trailing bits of u, int32 [at most SHARED]

    @property
    def unit(self) -> float:
        """The factor of y before `round_to_uint8` or `round_to_int32`."""
        return 2.0**self.bits


def rounding_noise(x: Array, words: CounterRng, top: int) -> RoundingNoise:
    """Return the random numbers for all elements of x, with y from −top to top, top < 2¹⁵."""
    bits, count = 31 - top.bit_length(), min(SHARED, len(x))
    rest = view_as(words.words(x, REST, -(-count // 2)), "<i4")[:count]
    return RoundingNoise(words, bits, rest >> 8 & (1 << bits - FIRST) - 1)


def round_to_uint8(y: Array, noise: RoundingNoise, start: int, zero: int = 0) -> Array:
    """Return ⌊y + u⌋ + zero as uint8, for y ≥ −zero in units of `noise`, of any shape.

    `start`, a multiple of 4, is the number of elements before y.
    """
    if isinstance(y, Tensor):
        return round_to_int32(y, noise, start, zero).to(device_kernels.TYPES["u1"])
    levels = _sums(y, noise, start).astype(np.uint8)
    if zero:
        levels += np.uint8(zero)  # modulo 256, so this corrects negative levels, too
    return levels


def round_to_int32(y: Array, noise: RoundingNoise, start: int, zero: int = 0) -> Array:
    """Return ⌊y + u⌋ + zero as int32; arguments as in `round_to_uint8`."""
    if isinstance(y, Tensor):
        return (
            device_kernels.round_to_int32(
                y, noise.words, noise.rest.roll(-start), start, noise.bits, FIRST
            )
            + zero
        )
    levels = _sums(y, noise, start)
    if zero:
        levels += zero
    return levels


def _sums(y: np.ndarray, noise: RoundingNoise, start: int) -> np.ndarray:
    """Return ⌊y + u⌋, int32."""
    levels = y.astype(np.int32)
    flat = levels.reshape(-1)
    rest = np.roll(noise.rest, -start)
    whole = levels.size // len(rest)
    rows, last = np.split(flat, [whole * len(rest)])
    rows.reshape(whole, len(rest))[:] += rest
    last += rest[: len(last)]
    levels >>= noise.bits - FIRST
    flat += noise.words.words(y, start // LANES, -(-flat.size // LANES)).view(np.uint16)[
        : flat.size
    ]
    levels >>= FIRST
    return levels

"""Stochastic rounding: q = ⌊y + u⌋ with u uniform in [0, 1), so that E q = y. The kernel of the
quantizers.

Rule: y and u are whole numbers of 2^−bits, with as many bits as 31 leave behind the point of the
largest level: 30 for ±1, 24 for 127. The first 16 of u are drawn for every element, which costs
half as much as a float. Those behind them matter to one element in 65,536, and elements 2¹⁴ apart
share them: two that do are correlated by 2⁻¹⁶ at most. What y has behind the last bit is cut off,
so that E q is y to 2^−bits.

Source: stochastic rounding as in Alistarh et al., "QSGD", NeurIPS 2017.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array, view_as
from ashl.data.counter_rng import CounterRng

FIRST = 16  # bits of u that are an element's own
LANES = 64 // FIRST  # of them in a word
SHARED = 1 << 14  # elements that have the bits behind these for themselves
REST = 1 << 62  # the words from here on hold those


class RoundingNoise(NamedTuple):
    """Every u of a message."""

    words: CounterRng
    bits: int  # behind the point
    rest: Array  # int32 [SHARED, or less]: those of them that are shared

    @property
    def unit(self) -> float:
        """What y is to be multiplied with, for `round_to_uint8`."""
        return 2.0**self.bits


def rounding_noise(x: Array, words: CounterRng, top: int) -> RoundingNoise:
    """For y from −top to top, below 2¹⁵, of the elements of x."""
    bits, count = 31 - top.bit_length(), min(SHARED, len(x))
    rest = view_as(words.words(x, REST, -(-count // 2)), "<i4")[:count]
    return RoundingNoise(words, bits, rest >> 8 & (1 << bits - FIRST) - 1)


def round_to_uint8(y: Array, noise: RoundingNoise, start: int, zero: int = 0) -> Array:
    """uint8: ⌊y + u⌋ + zero, for y ≥ −zero in units of `noise`, in any form; `start`, a multiple of
    4, counts elements before.
    """
    if isinstance(y, Tensor):
        return round_to_int32(y, noise, start, zero).to(device_kernels.TYPES["u1"])
    levels = _sums(y, noise, start).astype(np.uint8)
    if zero:
        levels += np.uint8(zero)  # modulo 256, so what was negative no longer is
    return levels


def round_to_int32(y: Array, noise: RoundingNoise, start: int, zero: int = 0) -> Array:
    """int32: the same, for whatever `noise` is made for."""
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
    """⌊y + u⌋, int32."""
    levels = y.astype(np.int32)
    flat, rest, whole = (
        levels.reshape(-1),
        np.roll(noise.rest, -start),
        levels.size // len(noise.rest),
    )
    rows, last = np.split(flat, [whole * len(rest)])
    rows.reshape(whole, len(rest))[:] += rest
    last += rest[: len(last)]
    levels >>= noise.bits - FIRST
    flat += noise.words.words(y, start // LANES, -(-flat.size // LANES)).view(np.uint16)[
        : flat.size
    ]
    levels >>= FIRST
    return levels

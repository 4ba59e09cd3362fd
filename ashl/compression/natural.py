"""Natural compression: every element is rounded at random to one of the two powers of two beside it: a sign and an
exponent remain.

Rule: for 2^a ≤ |x_j| < 2^(a+1), C(x)_j = sign(x_j)·2^(a+1) with probability |x_j|/2^a − 1, else sign(x_j)·2^a. E C(x) =
x, E‖C(x) − x‖² ≤ ‖x‖²/8. Bits: 9·d. No multiplication is needed: 23 random bits are added to the bits of a float32, and
its mantissa is dropped.

Limit: what is subnormal becomes 0 or 2⁻¹²⁶, unbiased but without the bound. Beyond 2¹²⁷ there is no power of two to
round up to, so that all becomes 2¹²⁷. NaN becomes infinity.

Source: Horváth et al., "Natural Compression for Distributed Deep Learning", 2019.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ashl.compression import Flags, Turn
from ashl.compression.aids import Aids
from ashl.compression.bits import BLOCK, pack_signs, packed_bytes
from ashl.compression.body import HEADER, Parts, typed
from ashl.compression.code import Code
from ashl.compression.levels import whole
from ashl.option import option

OMEGA = 1 / 8
MANTISSA = np.uint32(23)  # bits
INFINITE = np.uint32(0x7F800000)
TOP = np.uint32(0x7F000000)  # 2¹²⁷


@option
class NaturalCompression(Code, Aids):
    """Keeps signs and exponents."""

    code: ClassVar[int] = 17
    flags: ClassVar[Flags] = Flags(unbiased=True, contraction=True)

    def pack(self, x: np.ndarray, turn: Turn) -> Parts:
        return Parts(x.size, write_natural(x, turn.stream()))

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        return read_natural(typed(whole(parts, d), "u1", natural_bytes(d), "signs and exponents"), d)

    def payload(self, ratio: float | None, d: int) -> int:
        return HEADER.size + natural_bytes(d)

    def bound(self, ratio: float | None, d: int) -> float:
        return OMEGA


def natural_bytes(d: int) -> int:
    """d exponents of 8 bits, then d signs."""
    return d + packed_bytes(d, 1)


def write_natural(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """uint8 [natural_bytes]."""
    stream = np.empty(natural_bytes(x.size), np.uint8)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        bits = part.view(np.uint32)
        if not (part.max() < 2.0**127 and part.min() > -(2.0**127)):
            size = bits & np.uint32(0x7FFFFFFF)
            bits = np.where(size >= INFINITE, INFINITE, np.minimum(size, TOP))
        dither = rng.bit_generator.random_raw(-(-part.size // 2)).view(np.uint32)[: part.size]
        dither >>= np.uint32(32 - 23)
        dither += bits
        dither >>= MANTISSA
        stream[start : start + part.size] = dither.astype(np.uint8)  # of sign and exponent, the exponent
    stream[x.size :] = pack_signs(x)
    return stream


def read_natural(stream: np.ndarray, d: int) -> np.ndarray:
    """float32 [d] again."""
    x = np.empty(d, np.uint32)
    for start in range(0, d, BLOCK):
        part = x[start : start + BLOCK]
        part[:] = np.unpackbits(stream[d + start // 8 :][: BLOCK // 8], count=part.size, bitorder="little")
        part <<= np.uint32(8)
        part |= stream[start : start + part.size]
        part <<= MANTISSA
    return x.view(np.float32)

"""Signs and exponents: each element is rounded at random to one of its two neighbouring powers of
two.

Rule: as in `ashl.compression.natural`, which states the limits. E C(x) = x and E‖C(x) − x‖² ≤
OMEGA·‖x‖².
"""

import numpy as np
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.bits import BLOCK, pack_signs, packed_bytes
from ashl.data.counter_rng import CounterRng

OMEGA = 1 / 8
MANTISSA = np.uint32(23)  # bits of the mantissa of float32
INFINITE = np.uint32(0x7F800000)  # bits of ∞
TOP = np.uint32(0x7F000000)  # bits of 2¹²⁷


def natural_bytes(d: int) -> int:
    """Return the size in bytes of d exponents of 8 bits and d signs."""
    return d + packed_bytes(d, 1)


def write_natural(x: Array, words: CounterRng) -> Array:
    """Encode x as exponents and signs, uint8 [natural_bytes]."""
    if isinstance(x, Tensor):
        return device_kernels.write_natural(x, words)
    stream = np.empty(natural_bytes(x.size), np.uint8)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        bits = part.view(np.uint32)
        if not (part.max() < 2.0**127 and part.min() > -(2.0**127)):
            size = bits & np.uint32(0x7FFFFFFF)
            bits = np.where(size >= INFINITE, INFINITE, np.minimum(size, TOP))
        noise = words.words(bits, start // 2, -(-part.size // 2)).view(np.uint32)[: part.size]
        noise >>= np.uint32(32 - 23)
        noise += bits
        noise >>= MANTISSA
        # uint8 drops the sign, which is above the exponent.
        stream[start : start + part.size] = noise.astype(np.uint8)
    stream[x.size :] = pack_signs(x)
    return stream


def read_natural(stream: Array, d: int) -> Array:
    """Decode exponents and signs to float32 [d]."""
    if isinstance(stream, Tensor):
        return device_kernels.read_natural(stream, d)
    x = np.empty(d, np.uint32)
    for start in range(0, d, BLOCK):
        part = x[start : start + BLOCK]
        part[:] = np.unpackbits(
            stream[d + start // 8 :][: BLOCK // 8], count=part.size, bitorder="little"
        )
        part <<= np.uint32(8)
        part |= stream[start : start + part.size]
        part <<= MANTISSA
    return x.view(np.float32)

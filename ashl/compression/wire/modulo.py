"""A vector in b bits an element, for a reader that has one near it: what is sent is where each
element lies modulo 2^b.

Rule: q_j = ⌊x_j/ε + u_j⌋ with u_j uniform in [0, 1), so that E ε·q = x; sent is q mod 2^b. A reader
with y takes of all numbers congruent to that the one nearest to y_j/ε, which is q_j where |x_j −
y_j| < (2^(b−1) − 1)·ε: what it costs goes by how near the two are, not by how long they are. A
checksum of what was left out says whether it came out right.

Source: Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR
2021, on the cubic lattice.
"""

import zlib

import numpy as np

from ashl.compression.contract import EncodeContext, PayloadError
from ashl.compression.wire.bits import pack, packed_bytes, unpack
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part

CODE = 104  # of such bodies on the wire


def payload_nbytes(d: int, bits: int) -> int:
    return HEADER.size + 12 + packed_bytes(d, bits)


def residues(x: np.ndarray, step: float, bits: int, context: EncodeContext) -> Parts:
    """x on a grid of this step."""
    drawn = (context.words().words(x, 0, x.size) >> np.uint64(11)) * 2.0**-53
    numbers = np.floor(x.astype(np.float64) / step + drawn).astype(np.int64)
    about = np.array([step], "<f8").tobytes() + checksum(numbers, bits).to_bytes(4, "little")
    low = (numbers & (2**bits - 1)).astype(np.uint32)
    return Parts(x.size, pack(low, bits), scales=np.frombuffer(about, np.uint8), form=bits)


def nearest(parts: Parts, near: np.ndarray) -> np.ndarray | None:
    """float32, what such a body holds, for who has a vector near it; None where that is too far.
    Raises BodyError.
    """
    bits, d = parts.form, near.size
    if parts.count != d or not 2 <= bits <= 16 or parts.values.size != packed_bytes(d, bits):
        raise PayloadError(f"what came are no {d} residues: form {bits}, {parts.count} values")
    about = typed_part(parts.scales, "u1", 12, "scales").tobytes()
    step, low = (
        float(np.frombuffer(about, "<f8", 1)[0]),
        unpack(parts.values, bits, d).astype(np.int64),
    )
    if not 0 < step < np.inf:
        raise PayloadError(f"residues came with a step of {step}")
    with np.errstate(invalid="ignore"):  # where the reader's own is no number, nothing is read
        numbers = low + np.rint((near / step - low) / 2**bits).astype(np.int64) * 2**bits
    right = checksum(numbers, bits) == int.from_bytes(about[8:], "little")
    return (numbers * step).astype(np.float32) if right else None


def checksum(numbers: np.ndarray, bits: int) -> int:
    return zlib.crc32((numbers >> bits).astype("<i8").tobytes())

"""Send a vector modulo 2^b, for a receiver that has a vector near it.

Rule: q_j = ⌊x_j/ε + u_j⌋ with u_j uniform in [0, 1), so that E ε·q = x; the message is q mod 2^b. A
receiver with y decodes the number congruent to that which is nearest to y_j/ε. It is q_j if |x_j −
y_j| < (2^(b−1) − 1)·ε. So b depends on the distance of the two vectors, not on their norms. A
checksum of the omitted bits shows whether decoding succeeded. Bits: b·d + 96.

Source: Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR
2021, on the cubic lattice.
"""

import zlib

import numpy as np

from ashl.compression.contract import EncodeContext, PayloadError
from ashl.compression.wire.bits import pack, packed_bytes, unpack
from ashl.compression.wire.payload_format import HEADER, Parts, typed_part

CODE = 104  # number of the code in the header


def payload_nbytes(d: int, bits: int) -> int:
    """Return the size of a payload in bytes."""
    return HEADER.size + 12 + packed_bytes(d, bits)


def residues(x: np.ndarray, step: float, bits: int, context: EncodeContext) -> Parts:
    """Return x modulo 2^bits on a grid with this step."""
    drawn = (context.words().words(x, 0, x.size) >> np.uint64(11)) * 2.0**-53
    numbers = np.floor(x.astype(np.float64) / step + drawn).astype(np.int64)
    about = np.array([step], "<f8").tobytes() + checksum(numbers, bits).to_bytes(4, "little")
    low = (numbers & (2**bits - 1)).astype(np.uint32)
    return Parts(x.size, pack(low, bits), scales=np.frombuffer(about, np.uint8), form=bits)


def nearest(parts: Parts, near: np.ndarray) -> np.ndarray | None:
    """Decode a payload with the receiver's vector `near`, float32; None if it is too far away.

    Raises: PayloadError if the payload is malformed.
    """
    bits, d = parts.form, near.size
    if parts.count != d or not 2 <= bits <= 16 or parts.values.size != packed_bytes(d, bits):
        raise PayloadError(f"expected {d} residues; received form {bits} with {parts.count} values")
    about = typed_part(parts.scales, "u1", 12, "scales").tobytes()
    step = float(np.frombuffer(about, "<f8", 1)[0])
    low = unpack(parts.values, bits, d).astype(np.int64)
    if not 0 < step < np.inf:
        raise PayloadError(f"received residues with a step of {step}")
    with np.errstate(invalid="ignore"):  # a NaN in `near` fails the checksum
        numbers = low + np.rint((near / step - low) / 2**bits).astype(np.int64) * 2**bits
    right = checksum(numbers, bits) == int.from_bytes(about[8:], "little")
    return (numbers * step).astype(np.float32) if right else None


def checksum(numbers: np.ndarray, bits: int) -> int:
    """Return a checksum of the bits of each number above the lowest `bits`."""
    return zlib.crc32((numbers >> bits).astype("<i8").tobytes())

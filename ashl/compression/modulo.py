"""Send a vector modulo 2^b, for a receiver that has a vector near it.

Rule: q_j = ⌊x_j/ε + u_j⌋ with u_j uniform in [0, 1), so that E ε·q = x; the message is q mod 2^b. A
receiver with y decodes the number congruent to that which is nearest to y_j/ε. It is q_j if |x_j −
y_j| < (2^(b−1) − 1)·ε. So b depends on the distance of the two vectors, not on their norms. A
checksum of the omitted bits shows whether decoding succeeded. Bits: b·d + 96.

Source: Davies et al., "New Bounds for Distributed Mean Estimation and Variance Reduction", ICLR
2021, on the cubic lattice.
"""

import math
import zlib

import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext
from ashl.compression.kernels import as_tensor, pack, packed_bytes, unpack
from ashl.compression.payload import HEADER, Parts, PayloadError, tensor_of_bytes, typed_part

CODE = 104  # number of the code in the header


def payload_nbytes(d: int, bits: int) -> int:
    """Return the size of a payload in bytes."""
    return HEADER.size + 12 + packed_bytes(d, bits)


def encode_residues(x: Tensor, step: float, bits: int, context: EncodeContext) -> Parts:
    """Return x modulo 2^bits on a grid with this step."""
    drawn = (context.words().words(x, 0, len(x)) >> 11 & (1 << 53) - 1).double() * 2.0**-53
    levels = (x.double() / step + drawn).floor().to(torch.int64)
    about = torch.tensor([step], dtype=torch.float64).view(torch.uint8)
    check = tensor_of_bytes(checksum(levels, bits).to_bytes(4, "little"))
    return Parts(len(x), pack(levels, bits), scales=torch.cat([about, check]), form=bits)


def decode_near(parts: Parts, near: Tensor) -> Tensor | None:
    """Decode a payload with the receiver's vector `near`, float32; None if it is too far away.

    Raises: PayloadError if the payload is malformed.
    """
    bits, d = parts.form, len(near)
    if parts.count != d or not 2 <= bits <= 16 or len(parts.values) != packed_bytes(d, bits):
        raise PayloadError(f"expected {d} residues; received form {bits} with {parts.count} values")
    about = typed_part(parts.scales, torch.uint8, 12, "scales").clone()
    step = float(about[:8].view(torch.float64)[0])
    if not 0 < step < math.inf:
        raise PayloadError(f"received residues with a step of {step}")
    low = as_tensor(unpack(parts.values, bits, d)).to(torch.int64)
    # A NaN in `near` fails the checksum.
    turns = ((near.double() / step - low) / 2**bits).round().to(torch.int64)
    levels = low + turns * 2**bits
    right = checksum(levels, bits) == int.from_bytes(about[8:].numpy().tobytes(), "little")
    return (levels.double() * step).float() if right else None


def checksum(levels: Tensor, bits: int) -> int:
    """Return a checksum of the bits of each number above the lowest `bits`."""
    return zlib.crc32((levels >> bits).numpy().tobytes())

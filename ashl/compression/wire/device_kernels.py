"""Kernels of codecs for tensors on a device; they process whole vectors at once.

They do the same as `bits`, `levels`, `powers` and `select` do for arrays block by block, with the
same bits. Results are equal on all devices because the kernels use only integers, shifts,
comparisons, and float operations that are rounded one by one. They avoid division by a number,
which torch replaces on CUDA by multiplication with the reciprocal, and fused multiply-add. Sums are
trees of elementwise additions in NumPy's order. Only `lengths` may differ between devices, in the
last bit or two.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire.arrays import TYPES, Array, read
from ashl.data.counter_rng import CounterRng
from ashl.learn.device import to_host

LEAF, LANES = 128, 8  # NumPy adds 128 elements in 8 accumulators before it adds pairwise
EIGHT_BITS = 0x0102040810204080  # as a factor: gathers the lowest bits of 8 bytes in the top byte
MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign
INFINITE, TOP, MANTISSA = 0x7F800000, 0x7F000000, 23  # float32: ∞, 2¹²⁷, mantissa bits


# --- bit streams


def pack(numbers: Tensor, width: int) -> Tensor:
    """Return a stream of numbers of `width` bits, uint8 [⌈count·width/8⌉]."""
    if width in (8, 16):
        return numbers.to(TYPES["u1" if width == 8 else "<i2"]).view(torch.uint8)
    group, filled = _whole_bytes(width)
    count, kind = len(numbers), torch.uint8 if width < 8 else torch.int64
    columns = (
        torch.nn.functional.pad(numbers.to(kind), (0, -count % group)).view(-1, group)
        & (1 << width) - 1
    )
    if width == 1:
        return (columns.reshape(-1).view(torch.int64) * EIGHT_BITS >> 56).to(torch.uint8)
    stream = torch.zeros((len(columns), filled), dtype=torch.uint8, device=str(numbers.device))
    for byte in range(filled):
        for lane in range(byte * 8 // width, (byte * 8 + 7) // width + 1):
            shift = lane * width - byte * 8
            bits = columns[:, lane] << shift if shift >= 0 else columns[:, lane] >> -shift
            stream[:, byte] |= bits.to(torch.uint8)
    return stream.view(-1)[: -(-count * width // 8)]


def unpack(buffer: Tensor, width: int, count: int) -> Tensor:
    """Return the first `count` numbers of a stream: uint8 up to a width of 8, else int32."""
    if width == 8:
        return buffer[:count]
    group, filled = _whole_bytes(width)
    size = -(-count * width // 8)
    kind, wide = (torch.uint8, torch.int32) if width < 8 else (torch.int32, torch.int64)
    rows = torch.nn.functional.pad(buffer[:size], (0, -size % filled)).view(-1, filled)
    found = torch.empty((len(rows), group), dtype=kind, device=str(buffer.device))
    for lane in range(group):
        start, end = lane * width, (lane + 1) * width
        word = rows[:, start // 8].to(wide) >> start % 8
        for byte in range(start // 8 + 1, (end + 7) // 8):
            word |= rows[:, byte].to(wide) << byte * 8 - start
        found[:, lane] = (word & (1 << width) - 1).to(kind)
    return found.view(-1)[:count]


def _whole_bytes(width: int) -> tuple[int, int]:
    """Return (numbers, bytes) of the smallest group of numbers that fills whole bytes."""
    common = math.gcd(8, width)
    return 8 // common, width // common


def pack_signs(x: Tensor) -> Tensor:
    return pack(x.view(torch.int32) < 0, 1)


def apply_signs(buffer: Tensor, count: int, magnitude: Array) -> Tensor:
    if isinstance(magnitude, Tensor):
        bits = magnitude.view(torch.int32)
    else:
        bits = int(magnitude.view(np.int32)[0])
    return _with_signs(buffer, count, bits)


def flip_signs(buffer: Tensor, rows: Tensor) -> Tensor:
    """Return x with the sign of each element flipped where the stream has a 1."""
    return _with_signs(buffer, rows.numel(), rows.reshape(-1).view(torch.int32)).view(rows.shape)


def _with_signs(buffer: Tensor, count: int, bits: Tensor | int) -> Tensor:
    return (unpack(buffer, 1, count).to(torch.int32) * -(2**31) ^ bits).view(torch.float32)


# --- selection


def largest(keys: Tensor, k: int, rank: int | None, sample: Tensor) -> Tensor:
    """Return the ascending indices, int64 [k], of the k largest keys; of equal keys the first ones.

    `rank` is the rank in `sample` of a bound that very likely more than k keys reach; None selects
    among all keys.
    """
    if rank is not None:
        places = indices_reaching(keys, sample.kthvalue(len(sample) - rank + 1).values.clamp(min=1))
        if len(places) >= k:
            return places[_choose(keys[places], k)]
    return _choose(keys, k)


def largest_of_rows(keys: Tensor, k: int) -> Tensor:
    """Return the ascending column indices, int64 [rows, k], of the k largest keys of each row."""
    least = keys.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
    above, equal = keys > least, keys == least
    chosen = above | equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))
    return chosen.nonzero()[:, 1].view(-1, k)


def indices_reaching(keys: Tensor, bound: Tensor | int) -> Tensor:
    return (keys >= bound).nonzero().view(-1)


def magnitudes(x: Tensor) -> Tensor:
    """Return integers with the order of |x|: the bits of float32 without its sign."""
    return x.view(torch.int32) & MAGNITUDE


def _choose(keys: Tensor, k: int) -> Tensor:
    least = keys.topk(k, sorted=False).values.amin()
    above, equal = ((keys > least).nonzero().view(-1), (keys == least).nonzero().view(-1))
    return torch.cat([above, equal[: k - len(above)]]).sort().values


# --- levels


def round_to_int32(
    y: Tensor, words: CounterRng, rest: Tensor, start: int, bits: int, own: int
) -> Tensor:
    count, lanes = y.numel(), 64 // own
    first = (
        words.words(y, start // lanes, -(-count // lanes)).view(torch.int16)[:count].to(torch.int32)
    )
    sums = y.reshape(-1).to(torch.int32) + rest.repeat(-(-count // len(rest)))[:count]
    return (sums >> bits - own) + (first & (1 << own) - 1) >> own


def spread(x: Tensor, span: Tensor, top: float, small: float, enlarged: float) -> Tensor:
    factor = torch.where(span < small, enlarged, 1.0)
    x, span = x * factor, span * factor
    safe = torch.where(span > 0, span, 1.0)
    y = x * torch.where(span > 0, torch.full_like(safe, top) / safe, 0.0)
    return torch.where(torch.isfinite(span), y, 0.0)


def ends_of(x: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(x)) + 0.0


def lengths(rows: Tensor) -> Tensor:
    """Return ‖·‖₂ of each row, float32 [n, 1]; finite rows are limited to the largest float32."""
    wide = rows.to(torch.float64)
    squares = (wide * wide).sum(1)
    most = float(np.finfo(np.float32).max) ** 2
    return (
        torch.where(torch.isfinite(squares), squares.clamp(max=most), squares)
        .sqrt()
        .to(torch.float32)[:, None]
    )


# --- ternary numbers


def pack_ternary(numbers: Tensor, digits: int, block: int) -> Tensor:
    """Return ternary numbers five to a byte, block by block, as `ternary_packing.pack_ternary`
    does.
    """
    whole = len(numbers) // block * block
    pieces = [_pack_planes(numbers[:whole].view(-1, digits, block // digits))] if whole else []
    if rest := len(numbers) - whole:
        pieces.append(
            _pack_planes(
                torch.nn.functional.pad(numbers[whole:], (0, -rest % digits)).view(1, digits, -1)
            )
        )
    return torch.cat(pieces)


def _pack_planes(planes: Tensor) -> Tensor:
    packed = planes[:, -1].clone()
    for j in reversed(range(planes.shape[1] - 1)):
        packed = packed * 3 + planes[:, j]
    return packed.reshape(-1)


def unpack_ternary(stream: Tensor, count: int, digits: int, block: int) -> Tensor:
    whole = count // block * block
    if whole:
        pieces = [_unpack_planes(stream[: whole // digits].view(-1, block // digits), digits)]
    else:
        pieces = []
    if count > whole:
        pieces.append(_unpack_planes(stream[None, whole // digits :], digits))
    return torch.cat(pieces)[:count]


def _unpack_planes(packed: Tensor, digits: int) -> Tensor:
    planes = []
    for _ in range(digits):
        rest = packed.div(3, rounding_mode="floor")
        planes.append(packed - rest * 3)
        packed = rest
    return torch.stack(planes, 1).reshape(-1)


# --- signs and exponents


def write_natural(x: Tensor, words: CounterRng) -> Tensor:
    size = magnitudes(x)
    size = torch.where(size >= INFINITE, INFINITE, size.clamp(max=TOP))
    noise = (
        words.words(x, 0, -(-len(x) // 2)).view(torch.int32)[: len(x)] >> 32 - MANTISSA
        & (1 << MANTISSA) - 1
    )
    return torch.cat([(noise + size >> MANTISSA).to(torch.uint8), pack_signs(x)])


def read_natural(stream: Tensor, d: int) -> Tensor:
    exponents = stream[:d].to(torch.int32) << MANTISSA
    return _with_signs(stream[d:], d, exponents)


# --- sums


def block_sums(x: Tensor, block: int) -> list[float]:
    """Return the sum of each block of x [d], in the order of additions of NumPy's sum.

    The host adds the incomplete last block, and each block whose sum overflows float32.
    """
    whole = len(x) // block * block
    sums = x[:whole].view(-1, LEAF // LANES, LANES)
    total = sums[:, 0]
    for j in range(1, LEAF // LANES):
        total = total + sums[:, j]
    total = total.view(-1, block // LEAF * LANES)
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    found = to_host(torch.cat([total.view(-1), x[whole:]])).numpy()
    sums, rest = found[: whole // block], found[whole // block :]
    each = sums.tolist()
    for i in np.flatnonzero(~np.isfinite(sums)):
        each[i] = _sum(read(x[i * block : (i + 1) * block]))
    return [*each, _sum(rest)] if rest.size else each


def _sum(x: np.ndarray) -> float:
    total = x.sum()
    return float(total if np.isfinite(total) else x.sum(dtype=np.float64))


# --- powers of two


def power(exponents: Tensor) -> Tensor:
    """Return 2**exponent exactly, float64."""
    return (exponents.to(torch.int64) + 1023 << 52).view(torch.float64)

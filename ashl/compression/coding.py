"""Codes of a payload's parts: indices, selected values, levels of a quantizer, entropy codes.

Each code has a function for its size in bytes, one that writes and one that reads. Reading checks
sizes, orders and ranges before it uses them, and raises PayloadError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pcodec
import torch
from torch import Tensor

from ashl.compression.kernels import (
    TERNARY_BLOCK,
    TOGETHER,
    Array,
    RoundingNoise,
    allocate,
    as_native,
    as_tensor,
    block_rows,
    blocks,
    concatenate,
    convert,
    flip_signs,
    is_true,
    mean_magnitude,
    natural_bytes,
    pack,
    pack_native,
    pack_signs,
    pack_ternary,
    pack_truths,
    packed_bytes,
    pad_to,
    read_natural,
    round_ternary,
    rows_of,
    ternary_nbytes,
    to_device_of,
    unpack,
    unpack_ternary,
    unpack_truths,
    view_as,
    where_true,
    write_natural,
)
from ashl.compression.payload import EMPTY, PayloadError, tensor_of_bytes, typed_part
from ashl.data.counter_rng import CounterRng
from ashl.device import is_on_host, read_scalars, to_host

# --- indices: k ascending indices below d
#
# int32: 32 bits per index; nothing to compute. packed: ⌈log2 d⌉ bits per index. bitmap: one bit per
# element; shorter than packed if k/d > 1/⌈log2 d⌉, which is 4-5 % for millions of elements. golomb:
# for each gap between selected elements, its low b bits, and the other bits in unary. If each
# element is selected independently, its size is within 2 % of the entropy. The size depends on the
# indices, and `index_bytes` is an upper bound. Random indices need 8 bytes: both ends draw them
# from a seed, see `indices_of_seed`.
#
# Format of golomb: b as one byte, the low bits of all gaps, then the unary numbers of all gaps, so
# that both can be decoded as whole tensors.
#
# Source: Golomb, "Run-Length Encodings", 1966, with the b of Sattler et al., "Sparse Binary
# Compression", IJCNN 2019; seeds as in Konečný et al., "Federated Learning: Strategies for
# Improving Communication Efficiency", 2016.

IndexCode = Literal["int32", "packed", "bitmap", "golomb"]
INDEX_CODES: Sequence[IndexCode] = ("int32", "packed", "bitmap", "golomb")
VARIABLE: Sequence[IndexCode] = ("golomb",)  # codes whose size depends on the indices
SEED_BYTES = 8


def index_width(d: int) -> int:
    """Return ⌈log2 d⌉, at least 1."""
    return max(1, (d - 1).bit_length())


def low_bits(k: int, d: int) -> int:
    """Return b of Golomb's code: 2^b is the best power of two for the gaps of k of d elements."""
    if k == d:
        return 0
    golden = (math.sqrt(5) - 1) / 2  # φ − 1
    return max(0, 1 + math.floor(math.log2(math.log(golden) / math.log1p(-k / d))))


def index_bytes(code: IndexCode, k: int, d: int) -> int:
    """Return the size in bytes of k indices below d; an upper bound for golomb."""
    if code == "golomb":
        b = low_bits(k, d) if k else 0
        # The unary numbers are k ends, and gaps that sum to at most d − k.
        return 1 + packed_bytes(k, b) + packed_bytes(k + ((d - k) >> b), 1) if k else 0
    if code == "packed":
        return packed_bytes(k, index_width(d))
    return 4 * k if code == "int32" else -(-d // 8)


def max_index_bytes(code: IndexCode, k: int, d: int) -> int:
    """Return an upper bound in bytes of at most k indices.

    Golomb's upper bound is not monotonic: it falls by up to 7 % where a larger k makes b smaller.
    """
    size = index_bytes(code, k, d)
    return -(-27 * size // 25) + 1 if code == "golomb" else size


def write_indices(code: IndexCode, indices: Tensor, d: int) -> Tensor:
    """Encode indices in at most `index_bytes` bytes."""
    if code == "int32":
        return indices.to(torch.int32)
    if code == "packed":
        return pack(indices, index_width(d))
    return _write_golomb(indices, d) if code == "golomb" else _bitmap(indices, d)


def read_indices(code: IndexCode, buffer: Tensor, k: int, d: int) -> Tensor:
    """Decode k ascending indices.

    Raises: PayloadError if their size is wrong, or if they are not ascending or not below d.
    """
    size = index_bytes(code, k, d)
    if len(buffer) > size or (len(buffer) < size and code not in VARIABLE):
        raise PayloadError(
            f"{k} {code} indices below {d} take {size} bytes; received {len(buffer)}"
        )
    if code == "int32":
        indices = view_as(buffer, torch.int32)
    elif code == "packed":
        indices = as_tensor(unpack(buffer, index_width(d), k)).to(torch.int32)
    elif code == "golomb":
        indices = _read_golomb(buffer, k, d)
    else:
        indices = where_true(unpack_truths(buffer, d))
    check_ascending(indices, k, d)
    return indices


def check_ascending(indices: Tensor, k: int, d: int) -> None:
    """Raise PayloadError unless these are k ascending numbers from 0 to d − 1."""
    found = as_native(indices)
    # One condition, because each transfer from a device takes time.
    if len(found) != k or not (
        k == 0 or is_true((found[0] >= 0) & (found[-1] < d) & where_increasing(found[None]).all())
    ):
        raise PayloadError(f"the received indices are not {k} ascending numbers below {d}")


def where_increasing(rows: Array) -> Array:
    """Return True for each element of the rows [n, k] that is above the one before, [n, k − 1]."""
    return rows[:, 1:] > rows[:, :-1]


def _bitmap(indices: Tensor, size: int) -> Tensor:
    """Return a stream of `size` bits with ones at these indices."""
    truths = torch.zeros(size, dtype=torch.bool, device=str(indices.device))
    return pack_truths(truths.index_fill_(0, indices, True))


def _write_golomb(indices: Tensor, d: int) -> Tensor:
    if not len(indices):
        return EMPTY
    b = low_bits(len(indices), d)
    gaps = as_native(indices.clone())
    gaps[1:] -= as_native(indices)[:-1]
    gaps[1:] -= 1
    low = [pack(gaps, b)] if b else []
    gaps >>= b
    gaps += 1
    ends = gaps.cumsum(0)
    unary = _bitmap(as_tensor(ends - 1), int(read_scalars([ends[-1]])[0]))
    return torch.cat([to_device_of(unary, torch.tensor([b], dtype=torch.uint8)), *low, unary])


def _read_golomb(buffer: Tensor, k: int, d: int) -> Tensor:
    if not k:
        return EMPTY
    b = int(read_scalars([buffer[0]])[0]) if len(buffer) else -1
    if b != low_bits(k, d) or len(buffer) < (first := 1 + packed_bytes(k, b)):
        raise PayloadError(
            f"received {k} golomb indices below {d} with {b} low bits in {len(buffer)} bytes"
        )
    ends = as_native(where_true(unpack_truths(buffer[first:], 8 * (len(buffer) - first))))
    if len(ends) != k or not is_true(ends[-1] // 8 == len(buffer) - first - 1):
        raise PayloadError(f"expected {k} golomb indices below {d}; received {len(ends)}")
    # The bits below an end are the ends before it and the high bits of all gaps up to it.
    before = as_native(torch.arange(k, device=str(buffer.device)))
    indices = ends - before
    indices <<= b
    indices += before
    if b:
        indices += convert(unpack(buffer[1:first], b, k), torch.int64).cumsum(0)
    return as_tensor(indices)


def new_seed(rng: np.random.Generator) -> Tensor:
    """Return a random seed, uint8 [8]."""
    return torch.from_numpy(random_words(rng, 2).astype("<u4").view(np.uint8))


def indices_of_seed(seed: Tensor, k: int, d: int) -> Tensor:
    """Return the ascending indices, int64 [k], below d of a seed.

    Raises: PayloadError if the seed is not 8 bytes.
    """
    if len(seed) != SEED_BYTES:
        raise PayloadError(f"expected a seed of {SEED_BYTES} bytes; received {len(seed)}")
    sequence = np.random.SeedSequence(np.frombuffer(seed.numpy().tobytes(), "<u4").tolist())
    drawn = draw_distinct(np.random.Generator(np.random.SFC64(sequence)), k, d)
    return torch.from_numpy(drawn.astype(np.int64, copy=False))


def draw_distinct(rng: np.random.Generator, k: int, d: int) -> np.ndarray:
    """Return k ascending numbers below d; each set is equally likely.

    It draws with replacement until k different numbers are found, and removes the surplus at
    random. Drawing 500 of 1000 with replacement would give only about 390 different elements.
    """
    if 2 * k > d:
        left = np.ones(d, bool)
        left[draw_distinct(rng, d - k, d)] = False
        return np.flatnonzero(left)
    found = np.empty(0, np.uint32)
    while found.size < k:
        # Expected number of draws until the missing numbers are found.
        missing = -d * math.log1p(-(k - found.size) / (d - found.size))
        more = rng.integers(0, d, math.ceil(missing + 4 * math.sqrt(missing)), np.uint32)
        found = np.sort(np.concatenate([found, more]))
        found = found[np.concatenate([[True], found[1:] != found[:-1]])]
    surplus = found.size - k
    if surplus:
        return np.delete(found, np.argpartition(random_words(rng, found.size), surplus)[:surplus])
    return found


def random_words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return uniform random words, uint32 [count]."""
    return rng.integers(0, 2**32, count, np.uint32)


# --- values of selected elements: k numbers, float32 before and after
#
# fp32: unchanged. fp16: half precision of the values divided by the largest magnitude, which avoids
# overflow and underflow to 0. bf16: the nearest 16-bit number with the range of float32. natural: a
# sign and a random power of two, 9 bits. int8, int4: the nearest of 255 or 15 levels between plus
# and minus the largest magnitude of each 1024 values. int2: a sign, and whether the magnitude
# exceeds the mean of 1024 values. Either group decodes to the mean of its magnitudes. mean: a sign,
# 1 bit; all magnitudes decode to their mean.
#
# Source: mean as in Sattler et al., STC, 2019; 2 bits for chunks of selected values as in Sarfi et
# al., SparseLoCo, 2025; natural: Horváth et al., 2019.

ValueCode = Literal["fp32", "fp16", "bf16", "natural", "int8", "int4", "int2", "mean"]
WIDTHS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "int2": 2, "mean": 1}
OMEGA = 1 / 8  # bound of `natural`
CHUNK = 1024  # values that share a scale, with int8, int4 and int2
# Codes that run on the host also for values on a device: the values are few.
BY_HOST: Sequence[ValueCode] = ("int8", "int4", "int2")
VALUES = 1  # name of the random stream of values; indices have another one


def value_bytes(code: ValueCode, k: int) -> int:
    """Return the size in bytes of k values and their scales."""
    if code == "natural":
        return natural_bytes(k)
    return packed_bytes(k, WIDTHS[code]) + 4 * _num_scales(code, k)


def value_bound(code: ValueCode, k: int) -> float:
    """Return b such that E‖C(v) − v‖² ≤ b·‖v‖² for k values."""
    if code in ("int8", "int4"):
        # Worst case: the largest value is exact, and all others are half a step, rounded to 0.
        a = (min(k, CHUNK) - 1) / (2 * _top(code)) ** 2
        return a / (1 + a) + 2.0**-40
    if code in ("int2", "mean"):
        # The mean of k magnitudes keeps at least 1/k of the sum of their squares.
        return 1 - 1 / max(1, min(k, CHUNK) if code == "int2" else k)
    return {"fp32": 0.0, "fp16": 2.0**-20, "bf16": 2.0**-16, "natural": OMEGA}[code]


def write_values(
    code: ValueCode, values: Tensor, words: Callable[[], CounterRng]
) -> tuple[Tensor, Tensor]:
    """Return (values, scales) as parts of a payload; `words` draws the random words of natural."""
    if code in BY_HOST and not is_on_host(values):
        coded, scales = write_values(code, to_host(values), words)
        return to_device_of(values, coded), scales
    if code == "fp32":
        return values, EMPTY
    if code == "bf16":
        return values.to(torch.bfloat16), EMPTY
    if code == "fp16":
        scale = values.abs().amax(0, keepdim=True) if len(values) else values.new_zeros(1)
        return (values / torch.where(scale == 0, 1.0, scale)).to(torch.float16), scale
    if code == "natural":
        return write_natural(values, words()), EMPTY
    if code == "mean":
        return pack_signs(values), mean_magnitude(values)[: len(values)]
    rows = pad_to(values, CHUNK).view(-1, CHUNK)
    if code == "int2":
        levels, scales = _two_levels(rows, len(values))
    else:
        levels, scales = _even_levels(rows, _top(code))
    return pack(levels.view(-1)[: len(values)], WIDTHS[code]), scales.view(-1)


def read_values(code: ValueCode, values: Tensor, scales: Tensor, k: int) -> Tensor:
    """Decode k values to float32.   Raises: PayloadError if the sizes are wrong."""
    if code in BY_HOST and not is_on_host(values):
        return to_device_of(values, read_values(code, to_host(values), to_host(scales), k))
    scales = typed_part(scales, torch.float32, _num_scales(code, k), "scales")
    if code == "fp32":
        return typed_part(values, torch.float32, k, "values")
    if code == "bf16":
        return typed_part(values, torch.bfloat16, k, "values").float()
    if code == "fp16":
        return typed_part(values, torch.float16, k, "values").float() * scales
    typed_part(values, torch.uint8, value_bytes(code, k) - scales.nbytes, "values")
    if code == "natural":
        return read_natural(values, k)
    if code == "mean":
        return flip_signs(values, scales, k)
    numbers = pad_to(as_tensor(unpack(values, WIDTHS[code], k)), CHUNK).view(-1, CHUNK)
    if code == "int2":
        low, high = scales.view(-1, 2).split(1, 1)
        magnitude = torch.where(numbers & 2 > 0, high, low)
        found = torch.where(numbers & 1 > 0, -magnitude, magnitude)
    else:
        found = ((numbers.double() - _top(code)) / _top(code) * scales[:, None]).float()
    return found.reshape(-1)[:k]


def _num_scales(code: ValueCode, k: int) -> int:
    """Return the number of float32 scales of k values."""
    chunks = -(-k // CHUNK)
    counts = {"fp16": 1, "int8": chunks, "int4": chunks, "int2": 2 * chunks, "mean": min(1, k)}
    return counts.get(code, 0)


def _top(code: ValueCode) -> int:
    return 2 ** (WIDTHS[code] - 1) - 1


def _even_levels(rows: Tensor, top: int) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1, keepdim=True)
    level = (rows.double() / torch.where(scale == 0, 1.0, scale) * top).round_()
    # A scale that is not finite makes the decoded values not finite.
    return level.nan_to_num_(0.0).to(torch.int64) + top, scale


def _two_levels(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    magnitude = rows.abs().double()
    sizes = torch.full((len(rows), 1), CHUNK)
    sizes[-1:] -= -k % CHUNK
    above = magnitude > magnitude.sum(1, keepdim=True) / sizes
    count = above.sum(1, keepdim=True)
    high = torch.where(above, magnitude, 0).sum(1, keepdim=True) / count.clamp(min=1)
    low = torch.where(above, 0, magnitude).sum(1, keepdim=True) / (sizes - count).clamp(min=1)
    return torch.signbit(rows) + 2 * above, torch.cat([low, high], 1).float()


def write_ternary(x: Tensor, top: Tensor, noise: RoundingNoise, beyond: bool) -> Tensor:
    """Round x to ternary numbers and pack them, uint8 [ternary_nbytes]."""
    pieces = [
        pack_ternary(round_ternary(x[where], top, noise, where.start, beyond))
        for where in blocks(x, TOGETHER * TERNARY_BLOCK)
    ]
    return concatenate(pieces, x)


def read_ternary(stream: Tensor, top: Tensor, count: int) -> Tensor:
    """Decode a stream to −top, 0 and top, float32 [count].

    Raises: PayloadError if the stream is malformed.
    """
    if len(stream) != ternary_nbytes(count):
        raise PayloadError(
            f"received {len(stream)} bytes, which do not hold {count} ternary numbers"
        )
    if count and not is_true(stream.max() < 3**5):
        raise PayloadError(
            f"received a byte that is not five ternary numbers; the largest is {3**5 - 1}"
        )
    stream, top = as_native(stream), as_native(top)
    x = allocate(stream, count)
    for where in blocks(x, TERNARY_BLOCK):
        part = x[where]
        packed = stream[where.start // 5 :][: ternary_nbytes(len(part))]
        part[:] = unpack_ternary(packed, len(part))
        part -= 1
        part *= top
    return as_tensor(x)


# --- levels of a quantizer: numbers from 0 to top in ⌈log2(top + 1)⌉ bits, at most 8, or fewer with
# an entropy code, for which levels are counted from the middle one


def level_bytes(count: int, top: int, entropy: EntropyCode) -> int:
    """Return the size in bytes of a stream of `count` levels; an upper bound if entropy-coded."""
    return packed_bytes(count, top.bit_length()) + (entropy != "none") * 5


def write_levels(
    x: Tensor,
    row: int,
    count: int,
    top: int,
    entropy: EntropyCode,
    to_levels: Callable[[slice, Array], Array],
) -> Tensor:
    """Return the first `count` levels of x as a stream.

    `to_levels` converts a block [n, row] of some rows of x, as `as_native`, to integers [n · row].
    Entropy codes run on the host.
    """
    pieces, width = [], 8 if entropy != "none" else top.bit_length()
    for where, block in rows_of(x, row):
        levels = to_levels(where, block)[: count - where.start * row]
        pieces.append(pack_native(levels, width))
    stream = concatenate(pieces, x)
    if entropy == "none":
        return stream
    folded = fold(np.arange(top + 1) - (top + 1) // 2).astype(np.uint8)
    return to_device_of(x, write_entropy(entropy, folded.take(to_host(stream).numpy()), top + 1))


def read_levels(
    stream: Tensor,
    row: int,
    count: int,
    top: int,
    entropy: EntropyCode,
    to_values: Callable[[slice, Array], object],
) -> Tensor:
    """Decode a stream to float32 [count].

    `to_values` converts the levels [n, row] of some rows, as `as_native`, to values, in place.
    Raises: PayloadError if there are more or fewer levels, or if one exceeds top.
    """
    bits = top.bit_length()
    if entropy != "none":
        unfolded = np.argsort(fold(np.arange(top + 1) - (top + 1) // 2)).astype(np.uint8)
        levels = read_entropy(entropy, to_host(stream), count, top + 1)
        stream, bits = to_device_of(stream, torch.from_numpy(unfolded.take(levels))), 8
    if len(stream) != packed_bytes(count, bits):
        raise PayloadError(
            f"received {len(stream)} bytes, which do not hold {count} numbers of {bits} bits"
        )
    stream = as_native(stream)
    x = allocate(stream, -(-count // row), row)
    for where in blocks(x, TOGETHER * block_rows(row)):
        first, part = where.start * row, x[where]
        flat = part.reshape(-1)
        levels = unpack(stream[first * bits // 8 :], bits, min(len(flat), count - first))
        if top < (1 << bits) - 1 and not is_true(levels.max() <= top):
            raise PayloadError(f"received a number above {top}; numbers are from 0 to {top}")
        flat[: len(levels)] = levels
        flat[len(levels) :] = 0
        to_values(where, part)
    return as_tensor(x.reshape(-1)[:count])


def fold(levels: np.ndarray) -> np.ndarray:
    """Return signed levels as unsigned ones: 2|q| − 1 for negative q, else 2q."""
    doubled = levels.astype(np.int32) << 1
    return (doubled ^ (doubled >> 31)).view(np.uint32)


# --- entropy codes of unsigned integers below n, in host memory
#
# none: ⌈log2 n⌉ bits each. elias: level 0, often the most frequent one, is not written. Each other
# level is written as its distance from the one before, its sign, and its magnitude
# (level + 1) >> 1, in the Elias omega code; there is no table. pco: an asymmetric numeral system
# over the message's own histogram of bins, within 1 % of the entropy of long messages, by the
# library pcodec. No code needs more than 5 bytes more than `none`: a longer result is replaced by
# `none`.
#
# Source: Elias coding as in Alistarh et al., "QSGD", NeurIPS 2017; variable lengths after a
# quantizer as in Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML
# 2017; pco: Loncaric, Jeppesen and Zinberg, "Pcodec: Better Compression for Numerical Sequences",
# arXiv:2502.06112, 2025.

EntropyCode = Literal["none", "elias", "pco"]
PLAIN, CODED, CONSTANT = 0, 1, 2  # first byte of a code: as with `none`, coded, one level only
PCODEC: Any = pcodec  # has no stubs
# Levels are independent of each other and have no common divisor, so pcodec only bins them.
PCO = PCODEC.ChunkConfig(
    compression_level=8,
    mode_spec=PCODEC.ModeSpec.classic(),
    delta_spec=PCODEC.DeltaSpec.no_op(),
)


def write_entropy(code: EntropyCode, levels: np.ndarray, num_levels: int) -> Tensor:
    """Encode unsigned integers below num_levels as uint8, by elias or pco."""
    plain = pack(torch.from_numpy(levels), index_width(num_levels))
    if levels.size:
        if (levels == levels[0]).all():
            return torch.cat([torch.tensor([CONSTANT], dtype=torch.uint8), _words(int(levels[0]))])
        coded = _write_elias(levels) if code == "elias" else _write_pco(levels)
        if len(coded) < len(plain):
            return torch.cat([torch.tensor([CODED], dtype=torch.uint8), coded])
    return torch.cat([torch.tensor([PLAIN], dtype=torch.uint8), plain])


def read_entropy(code: EntropyCode, buffer: Tensor, count: int, num_levels: int) -> np.ndarray:
    """Decode `count` levels.   Raises: PayloadError if the buffer is malformed."""
    width, form, buffer = index_width(num_levels), buffer[:1].tolist(), buffer[1:]
    if form == [CODED] and count:
        read = _read_elias if code == "elias" else _read_pco
        levels = read(buffer.numpy(), count, num_levels)
    elif form == [CONSTANT]:
        level = int.from_bytes(
            typed_part(buffer, torch.uint8, 4, "levels").numpy().tobytes(), "little"
        )
        levels = np.full(count, level, np.uint32)
    elif form == [PLAIN] and len(buffer) == packed_bytes(count, width):
        levels = unpack(buffer, width, count)
    else:
        raise PayloadError(
            f"expected a {code} code of {count} levels below {num_levels}; received form {form} and"
            f" {len(buffer)} bytes"
        )
    if levels.size and (int(levels.max()) >= num_levels or int(levels.min()) < 0):
        raise PayloadError(f"received level {int(levels.max())}; levels are below {num_levels}")
    return levels


def _words(*numbers: int) -> Tensor:
    return torch.from_numpy(np.array(numbers, "<u4").view(np.uint8))


def _split_words(buffer: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """Return the first `count` numbers of 32 bits, and the bytes after them."""
    if buffer.size < 4 * count:
        raise PayloadError(f"expected {4 * count} bytes of levels; received {buffer.size}")
    return np.frombuffer(buffer.tobytes(), "<u4", count).tolist(), buffer[4 * count :]


def _write_pco(levels: np.ndarray) -> Tensor:
    """Return the size in bytes of pcodec's stream, followed by the stream.

    The size is sent because pcodec ignores bytes after the end of its stream.
    """
    stream = PCODEC.standalone.simple_compress(levels.astype(np.uint16), PCO)
    return torch.cat([_words(len(stream)), tensor_of_bytes(stream)])


def _read_pco(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    (size,), stream = _split_words(buffer, 1)
    levels = np.empty(count, np.uint16)
    try:
        progress = PCODEC.standalone.simple_decompress_into(stream.tobytes(), levels)
    except RuntimeError as wrong:
        raise PayloadError(f"expected a pco code of {count} levels: {wrong}") from wrong
    if size != stream.size or progress.n_processed != count or not progress.finished:
        raise PayloadError(
            f"expected a pco code of {count} levels; received {stream.size} bytes with"
            f" {progress.n_processed}"
        )
    return levels


def _write_elias(levels: np.ndarray) -> Tensor:
    indices = np.flatnonzero(levels)
    found = levels[indices].astype(np.int64)
    gaps = write_omega(np.diff(indices, prepend=-1))
    signs = np.packbits((found & 1).astype(bool), bitorder="little")
    parts = [gaps, signs, write_omega((found + 1) >> 1)]
    return torch.cat([_words(indices.size, gaps.size), torch.from_numpy(np.concatenate(parts))])


def _read_elias(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    (found, size), rest = _split_words(buffer, 2)
    split = size + -(-found // 8)
    if found > count or split > rest.size:
        raise PayloadError(f"received {found} non-zero levels; there are {count} in all")
    gaps = read_omega(rest[:size], found)
    magnitudes = read_omega(rest[split:], found)
    indices = np.cumsum(gaps) - 1
    if found and (
        gaps.min() < 1
        or indices[-1] >= count
        or magnitudes.min() < 1
        or magnitudes.max() > num_levels
    ):
        raise PayloadError(
            f"the received indices or magnitudes do not belong to {count} levels below {num_levels}"
        )
    levels = np.zeros(count, np.uint32)
    signs = np.unpackbits(rest[size:split], count=found, bitorder="little")
    levels[indices] = 2 * magnitudes - signs
    return levels


# --- the Elias omega code writes n ≥ 1 in about log2 n + log2 log2 n + … bits: each group of bits
# is the length of the next one, minus one
#
# Writing: many codewords at once are shifted to their positions and combined by "or" into 64-bit
# words; the first bit of a codeword is the highest of its byte. Reading: the start of a codeword
# depends on all codewords before it. So the length of a codeword is looked up at every bit of a
# block, as if one started there. Then the true starts are found by doubling: from the starts of
# every second, fourth, … codeword. No side information is needed, and no loop over codewords.
#
# Source: Elias, "Universal codeword sets and representations of the integers", IEEE Transactions on
# Information Theory, 1975.

OMEGA_BLOCK = 1 << 14  # codewords written, or bits read, at a time
TABLE_BITS = 16  # largest length in bits of a codeword that a table decodes


def write_omega(numbers: np.ndarray) -> np.ndarray:
    """Encode numbers from 1 to 2^32 − 1 as whole bytes, uint8."""
    words: list[np.ndarray] = []
    carry, used = np.uint64(0), 0  # content and number of bits of the incomplete word
    for start in range(0, numbers.size, OMEGA_BLOCK):
        codes, lengths = omega_codewords(numbers[start : start + OMEGA_BLOCK])
        ends = np.cumsum(lengths, dtype=np.int64) + used
        begins = ends - lengths
        place, room = begins >> 6, 64 - (begins & 63) - lengths
        over = np.flatnonzero(room < 0)
        first = codes << np.maximum(room, 0).astype(np.uint64)
        first[over] = codes[over] >> (-room[over]).astype(np.uint64)
        block = np.zeros((int(ends[-1]) >> 6) + 1, np.uint64)
        groups = np.concatenate([[0], np.flatnonzero(place[1:] != place[:-1]) + 1])
        block[place[groups]] = np.bitwise_or.reduceat(first, groups)
        block[place[over] + 1] |= codes[over] << (64 + room[over]).astype(np.uint64)
        block[0] |= carry
        carry, used = block[-1], int(ends[-1]) & 63
        words.append(block[:-1].astype(">u8"))
    tail = np.array([carry], ">u8").view(np.uint8)[: -(-used // 8)]
    return np.concatenate([*(word.view(np.uint8) for word in words), tail])


def read_omega(buffer: np.ndarray, count: int) -> np.ndarray:
    """Decode `count` numbers from a stream of exactly these bytes; 0 for one beyond 32 bits.

    Raises: PayloadError if the stream is longer or shorter.
    """
    if count > 8 * buffer.size:
        raise PayloadError(f"{buffer.size} bytes cannot hold {count} codewords")
    found: list[np.ndarray] = []
    at, left = 0, count
    while left and at < 8 * buffer.size:
        base = at & ~7
        numbers, lengths = look_up_omega(_windows(buffer, base >> 3))
        starts = _codeword_starts(at - base, lengths)[:left]
        found.append(numbers[starts])
        left -= starts.size
        at = base + int(starts[-1]) + int(lengths[starts[-1]])
    if left or -(-at // 8) != buffer.size:
        raise PayloadError(f"{buffer.size} bytes do not hold exactly {count} codewords")
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _windows(buffer: np.ndarray, start: int) -> np.ndarray:
    """Return the bits from each bit of a block on, uint64, of which the 57 highest are valid.

    No window starts beyond the end of the buffer.
    """
    count = min(OMEGA_BLOCK // 8, buffer.size - start)
    padded = np.zeros(count + 8, np.uint64)
    part = buffer[start : start + count + 8]
    padded[: part.size] = part
    words = np.zeros(count, np.uint64)
    for byte in range(8):
        words |= padded[byte : byte + count] << np.uint64(56 - 8 * byte)
    return (words[:, None] << np.arange(8, dtype=np.uint64)).reshape(-1)


def _codeword_starts(first: int, lengths: np.ndarray) -> np.ndarray:
    """Return the starts of codewords from `first` to the end of the block, given a length at each
    bit.
    """
    end = lengths.size
    jump = np.minimum(np.arange(end) + lengths, end).astype(np.int32)
    jumps = [np.append(jump, np.int32(end))]  # by 1, 2, 4, … codewords; the end maps to itself
    while jumps[-1][first] < end:
        jumps.append(jumps[-1].take(jumps[-1]))
    starts = np.array([first], np.int32)
    for jump in reversed(jumps):
        starts = np.stack([starts, jump.take(starts)], axis=1).reshape(-1)
    return starts[starts < end]


def omega_codewords(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the omega codewords of numbers from 1 to 2^32 − 1, and their lengths in bits."""
    group = numbers.astype(np.uint64)
    codes, lengths = np.zeros(group.size, np.uint64), np.ones(group.size, np.int64)
    while (more := group > 1).any():
        codes |= np.where(more, group << lengths.astype(np.uint64), np.uint64(0))
        size = np.frexp(group.astype(np.float64))[1].astype(np.int64)  # number of bits
        lengths += np.where(more, size, 0)
        group = np.where(more, size.astype(np.uint64) - np.uint64(1), group)
    return codes, lengths


def look_up_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (numbers, lengths) of the codeword at the start of each uint64 window.

    The number is 0 if the codeword is not one of a 32-bit number.
    """
    leading = (windows >> np.uint64(64 - TABLE_BITS)).view(np.int64)
    numbers, lengths = (table.take(leading) for table in _omega_table())
    longer = np.flatnonzero(lengths > TABLE_BITS)
    numbers[longer], lengths[longer] = _decode_omega(windows[longer])
    return numbers, lengths


@cache
def _omega_table() -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `_decode_omega` for all windows of TABLE_BITS bits.

    An entry whose length exceeds TABLE_BITS is not valid.
    """
    return _decode_omega(np.arange(1 << TABLE_BITS, dtype=np.uint64) << np.uint64(64 - TABLE_BITS))


def _decode_omega(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode omega codewords group by group; arguments and results as of `look_up_omega`."""
    numbers = np.ones(windows.size, np.int64)
    lengths = np.ones(windows.size, np.int64)
    rest = windows
    more = rest >> np.uint64(63) == 1
    while more.any():
        size = np.where(more, numbers + 1, 1)
        numbers[size > 32] = 0
        more &= size <= 32
        group = rest >> np.where(more, 64 - size, 0).astype(np.uint64)
        numbers = np.where(more, group.view(np.int64), numbers)
        lengths += np.where(more, size, 0)
        rest = rest << np.where(more, size, 0).astype(np.uint64)
        more &= rest >> np.uint64(63) == 1
    return numbers, lengths

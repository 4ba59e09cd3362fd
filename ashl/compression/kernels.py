"""Kernels of codecs on torch tensors, with the same bits in host memory and on a device.

Tensors in host memory are worked on as NumPy arrays on the same memory (`as_native`). On one core,
NumPy takes a third to two thirds of torch's time for these kernels. It does not split an operation
among threads, which would wait for busy cores. Arrays and tensors have the same text:
operators, `reshape`, and the functions of the first section. A kernel of several passes goes
through host memory in blocks that stay in the cache; on a device, a block is the whole vector.

Bits are equal because the kernels use only integers, shifts, comparisons, and float operations that
are rounded one by one. They avoid division by a number, which torch replaces on CUDA by
multiplication with the reciprocal, and fused multiply-add. Sums are made in NumPy's order. Only
`row_norms` and `multiply_matrices` may differ between devices, in the last bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ashl.data.counter_rng import CounterRng
from ashl.device import HERE, is_on_host, read_scalars, to_device, to_host

# --- arrays in host memory, tensors on a device

Array: TypeAlias = Any  # np.ndarray in host memory, Tensor on a device
BLOCK = 1 << 16  # elements; a block stays in the L2 cache between two passes over it
TOGETHER = 4  # blocks that are rounded at once; larger steps are faster with many passes
TYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


def silence_warnings() -> np.errstate:
    """Return a context without NumPy's warnings: a run that diverges has infinities and NaNs."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def as_native(x: Array) -> Array:
    """Return a tensor in host memory as an array; anything else as it is."""
    return x.numpy() if isinstance(x, Tensor) and x.device == HERE else x


def as_tensor(x: Array) -> Tensor:
    """Return an array as a tensor; a tensor as it is."""
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def convert(x: Array, dtype: torch.dtype) -> Array:
    """Return the elements as numbers of a type."""
    return x.to(dtype) if isinstance(x, Tensor) else x.astype(TYPES[dtype], copy=False)


def bits_as(x: Array, dtype: torch.dtype) -> Array:
    """Return the bits of the elements as numbers of a type."""
    return x.view(dtype) if isinstance(x, Tensor) else x.view(TYPES[dtype])


def allocate(like: Array, *shape: int, dtype: torch.dtype = torch.float32) -> Array:
    """Return new memory on the device of `like`; an array if `like` is one."""
    if isinstance(like, Tensor):
        return torch.empty(shape, dtype=dtype, device=str(like.device))
    return np.empty(shape, TYPES[dtype])


def blocks(x: Array, size: int = BLOCK) -> Iterator[slice]:
    """Return consecutive slices of x that fit the cache; one slice on a device."""
    step = max(1, len(x)) if isinstance(x, Tensor) and not is_on_host(x) else size
    return (slice(start, min(start + step, len(x))) for start in range(0, len(x), step))


def rows_of(x: Tensor, row: int) -> Iterator[tuple[slice, Array]]:
    """Yield x as (positions of the rows, block [n, row]); zeros complete the last row.

    The number of rows of each block but the last is a multiple of 8.
    """
    array = as_native(x)
    for where in blocks(array, TOGETHER * row * block_rows(row)):
        first = where.start // row
        block = pad_to(array[where], row).reshape(-1, row)
        yield slice(first, first + len(block)), block


def block_rows(row: int) -> int:
    """Return the number of rows of a block."""
    return max(8, BLOCK // row // 8 * 8)


def pad_to(x: Array, multiple: int) -> Array:
    """Return x with zeros up to a multiple of a length; x itself if none are missing."""
    missing = -len(x) % multiple
    if not missing:
        return x
    return pad(x, (0, missing)) if isinstance(x, Tensor) else np.pad(x, (0, missing))


def concatenate(pieces: Sequence[Array], like: Tensor) -> Tensor:
    """Return the pieces as one tensor; without pieces, one of 0 bytes on the device of `like`."""
    if not pieces:
        return like.new_empty(0, dtype=torch.uint8)
    if len(pieces) == 1 or isinstance(pieces[0], Tensor):
        return as_tensor(pieces[0]) if len(pieces) == 1 else torch.cat(list(pieces))
    return torch.from_numpy(np.concatenate(pieces))


def to_device_of(like: Tensor, x: Tensor) -> Tensor:
    """Return x on the device of `like`."""
    return x if x.device == like.device else to_device(x, str(like.device))


def look_up(table: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of a short host table at these indices, on the device of the indices."""
    flat = indices.reshape(-1).int()
    return to_device_of(indices, table).index_select(0, flat).view(indices.shape)


def is_true(condition: Array) -> bool:
    """Return the value of a condition of one element."""
    return bool(read_scalars([condition])[0])


def shift_down(words: Array, bits: int) -> Array:
    """Return int32 words shifted to lower bits, with zeros as their upper bits; arrays in place."""
    if isinstance(words, Tensor):
        return words >> bits & (1 << 32 - bits) - 1
    unsigned = words.view(np.uint32)
    unsigned >>= bits
    return words


def divide(x: Array, number: float) -> Array:
    """Return x/number, rounded once per element."""
    if isinstance(x, Tensor):
        return x / (number if is_on_host(x) else torch.full_like(x, number))
    return x / np.float32(number)


def where_true(condition: Array) -> Tensor:
    """Return the ascending indices of the elements that are true, int64."""
    return as_tensor(flat_nonzero(as_native(condition)))


def flat_nonzero(x: Array) -> Array:
    """Return the ascending indices of the elements of a vector that are not 0, int64."""
    return x.nonzero().view(-1) if isinstance(x, Tensor) else x.nonzero()[0]


def sparse_vector(indices: Any, values: Tensor, d: int) -> Tensor:
    """Return the vector [d] with these values at these indices, a tensor or a slice; else 0."""
    values = as_native(values)
    x = values.new_zeros(d) if isinstance(values, Tensor) else np.zeros(d, np.float32)
    x[as_native(indices)] = values
    return as_tensor(x)


# --- streams of numbers of a few bits, little-endian

EIGHT_BITS = 0x0102040810204080  # as a factor: gathers the lowest bits of 8 bytes in the top byte
HALVES = (2, 4)  # widths that are packed by joining pairs
LANES = (16, 32, 64)  # bits of a pair of bytes, of two pairs, of four pairs
GROUP = 8  # so many numbers of w bits fill w bytes
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def packed_bytes(count: int, width: int) -> int:
    """Return the size in bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(values: Array, width: int) -> Tensor:
    """Return the low `width` bits (1 to 32) of each integer as a stream, uint8 [packed_bytes]."""
    return as_tensor(pack_native(as_native(values), width))


def pack_native(values: Array, width: int) -> Array:
    """Return the stream of `pack` as an array if the values are one, so that a loop over blocks
    makes no tensors.
    """
    if width in INTEGERS:
        return bits_as(convert(values, INTEGERS[width]), torch.uint8)
    if width == 1:
        return as_native(pack_truths(values & 1 == 1))
    write = _pack_bytes if width < 8 else _pack_words
    stream = allocate(values, packed_bytes(len(values), width), dtype=torch.uint8)
    for where in blocks(values):
        piece = write(values[where], width)
        first = where.start * width // 8
        stream[first : first + len(piece)] = piece
    return stream


def unpack(stream: Array, width: int, count: int) -> Array:
    """Return the first `count` numbers of a stream: uint8 up to a width of 8, else int32.

    Limits: the caller checks that the stream is long enough.
    """
    stream = as_native(stream)
    if width in INTEGERS:
        found = view_as(stream[: count * width // 8], INTEGERS[width])
        return convert(found, torch.int32) & 0xFFFF if width == 16 else found
    if width == 1:
        return bits_as(unpack_truths(stream, count), torch.uint8)
    read, kind = (_unpack_bytes, torch.uint8) if width < 8 else (_unpack_words, torch.int32)
    found = allocate(stream, count, dtype=kind)
    for where in blocks(found):
        found[where] = read(stream[where.start * width // 8 :], width, where.stop - where.start)
    return found


def _pack_bytes(values: Array, width: int) -> Array:
    """Pack numbers of less than 8 bits: pairs are joined, or the bytes of 64-bit words moved."""
    size = packed_bytes(len(values), width)
    joined = pad_to(convert(values, torch.uint8) & (1 << width) - 1, 8)
    if width in HALVES:
        while width < 8:  # two numbers become one of twice the width
            pairs = bits_as(joined, torch.int16)
            joined, width = convert(pairs | pairs >> 8 - width, torch.uint8), 2 * width
        return joined[:size]
    words = bits_as(joined, torch.int64)
    for lane in LANES:  # shift the upper half of each lane down to the end of the lower half
        lower, upper, apart = _halves(lane, width)
        moved = words >> apart
        moved &= upper
        words &= lower
        words |= moved
    return bits_as(words, torch.uint8).reshape(-1, 8)[:, :width].reshape(-1)[:size]


def _unpack_bytes(stream: Array, width: int, count: int) -> Array:
    size = packed_bytes(count, width)
    if width in HALVES:
        joined, wide = stream[:size], 8
        while wide > width:
            wide //= 2
            pairs = convert(joined, torch.int16)
            pairs |= pairs << 8 - wide
            pairs &= 0x0101 * ((1 << wide) - 1)
            joined = bits_as(pairs, torch.uint8)
        return joined[:count]
    rows = pad_to(stream[:size], width).reshape(-1, width)
    spread = allocate(stream, len(rows), 8, dtype=torch.uint8)
    spread[:] = 0
    spread[:, :width] = rows
    words = bits_as(spread, torch.int64).reshape(-1)
    for lane in reversed(LANES):
        lower, upper, apart = _halves(lane, width)
        moved = words & upper
        moved <<= apart
        words &= lower
        words |= moved
    return bits_as(words, torch.uint8)[:count]


@cache
def _halves(lane: int, width: int) -> tuple[int, int, int]:
    """Return the masks of the lower and the upper half of a lane after packing, and the shift
    between.
    """
    used = lane * width // 16
    lower = sum((1 << used) - 1 << shift for shift in range(0, 64, lane))
    return lower, lower << used, lane // 2 - used


def _pack_words(values: Array, width: int) -> Array:
    """Pack numbers of 9 to 31 bits: 8 of them fill as many bytes as a number has bits."""
    size = packed_bytes(len(values), width)
    columns = pad_to(convert(values, torch.int64) & (1 << width) - 1, GROUP).reshape(-1, GROUP)
    words = allocate(columns, len(columns), -(-width // GROUP), dtype=torch.int64)
    words[:] = 0
    for j in range(GROUP):
        word, shift = divmod(j * width, 64)
        words[:, word] |= columns[:, j] << shift
        if shift + width > 64:
            words[:, word + 1] |= columns[:, j] >> 64 - shift
    return bits_as(words, torch.uint8)[:, :width].reshape(-1)[:size]


def _unpack_words(stream: Array, width: int, count: int) -> Array:
    rows = pad_to(stream[: packed_bytes(count, width)], width).reshape(-1, width)
    spread = allocate(stream, len(rows), -(-width // GROUP) * 8, dtype=torch.uint8)
    spread[:, width:] = 0
    spread[:, :width] = rows
    words = bits_as(spread, torch.int64)
    columns = allocate(stream, len(words), GROUP, dtype=torch.int32)
    for j in range(GROUP):
        word, shift = divmod(j * width, 64)
        found = words[:, word] >> shift
        if shift + width > 64:
            found &= (1 << 64 - shift) - 1  # without copies of the sign
            found |= words[:, word + 1] << 64 - shift
        found &= (1 << width) - 1
        columns[:, j] = found
    return columns.reshape(-1)[:count]


def view_as(part: Array, dtype: torch.dtype) -> Array:
    """Return bytes as elements of a type; a copy if a tensor is not aligned."""
    if isinstance(part, Tensor) and part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return bits_as(part, dtype)


def pack_truths(truths: Array) -> Tensor:
    """Return bool [d] as a stream of bits, uint8 [⌈d/8⌉]."""
    truths = as_native(truths)
    if isinstance(truths, Tensor):
        return (pad_to(truths, 8).view(torch.int64) * EIGHT_BITS >> 56).to(torch.uint8)
    return torch.from_numpy(np.packbits(truths, bitorder="little"))


def unpack_truths(stream: Array, count: int) -> Array:
    """Return bool [count] from a stream of bits."""
    stream = as_native(stream)
    if not isinstance(stream, Tensor):
        return np.unpackbits(stream, count=count, bitorder="little").view(np.bool_)
    lanes = torch.arange(8, dtype=torch.uint8, device=str(stream.device))
    part = stream[: packed_bytes(count, 1), None]
    return (part >> lanes & 1).view(-1)[:count].view(torch.bool)


def pack_signs(x: Tensor) -> Tensor:
    """Return the sign bits of x, uint8 [⌈d/8⌉]; 1 is negative, also for −0 and negative NaNs."""
    if not is_on_host(x):
        return pack_truths(x.view(torch.int32) < 0)
    array = x.numpy()
    pieces = [np.packbits(np.signbit(array[where]), bitorder="little") for where in blocks(array)]
    return concatenate(pieces, x)


def flip_signs(stream: Tensor, x: Tensor, count: int) -> Tensor:
    """Return float32 [count]: x with the sign flipped where the stream has a 1.

    x has `count` elements, or one that stands for all.
    """
    stream, bits = as_native(stream), bits_as(as_native(to_device_of(stream, x)), torch.int32)
    flipped = allocate(stream, count, dtype=torch.int32)
    for where in blocks(flipped):
        part = flipped[where]
        part[:] = unpack_truths(stream[where.start // 8 :], len(part))
        part <<= 31
        part ^= bits if len(bits) == 1 else bits[where]
    return as_tensor(flipped).view(torch.float32)


# --- selection

SAMPLE = 1 << 15  # elements of a sample, about
SMALL = 1 << 17  # elements; for fewer, selecting among all is as fast
SAFETY = 4.0  # standard deviations of the rank: one vector in 30,000 needs a second pass
Order = Callable[[Array], Array]  # a function of the bits of float32, read as integers


def magnitudes(bits: Array) -> Array:
    """Return integers with the order of |x|: infinity is above all numbers, NaN above infinity."""
    return bits & 0x7FFFFFFF


def positives(bits: Array) -> Array:
    """Return integers with the order of the positive x; all others are below, unordered."""
    return bits


def negatives(bits: Array) -> Array:
    """Return integers with the order of −x for the negative x; all others are below, unordered."""
    return bits ^ -(2**31)


def largest_indices(x: Tensor, k: int, order: Order = magnitudes) -> Tensor:
    """Return the ascending indices, int64 [k], of the k largest elements of x in an order.

    A strided sample gives a bound that almost surely lies below the k-th largest element. One pass
    collects the elements that reach the bound: a few more than k. The exact selection is made among
    these. If fewer than k reach the bound, it is made among all, so the result is always exact.

    Args: x float32 [d], 1 ≤ k ≤ d.
    Limits: of equal elements the first ones are selected. A NaN is larger than all numbers, as in
    torch.topk.
    Source: sampled thresholds as in Lin et al., "Deep Gradient Compression", ICLR 2018, there
    without the exact selection.
    """
    bits = as_native(x.view(torch.int32))
    sample = order(bits[_sample_slice(len(x))])
    rank = _bound_rank(len(sample), k, len(x))
    if rank is not None:
        # In a sparse vector, all elements reach 0.
        bound = _kth_largest(sample, rank).clip(min=1)
        found = zip(*_find_reaching(bits, bound, order), strict=True)
        indices, keys = (as_native(concatenate(pieces, x)) for pieces in found)
        if len(keys) >= k:
            return as_tensor(indices[_choose_largest(keys, k)])
    return as_tensor(_choose_largest(order(bits), k))


def indices_reaching(x: Tensor, bound: float) -> Tensor:
    """Return the ascending indices of all |x| ≥ bound > 0, for x float32 [d]; NaN reaches any
    bound.
    """
    least = as_native(to_device_of(x, torch.tensor([bound]).view(torch.int32).clamp(min=1)))
    found = _find_reaching(as_native(x.view(torch.int32)), least, magnitudes)
    return concatenate([indices for indices, _ in found], x)


def magnitudes_above(x: Tensor, bound: float) -> Tensor:
    """Return the ascending indices of all |x| > bound and of NaNs, for x float32 [d]."""
    return indices_reaching(x, float(np.nextafter(np.float32(bound), np.float32(np.inf))))


def estimate_threshold(x: Tensor, k: int) -> float:
    """Return a bound that about k of |x| reach, from a sample; exactly k if x is short and has no
    ties.

    NaN if the bound falls on a NaN.
    """
    sample = magnitudes(as_native(to_host(x[_sample_slice(len(x))]).view(torch.int32)))
    rank = min(len(sample), max(1, round(k * len(sample) / len(x))))
    return float(_kth_largest(sample, rank).view(np.float32)[0])


def largest_of_rows(x: Tensor, k: int) -> Tensor:
    """Return the ascending column indices, int64 [rows, k], of the k largest |x| in each row."""
    bits = as_native(x.view(torch.int32))
    found = allocate(bits, len(bits), k, dtype=torch.int64)
    for where in blocks(bits, max(1, BLOCK // x.shape[1])):
        found[where] = _largest_columns(magnitudes(bits[where]), k)
    return as_tensor(found)


def _largest_columns(keys: Array, k: int) -> Array:
    """Return the columns of the k largest keys of each row; of equal keys the first ones."""
    if isinstance(keys, np.ndarray):
        rows, columns = keys.shape
        reached = np.flatnonzero(keys >= np.partition(keys, -k, axis=1)[:, -k, None])
        if reached.size == rows * k:
            return reached.reshape(rows, k) - np.arange(0, keys.size, columns)[:, None]
        return _largest_columns(torch.from_numpy(keys), k).numpy()
    least = keys.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
    above, equal = keys > least, keys == least
    chosen = above | equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))
    return chosen.nonzero()[:, 1].view(-1, k)


def _sample_slice(d: int) -> slice:
    """Return a slice of d elements that is spread over all of them; all elements if d is small."""
    stride = max(1, d // SAMPLE)
    # A stride with a factor 2, 3, 5 or 7, as layers' shapes have, would give a one-sided sample.
    while math.gcd(stride, 210) > 1:
        stride += 1
    return slice(stride // 2, None, stride)


def _bound_rank(size: int, k: int, d: int) -> int | None:
    """Return the rank of a bound in the sample that very likely more than k of d elements reach.

    None if so many elements would reach it that it saves nothing.
    """
    rank = k * size / d
    rank = math.ceil(rank + SAFETY * (math.sqrt(rank) + 1))
    return None if d < SMALL or rank >= size // 4 else rank


def _kth_largest(keys: Array, k: int) -> Array:
    """Return the k-th largest key, [1]."""
    if isinstance(keys, Tensor):
        return keys.kthvalue(len(keys) - k + 1, keepdim=True).values
    place = len(keys) - k
    return np.partition(keys, place)[place : place + 1]


def _find_reaching(bits: Array, bound: Array, order: Order) -> Iterator[tuple[Array, Array]]:
    """Yield (indices, keys) of all elements whose key is at least `bound`, block by block."""
    for where in blocks(bits):
        keys = order(bits[where])
        inside = flat_nonzero(keys >= bound)
        yield inside + where.start, keys[inside]


def _choose_largest(keys: Array, k: int) -> Array:
    """Return the ascending indices of the k largest keys; of equal keys the first ones."""
    if isinstance(keys, Tensor):
        least = keys.topk(k, sorted=False).values.amin()
        above, equal = where_true(keys > least), where_true(keys == least)
        return torch.cat([above, equal[: k - len(above)]]).sort().values
    least = _kth_largest(keys, k)
    chosen, equal = keys > least, np.flatnonzero(keys == least)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


# --- rounding

FIRST = 16  # leading bits of u, drawn for each element
LANES_OF_WORD = 64 // FIRST  # elements whose leading bits fill one word of 64 bits
SHARED = 1 << 14  # elements after which the trailing bits of u repeat
REST = 1 << 62  # index of the first word with trailing bits
TINY = 2.0**-64  # below it the reciprocal may exceed float32
ENLARGED = 2.0**64  # factor for spans below TINY
SHORT = 1 - 2.0**-22  # factor that keeps rounding errors from exceeding the top level


class RoundingNoise(NamedTuple):
    """The random numbers u of a message, for stochastic rounding: q = ⌊y + u⌋, so that E q = y.

    y and u are multiples of 2^−bits. Of 31 bits, those that the largest level does not need follow
    the point: 30 for levels ±1, 24 for 127. The first 16 bits of u are drawn for each element,
    which costs half as much as drawing a float. The other bits of u decide for one element in
    65,536 only, and elements 2¹⁴ apart share them: their correlation is at most 2⁻¹⁶. The part of y
    below 2^−bits is cut off, so E q is y to within 2^−bits.

    Source: stochastic rounding as in Alistarh et al., "QSGD", NeurIPS 2017.
    """

    words: CounterRng
    bits: int  # number of bits of y and u behind the point
    rest: Array  # trailing bits of u, int32 [at most SHARED]

    @property
    def unit(self) -> float:
        """The factor of y before `round_levels`."""
        return 2.0**self.bits


def rounding_noise(x: Tensor, words: CounterRng, top: int) -> RoundingNoise:
    """Return the random numbers for all elements of x, with y from −top to top, top < 2¹⁵."""
    bits, count = 31 - top.bit_length(), min(SHARED, len(x))
    rest = as_native(words.words(x, REST, -(-count // 2)).view(torch.int32)[:count])
    return RoundingNoise(words, bits, rest >> 8 & (1 << bits - FIRST) - 1)


@silence_warnings()
def round_levels(y: Array, noise: RoundingNoise, start: int, zero: int = 0) -> Array:
    """Return ⌊y + u⌋ + zero as int32 [number of elements], for y in units of `noise`, of any shape.

    `start`, a multiple of 4, is the number of elements before y.
    """
    levels = convert(as_native(y), torch.int32).reshape(-1)
    rest = as_native(as_tensor(noise.rest).roll(-start)) if start % SHARED else noise.rest
    count, whole = len(levels), len(levels) // len(rest)
    rows = levels[: whole * len(rest)].reshape(whole, len(rest))
    rows += rest
    last = levels[whole * len(rest) :]
    last += rest[: len(last)]
    levels >>= noise.bits - FIRST
    words = noise.words.words(rest, start // LANES_OF_WORD, -(-count // LANES_OF_WORD))
    if isinstance(words, Tensor):
        levels += words.view(torch.int16)[:count].to(torch.int32) & (1 << FIRST) - 1
    else:
        levels += words.view(np.uint16)[:count]
    levels >>= FIRST
    if zero:
        levels += zero
    return levels


@silence_warnings()
def scale_levels(x: Array, span: Array, top: float) -> Array:
    """Return x/span·top for rows x [n, m] and spans [n, 1] or [1, 1]; 0 for spans of 0, ∞, NaN."""
    if isinstance(span, np.ndarray):
        if span.min() >= TINY and span.max() < math.inf:
            return x * (np.float32(SHORT * top) / span)
        x, span = torch.from_numpy(x), torch.from_numpy(span)
    factor = torch.where(span < TINY, ENLARGED, 1.0)
    x, span = x * factor, span * factor
    safe = torch.where(span > 0, span, 1.0)
    y = x * torch.where(span > 0, torch.full_like(safe, SHORT * top) / safe, 0.0)
    # The span itself makes the decoded row NaN.
    return as_native(torch.where(torch.isfinite(span), y, 0.0))


# --- ternary numbers: in each block, byte j holds those at j, j + s, …, j + 4s with s = ⌈block/5⌉

DIGITS = 5  # ternary numbers in a byte: 3⁵ ≤ 256
TERNARY_BLOCK = DIGITS << 14  # numbers


def ternary_nbytes(count: int) -> int:
    """Return the size of `count` ternary numbers in bytes."""
    return -(-count // DIGITS)


def round_ternary(
    x: Array, top: Array, noise: RoundingNoise, start: int = 0, beyond: bool = False
) -> Array:
    """Return 1 + sign(x_j)·b_j as uint8, with b_j = 1 at probability |x_j|/top.

    Args: top float32 [1]. beyond says that |x_j| > top may occur; then b_j = 1.
    """
    y = scale_levels(as_native(x)[None], as_native(top)[None], noise.unit)[0]
    if beyond:
        y = y.clip(-noise.unit, noise.unit)
    return convert(round_levels(y, noise, start, 1), torch.uint8)


def pack_ternary(digits: Array) -> Tensor:
    """Return numbers 0, 1 and 2, uint8 [d], five to a byte as t_0 + 3·t_1 + … + 81·t_4."""
    digits = as_native(digits)
    whole = len(digits) - len(digits) % TERNARY_BLOCK
    parts = digits[:whole].reshape(-1, DIGITS, TERNARY_BLOCK // DIGITS)
    packed = [_join_planes(parts[where]) for where in blocks(parts, 1)]
    if whole < len(digits):
        packed.append(_join_planes(pad_to(digits[whole:], DIGITS).reshape(1, DIGITS, -1)))
    return concatenate(packed, as_tensor(digits))


def _join_planes(planes: Array) -> Array:
    packed = planes[:, -1] + 0
    for j in reversed(range(DIGITS - 1)):
        packed *= 3
        packed += planes[:, j]
    return packed.reshape(-1)


def unpack_ternary(stream: Array, count: int) -> Array:
    """Return the numbers, uint8 [count], of a stream of bytes below 3⁵."""
    stream = as_native(stream)[: ternary_nbytes(count)]
    if count <= TERNARY_BLOCK:
        return _split_planes(stream[None])[:count]
    whole = count - count % TERNARY_BLOCK
    rows = stream[: whole // DIGITS].reshape(-1, TERNARY_BLOCK // DIGITS)
    digits = allocate(stream, count, dtype=torch.uint8)
    digits[:whole] = _split_planes(rows)
    digits[whole:] = _split_planes(stream[None, whole // DIGITS :])[: count - whole]
    return digits


def _split_planes(packed: Array) -> Array:
    """Return the digits of each row of bytes, one plane after the other."""
    planes = allocate(packed, len(packed), DIGITS, packed.shape[1], dtype=torch.uint8)
    for j in range(DIGITS):
        rest = packed // 3
        planes[:, j] = packed - rest * 3
        packed = rest
    return planes.reshape(-1)


# --- signs and exponents

INFINITE, TOP, MANTISSA = 0x7F800000, 0x7F000000, 23  # float32: ∞, 2¹²⁷, mantissa bits


def natural_bytes(d: int) -> int:
    """Return the size in bytes of d exponents of 8 bits and d signs."""
    return d + packed_bytes(d, 1)


def write_natural(x: Tensor, words: CounterRng) -> Tensor:
    """Round each element at random to a neighbouring power of two: exponents and signs, uint8.

    The rule is in `ashl.compression.natural`.
    """
    array, bits = as_native(x), as_native(x.view(torch.int32))
    stream = allocate(bits, natural_bytes(len(bits)), dtype=torch.uint8)
    for where in blocks(bits):
        # The sign, the highest bit, is cut off when the exponent becomes a byte.
        part, size = array[where], bits[where]
        drawn = words.words(bits, where.start // 2, -(-len(size) // 2))
        noise = shift_down(bits_as(drawn, torch.int32)[: len(size)], 32 - MANTISSA)
        if isinstance(part, Tensor) or not (part.max() <= 2.0**127 and part.min() >= -(2.0**127)):
            size = magnitudes(size)
            infinite = convert(size >= INFINITE, torch.int32)
            size = infinite * INFINITE + (1 - infinite) * size.clip(max=TOP)
        noise += size
        noise >>= MANTISSA
        stream[where] = noise
    stream[len(bits) :] = as_native(pack_signs(x))
    return as_tensor(stream)


def read_natural(stream: Tensor, d: int) -> Tensor:
    """Decode exponents and signs to float32 [d]."""
    stream = as_native(stream)
    bits = allocate(stream, d, dtype=torch.int32)
    for where in blocks(bits):
        part = bits[where]
        part[:] = unpack_truths(stream[d + where.start // 8 :], len(part))
        part <<= 8
        part |= convert(stream[where], torch.int32)
        part <<= MANTISSA
    return as_tensor(bits).view(torch.float32)


# --- sums and norms

LEAF, ACCUMULATORS = 128, 8  # NumPy adds 128 elements in 8 accumulators before it adds pairwise


@silence_warnings()
def block_sums(x: Tensor, of: Callable[[Any], Any] = abs) -> list[float]:
    """Return the sum of of(x) [d] for each block, in the order of additions of NumPy's sum.

    `of` is a function of tensors and of arrays. The host adds the incomplete last block, and each
    block whose sum overflows float32, that one in float64.
    """
    if is_on_host(x):
        array = x.numpy()
        sums = [float(of(array[where]).sum()) for where in blocks(array)]
    else:
        sums = _sums_of_tensors(of(x))
    for i, total in enumerate(sums):
        if not math.isfinite(total):
            block = to_host(x[i * BLOCK : (i + 1) * BLOCK]).numpy()
            sums[i] = float(of(block).sum(dtype=np.float64))
    return sums


def _sums_of_tensors(x: Tensor) -> list[float]:
    whole = len(x) // BLOCK * BLOCK
    sums = x[:whole].view(-1, LEAF // ACCUMULATORS, ACCUMULATORS)
    total = sums[:, 0]
    for j in range(1, LEAF // ACCUMULATORS):
        total = total + sums[:, j]
    total = total.view(-1, BLOCK // LEAF * ACCUMULATORS)
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    found = to_host(torch.cat([total.view(-1), x[whole:]]))
    each, rest = found[: whole // BLOCK].tolist(), found[whole // BLOCK :]
    return [*each, float(rest.numpy().sum())] if len(rest) else each


def count_where(x: Tensor, condition: Callable[[Array], Array]) -> int:
    """Return the number of elements for which a condition is true."""
    array = as_native(x)
    if isinstance(array, Tensor):
        return int(read_scalars([condition(array).sum()])[0])
    return sum(int(np.count_nonzero(condition(array[where]))) for where in blocks(array))


def mean_magnitude(x: Tensor) -> Tensor:
    """Return ‖x‖₁/d as float32 [1], in host memory; 0 if d = 0."""
    return torch.tensor([sum(block_sums(x)) / max(1, len(x))])


def extremes_of(x: Tensor) -> Tensor:
    """Return the least and the largest element, float32 [2]; NaN if an element is NaN."""
    return torch.stack(torch.aminmax(x)) + 0.0  # turns −0 into 0


def largest_magnitude(x: Tensor) -> float:
    """Return max |x_j|; NaN if an element is NaN."""
    return read_scalars([extremes_of(x).abs().amax()])[0]


@silence_warnings()
def row_norms(rows: Array) -> Array:
    """Return ‖·‖₂ of each row [n, m], float32 [n, 1]; finite rows are limited to the largest
    float32.

    On a device, the last bits may differ.
    """
    if isinstance(rows, Tensor):
        wide = rows.double()
        return limit_finite((wide * wide).sum(1)).sqrt().float()[:, None]
    step = block_rows(rows.shape[1])
    pieces = [_array_lengths(rows[start : start + step]) for start in range(0, len(rows), step)]
    return np.concatenate(pieces)[:, None]


def _array_lengths(rows: np.ndarray) -> np.ndarray:
    """Return the lengths of a block of rows, in float64 if one of them needs it."""
    squares = np.einsum("ij,ij->i", rows, rows)
    if not ((squares > 2.0**-80) & (squares < 2.0**120)).all():
        wide = rows.astype(np.float64)
        squares = np.einsum("ij,ij->i", wide, wide)
        squares = limit_finite(torch.from_numpy(squares)).numpy()
    return np.sqrt(squares).astype(np.float32)


def limit_finite(squares: Tensor) -> Tensor:
    """Limit finite squares to that of the largest float32."""
    most = torch.finfo(torch.float32).max ** 2
    return torch.where(torch.isfinite(squares), squares.clamp(max=most), squares)


def row_maxima(rows: Array) -> Array:
    """Return the largest magnitude of each row [n, m], as [n, 1]."""
    largest = abs(rows).amax(1) if isinstance(rows, Tensor) else abs(rows).max(1)
    return largest[:, None]


@silence_warnings()
def multiply_matrices(left: Array, right: Array) -> Array:
    """Return left @ right; its last bits depend on the device."""
    return as_native(left) @ as_native(right)


# --- matrix products with the same bits on every machine
#
# If each worker decodes for itself, libraries that add in different orders would make the replicas
# drift apart. `outer_sum` adds term after term for each element, and is for few terms. The other
# functions are for many small blocks of whole numbers. Their products and sums stay below 2^53 in
# float64, or below 2^24 in float32, so they are exact in any order.
# Source: fixed-point form of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.


def outer_sum(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write Σ_k left[k] ⊗ right[k] into `out` [m, n], for left [r, m] and right [r, n]."""
    if not len(left):
        out.zero_()
        return
    for where in blocks(out, max(1, 2 * BLOCK // right.shape[1])):
        rows, columns = out[where], left[:, where, None]
        torch.mul(columns[0], right[0], out=rows)
        for u, v in zip(columns[1:], right[1:], strict=True):
            rows += u * v


def to_integers(values: Tensor, bits: int) -> tuple[Array, Array]:
    """Return (whole numbers, unit) of float32 [n, k], such that values ≈ whole numbers · unit.

    The whole numbers are float64 with `bits` bits, counted from the highest bit of the row's
    largest magnitude. The unit is [n, 1].
    """
    shift = bits - torch.frexp(as_tensor(row_maxima(as_native(values)))).exponent
    return as_native(values.double().mul_(power_of_two(shift)).round_()), as_native(
        power_of_two(-shift)
    )


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponent exactly, float64."""
    return (exponents.to(torch.int64) + 1023 << 52).view(torch.float64)


def multiply_mirrored(even: Array, odd: Array, rows: Array) -> Array:
    """Return matrixᵀ @ block for each block, float64 [n, k, m], with half of the multiplications.

    The rows of the matrix are symmetric and antisymmetric in turn. `even` and `odd` are the
    transposed left halves of these rows, [⌈k/2⌉, ...]; the rows of the blocks are in the same
    order, even before odd.
    """
    half, rest = even.shape[1], odd.shape[1]
    same, other = multiply_matrices(even, rows[:, :half]), multiply_matrices(odd, rows[:, half:])
    if isinstance(rows, Tensor):
        return torch.cat([same + other, (same - other)[:, :rest].flip(1)], 1)
    whole = np.empty(rows.shape)
    np.add(same, other, out=whole[:, :half])
    np.subtract(same[:, :rest], other[:, :rest], out=whole[:, half:][:, ::-1])
    return whole


def hadamard_sums(rows: Array) -> Array:
    """Return H·x of each row, float32 [n, b], with b a power of two and H the Hadamard matrix of
    ±1.

    The elements are whole numbers whose sums stay below 2^24, which float32 holds exactly in any
    order of additions. With TF32, products on a device have 10 bits only, so it computes in
    float64.
    """
    left, right = hadamard_factors(rows.shape[1])
    square = rows.reshape(-1, len(left), len(right))
    if not isinstance(rows, Tensor):
        return multiply_matrices(left, multiply_matrices(square, right)).reshape(rows.shape)
    left, right = to_device_of(rows, left).double(), to_device_of(rows, right).double()
    return (left @ (square.double() @ right)).float().view(rows.shape)


def hadamard_factors(size: int) -> tuple[Tensor, Tensor]:
    """Return two Hadamard matrices whose Kronecker product is that of a power of two."""
    bits = size.bit_length()
    return _hadamard(1 << bits // 2), _hadamard(1 << (bits - 1) // 2)


@cache
def _hadamard(size: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h

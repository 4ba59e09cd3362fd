"""The k elements of largest magnitude, exactly, in little more than one pass over the vector; and
those above a bound.

A strided sample gives a bound that lies below the k-th largest magnitude almost surely; one pass in
blocks that fit the cache keeps what reaches the bound, a little more than k; the exact choice is
made among these. Where fewer than k reach it, the choice is made among all: the result is exact,
always.

Source: sampled thresholds as in Lin et al., "Deep Gradient Compression", ICLR 2018, there without
the exact choice.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.bits import BLOCK

SAMPLE = 1 << 15
SMALL = 1 << 17  # below it, choosing among all is as fast
# standard deviations of the rank: one vector in thirty thousand has to be gone through twice
SAFETY = 4.0

# Without its sign, a float32 is ordered like the integer of the same bits: inf above numbers, NaN
# above inf.
Order = tuple[np.ufunc, np.int32]
MAGNITUDE: Order = (np.bitwise_and, np.int32(0x7FFFFFFF))
POSITIVE: Order = (np.bitwise_xor, np.int32(0))  # negative numbers come last, in no order
NEGATIVE: Order = (np.bitwise_xor, np.int32(-(2**31)))  # the most negative first


def largest(x: Array, k: int, order: Order = MAGNITUDE) -> Array:
    """Ascending indices [k] of the k largest |x|, or of what else an order says, for x float32 [d]
    and 1 ≤ k ≤ d.

    Of equal ones the first are taken. A NaN counts as larger than all numbers, as in torch.topk.
    """
    if isinstance(x, Tensor):
        operation, operand = order
        bits = x.view(torch.int32)
        keys = bits & int(operand) if operation is np.bitwise_and else bits ^ int(operand)
        sample = keys[_spread_out(len(x))]
        return device_kernels.largest(keys, k, _rank(len(sample), k, len(x)), sample)
    bits = x.view(np.int32)
    bound = _bound(bits, k, order)
    if bound is not None:
        places, keys = _reaching(bits, bound, order)
        if keys.size >= k:
            return places[_choose(keys, k)]
        if bound == 1 and order is MAGNITUDE:  # all others are zeros
            zeros = np.flatnonzero(_keys(bits[:k], order) == 0)[: k - keys.size]
            return np.sort(np.concatenate([places, zeros]))
    return _choose(_keys(bits, order), k)


def indices_reaching(x: Array, bound: float) -> Array:
    """Ascending indices of all |x| ≥ bound > 0, for x float32 [d]; a NaN reaches every bound."""
    least = np.maximum(np.float32(bound).view(np.int32), 1)
    if isinstance(x, Tensor):
        return device_kernels.indices_reaching(device_kernels.magnitudes(x), int(least))
    return _reaching(x.view(np.int32), least, MAGNITUDE)[0]


def estimate_threshold(x: Array, k: int) -> float:
    """A bound that about k of |x| reach, from a sample; for short vectors one that k reach. NaN
    where that is one.
    """
    sample = _keys(device_kernels.read(x[_spread_out(len(x))]).view(np.int32), MAGNITUDE)
    rank = min(sample.size, max(1, round(k * sample.size / len(x))))
    return float(np.partition(sample, sample.size - rank)[sample.size - rank].view(np.float32))


def largest_of_rows(x: Array, k: int) -> Array:
    """Ascending column indices [rows, k] of the k largest |x| of each row, for x float32 [rows,
    columns].
    """
    if isinstance(x, Tensor):
        return device_kernels.largest_of_rows(device_kernels.magnitudes(x), k)
    rows, columns = x.shape
    found = np.empty((rows, k), np.int32)
    step = max(1, BLOCK // columns)
    for start in range(0, rows, step):
        keys = _keys(x[start : start + step].view(np.int32), MAGNITUDE)
        starts = np.arange(len(keys))[:, None] * columns
        places = np.flatnonzero(keys >= np.partition(keys, -k, axis=1)[:, -k, None])
        if places.size == found[start : start + step].size:
            found[start : start + step] = places.reshape(-1, k) - starts
        else:  # several are as large as the k-th
            found[start : start + step] = [_choose(row, k) for row in keys]
    return found


def _keys(bits: np.ndarray, order: Order) -> np.ndarray:
    operation, operand = order
    return operation(bits, operand)


def _spread_out(d: int) -> slice:
    """Some of d elements, spread over all; of a short vector all."""
    stride = max(1, d // SAMPLE)
    while (
        math.gcd(stride, 210) > 1
    ):  # a period of the layers' shapes would make the sample one-sided
        stride += 1
    return slice(stride // 2, None, stride)


def _rank(size: int, k: int, d: int) -> int | None:
    """Of a bound in a sample of that size that more than k of d elements reach, in all likelihood;
    None where so many would that it is no use.
    """
    rank = k * size / d
    rank = math.ceil(rank + SAFETY * (math.sqrt(rank) + 1))
    return None if d < SMALL or rank >= size // 4 else rank


def _bound(bits: np.ndarray, k: int, order: Order) -> np.int32 | None:
    """A key that more than k elements reach, in all likelihood; None where too many would. Not 0:
    of vectors that are sparse already, all elements reach it.
    """
    sample = _keys(bits[_spread_out(bits.size)], order)
    rank = _rank(sample.size, k, bits.size)
    if rank is None:
        return None
    return np.partition(sample, sample.size - rank)[sample.size - rank] or np.int32(1)


def _reaching(bits: np.ndarray, bound: np.int32, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """Places and keys of all elements whose key is at least `bound`."""
    operation, operand = order
    buffer, reaches = np.empty(BLOCK, np.int32), np.empty(BLOCK, bool)
    places, keys = [], []
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        key = operation(part, operand, out=buffer[: part.size])
        found = np.flatnonzero(np.greater_equal(key, bound, out=reaches[: part.size]))
        keys.append(key[found])
        places.append(found + start)
    return np.concatenate(places), np.concatenate(keys)


def _choose(keys: np.ndarray, k: int) -> np.ndarray:
    """Ascending places of the k largest keys, the first of equal ones."""
    least = np.partition(keys, keys.size - k)[keys.size - k]
    chosen = keys > least
    equal = np.flatnonzero(keys == least)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)

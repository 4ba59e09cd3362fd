"""Select the k elements of largest magnitude exactly, or all elements above a bound.

A strided sample gives a bound that almost surely lies below the k-th largest magnitude. One pass,
in blocks that fit the cache, collects the elements that reach the bound: a few more than k. The
exact selection is made among these. If fewer than k reach the bound, the selection is made among
all, so the result is always exact.

Source: sampled thresholds as in Lin et al., "Deep Gradient Compression", ICLR 2018, there without
the exact selection.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ashl.compression.wire import device_kernels
from ashl.compression.wire.arrays import Array
from ashl.compression.wire.bits import BLOCK

SAMPLE = 1 << 15  # elements of a sample, about
SMALL = 1 << 17  # elements; for fewer, selecting among all is as fast
SAFETY = 4.0  # standard deviations of the rank: one vector in 30,000 needs a second pass

# The bits of a float32 without its sign, read as an integer, have the order of its magnitude:
# infinity is above all numbers, NaN above infinity. An order is the operation that makes this key.
Order = tuple[np.ufunc, np.int32]
MAGNITUDE: Order = (np.bitwise_and, np.int32(0x7FFFFFFF))
POSITIVE: Order = (np.bitwise_xor, np.int32(0))  # negative numbers are last, unordered
NEGATIVE: Order = (np.bitwise_xor, np.int32(-(2**31)))  # the most negative number is first


def largest(x: Array, k: int, order: Order = MAGNITUDE) -> Array:
    """Return the ascending indices [k] of the k largest elements of x in an order, by default of
    |x|.

    Args: x float32 [d], 1 ≤ k ≤ d.
    Limits: of equal elements the first ones are selected. A NaN is larger than all numbers, as in
    torch.topk.
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
        indices, keys = _reaching(bits, bound, order)
        if keys.size >= k:
            return indices[_choose(keys, k)]
        if bound == 1 and order is MAGNITUDE:  # all elements below the bound are zeros
            zeros = np.flatnonzero(_keys(bits[:k], order) == 0)[: k - keys.size]
            return np.sort(np.concatenate([indices, zeros]))
    return _choose(_keys(bits, order), k)


def indices_reaching(x: Array, bound: float) -> Array:
    """Return the ascending indices of all |x| ≥ bound > 0, for x float32 [d]; NaN reaches any
    bound.
    """
    least = np.maximum(np.float32(bound).view(np.int32), 1)
    if isinstance(x, Tensor):
        return device_kernels.indices_reaching(device_kernels.magnitudes(x), int(least))
    return _reaching(x.view(np.int32), least, MAGNITUDE)[0]


def estimate_threshold(x: Array, k: int) -> float:
    """Return a bound that about k of |x| reach, from a sample; exactly k if x is short and has no
    ties.

    NaN if the bound falls on a NaN.
    """
    sample = _keys(device_kernels.read(x[_spread_out(len(x))]).view(np.int32), MAGNITUDE)
    rank = min(sample.size, max(1, round(k * sample.size / len(x))))
    return float(np.partition(sample, sample.size - rank)[sample.size - rank].view(np.float32))


def largest_of_rows(x: Array, k: int) -> Array:
    """Return the ascending column indices [rows, k] of the k largest |x| in each row, x float32."""
    if isinstance(x, Tensor):
        return device_kernels.largest_of_rows(device_kernels.magnitudes(x), k)
    rows, columns = x.shape
    found = np.empty((rows, k), np.int32)
    step = max(1, BLOCK // columns)
    for start in range(0, rows, step):
        keys = _keys(x[start : start + step].view(np.int32), MAGNITUDE)
        starts = np.arange(len(keys))[:, None] * columns
        indices = np.flatnonzero(keys >= np.partition(keys, -k, axis=1)[:, -k, None])
        if indices.size == found[start : start + step].size:
            found[start : start + step] = indices.reshape(-1, k) - starts
        else:  # a tie with the k-th largest
            found[start : start + step] = [_choose(row, k) for row in keys]
    return found


def _keys(bits: np.ndarray, order: Order) -> np.ndarray:
    operation, operand = order
    return operation(bits, operand)


def _spread_out(d: int) -> slice:
    """Return a slice of d elements that is spread over all of them; all elements if d is small."""
    stride = max(1, d // SAMPLE)
    # A stride with a factor 2, 3, 5 or 7, as layers' shapes have, would give a one-sided sample.
    while math.gcd(stride, 210) > 1:
        stride += 1
    return slice(stride // 2, None, stride)


def _rank(size: int, k: int, d: int) -> int | None:
    """Return the rank of a bound in the sample that very likely more than k of d elements reach.

    None if so many elements would reach it that it saves nothing.
    """
    rank = k * size / d
    rank = math.ceil(rank + SAFETY * (math.sqrt(rank) + 1))
    return None if d < SMALL or rank >= size // 4 else rank


def _bound(bits: np.ndarray, k: int, order: Order) -> np.int32 | None:
    """Return a key that very likely more than k elements reach; None if too many would reach it.

    It is at least 1: in a sparse vector, all elements reach key 0.
    """
    sample = _keys(bits[_spread_out(bits.size)], order)
    rank = _rank(sample.size, k, bits.size)
    if rank is None:
        return None
    return np.partition(sample, sample.size - rank)[sample.size - rank] or np.int32(1)


def _reaching(bits: np.ndarray, bound: np.int32, order: Order) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and keys of all elements whose key is at least `bound`."""
    operation, operand = order
    buffer, reaches = np.empty(BLOCK, np.int32), np.empty(BLOCK, bool)
    indices, keys = [], []
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        key = operation(part, operand, out=buffer[: part.size])
        found = np.flatnonzero(np.greater_equal(key, bound, out=reaches[: part.size]))
        keys.append(key[found])
        indices.append(found + start)
    return np.concatenate(indices), np.concatenate(keys)


def _choose(keys: np.ndarray, k: int) -> np.ndarray:
    """Return the ascending indices of the k largest keys; of equal keys the first ones."""
    least = np.partition(keys, keys.size - k)[keys.size - k]
    chosen = keys > least
    equal = np.flatnonzero(keys == least)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)

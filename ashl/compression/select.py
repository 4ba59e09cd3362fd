"""The k elements of largest magnitude, exactly, in little more than one pass over the vector.

A strided sample gives a bound that lies below the k-th largest magnitude almost surely; one pass in blocks that fit the
cache keeps what reaches the bound, a little more than k; the exact choice is made among these. Where fewer than k reach
it, the choice is made among all: the result is exact, always.

Source: sampled thresholds as in Lin et al., "Deep Gradient Compression", ICLR 2018, there without the exact choice.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK = 1 << 16  # elements: keys and comparison stay in the L2 cache
SAMPLE = 1 << 15
SMALL = 1 << 17  # below it, choosing among all is as fast
SAFETY = 4.0  # standard deviations of the rank: one vector in thirty thousand has to be gone through twice
MAGNITUDE = np.int32(0x7FFFFFFF)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices [k] of the k largest |x|, for x float32 [d] and 1 ≤ k ≤ d.

    Of equal magnitudes the first are taken. A NaN counts as larger than all numbers, as in torch.topk.
    """
    # Without its sign, a float32 is ordered like the integer of the same bits: inf above numbers, NaN above inf.
    bits = x.view(np.int32)
    bound = None if x.size < SMALL else _bound(bits, k)
    if bound is not None:
        places, keys = _reaching(bits, bound)
        if keys.size >= k:
            return places[_choose(keys, k)]
    return _choose(bits & MAGNITUDE, k)


def _bound(bits: np.ndarray, k: int) -> np.int32 | None:
    """A key that more than k elements reach, in all likelihood; None where too many would."""
    stride = bits.size // SAMPLE
    while math.gcd(stride, 210) > 1:  # a period of the layers' shapes would make the sample one-sided
        stride += 1
    sample = bits[stride // 2 :: stride] & MAGNITUDE
    rank = k * sample.size / bits.size
    rank = math.ceil(rank + SAFETY * (math.sqrt(rank) + 1))
    return np.partition(sample, sample.size - rank)[sample.size - rank] if rank < sample.size // 4 else None


def _reaching(bits: np.ndarray, bound: np.int32) -> tuple[np.ndarray, np.ndarray]:
    """Places and keys of all elements whose key is at least `bound`."""
    buffer, reaches = np.empty(BLOCK, np.int32), np.empty(BLOCK, bool)
    places, keys = [], []
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        key = np.bitwise_and(part, MAGNITUDE, out=buffer[: part.size])
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

"""Random words by index: word i of a stream is a hash of its key and of i.

So each word can be computed alone, in any order, and on any device with the same bits.

Rule: word i = mix(key + i·γ mod 2⁶⁴) with SplitMix64's γ and its finalizer, two rounds of xor-shift
and multiply. These are nine operations on whole arrays of integers. Philox 4x64-10 takes some
hundred without a 128-bit product. A stream starts at 64 bits of a hash of its name; among a million
streams of ten million words, an overlap of two is unlikely.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.data.rng import Purpose

GAMMA = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST = 31  # the last shift
WORDS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in ROUNDS), np.uint64(LAST)
WORD = 2**64
HOST = torch.device("cpu")
PIECE = 1 << 14  # words that stay in the cache between two operations


class CounterRng(NamedTuple):
    """A stream of 64-bit words."""

    key: int

    def words(self, like: Any, start: int, count: int) -> Any:
        """Return the words start … start + count − 1 as the bits of int64.

        They are a tensor on the device of `like`, or an array if `like` is one. In host memory
        NumPy makes them, in half of torch's time.
        """
        if isinstance(like, np.ndarray):
            return self._host_words(start, count)
        if like.device == HOST:
            return torch.from_numpy(self._host_words(start, count))
        return _mix_tensor(torch.arange(start, start + count, device=str(like.device)), self.key)

    def _host_words(self, start: int, count: int) -> np.ndarray:
        words, spare = np.empty(count, np.uint64), np.empty(min(count, PIECE), np.uint64)
        for begin in range(0, count, PIECE):
            piece = words[begin : begin + PIECE]
            first = np.uint64((self.key + (start + begin) * GAMMA) % WORD)
            _mix_array(np.add(_steps()[: piece.size], first, out=piece), spare[: piece.size])
        return words.view(np.int64)


def counter_rng(seed: int, purpose: Purpose, *words: int) -> CounterRng:
    """Return the stream of these non-negative words."""
    return CounterRng(
        int(np.random.SeedSequence((seed, int(purpose), *words)).generate_state(1, np.uint64)[0])
    )


@cache
def _steps() -> np.ndarray:
    return np.arange(PIECE, dtype=np.uint64) * np.uint64(GAMMA)


def _mix_array(words: np.ndarray, spare: np.ndarray) -> None:
    """Apply the rounds to `words`, in place; `spare` is memory of the same size."""
    rounds, last = WORDS
    for shift, factor in rounds:
        words ^= np.right_shift(words, shift, out=spare)
        words *= factor
    words ^= np.right_shift(words, last, out=spare)


def _mix_tensor(places: Tensor, key: int) -> Tensor:
    """Return the words of int64 indices; their products wrap to the same bits as those of
    uint64.
    """
    words = places * _to_signed(GAMMA) + _to_signed(key)
    for shift, factor in ROUNDS:
        words = (words ^ _shift_right(words, shift)) * _to_signed(factor)
    return words ^ _shift_right(words, LAST)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros entering on the left."""
    return words >> bits & (1 << 64 - bits) - 1


def _to_signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word

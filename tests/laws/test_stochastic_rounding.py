"""Stochastic rounding keeps the mean exactly: over all of an element's own bits, each once, with
shared ones.
"""

from typing import Any

import numpy as np
import pytest
import torch

from ashl.compression.kernels import (
    SHARED,
    RoundingNoise,
    round_levels,
    rounding_noise,
)
from ashl.data.counter_rng import CounterRng

ALL = 2**16
NONE = torch.empty(ALL)


class Words:
    """Every value of an element's own bits once, in order."""

    def words(self, like: Any, start: int, count: int) -> Any:
        return np.arange(4 * start, 4 * (start + count), dtype=np.uint16).view(np.int64)


WORDS: Any = Words()


def noise(share: float) -> RoundingNoise:
    """Round up to 7 levels with these shared bits for all elements."""
    found = rounding_noise(NONE, CounterRng(0), 7)
    return found._replace(
        words=WORDS,
        rest=np.full(SHARED, int(share * 2 ** (found.bits - 16)), np.int32),
    )


@pytest.mark.parametrize(
    "y", [2.0**-18, 3 * 2.0**-18, -(2.0**-18), 1 - 2.0**-18, 0.75 - 2.0**-18, 0.5, 3.0, -1.0, 0.0]
)
def test_the_mean_is_kept_to_the_last_bit(y: float) -> None:
    """Values below 2⁻¹⁷ of a level were never sent, and other values had an error of up to that."""
    noises = [noise(share) for share in (0.0, 0.25, 0.5, 0.75)]
    levels = [
        round_levels(np.full(ALL, y * one.unit, np.float32), one, 0, zero=7) for one in noises
    ]
    assert sum(int(each.sum(dtype=np.int64)) for each in levels) / (4 * ALL) - 7 == y


@pytest.mark.parametrize("y", [1e-30, 254.99, 255.0])
def test_nothing_is_rounded_beyond_the_next_level(y: float) -> None:
    found = rounding_noise(NONE, CounterRng(0), 255)
    last = found._replace(words=WORDS, rest=np.full(SHARED, 2 ** (found.bits - 16) - 1, np.int32))
    levels = round_levels(np.full(ALL, y * last.unit, np.float32), last, 0)
    assert set(levels.tolist()) <= {int(y), int(np.ceil(y))}


def test_what_is_shared_is_shared_by_place() -> None:
    """Rounding is the same in all sizes of blocks."""
    count = 2 * SHARED + 12
    x = torch.full((count,), 2.0**-17)
    one = rounding_noise(x, CounterRng(3), 1)
    assert 0 <= one.rest.min() <= one.rest.max() < 2 ** (one.bits - 16) < 3 * one.rest.mean()
    y = x * one.unit
    whole = round_levels(y, one, 0, 1)
    parts = [
        round_levels(y[start : start + 1000], one, start, 1) for start in range(0, count, 1000)
    ]
    assert whole.tobytes() == np.concatenate(parts).tobytes()

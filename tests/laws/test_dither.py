"""Stochastic rounding keeps the mean exactly: over all first words, each once, and the second ones of a tie."""

from typing import Any

import numpy as np
import pytest
import torch

from ashl.compression.wire.levels import rounded

ALL = 2**16


class Words:
    """Every first word once, in order, and one second word."""

    def __init__(self, second: float) -> None:
        self.last = second

    def words(self, like: Any, start: int, count: int) -> Any:
        words = np.arange(4 * start, 4 * (start + count), dtype=np.uint16).view(np.uint64)
        return words if isinstance(like, np.ndarray) else torch.from_numpy(words.view(np.int64))

    def second(self, places: Any) -> Any:
        found = np.full(len(places), self.last)
        return found if isinstance(places, np.ndarray) else torch.from_numpy(found)


@pytest.mark.parametrize("y", [2.0**-18, 3 * 2.0**-18, -(2.0**-18), 1 - 2.0**-18, 0.75 - 2.0**-18, 0.5, 3.0, -1.0, 0.0])
def test_the_mean_is_kept_to_the_last_bit(y: float) -> None:
    """What was below 2⁻¹⁷ of a level was never sent, and all else was wrong by up to as much."""
    levels = [rounded(np.full(ALL, y, np.float32), Words(w), 0, zero=7) for w in (0.0, 0.25, 0.5, 0.75)]
    assert sum(int(each.sum(dtype=np.int64)) for each in levels) / (4 * ALL) - 7 == y


@pytest.mark.parametrize("y", [1e-30, 254.99, 255.0])
def test_nothing_is_rounded_beyond_the_next_level(y: float) -> None:
    levels = rounded(np.full(ALL, y, np.float32), Words(1 - 2.0**-53), 0)
    assert set(levels.tolist()) <= {int(y), int(np.ceil(y))}

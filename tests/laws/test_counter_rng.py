"""Random words by index: those that were published, in any order, and the same of arrays and of
tensors.
"""

import numpy as np
import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.data.counter_rng import PIECE, CounterRng
from ashl.device import to_device, to_host
from tests.stand_in_device import DEVICE, guarded

PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
NONE = torch.empty(0)


def test_they_are_splitmix64() -> None:
    """Its words of the seed 1234567, from its first step on."""
    assert [word % 2**64 for word in CounterRng(1234567).words(NONE, 1, 5).tolist()] == list(
        PUBLISHED
    )


@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (0, 1), (3, PIECE), (PIECE - 1, 2 * PIECE + 3), (2**40, 5)]
)
def test_of_the_host_and_of_a_device(start: int, count: int) -> None:
    for key in (0, 7, 2**63 + 5, 2**64 - 1):
        stream = CounterRng(key)
        words = stream.words(NONE, start, count)
        with guarded():
            there = to_host(stream.words(to_device(NONE, DEVICE), start, count))
        assert torch.equal(words, there)
        assert torch.equal(words[: count // 2], stream.words(NONE, start, count // 2))


def test_they_are_spread_evenly() -> None:
    """Check each of the four random numbers in a word: mean, variance, and correlation.

    The correlations are those with its neighbour and with the same element of the next message.
    """
    count = 50_000
    one, other = (
        EncodeContext(round=k).words().words(NONE, 0, count).numpy().view(np.uint16) / 2.0**16 - 0.5
        for k in (0, 1)
    )
    noise = 5 / (4 * count) ** 0.5
    assert abs(one.mean()) < noise / 12**0.5
    assert abs(12 * one.var() - 1) < noise
    for u, v in ((one[:-1], one[1:]), (one[:-4], one[4:]), (one, other)):
        assert abs(12 * (u * v).mean()) < noise

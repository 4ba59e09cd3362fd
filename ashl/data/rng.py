"""The random streams of data and learning: counter-based, so that no draw depends on what was drawn
before it.

Every stream is named by (seed, purpose, worker, step) and starts afresh, hence an order of
execution, a restart or another process cannot change it. Philox: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np

BLOCK = 16  # steps whose seeds are drawn together


class Purpose(IntEnum):
    """What a stream is drawn for; two purposes never share numbers."""

    SPLIT = 1  # which samples are for training and which for testing
    SAMPLES = 2  # making up synthetic samples
    PARTITION = 3  # which worker gets which sample
    ORDER = 4  # in which order a worker visits its shard
    AUGMENT = 5  # crops and flips
    INIT = 6  # the first parameters
    MODEL = 7  # dropout and whatever else a model draws in training
    SUBSET = 8  # the training samples that evaluation looks at
    GRAPH = 9  # the edges of a random graph
    PAIRS = 10  # who meets whom in a round
    PEER = 11  # whom a worker asks next
    GROUPS = 12  # who averages with whom in partial all-reduce
    CODEC = 13  # masks, dither and signs of one message
    SPEED = 14  # how fast each worker of a drawn cluster is
    CHURN = 15  # when a worker fails, and when it is back
    EVALUATION = 16  # whatever a model draws while it is evaluated
    DATA = 17  # what a data set draws from the global generators while it is made


def bits(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> np.random.Philox:
    """The bit generator of one stream; the counter's lowest word counts the draws."""
    return np.random.Philox(key=[seed, purpose], counter=[0, step, worker, 0])


def stream(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> np.random.Generator:
    """A generator at the start of one stream."""
    return np.random.Generator(bits(seed, purpose, worker, step))


def quick(seed: int, purpose: Purpose, *words: int) -> np.random.Generator:
    """A generator for bulk, several times as fast as Philox, at the start of the stream of these
    non-negative words.
    """
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((seed, int(purpose), *words)))
    )


def permutation(
    length: int, seed: int, purpose: Purpose, worker: int = 0, step: int = 0
) -> np.ndarray:
    """0 … length-1 in random order, int64, by sorting raw words: only those are the same in every
    numpy version.
    """
    words = bits(seed, purpose, worker, step).random_raw(length)
    return np.argsort(words, kind="stable")


def chosen(
    length: int, count: int, seed: int, purpose: Purpose, worker: int = 0, step: int = 0
) -> list[int]:
    """The first `count` of that `permutation`, without sorting the others."""
    words = bits(seed, purpose, worker, step).random_raw(length)
    least = np.argpartition(words, count)[:count] if count < length else np.arange(length)
    return least[np.lexsort((least, words[least]))].tolist()


def torch_seed(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> int:
    """A seed for one of torch's own generators, below 2^63."""
    return seeds_of(seed, purpose, worker, step // BLOCK)[step % BLOCK]


@lru_cache(maxsize=4096)
def seeds_of(seed: int, purpose: Purpose, worker: int, block: int) -> tuple[int, ...]:
    """The seeds of the steps of a block: to go on to the next step's stream takes a quarter of
    making it.
    """
    drawn = bits(seed, purpose, worker, block * BLOCK)
    found = [int(drawn.random_raw()) >> 1]
    while len(found) < BLOCK:
        drawn.advance(
            2**64 - 1
        )  # to the start of the next step; the draw has moved the lowest word by one
        found.append(int(drawn.random_raw()) >> 1)
    return tuple(found)

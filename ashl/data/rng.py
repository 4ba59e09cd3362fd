"""Provide the random streams of data and learning; no draw depends on the draws before it.

Every stream is named by (seed, purpose, worker, step) and starts at its beginning each time. So an
order of execution, a restart or another process cannot change it.

Source: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np

BLOCK = 16  # steps whose seeds are drawn together


class Purpose(IntEnum):
    """The purpose of a stream; two purposes never share numbers."""

    SPLIT = 1  # samples for training or for testing
    SAMPLES = 2  # synthetic samples
    PARTITION = 3  # the worker of each sample
    ORDER = 4  # the order in which a worker visits its shard
    AUGMENT = 5  # crops and flips
    INIT = 6  # the first parameters
    MODEL = 7  # dropout and other draws of a model in training
    SUBSET = 8  # the training samples of an evaluation
    GRAPH = 9  # the edges of a random graph
    PAIRS = 10  # the pairs of a gossip round
    PEER = 11  # the next peer of a worker
    GROUPS = 12  # the groups of partial all-reduce
    CODEC = 13  # masks, dither and signs of one message
    SPEED = 14  # the speed of each worker of a random cluster
    CHURN = 15  # the times at which a worker fails and rejoins
    EVALUATION = 16  # draws of a model during an evaluation
    DATA = 17  # draws of a data set from the global generators while it is made


def bit_generator(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> np.random.Philox:
    """Return the bit generator of one stream; the counter's lowest word counts the draws."""
    return np.random.Philox(key=[seed, purpose], counter=[0, step, worker, 0])


def stream(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> np.random.Generator:
    """Return a generator at the start of one stream."""
    return np.random.Generator(bit_generator(seed, purpose, worker, step))


def bulk_stream(seed: int, purpose: Purpose, *words: int) -> np.random.Generator:
    """Return a generator for bulk draws at the start of the stream of these non-negative words.

    It is several times as fast as Philox.
    """
    return np.random.Generator(
        np.random.SFC64(np.random.SeedSequence((seed, int(purpose), *words)))
    )


def permutation(
    length: int, seed: int, purpose: Purpose, worker: int = 0, step: int = 0
) -> np.ndarray:
    """Return 0 … length−1 in random order, int64, by sorting raw words.

    Only raw words are the same in every numpy version.
    """
    words = bit_generator(seed, purpose, worker, step).random_raw(length)
    return np.argsort(words, kind="stable")


def draw_subset(
    length: int, count: int, seed: int, purpose: Purpose, worker: int = 0, step: int = 0
) -> list[int]:
    """Return the first `count` numbers of that `permutation`, without sorting the others."""
    words = bit_generator(seed, purpose, worker, step).random_raw(length)
    least = np.argpartition(words, count)[:count] if count < length else np.arange(length)
    return least[np.lexsort((least, words[least]))].tolist()


def torch_seed(seed: int, purpose: Purpose, worker: int = 0, step: int = 0) -> int:
    """Return a seed for one of torch's own generators, below 2^63."""
    return block_seeds(seed, purpose, worker, step // BLOCK)[step % BLOCK]


@lru_cache(maxsize=4096)
def block_seeds(seed: int, purpose: Purpose, worker: int, block: int) -> tuple[int, ...]:
    """Return the seeds of the steps of a block.

    Advancing to the next step's stream takes a quarter of the time of creating it.
    """
    drawn = bit_generator(seed, purpose, worker, block * BLOCK)
    found = [int(drawn.random_raw()) >> 1]
    while len(found) < BLOCK:
        # Advance to the start of the next step; the draw has moved the lowest word by one.
        drawn.advance(2**64 - 1)
        found.append(int(drawn.random_raw()) >> 1)
    return tuple(found)

"""Random indices that both ends draw from a seed of 8 bytes in the payload.

Rule: every set of k of the d indices is equally likely; they are drawn without replacement. Drawing
500 of 1000 with replacement gives only about 390 different elements.

Source: Konečný et al., "Federated Learning: Strategies for Improving Communication Efficiency",
2016.
"""

import math

import numpy as np

from ashl.compression.common.linear import SummedValues
from ashl.compression.common.sparsifier import SPARSE, Selection, Share
from ashl.compression.contract import EncodeContext, PayloadError
from ashl.compression.wire.arrays import Array, read, to_device_index
from ashl.compression.wire.payload_format import HEADER, Parts
from ashl.option import option

SEED_BYTES = 8


@option
class Seeded(Selection, SummedValues, Share):
    """Codec that sends random elements at a given density; with a shared seed, payloads can be
    summed.
    """

    def place_bytes(self, k: int, d: int) -> int:
        return SEED_BYTES

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        return to_device_index(buffer, places_of(read(buffer), k, d))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """Return the size of the summed part of a payload in bytes: its values."""
        seed = SEED_BYTES if self.form(self.kept(ratio, d), d) == SPARSE else 0
        return self.encoded_nbytes(ratio, d) - HEADER.size - seed

    def draw_places(
        self, x: Array, rng: np.random.Generator, context: EncodeContext, scale: float = 1.0
    ) -> Parts:
        """Encode x at indices drawn from a new seed of `rng`, times `scale` unless all of x is
        sent.
        """
        k, seed = self.kept(context.ratio, len(x)), new_seed(rng)
        if self.form(k, len(x)) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        kept = x[to_device_index(x, places_of(seed, k, len(x)))]
        return self.parts_of(x, k, kept if scale == 1 else kept * scale, seed, context)


def new_seed(rng: np.random.Generator) -> np.ndarray:
    """Return a random seed, uint8 [8]."""
    return words(rng, 2).astype("<u4").view(np.uint8)


def places_of(seed: np.ndarray, k: int, d: int) -> np.ndarray:
    """Return the ascending indices [k] below d of a seed.   Raises: PayloadError if it is not 8
    bytes.
    """
    if seed.size != SEED_BYTES:
        raise PayloadError(f"expected a seed of {SEED_BYTES} bytes; received {seed.size}")
    sequence = np.random.SeedSequence(np.frombuffer(seed.tobytes(), "<u4").tolist())
    return draw_distinct(np.random.Generator(np.random.SFC64(sequence)), k, d)


def draw_distinct(rng: np.random.Generator, k: int, d: int) -> np.ndarray:
    """Return k ascending numbers below d; each set is equally likely.

    It draws with replacement until k different numbers are found, and removes the surplus at
    random.
    """
    if 2 * k > d:
        left = np.ones(d, bool)
        left[draw_distinct(rng, d - k, d)] = False
        return np.flatnonzero(left)
    found = np.empty(0, np.uint32)
    while found.size < k:
        # Expected number of draws until the missing numbers are found.
        missing = -d * math.log1p(-(k - found.size) / (d - found.size))
        more = rng.integers(0, d, math.ceil(missing + 4 * math.sqrt(missing)), np.uint32)
        found = np.sort(np.concatenate([found, more]))
        found = found[np.concatenate([[True], found[1:] != found[:-1]])]
    surplus = found.size - k
    if surplus:
        return np.delete(found, np.argpartition(words(rng, found.size), surplus)[:surplus])
    return found


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return uniform random words, uint32 [count]."""
    return rng.integers(0, 2**32, count, np.uint32)

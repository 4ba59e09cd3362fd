"""Places that both ends draw from a seed of 8 bytes, which travels in their stead.

Rule: every set of k of the d places is equally likely: they are drawn without replacement. With
replacement some would be drawn twice, and of 500 of 1000 elements only about 390 were sent.

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
    """A share of the elements, at random places; where all draw alike, values add up."""

    def place_bytes(self, k: int, d: int) -> int:
        return SEED_BYTES

    def read_places(self, buffer: Array, k: int, d: int) -> Array:
        return to_device_index(buffer, places_of(read(buffer), k, d))

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return self.size(self.kept(ratio, d), d)

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """What an all-reduce sums of a body: its values alone."""
        seed = SEED_BYTES if self.form(self.kept(ratio, d), d) == SPARSE else 0
        return self.encoded_nbytes(ratio, d) - HEADER.size - seed

    def draw_places(
        self, x: Array, rng: np.random.Generator, context: EncodeContext, scale: float = 1.0
    ) -> Parts:
        """x at places that are drawn with a new seed of `rng`, scaled unless all of x is sent."""
        k, seed = self.kept(context.ratio, len(x)), new_seed(rng)
        if self.form(k, len(x)) != SPARSE:
            return self.parts_of(x, k, None, None, context)
        kept = x[to_device_index(x, places_of(seed, k, len(x)))]
        return self.parts_of(x, k, kept if scale == 1 else kept * scale, seed, context)


def new_seed(rng: np.random.Generator) -> np.ndarray:
    """uint8 [8]."""
    return words(rng, 2).astype("<u4").view(np.uint8)


def places_of(seed: np.ndarray, k: int, d: int) -> np.ndarray:
    """The ascending places [k] of d that a seed stands for. Raises BodyError where it is none."""
    if seed.size != SEED_BYTES:
        raise PayloadError(f"a seed of {seed.size} bytes came where {SEED_BYTES} were expected")
    sequence = np.random.SeedSequence(np.frombuffer(seed.tobytes(), "<u4").tolist())
    return draw_distinct(np.random.Generator(np.random.SFC64(sequence)), k, d)


def draw_distinct(rng: np.random.Generator, k: int, d: int) -> np.ndarray:
    """Ascending numbers [k] below d, each set of them equally likely.

    They are drawn with replacement until there are k different ones; what is too many then is
    dropped at random.
    """
    if 2 * k > d:
        left = np.ones(d, bool)
        left[draw_distinct(rng, d - k, d)] = False
        return np.flatnonzero(left)
    found = np.empty(0, np.uint32)
    while found.size < k:
        missing = -d * math.log1p(
            -(k - found.size) / (d - found.size)
        )  # draws that find as many new ones on average
        more = rng.integers(0, d, math.ceil(missing + 4 * math.sqrt(missing)), np.uint32)
        found = np.sort(np.concatenate([found, more]))
        found = found[np.concatenate([[True], found[1:] != found[:-1]])]
    surplus = found.size - k
    return (
        np.delete(found, np.argpartition(words(rng, found.size), surplus)[:surplus])
        if surplus
        else found
    )


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """uint32 [count]."""
    return rng.integers(0, 2**32, count, np.uint32)

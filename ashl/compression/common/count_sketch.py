"""Count sketch: a vector's heavy elements in a table of a few rows, which may be summed before they
are looked for.

Rule: S[r, h_r(j)] += σ_r(j)·x_j for every row r, with h_r a bucket and σ_r a sign drawn by a hash.
σ_r(j)·S[r, h_r(j)] estimates x_j without bias over the draw of the hash, with a variance of
‖x‖²/cols; the median over the rows does away with most collisions. The k largest |estimates| are
what is recovered. S(x) + S(y) = S(x + y). Bits: 64 + 32 a cell.

Hash: u = a_r·j + b_r mod 2^32, u ← c_r·(u ⊕ ⌊u/2^16⌋) mod 2^32 with a_r and c_r odd; ⌊u·cols/2^32⌋
is the bucket and the next bit the sign. The first step alone is multiply-shift, whose pairs are as
good as independent, but with which the variance of smooth vectors was measured two to three times
as large. The seed is in the body. It holds for a whole run, since what is kept from round to round
adds up in the table, and it is the same for all workers. Where rows·cols is no less than d the
vector itself is sent, whose elements are exact.

Source: Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002;
hash, Dietzfelbinger et al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", J.
Algorithms 1997.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.code import Sparse, kept_count
from ashl.compression.common.linear import SummedValues
from ashl.compression.common.select import largest
from ashl.compression.contract import ALL, EncodeContext, PayloadError, Reduces, Traits
from ashl.compression.wire.bits import BLOCK
from ashl.compression.wire.payload_format import HEADER, Parts, read_payload, typed_part
from ashl.data.rng import Purpose, quick
from ashl.option import Ratio, option

SEED_BYTES = 8
SEEDS = 2**64


class Table(NamedTuple):
    """The form of a sketch: rows of cols cells; rows = 0 is the vector itself, of cols elements."""

    rows: int
    cols: int
    seed: int = 0

    @property
    def cells(self) -> int:
        return max(1, self.rows) * self.cols


@lru_cache(maxsize=8)
def multipliers(seed: int, rows: int) -> tuple[tuple[int, int, int], ...]:
    """(a, b, c) of each row's hash."""
    drawn = quick(seed, Purpose.CODEC, ALL).integers(0, 2**32, (rows, 3), np.uint32)
    return tuple((int(a) | 1, int(b), int(c) | 1) for a, b, c in drawn)


def hash_cells(table: Table, row: int, d: int) -> Iterator[tuple[slice, np.ndarray]]:
    """In blocks: 2·bucket + sign of each element, int64; it is overwritten by the next."""
    a, b, c = multipliers(table.seed, table.rows)[row]
    step = np.arange(BLOCK, dtype=np.uint32)
    buffers = [np.empty(BLOCK, np.uint32) for _ in range(2)]
    wide = np.empty(BLOCK, np.uint64)
    for start in range(0, d, BLOCK):
        size = min(BLOCK, d - start)
        u, high, places = buffers[0][:size], buffers[1][:size], wide[:size]
        np.multiply(step[:size], np.uint32(a), out=u)
        u += np.uint32((a * start + b) % 2**32)
        u ^= np.right_shift(u, np.uint32(16), out=high)
        u *= np.uint32(c)
        np.multiply(u, np.uint64(table.cols), out=places, dtype=np.uint64)
        places >>= np.uint64(31)
        yield slice(start, start + size), places.view(np.int64)


def cells_of(table: Table, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the cells of these elements, their signs), each [rows, k]; every element is in one cell of
    each row.
    """
    if not table.rows:
        return places[None], np.ones((1, places.size), np.float32)
    a, b, c = (
        np.array(numbers, np.uint32)[:, None]
        for numbers in zip(*multipliers(table.seed, table.rows), strict=True)
    )
    u = a * places.astype(np.uint32) + b
    u = c * (u ^ (u >> np.uint32(16)))
    halves = (u.astype(np.uint64) * np.uint64(table.cols) >> np.uint64(31)).astype(np.int64)
    cells = halves // 2 + np.arange(table.rows)[:, None] * table.cols
    return cells, (1 - 2 * (halves % 2)).astype(np.float32)


def sketch(x: np.ndarray, table: Table) -> np.ndarray:
    """The cells [rows · cols] of x, float32; each is rounded once."""
    if not table.rows:
        return x
    cells = np.empty((table.rows, table.cols), np.float32)
    for row in range(table.rows):
        signed = np.zeros(2 * table.cols)  # what is added and what is subtracted, apart
        for part, places in hash_cells(table, row, x.size):
            np.add.at(signed, places, x[part].astype(np.float64))
        cells[row] = signed[::2] - signed[1::2]
    return cells.reshape(-1)


def estimate_elements(cells: np.ndarray, table: Table, d: int) -> np.ndarray:
    """Every element's estimate, float32 [d]."""
    if not table.rows:
        return cells
    signed = np.empty((table.rows, 2 * table.cols), np.float32)
    signed[:, ::2] = cells.reshape(table.rows, table.cols)
    np.negative(signed[:, ::2], out=signed[:, 1::2])
    x, buffer = np.empty(d, np.float32), np.empty((table.rows, BLOCK), np.float32)
    for rows in zip(*(hash_cells(table, row, d) for row in range(table.rows)), strict=True):
        part, size = rows[0][0], rows[0][1].size
        guesses = [
            signed[r].take(places, out=buffer[r, :size], mode="clip")
            for r, (_, places) in enumerate(rows)
        ]
        x[part] = median(guesses)
    return x


def median(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Of an odd number of rows, element by element; they are overwritten. NaN where one is NaN."""
    rows, spare = list(rows), np.empty_like(rows[0])
    for context in range(
        len(rows)
    ):  # odd-even transposition: every pair once in order, all done after as many turns
        for j in range(context % 2, len(rows) - 1, 2):
            np.minimum(rows[j], rows[j + 1], out=spare)
            np.maximum(rows[j], rows[j + 1], out=rows[j + 1])
            rows[j], spare = spare, rows[j]
    return rows[len(rows) // 2]


def recover_largest(
    cells: np.ndarray, table: Table, d: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ascending places of the k largest estimates, and these."""
    x = estimate_elements(cells, table, d)
    places = largest(x, k)
    return places, x[places]


@option
class CountSketch(Sparse, SummedValues, Reduces):
    """The fields and the body of every codec that sends a sketch."""

    traits: ClassVar[Traits] = Traits(linear=True, reduces=True)
    sketch_rows: Literal[1, 3, 5, 7, 9]
    sketch_ratio: Ratio
    recovered_fraction: Ratio

    def table(self, d: int, seed: int = 0) -> Table:
        cols = max(1, round(self.sketch_ratio * d / self.sketch_rows))
        return (
            Table(self.sketch_rows, cols, seed % SEEDS)
            if self.sketch_rows * cols < d
            else Table(0, d, seed % SEEDS)
        )

    def k(self, d: int) -> int:
        return kept_count(self.recovered_fraction, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + SEED_BYTES + 4 * self.table(d).cells

    def bound(self, ratio: float | None, d: int) -> float:
        """At worst every cell collides and |x_j| is taken for as much as Σ|x_i|."""
        k = self.k(d)
        return 1.0 + k * d if self.table(d).rows else 1 - k / d

    def pack(self, x: np.ndarray, context: EncodeContext) -> Parts:
        table = self.table(x.size, context.seed)
        return Parts(table.cells, sketch(x, table), scales=np.array([table.seed], "<u8"))

    def unpack(self, parts: Parts, d: int) -> Any:
        table, cells = self.read(parts, d)
        return recover_largest(cells, table, d, self.k(d))

    def read(self, parts: Parts, d: int) -> tuple[Table, np.ndarray]:
        """(its form, its cells) of a body. Raises BodyError."""
        seed = int.from_bytes(
            typed_part(parts.scales, "u1", SEED_BYTES, "seed").tobytes(), "little"
        )
        table = self.table(d, seed)
        if parts.count != table.cells or parts.indices.size:
            raise PayloadError(
                f"a sketch of {parts.count} cells came where {table.cells} were expected"
            )
        return table, typed_part(parts.values, "<f4", table.cells, "cells")

    def summed_bytes(self, ratio: float | None, d: int) -> int:
        """What an all-reduce sums of a body: its cells alone."""
        return 4 * self.table(d).cells

    def together(
        self, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[Table, np.ndarray]:
        """(form, cells) of Σ weight · body, a new array. Raises BodyError where their hashes
        differ.
        """
        tables, sketches = zip(
            *(self.read(read_payload(payload, self.code, d), d) for payload in payloads),
            strict=True,
        )
        if len(set(tables)) > 1:
            raise PayloadError("sketches of different seeds came, which do not add up")
        total = np.zeros(tables[0].cells, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            for cells, weight in zip(sketches, weights, strict=True):
                total += np.float32(weight) * cells
        return tables[0], total


def dense(places: np.ndarray, values: np.ndarray, d: int) -> Tensor:
    """The vector that has these elements."""
    x = torch.zeros(d)
    x.numpy()[places] = values
    return x

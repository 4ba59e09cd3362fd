"""Count sketch: a small table that approximates the heavy elements of a vector, and can be summed.

Rule: S[r, h_r(j)] += σ_r(j)·x_j for every row r, with a hash that draws a bucket h_r(j) and a sign
σ_r(j). σ_r(j)·S[r, h_r(j)] estimates x_j; it is unbiased over the hash, with variance at most
‖x‖²/cols. The median over the rows removes most collisions. The receiver recovers the k largest
|estimates|. S(x) + S(y) = S(x + y). Bits: 64 + 32 per cell.

Hash: u = a_r·j + b_r mod 2^32, u ← c_r·(u ⊕ ⌊u/2^16⌋) mod 2^32 with a_r and c_r odd; ⌊u·cols/2^32⌋
is the bucket and the next bit the sign. The first step alone is multiply-shift. Its pairs are
nearly independent, but on smooth vectors its measured variance is two to three times as large. The
seed is part of the payload and equal on all workers. It stays the same for a whole run, because
sketches accumulate from round to round. If rows·cols ≥ d, the vector itself is sent, and its
elements are exact.

Source: Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002;
hash, Dietzfelbinger et al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", J.
Algorithms 1997.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import (
    ALL,
    Elements,
    EncodeContext,
    Linear,
    Reduces,
    Traits,
    selected_count,
)
from ashl.compression.kernels import BLOCK, largest_indices, silence_warnings
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    read_payload,
    tensor_of_bytes,
    typed_part,
)
from ashl.data.rng import Purpose, bulk_stream
from ashl.option import Ratio, option

SEED_BYTES = 8
SEEDS = 2**64


class Table(NamedTuple):
    """Shape of a sketch: rows of cols cells; rows = 0 is the vector itself, of cols elements."""

    rows: int
    cols: int
    seed: int = 0

    @property
    def cells(self) -> int:
        return max(1, self.rows) * self.cols


@lru_cache(maxsize=8)
def multipliers(seed: int, rows: int) -> tuple[tuple[int, int, int], ...]:
    """Return (a, b, c) of the hash of each row."""
    drawn = bulk_stream(seed, Purpose.CODEC, ALL).integers(0, 2**32, (rows, 3), np.uint32)
    return tuple((int(a) | 1, int(b), int(c) | 1) for a, b, c in drawn)


def hash_cells(table: Table, row: int, d: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield 2·bucket + sign of each element as int64, block by block.

    Each block overwrites the one before.
    """
    a, b, c = multipliers(table.seed, table.rows)[row]
    step = np.arange(BLOCK, dtype=np.uint32)
    buffers = [np.empty(BLOCK, np.uint32) for _ in range(2)]
    wide = np.empty(BLOCK, np.uint64)
    for start in range(0, d, BLOCK):
        size = min(BLOCK, d - start)
        u, high, hashed = buffers[0][:size], buffers[1][:size], wide[:size]
        np.multiply(step[:size], np.uint32(a), out=u)
        u += np.uint32((a * start + b) % 2**32)
        u ^= np.right_shift(u, np.uint32(16), out=high)
        u *= np.uint32(c)
        np.multiply(u, np.uint64(table.cols), out=hashed, dtype=np.uint64)
        hashed >>= np.uint64(31)
        yield slice(start, start + size), hashed.view(np.int64)


def cells_of(table: Table, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells of some elements and their signs, each [rows, k]; one cell in each row."""
    if not table.rows:
        return indices[None], torch.ones(1, len(indices))
    a, b, c = (
        np.array(numbers, np.uint32)[:, None]
        for numbers in zip(*multipliers(table.seed, table.rows), strict=True)
    )
    u = a * indices.numpy().astype(np.uint32) + b
    u = c * (u ^ (u >> np.uint32(16)))
    halves = (u.astype(np.uint64) * np.uint64(table.cols) >> np.uint64(31)).astype(np.int64)
    cells = halves // 2 + np.arange(table.rows)[:, None] * table.cols
    signs = (1 - 2 * (halves % 2)).astype(np.float32)
    return torch.from_numpy(cells), torch.from_numpy(signs)


def sketch(x: Tensor, table: Table) -> Tensor:
    """Return the cells [rows · cols] of x, float32, each rounded once."""
    if not table.rows:
        return x
    cells, array = torch.empty((table.rows, table.cols)), x.numpy()
    for row in range(table.rows):
        signed = np.zeros(2 * table.cols)  # elements with sign + and with sign −, interleaved
        for part, hashed in hash_cells(table, row, len(x)):
            np.add.at(signed, hashed, array[part].astype(np.float64))
        with silence_warnings():
            cells[row] = torch.from_numpy((signed[::2] - signed[1::2]).astype(np.float32))
    return cells.view(-1)


def estimate_elements(cells: Tensor, table: Table, d: int) -> Tensor:
    """Return the estimates of all elements, float32 [d]."""
    if not table.rows:
        return cells
    positive = cells.view(table.rows, table.cols)
    signed = torch.stack([positive, -positive], 2).view(table.rows, -1).numpy()
    x, buffer = np.empty(d, np.float32), np.empty((table.rows, BLOCK), np.float32)
    for rows in zip(*(hash_cells(table, row, d) for row in range(table.rows)), strict=True):
        part, size = rows[0][0], rows[0][1].size
        guesses = [
            signed[r].take(hashed, out=buffer[r, :size], mode="clip")
            for r, (_, hashed) in enumerate(rows)
        ]
        x[part] = median(guesses)
    return torch.from_numpy(x)


def median(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median of an odd number of rows for each element; NaN if one value is NaN.

    It overwrites the rows.
    """
    rows, spare = list(rows), np.empty_like(rows[0])
    # Odd-even transposition sorts n rows in n passes.
    for sweep in range(len(rows)):
        for j in range(sweep % 2, len(rows) - 1, 2):
            np.minimum(rows[j], rows[j + 1], out=spare)
            np.maximum(rows[j], rows[j + 1], out=rows[j + 1])
            rows[j], spare = spare, rows[j]
    return rows[len(rows) // 2]


def recover_largest(cells: Tensor, table: Table, d: int, k: int) -> Elements:
    """Return the k largest |estimates|, by ascending index."""
    x = estimate_elements(cells, table, d)
    indices = largest_indices(x, k)
    return Elements(indices, x[indices])


@option
class CountSketch(Linear, Reduces):
    """Fields and payload of the codecs that send a sketch."""

    traits: ClassVar[Traits] = Traits(linear=True, reduces=True)
    unsummed_bytes: ClassVar[int] = SEED_BYTES
    sketch_rows: Literal[1, 3, 5, 7, 9]
    sketch_ratio: Ratio
    recovered_fraction: Ratio

    @property
    def needs(self) -> dict[str, str]:
        # A server does not send the indices that were recovered, so a worker cannot know what is
        # left. A recovered vector may be longer than the encoded one, so neighbours do not agree.
        needs = super().needs | {"one_model": ""}
        if self.error_feedback or self.momentum is not None:
            needs["no_server"] = "error_feedback" if self.error_feedback else "momentum"
        return needs

    def table(self, d: int, seed: int = 0) -> Table:
        """Return the shape of the sketch of d elements."""
        cols = max(1, round(self.sketch_ratio * d / self.sketch_rows))
        if self.sketch_rows * cols < d:
            return Table(self.sketch_rows, cols, seed % SEEDS)
        return Table(0, d, seed % SEEDS)

    def k(self, d: int) -> int:
        """Return the number of elements to recover from a sketch."""
        return selected_count(self.recovered_fraction, d)

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + SEED_BYTES + 4 * self.table(d).cells

    def bound(self, ratio: float | None, d: int) -> float:
        """Return the worst case: all cells collide, and Σ|x_i| is the estimate of each |x_j|."""
        k = self.k(d)
        return 1.0 + k * d if self.table(d).rows else 1 - k / d

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        table = self.table(len(x), context.seed)
        seed = tensor_of_bytes(table.seed.to_bytes(SEED_BYTES, "little"))
        return Parts(table.cells, sketch(x, table), scales=seed)

    def unpack(self, parts: Parts, d: int) -> Elements:
        table, cells = self.read_sketch(parts, d)
        return recover_largest(cells, table, d, self.k(d))

    def read_sketch(self, parts: Parts, d: int) -> tuple[Table, Tensor]:
        """Return (table, cells) of a payload.   Raises: PayloadError if they do not match d."""
        seed = typed_part(parts.scales, torch.uint8, SEED_BYTES, "seed").numpy().tobytes()
        table = self.table(d, int.from_bytes(seed, "little"))
        if parts.count != table.cells or len(parts.indices):
            raise PayloadError(
                f"expected a sketch of {table.cells} cells; received one of {parts.count}"
            )
        return table, typed_part(parts.values, torch.float32, table.cells, "cells")

    def sum_payloads(
        self, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[Table, Tensor]:
        """Return (table, cells) of Σ weight · payload, a new tensor.

        Raises: PayloadError if the sketches have different hashes.
        """
        tables, sketches = zip(
            *(self.read_sketch(read_payload(payload, self.code, d), d) for payload in payloads),
            strict=True,
        )
        if len(set(tables)) > 1:
            raise PayloadError("received sketches of different seeds, which cannot be added")
        total = torch.zeros(tables[0].cells)
        for cells, weight in zip(sketches, weights, strict=True):
            total += cells * weight
        return tables[0], total

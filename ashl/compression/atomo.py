"""ATOMO: send random atoms of the gradient, scaled so that their sum is unbiased.

Rule: x = Σ λ_j a_j. Atom j is drawn with probability p_j, independently of all others, and λ_j/p_j
is sent. p_j = min(1, c·|λ_j|) with Σ p_j = s: of all such p the one with the least variance.
`entries`: the atoms are the elements. `singular`: the atoms of each matrix are its singular triples
σ_j·u_j·v_jᵀ. A parameter of more than two dimensions is the matrix of its first dimension by all
others; a parameter of one dimension is sent unchanged. s = max(1, ratio · number of atoms), for
each matrix separately. E‖C(x) − x‖² ≤ (atoms/s − 1)‖x‖².
Bits: those of the value and the index of an entry. A triple of an m × n matrix takes 32·(m + n):
each of its two vectors contains the root of the factor. If that is not less than 32 per element,
the elements themselves are sent.

An atom with p_j < 1 that is drawn has the factor ±1/c. If no atom is drawn, the draw is not
repeated. The part of s that an atom with p_j = 1 does not use goes to the others. Otherwise C would
be biased.

Limits: unbiased, so error feedback is not needed; it is not allowed, because C(x) may be much
longer than x. The size is random: declared are s + 7√s + 16 atoms. One message in 10^10 would
exceed that, and drops its last atoms. The singular value decomposition of each matrix of each
message is slow. Without the layers of a model, the vector is one nearly square matrix.

Source: Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS
2018, as stated in the paper; the authors' code draws differently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, isfinite, isqrt, prod, sqrt
from typing import ClassVar, Literal

import numpy as np

from ashl.compression.common.code import Code
from ashl.compression.common.deterministic_matmul import outer_sum
from ashl.compression.common.select import largest
from ashl.compression.common.sparsifier import Share
from ashl.compression.contract import Codec, EncodeContext, Layout, PayloadError, Traits
from ashl.compression.wire.bits import blocks
from ashl.compression.wire.index_code import (
    IndexCode,
    index_bytes,
    max_index_bytes,
    read_indices,
    write_indices,
)
from ashl.compression.wire.payload_format import EMPTY, HEADER, Parts, typed_part
from ashl.option import option

ENTRIES, SINGULAR, DENSE = 0, 1, 2  # forms of a payload
ELEMENTS = 2**32 - 1  # in place of a number of triples: all elements of the matrix follow

Shapes = tuple[tuple[int, int], ...]


@option
class Atomo(Code, Share):
    """Atomic sparsification."""

    code: ClassVar[int] = 32
    traits: ClassVar[Traits] = Traits(unbiased=True, variable=True)
    atoms: Literal["entries", "singular"]
    indices: IndexCode

    def for_layout(self, layout: Layout) -> Codec:
        """Return the codec for the matrices of a model."""
        if self.atoms == "entries" or not layout:
            return self
        shapes = (
            (layer.shape[0], prod(layer.shape[1:])) if layer.shape else (1, 1) for layer in layout
        )
        return Spectral(self, tuple(shapes))

    def pack(self, x: np.ndarray, context: EncodeContext) -> Parts:
        if self.atoms == "singular":
            return Spectral(self, (square(x.size),)).pack(x, context)
        indices, values = draw_components(x, self.kept(context.ratio, x.size), context.stream())
        k = indices.size
        if 4 * k + index_bytes(self.indices, k, x.size) >= 4 * x.size:
            dense = np.zeros(x.size, np.float32)
            dense[indices] = values
            return Parts(x.size, dense, form=DENSE)
        return Parts(
            k, values, write_indices(self.indices, indices, x.size) if k else EMPTY, form=ENTRIES
        )

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).unpack(parts, d)
        if parts.scales.size or parts.form not in (ENTRIES, DENSE):
            raise PayloadError(
                f"expected entries; received form {parts.form} with {parts.scales.size} bytes of"
                " scales"
            )
        values = typed_part(parts.values, "<f4", parts.count, "values")
        if parts.form == DENSE:
            if parts.count != d or parts.indices.size:
                raise PayloadError(f"a whole vector of {d} elements declares {parts.count} values")
            return values.copy()
        x = np.zeros(d, np.float32)
        if parts.count or parts.indices.size:
            x[read_indices(self.indices, parts.indices, parts.count, d)] = values
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).encoded_nbytes(ratio, d)
        k = most_components(self.kept(ratio, d), d)
        return HEADER.size + min(4 * d, 4 * k + max_index_bytes(self.indices, k, d))

    def bound(self, ratio: float | None, d: int) -> float:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).bound(ratio, d)
        return d / self.kept(ratio, d) - 1


@dataclass(frozen=True)
class Spectral(Code):
    """Singular triples of the matrices into which a vector is split, row by row.

    The last matrix may exceed the rest of the vector, which is then padded with zeros.
    """

    code: ClassVar[int] = Atomo.code
    traits: ClassVar[Traits] = Atomo.traits
    option: Atomo
    shapes: Shapes

    @property
    def ratio(self) -> float:
        return self.option.ratio

    def pack(self, x: np.ndarray, context: EncodeContext) -> Parts:
        rng, counts, pieces = context.stream(), [], []
        for start, (rows, columns) in self._matrices():
            matrix = np.zeros(rows * columns, np.float32)
            part = x[start : start + matrix.size]
            matrix[: part.size] = part
            triples = None
            if min(rows, columns) > 1:
                triples = decompose(
                    matrix.reshape(rows, columns), self._budget(rows, columns, context.ratio), rng
                )
            if triples is None:
                counts.append(ELEMENTS)
                pieces.append(part)
            elif triples.size >= part.size:
                counts.append(ELEMENTS)
                pieces.append(compose(triples, rows, columns).reshape(-1)[: part.size])
            else:
                counts.append(len(triples))
                pieces.append(triples.reshape(-1))
        return Parts(
            0, np.concatenate(pieces).astype("<f4"), scales=np.array(counts, "<u4"), form=SINGULAR
        )

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        counts = typed_part(parts.scales, "<u4", len(self.shapes), "numbers of triples").tolist()
        values = typed_part(parts.values, "<f4", parts.values.size // 4, "triples")
        if parts.form != SINGULAR or parts.count or parts.indices.size:
            raise PayloadError(
                f"expected singular triples; received form {parts.form} with {parts.count} values"
            )
        x = np.zeros(d, np.float32)
        at = 0
        for (start, (rows, columns)), count in zip(self._matrices(), counts, strict=True):
            out = x[start : start + rows * columns]
            size = out.size if count == ELEMENTS else count * (rows + columns)
            if (count != ELEMENTS and size > out.size) or at + size > values.size:
                raise PayloadError(
                    f"received {values.size - at} numbers, which do not hold {count} triples of a"
                    f" {rows} x {columns} matrix"
                )
            piece = values[at : at + size]
            whole = piece
            if count != ELEMENTS:
                whole = compose(piece.reshape(count, rows + columns), rows, columns)
            out[:] = whole.reshape(-1)[: out.size]
            at += size
        if at != values.size:
            raise PayloadError(f"expected {at} numbers of triples; received {values.size}")
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        total, remaining = HEADER.size + 4 * len(self.shapes), d
        for rows, columns in self.shapes:
            size = min(rows * columns, remaining)
            triples = size
            if min(rows, columns) > 1:
                budget = self._budget(rows, columns, ratio)
                triples = most_components(budget, min(rows, columns)) * (rows + columns)
            total += 4 * min(size, triples)
            remaining -= size
        return total

    def bound(self, ratio: float | None, d: int) -> float:
        matrices = [shape for shape in self.shapes if min(shape) > 1]
        return max(
            (min(shape) / self._budget(*shape, ratio) - 1 for shape in matrices), default=0.0
        )

    def _budget(self, rows: int, columns: int, ratio: float | None) -> float:
        """Return s, the expected number of triples."""
        return max(1.0, (self.ratio if ratio is None else ratio) * min(rows, columns))

    def _matrices(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the start and the shape of each matrix."""
        start = 0
        for rows, columns in self.shapes:
            yield start, (rows, columns)
            start += rows * columns


def draw_components(
    x: np.ndarray, budget: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw atoms with factors x and return (ascending indices, values λ/p float32)."""
    slope = find_slope(x, budget)
    if not isfinite(slope):
        indices = largest(x, min(x.size, int(budget)))
        indices = indices[x[indices] != 0]
        return indices, x[indices]
    found = []
    for where in blocks(x.size):
        share = np.abs(x[where]).astype(np.float64)
        share *= slope * 2.0**32
        words = rng.integers(0, 1 << 32, share.size, np.uint32)
        hits = np.flatnonzero(words < share)
        beyond = share[hits] - words[hits]  # below 1: a fraction of a word decides
        found.append(hits[beyond >= rng.random(hits.size)] + where.start)
    indices = np.concatenate(found)[: most_components(budget, x.size)]
    values = x[indices]
    heavy = np.abs(values) * np.float64(slope) >= 1
    return indices, np.where(heavy, values, np.copysign(1 / slope, values)).astype(np.float32)


def most_components(budget: float, count: int) -> int:
    """Return the largest number of atoms of a message.

    Without this limit, one message in 10^10 would have more; it drops the last ones.
    """
    return min(count, ceil(budget + 7 * sqrt(budget)) + 16)


def find_slope(x: np.ndarray, budget: float) -> float:
    """Return c of p_j = min(1, c·|x_j|) such that Σ p_j = budget.

    Infinity if at most ⌊budget⌋ elements are not 0, or if x is not finite.

    All elements with p = 1 are among the ⌊budget⌋ largest. If they are the m largest, c = (budget −
    m)/Σ of all others. m is the smallest number for which no other element gets more than 1.
    """
    most = min(x.size, int(budget))
    top = largest(x, most)
    heavy = np.sort(np.abs(x[top]).astype(np.float64))[::-1]
    light = x.copy()
    light[top] = 0
    rest = sum(float(np.abs(light[where]).sum(dtype=np.float64)) for where in blocks(x.size))
    if not isfinite(rest + heavy[0]):
        return inf
    rests = rest + np.append(np.cumsum(heavy[::-1])[::-1], 0.0)  # Σ of all but the m largest
    left = budget - np.arange(most + 1)
    m = int(np.argmax(np.append(heavy * left[:-1] <= rests[:-1], True)))
    return float(left[m] / rests[m]) if rests[m] > 0 else inf


def decompose(matrix: np.ndarray, budget: float, rng: np.random.Generator) -> np.ndarray:
    """Draw singular triples of a matrix [m, n] and return them as float32 [k, m + n].

    Each row has u and v, times √(λ/p). If the matrix is not finite, the result is one triple of
    NaN.
    """
    scale = np.abs(matrix).max()
    if scale == 0 or not isfinite(scale):
        return np.full((int(scale != 0), sum(matrix.shape)), np.nan, np.float32)
    u, sizes, v = np.linalg.svd(matrix / scale, full_matrices=False)
    indices, factors = draw_components(sizes, budget, rng)
    roots = np.sqrt(factors.astype(np.float64) * scale).astype(np.float32)
    return np.concatenate([u.T[indices], v[indices]], axis=1) * roots[:, None]


def compose(triples: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the sum of triples [rows, columns]; float64 avoids NaN from overflow of terms that
    cancel.
    """
    wide, total = triples.astype(np.float64), np.empty((rows, columns))
    outer_sum(wide[:, :rows], wide[:, rows:], total)
    return total.astype(np.float32)


def square(d: int) -> tuple[int, int]:
    """Return the shape of a nearly square matrix that d elements almost fill."""
    rows = isqrt(d)
    return rows, ceil(d / rows)

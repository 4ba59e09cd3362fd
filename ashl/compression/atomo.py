"""ATOMO: of the atoms that a gradient is made of, random ones are sent, enlarged so that the mean
is right.

Rule: x = Σ λ_j a_j; atom j is drawn with probability p_j, independently of all others, and λ_j/p_j
sent. Σ p_j = s, and p_j = min(1, c·|λ_j|): of all such p the one with the least variance.
`entries`: the atoms are the elements. `singular`: those of each matrix are its singular triples
σ_j·u_j·v_jᵀ, where a parameter of more dimensions is a matrix of its first against the others;
parameters of one are sent as they are. s = max(1, ratio · number of atoms), of each matrix by
itself. E‖C(x) − x‖² ≤ (atoms/s − 1)‖x‖². Bits of an entry: its value and place; of a triple of an m
× n matrix: those of m + n values, the root of the factor being in each. Where that would be no less
than 32 an element, these are sent.

A light atom that is drawn is sent as ±1/c. Nothing is drawn again where nothing was drawn, and what
a heavy atom does not use of s goes to the others: otherwise the mean would be wrong.

Limit: unbiased, so that no error feedback is needed, and none allowed: C(x) may be much longer than
x. The size is random; declared are s + 7√s + 16 atoms, which one message in 10^10 would exceed. A
singular value decomposition of each matrix and message is slow. Without a model's layers the vector
is taken as one matrix, about as wide as high.

Source: Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS
2018, as the paper states it.
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
    index_room,
    read_indices,
    write_indices,
)
from ashl.compression.wire.payload_format import EMPTY, HEADER, Parts, typed_part
from ashl.option import option

ENTRIES, SINGULAR, DENSE = 0, 1, 2  # forms of a body
ELEMENTS = 2**32 - 1  # in place of a number of triples: the matrix as it is

Shapes = tuple[tuple[int, int], ...]


@option
class Atomo(Code, Share):
    """Atomic sparsification."""

    code: ClassVar[int] = 32
    traits: ClassVar[Traits] = Traits(unbiased=True, variable=True)
    atoms: Literal["entries", "singular"]
    indices: IndexCode

    def for_layout(self, layout: Layout) -> Codec:
        """The codec for a model's matrices."""
        if self.atoms == "entries" or not layout:
            return self
        shapes = (
            (layer.shape[0], prod(layer.shape[1:])) if layer.shape else (1, 1) for layer in layout
        )
        return Spectral(self, tuple(shapes))

    def pack(self, x: np.ndarray, context: EncodeContext) -> Parts:
        if self.atoms == "singular":
            return Spectral(self, (square(x.size),)).pack(x, context)
        places, values = draw_components(x, self.kept(context.ratio, x.size), context.stream())
        k = places.size
        if 4 * k + index_bytes(self.indices, k, x.size) >= 4 * x.size:
            dense = np.zeros(x.size, np.float32)
            dense[places] = values
            return Parts(x.size, dense, form=DENSE)
        return Parts(
            k, values, write_indices(self.indices, places, x.size) if k else EMPTY, form=ENTRIES
        )

    def unpack(self, parts: Parts, d: int) -> np.ndarray:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).unpack(parts, d)
        if parts.scales.size or parts.form not in (ENTRIES, DENSE):
            raise PayloadError(
                f"what came are no entries: form {parts.form}, {parts.scales.size} bytes of scales"
            )
        values = typed_part(parts.values, "<f4", parts.count, "values")
        if parts.form == DENSE:
            if parts.count != d or parts.indices.size:
                raise PayloadError(
                    f"a whole vector of {d} elements says that it holds {parts.count}"
                )
            return values.copy()
        x = np.zeros(d, np.float32)
        if parts.count or parts.indices.size:
            x[read_indices(self.indices, parts.indices, parts.count, d)] = values
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).encoded_nbytes(ratio, d)
        k = most_components(self.kept(ratio, d), d)
        return HEADER.size + min(4 * d, 4 * k + index_room(self.indices, k, d))

    def bound(self, ratio: float | None, d: int) -> float:
        if self.atoms == "singular":
            return Spectral(self, (square(d),)).bound(ratio, d)
        return d / self.kept(ratio, d) - 1


@dataclass(frozen=True)
class Spectral(Code):
    """Singular triples of the matrices that a vector is cut into, row by row; the last may be
    longer than what is left of the vector, which is then filled up with zeros.
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
            if triples is None or triples.size >= part.size:
                sent = (
                    part
                    if triples is None
                    else compose(triples, rows, columns).reshape(-1)[: part.size]
                )
                counts.append(ELEMENTS)
                pieces.append(sent)
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
                f"what came are no singular triples: form {parts.form}, {parts.count} values"
            )
        x = np.zeros(d, np.float32)
        at = 0
        for (start, (rows, columns)), count in zip(self._matrices(), counts, strict=True):
            out = x[start : start + rows * columns]
            size = out.size if count == ELEMENTS else count * (rows + columns)
            if (count != ELEMENTS and size > out.size) or at + size > values.size:
                raise PayloadError(
                    f"{count} triples of a {rows} x {columns} matrix came in {values.size - at}"
                    " numbers"
                )
            piece = values[at : at + size]
            whole = (
                piece
                if count == ELEMENTS
                else compose(piece.reshape(count, rows + columns), rows, columns)
            )
            out[:] = whole.reshape(-1)[: out.size]
            at += size
        if at != values.size:
            raise PayloadError(f"{values.size} numbers came where those of the triples are {at}")
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        total, left = HEADER.size + 4 * len(self.shapes), d
        for rows, columns in self.shapes:
            budget, size = self._budget(rows, columns, ratio), min(rows * columns, left)
            triples = (
                most_components(budget, min(rows, columns)) * (rows + columns)
                if min(rows, columns) > 1
                else size
            )
            total, left = total + 4 * min(size, triples), left - size
        return total

    def bound(self, ratio: float | None, d: int) -> float:
        matrices = [shape for shape in self.shapes if min(shape) > 1]
        return max(
            (min(shape) / self._budget(*shape, ratio) - 1 for shape in matrices), default=0.0
        )

    def _budget(self, rows: int, columns: int, ratio: float | None) -> float:
        """s: how many triples are drawn on average."""
        return max(1.0, (self.ratio if ratio is None else ratio) * min(rows, columns))

    def _matrices(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Where each begins, and its shape."""
        start = 0
        for rows, columns in self.shapes:
            yield start, (rows, columns)
            start += rows * columns


def draw_components(
    x: np.ndarray, budget: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(places, values float32): the atoms of factors x that are drawn, and λ/p of each."""
    slope = probabilities(x, budget)
    if not isfinite(slope):
        places = largest(x, min(x.size, int(budget)))
        places = places[x[places] != 0]
        return places, x[places]
    found = []
    for where in blocks(x.size):
        share = np.abs(x[where]).astype(np.float64)
        share *= slope * 2.0**32
        words = rng.integers(0, 1 << 32, share.size, np.uint32)
        hits = np.flatnonzero(words < share)
        beyond = share[hits] - words[hits]  # below 1 where p ends within this word
        found.append(hits[beyond >= rng.random(hits.size)] + where.start)
    places = np.concatenate(found)[: most_components(budget, x.size)]
    heavy = np.abs(x[places]) * np.float64(slope) >= 1
    return places, np.where(heavy, x[places], np.copysign(1 / slope, x[places])).astype(np.float32)


def most_components(budget: float, count: int) -> int:
    """Atoms of a message, at most: one message in 10^10 would have more, and loses the
    last ones.
    """
    return min(count, ceil(budget + 7 * sqrt(budget)) + 16)


def probabilities(x: np.ndarray, budget: float) -> float:
    """c of p_j = min(1, c·|x_j|), so that Σ p_j = budget; infinite where no more than ⌊budget⌋ are
    not 0, and where x is not finite.

    What has p = 1 is among the ⌊budget⌋ largest. Where it is the m largest, c = (budget − m)/Σ of
    the others; m is the least number for which none of the others gets more than 1.
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
    """Drawn singular triples of a matrix [m, n], float32 [k, m + n]: u and v of each, times √(λ/p);
    of one that is not finite a triple that is not.
    """
    scale = np.abs(matrix).max()
    if scale == 0 or not isfinite(scale):
        return np.full((int(scale != 0), sum(matrix.shape)), np.nan, np.float32)
    u, sizes, v = np.linalg.svd(matrix / scale, full_matrices=False)
    places, factors = draw_components(sizes, budget, rng)
    roots = np.sqrt(factors.astype(np.float64) * scale).astype(np.float32)
    return np.concatenate([u.T[places], v[places]], axis=1) * roots[:, None]


def compose(triples: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Their sum [rows, columns]; in float64, where what is huge cancels instead of becoming NaN."""
    wide, total = triples.astype(np.float64), np.empty((rows, columns))
    outer_sum(wide[:, :rows], wide[:, rows:], total)
    return total.astype(np.float32)


def square(d: int) -> tuple[int, int]:
    """The shape of a matrix that d elements fill nearly, about as wide as high."""
    rows = isqrt(d)
    return rows, ceil(d / rows)

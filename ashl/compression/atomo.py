"""ATOMO: send random atoms of the gradient, scaled so that their sum is unbiased.

Use when: gradients of layers have low rank, and an unbiased codec is wanted.
Avoid when: encoding time counts: it needs singular values of every layer.
Alternatives: `power_sgd`, which is cheaper and needs error feedback.

Rule: x = Σ λ_j a_j. Atom j is drawn with probability p_j, independently of all others, and λ_j/p_j
is sent. p_j = min(1, c·|λ_j|) with Σ p_j = s: of all such p the one with the least variance.
`entries`: the atoms are the elements. `singular`: the atoms of each matrix are its singular triples
σ_j·u_j·v_jᵀ. A parameter of more than two dimensions is the matrix of its first dimension by all
others; a parameter of one dimension is sent unchanged. s = max(1, ratio · number of atoms), of the
whole vector and rounded for `entries`, of each matrix for `singular`. E‖C(x) − x‖² ≤ (atoms/s −
1)‖x‖².
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

from math import ceil, inf, isfinite, isqrt
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.coding import IndexCode
from ashl.compression.contract import (
    ByLayers,
    Elements,
    EncodeContext,
    Traits,
    WithDensity,
    slices,
)
from ashl.compression.kernels import blocks, largest_indices, outer_sum
from ashl.compression.payload import HEADER, Parts, PayloadError, typed_part
from ashl.compression.sparse import Coded, SparseFormat, max_nbytes, most_drawn
from ashl.option import option

SINGULAR = 1  # form of a payload of singular triples
ELEMENTS = 2**32 - 1  # in place of a number of triples: all elements of the matrix follow


@option
class Atomo(ByLayers, WithDensity):
    """Atomic sparsification."""

    code: ClassVar[int] = 32
    traits: ClassVar[Traits] = Traits(unbiased=True, variable=True)
    atoms: Literal["entries", "singular"]
    indices: IndexCode

    @property
    def format(self) -> SparseFormat:
        """The format of payloads with entries."""
        return SparseFormat("fp32", Coded(self.indices))

    def pack(self, x: Tensor, context: EncodeContext) -> Parts:
        d, rng = len(x), context.stream()
        if self.atoms == "entries":
            drawn = draw_components(x, self.num_selected(context.ratio, d), rng)
            return self.format.pack_elements(drawn, d, context)
        counts, pieces = [], []
        for start, rows, columns in self.matrices(d):
            # The last matrix may exceed the rest of the vector, which is padded with zeros.
            part = x[start : start + rows * columns]
            matrix = torch.zeros(rows * columns)
            matrix[: len(part)] = part
            triples = None
            if min(rows, columns) > 1:
                budget = self.budget(rows, columns, context.ratio)
                triples = decompose(matrix.view(rows, columns), budget, rng)
            if triples is None:
                counts.append(ELEMENTS)
                pieces.append(part)
            elif triples.numel() >= len(part):
                counts.append(ELEMENTS)
                pieces.append(compose(triples, rows, columns).view(-1)[: len(part)])
            else:
                counts.append(len(triples))
                pieces.append(triples.view(-1))
        scales = torch.tensor(counts).to(torch.int32)
        return Parts(0, torch.cat(pieces), scales=scales, form=SINGULAR)

    def unpack(self, parts: Parts, d: int) -> Tensor | Elements:
        if self.atoms == "entries":
            return self.format.unpack(parts, d, may_be_empty=True)
        matrices = self.matrices(d)
        counts = typed_part(parts.scales, torch.int32, len(matrices), "numbers of triples")
        values = typed_part(parts.values, torch.float32, len(parts.values) // 4, "triples")
        if parts.form != SINGULAR or parts.count or len(parts.indices):
            raise PayloadError(
                f"expected singular triples; received form {parts.form} with {parts.count} values"
            )
        x, at = torch.zeros(d), 0
        unsigned = (counts.long() & ELEMENTS).tolist()
        for (start, rows, columns), count in zip(matrices, unsigned, strict=True):
            out = x[start : start + rows * columns]
            size = len(out) if count == ELEMENTS else count * (rows + columns)
            if (count != ELEMENTS and size > len(out)) or at + size > len(values):
                raise PayloadError(
                    f"received {len(values) - at} numbers, which do not hold {count} triples of a"
                    f" {rows} x {columns} matrix"
                )
            whole = values[at : at + size]
            if count != ELEMENTS:
                whole = compose(whole.view(count, rows + columns), rows, columns).view(-1)
            out.copy_(whole[: len(out)])
            at += size
        if at != len(values):
            raise PayloadError(f"expected {at} numbers of triples; received {len(values)}")
        return x

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        if self.atoms == "entries":
            return max_nbytes("fp32", self.indices, most_drawn(self.num_selected(ratio, d), d), d)
        matrices = self.matrices(d)
        total = HEADER.size + 4 * len(matrices)
        for start, rows, columns in matrices:
            size = triples = min(rows * columns, d - start)
            if min(rows, columns) > 1:
                budget = self.budget(rows, columns, ratio)
                triples = most_drawn(budget, min(rows, columns)) * (rows + columns)
            total += 4 * min(size, triples)
        return total

    def bound(self, ratio: float | None, d: int) -> float:
        if self.atoms == "entries":
            return d / self.num_selected(ratio, d) - 1
        shapes = [shape for _, *shape in self.matrices(d) if min(shape) > 1]
        return max((min(shape) / self.budget(*shape, ratio) - 1 for shape in shapes), default=0.0)

    def budget(self, rows: int, columns: int, ratio: float | None) -> float:
        """Return s, the expected number of triples."""
        return max(1.0, (self.ratio if ratio is None else ratio) * min(rows, columns))

    def matrices(self, d: int) -> list[tuple[int, int, int]]:
        """Return (start, rows, columns) of each matrix; without layers, one is nearly square."""
        if not self.layout:
            rows = isqrt(d)
            return [(0, rows, ceil(d / rows))]
        layers = self.layers(d)
        parts = slices([layer.size for layer in layers])
        return [(part.start, *layer.matrix) for part, layer in zip(parts, layers, strict=True)]


def draw_components(x: Tensor, budget: float, rng: np.random.Generator) -> Elements:
    """Draw atoms with factors x and return their ascending indices and values λ/p, float32."""
    slope = find_slope(x, budget)
    if not isfinite(slope):
        indices = largest_indices(x, min(len(x), int(budget)))
        indices = indices[x[indices] != 0]
        return Elements(indices, x[indices])
    found = []
    for where in blocks(x):
        share = np.abs(x[where].numpy()).astype(np.float64)
        share *= slope * 2.0**32
        words = rng.integers(0, 1 << 32, share.size, np.uint32)
        hits = np.flatnonzero(words < share)
        beyond = share[hits] - words[hits]  # below 1: a fraction of a word decides
        found.append(hits[beyond >= rng.random(hits.size)] + where.start)
    indices = torch.from_numpy(np.concatenate(found)[: most_drawn(budget, len(x))])
    values = x[indices]
    heavy = values.abs().double() * slope >= 1
    light = torch.copysign(torch.tensor(1 / slope, dtype=torch.float64), values)
    return Elements(indices, torch.where(heavy, values.double(), light).float())


def find_slope(x: Tensor, budget: float) -> float:
    """Return c of p_j = min(1, c·|x_j|) such that Σ p_j = budget.

    Infinity if at most ⌊budget⌋ elements are not 0, or if x is not finite.

    All elements with p = 1 are among the ⌊budget⌋ largest. If they are the m largest, c = (budget −
    m)/Σ of all others. m is the smallest number for which no other element gets more than 1.
    """
    most = min(len(x), int(budget))
    top = largest_indices(x, most)
    heavy = np.sort(x[top].abs().double().numpy())[::-1]
    light = x.index_fill(0, top, 0.0)
    rest = sum(float(np.abs(light[where].numpy()).sum(dtype=np.float64)) for where in blocks(light))
    if not isfinite(rest + heavy[0]):
        return inf
    rests = rest + np.append(np.cumsum(heavy[::-1])[::-1], 0.0)  # Σ of all but the m largest
    left = budget - np.arange(most + 1)
    m = int(np.argmax(np.append(heavy * left[:-1] <= rests[:-1], True)))
    return float(left[m] / rests[m]) if rests[m] > 0 else inf


def decompose(matrix: Tensor, budget: float, rng: np.random.Generator) -> Tensor:
    """Draw singular triples of a matrix [m, n] and return them as float32 [k, m + n].

    Each row has u and v, times √(λ/p). If the matrix is not finite, the result is one triple of
    NaN.
    """
    scale = float(matrix.abs().max())
    if scale == 0 or not isfinite(scale):
        return torch.full((int(scale != 0), sum(matrix.shape)), torch.nan)
    factors = np.linalg.svd((matrix / scale).numpy(), full_matrices=False)
    u, sizes, v = (torch.from_numpy(factor) for factor in factors)
    indices, chosen = draw_components(sizes, budget, rng)
    roots = (chosen.double() * scale).sqrt().float()
    return torch.cat([u.T[indices], v[indices]], 1) * roots[:, None]


def compose(triples: Tensor, rows: int, columns: int) -> Tensor:
    """Return the sum of triples [rows, columns]; float64 avoids NaN from overflow of terms that
    cancel.
    """
    wide, total = triples.double(), torch.empty((rows, columns), dtype=torch.float64)
    outer_sum(wide[:, :rows], wide[:, rows:], total)
    return total.float()

"""PowerSGD: send each layer's matrix as a product of two thin ones, by one step of power iteration.

Use when: all-reduce over slow links: the factors of each layer are summed inside the collective.
Avoid when: layers are vectors, or the mode is asynchronous.
Alternatives: `topk`; `atomo`, unbiased.

Rule: M [m, n] is a layer as the matrix of its first dimension by all others, r = min(rank, m, n). Q
[n, r] is that of the previous message. P ← M·Q; P̂ ← P with orthonormal columns (Gram-Schmidt); Q ←
Mᵀ·P̂; C(M) = P̂·Qᵀ = P̂P̂ᵀM. That is a projection: ‖C(M) − M‖ ≤ ‖M‖. A layer of one dimension, or
with r·(m + n) ≥ m·n, is sent unchanged.
Bits: 32·r·(m + n) for a matrix that is sent as two.

On a link, each worker has its own Q, and the payload is P̂ and Q. Under an all-reduce, both
products are linear in M, so they are summed in flight: P ← Σ c_j·M_j·Q, then Q ← Σ c_j·M_jᵀ·P̂. All
workers have the same basis, and end with the projection of the sum after two sums of r·(m + n)
elements in all. With error feedback, a worker keeps e_j = M_j − P̂P̂ᵀM_j, computed from its own
part in the common basis.

Traps: a column of Q that is 0 (after a layer's gradient was 0) would stay 0 for ever, so it is
drawn again. Gram-Schmidt in float64 and the sum P̂·Qᵀ use a fixed order of operations, so that all
workers have the same bits.

Limits: a large rank is no compression.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019.
Differs: published code keeps e_j = M_j − P̂·Qᵀ. If Σ c_j = 1, Σ c_j·e_j and so all updates are the
same for both. But that e_j also accumulates the difference of a worker's data from the others',
without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import (
    ENCODE_CONTEXT,
    CodecInput,
    Collective,
    EncodeContext,
    Layout,
    Outcome,
    Team,
    Traits,
    Wrappable,
    as_float32,
    slices,
)
from ashl.compression.kernels import is_true, outer_sum, silence_warnings, to_device_of
from ashl.compression.payload import (
    HEADER,
    Parts,
    PayloadError,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.device import to_device, to_host
from ashl.option import Count, option
from ashl.size_only import SizeOnly

LOW_RANK = Traits(contraction=True)
# A column of which orthogonalization leaves less than this fraction depends on the others.
DEPENDENT = 1e-6


@option
class PowerSGD(Wrappable):
    """Low-rank approximation with a warm start; `LowRank` encodes the layers of a model."""

    decodes_alone: ClassVar[bool] = False
    traits: ClassVar[Traits] = LOW_RANK
    on_host: ClassVar[bool] = False
    rank: Count

    def for_layout(self, layout: Layout) -> LowRank:
        return LowRank(self.rank, tuple(layer.shape for layer in layout))


class Basis(NamedTuple):
    """The sender's state: every Q in one flat tensor, now and before the last message."""

    q: Tensor | None = None
    before: Tensor | None = None


class Matrix(NamedTuple):
    """A layer that is sent as two thin matrices."""

    part: slice
    m: int
    n: int
    r: int


@dataclass(frozen=True)
class LowRank(Collective):
    """PowerSGD for layers of these shapes."""

    code: ClassVar[int] = 80
    decodes_alone: ClassVar[bool] = False
    traits: ClassVar[Traits] = LOW_RANK
    on_host: ClassVar[bool] = False
    rank: int
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def _split(self) -> tuple[list[Matrix], list[slice]]:
        """The layers that are sent as two matrices, and the positions of all other layers."""
        matrices, others = [], []
        for shape, part in zip(
            self.shapes, slices([prod(shape) for shape in self.shapes]), strict=True
        ):
            m, n = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
            r = min(self.rank, m, n)
            if r * (m + n) < m * n:
                matrices.append(Matrix(part, m, n, r))
            else:
                others.append(part)
        return matrices, others

    @property
    def matrices(self) -> list[Matrix]:
        return self._split[0]

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of elements of all P, of all Q, and of the layers that are sent unchanged."""
        left = sum(a.m * a.r for a in self.matrices)
        right = sum(a.n * a.r for a in self.matrices)
        others = sum(part.stop - part.start for part in self._split[1])
        return left, right, others

    def encoded_nbytes(self, ratio: float | None, d: int) -> int:
        return HEADER.size + 4 * sum(self.counts)

    def bound(self, ratio: float | None, d: int) -> float:
        return 1.0 if self.matrices else 0.0

    def encode(
        self, sender: Basis | None, x: Tensor, context: EncodeContext = ENCODE_CONTEXT
    ) -> tuple[Basis, Tensor]:
        sender = sender or Basis()
        flat = as_float32(x)
        q = self.initial_factors(sender.q, flat, context.stream())
        left = self.orthonormal(self.left_factors(flat, q))
        right = self.right_factors(flat, left)
        values = torch.cat([left, right, self.unchanged_layers(flat)])
        return Basis(right, sender.q), write_payload(
            self.code, x.numel(), Parts(len(values), values)
        )

    def content(self, payload: Tensor, d: int) -> Tensor:
        parts = read_payload(payload, self.code, d)
        if (
            d != self.size
            or len(parts.indices)
            or len(parts.scales)
            or parts.count != sum(self.counts)
        ):
            raise PayloadError(
                f"expected layers of low rank; received {parts.count} values for {d} elements"
            )
        values = typed_part(parts.values, torch.float32, parts.count, "values")
        return self.compose(*values.split(self.counts))

    def restore_dropped(self, sender: Basis, payload: Tensor) -> Basis:
        return Basis(sender.before)

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def initial_factors(self, q: Tensor | None, x: Tensor, rng: np.random.Generator) -> Tensor:
        """Return every Q for a message: random at first, later that of the previous message.

        A column that is 0 is drawn again.
        """
        zeros = []  # for each Q, which of its columns are 0
        if q is not None:
            zeros = [(thin == 0).all(0) for _, thin in self._pair_factors(q, right=True)]
            if not zeros or not is_true(torch.cat(zeros).any()):
                return q
        drawn = to_device_of(x, torch.from_numpy(rng.standard_normal(self.counts[1], np.float32)))
        if q is None:
            return drawn
        pairs = zip(zeros, self._pair_factors(q, drawn, right=True), strict=True)
        return flatten_parts(
            [torch.where(columns, new, old) for columns, (_, old, new) in pairs], x
        )

    def left_factors(self, x: Tensor, q: Tensor) -> Tensor:
        """Return every P = M·Q."""
        return flatten_parts(
            [x[a.part].view(a.m, a.n) @ thin for a, thin in self._pair_factors(q, right=True)], x
        )

    def right_factors(self, x: Tensor, p: Tensor) -> Tensor:
        """Return every Q = Mᵀ·P̂."""
        return flatten_parts(
            [x[a.part].view(a.m, a.n).T @ thin for a, thin in self._pair_factors(p)], x
        )

    def orthonormal(self, p: Tensor) -> Tensor:
        """Return every P̂, computed on the host because the matrices are small."""
        on_host = to_host(p)
        thin = [orthonormalize(thin) for _, thin in self._pair_factors(on_host)]
        return to_device(flatten_parts(thin, on_host), str(p.device))

    def unchanged_layers(self, x: Tensor) -> Tensor:
        return flatten_parts([x[part] for part in self._split[1]], x)

    def compose(self, p: Tensor, q: Tensor, others: Tensor) -> Tensor:
        """Return the vector from every P̂·Qᵀ and from the layers that were sent unchanged."""
        x = torch.empty(self.size, device=str(p.device))
        for (a, left), (_, right) in zip(
            self._pair_factors(p), self._pair_factors(q, right=True), strict=True
        ):
            outer_sum(left.T.contiguous(), right.T.contiguous(), x[a.part].view(a.m, a.n))
        for part, values in zip(
            self._split[1], others.split([s.stop - s.start for s in self._split[1]]), strict=True
        ):
            x[part] = values
        return x

    def _pair_factors(self, *flat: Tensor, right: bool = False) -> list[tuple[Any, ...]]:
        """Return each matrix with its thin matrices, from flat tensors of all thin matrices."""
        rows = [a.n if right else a.m for a in self.matrices]
        sizes = [count * a.r for a, count in zip(self.matrices, rows, strict=True)]
        views = [
            [v.view(-1, a.r) for v, a in zip(f.split(sizes), self.matrices, strict=True)]
            for f in flat
        ]
        return list(zip(self.matrices, *views, strict=True))

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Sum both products over all workers."""
        summand = await team.compute(partial(self._first_summand, source), work=1)
        total = await team.all_reduce(summand, team.weight)
        left, right = await team.compute(partial(self._second_summand, source, total))
        common = await team.all_reduce(right, team.weight) if self.matrices else right
        return await team.compute(
            partial(self._finish, source, left, right, common, total[self.counts[0] :])
        )

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        left, right, others = self.counts
        await team.all_reduce(SizeOnly(4 * (left + others)))
        if right:
            await team.all_reduce(SizeOnly(4 * right))

    def _first_summand(self, source: CodecInput) -> Tensor:
        """Return the summands of the first sum: every P, and the layers that are sent unchanged."""
        before = source.inner.q if source.inner else None
        q = self.initial_factors(before, source.x, source.context.shared_stream())
        return torch.cat([self.left_factors(source.x, q), self.unchanged_layers(source.x)])

    def _second_summand(self, source: CodecInput, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the common basis, and the summands of the second sum: every Q."""
        left = self.orthonormal(total[: self.counts[0]])
        return left, self.right_factors(source.x, left)

    def _finish(
        self, source: CodecInput, left: Tensor, right: Tensor, common: Tensor, others: Tensor
    ) -> Outcome:
        """Return the outcome after both sums."""
        sent = self.compose(left, right, self.unchanged_layers(source.x))
        return Outcome(self.compose(left, common, others), sent, Basis(common))


def flatten_parts(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the tensors as one flat tensor; an empty one like `like` if there are none."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like[:0]


def orthonormalize(p: Tensor) -> Tensor:
    """Return the columns of p orthonormalized in order, float32 [m, r].

    Each column is orthogonalized twice, against rounding errors. A column that depends on earlier
    ones becomes 0. A column that is not finite stays so.
    """
    q = p.double().numpy().copy()
    with silence_warnings():
        for j in range(q.shape[1]):
            # Sums instead of matrix products have the same order of operations everywhere.
            before = np.sqrt((q[:, j] ** 2).sum())
            for _ in range(2 if j else 0):
                q[:, j] -= (q[:, :j] * (q[:, :j] * q[:, j : j + 1]).sum(0)).sum(1)
            length = np.sqrt((q[:, j] ** 2).sum())
            q[:, j] = 0 if length <= DEPENDENT * before else q[:, j] / length
    return torch.from_numpy(q).float()

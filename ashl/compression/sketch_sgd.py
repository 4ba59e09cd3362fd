"""Sketched SGD: a sum of sketches finds the large elements; a second sum has their exact values.

Use when: all-reduce must sum messages and still find the largest elements.
Avoid when: a server is used, or encoding time counts.
Alternatives: `gtopk`; `power_sgd`; `fetch_sgd` with a server.

Rule, under an all-reduce: p_j is the sum of worker j's update and residual; S ← Σ c_j·S(p_j) is
summed in flight. The P·k elements (`candidates` = P) with the largest estimates are the same on all
workers. y ← Σ c_j·p_j at these elements is summed, too. The k largest |y| are the update, exactly;
a worker's residual is p_j without its own values there. S and the estimates are those of
`count_sketch`.
Bits: 32 for each of the about `sketch_ratio`·d cells and, in the second sum, 32 for each of P·k
elements; no indices are sent.

At a parameter server, one exchange has no second round: the server sums the sketches of a merge and
takes the k largest estimates as values. Workers do not learn which elements were recovered, so they
keep no residual, and all other elements are lost. FetchSGD keeps them in the sketch.

Limits: with `sketch_ratio=1`, or P·k = d, it is top-k of the sum, exactly; with
`recovered_fraction=1` no compression. With a sketch that is small compared with k, some candidates
are noise. Their exact values separate them from large elements, so the residual shrinks in every
round anyway.

Source: Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ashl.compression.contract import (
    CodecInput,
    Collective,
    Elements,
    Outcome,
    State,
    Team,
    Traits,
    Wrappable,
    as_float32,
)
from ashl.compression.count_sketch import CountSketch, recover_largest, sketch
from ashl.compression.kernels import largest_indices
from ashl.option import Count, option
from ashl.size_only import SizeOnly


@option
class SketchSGD(CountSketch, Collective, Wrappable):
    """Finds the large elements of the sum, then sums their exact values."""

    code: ClassVar[int] = 82
    # `drains` holds for the collective with its two rounds.
    traits: ClassVar[Traits] = Traits(linear=True, reduces=True, drains=True)
    candidates: Count

    def second_sum_size(self, d: int) -> int:
        """Return the number of exact values in the second sum."""
        return min(d, self.candidates * self.k(d))

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Sum the sketches, then the exact values of the candidates."""
        cells = await team.compute(partial(self.sketch_input, source), work=1)
        total = await team.all_reduce(cells, team.weight)
        own = await team.compute(partial(self.select_candidates, source, total))
        exact = await team.all_reduce(own.values, team.weight)
        return await team.compute(partial(self.finish_sum, source, own.indices, exact))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        await team.all_reduce(SizeOnly(4 * self.table(d).cells))
        await team.all_reduce(SizeOnly(4 * self.second_sum_size(d)))

    def sketch_input(self, source: CodecInput) -> Tensor:
        """Return the summands of the first sum."""
        p = as_float32(source.x)
        return sketch(p, self.table(len(p), source.context.seed))

    def select_candidates(self, source: CodecInput, total: Tensor) -> Elements:
        """Return the candidates with this worker's values."""
        d = source.x.numel()
        table = self.table(d, source.context.seed)
        indices, _ = recover_largest(total, table, d, self.second_sum_size(d))
        return Elements(indices, source.x[indices])

    def finish_sum(self, source: CodecInput, indices: Tensor, exact: Tensor) -> Outcome:
        """Return the outcome: the largest of the candidates."""
        d, chosen = source.x.numel(), largest_indices(exact, self.k(source.x.numel()))
        sent = torch.zeros_like(source.x)
        sent[indices[chosen]] = source.x[indices[chosen]]
        return Outcome(Elements(indices[chosen], exact[chosen]).to_dense(d), sent)

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """Return the largest estimates of the sum of the sketches, at a server."""
        table, cells = self.sum_payloads(payloads, weights, d)
        return memory, recover_largest(cells, table, d, self.k(d)).to_dense(d)

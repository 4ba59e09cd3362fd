"""FetchSGD: workers send sketches of their updates; the sum keeps momentum and residual as
sketches.

Use when: workers keep no state, so momentum and residual must live at the server.
Avoid when: encoding time counts: more than a hundred copies of the vector.
Alternatives: `sketch_sgd`; `topk` with error feedback at the workers.

Rule: M ← ρ·M + Σ w_i·S(g_i), E ← E + M. The update Δ is the k largest elements of E by its
estimates; then E ← E without Δ. S and the estimates are those of `count_sketch`. To remove Δ,
`error=zero` sets every cell of E that an element of Δ uses to 0; `error=subtract` subtracts S(Δ)
from E, as in the text of the paper. `masking` also sets those cells of M to 0. Workers keep no
state, so they may join and leave. A parameter server keeps M and E; under an all-reduce the
sketches are summed in flight, and all workers keep the same M and E.
Bits up: 64, and 32 for each of the about `sketch_ratio`·d cells.

Traps: with `subtract`, the excess of an estimate stays in E with the opposite sign, and is
recovered later. If the sketch is small compared with k, this error feeds itself. The authors' code
zeroes the cells, because subtraction diverged for them. `zero` forgets the other elements in those
cells. M is the momentum of training, so the optimizer's own must be 0. E has the unit of the
updates: with gradients, a decaying learning rate also shrinks the content of E.

Limits: ρ = 0 with `sketch_ratio=1` and `error=subtract` is top-k with the residual at the sum; with
`recovered_fraction=1`, too, it is SGD.

Source: Rothchild et al., "FetchSGD: Communication-Efficient Federated Learning with Sketching",
ICML 2020.
Differs: in the paper E ← E + η·M, and w ← w − Δ. Here, as in the released code, the learning rate
multiplies Δ.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ashl.compression.contract import Keeps, State
from ashl.compression.count_sketch import CountSketch, cells_of, recover_largest
from ashl.option import Fraction, option


class Sketches(NamedTuple):
    """Memory of the merging node: the cells of M and E, and the seed of their hash."""

    momentum: Tensor
    error: Tensor
    seed: int


@option
class FetchSGD(CountSketch):
    """Momentum and residual in the sketch."""

    code: ClassVar[int] = 83
    decay: Fraction
    masking: bool
    error: Literal["zero", "subtract"]

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | ({"no_momentum": "decay"} if self.decay else {})

    def reduce(
        self, memory: Sketches | None, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[Sketches, Tensor]:
        table, momentum = self.sum_payloads(payloads, weights, d)
        error = torch.zeros_like(momentum)
        if memory is not None and memory.seed == table.seed:
            momentum += memory.momentum * self.decay
            error = memory.error.clone()
        error += momentum
        found = recover_largest(error, table, d, self.k(d))
        cells, signs = cells_of(table, found.indices)
        if self.error == "zero":
            error[cells] = 0.0
        else:
            error.index_add_(0, cells.view(-1), -(signs * found.values).view(-1))
        if self.masking:
            momentum[cells] = 0.0
        return Sketches(momentum, error, table.seed), found.to_dense(d)

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        """Convert M like an optimizer's momentum, and E like a residual."""
        if not isinstance(memory, Sketches):
            return None
        momentum, error, seed = memory
        return Sketches(momentum * (worth * keeps.momentum), error * (worth * keeps.residual), seed)

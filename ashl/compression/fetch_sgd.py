"""FetchSGD: workers send sketches of their updates; momentum and error feedback live in the sum, as
sketches too.

Rule: M ← ρ·M + Σ w_i·S(g_i), E ← E + M, Δ = the k largest elements that E holds by its estimates, E
← E without Δ, and Δ is the update; S and the estimates as in `count_sketch`. Workers have no memory
at all, so they may come and go.
Without Δ: `error=zero` sets every cell of E that an element of Δ has to 0, `error=subtract` takes
S(Δ) from E, as the paper's text has it. `masking` sets those cells of M to 0, too. At a parameter
server M and E are the server's; under an all-reduce the sketches are summed on their way, and
everybody has the same M and E. Bits up: 64, and 32 for each of the about `size`·d cells.

Traps: with `subtract` what an estimate was too large by stays in E with the other sign, is
recovered in turn, and feeds itself where the sketch is small against k; the authors' code zeroes
the cells, since subtraction diverged for them. `zero` forgets what else was in those cells. The
momentum is that of the optimizer already, so the optimizer's own must be 0. E is in units of what
is sent: with gradients, a learning rate that falls also shrinks what E still holds.

Limits: ρ = 0 with `sketch_ratio=1` and `error=subtract` is top-k with the residual where the sum
is; with `recovered_fraction=1` SGD.

Source: Rothchild et al., "FetchSGD: Communication-Efficient Federated Learning with Sketching",
ICML 2020.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.count_sketch import CountSketch, cells_of, dense, recover_largest
from ashl.compression.contract import Keeps, State
from ashl.option import Fraction, option


class Sketches(NamedTuple):
    """What is kept where the sum is: the cells of M and E, and the seed of their hash."""

    momentum: Tensor
    error: Tensor
    seed: int


@option
class FetchSGD(CountSketch):
    """Momentum and error in the sketch."""

    code: ClassVar[int] = 83
    decay: Fraction
    masking: bool
    error: Literal["zero", "subtract"]

    def reduce(
        self, memory: Sketches | None, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[Sketches, Tensor]:
        table, momentum = self.together(payloads, weights, d)
        error = np.zeros_like(momentum)
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            if memory is not None and memory.seed == table.seed:
                momentum += np.float32(self.decay) * memory.momentum.numpy()
                error = memory.error.numpy().copy()
            error += momentum
            places, values = recover_largest(error, table, d, self.k(d))
            cells, signs = cells_of(table, places)
            if self.error == "zero":
                error[cells] = 0
            else:
                np.subtract.at(error, cells, signs * values)
            if self.masking:
                momentum[cells] = 0
        return Sketches(torch.from_numpy(momentum), torch.from_numpy(error), table.seed), dense(
            places, values, d
        )

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        """Over the border of a stage M goes like an optimizer's momentum, and E like a residual."""
        if not isinstance(memory, Sketches):
            return None
        momentum, error, seed = memory
        return Sketches(momentum * (worth * keeps.momentum), error * (worth * keeps.residual), seed)

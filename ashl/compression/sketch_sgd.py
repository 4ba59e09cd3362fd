"""Sketched SGD: the sum of everybody's sketches says which elements are large, a second sum what
they are exactly.

Rule, under an all-reduce: p_j is worker j's update and residual; S ← Σ c_j·S(p_j), summed on its
way; the P·k elements (`candidates` = P) with the largest estimates are the same for all; y ← Σ
c_j·p_j there, summed too; the k largest |y| are the update, exact, and a worker's residual is p_j
without its own values there. S and the estimates as in `count_sketch`. Bits: 32 for each of the
about `sketch_ratio`·d cells and, in the second sum, for each of P·k elements; no places travel.

At a parameter server there is no second round in one exchange: it sums the sketches of a merge and
takes the k largest estimates for what they estimate. Workers do not learn which those were, so they
keep no residual; what is not recovered is lost. FetchSGD keeps it in the sketch.

Limits: with `sketch_ratio=1`, or P·k = d, it is top-k of the sum, exactly; with
`recovered_fraction=1` no compression. A sketch that is small against k sees noise among the
candidates, which their exact values tell from large elements: the residual shrinks in every round
all the same.

Source: Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.count_sketch import CountSketch, dense, recover_largest, sketch
from ashl.compression.common.select import largest
from ashl.compression.contract import CodecInput, Collective, Outcome, State, Team, Traits
from ashl.compression.wire.arrays import array_of
from ashl.compression.wrappers.options import Wrappers
from ashl.option import Count, option


@option
class SketchSGD(CountSketch, Collective, Wrappers):
    """Finds what is large in the sum, then asks for it."""

    code: ClassVar[int] = 82
    traits: ClassVar[Traits] = Traits(
        linear=True, reduces=True, drains=True
    )  # drains: in its two rounds
    candidates: Count

    def asked(self, d: int) -> int:
        """How many exact values the second round is about."""
        return min(d, self.candidates * self.k(d))

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Both sums."""
        cells = await team.compute(partial(self.cells, source), work=1)
        total = await team.all_reduce(cells, team.weight)
        places, mine = await team.compute(partial(self.wanted, source, total))
        exact = await team.all_reduce(mine, team.weight)
        return await team.compute(partial(self.finish_sum, source, places, exact))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        await team.all_reduce(team.blank(4 * self.table(d).cells))
        await team.all_reduce(team.blank(4 * self.asked(d)))

    def cells(self, source: CodecInput) -> Tensor:
        """What is summed first."""
        p = array_of(source.x)
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            return torch.from_numpy(sketch(p, self.table(p.size, source.context.seed)))

    def wanted(self, source: CodecInput, total: Tensor) -> tuple[np.ndarray, Tensor]:
        """(the candidates' places, this worker's values there)."""
        d = source.x.numel()
        with np.errstate(over="ignore", invalid="ignore"):
            places, _ = recover_largest(
                total.numpy(), self.table(d, source.context.seed), d, self.asked(d)
            )
        return places, source.x[places]

    def finish_sum(self, source: CodecInput, places: np.ndarray, exact: Tensor) -> Outcome:
        """Of the candidates those that are largest."""
        d = source.x.numel()
        chosen = largest(exact.numpy(), self.k(d))
        sent = torch.zeros_like(source.x)
        sent[places[chosen]] = source.x[places[chosen]]
        return Outcome(dense(places[chosen], exact.numpy()[chosen], d), sent)

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """At a server: what the sum of the sketches says."""
        table, cells = self.together(payloads, weights, d)
        return memory, dense(*recover_largest(cells, table, d, self.k(d)), d)

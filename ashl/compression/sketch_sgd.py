"""Sketched SGD: the sum of everybody's sketches says which elements are large, a second sum what they are exactly.

Rule, under an all-reduce: p_j is worker j's update and residual; S ← Σ c_j·S(p_j), summed on its way; the P·k elements
(`candidates` = P) with the largest estimates are the same for all; y ← Σ c_j·p_j there, summed too; the k largest |y|
are the update, exact, and a worker's residual is p_j without its own values there. S and the estimates as in
`count_sketch`. Bits: 32 for each of the about `size`·d cells and, in the second sum, for each of P·k elements;
no places travel.

At a parameter server there is no second round in one exchange: it sums the sketches of a merge and takes the k largest
estimates for what they estimate. Workers do not learn which those were, so they keep no residual; what is not
recovered is lost. FetchSGD keeps it in the sketch.

Limits: with `size=1`, or P·k = d, it is top-k of the sum, exactly; with all of it `kept` no compression. A sketch that
is small against k sees noise among the candidates, which their exact values tell from large elements: the residual
shrinks in every round all the same.

Source: Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ashl.compression.around.stand_in import CodecInput, after, before
from ashl.compression.around.wrappers import Wrappers
from ashl.compression.base.code import array_of
from ashl.compression.base.count_sketch import CountSketch, dense, recovered, sketched
from ashl.compression.base.select import largest
from ashl.compression.contract import Flags, Turn
from ashl.option import Count, option
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage
from ashl.topology.exchange import Riders, summed


@option
class SketchSGD(CountSketch, Wrappers):
    """Finds what is large in the sum, then asks for it."""

    code: ClassVar[int] = 82
    flags: ClassVar[Flags] = Flags(linear=True, reduces=True, drains=True)  # drains: in its two rounds
    candidates: Count

    def asked(self, d: int) -> int:
        """How many exact values the second round is about."""
        return min(d, self.candidates * self.k(d))

    async def collective(
        self, node: Node, stage: Stage, state: Any, x: Any, turn: Turn, weight: float, riders: Riders
    ) -> tuple[Any, float, int]:
        """Both sums; see `topology.exchange`."""
        d = stage.trainer.num_params
        if isinstance(x, SizeOnly):
            _, loss, word = await summed(node, stage, SizeOnly(4 * self.table(d).cells), 1.0, riders)
            await node.all_reduce(SizeOnly(4 * self.asked(d)), stage.workers)
            return x, loss, word
        given = before(stage.codec, state.sender, x, turn)
        cells = await node.compute(partial(self.cells, given), work=1, kind="compress")
        total, loss, word = await summed(node, stage, cells, weight, riders)
        places, mine = await node.compute(partial(self.wanted, given, total), work=0, kind="compress")
        exact = await node.all_reduce(mine * weight, stage.workers)
        end = partial(self.ended, stage, state.sender, (x, turn), given, places, exact)
        state.sender, update = await node.compute(end, work=0, kind="compress")
        return update, loss, word

    def cells(self, given: CodecInput) -> Tensor:
        """What is summed first."""
        p = array_of(given.x)
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            return torch.from_numpy(sketched(p, self.table(p.size, given.turn.seed)))

    def wanted(self, given: CodecInput, total: Tensor) -> tuple[np.ndarray, Tensor]:
        """(the candidates' places, this worker's values there)."""
        d = given.x.numel()
        with np.errstate(over="ignore", invalid="ignore"):
            places, _ = recovered(total.numpy(), self.table(d, given.turn.seed), d, self.asked(d))
        return places, given.x[places]

    def ended(
        self,
        stage: Stage,
        sender: Any,
        sent_for: tuple[Tensor, Turn],
        given: CodecInput,
        places: np.ndarray,
        exact: Tensor,
    ) -> tuple[Any, Tensor]:
        """(the sender's state, the update)."""
        d = given.x.numel()
        chosen = largest(exact.numpy(), self.k(d))
        sent = torch.zeros_like(given.x)
        sent[places[chosen]] = given.x[places[chosen]]
        return after(stage.codec, sender, *sent_for, sent), dense(places[chosen], exact.numpy()[chosen], d)

    def reduce(self, memory: Any, bodies: Sequence[Any], weights: Sequence[float], d: int) -> tuple[Any, Any]:
        """At a server: what the sum of the sketches says."""
        if isinstance(bodies[0], SizeOnly):
            return memory, SizeOnly(4 * d)
        table, cells = self.together(bodies, weights, d)
        return memory, dense(*recovered(cells, table, d, self.k(d)), d)

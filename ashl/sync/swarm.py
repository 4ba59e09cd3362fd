"""SwarmSGD: after H local steps a worker averages with any one neighbour, whatever that one is doing.

Rule: i takes H local steps, draws a neighbour j, and both take the mean of their models as they were before the local
steps that are under way, to which those are added when they are done. With `overlap` i itself goes on meanwhile (the
paper's non-blocking form); otherwise it waits for the answer.

Of workers that are lost and that come back: `ashl.topology.partners`.

Limits: H = 1 on a graph of two roles is AD-PSGD but for who asks. Departs from the paper in that a worker asks after
every H steps of its own, so that a fast one meets more often, instead of pairs being drawn from outside.
Source: Nadiradze et al., "Asynchronous Decentralized SGD with Quantized and Local Updates", NeurIPS 2021, arXiv
1910.12308.
"""

from __future__ import annotations

from typing import Literal

from ashl.option import Count, option
from ashl.stage.stage import Stage
from ashl.topology.gossip import graph_of
from ashl.topology.pairs import PairRule


@option
class Swarm(PairRule):
    """Asynchronous averaging in pairs of any neighbours."""

    local_steps: Count | Literal["plan"]
    overlap: bool

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom this worker may ask: any neighbour."""
        return graph_of(stage).neighbours(stage, rank)

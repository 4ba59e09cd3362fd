"""SwarmSGD: after H local steps a worker averages with any one neighbour, whatever that one is doing.

Rule: i takes H local steps, draws a neighbour j, and both take the mean of their models as they were before the local
steps that are under way, to which those are added when they are done. With `overlap` i itself goes on meanwhile (the
paper's non-blocking form); otherwise it waits for the answer.

Limits: H = 1 on a graph of two roles is AD-PSGD but for who asks. Departs from the paper in that a worker asks after
every H steps of its own, so that a fast one meets more often, instead of pairs being drawn from outside.
Source: Nadiradze et al., "Asynchronous Decentralized SGD with Quantized and Local Updates", NeurIPS 2021, arXiv
1910.12308.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ashl.option import Count, option
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.topology import pairs
from ashl.topology.graph import sources_of


@option
class Swarm:
    """Asynchronous averaging in pairs of any neighbours."""

    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("gossip",)
    resumable: ClassVar[bool] = False  # no checkpoint holds it
    coordinated: ClassVar[bool] = True
    local_steps: Count | Literal["plan"]
    overlap: bool

    def worker(self, node: Node, stage: Stage, state: Any) -> Any:
        return pairs.worker(node, stage, state)

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom this worker may ask: any neighbour."""
        return sources_of(stage.topology.edges(stage), stage.num_workers)[rank]

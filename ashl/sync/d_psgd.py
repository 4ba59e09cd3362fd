"""D-PSGD: every worker mixes its model with its neighbours' and takes its own step, round by round.

Rule: `awc` (adapt while communicating) x_i ← Σ_j w_ij·x_j + Δ_i, where models travel while Δ_i is computed at the model
before mixing; `atc` (adapt, then communicate) x_i ← Σ_j w_ij·(x_j + Δ_j). W is doubly stochastic, so both move the mean
of all models by the mean of the Δ. With H local steps between two rounds it is local SGD on a graph.

Limits: the complete graph with uniform weights and `atc` is BSP (SGD, momentum), to rounding; W = I is no exchange.
Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ashl.option import Count, option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.topology.gossip import RoundState, mixed


@option
class DPSGD:
    """Mixing in rounds on a graph."""

    exchange: ClassVar[str] = "difference"
    topologies: ClassVar[tuple[str, ...]] = ("gossip",)
    columns: ClassVar[bool] = False
    lag: ClassVar[int] = 0
    local_steps: Count | Literal["plan"]
    order: Literal["awc", "atc"]

    @property
    def early(self) -> bool:
        return self.order == "awc"

    def begin(self, stage: Stage, state: RoundState, rank: int) -> None:
        """The rule has no state of its own."""

    def sources(self, stage: Stage, rank: int, k: int) -> tuple[int, ...]:
        return tuple(j for j in stage.topology.round(stage, k).rows[rank] if j != rank)

    async def tell(
        self, node: Node, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> dict[int, tuple[Any, tuple[float, ...]]]:
        if delta is not None:
            state.params = state.params + delta
        return {rank: (state.params, ()) for rank in stage.topology.round(stage, k).targets[node.rank]}

    def merge(
        self, stage: Stage, state: RoundState, rank: int, k: int, delta: Any, heard: Mapping[int, Message]
    ) -> None:
        state.params = mixed(stage.topology.round(stage, k).rows[rank], rank, state.params, heard)
        if self.early:
            state.params = state.params + delta

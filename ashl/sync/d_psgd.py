"""D-PSGD: in each round every worker averages its model with its neighbours' models and takes its
own steps.

Use when: workers are equally fast and exchanges are noticeable: neighbours average while a step is
computed.
Avoid when: one worker is slow: its neighbours wait, and theirs.
Alternatives: `ad_psgd` without rounds; `bsp` with `topology=all_reduce` for exactness.

Rule: with `awc` (adapt while communicating) x_i ← Σ_j w_ij·x_j + Δ_i. Models travel while Δ_i is
computed, at the model before mixing. With `atc` (adapt, then communicate) x_i ← Σ_j w_ij·(x_j +
Δ_j). The mixing matrix W is doubly stochastic, so both move the mean of all models by the mean of
the Δ_i. H > 1 local steps between two rounds give local SGD on a graph.
Waiting: in each round a worker waits for the models of its neighbours of that round.

Limits: the complete graph with `atc` is BSP (SGD, momentum), up to rounding. W = I is no exchange.
Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017, arXiv 1705.09056.

Family: gossip.
Status: situational.
"""

from typing import Any, Literal

from ashl.option import Count, option
from ashl.size_only import Vector
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, mix_models


@option
class DPSGD(RoundRule):
    """Gossip averaging in synchronous rounds."""

    local_steps: Count | Literal["plan"]
    order: Literal["awc", "atc"]

    @property
    def early(self) -> bool:
        """Return True if models leave before the local steps."""
        return self.order == "awc"

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        if delta is not None:
            state.params = state.params + delta
        return {rank: (state.params, ()) for rank in now.targets}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        state.params = mix_models(now.row, now.rank, state.params, received)
        if self.early:
            state.params = state.params + delta

"""SGP: push-sum gossip, for directed graphs; with `overlap`, messages may be some rounds late.

Rule: with numerator x_i and weight w_i (1 at first) the model is z_i = x_i/w_i, on which Δ_i is
computed. x_i ← x_i + Δ_i, then both are pushed: x_i ← Σ_j p_ij·x_j, w_i ← Σ_j p_ij·w_j, with p_ij =
1/(1 + out-degree of j), so that columns add up to 1: Σ x and Σ w over all workers and what is in
flight never change but by the Δ. With overlap τ a round takes in the messages of τ rounds before;
what is late is late in x and w alike, so z stays unbiased.

Limits: τ = 0 on the one-peer exponential graph is D-PSGD (`atc`), bit for bit, as all w stay 1.
Departs from the paper's code in that a message counts after exactly τ rounds instead of up to τ, so
that a run is repeatable.
Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv
1811.10792.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from ashl.option import Count, Natural, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import SizeOnly, Vector
from ashl.stage.stage import Stage
from ashl.topology.gossip import Outgoing, RoundRule, RoundState, graph_of
from ashl.topology.mixing import numbers_of


class Mass(NamedTuple):
    """What a worker holds of the sum of all models."""

    x: Any
    w: float


@option
class SGP(RoundRule):
    """Push-sum in rounds."""

    columns: ClassVar[bool] = True
    local_steps: Count | Literal["plan"]
    overlap: Natural

    @property
    def lag(self) -> int:
        return self.overlap

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Mass:
        return Mass(state.params, 1.0)

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        now, rank = graph_of(stage).round(stage, k), ctx.rank
        x, w = state.rule_state.x + delta, state.rule_state.w
        shares = {j: now.rows[j][rank] for j in (rank, *now.targets[rank])}
        bodies = {
            share: x * share for share in set(shares.values())
        }  # most often they are all equal
        state.rule_state = Mass(bodies[shares[rank]], w * shares[rank])
        return {j: (bodies[shares[j]], (w * shares[j],)) for j in now.targets[rank]}

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        self.settle(state, heard)

    def settle(self, state: RoundState, heard: Mapping[int, Message]) -> None:
        """Add what has come, also what is still under way at the end of a stage."""
        x, w = state.rule_state
        for message in heard.values():
            x, w = x + message.body, w + numbers_of(message)[0]
        state.rule_state = Mass(x, w)
        state.params = x if isinstance(x, SizeOnly) or w == 1.0 else x / w

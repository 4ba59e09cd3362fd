"""SGP: push-sum gossip on directed graphs; with `overlap` a round uses messages of earlier rounds.

Use when: gossip over directed or time-varying graphs, with messages that need not be answered.
Avoid when: the graph is undirected and links are equally good in both directions.
Alternatives: `d_psgd`; `ad_psgd`.

Rule: worker i holds a numerator x_i and a weight w_i, at first 1. Its model is z_i = x_i/w_i, on
which it computes Δ_i. In each round x_i ← x_i + Δ_i, then x_i ← Σ_j p_ij·x_j and w_i ← Σ_j
p_ij·w_j, with p_ij = 1/(1 + out-degree of j). The columns of p add up to 1. So Σ x and Σ w over all
workers and all messages in flight change by the Δ_i alone. With overlap τ a round adds the messages
of τ rounds before. A delayed message delays x and w equally, so z remains unbiased.
Waiting: in each round a worker waits for the messages that its in-neighbours sent τ rounds before.

Limits: τ = 0 on the one-peer exponential graph is D-PSGD (`atc`), bit for bit, because all w_i
remain 1.
Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv
1811.10792.
Differs: in the paper's code a message counts after at most τ rounds. Here it counts after exactly τ
rounds, so runs are repeatable.

Family: gossip.
Status: situational.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from ashl.option import Count, Natural, option
from ashl.runtime.effects import Message
from ashl.size_only import SizeOnly, Vector
from ashl.stage.contract import StageConfig
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, numbers_of


class Mass(NamedTuple):
    """The pair that push-sum adds up; the model of a worker is x/w."""

    x: Any  # x_i
    w: float  # w_i


@option
class SGP(RoundRule):
    """Push-sum in synchronous rounds."""

    columns: ClassVar[bool] = True
    local_steps: Count | Literal["plan"]
    overlap: Natural

    @property
    def lag(self) -> int:
        return self.overlap

    def begin(self, stage: StageConfig, state: RoundState, rank: int) -> Mass:
        return Mass(state.params, 1.0)

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        rank, rows = now.rank, now.graph.round(now.k).rows
        x, w = state.rule_state.x + delta, state.rule_state.w
        shares = {j: rows[j][rank] for j in (rank, *now.targets)}
        # most often all shares are equal, and one product serves all targets
        payloads = {share: x * share for share in set(shares.values())}
        state.rule_state = Mass(payloads[shares[rank]], w * shares[rank])
        return {j: (payloads[shares[j]], (w * shares[j],)) for j in now.targets}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        self.merge_in_flight(state, received)

    def merge_in_flight(self, state: RoundState, received: Mapping[int, Message]) -> None:
        """Add messages to the worker's part: those of a round, or those in flight at the end of a
        stage.
        """
        x, w = state.rule_state
        for message in received.values():
            x, w = x + message.payload, w + numbers_of(message)[0]
        state.rule_state = Mass(x, w)
        state.params = x if isinstance(x, SizeOnly) or w == 1.0 else x / w

"""CHOCO: gossip with compressed messages; everybody keeps a replica of each neighbour's model,
brought up to date by compressed differences.

Rule: x_i ← x_i + Δ_i; send q_i = C(x_i − y_i) to all neighbours, with y_i the replica of x_i that
they and i have; all of them y_i ← y_i + q_i; then x_i ← x_i + γ·Σ_j w_ij·(y_j − y_i). What C left
out is still in x_i − y_i the next time, so C goes without error feedback. Of the neighbours'
replicas only their weighted sum is kept: the graph must not change. Replicas start from the first
model, which all know; in a later stage from the models themselves, which are what its first round
sends. The mean of all models moves by the Δ alone, whatever C and γ.

Limit: compression=none and γ = 1 is D-PSGD (`atc`), to rounding. γ has to be small where C leaves
out much, or the models fly apart.
Source: Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms
with Compressed Communication", ICML 2019, arXiv 1902.00340.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from ashl.errors import UsageError
from ashl.option import Count, Positive, option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.size_only import Vector
from ashl.stage.stage import CODEC, Stage
from ashl.topology.gossip import Outgoing, RoundRule, RoundState, graph_of
from ashl.topology.graph import Round
from ashl.topology.local_work import context_of, report_health
from ashl.topology.mixing import mix


class Replicas(NamedTuple):
    """y_i, Σ_j w_ij·y_j, and the q_i that was sent last; None = not made yet."""

    own: Any
    mixed: Any
    sent: Any = None


@option
class Choco(RoundRule):
    """Compressed gossip in rounds."""

    supports: ClassVar[frozenset[str]] = frozenset({CODEC})  # what is sent are differences
    local_steps: Count | Literal["plan"]
    gamma: Positive

    @property
    def suspect(self) -> str:
        """What else may be wrong where a run diverges."""
        return (
            f", perhaps because sync.gamma={self.gamma:g} is too large for this compression; take a"
            " smaller one"
        )

    def check(self, rounds: Sequence[Round]) -> None:
        if len(rounds) > 1:
            raise UsageError(
                "sync=choco keeps the sum of its neighbours' replicas, so that its graph must not"
                " change from round to round; take topology.graph=exponential, say"
            )

    def begin(self, stage: Stage, state: RoundState, rank: int) -> Replicas:
        first = stage.trainer.init()[0] if stage.index == 0 else None
        return Replicas(first, first)

    async def outgoing(
        self, ctx: RankContext, stage: Stage, state: RoundState, k: int, delta: Any
    ) -> Outgoing:
        state.params = state.params + delta
        link, (own, others, _) = stage.link, state.rule_state
        targets = graph_of(stage).round(stage, k).targets[ctx.rank]
        if own is None:
            state.rule_state = Replicas(state.params, None, state.params)
            return dict.fromkeys(targets, (state.params, ()))
        ahead = state.params - own
        encode = partial(link.difference, ahead, context_of(stage, ctx.rank, state, state.round))
        if link.innermost.traits.lossless:
            body = encode()
        else:
            body = await ctx.compute(encode, work=1, kind="compress")
            report_health(ctx, stage, state, ahead, [(link, state.ends, body)])
        state.rule_state = Replicas(link.add_bodies(own, [(body, 1.0)]), others, body)
        return dict.fromkeys(targets, (body, ()))

    def merge(
        self,
        stage: Stage,
        state: RoundState,
        rank: int,
        k: int,
        delta: Vector,
        heard: Mapping[int, Message],
    ) -> None:
        own, before, sent = state.rule_state
        row = graph_of(stage).round(stage, k).rows[rank]
        if before is None:
            after = mix(row, rank, own, heard)
        else:
            bodies = [(sent if j == rank else heard[j].body, weight) for j, weight in row.items()]
            after = stage.link.add_bodies(before, bodies)
        state.rule_state = Replicas(own, after, sent)
        state.params = state.params + (after - own) * self.gamma

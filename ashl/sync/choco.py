"""CHOCO: gossip with compressed messages, by which each worker updates replicas of its neighbours'
models.

Use when: gossip over slow links: neighbours exchange compressed differences.
Avoid when: links are fast: the estimates of neighbours cost memory and slow the consensus.
Alternatives: `d_psgd` uncompressed; `swarm` with `sync.bits`.

Rule: in each round x_i ← x_i + Δ_i. Worker i sends q_i = C(x_i − y_i) to all neighbours, where y_i
is the replica of x_i that worker i and all of its neighbours hold. All of them set y_i ← y_i + q_i.
Then x_i ← x_i + γ·Σ_j w_ij·(y_j − y_i). The part that C leaves out remains in x_i − y_i for the
next round, so C runs without error feedback.
State: each worker holds y_i and only the weighted sum Σ_j w_ij·y_j of its neighbours' replicas, so
the graph must not change. Replicas start from the initial model. In a later stage the first round
sends the models, and replicas start from these.
Waiting: in each round a worker waits for the messages of its neighbours.

Limits: compression=none with γ = 1 is D-PSGD (`atc`), up to rounding. The mean of all models
changes by the mean of the Δ_i alone, for every C and γ. The more C leaves out, the smaller γ has to
be; otherwise the models diverge.
Source: Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms
with Compressed Communication", ICML 2019, arXiv 1902.00340.
Differs: in the paper the replicas start from zero.

Family: gossip.
Status: situational.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from ashl.errors import UsageError
from ashl.option import Count, Positive, option
from ashl.size_only import Vector
from ashl.stage.contract import CODEC, FAULT_TOLERANT, StageConfig
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, mix_models
from ashl.topology.graph import Round
from ashl.topology.local_work import context_of, report_health


class Replicas(NamedTuple):
    """Replicas of a worker; None until the first round of a later stage."""

    own: Any  # y_i
    mixed: Any  # Σ_j w_ij·y_j
    sent: Any = None  # the latest q_i


@option
class Choco(RoundRule):
    """Compressed gossip in synchronous rounds."""

    # messages are differences
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, FAULT_TOLERANT})
    local_steps: Count | Literal["plan"]
    gamma: Positive

    @property
    def suspect(self) -> str:
        """Return a further possible cause, for the error message of a run that diverges."""
        return (
            f", perhaps because sync.gamma={self.gamma:g} is too large for this compression; take a"
            " smaller one"
        )

    def check(self, rounds: Sequence[Round]) -> None:
        if len(rounds) > 1:
            raise UsageError(
                "sync=choco: keeps the sum of its neighbours' replicas, so its graph must not"
                " change from round to round; take for example topology.graph=exponential"
            )

    def begin(self, stage: StageConfig, state: RoundState, rank: int) -> Replicas:
        first = stage.trainer.init()[0] if state.version == 0 else None
        return Replicas(first, first)

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        state.params = state.params + delta
        stage, targets = now.stage, now.targets
        pipeline, (own, others, _) = stage.pipeline, state.rule_state
        if own is None:
            state.rule_state = Replicas(state.params, None, state.params)
            return dict.fromkeys(targets, (state.params, ()))
        ahead = state.params - own
        encode = partial(
            pipeline.encode_difference, ahead, context_of(stage, now.rank, state, state.round)
        )
        if pipeline.inner_codec.traits.lossless:
            payload = encode()
        else:
            payload = await now.ctx.compute(encode, work=1, kind="compress")
            report_health(now.ctx, stage, state, ahead, [(pipeline, state.codec_state, payload)])
        state.rule_state = Replicas(pipeline.add_payloads(own, [(payload, 1.0)]), others, payload)
        return dict.fromkeys(targets, (payload, ()))

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        own, before, sent = state.rule_state
        if before is None:
            after = mix_models(now.row, now.rank, own, received)
        else:
            payloads = [
                (sent if j == now.rank else received[j].payload, weight)
                for j, weight in now.row.items()
            ]
            after = now.stage.pipeline.add_payloads(before, payloads)
        state.rule_state = Replicas(own, after, sent)
        state.params = state.params + (after - own) * self.gamma

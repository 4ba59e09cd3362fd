"""Ripples with random groups: a worker that asks averages with k − 1 others, drawn uniformly.

Use when: a baseline of random groups is needed.
Avoid when: throughput matters: random groups conflict often.
Alternatives: `ripples_smart`; `ripples_first_come`.

Rule: after H local steps x_i ← (1/k)·Σ_j x_j over a group of k workers. Momentum is not averaged.
Waiting: a group waits for all of its members. Groups that share a worker conflict and run one after
the other, so chains of waiting workers form. `ripples_smart` is compared with this rule.

Limit: k = n is local SGD. One random group contracts the variance of the models by the factor 1 −
(k − 1)/(n − 1).
Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples"), random Group Generator.
Differs: in the paper only the smart generator has a Group Buffer. Here all rules have it: a worker
that asks joins the group that it is already in, so random groups conflict less.

Family: partial all-reduce.
Status: reproduction.
"""

from ashl.data.rng import Purpose, draw_subset
from ashl.option import option
from ashl.topology.group_generator import GroupRule, Groups, GroupSize, Ranks


@option
class RipplesRandom(GroupRule):
    """Groups drawn at random."""

    group_size: GroupSize

    def draw(self, state: Groups, asker: int) -> list[Ranks]:
        others = draw_subset(
            state.num_workers - 1,
            self.group_size - 1,
            state.seed,
            Purpose.GROUPS,
            step=state.num_draws,
        )
        return [tuple(sorted([asker, *(other + (other >= asker) for other in others)]))]

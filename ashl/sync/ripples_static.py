"""Ripples with static groups: a cyclic schedule of four phases that every worker computes by
itself.

Use when: workers are equal, and a fixed schedule of groups without a coordinator is enough.
Avoid when: one worker is slow: its groups wait for it.
Alternatives: `ripples_smart`; `d_psgd`.

Rule: after H local steps x_i ← the mean of the models in the group of the present phase. Phase 0:
the first workers of all nodes average, the others average in pairs inside their node. Phase 1: each
node averages as a whole. Phase 2 is as phase 0 with the second workers, phase 3 as phase 1. With
four workers per node and r = rank within the node, this is the authors' schedule:

    phase   r = 0             r = 1             r = 2   r = 3
    0       all with r = 0    alone             with 3  with 2
    1, 3    the node          the node          the node
    2       with 3            all with r = 1    alone   with 0

If the number of the others on a node is odd, the first of them does not average in that phase. A
node with one worker sends that worker in both phases. On two or more nodes of four workers, four
phases contract the distance of the models from their mean to at most 0.6495 of its value.
Waiting: a group waits for all of its members. Every phase is a partition of the workers, so no
groups conflict. The four phases together connect all workers, so a straggler delays all of them, as
in an all-reduce.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples"); the table as in the authors' public code
(laekov/preduce).

Family: partial all-reduce.
Status: reproduction.
"""

from collections.abc import Sequence
from typing import ClassVar

from ashl.option import option
from ashl.topology.group_generator import GroupRule, Groups, Ranks, workers_by_node

PHASES = 4


@option
class RipplesStatic(GroupRule):
    """Four phases in a cycle."""

    ordered: ClassVar[bool] = True

    def draw(self, state: Groups, asker: int) -> list[Ranks]:
        return phase(state.nodes, state.num_draws % PHASES)

    def groups(self, nodes: Sequence[int]) -> list[Ranks]:
        """Return every group of the schedule with more than one member."""
        groups = [group for k in range(PHASES) for group in phase(nodes, k) if len(group) > 1]
        return list(dict.fromkeys(groups))


def phase(nodes: Sequence[int], k: int) -> list[Ranks]:
    """Return the groups of phase k, a partition of all workers; `nodes` has the node of each
    worker.
    """
    teams = workers_by_node(nodes, range(len(nodes)))
    if k % 2:
        return [tuple(team) for team in teams]
    heads, groups = [], []
    for team in teams:
        head = k // 2 % len(team)
        heads.append(team[head])
        rest = team[head + 1 :] + team[:head]
        alone = len(rest) % 2
        pairs = [rest[i : i + 2] for i in range(alone, len(rest), 2)]
        groups += [tuple(sorted(group)) for group in ([rest[:1]] if alone else []) + pairs]
    return [tuple(sorted(heads)), *groups]

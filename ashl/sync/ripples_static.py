"""Ripples with static groups: a schedule of four phases that every worker can compute by itself.

Rule: phase 0, the first workers of all machines average, the others in pairs inside their machine;
phase 1, each machine as a whole; phase 2 as phase 0 with the second workers; phase 3 as phase 1.
With four workers on a machine, by r = rank in it, this is the authors' schedule:

    phase   r = 0             r = 1             r = 2   r = 3
    0       all with r = 0    alone             with 3  with 2
    1, 3    the machine       the machine       the machine
    2       with 3            all with r = 1    alone   with 0

For other numbers: of an odd rest the first one stays alone; a machine of one always sends the same
worker. Every phase is a partition, so nothing conflicts, and the four together connect all workers,
so one straggler costs what it costs an all-reduce: this is for clusters of equals. Four phases
contract the distance from the mean to 0.6495 of what it was.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples"); the table as in the authors' public code
(laekov/preduce).
"""

from collections.abc import Sequence
from typing import ClassVar

from ashl.option import option
from ashl.topology.group_generator import GroupRule, Groups, Members, machines

PHASES = 4


@option
class RipplesStatic(GroupRule):
    """Four phases, over and over."""

    ordered: ClassVar[bool] = True

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Members]:
        return phase(state.nodes, state.draws % PHASES)

    def groups(self, nodes: Sequence[int]) -> list[Members]:
        """Every group that will ever be."""
        groups = [group for k in range(PHASES) for group in phase(nodes, k) if len(group) > 1]
        return list(dict.fromkeys(groups))


def phase(nodes: Sequence[int], k: int) -> list[Members]:
    """A partition of all workers; `nodes` is the machine of each."""
    teams = machines(nodes, range(len(nodes)))
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

"""Ripples with first-come groups: the first k workers that ask for a group average their models.

Use when: many unequal workers, and groups of those that wait are good enough.
Avoid when: there are fewer than six workers.
Alternatives: `ripples_smart`, which avoids conflicts; `ad_psgd` in pairs.

Rule: a group closes once k workers have asked. If fewer than k workers are running, all of them
form the group.
Waiting: a worker waits until its group closes: for any k − 1 other requests, never for one given
worker.

Limit: k = n is local SGD. If all workers are exactly equally fast, the same workers meet in every
group, and the models of different groups diverge; take `ripples_smart` there.
Source: Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce",
SIGMOD 2021; as a schedule for Luo et al., "Prague", ASPLOS 2020.

Family: partial all-reduce.
Status: situational.
"""

from ashl.option import option
from ashl.topology.group_generator import GroupRule, Groups, GroupSize, Ranks


@option
class RipplesFirstCome(GroupRule):
    """Groups of the workers that asked first."""

    group_size: GroupSize

    def draw(self, state: Groups, asker: int) -> list[Ranks]:
        idle, size = state.idle_workers, min(self.group_size, state.num_present)
        return [] if len(idle) < size else [tuple(sorted(idle[:size]))]

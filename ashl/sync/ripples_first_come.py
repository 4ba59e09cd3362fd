"""Ripples with first-come groups: the first k workers that ask for a group average their models.

Use when: many unequal workers, and groups of those that wait are good enough.
Avoid when: there are fewer than six workers.
Alternatives: `ripples_smart`, which avoids conflicts; `ad_psgd` in pairs.

Rule: a group closes once k workers have asked. With a window it closes at the latest `window_s`
seconds after its first worker asked, with the workers that have asked by then. If fewer than k
workers are running, all of them form the group.
Waiting: a worker waits until its group closes: for any k − 1 other requests, never for one given
worker.

Limit: k = n without a window is local SGD. If all workers are exactly equally fast, the same
workers meet in every group and the models of different groups diverge; take `ripples_smart` there.
Source: Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce",
SIGMOD 2021, with a constant window; as a schedule for Luo et al., "Prague", ASPLOS 2020.

Family: partial all-reduce.
Status: situational.
"""

from ashl.option import Span, option
from ashl.topology.group_generator import GroupRule, Groups, GroupSize, Ranks


@option
class RipplesFirstCome(GroupRule):
    """Groups of the workers that asked first."""

    group_size: GroupSize
    window_s: Span | None

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Ranks]:
        idle = state.idle
        due = self.wakes(state)
        size = min(self.group_size, state.present)
        if len(idle) < size and (due is None or now_ns < due):
            return []
        return [tuple(sorted(idle[:size]))]

    def wakes(self, state: Groups) -> int | None:
        """Return the time (ns) at which the present group closes in any case; None without a
        window.
        """
        if self.window_s is None or state.closed or not (idle := state.idle):
            return None
        return state.waiting[idle[0]].since_ns + round(self.window_s * 1e9)

"""Ripples with first-come groups: the first k workers that ask average, and nobody waits for
anybody by name.

Rule: a group closes when k workers have asked or, with a window, so many seconds after its first
one asked, with those who have come by then. A worker never waits for one that still computes,
unless fewer than k are left who could come.

Limit: k = n without a window is local SGD. Where all workers are exactly equally fast, the same
ones meet every time and the models of different groups drift apart: take the smart rule there.

Source: Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce",
SIGMOD 2021, with a window that stays as it is; as a schedule for Luo et al., "Prague", ASPLOS 2020.
"""

from ashl.option import Span, option
from ashl.topology.group_generator import GroupRule, Groups, GroupSize, Members


@option
class RipplesFirstCome(GroupRule):
    """Timed groups."""

    group_size: GroupSize
    window_s: Span | None

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Members]:
        idle, due = state.idle, self.wakes(state)
        size = min(self.group_size, state.present)
        if len(idle) < size and (due is None or now_ns < due):
            return []
        return [tuple(sorted(idle[:size]))]

    def wakes(self, state: Groups) -> int | None:
        """When the group that is gathering closes in any case."""
        if self.window_s is None or state.closed or not (idle := state.idle):
            return None
        return state.waiting[idle[0]].since_ns + round(self.window_s * 1e9)

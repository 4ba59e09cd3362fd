"""Ripples with smart groups: one division serves all workers without a group, and leaves stragglers
out.

Use when: many workers on nodes with shared NICs, some of them stragglers.
Avoid when: there are fewer than six workers, or one common model is needed.
Alternatives: `ad_psgd` in pairs; `ripples_first_come` without a filter.

Rule: a worker that asks with an empty Group Buffer starts a Global Division. All workers with empty
buffers are shuffled and divided into as few groups as possible, of at most k workers and of nearly
equal size. They are disjoint and so never conflict. In each group x_i ← the mean of its members'
models.
Slowdown filter: with c_w the number of requests of worker w, the division of worker i includes only
workers with c_i − c_w < `threshold`. A straggler averages when it asks itself.
Inter-intra: with `inter_intra` and workers on several nodes, a division has two rounds. In the
first one worker of each node, the heads, average, and the others form groups inside their node. In
the second each node averages as a whole. Workers that are `threshold` requests or more behind the
foremost one of their node are left out of the second round.
Waiting: a group waits for all of its members, which the slowdown filter keeps free of stragglers.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples"), Group Buffer, Global Division, Inter-Intra
Synchronization, Slowdown Filter.

Family: partial all-reduce.
Status: situational.
"""

from ashl.option import Count, option
from ashl.topology.group_generator import (
    GroupRule,
    Groups,
    GroupSize,
    Ranks,
    shuffle,
    split_evenly,
    workers_by_node,
)


@option
class RipplesSmart(GroupRule):
    """Group Buffer, Global Division and slowdown filter."""

    group_size: GroupSize
    threshold: Count
    inter_intra: bool

    def draw(self, state: Groups, asker: int) -> list[Ranks]:
        fewest = state.requests[asker] - self.threshold + 1  # requests: the slowdown filter
        workers = shuffle(state, state.workers_without_group(fewest))
        teams = workers_by_node(state.nodes, workers)
        if not self.inter_intra or len(teams) == 1:
            return split_evenly(workers, self.group_size)
        heads = tuple(sorted(team[0] for team in teams))
        inside = [group for team in teams for group in split_evenly(team[1:], self.group_size)]
        return [
            heads,
            *inside,
            *(group for team in teams if len(group := self._without_stragglers(state, team)) > 1),
        ]

    def _keeps_up(self, state: Groups, worker: int, with_whom: int) -> bool:
        return state.requests[with_whom] - state.requests[worker] < self.threshold

    def _without_stragglers(self, state: Groups, team: list[int]) -> Ranks:
        """Return the workers of a node that are less than `threshold` requests behind its foremost
        one.
        """
        foremost = max(team, key=lambda worker: state.requests[worker])
        return tuple(sorted(worker for worker in team if self._keeps_up(state, worker, foremost)))

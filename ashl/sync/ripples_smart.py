"""Ripples with smart groups: one division serves everybody who has no group yet, and stragglers are
left out of it.

Rule: a worker that asks with an empty buffer makes a Global Division: all workers with empty
buffers are shuffled and cut into groups of k, which are disjoint and so never conflict. Slowdown
filter: with c_w the requests of worker w, the asker i takes only workers with c_i − c_w <
threshold; a slow one is averaged when it asks itself, and nobody waits for it.

With `inter_intra` a division is two rounds where workers are on several machines: first one head of
each machine meet, the others form groups inside their machine; then each machine averages as a
whole, without those whose requests are the threshold or more behind the foremost there, who would
keep it waiting.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples"), Group Buffer, Global Division, Inter-Intra
Synchronization, Slowdown Filter.
"""

from ashl.option import Count, option
from ashl.topology.group_generator import (
    GroupRule,
    Groups,
    GroupSize,
    Members,
    machines,
    shuffle,
    split_evenly,
)


@option
class RipplesSmart(GroupRule):
    """Group Buffer, Global Division and slowdown filter."""

    group_size: GroupSize
    threshold: Count
    inter_intra: bool

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Members]:
        workers = shuffle(
            state, state.free(state.requests[asker] - self.threshold + 1)
        )  # who keeps up with it
        teams = machines(state.nodes, workers)
        if not self.inter_intra or len(teams) == 1:
            return split_evenly(workers, self.group_size)
        heads = tuple(sorted(team[0] for team in teams))
        inside = [group for team in teams for group in split_evenly(team[1:], self.group_size)]
        return [
            heads,
            *inside,
            *(group for team in teams if len(group := self._abreast(state, team)) > 1),
        ]

    def _keeps_up(self, state: Groups, worker: int, with_whom: int) -> bool:
        return state.requests[with_whom] - state.requests[worker] < self.threshold

    def _abreast(self, state: Groups, team: list[int]) -> Members:
        """Those of a machine who keep up with its foremost."""
        foremost = max(team, key=lambda worker: state.requests[worker])
        return tuple(sorted(worker for worker in team if self._keeps_up(state, worker, foremost)))

"""The group generator of partial all-reduce: who averages with whom next, as a pure function of who asked.

Every worker has a buffer, the queue of groups it is yet to take part in. A worker that asks with an empty buffer makes
its rule draw groups, which are appended to the buffers of all their members at once. A group begins when it is at the
head of every member's buffer and all of them have asked: so a worker is in one group at a time (its head is its lock),
groups that share a worker run in the order in which they were made, and no circle of waiting can close.

Which groups are drawn is the rule's to say (`ashl.topology.group_rule`).

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized Training", ASPLOS 2020
(arXiv 1909.08029, as "Ripples").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ashl.data.rng import Purpose, permutation
from ashl.stage.rule import Members
from ashl.topology.group_rule import GroupRule


class Group(NamedTuple):
    """Workers that average their models once."""

    id: int
    members: Members


@dataclass(frozen=True)
class Groups:
    """All that the generator knows. Nothing in it is ever mutated."""

    nodes: tuple[int, ...]  # the machine of each worker
    seed: int
    buffers: tuple[tuple[Group, ...], ...]  # by worker, oldest first; a group that runs is still in them
    requests: tuple[int, ...]  # how often each worker has asked
    waiting: Mapping[int, int] = field(default_factory=dict)  # who has asked and not begun, in order, since when (ns)
    running: tuple[int, ...] = ()  # ids
    made: int = 0  # groups so far
    draws: int = 0
    conflicts: int = 0  # groups that shared a worker with one of another draw that was not done yet
    closed: bool = False  # no new groups; those in the buffers still run

    @property
    def num_workers(self) -> int:
        return len(self.nodes)

    @property
    def idle(self) -> list[int]:
        """Who has asked and has no group, in the order of asking."""
        return [worker for worker in self.waiting if not self.buffers[worker]]


def opened(nodes: Sequence[int], seed: int) -> Groups:
    """The generator before anybody has asked."""
    n = len(nodes)
    return Groups(tuple(nodes), seed, buffers=((),) * n, requests=(0,) * n)


def reopened(state: Groups) -> Groups:
    """The generator where another stage begins: nobody has asked, but numbers go on."""
    n = state.num_workers
    return replace(state, buffers=((),) * n, requests=(0,) * n, waiting={}, running=(), closed=False)


def request(state: Groups, rule: GroupRule, worker: int, now_ns: int) -> tuple[Groups, list[Group]]:
    """A worker is ready to average: (state, groups that begin now)."""
    assert worker not in state.waiting
    requests = list(state.requests)
    requests[worker] += 1
    state = replace(state, requests=tuple(requests), waiting={**state.waiting, worker: now_ns})
    return _settled(state, rule, [worker], now_ns)


def done(state: Groups, rule: GroupRule, group: Group, now_ns: int) -> tuple[Groups, list[Group]]:
    """A group has averaged: (state, groups that begin now)."""
    buffers = list(state.buffers)
    for worker in group.members:
        assert buffers[worker][0] == group
        buffers[worker] = buffers[worker][1:]
    state = replace(state, buffers=tuple(buffers), running=tuple(id for id in state.running if id != group.id))
    return _settled(state, rule, group.members, now_ns)


def woken(state: Groups, rule: GroupRule, now_ns: int) -> tuple[Groups, list[Group]]:
    """The moment that the rule named with `wakes` has come: (state, groups that begin now)."""
    return _settled(state, rule, state.idle, now_ns)


def closed(state: Groups) -> Groups:
    """No new groups from here on."""
    return replace(state, closed=True)


def dismissed(state: Groups) -> tuple[Groups, list[int]]:
    """Once closed: without those who have asked and whose buffer is empty, and who they are."""
    left = state.idle
    return replace(state, waiting={w: since for w, since in state.waiting.items() if w not in left}), left


def even(workers: Sequence[int], size: int) -> list[Members]:
    """Cut into groups of `size` in order; where that leaves a rest, into as many groups that differ by one at most."""
    count = -(-len(workers) // size)
    cuts = [len(workers) * i // count for i in range(count + 1)] if count else []
    return [tuple(sorted(workers[a:b])) for a, b in pairwise(cuts)]


def shuffled(state: Groups, workers: Sequence[int]) -> list[int]:
    """In random order; the numbers are this draw's own."""
    order = permutation(len(workers), state.seed, Purpose.GROUPS, step=state.draws)
    return [workers[i] for i in order]


def _settled(state: Groups, rule: GroupRule, touched: Iterable[int], now_ns: int) -> tuple[Groups, list[Group]]:
    """Draw for those who ask with an empty buffer, then begin what can begin."""
    touched = list(touched)
    for worker in tuple(touched):
        if worker in state.waiting and not state.buffers[worker] and not state.closed:
            groups = rule.draw(state, worker, now_ns)
            state = _made(state, groups, rule.ordered)
            touched += [member for group in groups for member in group]
    started: list[Group] = []
    for worker in touched:
        if worker in state.waiting and state.buffers[worker] and _ready(state, state.buffers[worker][0]):
            group = state.buffers[worker][0]
            waiting = {w: since for w, since in state.waiting.items() if w not in group.members}
            state = replace(state, waiting=waiting, running=(*state.running, group.id))
            started.append(group)
    return state, started


def _ready(state: Groups, group: Group) -> bool:
    """Whether all have come, and nothing older is in their way."""
    return group.id not in state.running and all(
        worker in state.waiting and state.buffers[worker][0] == group for worker in group.members
    )


def _made(state: Groups, groups: Sequence[Members], ordered: bool) -> Groups:
    """These groups, appended to their members' buffers."""
    if not groups:
        return state
    buffers = list(state.buffers)
    conflicts = 0 if ordered else sum(any(state.buffers[worker] for worker in members) for members in groups)
    for offset, members in enumerate(groups):
        group = Group(state.made + offset, members)
        for worker in members:
            buffers[worker] = (*buffers[worker], group)
    return replace(
        state,
        buffers=tuple(buffers),
        made=state.made + len(groups),
        draws=state.draws + 1,
        conflicts=state.conflicts + conflicts,
    )

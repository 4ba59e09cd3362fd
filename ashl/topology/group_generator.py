"""The group generator of partial all-reduce: who averages with whom next, as a function of who
asked.

Every worker has a buffer, the queue of groups it is yet to take part in. A worker that asks with an
empty buffer makes its rule draw groups, which are appended to the buffers of all their members at
once. A group begins when it is at the head of every member's buffer and all of them have asked: so
a worker is in one group at a time (its head is its lock), groups that share a worker run in the
order in which they were made, and no circle of waiting can close.

Which groups are drawn is the rule's to say (`GroupRule`). What happens costs as much as the groups
that it concerns are large, however many workers there are.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020 (arXiv 1909.08029, as "Ripples").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from ashl.data.rng import Purpose, permutation
from ashl.errors import UsageError
from ashl.option import Count, Number, option
from ashl.stage.stage import Members, Rule

GroupSize = Annotated[int, Number, Field(ge=2, lt=2**31)]


@option
class GroupRule(Rule, contract=True):
    """Models are averaged in groups; each scheduler says in which."""

    averages: ClassVar[bool] = True
    ordered: ClassVar[bool] = (
        False  # whether groups follow one order that all workers share: none is a conflict
    )
    group_size: ClassVar[int | None] = (
        None  # workers of a group; None = as the scheduler draws them
    )
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        """How many meet. Raises UsageError where there are not so many."""
        size = self.group_size or num_workers
        if size > num_workers:
            raise UsageError(
                f"sync.group_size={size} is more than the {num_workers} workers that there are;"
                f" take at most {num_workers}"
            )
        return size

    def draw(self, state: Groups, asker: int, now_ns: int) -> list[Members]:
        """The groups to make, in order, now that this worker asks and has none."""
        raise NotImplementedError

    def wakes(self, state: Groups) -> int | None:
        """The moment to draw again, where time matters; in nanoseconds."""
        return None

    def groups(self, nodes: Sequence[int]) -> list[Members]:
        """Groups that are known before the run."""
        return []


def machines(nodes: Sequence[int], workers: Iterable[int]) -> list[list[int]]:
    """These workers by machine, in the order of the machines; within each in the order given."""
    teams: dict[int, list[int]] = {}
    for worker in workers:
        teams.setdefault(nodes[worker], []).append(worker)
    return [teams[node] for node in sorted(teams)]


class Group(NamedTuple):
    """Workers that average their models once."""

    id: int
    members: Members


class Asked(NamedTuple):
    """That a worker has asked, and has not begun."""

    number: int  # in the order of asking
    since_ns: int


@dataclass
class Groups:
    """All that the generator knows; changed by the functions here and by nobody else."""

    nodes: tuple[int, ...]  # the machine of each worker
    seed: int
    buffers: list[list[Group]]  # by worker, oldest first; a group that runs is still in them
    requests: list[int]  # how often each worker has asked
    waiting: dict[int, Asked] = field(default_factory=dict)
    made: int = 0  # groups so far
    draws: int = 0
    conflicts: int = 0  # groups that shared a worker with one of another draw that was not done yet
    closed: bool = False  # no new groups; those in the buffers still run
    asks: int = 0  # so far
    gone: set[int] = field(default_factory=set)  # who is lost: in no group
    _free: dict[int, set[int]] = field(
        default_factory=dict
    )  # whose buffer is empty, by how often they have asked
    _idle: set[int] = field(default_factory=set)  # who has asked and has an empty buffer
    _missing: dict[int, int] = field(
        default_factory=dict
    )  # group that has not begun → members yet to come to it

    @property
    def num_workers(self) -> int:
        return len(self.nodes)

    @property
    def present(self) -> int:
        """How many workers there are now."""
        return len(self.nodes) - len(self.gone)

    @property
    def idle(self) -> list[int]:
        """Who has asked and has no group, in the order of asking."""
        return sorted(self._idle, key=lambda worker: self.waiting[worker].number)

    def free(self, requests: int) -> list[int]:
        """Who has no group and has asked at least so often, in rank order."""
        return sorted(
            w for times, workers in self._free.items() if times >= requests for w in workers
        )


def open_groups(nodes: Sequence[int], seed: int) -> Groups:
    """The generator before anybody has asked."""
    state = Groups(tuple(nodes), seed, buffers=[], requests=[])
    reopen(state)
    return state


def reopen(state: Groups) -> None:
    """Another stage begins: nobody has asked, but numbers go on."""
    n = state.num_workers
    state.buffers, state.requests, state.closed = [[] for _ in range(n)], [0] * n, False
    state.waiting, state._idle, state._missing, state._free = (
        {},
        set(),
        {},
        {0: set(range(n)) - state.gone},
    )


def request(state: Groups, rule: GroupRule, worker: int, now_ns: int) -> list[Group]:
    """A worker is ready to average; returns the groups that begin now."""
    assert worker not in state.waiting
    empty = not state.buffers[worker]
    if empty:
        _engage(state, worker)
    state.requests[worker] += 1
    state.waiting[worker] = Asked(state.asks, now_ns)
    state.asks += 1
    if empty:
        _release(state, worker)
    else:
        _wait_for_group(state, worker)
    return _start_groups(state, rule, [worker], now_ns)


def complete_group(state: Groups, rule: GroupRule, group: Group, now_ns: int) -> list[Group]:
    """A group has averaged; returns the groups that begin now."""
    for worker in group.members:
        buffer = state.buffers[worker]
        if worker in state.gone or not buffer or buffer[0].id != group.id:
            continue  # it is lost, or has come back since
        del buffer[0]
        if not buffer:
            _release(state, worker)
        elif worker in state.waiting:
            _wait_for_group(state, worker)
    return _start_groups(state, rule, group.members, now_ns)


def wake_up(state: Groups, rule: GroupRule, now_ns: int) -> list[Group]:
    """The moment that the rule named with `wakes` has come; returns the groups that begin now."""
    return _start_groups(state, rule, state.idle, now_ns)


def remove_worker(state: Groups, rule: GroupRule, worker: int, now_ns: int) -> list[Group]:
    """A worker is gone: no group waits for it, and who is left of a group meets without it; returns
    the groups that begin now. Groups that run are its members' matter.
    """
    groups, came = state.buffers[worker], worker in state.waiting
    if not groups:
        _engage(state, worker)
    state.waiting.pop(worker, None)
    state.gone.add(worker)
    state.buffers[worker], touched = [], list[int]()
    for place, group in enumerate(groups):
        if group.id not in state._missing:
            continue
        others = tuple(member for member in group.members if member != worker)
        for member in others:
            buffer = state.buffers[member]
            buffer[next(i for i, own in enumerate(buffer) if own.id == group.id)] = Group(
                group.id, others
            )
        state._missing[group.id] -= not (came and place == 0)
        if not others:
            del state._missing[group.id]
        touched += others
    return _start_groups(state, rule, [*touched, *state.idle], now_ns)


def join(state: Groups, worker: int) -> None:
    """A worker that was gone takes part: it has asked as often as before, so that it is not taken
    for a slow one from now on, and at least as often as whoever is there and has asked least.
    """
    there = [times for other, times in enumerate(state.requests) if other not in state.gone]
    state.gone.discard(worker)
    state.requests[worker] = max(state.requests[worker], min(there, default=0))
    _release(state, worker)


def close(state: Groups) -> None:
    """No new groups from here on."""
    state.closed = True


def release_idle(state: Groups) -> list[int]:
    """Once closed: forget those who have asked and whose buffer is empty, and say who they are."""
    left = state.idle
    for worker in left:
        del state.waiting[worker]
    state._idle.clear()
    return left


def split_evenly(workers: Sequence[int], size: int) -> list[Members]:
    """Cut into groups of `size` in order; where that leaves a rest, into as many groups that differ
    by one at most.
    """
    count = -(-len(workers) // size)
    cuts = [len(workers) * i // count for i in range(count + 1)] if count else []
    return [tuple(sorted(workers[a:b])) for a, b in pairwise(cuts)]


def shuffle(state: Groups, workers: Sequence[int]) -> list[int]:
    """In random order; the numbers are this draw's own."""
    order = permutation(len(workers), state.seed, Purpose.GROUPS, step=state.draws)
    return [workers[i] for i in order.tolist()]


def _start_groups(
    state: Groups, rule: GroupRule, touched: Iterable[int], now_ns: int
) -> list[Group]:
    """Draw for those who ask with an empty buffer, then begin what can begin."""
    touched = list(touched)
    for worker in tuple(touched):
        if worker in state._idle and not state.closed:
            groups = rule.draw(state, worker, now_ns)
            _make(state, groups, rule.ordered)
            touched += [member for group in groups for member in group]
    started: list[Group] = []
    for worker in touched:
        if worker in state.waiting and state.buffers[worker]:
            group = state.buffers[worker][0]
            if state._missing.get(group.id) == 0:
                del state._missing[group.id]
                for member in group.members:
                    del state.waiting[member]
                started.append(group)
    return started


def _make(state: Groups, groups: Sequence[Members], ordered: bool) -> None:
    """These groups, appended to their members' buffers."""
    if not groups:
        return
    state.draws += 1
    if state.gone:
        there = [
            tuple(member for member in members if member not in state.gone) for members in groups
        ]
        groups = [members for members in there if members]
    if not ordered:
        state.conflicts += sum(
            any(state.buffers[worker] for worker in members) for members in groups
        )
    for members in groups:
        group = Group(state.made, members)
        state.made += 1
        state._missing[group.id] = len(members)
        for worker in members:
            first = not state.buffers[worker]
            state.buffers[worker].append(group)
            if first:
                _engage(state, worker)
                if worker in state.waiting:
                    _wait_for_group(state, worker)


def _release(state: Groups, worker: int) -> None:
    """Its buffer is empty."""
    state._free.setdefault(state.requests[worker], set()).add(worker)
    if worker in state.waiting:
        state._idle.add(worker)


def _engage(state: Groups, worker: int) -> None:
    """It is no longer among those whose buffer is empty."""
    alike = state._free[state.requests[worker]]
    alike.remove(worker)
    if not alike:
        del state._free[state.requests[worker]]
    state._idle.discard(worker)


def _wait_for_group(state: Groups, worker: int) -> None:
    """It waits, with this group at the head of its buffer; where that one runs already, it waits
    for its end.
    """
    head = state.buffers[worker][0].id
    if head in state._missing:
        state._missing[head] -= 1

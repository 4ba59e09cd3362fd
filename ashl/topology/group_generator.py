"""Group generator of partial all-reduce: the next groups as a function of the workers' requests.

Every worker has a buffer, the queue of groups in which it is yet to take part. If a worker asks
with an empty buffer, the scheduler draws groups. They are appended to the buffers of all their
members at once. A group begins when it is at the head of every member's buffer and all members have
asked. So a worker is in one group at a time (its head is its lock). Groups that share a worker run
in the order in which they were made, so no deadlock is possible.

The sync mode (`GroupRule`) draws the groups. The cost of an operation is proportional to the size
of the groups that it concerns, not to the number of workers.

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
from ashl.stage.contract import Ranks, Rule

GroupSize = Annotated[int, Number, Field(ge=2, lt=2**31)]


@option
class GroupRule(Rule, contract=True):
    """Sync mode that averages models in groups; `draw` is its scheduler."""

    averages: ClassVar[bool] = True
    # if True, groups follow one order that all workers share, so none counts as a conflict
    ordered: ClassVar[bool] = False
    group_size: ClassVar[int | None] = None  # workers of a group; None: as the scheduler draws them
    local_steps: Count | Literal["plan"]

    def quorum(self, num_workers: int) -> int:
        """Return the size of a group. Raises: UsageError if there are fewer workers."""
        size = self.group_size or num_workers
        if size > num_workers:
            raise UsageError(
                f"sync.group_size={size}: the run has only {num_workers} workers; set it to at most"
                f" {num_workers}"
            )
        return size

    def draw(self, state: Groups, asker: int) -> list[Ranks]:
        """Return the groups to make, in order, for a worker that asks with an empty buffer."""
        raise NotImplementedError

    def groups(self, nodes: Sequence[int]) -> list[Ranks]:
        """Return the groups that are known before the run."""
        return []


def workers_by_node(nodes: Sequence[int], workers: Iterable[int]) -> list[list[int]]:
    """Return these workers by node, in the order of nodes, and in the given order within each."""
    teams: dict[int, list[int]] = {}
    for worker in workers:
        teams.setdefault(nodes[worker], []).append(worker)
    return [teams[node] for node in sorted(teams)]


class Group(NamedTuple):
    """Workers that average their models once."""

    id: int
    members: Ranks


@dataclass
class Groups:
    """State of the generator, which only the functions of this module change."""

    nodes: tuple[int, ...]  # the node of each worker
    seed: int
    buffers: list[list[Group]]  # by worker, oldest first; a running group is still in them
    requests: list[int]  # requests of each worker so far
    # by worker whose group has not begun: position of its request in the order of all requests
    waiting: dict[int, int] = field(default_factory=dict)
    num_groups: int = 0  # groups made so far
    num_draws: int = 0  # draws that made a group
    # groups that shared a worker with an unfinished group of another draw
    conflicts: int = 0
    closed: bool = False  # if True, no groups are drawn; those in the buffers still run
    num_requests: int = 0  # number of requests of all workers so far
    failed: set[int] = field(default_factory=set)  # failed workers, which are in no group
    # workers with an empty buffer, by their number of requests
    _free: dict[int, set[int]] = field(default_factory=dict)
    _idle: set[int] = field(default_factory=set)  # workers that have asked with an empty buffer
    # by group that has not begun: members that have not come to it yet
    _missing: dict[int, int] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return len(self.nodes)

    @property
    def num_present(self) -> int:
        """Return the number of workers that have not failed."""
        return len(self.nodes) - len(self.failed)

    @property
    def idle_workers(self) -> list[int]:
        """Return the workers that have asked and have no group, in the order of asking."""
        return sorted(self._idle, key=lambda worker: self.waiting[worker])

    def workers_without_group(self, requests: int) -> list[int]:
        """Return the workers without a group and with at least so many requests, in rank order."""
        return sorted(
            worker
            for times, workers in self._free.items()
            if times >= requests
            for worker in workers
        )


def open_groups(nodes: Sequence[int], seed: int) -> Groups:
    """Return the generator's state before the first request."""
    state = Groups(tuple(nodes), seed, buffers=[], requests=[])
    reset_groups(state)
    return state


def reset_groups(state: Groups) -> None:
    """Reset the generator for another stage: no requests, but the numbers of groups continue."""
    n = state.num_workers
    state.buffers = [[] for _ in range(n)]
    state.requests = [0] * n
    state.closed = False
    state.waiting = {}
    state._idle = set()
    state._missing = {}
    state._free = {0: set(range(n)) - state.failed}


def add_request(state: Groups, rule: GroupRule, worker: int) -> list[Group]:
    """Handle the request of a worker. Returns: the groups that begin now."""
    assert worker not in state.waiting
    empty = not state.buffers[worker]
    if empty:
        _mark_busy(state, worker)
    state.requests[worker] += 1
    state.waiting[worker] = state.num_requests
    state.num_requests += 1
    if empty:
        _mark_free(state, worker)
    else:
        _wait_for_group(state, worker)
    return _start_groups(state, rule, [worker])


def complete_group(state: Groups, rule: GroupRule, group: Group) -> list[Group]:
    """Remove a group that has averaged from the buffers. Returns: the groups that begin now."""
    for worker in group.members:
        buffer = state.buffers[worker]
        del buffer[0]
        if not buffer:
            _mark_free(state, worker)
        elif worker in state.waiting:
            _wait_for_group(state, worker)
    return _start_groups(state, rule, group.members)


def close_groups(state: Groups) -> None:
    """Draw no more groups."""
    state.closed = True


def release_idle(state: Groups) -> list[int]:
    """Remove the requests of workers with an empty buffer, once closed. Returns: these workers."""
    idle = state.idle_workers
    for worker in idle:
        del state.waiting[worker]
    state._idle.clear()
    return idle


def split_evenly(workers: Sequence[int], size: int) -> list[Ranks]:
    """Partition workers, in order, into groups of `size`.

    If `size` does not divide their number: into the least number of groups, which differ by one
    worker at most.
    """
    count = -(-len(workers) // size)
    cuts = [len(workers) * i // count for i in range(count + 1)] if count else []
    return [tuple(sorted(workers[a:b])) for a, b in pairwise(cuts)]


def shuffle(state: Groups, workers: Sequence[int]) -> list[int]:
    """Return the workers in random order; each draw has random numbers of its own."""
    order = permutation(len(workers), state.seed, Purpose.GROUPS, step=state.num_draws)
    return [workers[i] for i in order.tolist()]


def _start_groups(state: Groups, rule: GroupRule, touched: Iterable[int]) -> list[Group]:
    """Draw for workers that ask with an empty buffer. Returns: the groups that begin now."""
    touched = list(touched)
    for worker in tuple(touched):
        if worker in state._idle and not state.closed:
            groups = rule.draw(state, worker)
            _append_groups(state, groups, rule.ordered)
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


def _append_groups(state: Groups, groups: Sequence[Ranks], ordered: bool) -> None:
    """Append these groups to their members' buffers."""
    if not groups:
        return
    state.num_draws += 1
    if state.failed:
        present = [
            tuple(member for member in members if member not in state.failed) for members in groups
        ]
        groups = [members for members in present if members]
    if not ordered:
        state.conflicts += sum(
            any(state.buffers[worker] for worker in members) for members in groups
        )
    for members in groups:
        group = Group(state.num_groups, members)
        state.num_groups += 1
        state._missing[group.id] = len(members)
        for worker in members:
            first = not state.buffers[worker]
            state.buffers[worker].append(group)
            if first:
                _mark_busy(state, worker)
                if worker in state.waiting:
                    _wait_for_group(state, worker)


def _mark_free(state: Groups, worker: int) -> None:
    """Record that the buffer of a worker is empty."""
    state._free.setdefault(state.requests[worker], set()).add(worker)
    if worker in state.waiting:
        state._idle.add(worker)


def _mark_busy(state: Groups, worker: int) -> None:
    """Record that the buffer of a worker is no longer empty."""
    same_count = state._free[state.requests[worker]]
    same_count.remove(worker)
    if not same_count:
        del state._free[state.requests[worker]]
    state._idle.discard(worker)


def _wait_for_group(state: Groups, worker: int) -> None:
    """Record that a worker has come to the group at the head of its buffer, unless that group
    runs.
    """
    head = state.buffers[worker][0].id
    if head in state._missing:
        state._missing[head] -= 1

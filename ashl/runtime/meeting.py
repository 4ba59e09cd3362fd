"""How the processes of a run meet: all at its start, in one group, who comes later by a group of two with each peer.

gloo makes a group with all its members at once, and where one of them dies only its own pairs break. So each life of a
worker that comes (back) gets groups of its own, under names that hold worker and life: nothing of an earlier life can
come through them. A moment before, the peer says in the job's store that it is there: it is waited for in a loop that
can be left, while gloo would wait for good.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from ashl.runtime.machine import boot
from ashl.runtime.news import News
from ashl.runtime.plane import NEVER

MET, NEWCOMER = 0, 1  # places in a group of two
POLL_S = 0.02


class Entry(NamedTuple):
    """What a worker that comes needs: a group with each peer, and when the run's clock was zero, by its own."""

    groups: dict[int, dist.ProcessGroup]
    zero_ns: int


def world() -> dist.ProcessGroup:
    """The group of all who were there at the start."""
    group = dist.group.WORLD
    assert group is not None
    return group


def common_zero() -> int:
    """When the clock starts, in this process's monotonic nanoseconds: when all ranks have come. Ranks on the machine of
    rank 0 share its monotonic clock, and so its very start; others start when the barrier lets them go."""
    dist.all_reduce(torch.zeros(1))  # a barrier, which would go by NCCL where there is one
    own = time.monotonic_ns()
    first = torch.tensor([own, clock_of()])
    dist.broadcast(first, 0)
    zero, where = first.tolist()
    return zero if where == clock_of() else own


def clock_of() -> int:
    """Alike for the processes that share a monotonic clock."""
    return zlib.crc32(boot().encode())


def name_of(peer: int, worker: int, life: int) -> str:
    return f"pair/{peer}/{worker}/{life}"


def of_two(name: str, store: dist.Store, place: int) -> dist.ProcessGroup:
    """The group of this name, once both are there."""
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), place, 2, NEVER))


def let_in(store: dist.Store, peer: int, worker: int, life: int, clock_ns: Callable[[], int]) -> dist.ProcessGroup:
    """At a peer, whose run has this clock: the group with a worker that comes. Waits for it."""
    name, now_ns = name_of(peer, worker, life), clock_ns()
    store.set(name, f"{time.monotonic_ns() - now_ns} {now_ns} {clock_of()}")
    return of_two(name, store, MET)


def come_in(store: dist.Store, peers: Iterable[int], worker: int, life: int, news: Callable[[], News]) -> Entry | None:
    """At the worker: None where the run is over before it is let in. Who is lost by then lets nobody in: one comes
    after the other, so each of two who come finds the other there, or will be found."""
    while (worker, life) not in news().ready:
        if news().end is not None:
            return None
        time.sleep(POLL_S)
    groups, zero_ns = dict[int, dist.ProcessGroup](), 0
    for peer in peers:
        name = name_of(peer, worker, life)
        while not (there := store.check([name])) and peer not in dict(news().lost):
            if news().end is not None:
                return None
            time.sleep(POLL_S)
        if there:
            zero, now, clock = map(int, store.get(name).split())
            zero_ns = zero if clock == clock_of() else time.monotonic_ns() - now
            groups[peer] = of_two(name, store, NEWCOMER)
    return Entry(groups, zero_ns)

"""How the processes of a run meet: all at its start, in one group, who comes later by a group of two with each peer.

gloo makes a group with all its members at once, and where one of them dies only its own pairs break. So each life of a
worker that comes (back) gets groups of its own, under names that hold worker and life: nothing of an earlier life can
come through them. A moment before, the peer says in the job's store that it is there: it is waited for in a loop that
can be left, while gloo would wait for good.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ashl.runtime.control_messages import ControlUpdate
from ashl.runtime.machine import boot
from ashl.runtime.transport import NEVER

MET, NEWCOMER = 0, 1  # places in a group of two
POLL_S = 0.02
LOOK_S = 0.2  # between two looks whether what is waited for can still come
T = TypeVar("T")
_all: dist.ProcessGroup | None = None


class SharedStore(Protocol):
    """The job's store, which each thread has a connection of its own to."""

    def another(self) -> dist.Store: ...


class Entry(NamedTuple):
    """What a worker that comes needs: a group with each peer, in which life that is, and when the run's clock was zero,
    by its own."""

    groups: dict[int, dist.ProcessGroup]
    lives: dict[int, int]
    zero_ns: int


def meet(backend: str, store: dist.Store, rank: int, ranks: int) -> None:
    """All ranks come together, and have a group of all that is not torch's default one: messages between workers and
    sums go faster by it, by a tenth with four processes on two cores and torch 2.13."""
    global _all  # as torch's own is
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=NEVER)
    _all = dist.new_group(timeout=NEVER)


def world() -> dist.ProcessGroup:
    """The group of all who were there at the start."""
    group = _all or dist.group.WORLD
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


def known_to(name: str) -> str:
    """The key of that the peer takes part in the group of two of this name."""
    return f"{name}/known"


def of_some(name: str, store: dist.Store, place: int, size: int = 2) -> dist.ProcessGroup:
    """The group of this name and size, once all are there."""
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), place, size, NEVER))


def watched(act: Callable[[], T], in_vain: Callable[[], bool]) -> T | None:
    """What comes of what may last for good, as gloo's waiting does where a process is lost: None once it is in vain.
    Raises what `act` raises."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(act())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="watched").start()
    while not wait([outcome], LOOK_S).done:
        if in_vain():
            return None
    return outcome.result()


def let_in(
    store: dist.Store, peer: int, own_life: int, worker: int, life: int, clock_ns: Callable[[], int]
) -> dist.ProcessGroup:
    """At a peer, whose run has this clock: the group with a worker that comes. Waits for it."""
    name, now_ns = name_of(peer, worker, life), clock_ns()
    store.set(name, f"{time.monotonic_ns() - now_ns} {now_ns} {clock_of()} {own_life}")
    return of_some(name, store, MET)


def acquainted(store: dist.Store, peer: int, worker: int, life: int) -> None:
    """At a peer: it has taken note that the worker has come."""
    store.set(known_to(name_of(peer, worker, life)), "")


def come_in(
    shared: SharedStore, peers: Iterable[int], worker: int, life: int, news: Callable[[], ControlUpdate]
) -> Entry | None:
    """At the worker: None where the run is over before it is let in. Who is lost by then lets nobody in: one comes
    after the other, so each of two who come finds the other there, or will be found. In the end all others know it."""
    while (worker, life) not in news().ready:
        if news().end is not None:
            return None
        time.sleep(POLL_S)
    groups, lives, zero_ns, store = dict[int, dist.ProcessGroup](), dict[int, int](), 0, shared.another()

    def in_vain(peer: int) -> bool:
        return peer in dict(news().lost) or news().end is not None

    def there(peer: int, key: str) -> bool:
        while not (there := store.check([key])) and not in_vain(peer):
            time.sleep(POLL_S)
        return there

    for peer in peers:
        if there(peer, name := name_of(peer, worker, life)):
            zero, now, clock, lives[peer] = map(int, store.get(name).split())
            zero_ns = zero if clock == clock_of() else time.monotonic_ns() - now
            group = watched(partial(of_some, name, shared.another(), NEWCOMER), partial(in_vain, peer))
            groups |= {} if group is None else {peer: group}
    for peer in groups:
        there(peer, known_to(name_of(peer, worker, life)))
    return None if news().end is not None else Entry(groups, lives, zero_ns)

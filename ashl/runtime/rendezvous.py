"""Connect the processes of a run: all in one group at the start, a joining worker by a group of two
with each peer.

gloo makes a group with all members at once, and a failed member breaks only its own pairs. So each
incarnation of a joining worker has groups of its own, and no message of an earlier incarnation can
arrive through them. Before it makes the group, the peer announces itself in the job's store. The
worker polls for that, because gloo's own wait cannot be interrupted.
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
    """What a worker that comes needs: a group with each peer, in which life that is, and when the
    run's clock was zero, by its own.
    """

    groups: dict[int, dist.ProcessGroup]
    incarnations: dict[int, int]
    zero_ns: int


def init_process_groups(backend: str, store: dist.Store, rank: int, ranks: int) -> None:
    """All ranks come together, and have a group of all that is not torch's default one: messages
    between workers and sums go faster by it, by a tenth with four processes on two cores and torch
    2.13.
    """
    global _all  # as torch's own is
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=NEVER)
    _all = dist.new_group(timeout=NEVER)


def world() -> dist.ProcessGroup:
    """The group of all who were there at the start."""
    group = _all or dist.group.WORLD
    assert group is not None
    return group


def common_zero() -> int:
    """When the clock starts, in this process's monotonic nanoseconds: when all ranks have come.
    Ranks on the machine of rank 0 share its monotonic clock, and so its very start; others start
    when the barrier lets them go.
    """
    dist.all_reduce(torch.zeros(1))  # a barrier, which would go by NCCL where there is one
    own = time.monotonic_ns()
    first = torch.tensor([own, clock_id()])
    dist.broadcast(first, 0)
    zero, where = first.tolist()
    return zero if where == clock_id() else own


def clock_id() -> int:
    """Alike for the processes that share a monotonic clock."""
    return zlib.crc32(boot().encode())


def pair_key(peer: int, worker: int, incarnation: int) -> str:
    return f"pair/{peer}/{worker}/{incarnation}"


def known_key(name: str) -> str:
    """The key of that the peer takes part in the group of two of this name."""
    return f"{name}/known"


def make_group(name: str, store: dist.Store, place: int, size: int = 2) -> dist.ProcessGroup:
    """The group of this name and size, once all are there."""
    return cast(
        "dist.ProcessGroup",
        dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), place, size, NEVER),
    )


def call_unless_failed(act: Callable[[], T], in_vain: Callable[[], bool]) -> T | None:
    """What comes of what may last for good, as gloo's waiting does where a process is lost: None
    once it is in vain. Raises what `act` raises.
    """
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


def admit_worker(
    store: dist.Store,
    peer: int,
    own_incarnation: int,
    worker: int,
    incarnation: int,
    clock_ns: Callable[[], int],
) -> dist.ProcessGroup:
    """At a peer, whose run has this clock: the group with a worker that comes. Waits for it."""
    name, now_ns = pair_key(peer, worker, incarnation), clock_ns()
    store.set(name, f"{time.monotonic_ns() - now_ns} {now_ns} {clock_id()} {own_incarnation}")
    return make_group(name, store, MET)


def confirm_known(store: dist.Store, peer: int, worker: int, incarnation: int) -> None:
    """At a peer: it has taken note that the worker has come."""
    store.set(known_key(pair_key(peer, worker, incarnation)), "")


def join_running_job(
    shared: SharedStore,
    peers: Iterable[int],
    worker: int,
    incarnation: int,
    update: Callable[[], ControlUpdate],
) -> Entry | None:
    """At the worker: None where the run is over before it is let in. Who is lost by then lets
    nobody in: one comes after the other, so each of two who come finds the other there, or will be
    found. In the end all others know it.
    """
    while (worker, incarnation) not in update().ready:
        if update().end is not None:
            return None
        time.sleep(POLL_S)
    groups, incarnations, zero_ns, store = (
        dict[int, dist.ProcessGroup](),
        dict[int, int](),
        0,
        shared.another(),
    )

    def in_vain(peer: int) -> bool:
        return peer in dict(update().lost) or update().end is not None

    def there(peer: int, key: str) -> bool:
        while not (there := store.check([key])) and not in_vain(peer):
            time.sleep(POLL_S)
        return there

    for peer in peers:
        if there(peer, name := pair_key(peer, worker, incarnation)):
            zero, now, clock, incarnations[peer] = map(int, store.get(name).split())
            zero_ns = zero if clock == clock_id() else time.monotonic_ns() - now
            group = call_unless_failed(
                partial(make_group, name, shared.another(), NEWCOMER), partial(in_vain, peer)
            )
            groups |= {} if group is None else {peer: group}
    for peer in groups:
        there(peer, known_key(pair_key(peer, worker, incarnation)))
    return None if update().end is not None else Entry(groups, incarnations, zero_ns)

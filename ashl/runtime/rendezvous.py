"""Connect the processes of a run: all in one group at the start, and all members of each later
epoch; without epochs, a joining worker by a group of two with each of its servers.

gloo makes a group with all members at once, and a failed member breaks only its own pairs. So each
incarnation of a joining worker has groups of its own, and no message of an earlier incarnation can
arrive through them. Before it makes the group, the server announces itself in the job's store. The
worker polls for that, because gloo's own wait cannot be interrupted.
"""

import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ashl.runtime.effects import Epoch
from ashl.runtime.records import ControlUpdate
from ashl.runtime.transport import NO_TIMEOUT

SERVER, JOINER = 0, 1  # ranks in a group of two: the server, and the joining worker
POLL_S = 0.02
NOTICE_S = 10.0  # longest time from a failure to the next epoch without the failed member
CHECK_S = 0.2  # seconds between two checks whether a wait can still end
BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, new at each boot of the machine
T = TypeVar("T")
_all: dist.ProcessGroup | None = None  # the group of all ranks, see `init_process_groups`


def init_process_groups(backend: str, store: dist.Store, rank: int, ranks: int) -> None:
    """Initialise torch.distributed with all ranks, and make a group of all beside torch's default
    group.

    Messages between workers and sums are a tenth faster by a group of its own (four processes on
    two cores, torch 2.13).
    """
    global _all  # global, as torch's default group is
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=NO_TIMEOUT)
    _all = dist.new_group(timeout=NO_TIMEOUT)


def world() -> dist.ProcessGroup:
    """Return the group of all ranks that were there at the start."""
    group = _all or dist.group.WORLD
    assert group is not None
    return group


def synchronize_clocks() -> int:
    """Wait for all ranks and return the zero of the run's clock, in this process's monotonic
    nanoseconds.

    Ranks on the node of rank 0 share its monotonic clock and therefore its zero; the zero of other
    ranks is the end of their barrier.
    """
    dist.all_reduce(torch.zeros(1))  # a barrier on gloo; `dist.barrier` would use NCCL if available
    own = time.monotonic_ns()
    first = torch.tensor([own, clock_id()])
    dist.broadcast(first, 0)
    zero, where = first.tolist()
    return zero if where == clock_id() else own


def boot_id() -> str:
    """Return an identifier that processes share if they share a monotonic clock."""
    try:
        return BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


def network_id() -> str:
    """Return an identifier that processes share if they share a loopback interface; containers of
    one machine do not.
    """
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        network = ""
    return f"{boot_id()}/{network}"


def clock_id() -> int:
    """Return a number that processes share if they share a monotonic clock."""
    return zlib.crc32(boot_id().encode())


def describe_clock(now_ns: int) -> str:
    """Return the run's clock, which shows `now_ns`, as text for other processes."""
    return f"{time.monotonic_ns() - now_ns} {now_ns} {clock_id()}"


def parse_zero(clock: bytes) -> int:
    """Return the zero of the run's clock in this process's monotonic nanoseconds, from the text of
    `describe_clock`.
    """
    zero, now, clock_of = map(int, clock.split())
    return zero if clock_of == clock_id() else time.monotonic_ns() - now


def make_group(name: str, store: dist.Store, place: int, size: int = 2) -> dist.ProcessGroup:
    """Make the group of this name and size; return it once all members are there."""
    return cast(
        "dist.ProcessGroup",
        dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), place, size, NO_TIMEOUT),
    )


def clock_key(epoch: int) -> str:
    """Return the key by which a member tells joining workers the run's clock."""
    return f"epoch/{epoch}/clock"


def make_epoch_group(
    store: dist.Store,
    rank: int,
    now_ns: Callable[[], int],
    epoch: Epoch,
    members: tuple[int, ...],
    is_over: Callable[[], bool],
) -> dist.ProcessGroup | None:
    """Make the process group of the members of an epoch, and tell joining workers the run's clock.

    Returns: None if there is one member, or once `is_over()` is true.
    Raises: RuntimeError if gloo cannot connect the members, and `is_over()` stays false for
    NOTICE_S.
    """
    if len(members) == 1:
        return None
    store.set(clock_key(epoch.number), describe_clock(now_ns()))
    name = f"epoch/{epoch.number}"
    meet = partial(make_group, name, store, members.index(rank), len(members))
    try:
        return call_unless_over(meet, is_over)
    except RuntimeError:
        # a member may have failed, and the controller notices it a moment later
        until_s = time.monotonic() + NOTICE_S
        while not is_over():
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)
        return None


def join_epoch(
    store: dist.Store, worker: int, incarnation: int, update: Callable[[], ControlUpdate]
) -> tuple[Epoch, int] | None:
    """Wait for an epoch of which this joining worker is a member.

    Returns: (epoch, zero of the run's clock in this process's monotonic nanoseconds); None if the
    run ends before.
    """
    while update().end is None:
        epoch = update().epoch
        members = zip(epoch.workers, epoch.incarnations, strict=True)
        if (worker, incarnation) in members and store.check([clock_key(epoch.number)]):
            return epoch, parse_zero(store.get(clock_key(epoch.number)))
        time.sleep(POLL_S)
    return None


def call_unless_over(call: Callable[[], T], is_over: Callable[[], bool]) -> T | None:
    """Return `call()`, or None once `is_over()` is true: gloo waits forever for a failed process.
    Raises the error of `call`.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="watched").start()
    while not wait([outcome], CHECK_S).done:
        if is_over():
            return None
    return outcome.result()


def await_key(store: dist.Store, key: str, is_over: Callable[[], bool]) -> bytes | None:
    """Return the value of a key of the job's store once it is there; None once `is_over()` is
    true.
    """
    while not store.check([key]):
        if is_over():
            return None
        time.sleep(POLL_S)
    return store.get(key)


def pair_key(server: int, worker: int, incarnation: int) -> str:
    return f"pair/{server}/{worker}/{incarnation}"


def admit_worker(
    store: dist.Store, server: int, worker: int, incarnation: int, now_ns: int
) -> dist.ProcessGroup:
    """Make the group of a server with a joining worker; wait for the worker. `now_ns` is the run
    time.
    """
    name = pair_key(server, worker, incarnation)
    store.set(name, describe_clock(now_ns))
    return make_group(name, store, SERVER)


def join_servers(
    store: dist.Store,
    servers: Iterable[int],
    worker: int,
    incarnation: int,
    is_over: Callable[[], bool],
) -> tuple[dict[int, dist.ProcessGroup], int] | None:
    """Connect a joining worker to its servers once they admit it.

    Returns: (group with each server, zero of the run's clock in this process's monotonic
    nanoseconds); None if the run ends before.
    """
    groups, zero_ns = dict[int, dist.ProcessGroup](), 0
    for server in servers:
        name = pair_key(server, worker, incarnation)
        if (clock := await_key(store, name, is_over)) is None:
            return None
        zero_ns = parse_zero(clock)
        meet = partial(make_group, name, store, JOINER)
        group = call_unless_over(meet, is_over)
        if group is None:
            return None
        groups[server] = group
    return groups, zero_ns

"""Rendezvous: make the process groups that connect the processes of a run.

At the start all ranks make one group. In a run whose workers regroup, the members of each later
epoch make a group. In any other run that tolerates failures, a joining worker makes a group of two
with each of its servers.

gloo makes a group with all members at once, and a failed member breaks only its own connections. So
each incarnation of a joining worker has groups of its own, and no message of an earlier incarnation
can arrive through them. Before a server makes the group of two, it announces itself in the job's
store, and the joining worker polls for that.

gloo waits forever for a member that has failed. So every later rendezvous ends once the caller
knows that it cannot succeed (`make_group`). The first one has a limit, because a firewall may
separate the ranks.

The run's clock counts nanoseconds from the run's zero. A process keeps this zero as a value of its
own monotonic clock, which processes of one node share.

All other process groups have a timeout that never expires (`NO_TIMEOUT`): the controller notices
failures and ends the run, or begins the next epoch.
"""

import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ashl.errors import AshlError
from ashl.runtime.effects import Epoch
from ashl.runtime.records import ControlUpdate
from ashl.runtime.transport import NO_TIMEOUT, first_line

SERVER, JOINER = 0, 1  # ranks in a group of two: the server, and the joining worker
POLL_S = 0.02  # seconds between two reads of the job's store
MEMBER_POLL_S = 0.005  # the same while gloo waits for the members of a group
CHECK_S = 0.2  # seconds between two checks whether a wait can still end
CONNECT_TRIES = 5  # number of times that gloo tries to connect to a rank, each up to its timeout
BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, new at each boot of the machine
T = TypeVar("T")
_all: dist.ProcessGroup | None = None  # the group of all ranks, see `init_process_groups`


def init_process_groups(
    backend: str, store: dist.Store, rank: int, ranks: int, limit_s: float
) -> None:
    """Initialise torch.distributed with all ranks, and make a second group of all ranks (`world`).

    Messages and collectives use the second group, because torch's default group is slower, and has
    a timeout.
    Args: limit_s, longest time to connect, from when all ranks are ready to do so.
    Raises: AshlError if gloo does not connect them in time, for example because of a firewall.
    """
    global _all  # global, as torch's default group is
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{other}" for other in range(ranks)], NO_TIMEOUT)
    timeout = timedelta(seconds=limit_s / CONNECT_TRIES)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except RuntimeError as error:
        raise AshlError(
            f"gloo does not connect to all other ranks ({first_line(error)}); allow connections to"
            " all ports between the nodes, or choose another runtime.interface"
        ) from error
    _all = dist.new_group(timeout=NO_TIMEOUT)


def world() -> dist.ProcessGroup:
    """Return the group of all ranks for messages and collectives, made at the start of the run."""
    group = _all or dist.group.WORLD
    assert group is not None
    return group


def synchronize_clocks() -> int:
    """Wait for all ranks in a barrier, and return the zero of the run's clock, in this process's
    monotonic nanoseconds.

    Ranks on the node of rank 0 share its monotonic clock and therefore its zero: the end of the
    barrier at rank 0. The zero of other ranks is the end of the barrier at these ranks.
    """
    # a barrier on gloo; `dist.barrier` would use NCCL if available
    dist.all_reduce(torch.zeros(1), group=world())
    own = time.monotonic_ns()
    first = torch.tensor([own, clock_id()])
    dist.broadcast(first, 0, group=world())
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
    """Return the run's clock as text for other processes: its zero, the present run time `now_ns`,
    and the monotonic clock that the zero belongs to.
    """
    return f"{time.monotonic_ns() - now_ns} {now_ns} {clock_id()}"


def parse_zero(clock: bytes) -> int:
    """Return the zero of the run's clock in this process's monotonic nanoseconds, from the text of
    `describe_clock`.

    A process with another monotonic clock counts from the run time in the text. So its clock is
    late by the time for which the text was in flight.
    """
    zero, now, clock_of = map(int, clock.split())
    return zero if clock_of == clock_id() else time.monotonic_ns() - now


class RendezvousStore(dist.Store):
    """The job's store for one rendezvous of gloo: `over` ends its waits for the other members."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.over = threading.Event()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises RuntimeError once the rendezvous is over."""
        while not self._store.check(keys):
            if self.over.wait(MEMBER_POLL_S):
                raise RuntimeError("the rendezvous is over")


def make_group(
    name: str, store: dist.Store, place: int, size: int, is_over: Callable[[], bool]
) -> dist.ProcessGroup | None:
    """Make a process group on gloo; return it once all members are there, or None once `is_over()`
    is true.

    Args: name, the same at all members and used once; place, the rank in the group.
    Raises: RuntimeError if gloo cannot connect the members: one may have failed.
    """
    own = RendezvousStore(store)

    def connect() -> dist.ProcessGroup:
        # `own` has to live until the group is made: gloo refers to its part in C++ only
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", own), place, size, NO_TIMEOUT)
        return cast("dist.ProcessGroup", gloo)

    group = call_unless_over(connect, is_over)
    if group is None:
        own.over.set()
    return group


def make_nccl_group(store: dist.Store, rank: int, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Make the process group of some ranks on NCCL; each member calls it once."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NO_TIMEOUT
    name = "-".join(map(str, members))
    own_store = dist.PrefixStore(f"nccl/{name}/", store)
    place = members.index(rank)
    return cast("dist.ProcessGroup", dist.ProcessGroupNCCL(own_store, place, len(members), options))


def clock_key(epoch: int) -> str:
    """Return the key of the job's store at which members publish the run's clock to joining
    workers.
    """
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
    Raises: RuntimeError if gloo cannot connect the members: one may have failed.
    """
    if len(members) == 1:
        return None
    store.set(clock_key(epoch.number), describe_clock(now_ns()))
    name = f"epoch/{epoch.number}"
    return make_group(name, store, members.index(rank), len(members), is_over)


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

    The call runs in a thread. After None this thread remains until the call returns, forever if it
    is blocked in gloo.
    Raises: the error of `call`.
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


def pair_key(server: int, worker: int, incarnation: int) -> str:
    """Return the name of the group of a server and a joining worker.

    It is also the key of the job's store at which the server announces itself, with the run's clock
    as the value.
    """
    return f"pair/{server}/{worker}/{incarnation}"


def admit_worker(
    store: dist.Store,
    server: int,
    worker: int,
    incarnation: int,
    now_ns: int,
    is_over: Callable[[], bool],
) -> dist.ProcessGroup | None:
    """Make the group of a server with a joining worker; called at the server.

    Args: now_ns, run time.
    Returns: None once `is_over()` is true.   Raises: as `make_group`.
    """
    name = pair_key(server, worker, incarnation)
    store.set(name, describe_clock(now_ns))
    return make_group(name, store, SERVER, 2, is_over)


def join_servers(
    store: dist.Store,
    servers: Iterable[int],
    worker: int,
    incarnation: int,
    is_over: Callable[[], bool],
) -> tuple[dict[int, dist.ProcessGroup], int] | None:
    """Connect a joining worker to its servers, one after the other; called at the worker.

    Returns: (group with each server, zero of the run's clock in this process's monotonic
    nanoseconds); None if the run ends before.
    """
    groups, zero_ns = dict[int, dist.ProcessGroup](), 0
    for server in servers:
        name = pair_key(server, worker, incarnation)
        while not store.check([name]):
            if is_over():
                return None
            time.sleep(POLL_S)
        zero_ns = parse_zero(store.get(name))
        group = make_group(name, store, JOINER, 2, is_over)
        if group is None:
            return None
        groups[server] = group
    return groups, zero_ns

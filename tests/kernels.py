"""A small coroutine on either kernel: in virtual time, and on gloo processes of this machine."""

import multiprocessing as mp
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster, RealCluster
from ashl.cluster.speed import Speed
from ashl.run.authenticated_store import (
    Secret,
    StoreAddress,
    StoreClient,
    StoreServer,
)
from ashl.runtime.process import TorchKernel
from ashl.runtime.rank_context import RankContext
from ashl.runtime.records import Record, Rounds, Snapshot, TimeTotals
from ashl.runtime.sim import Sim
from ashl.runtime.throttle import Nics, Throttle
from ashl.runtime.transport import NO_TIMEOUT
from ashl.size_only import Vector

SECRET = Secret(bytes(32))
DENSE = 4000  # bytes of the model that `exchange_s` is declared for
Main = Callable[[RankContext], Coroutine]


class Quiet:
    """An observer that keeps the ledgers."""

    rounds: Rounds = "none"

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.totals: dict[int, dict[str, int]] = {}

    def emit(self, record: Record) -> None:
        if isinstance(record, TimeTotals):
            self.totals[record.rank] = record.totals_ns

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None: ...


class Ended(NamedTuple):
    """Return value or error of a rank, with its time by class in seconds."""

    result: Any
    error: str | None
    spent: dict[str, float]


def in_virtual_time(main: Main, machines: Cluster, ranks: int | None = None) -> list[Ended]:
    seen = Quiet()
    ranks = ranks or machines.num_workers
    sim = Sim(ranks, Speed(machines, 1, 0), make_network(machines, DENSE), seen)
    results = sim.run(main, tick=lambda: None)
    return [
        Ended(result, None, in_seconds(seen.totals[rank])) for rank, result in enumerate(results)
    ]


def in_seconds(totals_ns: dict[str, int]) -> dict[str, float]:
    return {kind: ns / 1e9 for kind, ns in totals_ns.items()}


def on_processes(
    main: Main,
    machines: Cluster | RealCluster,
    ranks: int,
    groups: Sequence[tuple[int, ...]] = (),
    within_s: float = 60,
    synchronize: Callable[[], None] | None = None,
) -> list[Ended]:
    """`main` and `synchronize` are functions of a module; `groups` are given process groups of their
    own. All ranks are linked.
    """
    return started(play, ranks, within_s, main, machines, tuple(groups), synchronize)


def started(target: Callable[..., None], ranks: int, within_s: float, *args: object) -> list[Ended]:
    """Return the outcome of `target(end, port, rank, ranks, *args)` for each rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ashl.runtime.process"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(there, port, rank, ranks, *args))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        return [heard(end, within_s) for end in ends]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def heard(end: Connection, within_s: float) -> Ended:
    if not end.poll(within_s):
        return Ended(None, "still running", {})
    try:
        return Ended(*end.recv())
    except EOFError:
        return Ended(None, "died", {})


def play(
    end: Connection,
    port: int,
    rank: int,
    ranks: int,
    main: Main,
    machines: Any,
    groups: tuple[tuple[int, ...], ...],
    synchronize: Callable[[], None] | None,
) -> None:
    """One rank, in a process of its own, which leaves without destructors as those of a run do."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if rank == 0:
        server = StoreServer(SECRET, port=port)
        if isinstance(machines, Cluster) and machines.bandwidth_mbit_s is not None:
            server.handlers["nics"] = Nics(make_network(machines, DENSE)).call
    store = StoreClient(StoreAddress("127.0.0.1", port, SECRET), 30.0)
    store.limit_answers(600.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=NO_TIMEOUT)
    made = {group: dist.new_group(list(group), timeout=NO_TIMEOUT) for group in groups}
    seen = Quiet()
    kernel = TorchKernel(
        rank,
        seen,
        lambda clock: Throttle(machines, rank, 1, 0, DENSE, clock, store),
        peers=tuple(peer for peer in range(ranks) if peer != rank),
        max_bytes=100_000_000,
        exact=True,
        groups=made,
        synchronize=synchronize,
    )

    def played() -> tuple[Any, None, dict[str, float]]:
        result = kernel.run(main)
        store.set(f"done/{rank}", "1")
        store.wait([f"done/{peer}" for peer in range(ranks)])
        kernel.close_connections(5)
        return result, None, in_seconds(seen.totals[rank])

    say(end, store, rank, ranks, played)


def say(
    end: Connection, store: dist.Store, rank: int, ranks: int, played: Callable[[], tuple]
) -> NoReturn:
    """Send a rank's result or error, then exit."""
    try:
        end.send(played())
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < ranks:  # the store is in this process
            pass
    except Exception as error:
        traceback.print_exc()
        end.send((None, f"{type(error).__name__}: {error}", {}))
    os._exit(0)

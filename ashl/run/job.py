"""A job that others have started, torchrun say: its processes meet, one joins and records it, the others take part, and
all leave in order."""

import os
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from ashl.cluster.spec import RealCluster
from ashl.errors import AshlError, UsageError, plain
from ashl.learn.device import HOST
from ashl.plan.files import read_profile
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import pluralize
from ashl.planning.device import device_of, gpu_index, one_each
from ashl.planning.instantiate import Parts
from ashl.run import interface, watch
from ashl.run.attendance import PATIENCE_S, role
from ashl.run.checkpoints import Saved, Savings
from ashl.run.desk import POLL_S, Desk
from ashl.run.handshake import Hello, alike, digest, gathered, hello, publish
from ashl.run.launch import conduct
from ashl.run.monitor import Monitor
from ashl.run.parts import give
from ashl.run.placing import Wanted, check_gpus, check_profile, placed, server_note, shares_a_node, wanted_by
from ashl.run.rank import Place, play
from ashl.run.sealed import Sealed, Secret, shared_secret
from ashl.run.starter import Membership
from ashl.runtime.meeting import watched
from ashl.runtime.news import End
from ashl.runtime.plane import NEVER, first_line

T = TypeVar("T")


class Seat(NamedTuple):
    """What a process of a job knows once all have met."""

    job: Membership
    store: Sealed
    place: Place
    notes: tuple[str, ...]  # what is worth saying of who is where
    beside: tuple[Place, ...] = ()  # of a server, or coordinator, that has no process and is a child of process 0


def enter(plan: Plan, parts: Parts, config: Mapping[str, Any], job: Membership) -> Seat:
    """Meet the others, and find out who plays which rank. Raises AshlError, in all processes, where that cannot be."""
    runtime = parts.runtime
    if interface.is_loopback(job.host):
        interface.check_loopback(f"MASTER_ADDR={job.host}")
    with telling(job):
        chosen = interface.named(runtime.interface) or interface.towards(job.host, job.port)
        device = device_of(runtime, job.local_rank or 0)
    text = alike(config, plan.to_json())
    own = hello(
        job,
        plan=digest(text),
        device=device,
        gpu=gpu_index(device),
        address=chosen and chosen.address,
        interface_by=chosen and chosen.by,
    )
    store, came = met(job, own, text, runtime.heartbeat_timeout_s)
    try:
        check_interfaces(came)
        processes, note = seated(plan, parts, config["profile"], came)
        check_gpus(came, processes[: plan.num_workers], bool(runtime.share_gpu))
        gpus = [peer.gpu and (peer.machine, peer.gpu) for peer in (came[process] for process in processes)]
        apart = one_each(gpus, runtime)
    except UsageError:
        leave(store, job)
        raise
    elsewhere = [peer.address for peer in came if peer.machine != own.machine]
    rank = processes.index(job.rank)
    if rank >= plan.num_workers and gpus[rank] in gpus[:rank]:
        device = HOST  # the GPU is a worker's
    through = interface.reaching(chosen, elsewhere) if elsewhere else chosen
    where = job.host, job.port, secret_of(job), came[0].host
    place = Place(rank, *where, ".", config["tracking"]["events"], False, through, device, apart)
    place = place._replace(keeps=config["run"]["checkpoint_s"] is not None)
    beside = [place._replace(rank=other) for other in range(rank + 1, plan.num_ranks) if processes[other] == job.rank]
    if beside and gpus[rank] is not None:
        beside = [other._replace(device=HOST) for other in beside]  # the GPU is the worker's
    return Seat(job, store, place, note, tuple(beside))


def seated(
    plan: Plan, parts: Parts, path: str | None, came: tuple[Hello, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The process of each rank of the plan, and what is to be said of the one that is no worker's."""
    profile = read_profile(path) if path else None
    wanted = wanted_by(profile, came, wanted_places(parts), str(path))
    processes = placed(came, plan.num_workers, plan.num_ranks, wanted)
    check_profile(profile, came, processes, str(path))
    shared = shares_a_node(came, plan.num_ranks)
    return processes, server_notes(plan, came[processes[-1]].host, wanted, profile, str(path), shared)


def wanted_places(parts: Parts) -> Wanted:
    """Where workers and server are wanted by the configuration."""
    cluster = parts.cluster
    return Wanted(cluster.hosts, server=cluster.server_host) if isinstance(cluster, RealCluster) else Wanted()


def foreseen(plan: Plan, parts: Parts, path: str | None, size: int) -> tuple[str, ...]:
    """What is to be said of the server before the processes, so many, have met."""
    wanted, profile = wanted_places(parts), read_profile(path) if path else None
    host = wanted.server
    if profile is not None and profile.server_host is not None and wanted == Wanted():
        host, wanted = profile.server_host, Wanted((), f"profile={path}")
    return server_notes(plan, host, wanted, profile, str(path), plan.num_ranks > size)


def server_notes(
    plan: Plan, host: str | None, wanted: Wanted, profile: Profile | None, path: str, shared: bool
) -> tuple[str, ...]:
    """How many workers there are beside a server or coordinator, where that is, and what has decided it."""
    if plan.num_ranks == plan.num_workers:
        return ()
    who = role(plan, plan.num_workers).partition(" (")[0]
    count = f"the job is {pluralize(plan.num_workers, 'worker', 'workers')} and {who.replace('the', 'a', 1)}"
    return count, server_note(who, host, wanted, profile, path, shared)


def check_interfaces(came: tuple[Hello, ...]) -> None:
    """Raises UsageError where one is set to use loopback, and others are on other machines."""
    for peer in came:
        there = next((other for other in came if other.machine != peer.machine), None)
        if there and peer.interface_by and peer.address and interface.is_loopback(peer.address):
            raise UsageError(
                f"{peer.interface_by} of rank {peer.rank} on {peer.host} names loopback, and rank {there.rank} is on "
                f"{there.host}; name the interface between them, or drop it"
            )


def met(job: Membership, own: Hello, text: str, timeout_s: float) -> tuple[Sealed, tuple[Hello, ...]]:
    """The job's store, and what everybody says in it."""

    def meet() -> tuple[Sealed, tuple[Hello, ...]]:
        store = connect(job, timeout_s)
        try:
            publish(store, own, text)
            return store, gathered(store, job, timeout_s)
        except AshlError:
            leave(store, job)
            raise

    late = f"the master {job.host}:{job.port} does not answer as a job's store does; is another program using the port?"
    return within(2 * timeout_s + PATIENCE_S, meet, late)


def within(limit_s: float, act: Callable[[], T], late: str) -> T:
    """What `act` returns or raises. What the store does cannot be interrupted, so that another thread waits for it.
    Raises AshlError where it takes longer."""
    awake = watch.Awake()
    outcome = watched(act, lambda: awake.passed_s() > limit_s)
    if outcome is None:
        raise AshlError(late)
    return outcome


@contextmanager
def waited_for(plan: Plan, seat: Seat | None) -> Generator[None]:
    """What keeps the process of rank 0 from beginning, once all have met, is reported to the others."""
    try:
        yield
    except AshlError as error:
        if seat is not None:
            call_off(plan, seat, End(error.exit_code, plain(str(error))))
        raise


def call_off(plan: Plan, seat: Seat, end: End) -> None:
    """All have met, and the run does not begin."""
    desk = Desk(seat.store.another(), plan.num_ranks, plan.num_params)
    desk.close(end, here=[place.rank for place in (seat.place, *seat.beside)])
    leave(seat.store, seat.job)


@contextmanager
def telling(job: Membership | None) -> Generator[None]:
    """What keeps this process from taking part is reported to the others, who would wait for it."""
    try:
        yield
    except AshlError as error:
        if job is not None:
            with suppress(AshlError):
                met(job, hello(job, error=plain(str(error)), exit_code=error.exit_code), "", PATIENCE_S)
        raise


def secret_of(job: Membership) -> Secret:
    return shared_secret(job.port, os.environ.get("TORCHELASTIC_RUN_ID", ""), job.attempt)


def connect(job: Membership, timeout_s: float) -> Sealed:
    """The job's store. Raises AshlError where its port is taken, or nobody answers there in time."""
    master = job.rank == 0 and not job.agent_store
    if not master:
        await_master(job, timeout_s)
    try:
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(job.host, job.port, is_master=master, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        if master and "EADDRINUSE" in str(error):
            raise UsageError(
                f"the port {job.port} (MASTER_PORT) is taken on {socket.gethostname()}; choose another, or end the job "
                "that has it"
            ) from error
        raise AshlError(
            f"the master {job.host}:{job.port} does not answer as a job's store does ({first_line(error)}); is another "
            "program using the port?"
        ) from error
    store.set_timeout(NEVER)
    return Sealed(store, secret_of(job))


def await_master(job: Membership, timeout_s: float) -> None:
    """Wait until something listens there."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((job.host, job.port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                unknown = isinstance(error, socket.gaierror)
                raise AshlError(
                    f"the master {job.host}:{job.port} (MASTER_ADDR, MASTER_PORT) did not answer within {timeout_s:g} "
                    f"s (runtime.heartbeat_timeout_s): {error.strerror or error}; is rank 0 running, and "
                    + ("known here by that name (torchrun --local-addr)?" if unknown else "reachable?")
                ) from error
        time.sleep(3 * POLL_S)


def join(
    plan: Plan, run_dir: Path, monitor: Monitor, seat: Seat, savings: Savings, saved: Saved | None = None
) -> dict | None:
    """The process of rank 0 of the job: its rank of the plan is a child, so that evaluating snapshots and writing
    records never hold it up, and so is a server that has no process of its own. Where ranks keep their parts of
    checkpoints, the others are given theirs of the one that counts, as this process alone has the run folder. See
    `conduct`."""
    places = [
        place._replace(run_dir=str(run_dir), rounds=monitor.rounds, log=True) for place in (seat.place, *seat.beside)
    ]
    if saved is not None:
        places = [place._replace(saved=str(saved.folder), since_ns=saved.time_ns) for place in places]
    for rank in set(range(plan.num_ranks)) - {place.rank for place in places} if seat.place.keeps else ():
        give(seat.store, rank, saved)
    return conduct(plan, run_dir, monitor, seat.store.another(), places, savings)


def take_part(plan: Plan, seat: Seat) -> int:
    """Any other process of the job: it plays its rank here; returns the exit code. Where the run goes on without it,
    that is no failure to torchrun, which would end all others."""

    def dropped(end: End) -> NoReturn:
        watch.leave(end._replace(code=0) if seat.job.agent_store else end)

    return play(seat.place, plan.to_json(), dropped).code


def leave(store: Sealed, job: Membership) -> None:
    """Whoever keeps the store outlives the others' last question to it."""
    store.set(f"out/{job.rank}", "1")
    if job.rank != 0 or job.agent_store:
        return
    others = [f"out/{rank}" for rank in range(job.world_size) if rank != job.rank]
    end = time.monotonic() + PATIENCE_S
    while others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_S)

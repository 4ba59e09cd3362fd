"""A job that others have started, torchrun say: its processes meet, one joins and records it, the
others take part, and all leave in order.
"""

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
from ashl.planning.device import device_of, gpu_index, have_own_gpus
from ashl.planning.instantiate import Parts
from ashl.run import interface, membership_listener
from ashl.run.authenticated_store import AuthenticatedStore, Secret, shared_secret
from ashl.run.checkpoints import Checkpoint, CheckpointManager
from ashl.run.control_channel import POLL_S, ControlChannel
from ashl.run.handshake import (
    Hello,
    PlacementRequest,
    assign_ranks,
    check_gpus,
    check_profile,
    digest,
    gather_hellos,
    make_hello,
    placement_by_profile,
    publish_hello,
    server_note,
    settings_in_common,
    shares_a_node,
)
from ashl.run.launch import run_controller
from ashl.run.launcher_env import JobMembership
from ashl.run.monitor import Monitor
from ashl.run.rank import RankSettings, role_name, run_rank
from ashl.run.supervisor import PATIENCE_S
from ashl.run.uploads import send_restore_point
from ashl.runtime.control_messages import End
from ashl.runtime.rendezvous import call_unless_failed
from ashl.runtime.transport import NEVER, first_line

T = TypeVar("T")


class ProcessAssignment(NamedTuple):
    """What a process of a job knows once all have met."""

    job: JobMembership
    store: AuthenticatedStore
    settings: RankSettings
    notes: tuple[str, ...]  # what is worth saying of who is where
    colocated: tuple[
        RankSettings, ...
    ] = ()  # of a server, or coordinator, that has no process and is a child of process 0


def join_job(
    plan: Plan, parts: Parts, config: Mapping[str, Any], job: JobMembership
) -> ProcessAssignment:
    """Meet the others, and find out who plays which rank. Raises AshlError, in all processes, where
    that cannot be.
    """
    runtime = parts.runtime
    if interface.is_loopback(job.host):
        interface.check_loopback(f"MASTER_ADDR={job.host}")
    with reporting_error_to_job(job):
        chosen = interface.named(runtime.interface) or interface.towards(job.host, job.port)
        device = device_of(runtime, job.local_rank or 0)
    text = settings_in_common(config, plan.to_json())
    own = make_hello(
        job,
        plan=digest(text),
        device=device,
        gpu=gpu_index(device),
        address=chosen and chosen.address,
        interface_by=chosen and chosen.by,
    )
    store, hellos = meet_processes(job, own, text, runtime.heartbeat_timeout_s)
    try:
        check_interfaces(hellos)
        processes, note = assign_processes(plan, parts, config["profile"], hellos)
        check_gpus(hellos, processes[: plan.num_workers], bool(runtime.share_gpu))
        gpus = [
            peer.gpu and (peer.machine, peer.gpu)
            for peer in (hellos[process] for process in processes)
        ]
        apart = have_own_gpus(gpus, runtime)
    except UsageError:
        leave_job(store, job)
        raise
    elsewhere = [peer.address for peer in hellos if peer.machine != own.machine]
    rank = processes.index(job.rank)
    if rank >= plan.num_workers and gpus[rank] in gpus[:rank]:
        device = HOST  # the GPU is a worker's
    through = interface.reaching(chosen, elsewhere) if elsewhere else chosen
    where = job.host, job.port, job_secret(job), hellos[0].host
    settings = RankSettings(
        rank, *where, ".", config["tracking"]["events"], False, through, device, apart
    )
    settings = settings._replace(saves_checkpoints=config["run"]["checkpoint_s"] is not None)
    colocated = [
        settings._replace(rank=other)
        for other in range(rank + 1, plan.num_ranks)
        if processes[other] == job.rank
    ]
    if colocated and gpus[rank] is not None:
        colocated = [other._replace(device=HOST) for other in colocated]  # the GPU is the worker's
    return ProcessAssignment(job, store, settings, note, tuple(colocated))


def assign_processes(
    plan: Plan, parts: Parts, path: str | None, hellos: tuple[Hello, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The process of each rank of the plan, and what is to be said of the one that is no
    worker's.
    """
    profile = read_profile(path) if path else None
    request = placement_by_profile(profile, hellos, placement_of(parts), str(path))
    processes = assign_ranks(hellos, plan.num_workers, plan.num_ranks, request)
    check_profile(profile, hellos, processes, str(path))
    shared = shares_a_node(hellos, plan.num_ranks)
    return processes, server_notes(
        plan, hellos[processes[-1]].host, request, profile, str(path), shared
    )


def placement_of(parts: Parts) -> PlacementRequest:
    """Where workers and server are wanted by the configuration."""
    cluster = parts.cluster
    return (
        PlacementRequest(cluster.hosts, server=cluster.server_host)
        if isinstance(cluster, RealCluster)
        else PlacementRequest()
    )


def notes_before_start(plan: Plan, parts: Parts, path: str | None, size: int) -> tuple[str, ...]:
    """What is to be said of the server before the processes, so many, have met."""
    request, profile = placement_of(parts), read_profile(path) if path else None
    host = request.server
    if profile is not None and profile.server_host is not None and request == PlacementRequest():
        host, request = profile.server_host, PlacementRequest((), f"profile={path}")
    return server_notes(plan, host, request, profile, str(path), plan.num_ranks > size)


def server_notes(
    plan: Plan,
    host: str | None,
    request: PlacementRequest,
    profile: Profile | None,
    path: str,
    shared: bool,
) -> tuple[str, ...]:
    """How many workers there are beside a server or coordinator, where that is, and what has
    decided it.
    """
    if plan.num_ranks == plan.num_workers:
        return ()
    who = role_name(plan, plan.num_workers).partition(" (")[0]
    count = (
        f"the job is {pluralize(plan.num_workers, 'worker', 'workers')} and"
        f" {who.replace('the', 'a', 1)}"
    )
    return count, server_note(who, host, request, profile, path, shared)


def check_interfaces(hellos: tuple[Hello, ...]) -> None:
    """Raises UsageError where one is set to use loopback, and others are on other machines."""
    for peer in hellos:
        there = next((other for other in hellos if other.machine != peer.machine), None)
        if there and peer.interface_by and peer.address and interface.is_loopback(peer.address):
            raise UsageError(
                f"{peer.interface_by} of rank {peer.rank} on {peer.host} names loopback, and rank"
                f" {there.rank} is on {there.host}; name the interface between them, or drop it"
            )


def meet_processes(
    job: JobMembership, own: Hello, text: str, timeout_s: float
) -> tuple[AuthenticatedStore, tuple[Hello, ...]]:
    """The job's store, and what everybody says in it."""

    def meet() -> tuple[AuthenticatedStore, tuple[Hello, ...]]:
        store = connect_store(job, timeout_s)
        try:
            publish_hello(store, own, text)
            return store, gather_hellos(store, job, timeout_s)
        except AshlError:
            leave_job(store, job)
            raise

    late = (
        f"the master {job.host}:{job.port} does not answer as a job's store does; is another"
        " program using the port?"
    )
    return call_within(2 * timeout_s + PATIENCE_S, meet, late)


def call_within(limit_s: float, act: Callable[[], T], late: str) -> T:
    """What `act` returns or raises. What the store does cannot be interrupted, so that another
    thread waits for it. Raises AshlError where it takes longer.
    """
    awake = membership_listener.AwakeTime()
    outcome = call_unless_failed(act, lambda: awake.passed_s() > limit_s)
    if outcome is None:
        raise AshlError(late)
    return outcome


@contextmanager
def aborting_job_on_error(plan: Plan, assignment: ProcessAssignment | None) -> Generator[None]:
    """What keeps the process of rank 0 from beginning, once all have met, is reported to the
    others.
    """
    try:
        yield
    except AshlError as error:
        if assignment is not None:
            abort_job(plan, assignment, End(error.exit_code, plain(str(error))))
        raise


def abort_job(plan: Plan, assignment: ProcessAssignment, end: End) -> None:
    """All have met, and the run does not begin."""
    channel = ControlChannel(assignment.store.another(), plan.num_ranks, plan.num_params)
    channel.close(
        end, here=[settings.rank for settings in (assignment.settings, *assignment.colocated)]
    )
    leave_job(assignment.store, assignment.job)


@contextmanager
def reporting_error_to_job(job: JobMembership | None) -> Generator[None]:
    """What keeps this process from taking part is reported to the others, who would wait for it."""
    try:
        yield
    except AshlError as error:
        if job is not None:
            with suppress(AshlError):
                meet_processes(
                    job,
                    make_hello(job, error=plain(str(error)), exit_code=error.exit_code),
                    "",
                    PATIENCE_S,
                )
        raise


def job_secret(job: JobMembership) -> Secret:
    return shared_secret(job.port, os.environ.get("TORCHELASTIC_RUN_ID", ""), job.attempt)


def connect_store(job: JobMembership, timeout_s: float) -> AuthenticatedStore:
    """The job's store. Raises AshlError where its port is taken, or nobody answers there
    in time.
    """
    master = job.rank == 0 and not job.agent_store
    if not master:
        await_master(job, timeout_s)
    try:
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            job.host, job.port, is_master=master, wait_for_workers=False, timeout=limit
        )
    except RuntimeError as error:
        if master and "EADDRINUSE" in str(error):
            raise UsageError(
                f"the port {job.port} (MASTER_PORT) is taken on {socket.gethostname()}; choose"
                " another, or end the job that has it"
            ) from error
        raise AshlError(
            f"the master {job.host}:{job.port} does not answer as a job's store does"
            f" ({first_line(error)}); is another program using the port?"
        ) from error
    store.set_timeout(NEVER)
    return AuthenticatedStore(store, job_secret(job))


def await_master(job: JobMembership, timeout_s: float) -> None:
    """Wait until something listens there."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(
                (job.host, job.port), timeout=max(0.1, end - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                unknown = isinstance(error, socket.gaierror)
                raise AshlError(
                    f"the master {job.host}:{job.port} (MASTER_ADDR, MASTER_PORT) did not answer"
                    f" within {timeout_s:g} s (runtime.heartbeat_timeout_s):"
                    f" {error.strerror or error}; is rank 0 running, and "
                    + (
                        "known here by that name (torchrun --local-addr)?"
                        if unknown
                        else "reachable?"
                    )
                ) from error
        time.sleep(3 * POLL_S)


def run_as_controller(
    plan: Plan,
    run_dir: Path,
    monitor: Monitor,
    assignment: ProcessAssignment,
    checkpoint_manager: CheckpointManager,
    saved: Checkpoint | None = None,
) -> dict | None:
    """The process of rank 0 of the job: its rank of the plan is a child, so that evaluating
    snapshots and writing records never hold it up, and so is a server that has no process of its
    own. Where ranks keep their parts of checkpoints, the others are given theirs of the one that
    counts, as this process alone has the run folder. See `run_controller`.
    """
    rank_settings = [
        settings._replace(run_dir=str(run_dir), rounds=monitor.rounds, log=True)
        for settings in (assignment.settings, *assignment.colocated)
    ]
    if saved is not None:
        rank_settings = [
            settings._replace(saved=str(saved.folder), since_ns=saved.time_ns)
            for settings in rank_settings
        ]
    for rank in (
        set(range(plan.num_ranks)) - {settings.rank for settings in rank_settings}
        if assignment.settings.saves_checkpoints
        else ()
    ):
        send_restore_point(assignment.store, rank, saved)
    return run_controller(
        plan, run_dir, monitor, assignment.store.another(), rank_settings, checkpoint_manager
    )


def run_as_rank(plan: Plan, assignment: ProcessAssignment) -> int:
    """Any other process of the job: it plays its rank here; returns the exit code. Where the run
    goes on without it, that is no failure to torchrun, which would end all others.
    """

    def exit_evicted(end: End) -> NoReturn:
        membership_listener.exit_process(
            end._replace(code=0) if assignment.job.agent_store else end
        )

    return run_rank(assignment.settings, plan.to_json(), exit_evicted).code


def leave_job(store: AuthenticatedStore, job: JobMembership) -> None:
    """Whoever keeps the store outlives the others' last question to it."""
    store.set(f"out/{job.rank}", "1")
    if job.rank != 0 or job.agent_store:
        return
    others = [f"out/{rank}" for rank in range(job.world_size) if rank != job.rank]
    end = time.monotonic() + PATIENCE_S
    while others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_S)

"""A job of another launcher, for example torchrun: its processes join, run their ranks and exit.

Process i is the process with RANK=i in the launcher's environment. Its rank in the plan may differ:
placement assigns the ranks of the plan to processes.

A process that an engine has restarted finds the hello of the earlier process of its rank. It asks
the controller for the place of that failed worker (`take_place`), and rejoins as `ashl join` does.

States of a process: it joins the store and runs the handshake (`join_job`, `ashl.run.handshake`),
which assigns its rank of the plan. Process 0 then runs the controller, with its rank as a child
process (`run_as_controller`); every other process runs its rank itself (`run_as_rank`).

Failures: a process that cannot take part reports its error in the handshake
(`reporting_error_to_job`), so that the others do not wait for it. After the handshake, process 0
reports its errors through the control channel (`aborting_job_on_error`).
"""

import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from ashl.cluster.spec import RealCluster
from ashl.config.parent import end_with_parent
from ashl.errors import AshlError, UsageError, plain
from ashl.launch.environment import JobMembership, resolve
from ashl.launch.job import SECRET
from ashl.learn.device import HOST
from ashl.plan.files import read_profile
from ashl.plan.plan import Plan
from ashl.plan.profile import Profile
from ashl.planning.compatibility import pluralize
from ashl.planning.device import device_of, gpu_index, have_own_gpus
from ashl.planning.instantiate import Parts
from ashl.run import interface
from ashl.run.authenticated_store import (
    AuthenticatedStore,
    Secret,
    StoreClient,
    StoreServer,
    secret_file,
    shared_secret,
)
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
from ashl.run.join import publish_join_endpoint, request_place
from ashl.run.launch import run_controller
from ashl.run.membership_listener import call_within, exit_process
from ashl.run.monitor import Monitor
from ashl.run.rank import RankSettings, role_name, run_rank
from ashl.run.supervisor import PATIENCE_S
from ashl.runtime.records import End
from ashl.runtime.transport import first_line


class ProcessAssignment(NamedTuple):
    """A process's place in a job, after the handshake."""

    job: JobMembership
    store: AuthenticatedStore
    settings: RankSettings
    notes: tuple[str, ...]  # about the placement of ranks, for the user
    # at process 0: server or coordinator ranks without a process of their own, which it starts
    colocated: tuple[RankSettings, ...] = ()


def join_job(
    plan: Plan, parts: Parts, config: Mapping[str, Any], job: JobMembership
) -> ProcessAssignment:
    """Run the handshake with the other processes, and return this process's assignment.

    Raises: AshlError or UsageError, in all processes, if they cannot run this plan.
    """
    runtime = parts.runtime
    job = job._replace(host=resolve_master(job, runtime.heartbeat_timeout_s))
    if interface.is_loopback(job.host):
        interface.check_loopback(f"MASTER_ADDR={job.host}")
    with reporting_error_to_job(job):
        chosen = interface.named(runtime.interface) or interface.towards(job.host, job.port)
        device = device_of(runtime, job.local_rank or 0)
    if job.agent_store:  # torchrun's agent may be killed, and ranks have sessions of their own
        end_with_parent()
    text = settings_in_common(config, plan.to_json())
    own = make_hello(
        job,
        plan=digest(text),
        device=device,
        gpu=gpu_index(device),
        address=chosen and chosen.address,
        interface_by=chosen and chosen.by,
    )
    store, hellos, is_first = meet_processes(job, own, text, runtime.heartbeat_timeout_s)
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
        device = HOST  # a worker uses the GPU
    through = interface.reaching(chosen, elsewhere) if elsewhere else chosen
    settings = RankSettings(
        rank=rank,
        host=job.host,
        port=store.port,
        secret=job_secret(job),
        run_dir=".",
        rounds=config["tracking"]["events"],
        log=False,
        interface=through,
        device=device,
        have_own_gpus=apart,
        checkpoint_s=config["run"]["checkpoint_s"],
    )
    if not is_first:
        settings = take_place(store, settings, hellos[job.rank], runtime.heartbeat_timeout_s)
    colocated = [
        settings._replace(rank=other)
        for other in range(rank + 1, plan.num_ranks)
        if processes[other] == job.rank
    ]
    if colocated and gpus[rank] is not None:
        # the worker of this process uses the GPU
        colocated = [other._replace(device=HOST) for other in colocated]
    return ProcessAssignment(job, store, settings, note, tuple(colocated))


def take_place(
    store: AuthenticatedStore, settings: RankSettings, earlier: Hello, timeout_s: float
) -> RankSettings:
    """Return the settings of a restarted process: those of the next incarnation of its worker.

    Waits until the controller has noticed that the earlier process has failed.
    Raises: AshlError if it has not within `timeout_s`, or the run admits no process.
    """
    answer = request_place(store, settings.rank, again_s=timeout_s)
    if answer.refused is not None:
        raise AshlError(
            f"a process of rank {earlier.rank} is there already, on {earlier.host}, and this one"
            f" cannot take its place: {answer.refused}; give every process a rank of its own, and"
            " every job a MASTER_PORT of its own"
        )
    return settings._replace(incarnation=answer.incarnation)


def assign_processes(
    plan: Plan, parts: Parts, path: str | None, hellos: tuple[Hello, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return (process by rank of the plan, notes about the server's placement).

    Args: path, of the profile file, or None.
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
    """Return the hosts on which the configuration places workers and server."""
    cluster = parts.cluster
    return (
        PlacementRequest(cluster.hosts, server=cluster.server_host)
        if isinstance(cluster, RealCluster)
        else PlacementRequest()
    )


def notes_before_start(plan: Plan, parts: Parts, path: str | None, size: int) -> tuple[str, ...]:
    """Return the notes about the server's placement before a job of `size` processes starts.

    Args: path, of the profile file, or None.
    """
    request = placement_of(parts)
    profile = read_profile(path) if path else None
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
    """Return two notes: how many workers and which server or coordinator the job has, and the
    host of that server with the reason. Without a server there are no notes.

    Args: host, None if unknown; shared, True if the server has no process of its own in the job.
    """
    if plan.num_ranks == plan.num_workers:
        return ()
    role = role_name(plan, plan.num_workers).partition(" (")[0]
    count = (
        f"the job is {pluralize(plan.num_workers, 'worker', 'workers')} and"
        f" {role.replace('the', 'a', 1)}"
    )
    return count, server_note(role, host, request, profile, path, shared)


def check_interfaces(hellos: tuple[Hello, ...]) -> None:
    """Raise UsageError if a process uses loopback by configuration in a job on several machines."""
    for peer in hellos:
        there = next((other for other in hellos if other.machine != peer.machine), None)
        if there and peer.interface_by and peer.address and interface.is_loopback(peer.address):
            raise UsageError(
                f"{peer.interface_by} of rank {peer.rank} on {peer.host} names loopback, and rank"
                f" {there.rank} is on {there.host}; name the interface between them, or drop it"
            )


def meet_processes(
    job: JobMembership, own: Hello, text: str, timeout_s: float
) -> tuple[AuthenticatedStore, tuple[Hello, ...], bool]:
    """Return (store of the job, hellos of all processes by process, True if this process is the
    first one of its rank).

    Args: own and text, this process's hello and the settings that must be equal in all processes;
    timeout_s, in seconds, for the master and again for the hellos.
    Raises: AshlError if the master does not answer, or the processes do not fit together.
    """

    def meet() -> tuple[AuthenticatedStore, tuple[Hello, ...], bool]:
        store = connect_store(job, timeout_s)
        try:
            is_first = publish_hello(store, own, text)
            return store, gather_hellos(store, job, timeout_s), is_first
        except AshlError:
            leave_job(store, job)
            raise

    late = (
        f"the master {job.host}:{job.port} does not answer as a job's store does; is another"
        " program using the port?"
    )
    return call_within(2 * timeout_s + PATIENCE_S, meet, late)


@contextmanager
def aborting_job_on_error(plan: Plan, assignment: ProcessAssignment | None) -> Generator[None]:
    """Abort the job if process 0 raises AshlError after the handshake; raise the error again."""
    try:
        yield
    except AshlError as error:
        if assignment is not None:
            abort_job(plan, assignment, End(error.exit_code, plain(str(error))))
        raise


def abort_job(plan: Plan, assignment: ProcessAssignment, end: End) -> None:
    """Tell the other processes why the run does not begin, and leave the job.

    Limits: for process 0 only.
    """
    channel = ControlChannel(assignment.store.another(), plan.num_ranks, plan.num_params)
    channel.close(
        end, here=[settings.rank for settings in (assignment.settings, *assignment.colocated)]
    )
    leave_job(assignment.store, assignment.job)


@contextmanager
def reporting_error_to_job(job: JobMembership | None) -> Generator[None]:
    """Report an AshlError of this process in the handshake, and raise it again.

    All other processes then end with this error instead of waiting for this process. Limits: the
    report waits at most 3 · `PATIENCE_S` seconds; without a job nothing is reported.
    """
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
    """Return the secret that all processes of a job derive from the launcher's environment."""
    return shared_secret(job.port, os.environ.get("TORCHELASTIC_RUN_ID", ""), job.attempt)


def resolve_master(job: JobMembership, timeout_s: float) -> str:
    """Return a name or address of the master that resolves here.

    Raises: AshlError if there is none within `timeout_s` seconds; a new pod has no name at first.
    """
    end = time.monotonic() + timeout_s
    while (host := resolve(job.host, job.port)) is None:
        if time.monotonic() > end:
            raise AshlError(
                f"the master {job.host} (MASTER_ADDR) has no address here, after {timeout_s:g} s"
                " (runtime.heartbeat_timeout_s); set MASTER_ADDR to a name or address that every"
                " node knows (torchrun --local-addr)"
            )
        time.sleep(1.0)
    return host


def connect_store(job: JobMembership, timeout_s: float) -> AuthenticatedStore:
    """Return the job's store, which process 0 serves.

    Raises: UsageError if the port is taken; AshlError if the master does not answer within
    `timeout_s` seconds.
    """
    secret = job_secret(job)
    if job.rank != 0:
        try:
            port = exchange_port(job, None, timeout_s)
            return AuthenticatedStore(StoreClient(job.host, port, secret, timeout_s))
        except (OSError, RuntimeError) as error:
            raise AshlError(
                f"the master {job.host}:{job.port} (MASTER_ADDR, MASTER_PORT) did not answer as the"
                f" store of this job within {timeout_s:g} s (runtime.heartbeat_timeout_s):"
                f" {first_line(error)}; is rank 0 running and reachable, and has it the same secret"
                f" ({SECRET}, else {secret_file()})?"
            ) from error
    try:
        address = interface.own_address(job.host)
        server = StoreServer(secret, address, 0 if job.agent_store else job.port)
    except OSError as error:
        raise UsageError(
            f"the port {job.port} (MASTER_PORT) is taken on {socket.gethostname()}; choose another,"
            " or end the job that uses it"
        ) from error
    exchange_port(job, server.port, timeout_s)
    return AuthenticatedStore(server)


def exchange_port(job: JobMembership, port: int | None, timeout_s: float) -> int:
    """Return the port of the job's store: MASTER_PORT, unless an agent of torchrun uses that.

    Then process 0 publishes another one (`port`) in the store of the agent.
    Raises: RuntimeError if the agent does not answer, or the port is missing after `timeout_s`.
    """
    if not job.agent_store:
        return job.port
    limit = timedelta(seconds=max(1.0, timeout_s))
    agent = dist.TCPStore(job.host, job.port, is_master=False, timeout=limit)
    key, end = f"ashl/port/{job.attempt}", time.monotonic() + timeout_s
    if port is not None:
        agent.set(key, str(port))
        return port
    while not agent.check([key]):
        if time.monotonic() > end:
            raise RuntimeError("rank 0 has published no port")
        time.sleep(POLL_S)
    return int(agent.get(key))


def run_as_controller(
    plan: Plan,
    run_dir: Path,
    monitor: Monitor,
    assignment: ProcessAssignment,
    checkpoint_manager: CheckpointManager,
    saved: Checkpoint | None = None,
) -> dict | None:
    """Run the controller in process 0.

    Its rank of the plan runs in a child process, so that evaluation and records do not delay this
    rank. A server without a process of its own is a child as well.
    Returns and raises as `run_controller`.
    """
    rank_settings = [
        settings._replace(run_dir=str(run_dir), rounds=monitor.rounds, log=True)
        for settings in (assignment.settings, *assignment.colocated)
    ]
    own = assignment.settings
    with ExitStack() as stack:
        with aborting_job_on_error(plan, assignment):
            stack.enter_context(publish_join_endpoint(run_dir, own.host, own.port, own.secret))
        return run_controller(
            plan,
            run_dir,
            monitor,
            assignment.store.another(),
            rank_settings,
            checkpoint_manager,
            saved,
        )


def run_as_rank(plan: Plan, assignment: ProcessAssignment) -> int:
    """Run this process's rank, and return the exit code.

    If the run continues without this rank, the exit code under torchrun is 0, because torchrun ends
    all processes of a job after another code.
    """

    def exit_evicted(end: End) -> NoReturn:
        exit_process(end._replace(code=0) if assignment.job.agent_store else end)

    return run_rank(assignment.settings, plan.to_json(), exit_evicted).code


def leave_job(store: AuthenticatedStore, job: JobMembership) -> None:
    """Leave the job.

    Process 0, which serves the store, first waits until the others have left, for at most
    `PATIENCE_S` seconds.
    """
    store.set(f"out/{job.rank}", "1")
    if job.rank != 0:
        return
    others = [f"out/{rank}" for rank in range(job.world_size) if rank != job.rank]
    end = time.monotonic() + PATIENCE_S
    while others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_S)

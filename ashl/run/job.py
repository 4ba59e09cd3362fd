"""Run a job of another launcher, for example torchrun: its processes join, run their ranks, exit.

Process i is the process with RANK=i in the launcher's environment. Its rank in the plan may differ:
placement assigns the ranks of the plan to processes.

Every process asks process 0 for a place (`ashl.run.handshake`). Process 0 serves the job's store.
It checks that all processes fit together, and decides which process runs which rank (`lead_job`).
Then it runs the controller, which answers the requests, with its rank as a child process. Every
other process runs its rank itself (`run_as_rank`).

A process that the launcher has restarted asks in the same way. It waits until the controller has
noticed the failure of the earlier process of its rank, and rejoins as `ashl join` does.
"""

import os
import socket
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ashl.config.signals import end_with_parent
from ashl.device import HOST
from ashl.errors import AshlError, UsageError, to_one_line
from ashl.launch.environment import SECRET, JobMembership, resolve
from ashl.plan.files import read_profile
from ashl.plan.plan import Plan
from ashl.planning.device import device_of, gpu_index, have_own_gpus
from ashl.planning.instantiate import Parts
from ashl.run import interface
from ashl.run.authenticated_store import (
    StoreAddress,
    StoreClient,
    StoreServer,
    derive_port,
    secret_file,
    shared_secret,
)
from ashl.run.control_channel import PATIENCE_S
from ashl.run.handshake import (
    ERROR_BY_EXIT_CODE,
    RETRY_S,
    Hello,
    Place,
    PlaceRequests,
    assign_ranks,
    check_gpus,
    check_profile,
    make_hello,
    request_place,
    server_note,
    settings_in_common,
)
from ashl.run.launch import Lead
from ashl.run.rank import REJOINS, RankSettings, run_rank
from ashl.runtime.runtimes import wait_limit_s
from ashl.runtime.transport import first_line


def describe_process(
    plan: Plan, parts: Parts, config: Mapping[str, Any], job: JobMembership
) -> tuple[Hello, interface.Interface | None]:
    """Return (hello of this process, network interface of its messages).

    Raises: UsageError, in all processes of the job, if this one cannot run the plan.
    """
    with sharing_error(job):
        if interface.is_loopback(job.host):
            interface.check_loopback(f"MASTER_ADDR={job.host}")
        chosen = interface.choose_interface(parts.runtime.interface, job.host)
        device = device_of(parts.runtime, job.local_rank or 0)
    if job.agent_store:  # torchrun's agent, if killed, would leave this process running
        end_with_parent()
    hello = make_hello(
        job.rank,
        local_rank=job.local_rank,
        settings=settings_in_common(config, plan.to_json()),
        device=device,
        gpu=gpu_index(device),
        address=chosen and chosen.address,
    )
    return hello, chosen


def lead_job(plan: Plan, parts: Parts, config: Mapping[str, Any], job: JobMembership) -> Lead:
    """Gather the hellos of all processes at process 0, and decide which process runs which rank.

    Returns: the store, the rank of process 0, and the places for the other processes.
    Raises: AshlError or UsageError, in all processes, if they cannot run this plan.
    """
    timeout_s = wait_limit_s(plan.runtime)
    job = with_resolved_master(job, timeout_s)
    own, chosen = describe_process(plan, parts, config, job)
    store = serve_store(job)
    requests = PlaceRequests(store, own)
    with sharing_error(job, requests):
        hellos = requests.gather(job.world_size, timeout_s)
        hosts = getattr(parts.cluster, "hosts", None) or ()
        processes = assign_ranks(hellos, plan.num_workers, plan.num_ranks, hosts)
        path = config["profile"]
        check_profile(path and read_profile(path), hellos, processes, str(path))
        notes = server_note(plan, hellos[processes[-1]].host)
        check_gpus(hellos, processes[: plan.num_workers], bool(parts.runtime.share_gpu))
        gpus = [
            peer.gpu and (peer.node_id, peer.gpu)
            for peer in (hellos[process] for process in processes)
        ]
        apart = have_own_gpus(gpus, plan, parts)
    for rank, process in enumerate(processes):
        theirs = hellos[process]
        # if a worker and a server have the same GPU, only the worker uses it
        shared = rank >= plan.num_workers and gpus[rank] in gpus[:rank]
        settings = RankSettings(rank, device=HOST if shared else theirs.device, have_own_gpus=apart)
        others = [peer.address for peer in hellos if peer.node_id != theirs.node_id]
        requests.places[process] = Place(settings, tuple(filter(None, others)))
    requests.workers = {process: rank for rank, process in enumerate(processes)}
    # one rank of the plan is in this process's child, so that evaluation does not delay it
    settings = requests.places.pop(0).settings_here(own.device, chosen)
    return Lead(store, address_of(job), (settings,), requests, notes)


@contextmanager
def sharing_error(
    job: JobMembership | None, requests: PlaceRequests | None = None
) -> Generator[None]:
    """Share an AshlError of this process with all processes of the job, and raise it again.

    They end with this error instead of waiting for this process.
    Args: job, None if there are no other processes; requests, at process 0, once it receives them.
    """
    try:
        yield
    except AshlError as error:
        if job is not None:
            with suppress(AshlError, RuntimeError):
                share_error(job, requests, error)
        raise


def share_error(job: JobMembership, requests: PlaceRequests | None, error: AshlError) -> None:
    """Send an error of this process to process 0. At process 0, answer with it those processes that
    ask for a place within `PATIENCE_S` seconds; later ones find no store.
    """
    text = to_one_line(str(error))
    own = make_hello(job.rank, error=text, exit_code=error.exit_code)
    if job.rank > 0:
        connect_store(job, PATIENCE_S).call("join", own)
        return
    requests = requests or PlaceRequests(serve_store(job), own)
    # once ranks are assigned, `places` holds those of processes that have no answer yet
    waiting = len(requests.places) if requests.workers else job.world_size - 1
    requests.refuse_all(error, waiting)


def await_place(store: StoreClient, own: Hello, timeout_s: float) -> Place:
    """Wait for the place of a process other than process 0.

    If the rank had another process before, this one waits until the controller has noticed that
    process's failure, up to `timeout_s`. Then it gets the place of the next incarnation.
    Raises: AshlError with the reason if there is no place for it.
    """
    until_s = time.monotonic() + timeout_s
    try:
        while (place := request_place(store, own)) is None or (
            place.may_change and time.monotonic() < until_s
        ):
            time.sleep(RETRY_S)
    except RuntimeError as error:
        raise AshlError(
            f"the run did not begin, or it ended before this process got a place in it"
            f" ({first_line(error)})"
        ) from error
    if place.refused is not None:
        raise ERROR_BY_EXIT_CODE.get(place.exit_code, AshlError)(place.refused)
    return place


def with_resolved_master(job: JobMembership, timeout_s: float) -> JobMembership:
    """Return the job with a name or address of the master that resolves here.

    Raises: AshlError if there is none within `timeout_s` seconds; a new pod has no name at first.
    """
    end_s = time.monotonic() + timeout_s
    while (host := resolve(job.host)) is None:
        if time.monotonic() > end_s:
            raise AshlError(
                f"the master {job.host} (MASTER_ADDR) has no address here, after {timeout_s:g} s"
                " (runtime.wait_timeout_s); set MASTER_ADDR to a name or address that every"
                " node knows (torchrun --local-addr)"
            )
        time.sleep(1.0)
    return job._replace(host=host)


def address_of(job: JobMembership) -> StoreAddress:
    """Return the address of the job's store, with the secret that all processes of the job derive
    from the launcher's environment.

    The port is MASTER_PORT. If torchrun's agent listens there, the port follows from the secret.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    secret = shared_secret(job.port, run_id, job.attempt)
    return StoreAddress(job.host, derive_port(secret) if job.agent_store else job.port, secret)


def port_source(job: JobMembership) -> str:
    """Return the setting that decides the port of the job's store, for messages."""
    return "a port that follows from MASTER_PORT" if job.agent_store else "MASTER_PORT"


def connect_store(job: JobMembership, timeout_s: float) -> StoreClient:
    """Connect to the job's store, which process 0 serves.

    Raises: AshlError if the master does not answer within `timeout_s` seconds.
    """
    address = address_of(job)
    try:
        store = StoreClient(address, timeout_s)
    except OSError as error:
        raise AshlError(
            f"the master {job.host}:{address.port} (MASTER_ADDR, {port_source(job)}) did not answer"
            f" as the store of this job within {timeout_s:g} s (runtime.wait_timeout_s):"
            f" {first_line(error)}; is rank 0 running and reachable, and has it the same secret"
            f" ({SECRET}, else {secret_file()})?"
        ) from error
    store.limit_answers(max(timeout_s, 2 * PATIENCE_S))  # a join request takes up to PATIENCE_S
    return store


def serve_store(job: JobMembership) -> StoreServer:
    """Serve the job's store in process 0. Raises UsageError if the port is taken."""
    address = address_of(job)
    try:
        return StoreServer(address.secret, interface.own_address(job.host), address.port)
    except OSError as error:
        raise UsageError(
            f"the port {address.port} ({port_source(job)}) is taken on {socket.gethostname()};"
            " choose another, or end the job that uses it"
        ) from error


def run_as_rank(plan: Plan, parts: Parts, config: Mapping[str, Any], job: JobMembership) -> int:
    """Run this process's rank, and return the exit code. It is 0 if the process was evicted before
    and finds no place again: the run continues without it, or has ended.
    """
    timeout_s = wait_limit_s(plan.runtime)
    job = with_resolved_master(job, timeout_s)
    own, chosen = describe_process(plan, parts, config, job)
    try:
        store = connect_store(job, timeout_s)
        place = await_place(store, own, timeout_s)
    except AshlError as error:
        if REJOINS not in os.environ:
            raise
        sys.stderr.write(f"ashl: does not rejoin: {to_one_line(str(error))}\n")
        return 0
    return run_rank(place.settings_here(own.device, chosen), plan.to_json(), store).code

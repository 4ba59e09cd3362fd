"""The controller of a run on processes: start the ranks of this node, supervise all ranks, and
publish how the run ended.

`run_controller` receives a `Lead`: the store of the run, and the ranks that it starts on this node.
These are all ranks (`lead_here`), or the rank of process 0 in another launcher's job
(`ashl.run.job`). `rank_processes` starts ranks by Python's fork server, which is a process without
CUDA. It kills all that are alive at the end.

All functions run in the controller's main thread. The threads of the store serve the ranks
meanwhile (`ashl.run.control_channel`).
"""

import logging
import multiprocessing as mp
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster
from ashl.config.signals import INTERRUPTS
from ashl.device import HOST
from ashl.errors import AshlError, UsageError, to_one_line
from ashl.plan.plan import Plan
from ashl.planning.compatibility import survives_failure
from ashl.planning.device import device_of, gpu_index, have_own_gpus
from ashl.planning.instantiate import Parts
from ashl.run.authenticated_store import StoreAddress, StoreServer, new_secret
from ashl.run.checkpoints import (
    Checkpoint,
    CheckpointManager,
    first_epoch,
    restore_point_of,
)
from ashl.run.control_channel import PATIENCE_S, ControlChannel
from ashl.run.evaluation import shard_sizes
from ashl.run.handshake import PlaceRequests, make_hello
from ashl.run.interface import check_loopback, choose_interface, find_configured
from ashl.run.join import publish_join_endpoint
from ashl.run.monitor import Monitor
from ashl.run.rank import RankSettings, run_rank_in_child
from ashl.run.supervisor import LivenessMonitor, supervise
from ashl.runtime.records import End, WorkerRejoined
from ashl.runtime.throttle import Nics

logger = logging.getLogger(__name__)

SHORT_FOLDER = "/tmp"
# The path of a socket has at most 107 bytes; the names of multiprocessing take 32 of them.
SOCKET_FOLDER_BYTES = 70


def check_local(plan: Plan, parts: Parts) -> None:
    """Raise UsageError if the ranks cannot run on this machine as configured."""
    runtime = parts.runtime
    check_loopback("runtime=local")
    find_configured(runtime.interface)
    all_devices = devices_of(plan, runtime)
    devices = all_devices[: plan.num_workers]
    if runtime.share_gpu is False and HOST not in devices and len(set(devices)) < len(devices):
        raise UsageError(
            f"{len(devices)} workers on {len(set(devices))} GPUs, and runtime.share_gpu is false;"
            " take as many workers as there are GPUs, or runtime.share_gpu=true"
        )
    # raises UsageError if runtime.backend=nccl and ranks share a GPU
    have_own_gpus([*map(gpu_index, all_devices)], plan, parts)


def devices_of(plan: Plan, runtime: Any) -> list[str]:
    """Return the device of each rank."""
    return [device_of(runtime, rank) for rank in range(plan.num_ranks)]


class Lead(NamedTuple):
    """The store of a run, and the ranks that its controller starts on this node."""

    store: StoreServer
    at: StoreAddress
    rank_settings: tuple[RankSettings, ...]
    requests: PlaceRequests  # requests of processes for the other ranks, or to join
    notes: tuple[str, ...] = ()  # about the placement of ranks, for the user


def lead_here(plan: Plan, parts: Parts) -> Lead:
    """Start the store of a run whose ranks are all on this machine; return it with the ranks."""
    devices = devices_of(plan, parts.runtime)
    settings = RankSettings(
        0,
        interface=choose_interface(parts.runtime.interface, "127.0.0.1"),
        have_own_gpus=have_own_gpus([*map(gpu_index, devices)], plan, parts),
    )
    ranks = [settings._replace(rank=rank, device=device) for rank, device in enumerate(devices)]
    secret = new_secret()
    store = StoreServer(secret)
    at = StoreAddress(store.host, store.port, secret)
    return Lead(store, at, tuple(ranks), PlaceRequests(store, make_hello(0)))


def run_controller(
    plan: Plan,
    run_dir: Path,
    monitor: Monitor,
    lead: Lead,
    checkpoint_manager: CheckpointManager,
    saved: Checkpoint | None = None,
) -> dict | None:
    """Start the ranks of this node and supervise all ranks until they have exited.

    However the run ends, every process of the job is notified.
    Args: saved, the checkpoint to resume from, or None.
    Returns: by how much the processes were slower than declared (`pacing_summary`); None if the run
    was interrupted and a rank did not exit in time.
    Raises: AshlError that names the failed rank.
    """
    parts = monitor.job.parts
    log_start(plan, lead, parts.runtime, checkpoint_manager.every_s)
    monitor.receives_worker_states = True
    rank_settings = settings_for_start(lead, run_dir, monitor, checkpoint_manager.every_s)
    channel = open_channel(plan, monitor, lead.store, saved)
    end = End(130)  # the end after an interrupt; replaced below after any other end
    processes = dict[int, BaseProcess]()
    try:
        with (
            publish_join_endpoint(run_dir, lead.at),
            rank_processes(plan, rank_settings, lead.at) as (processes, start),
        ):
            liveness = LivenessMonitor(
                plan,
                monitor,
                channel,
                processes,
                {settings.rank: settings for settings in rank_settings},
                start,
                lead.requests,
                survives_failure(parts),
                parts.stages[0].topology.regroups,
            )
            pace = supervise(liveness, run_dir, checkpoint_manager)
        if pace is not None:
            end = End(0)
        logger.info("the run ends: %s", describe_end(monitor, interrupted=pace is None))
        return pace
    except Exception as error:
        end = End(1, to_one_line(str(error)))
        logger.error("the run fails: %s", end.why)
        raise
    finally:
        channel.close(end, processes)


def log_start(plan: Plan, lead: Lead, runtime: Any, every_s: float | None) -> None:
    """Log what starts. Args: every_s, seconds between checkpoints, or None."""
    logger.info(
        "starts a run of %d workers and %d ranks, %d of them on node %s; heartbeat timeout %g s,"
        " checkpoints: %s",
        plan.num_workers,
        plan.num_ranks,
        len(lead.rank_settings),
        platform.node(),
        runtime.heartbeat_timeout_s,
        f"every {every_s:g} s" if every_s else "none",
    )


def settings_for_start(
    lead: Lead, run_dir: Path, monitor: Monitor, checkpoint_s: float | None
) -> tuple[RankSettings, ...]:
    """Return the settings of this node's ranks, and complete those of the other processes."""
    common: dict[str, Any] = {
        "rounds": monitor.rounds,
        "checkpoint_s": checkpoint_s,
        "fingerprint": monitor.job.learner.fingerprint(),
    }
    places = lead.requests.places
    for process, place in places.items():
        places[process] = place._replace(settings=place.settings._replace(**common))
    return tuple(settings._replace(run_dir=run_dir, **common) for settings in lead.rank_settings)


def describe_end(monitor: Monitor, *, interrupted: bool) -> str:
    """Return the reason why a run without a failure ended."""
    stages = monitor.run_state.stages
    if interrupted:
        return "interrupted"
    return (stages[-1].reason if stages else None) or "all stages are complete"


def open_channel(
    plan: Plan, monitor: Monitor, store: StoreServer, saved: Checkpoint | None
) -> ControlChannel:
    """Serve in the store what the ranks need at their start, and return the control channel.

    A worker that had failed at the checkpoint takes part again from there on.
    Args: saved, the checkpoint to resume from, or None.
    """
    totals = {worker: outage.totals for worker, outage in monitor.current_outages.items()}
    # not every rank has the run folder
    store.handlers["restore"] = lambda rank: restore_point_of(saved, rank, totals.get(rank))
    stage = monitor.job.stages[0]
    cluster = monitor.job.parts.cluster
    if isinstance(cluster, Cluster) and cluster.bandwidth_mbit_s is not None:
        links = make_network(cluster, stage.trainer.dense_bytes, stage.topology.algorithm)
        store.handlers["nics"] = Nics(links).call
    channel = ControlChannel(store, plan.num_ranks, plan.num_params, shard_sizes(stage))
    number, absent = (0, ()) if saved is None else (saved.number, saved.absent)
    epoch = first_epoch(number, absent, plan.num_workers)
    channel.control_update = channel.control_update._replace(epoch=epoch)
    for rank in absent:
        assert saved is not None
        monitor.emit(WorkerRejoined(rank, saved.time_ns))
    return channel


@contextmanager
def rank_processes(
    plan: Plan, rank_settings: Sequence[RankSettings], at: StoreAddress
) -> Generator[tuple[dict[int, BaseProcess], Callable[[RankSettings], None]]]:
    """Start processes for these ranks. When the context ends, kill all that are alive, and wait for
    their end, up to `PATIENCE_S` each: a process that waits for a device ends later.

    Yields: the latest process of each rank, and a function that starts the next process of a rank.
    """
    processes: dict[int, BaseProcess] = {}
    all_processes: list[BaseProcess] = []

    def start(settings: RankSettings) -> None:
        rank = settings.rank
        args = settings, plan.to_json(), at
        process = start_child(f"rank{rank}", run_rank_in_child, args, "torch", "ashl.run.rank")
        all_processes.append(process)
        logger.info(
            "started rank %d, incarnation %d, as process %s",
            rank,
            settings.incarnation,
            process.pid,
        )
        processes[rank] = process

    try:
        for settings in rank_settings:
            start(settings)
        yield processes, start
    finally:
        for process in all_processes:
            if process.is_alive():
                process.kill()
        for process in all_processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                logger.warning("process %s does not end after SIGKILL", process.pid)


def start_child(
    name: str, target: Callable[..., object], args: tuple[object, ...], *preload: str
) -> BaseProcess:
    """Start a process by Python's fork server, which imports the modules `preload` when it begins.

    A daemonic process of multiprocessing may start one, too: it ends with its parent
    (`ashl.run.process_setup.die_with_parent`).
    """
    start_fork_server(*preload)
    process = mp.get_context("forkserver").Process(target=target, args=args, name=name)
    own = mp.current_process()
    daemonic, own.daemon = own.daemon, False
    try:
        process.start()
    finally:
        own.daemon = daemonic
    return process


def start_fork_server(*preload: str) -> None:
    """Start Python's fork server, which imports these modules once for all processes that it makes.

    Ctrl-C in the terminal reaches every process, as do SIGTERM of a queue and SIGHUP of a terminal
    that closes. The fork server would end at them, and the exit codes of the ranks would be
    unknown. So it inherits these signals blocked, and the ranks ignore them (`run_rank_in_child`).

    Python's fork server looks for modules in the working directory first. That may be a checkout,
    while this process uses the installed package, or the reverse. So the server gets the path of
    this process, as its children do.
    Raises: AshlError if no process can be started.
    """
    path = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    own = {name: os.environ.get(name) for name in path}
    try:
        with block_interrupts():
            os.environ |= path
            forkserver.set_forkserver_preload([*preload])
            shorten_socket_paths()
            try:
                forkserver.ensure_running()
            except ChildProcessError:
                # the fork server is a child of the process that this one was forked from
                forkserver._forkserver.__init__()
                forkserver.set_forkserver_preload([*preload])
                forkserver.ensure_running()
    except OSError as error:
        raise AshlError(
            f"no process can be started: {error.strerror or error} (temporary files go to"
            f" {tempfile.gettempdir()}); set TMPDIR to a short, writable path, for example"
            " TMPDIR=/tmp"
        ) from error
    finally:
        for name, value in own.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def block_interrupts() -> Generator[None]:
    """Block the signals of `INTERRUPTS` in this thread, and in processes that it starts, until the
    context ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        resource_tracker.ensure_running()  # it unblocks SIGINT and SIGTERM if it was not running
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shorten_socket_paths() -> None:
    """Make multiprocessing place its sockets under /tmp if TMPDIR is too long for their paths."""
    own = tempfile.gettempdir()
    if len(os.fsencode(own)) > SOCKET_FOLDER_BYTES:
        tempfile.tempdir = SHORT_FOLDER
        try:
            util.get_temp_dir()  # multiprocessing keeps this folder, and deletes it at the end
        finally:
            tempfile.tempdir = own

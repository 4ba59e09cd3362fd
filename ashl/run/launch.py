"""The monitor's side of a real run: start the ranks, take in what they tell, notice who is late, end them all."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.run import vectors
from ashl.run.monitor import Monitor
from ashl.run.rank import Place, play_in_child
from ashl.run.reporter import RECORDS, SCORES, STOPPING
from ashl.runtime.plane import NEVER
from ashl.runtime.records import Alive, Lateness, Left, PaceKept, RankError, Record, Snapshot, UpdateShown, loads

POLL_S = 0.03
KILLED = "was killed by"  # how it is told, followed by the signal's name
SETTLE_S = 1.0  # after the first failure: time for the others' records, which may name the cause
INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
PATIENCE_S = 5.0  # after Ctrl-C: time for the ranks to leave in order


def launch(plan: Plan, run_dir: Path, monitor: Monitor) -> dict:
    """All ranks on this machine; returns how well the pace was kept. Raises AshlError naming the rank that failed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=NEVER, master_listen_fd=listener.detach()
    )
    ranks = range(plan.num_ranks)
    places = [Place(rank, "127.0.0.1", port, "ashl", str(run_dir), monitor.rounds, log=True) for rank in ranks]
    with children(plan, places) as processes:
        return attend(plan, run_dir, monitor, dist.PrefixStore("ashl", store), processes)


@contextmanager
def handled(handle: Callable[[int, object], None]) -> Generator[None]:
    """Ctrl-C and SIGTERM are handled like this for a while, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def children(plan: Plan, places: Sequence[Place]) -> Generator[dict[int, BaseProcess]]:
    """Processes for the ranks in these places; whatever happens, none is left behind."""
    context: Any = mp.get_context("spawn" if torch.cuda.is_initialized() else "forkserver")
    context.set_forkserver_preload(["torch", "ashl.run.rank"])
    processes = {
        place.rank: context.Process(target=play_in_child, args=(place, plan.to_json()), name=f"rank{place.rank}")
        for place in places
    }
    try:
        start_fork_server()
        for process in processes.values():
            process.start()
        yield processes
    finally:
        for process in processes.values():
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in processes.values():
            if process.pid is not None:
                process.join()


def start_fork_server() -> None:
    """A Ctrl-C in the terminal reaches every process, as does a queue's SIGTERM, and the fork server would die of it,
    and take its word on the ranks with it. It inherits that they are blocked; here they wait until they are not.

    Python's fork server looks for what it preloads in the working directory first: in a checkout it would find half of
    this package. PYTHONSAFEPATH keeps it from that; the processes it makes have this one's path.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    before, safe = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS), os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]


@dataclass
class Attendance:
    """What the ranks have said of themselves: when they were last heard of, who has left, what went wrong."""

    moments: dict[int, float]
    left: set[int] = field(default_factory=set)
    errors: list[RankError] = field(default_factory=list)
    pace: list[PaceKept] = field(default_factory=list)

    def hear(self, monitor: Monitor, record: Record, vector: Tensor | None) -> None:
        self.moments[record.rank] = time.monotonic()
        match record:
            case Alive():
                pass
            case Left():
                self.left.add(record.rank)
            case RankError():
                self.errors.append(record)
            case PaceKept():
                self.pace.append(record)
            case Snapshot() | UpdateShown():
                monitor.snapshot(record, vector)
            case _:
                monitor.emit(record)


def attend(plan: Plan, run_dir: Path, monitor: Monitor, store: dist.Store, processes: dict[int, BaseProcess]) -> dict:
    """Take in what the ranks tell until all have left."""
    timeout_s = monitor.job.parts.runtime.timeout_s
    seen = Attendance(dict.fromkeys(range(plan.num_ranks), time.monotonic()))
    asked_to_stop, failed_at, interrupted_at = False, None, None
    while len(seen.left) < plan.num_ranks:
        for record, vector in received(store, plan.num_params):
            seen.hear(monitor, record, vector)
            if isinstance(record, Snapshot):
                store.set(SCORES, json.dumps(monitor.scores))
        now = time.monotonic()
        if monitor.stopping and not asked_to_stop:
            store.set(STOPPING, monitor.stopping)
            asked_to_stop, interrupted_at = True, now if monitor.stopping == "interrupted" else None
        if failed_at is None and (seen.errors or dead(processes, seen.left)):
            failed_at = now
        if failed_at is not None and now - failed_at > SETTLE_S:
            raise AshlError(cause(plan, run_dir, processes, seen))
        if interrupted_at is not None and now - interrupted_at > PATIENCE_S:
            return {}
        check_late(plan, monitor, seen, now, timeout_s)
        monitor.tick()
        time.sleep(POLL_S)
    for process in processes.values():
        process.join(PATIENCE_S)
    return kept_pace(seen.pace, plan.num_workers)


def received(store: dist.Store, num_params: int) -> Iterator[tuple[Record, Tensor | None]]:
    """The records that have come, with the model or update that belongs to one. Anything else is an error."""
    while store.queue_len(RECORDS):
        for line in store.queue_pop(RECORDS).decode().splitlines():
            record = loads(line)
            shown = isinstance(record, Snapshot | UpdateShown)
            yield record, vectors.fetch(store, record, num_params) if shown else None


def dead(processes: dict[int, BaseProcess], left: set[int]) -> list[int]:
    return [rank for rank, process in processes.items() if rank not in left and process.exitcode is not None]


def cause(plan: Plan, run_dir: Path, processes: dict[int, BaseProcess], seen: Attendance) -> str:
    """The first thing that went wrong, not what followed from it."""
    reported = {error.rank for error in seen.errors}
    killed = [rank for rank in dead(processes, seen.left) if rank not in reported]
    own = [error for error in seen.errors if not error.consequence]
    if killed and not own:
        code = processes[killed[0]].exitcode or 0
        how = f"{KILLED} {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{role(plan, killed[0])} {how}; its log is {log_of(run_dir, killed[0])}"
    first = (own or seen.errors)[0]
    log = log_of(run_dir, first.rank)
    return f"{role(plan, first.rank)}: {first.error}" + (f"; its log is {log}" if log.exists() else "")


def log_of(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.log"


def role(plan: Plan, rank: int) -> str:
    if rank < plan.num_workers:
        return f"worker {rank}"
    server = plan.stages[0].topology["_target_"].startswith("ashl.topology.parameter_server.")
    return f"the {'server' if server else 'coordinator'} (rank {rank})"


def check_late(plan: Plan, monitor: Monitor, seen: Attendance, now: float, timeout_s: float) -> None:
    """Raises AshlError when a rank is not heard of, or when all wait for each other, naming who."""
    late = [rank for rank, moment in seen.moments.items() if rank not in seen.left and now - moment > timeout_s]
    if late:
        who = ", ".join(role(plan, rank) for rank in late)
        raise AshlError(
            f"{who} was not heard of for {timeout_s:g} s (runtime.timeout_s) and is late; the run ends here"
        )
    beats = [monitor.beats.get(rank) for rank in range(plan.num_ranks)]
    stuck = [beat for beat in beats if beat and beat.waiting and beat.idle_s > timeout_s]
    if len(stuck) == plan.num_ranks:
        waits = "; ".join(f"rank {beat.rank} {beat.waiting}" for beat in stuck)
        raise AshlError(f"deadlock: nothing has moved for {timeout_s:g} s: {waits}")


def kept_pace(reports: Sequence[PaceKept], num_workers: int) -> dict:
    """Where the machine was too slow to keep the declared pace: by worker, with the pushes that a server took in for
    it, which share of its steps and transfers was late and how much longer than declared they took; by how much of all
    that is declared its encoding took longer than declared (often nothing is); and the worst."""
    steps: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    transfers: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    encodings: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    for report in reports:
        worker = report.rank < num_workers
        if worker:
            encodings[report.rank].append(report.encodings)
            steps[report.rank].append(report.steps)
        for src, counts in report.transfers:
            transfers[report.rank if worker else src].append(counts)
    workers = [pace_of(rank, steps[rank], transfers[rank], encodings[rank]) for rank in range(num_workers)]
    if not any(counts.count for rank in range(num_workers) for counts in steps[rank] + transfers[rank]):
        return {}
    worst = ("steps_slower_by", "transfers_slower_by", "encodings_slower_by", "slower_by")
    return {"workers": workers, **{key: max(worker[key] for worker in workers) for key in worst}}


def pace_of(
    rank: int, steps: Sequence[Lateness], transfers: Sequence[Lateness], encodings: Sequence[Lateness]
) -> dict[str, Any]:
    everything = [*steps, *transfers, *encodings]
    return {
        "rank": rank,
        "late_steps_share": share_late(steps),
        "late_transfers_share": share_late(transfers),
        "steps_slower_by": slower_by(steps),
        "transfers_slower_by": slower_by(transfers),
        "encodings_slower_by": slower_by(everything, encodings),
        "slower_by": slower_by(everything),
    }


def share_late(counts: Sequence[Lateness]) -> float:
    total = sum(row.count for row in counts)
    return sum(row.late for row in counts) / total if total else 0.0


def slower_by(counts: Sequence[Lateness], late: Sequence[Lateness] | None = None) -> float:
    """How much later these (or those among them) were than declared, as a share of what is declared of all of them."""
    total = sum(row.declared_s for row in counts)
    return sum(row.late_s for row in (counts if late is None else late)) / total if total else 0.0

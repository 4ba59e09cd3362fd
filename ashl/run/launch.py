"""The monitor's side of a real run: start the ranks, take in what they tell, notice who is late, end them all."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ashl.config.construct import construct
from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.run.monitor import Monitor
from ashl.run.rank import Place, play, play_in_child
from ashl.run.reporter import RECORDS, SCORES, STOPPING
from ashl.runtime.plane import NEVER

POLL_S = 0.03
SETTLE_S = 1.0  # after the first failure: time for the others' records, which may name the cause
PATIENCE_S = 5.0  # after Ctrl-C: time for the ranks to leave in order


class Membership(NamedTuple):
    """What the environment says of a job that someone else has started."""

    rank: int
    world_size: int
    host: str
    port: int
    agent_store: bool  # whether the launcher keeps the store; else rank 0 does


def membership() -> Membership | None:
    """The job of torchrun, or of whoever sets the same variables; None where there is none."""
    env = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Membership(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]), agent)


def launch(plan: Plan, run_dir: Path, monitor: Monitor) -> dict:
    """All ranks on this machine; returns how well the pace was kept. Raises AshlError naming the rank that failed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=NEVER, master_listen_fd=listener.detach()
    )
    with children(plan, run_dir, monitor, range(plan.num_ranks), "127.0.0.1", port, "ashl") as processes:
        return attend(plan, run_dir, monitor, dist.PrefixStore("ashl", store), processes)


def join(plan: Plan, run_dir: Path, monitor: Monitor, job: Membership) -> dict:
    """The home rank's process of a job that someone else has started: its rank is a child, so that evaluating
    snapshots and writing records never hold it up."""
    store = connect(job)
    prefix = dist.PrefixStore("ashl", store)
    prefix.set("plan", plan.to_json())
    with children(plan, run_dir, monitor, [job.rank], job.host, job.port, "ashl") as processes:
        try:
            pace = attend(plan, run_dir, monitor, prefix, processes)
        except BaseException:
            leave(prefix, job, outcome=1)
            raise
        leave(prefix, job, outcome=0)
        return pace


def take_part(plan: Plan, job: Membership) -> int:
    """Any other process of such a job: it plays its rank here; returns the exit code."""
    store = connect(job)
    prefix = dist.PrefixStore("ashl", store)
    if prefix.get("plan").decode() != plan.to_json():
        sentence = f"composed another configuration than rank {plan.home}; give every node the same overrides"
        told = {"kind": "error", "rank": job.rank, "error": sentence, "consequence": False}
        prefix.queue_push(RECORDS, json.dumps(told))
        leave(prefix, job)
        raise AshlError(f"rank {job.rank} {sentence}")
    place = Place(job.rank, job.host, job.port, "ashl", ".", True, log=False)
    code = play(place, plan.to_json())
    if code == 0:
        code = int(prefix.get("outcome").decode())
    leave(prefix, job)
    return code


def connect(job: Membership) -> dist.TCPStore:
    master = job.rank == 0 and not job.agent_store
    return dist.TCPStore(job.host, job.port, is_master=master, wait_for_workers=False, timeout=NEVER)


def leave(store: dist.Store, job: Membership, outcome: int | None = None) -> None:
    """Tell the others how it ended (at home), and go. Whoever keeps the store outlives their last question to it."""
    if outcome is not None:
        store.set("outcome", str(outcome))
    store.set(f"out/{job.rank}", "1")
    if job.rank != 0 or job.agent_store:
        return
    others = [f"out/{rank}" for rank in range(job.world_size) if rank != job.rank]
    end = time.monotonic() + PATIENCE_S
    while others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_S)


@contextmanager
def children(
    plan: Plan, run_dir: Path, monitor: Monitor, ranks: range | list[int], host: str, port: int, prefix: str
) -> Generator[dict[int, BaseProcess]]:
    """Processes for these ranks; whatever happens, none is left behind."""
    context: Any = mp.get_context("spawn" if torch.cuda.is_initialized() else "forkserver")
    context.set_forkserver_preload(["torch", "ashl.run.rank"])
    places = [Place(rank, host, port, prefix, str(run_dir), monitor.rounds, log=True) for rank in ranks]
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
        for leftover in run_dir.glob(".snapshot-*"):
            leftover.unlink(missing_ok=True)


def start_fork_server() -> None:
    """A Ctrl-C in the terminal reaches every process, and the fork server would die of it while it imports torch. It
    inherits that the signal is blocked; here the signal waits until it is not.

    Python's fork server looks for what it preloads in the working directory first: in a checkout it would find half of
    this package. PYTHONSAFEPATH keeps it from that; the processes it makes have this one's path.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    before, safe = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]


def attend(plan: Plan, run_dir: Path, monitor: Monitor, store: dist.Store, processes: dict[int, BaseProcess]) -> dict:
    """Take in what the ranks tell until all have left."""
    timeout_s = construct(plan.runtime, "runtime", plan.allow_targets).timeout_s
    heard = dict.fromkeys(range(plan.num_ranks), time.monotonic())
    left: set[int] = set()
    errors: list[dict] = []
    pace: list[dict] = []
    told, failed_at, interrupted_at = False, None, None
    while len(left) < plan.num_ranks:
        for record in received(store):
            heard[record["rank"]] = time.monotonic()
            take_in(record, run_dir, monitor, left, errors, pace)
            if record["kind"] == "snapshot":
                store.set(SCORES, json.dumps(monitor.scores))
        now = time.monotonic()
        if monitor.stopping and not told:
            store.set(STOPPING, monitor.stopping)
            told, interrupted_at = True, now if monitor.stopping == "interrupted" else None
        if failed_at is None and (errors or dead(processes, left)):
            failed_at = now
        if failed_at is not None and now - failed_at > SETTLE_S:
            raise AshlError(cause(plan, run_dir, processes, left, errors))
        if interrupted_at is not None and now - interrupted_at > PATIENCE_S:
            return {}
        check_late(plan, monitor, heard, left, now, timeout_s)
        monitor.tick()
        time.sleep(POLL_S)
    for process in processes.values():
        process.join(PATIENCE_S)
    return kept_pace(pace, plan.num_workers)


def received(store: dist.Store) -> Iterator[dict]:
    """The records that have come. They are JSON from our own ranks; anything else is an error, not a crash."""
    while store.queue_len(RECORDS):
        for line in store.queue_pop(RECORDS).decode().splitlines():
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("rank"), int):
                raise AshlError("a record came that is none; is another program using the job's port?")
            yield record


def take_in(
    record: dict, run_dir: Path, monitor: Monitor, left: set[int], errors: list[dict], pace: list[dict]
) -> None:
    match record["kind"]:
        case "alive":
            pass
        case "left":
            left.add(record["rank"])
        case "error":
            errors.append(record)
        case "pace":
            pace.append(record)
        case "snapshot" if "file" not in record:
            monitor.snapshot(record, None)  # of a coordinator: counts, and no model
        case "snapshot":
            path = run_dir / Path(record.pop("file")).name
            params = np.fromfile(path, dtype=np.float32)
            path.unlink()
            if params.size != monitor.plan.num_params:
                raise AshlError(
                    f"a snapshot holds {params.size} parameters where {monitor.plan.num_params} were expected"
                )
            monitor.snapshot(record, torch.from_numpy(params))
        case _:
            monitor.emit(record)


def dead(processes: dict[int, BaseProcess], left: set[int]) -> list[int]:
    return [rank for rank, process in processes.items() if rank not in left and process.exitcode is not None]


def cause(plan: Plan, run_dir: Path, processes: dict[int, BaseProcess], left: set[int], errors: list[dict]) -> str:
    """The first thing that went wrong, not what followed from it."""
    reported = {error["rank"] for error in errors}
    killed = [rank for rank in dead(processes, left) if rank not in reported]
    own = [error for error in errors if not error["consequence"]]
    if killed and not own:
        code = processes[killed[0]].exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{role(plan, killed[0])} {how}; its log is {log_of(run_dir, killed[0])}"
    first = (own or errors)[0]
    log = log_of(run_dir, first["rank"])
    return f"{role(plan, first['rank'])}: {first['error']}" + (f"; its log is {log}" if log.exists() else "")


def log_of(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.log"


def role(plan: Plan, rank: int) -> str:
    if rank < plan.num_workers:
        return f"worker {rank}"
    server = plan.stages[0].topology["_target_"].startswith("ashl.topology.parameter_server.")
    return f"the {'server' if server else 'coordinator'} (rank {rank})"


def check_late(
    plan: Plan, monitor: Monitor, heard: dict[int, float], left: set[int], now: float, timeout_s: float
) -> None:
    """Raises AshlError when a rank is not heard of, or when all wait for each other, naming who."""
    late = [rank for rank, moment in heard.items() if rank not in left and now - moment > timeout_s]
    if late:
        who = ", ".join(role(plan, rank) for rank in late)
        raise AshlError(
            f"{who} was not heard of for {timeout_s:g} s (runtime.timeout_s) and is late; the run ends here"
        )
    beats = [monitor.beats.get(rank) for rank in range(plan.num_ranks)]
    stuck = [beat for beat in beats if beat and beat["waiting"] and beat["idle_s"] > timeout_s]
    if len(stuck) == plan.num_ranks:
        waits = "; ".join(f"rank {beat['rank']} {beat['waiting']}" for beat in stuck)
        raise AshlError(f"deadlock: nothing has moved for {timeout_s:g} s: {waits}")


def kept_pace(reports: list[dict], num_workers: int) -> dict:
    """Where the machine was too slow to keep the declared pace: by worker, with the pushes that a server took in for
    it, which share of its steps and transfers was late and how much longer than declared they took; and the worst."""
    steps: dict[int, list[dict]] = {rank: [] for rank in range(num_workers)}
    transfers: dict[int, list[dict]] = {rank: [] for rank in range(num_workers)}
    for report in reports:
        rank = report["rank"]
        if rank < num_workers:
            steps[rank].append(report["steps"])
        for counts in report["transfers"]:
            transfers[rank if rank < num_workers else counts["src"]].append(counts)
    workers = [
        {
            "rank": rank,
            "late_steps_share": share(steps[rank], "late", "count"),
            "late_transfers_share": share(transfers[rank], "late", "count"),
            "steps_slower_by": share(steps[rank], "late_s", "declared_s"),
            "transfers_slower_by": share(transfers[rank], "late_s", "declared_s"),
            "slower_by": share(steps[rank] + transfers[rank], "late_s", "declared_s"),
        }
        for rank in range(num_workers)
    ]
    if not any(counts["count"] for rank in range(num_workers) for counts in steps[rank] + transfers[rank]):
        return {}
    worst = ("steps_slower_by", "transfers_slower_by", "slower_by")
    return {"workers": workers, **{key: max(worker[key] for worker in workers) for key in worst}}


def share(counts: list[dict], part: str, whole: str) -> float:
    total = sum(row[whole] for row in counts)
    return sum(row[part] for row in counts) / total if total else 0.0

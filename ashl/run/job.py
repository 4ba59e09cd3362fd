"""A job that others have started, torchrun say: what the environment tells of it, joining it, and leaving in order."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.run.launch import PATIENCE_S, POLL_S, attend, children, handled
from ashl.run.monitor import Monitor
from ashl.run.rank import Place, play
from ashl.run.reporter import RECORDS, STOPPING
from ashl.runtime.plane import NEVER
from ashl.runtime.records import RankError, dumps


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


def join(plan: Plan, run_dir: Path, monitor: Monitor, job: Membership) -> dict:
    """The home rank's process of a job that someone else has started: its rank is a child, so that evaluating
    snapshots and writing records never hold it up."""
    store = connect(job)
    prefix = dist.PrefixStore("ashl", store)
    prefix.set("folder", f"{platform.node()}:{run_dir.resolve()}")
    prefix.set("plan", plan.to_json())
    place = Place(job.rank, job.host, job.port, "ashl", str(run_dir), monitor.rounds, log=True)
    with children(plan, [place]) as processes:
        try:
            pace = attend(plan, run_dir, monitor, prefix, processes)
        except BaseException:
            leave(prefix, job, outcome=1)
            raise
        leave(prefix, job, outcome=0)
        return pace


def take_part(plan: Plan, job: Membership) -> tuple[int, str]:
    """Any other process of such a job: it plays its rank here; returns the exit code, and where the records are."""
    store = connect(job)
    prefix = dist.PrefixStore("ashl", store)
    if prefix.get("plan").decode() != plan.to_json():
        sentence = f"composed another configuration than rank {plan.home}; give every node the same overrides"
        prefix.queue_push(RECORDS, dumps(RankError(job.rank, sentence, consequence=False)))
        leave(prefix, job)
        raise AshlError(f"rank {job.rank} {sentence}")
    place = Place(job.rank, job.host, job.port, "ashl", ".", True, log=False)
    with handled(lambda number, frame: prefix.set(STOPPING, "interrupted")):
        code = play(place, plan.to_json())
    folder = prefix.get("folder").decode()
    if code == 0:
        code = int(prefix.get("outcome").decode())
    leave(prefix, job)
    return code, folder


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

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
from ashl.run.attendance import PATIENCE_S
from ashl.run.desk import POLL_S
from ashl.run.launch import conduct, place
from ashl.run.monitor import Monitor
from ashl.run.rank import Place, play
from ashl.run.reporter import RECORDS
from ashl.run.sealed import Sealed, Secret, shared_secret
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


def join(plan: Plan, run_dir: Path, monitor: Monitor, job: Membership) -> dict | None:
    """The home rank's process of a job that someone else has started: its rank is a child, so that evaluating
    snapshots and writing records never hold it up. See `conduct`."""
    secret = secret_of(job)
    store = Sealed(connect(job), secret)
    store.set("home", platform.node())
    store.set("plan", plan.to_json())
    places = [place(plan, job.rank, job.host, job.port, secret, run_dir, monitor)]
    try:
        return conduct(plan, run_dir, monitor, store.another(), places)
    finally:
        leave(store, job)


def take_part(plan: Plan, job: Membership) -> tuple[int, str]:
    """Any other process of such a job: it plays its rank here; returns the exit code, and where the records are."""
    secret = secret_of(job)
    store = Sealed(connect(job), secret)
    if store.get("plan").decode() != plan.to_json():
        sentence = f"composed another configuration than rank {plan.home}; give every node the same overrides"
        store.push(RECORDS, job.rank, dumps(RankError(job.rank, sentence, consequence=False)).encode())
        leave(store, job)
        raise AshlError(f"rank {job.rank} {sentence}")
    home = store.get("home").decode()
    end = play(Place(job.rank, job.host, job.port, secret, home, ".", True, log=False), plan.to_json())
    leave(store, job)
    return end.code, end.folder


def secret_of(job: Membership) -> Secret:
    return shared_secret(job.host, job.port, os.environ.get("TORCHELASTIC_RUN_ID", ""))


def connect(job: Membership) -> dist.TCPStore:
    master = job.rank == 0 and not job.agent_store
    return dist.TCPStore(job.host, job.port, is_master=master, wait_for_workers=False, timeout=NEVER)


def leave(store: dist.Store, job: Membership) -> None:
    """Whoever keeps the store outlives the others' last question to it."""
    store.set(f"out/{job.rank}", "1")
    if job.rank != 0 or job.agent_store:
        return
    others = [f"out/{rank}" for rank in range(job.world_size) if rank != job.rank]
    end = time.monotonic() + PATIENCE_S
    while others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_S)

"""One rank of a real run, from the start of its process to its end."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ashl.config.construct import own_faults
from ashl.data.dataset import Data
from ashl.errors import AshlError
from ashl.learn.device import HOST, numbers
from ashl.learn.trainer import Trainer
from ashl.plan.plan import Plan
from ashl.planning.build import Parts, assemble, parts_of
from ashl.planning.device import device_of
from ashl.run.reporter import Reporter
from ashl.runtime.effects import PeerLostError
from ashl.runtime.pace import Pace
from ashl.runtime.plane import NEVER, first_line
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import Left, Placed, RankError
from ashl.stage.program import program
from ashl.stage.stage import Stage

GOODBYE_S = 30.0
ORPHANED = 75  # exit code of a rank whose parent has died


class Place(NamedTuple):
    """Where a rank finds its job."""

    rank: int
    host: str
    port: int
    prefix: str
    run_dir: str
    rounds: bool
    log: bool  # whether output goes to rank<r>.log in the run folder


def play_in_child(place: Place, plan_json: str) -> None:
    """The whole of a rank's process: it logs to its own file, leaves interrupts to its parent and dies with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    code = play(place, plan_json)
    with suppress(OSError):  # of a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # no destructors: gloo's may hang when a peer is already gone


def die_with_parent() -> None:
    """A forkserver's children do not die with the process that asked for them, so each watches it."""
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def guard() -> None:
        wait([sentinel])
        os._exit(ORPHANED)

    threading.Thread(target=guard, daemon=True, name="guard").start()


def redirect(path: Path) -> None:
    """Everything that this process and its libraries print goes to a file."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (sys.stdout, sys.stderr):
        target.flush()
        os.dup2(out, target.fileno())
    os.close(out)


def play(place: Place, plan_json: str) -> int:
    """Join the job, play this rank's part, leave; returns the exit code. What goes wrong is reported to the monitor."""
    plan = Plan.from_json(plan_json)
    base: Any = dist.TCPStore(place.host, place.port, is_master=False, timeout=NEVER)
    store = dist.PrefixStore(place.prefix, base)
    reporter = Reporter(dist.PrefixStore(place.prefix, base.clone()), place.rank, place.rounds)
    try:
        if place.log:
            redirect(Path(place.run_dir) / f"rank{place.rank}.log")
        with own_faults(plan.allow_targets, AshlError):
            part(place, plan, store, reporter)
        reporter.emit(Left(place.rank))
        reporter.close()
        return 0
    except Exception as error:
        cause = error.__cause__ or error
        lost = isinstance(cause, PeerLostError) or "closed by peer" in str(cause) or "reset by peer" in str(cause)
        sentence = str(error) if isinstance(error, AshlError) else f"{type(error).__name__}: {first_line(error)}"
        reporter.emit(RankError(place.rank, sentence, consequence=lost))
        reporter.close()
        with suppress(OSError):  # its log may be on a full disk
            traceback.print_exc()
        return 1


def part(place: Place, plan: Plan, store: dist.Store, reporter: Reporter) -> None:
    """Set up, run, leave in two phases: when all are done, all say goodbye."""
    parts = parts_of(plan)
    device = device_of(parts.runtime)
    reporter.emit(Placed(place.rank, platform.node(), device))
    torch.set_num_threads(parts.runtime.threads)
    job = assemble(plan, device, parts)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=plan.num_ranks,
        timeout=NEVER,
    )
    stage = job.stages[0]
    batch, dense = stage.plan.workers[0].batch, stage.trainer.dense_bytes
    kernel = TorchKernel(
        place.rank,
        reporter,
        lambda clock: Pace(parts.cluster, place.rank, batch, plan.seed, dense, clock, store),
        peers=tuple(sorted({peer for stage in job.stages for peer in stage.topology.links(stage, place.rank)})),
        max_bytes=max(stage.most_bytes for stage in job.stages),
        exact=parts.runtime.sums == "exact",
        groups=process_groups(job.stages),
        device=device,
        settle=None if device == HOST else torch.cuda.synchronize,
    )
    if place.rank < plan.num_workers:
        assert isinstance(stage.trainer, Trainer)
        warm_up(stage.trainer, place.rank)
    reporter.beat = kernel.beat
    kernel.run(partial(program, stages=job.stages))
    reporter.emit(kernel.pace.report())
    store.set(f"done/{place.rank}", "1")
    everyone = [f"done/{rank}" for rank in range(plan.num_ranks)]
    while not store.check(everyone):
        time.sleep(0.01)
    kernel.goodbye(GOODBYE_S)


def process_groups(stages: Sequence[Stage]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One for each group that the plan lists. All ranks make all of them, in the same order."""
    listed = {group for stage in stages for group in stage.topology.groups(stage)}
    return {group: dist.new_group(list(group), timeout=NEVER) for group in sorted(listed)}


def step_here_s(plan: Plan, parts: Parts, data: Data) -> float:
    """What a step of worker 0 takes in this process, in the median of a few."""
    torch.set_num_threads(parts.runtime.threads)
    trainer = assemble(plan, device_of(parts.runtime), parts, data).stages[0].trainer
    assert isinstance(trainer, Trainer)
    warm_up(trainer, 0)
    params, moments = trainer.init()
    times = [time.perf_counter()]
    for step in range(5):
        numbers([trainer.local_step(params, moments, 0, step, 0.0)[0]])
        times.append(time.perf_counter())
    return median(after - before for before, after in pairwise(times))


def warm_up(trainer: Trainer, rank: int) -> None:
    """The first step of a process allocates and plans; that is not what a step costs."""
    params, moments = trainer.init()
    for step in range(3):
        numbers([trainer.local_step(params, moments, rank, step, 0.0)[0]])

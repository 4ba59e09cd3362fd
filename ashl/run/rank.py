"""One rank of a real run, from the start of its process to its end."""

import multiprocessing as mp
import os
import platform
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ashl.config.construct import own_faults
from ashl.data.dataset import Data
from ashl.errors import AshlError
from ashl.learn.device import HOST, numbers
from ashl.learn.trainer import Trainer
from ashl.plan.plan import Plan
from ashl.planning.compatibility import (
    exchanges_by_collectives,
    retransmits_on_resume,
    runs_in_lockstep,
    survives_failure,
)
from ashl.planning.device import device_of, use_device, uses_nccl
from ashl.planning.instantiate import Parts, assemble, parts_of
from ashl.planning.reduction_algorithm import nodes_of_workers
from ashl.run.handshake import compare_fingerprint
from ashl.run.interface import Chosen, use
from ashl.run.parts import Given, taken, through
from ashl.run.reporter import Reporter
from ashl.run.roll import Roll
from ashl.run.sealed import Sealed, Secret
from ashl.run.streams import redirect
from ashl.run.watch import ALONE, INTERRUPTS, Watch, handled, leave
from ashl.runtime import keeping
from ashl.runtime.agreement import Agreement
from ashl.runtime.effects import PeerLostError
from ashl.runtime.hierarchical_sum import Hierarchy, hierarchy_of
from ashl.runtime.keeping import Keeper, into_folder
from ashl.runtime.meeting import come_in, meet
from ashl.runtime.news import End
from ashl.runtime.pace import Pace
from ashl.runtime.plane import NEVER, first_line, granted_by_nccl
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import Joined, Left, Lost, Placed, RankError, Ready, Record, StopAsked
from ashl.runtime.sampling import Rounds
from ashl.stage.program import hearing, peers_of, program
from ashl.stage.stage import Stage

GOODBYE_S = 30.0
VERDICT_S = 5.0  # how long a rank that has failed waits to hear why the run ends
BROKEN = (
    "closed by peer",
    "reset by peer",
    "refused",
    "Broken pipe",
    "connectFullMesh",
    "not connected",
)  # gloo's words
ORPHANED = 75  # exit code of a rank whose parent has died
FAILED = 77  # ... of one that fails as its cluster says


class Place(NamedTuple):
    """Where a rank finds its job."""

    rank: int
    host: str
    port: int
    secret: Secret  # of the job
    home: str  # the host of the process that keeps the records
    run_dir: str
    rounds: Rounds
    log: bool  # whether it is that process's child, and output goes to rank<r>.log in the run folder
    interface: Chosen | None = None  # of its messages; None = what gloo takes by itself
    device: str = HOST
    one_each: bool = False  # whether all ranks of the job have a GPU of their own
    keeps: bool = False  # whether it keeps its part of checkpoints, in the run folder
    saved: str | None = None  # the folder of the checkpoint that it goes on from
    since_ns: int = 0  # ... and the moment
    life: int = 0  # how often this rank has been lost before, and comes (back) while the others run


def play_in_child(place: Place, plan_json: str) -> None:
    """The whole of a rank's process: it logs to its own file, leaves interrupts to its parent and dies with it."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    leave(End(play(place, plan_json).code))  # no destructors: gloo's may hang when a peer is already gone


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


def play(
    place: Place,
    plan_json: str,
    dropped: Callable[[End], NoReturn] = leave,
    say: Callable[[str], None] = lambda text: None,
) -> End:
    """Join the job, play this rank's part, leave; returns how it went. What goes wrong is reported to home. A rank that
    is no child of home's waits to hear how the run has ended, and where it has failed does not come back. `dropped`
    is what becomes of one without which the run has gone on; `say` tells who watches what it does."""
    plan = Plan.from_json(plan_json)
    timeout_s = plan.runtime["heartbeat_timeout_s"]
    watch = Watch(timeout_s, f"{place.host}:{place.port}", place.home, ALONE if place.log else 1)
    wait = timedelta(seconds=max(1.0, timeout_s))
    store = Sealed(dist.TCPStore(place.host, place.port, is_master=False, timeout=wait), place.secret)
    reporter = Reporter(store.another(), place.rank, place.rounds, watch, place.life)
    reporter.dropped = dropped
    if place.keeps and place.log:
        reporter.keeper = Keeper(place.rank, partial(into_folder, Path(place.run_dir), place.rank), reporter.emit)
    elif place.keeps:
        reporter.keeper = Keeper(place.rank, partial(through, store.another(), place.rank), reporter.emit)
    try:
        if place.log:
            redirect(Path(place.run_dir) / f"rank{place.rank}.log")
            asked: AbstractContextManager = nullcontext()
        else:
            asked = handled(interrupt if place.life else lambda *_: reporter.emit(StopAsked(place.rank, "interrupted")))
        with asked, own_faults(plan.allow_targets, AshlError):
            part(place, plan, store, reporter, say)
        reporter.emit(Left(place.rank))
        reporter.close()
        end = End(0) if place.log else reporter.verdict() or End(1, "the job's store was gone before the run's end")
    except KeyboardInterrupt:
        reporter.emit(Lost(place.rank, 0, "was interrupted"))
        reporter.close()
        leave(End(130))
    except Exception as error:
        sentence = str(error) if isinstance(error, AshlError) else f"{type(error).__name__}: {first_line(error)}"
        consequence, blamed = blame(error)
        reporter.emit(RankError(place.rank, sentence, consequence, blamed))
        reporter.close()
        if place.log or not (consequence or isinstance(error, AshlError)):
            with suppress(OSError):  # its log may be on a full disk
                traceback.print_exc()
        if not place.log:
            leave(reporter.verdict(VERDICT_S) or End(1, f"rank {place.rank}: {sentence}"))
        end = End(1, sentence)
    watch.over()
    return end


def interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def blame(error: Exception) -> tuple[bool, int | None]:
    """Whether an error is but the consequence of another rank's end, and of whose, if that is known."""
    cause = error.__cause__ or error
    if isinstance(cause, PeerLostError):
        return True, cause.rank
    return isinstance(cause, RuntimeError) and any(words in str(cause) for words in BROKEN), None


def playable(
    place: Place, plan: Plan, parts: Parts, store: Sealed, emit: Callable[[Record], None]
) -> tuple[tuple[Stage, ...], Agreement | None]:
    """The stages as this rank plays them; where sums may lack a worker that is lost, its part in going on."""
    stages = assemble(plan, place.device, parts).stages
    if place.keeps or not survives_failure(parts):
        return stages, None
    agreement = None
    if any(map(exchanges_by_collectives, parts.stages)):
        agreement = Agreement(store, place.rank, stages[0].workers, emit, place.life)
    return tuple(replace(stage, elastic=True) for stage in stages), agreement


def given_to(place: Place, store: Sealed, over: Callable[[], bool]) -> Given | None:
    """What this rank goes on from; None where the run is over before it has begun."""
    if place.keeps and not place.log:
        return taken(store, place.rank, over)
    return Given(place.since_ns, None if place.saved is None else keeping.part_of(Path(place.saved), place.rank))


def part(place: Place, plan: Plan, store: Sealed, reporter: Reporter, say: Callable[[str], None]) -> None:
    """Set up, run, leave."""
    given = given_to(place, store, lambda: reporter.end is not None)
    if given is None:
        return
    parts = parts_of(plan)
    reporter.emit(Placed(place.rank, platform.node(), use_device(place.device), len(os.sched_getaffinity(0))))
    torch.set_num_threads(parts.runtime.threads)
    stages, agreement = playable(place, plan, parts, store, reporter.emit)
    use(place.interface)
    stage = stages[0]
    assert isinstance(stage.trainer, Trainer)
    compare_fingerprint(store, stage.trainer.learner.fingerprint(), lambda: reporter.end is not None)
    nccl = place.one_each and uses_nccl(parts.runtime, stage.topology, parts.cluster)
    if not place.life:
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        meet(backend, dist.PrefixStore("group", store), place.rank, plan.num_ranks)
    peers, all_others = peers_of(stages, place.rank), hearing(stages, place.rank)
    batch, dense = stage.plan.workers[0].batch, stage.trainer.dense_bytes
    algorithm, exact = stage.topology.algorithm, parts.runtime.sums == "exact"
    nodes = nodes_of_workers(parts.cluster) if algorithm == "hierarchical" else None
    hierarchy = None if nodes is None else hierarchy_of(nodes)
    kernel = TorchKernel(
        place.rank,
        reporter,
        lambda clock: Pace(parts.cluster, place.rank, batch, plan.seed, dense, clock, store, algorithm),
        peers=peers,
        max_bytes=max(stage.most_bytes for stage in stages),
        exact=exact,
        groups={} if place.life else process_groups(stages, hierarchy),
        device=place.device,
        settle=None if place.device == HOST else torch.cuda.synchronize,
        nccl=nccl,
        keeper=reporter.keeper,
        hierarchy=hierarchy,
        agreement=agreement,
        bodies=granted_by_nccl(place.rank, stage.workers, stage.server, place.device)
        if nccl and stage.topology.has_server
        else None,
    )
    kernel.ctx.life = place.life
    learner = stage.trainer.learner
    kernel.worker_states = learner
    saved, own = None, None
    if given.file is not None:
        known = keeping.read(given.file, ("ashl", *plan.allow_targets), place.device)
        kernel.go_on(known, given.since_ns)
        saved, own = (known.stage, known.state), known.own
    if place.rank < plan.num_workers:
        warm_up(stage.trainer, place.rank)
        learner.set_worker_state(place.rank, own)
        reporter.learner = learner
    lives = dict.fromkeys(all_others, 0)
    if place.life:
        reporter.emit(Ready(place.rank))
        entry = come_in(store, all_others, place.rank, place.life, lambda: reporter.news)
        if entry is None:
            return
        kernel.enter(entry)
        lives |= entry.lives
        reporter.emit(Joined(place.rank, kernel.now_ns))
        say(f"takes part from {kernel.now_ns / 1e9:.3g} s on")
    roll = Roll(kernel, place.rank, place.life, lives, store, agreement)
    reporter.heard, reporter.beat = roll.hear, kernel.heartbeat
    for event in parts.cluster.events if parts.cluster.fault_kinds else ():
        late = place.life and event.time_s * 1e9 < kernel.now_ns
        if event.fail and event.worker == place.rank and not late:
            threading.Thread(target=fail_at, args=(kernel, event.time_s), daemon=True, name="fail").start()
    anew = saved is not None and (retransmits_on_resume(parts) or not runs_in_lockstep(parts, plan.num_workers))
    kernel.run(partial(program, stages=stages, saved=saved, comes=anew or place.life > 0))
    if place.rank < plan.num_workers and learner.carries:
        reporter.show_last_state(learner.worker_state(place.rank))
    reporter.emit(kernel.pace.report())
    leave_together(place, plan, store, kernel, roll, answers=stage.elastic or place.rank == stage.server)


def leave_together(place: Place, plan: Plan, store: Sealed, kernel: TorchKernel, roll: Roll, answers: bool) -> None:
    """When all who are there are done, all say goodbye; whoever `answers` tells those who come until then that it is
    too late."""
    for rank in range(plan.num_ranks):
        store.push(f"done/{rank}", place.rank, b"")
    done: set[int] = set()

    def over() -> bool:
        while item := store.pop(f"done/{place.rank}"):
            done.add(item[0])
        return len(done | roll.away) == plan.num_ranks

    if answers:
        kernel.linger(over)
    while not over():
        time.sleep(0.01)
    kernel.goodbye(GOODBYE_S)


def fail_at(kernel: TorchKernel, time_s: float) -> NoReturn:
    """End this process when its clock says so."""
    while not kernel.started or kernel.now_ns < time_s * 1e9:
        time.sleep(0.001)
    os._exit(FAILED)


def process_groups(stages: Sequence[Stage], hierarchy: Hierarchy | None) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make one for each group that the plan or the hierarchy of nodes lists: all ranks all of them, in one order."""
    listed = {group for stage in stages for group in stage.topology.groups(stage)}
    listed |= set(hierarchy.teams) if hierarchy else set()
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


def evaluation_here(plan: Plan, parts: Parts, data: Data) -> tuple[float, float]:
    """Seconds of an evaluation of the first model in this process, and the training loss that it found."""
    learner = assemble(plan, device_of(parts.runtime), parts, data).learner
    loss = learner.evaluate(learner.init())["train_loss"]  # which allocates
    began = time.perf_counter()
    learner.evaluate(learner.init())
    return time.perf_counter() - began, loss or 0.0


def warm_up(trainer: Trainer, rank: int) -> None:
    """The first step of a process allocates and plans; that is not what a step costs."""
    params, moments = trainer.init()
    for step in range(3):
        numbers([trainer.local_step(params, moments, rank, step, 0.0)[0]])

"""One rank of a real run, from the start of its process to its end.

`run_rank` starts the reporter, which ends this process if the job's store is silent for
`runtime.wait_timeout_s`, and reports how the rank ended. `train_rank` builds the stages, makes
the process groups, runs the stages on `TorchKernel`, and exits together with the other ranks. A
rejoining worker makes no process groups: it connects to its peers one by one. A rank is either a
child of the controller (`RankSettings.run_dir`), or a process that another launcher started. Such a
process handles Ctrl-C itself, and returns the run's exit code.
"""

import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ashl.config.construct import report_own_faults
from ashl.config.cores import usable_cores
from ashl.config.signals import INTERRUPTS, handle_signals
from ashl.data.dataset import Data
from ashl.device import HOST, claim_generators, read_scalars
from ashl.errors import AshlError
from ashl.learn.fingerprint import Fingerprint, first_difference
from ashl.learn.trainer import Trainer
from ashl.plan.plan import Plan
from ashl.planning.compatibility import (
    survives_failure,
)
from ashl.planning.device import (
    device_of,
    num_with_vectors,
    sums_vectors,
    use_device,
    uses_nccl,
)
from ashl.planning.instantiate import Parts, assemble_job, parts_of
from ashl.planning.reduction_algorithm import nodes_of_workers
from ashl.run.authenticated_store import StoreAddress, StoreClient
from ashl.run.checkpoints import RestorePoint, first_epoch
from ashl.run.control_channel import Reporter, exit_process
from ashl.run.interface import Interface, use_interface
from ashl.run.membership_listener import MembershipListener
from ashl.run.process_setup import (
    EXIT_DECLARED_FAILURE,
    LOG_LEVEL,
    die_with_parent,
    redirect,
    set_title,
    start_log,
)
from ashl.runtime.collectives import Hierarchy, hierarchy_of
from ashl.runtime.effects import Epoch, PeerFailedError
from ashl.runtime.plain_state import decode
from ashl.runtime.process import TorchKernel
from ashl.runtime.rank_checkpoint import RankCheckpointWriter, SavedRank
from ashl.runtime.records import (
    End,
    Heartbeat,
    Placed,
    ProcessExited,
    RankError,
    Ready,
    Rounds,
    StopAsked,
    Text,
    WorkerFailed,
    WorkerRejoined,
    validate,
)
from ashl.runtime.rendezvous import (
    init_process_groups,
    join_epoch,
    join_servers,
    make_epoch_group,
    make_nccl_group,
)
from ashl.runtime.runtimes import wait_limit_s
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import NO_TIMEOUT, first_line, make_nccl_payloads
from ashl.stage.contract import StageConfig
from ashl.stage.program import pairs_of, peers_of, run_stages

logger = logging.getLogger(__name__)

GOODBYE_S = 30.0  # seconds to wait for the peers' goodbye
VERDICT_S = 5.0  # seconds that a failed rank waits for the controller's reason why the run ends
REJOINS = "ASHL_REJOINS"  # environment variable of a process that an evicted one has started
# Words in gloo's errors about a connection that a peer has closed.
BROKEN_CONNECTION = (
    "closed by peer",
    "reset by peer",
    "refused",
    "Broken pipe",
    "connectFullMesh",
    "not connected",
)


class RankSettings(NamedTuple):
    """Settings of a rank beside the plan."""

    rank: int
    rounds: Rounds = "none"
    # the run folder of a child of the controller, which logs there to rank<r>.log; else None
    run_dir: Path | None = None
    interface: Interface | None = None  # network interface of its messages; None = gloo's choice
    device: Text = HOST  # "" = the process chooses it
    have_own_gpus: bool = False  # True if each rank that exchanges vectors has a GPU of its own
    checkpoint_s: float | None = None  # run time between two checkpoints; None = no checkpoints
    incarnation: int = 0  # above 0 for a worker that rejoins a running run
    totals: Heartbeat | None = None  # totals of its earlier incarnations
    fingerprint: Fingerprint | None = None  # fingerprint of the controller's model and data


def run_rank_in_child(settings: RankSettings, plan_json: str, at: StoreAddress) -> None:
    """Run a rank in a child of the controller: it logs to its own file, ignores interrupts, and
    ends with its parent.
    """
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    limit_s = wait_limit_s(Plan.from_json(plan_json).runtime)
    store = StoreClient(at, max(1.0, limit_s))
    # Destructors of gloo may hang if a peer has ended, so none are run.
    exit_process(End(run_rank(settings, plan_json, store).code))


def run_rank(
    settings: RankSettings,
    plan_json: str,
    store: StoreClient,
    show: Callable[[str], None] = lambda text: None,
) -> End:
    """Join the job, train as this rank, exit in order, and return how the rank ended.

    Errors are reported to the controller. A rank that is no child of the controller waits for the
    end of the run; after an error it ends this process with the run's exit code.
    Args: show, shows the user a line.
    """
    plan = Plan.from_json(plan_json)
    is_child = settings.run_dir is not None
    store.limit_answers(wait_limit_s(plan.runtime))
    reporter = make_reporter(settings, store)
    reporter.on_evicted = exit_process if is_child else start_again
    try:
        begin_log(settings, plan, store)
        if is_child:
            signals_handled: AbstractContextManager = nullcontext()
        else:
            signals_handled = handle_signals(
                # in a thread, because the main thread may wait for an answer of the store
                lambda *_: (
                    threading.Thread(target=leave, args=(settings.rank, reporter)).start()
                    if settings.incarnation
                    else reporter.emit(StopAsked(settings.rank))
                )
            )
        with signals_handled, report_own_faults(plan.allow_targets, AshlError):
            train_rank(settings, plan, store, reporter, show)
            reporter.emit(ProcessExited(settings.rank))
            reporter.close()
        end = End(0)
        if not is_child:
            with handle_signals(lambda *_: exit_process(End(130))):  # it has exited in order
                found = reporter.await_run_end()
            end = found or End(1, "the job's store failed before the run ended")
            store.close()
    except KeyboardInterrupt:
        leave(settings.rank, reporter)
    except Exception as error:
        end = report_error(settings, reporter, error)
    return end


def leave(rank: int, reporter: Reporter) -> NoReturn:
    """Report that this worker was interrupted, and end its process; the run continues without
    it.
    """
    reporter.emit(WorkerFailed(rank, 0, "was interrupted"))
    reporter.close()
    exit_process(End(130))


def start_again(end: End) -> NoReturn:
    """Replace this process, which was evicted, by a new one of the same command. The new process
    asks for a place and rejoins.

    A new process of a job that gets no place ends with exit code 0, because the run continues
    without it or has ended.
    """
    sys.stderr.write(f"ashl: {end.why}; rejoins\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[REJOINS] = "1"
    # Sockets close at exec: closing them now can abort this process in a thread of gloo.
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the list's own descriptor is closed
            os.set_inheritable(int(number), int(number) < 3)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def make_reporter(settings: RankSettings, store: StoreClient) -> Reporter:
    """Start the reporter of a rank, with a writer for its part of checkpoints if it saves them."""
    reporter = Reporter(store, settings.rank, settings.rounds, settings.incarnation)
    if settings.checkpoint_s is not None:
        # only a child of the controller shares the run folder with it for certain
        reporter.checkpoint_writer = RankCheckpointWriter(
            settings.rank, settings.run_dir, reporter.emit, settings.checkpoint_s
        )
    return reporter


def begin_log(settings: RankSettings, plan: Plan, store: StoreClient) -> None:
    """Set the log and the title of a rank's process, and log its first line."""
    if settings.run_dir is not None:
        redirect(settings.run_dir / f"rank{settings.rank}.log")
    if settings.run_dir is not None or LOG_LEVEL in os.environ:
        start_log(logging.StreamHandler(), f"rank {settings.rank}")
    role = role_name(plan, settings.rank)
    title = role.removeprefix("the ")
    if plan.num_ranks == plan.num_workers + 1:  # the only server or coordinator needs no number
        title = title.partition(" (")[0]
    set_title(f"ashl {title}")
    logger.info(
        "starts as %s, incarnation %d, process %d on %s; the job's store is at %s",
        role,
        settings.incarnation,
        os.getpid(),
        platform.node(),
        store.address,
    )


def report_error(settings: RankSettings, reporter: Reporter, error: Exception) -> End:
    """Report an error to the controller, and return how the rank ended.

    A rank that is no child of the controller ends this process, with the run's exit code if the
    controller publishes it within `VERDICT_S`.
    """
    sentence = str(error)
    if not isinstance(error, AshlError):
        sentence = f"{type(error).__name__}: {first_line(error)}"
    consequence = is_consequence(error)
    logger.error("fails: %s (consequence=%s)", sentence, consequence)
    reporter.emit(RankError(settings.rank, sentence, consequence))
    reporter.close()
    is_child = settings.run_dir is not None
    if is_child or not (consequence or isinstance(error, AshlError)):
        with suppress(OSError):  # its log may be on a full disk
            traceback.print_exception(error)
    if not is_child:
        end = reporter.await_run_end(VERDICT_S)
        exit_process(end or End(1, f"rank {settings.rank}: {sentence}"))
    return End(1, sentence)


def role_name(plan: Plan, rank: int) -> str:
    """Return the role of a rank with its article, for example `worker 1`, `the server (rank 2)` or
    `the coordinator (rank 4)`.
    """
    if rank < plan.num_workers:
        return f"worker {rank}"
    coordinated = plan.stages[0].topology["_target_"].split(".")[-2] in (
        "gossip",
        "partial_all_reduce",
    )
    return f"the {'coordinator' if coordinated else 'server'} (rank {rank})"


def is_consequence(error: Exception) -> bool:
    """Return True if an error is the consequence of another rank's failure."""
    cause = error.__cause__ or error
    return isinstance(cause, PeerFailedError) or (
        isinstance(cause, RuntimeError) and any(words in str(cause) for words in BROKEN_CONNECTION)
    )


def build_stages(settings: RankSettings, plan: Plan, parts: Parts) -> tuple[StageConfig, ...]:
    """Return the stages for this rank."""
    stages = assemble_job(plan, settings.device, parts).stages
    if not survives_failure(parts):
        return stages
    return tuple(replace(stage, elastic=True) for stage in stages)


def train_rank(
    settings: RankSettings,
    plan: Plan,
    store: StoreClient,
    reporter: Reporter,
    show: Callable[[str], None],
) -> None:
    """Build and connect this rank, train, and exit together with the other ranks."""
    parts = parts_of(plan)
    is_worker = settings.rank < plan.num_workers
    cores = usable_cores()
    reporter.emit(Placed(settings.rank, platform.node(), use_device(settings.device), cores))
    torch.set_num_threads(parts.runtime.threads)
    stages = build_stages(settings, plan, parts)
    use_interface(settings.interface)
    stage = stages[0]
    assert isinstance(stage.trainer, Trainer)
    learner = stage.trainer.learner
    check_fingerprint(learner.fingerprint(), settings.fingerprint or {})
    restore_point = RestorePoint()
    if not settings.incarnation:
        found = store.call_apart("restore", settings.rank)
        restore_point = validate(RestorePoint, found, "a restore point")
    joins = settings.incarnation > 0 or settings.rank in restore_point.absent
    nccl = settings.have_own_gpus and uses_nccl(parts.runtime, stage.topology, parts.cluster)
    all_others = peers_of(stages, settings.rank)
    kernel = make_kernel(settings, plan, parts, store, reporter, stages, nccl)
    kernel.worker_states = learner
    known = restore(kernel, restore_point, plan, settings.device)
    if not regroups(stage):
        kernel.expect_joins({*restore_point.absent}.intersection(all_others))
    elif restore_point.absent:
        number, absent = restore_point.number, restore_point.absent
        kernel.begin_epoch(first_epoch(number, absent, plan.num_workers))
    if is_worker:
        warm_up(stage.trainer, settings.rank)
        learner.set_worker_state(settings.rank, known and known.module_state)
        reporter.learner = learner
    if settings.incarnation:
        if not rejoin(settings, kernel, store, reporter, all_others, regroups(stage)):
            return
        show(f"takes part from {kernel.now_ns / 1e9:.3g} s on")
    listener = MembershipListener(
        kernel, all_others, store, regroups=regroups(stage), is_worker=is_worker
    )
    reporter.on_update = listener.on_membership
    reporter.make_heartbeat = kernel.heartbeat
    began_ns = kernel.now_ns if settings.incarnation else restore_point.since_ns
    schedule_failures(settings, parts, kernel, began_ns)
    logger.info(
        "connected to ranks %s; trains from %.3f s of the run on",
        [*all_others],
        kernel.now_ns / 1e9,
    )
    play = partial(
        run_stages,
        stages=stages,
        saved=known and (known.stage, known.state),
        joins=joins and not regroups(stage),
    )
    with claim_generators(learner.device):
        kernel.run(play)
    if is_worker and learner.carries:
        reporter.queue_final_state(learner.worker_state(settings.rank))
    reporter.emit(kernel.throttle.report())
    answers = stage.elastic or settings.rank == stage.server
    leave_together(settings, plan, store, kernel, listener, answers)


def check_fingerprint(own: Fingerprint, controllers: Fingerprint) -> None:
    """Raise AshlError if this process has built another model or other data than the controller."""
    if (name := first_difference(own, controllers)) is not None:
        raise AshlError(
            f"{name} differ between this process and the controller; draw from the global"
            " generators of torch, numpy or random, which have the run's seed everywhere, or seed"
            " your own generator; read the same files everywhere"
        )


def restore(kernel: TorchKernel, point: RestorePoint, plan: Plan, device: str) -> SavedRank | None:
    """Set the kernel to a restore point; return the saved rank, None at the beginning of a run and
    for a worker without a part of the checkpoint.
    """
    if not point.number:
        return None
    content = decode(point.content, ("ashl", *plan.allow_targets), device)
    known = content if isinstance(content, SavedRank) else None
    kernel.restore(known, point.since_ns, point.number)
    if known is None:
        kernel.ctx.add_totals(content)
    return known


def regroups(stage: StageConfig) -> bool:
    """Return True if a failure or a rejoin begins a new epoch."""
    return stage.elastic and stage.topology.regroups


def make_kernel(
    settings: RankSettings,
    plan: Plan,
    parts: Parts,
    store: StoreClient,
    reporter: Reporter,
    stages: Sequence[StageConfig],
    nccl: bool,
) -> TorchKernel:
    """Make the kernel of this rank and, unless it rejoins, the process groups of the job."""
    stage = stages[0]
    sums_by_nccl = nccl and sums_vectors(stage.topology)
    if not settings.incarnation:
        init_process_groups(
            "cpu:gloo,cuda:nccl" if sums_by_nccl else "gloo",
            dist.PrefixStore("group", store),
            settings.rank,
            plan.num_ranks,
            wait_limit_s(plan.runtime),
        )
    algorithm = stage.topology.algorithm
    nodes = nodes_of_workers(parts.cluster) if algorithm == "hierarchical" else None
    hierarchy = None if nodes is None else hierarchy_of(nodes)
    payloads = None
    if nccl and not sums_by_nccl:
        pairs = pairs_of(stages, num_with_vectors(plan, stage.topology))
        payloads = make_nccl_payloads(settings.rank, pairs, settings.device)

    def make_group(
        epoch: Epoch, members: tuple[int, ...], is_over: Callable[[], bool]
    ) -> dist.ProcessGroup | None:
        return make_epoch_group(store, settings.rank, kernel.clock_ns, epoch, members, is_over)

    kernel = TorchKernel(
        settings.rank,
        reporter,
        lambda clock: Throttle(
            parts.cluster,
            settings.rank,
            stage.plan.workers[0].batch,
            plan.seed,
            stage.trainer.dense_bytes,
            clock,
            store,
            algorithm,
        ),
        peers=peers_of(stages, settings.rank),
        max_bytes=max(stage.max_message_bytes for stage in stages),
        exact=parts.runtime.reduction == "deterministic",
        groups={} if settings.incarnation else process_groups(stages, hierarchy),
        device=settings.device,
        synchronize=None if settings.device == HOST else torch.cuda.synchronize,
        make_subgroup=partial(make_nccl_group, store, settings.rank) if sums_by_nccl else None,
        checkpoint_writer=reporter.checkpoint_writer,
        hierarchy=hierarchy,
        payload_transport=payloads,
        make_group=make_group if regroups(stage) else None,
        peers_in=lambda epoch: peers_of(stages, settings.rank, epoch.workers),
        num_workers=plan.num_workers,
        num_ranks=plan.num_ranks,
    )
    kernel.ctx.incarnation = settings.incarnation
    return kernel


def rejoin(
    settings: RankSettings,
    kernel: TorchKernel,
    store: StoreClient,
    reporter: Reporter,
    others: Sequence[int],
    by_epoch: bool,
) -> bool:
    """Connect this incarnation to the running ranks; return False if the run ends before.

    Args: by_epoch: True if it becomes a member of the next epoch, in which all ranks connect.
    """
    reporter.emit(Ready(settings.rank))
    place = settings.rank, settings.incarnation
    if by_epoch:
        joined = join_epoch(store, *place, lambda: reporter.control_update)
        if joined is None:
            return False
        epoch, zero_ns = joined
        kernel.join_running({}, zero_ns)
        kernel.begin_epoch(epoch)
    else:
        connected = join_servers(store, others, *place, lambda: reporter.end is not None)
        if connected is None:
            return False
        kernel.join_running(*connected)
    kernel.ctx.add_totals(settings.totals)
    reporter.emit(WorkerRejoined(settings.rank, kernel.now_ns))
    return True


def schedule_failures(
    settings: RankSettings, parts: Parts, kernel: TorchKernel, began_ns: int
) -> None:
    """Start a thread for each failure of this rank that cluster.events declares.

    A worker that rejoins or resumes at `began_ns` of the run's clock does not repeat earlier
    failures.
    """
    for event in parts.cluster.events if parts.cluster.fault_kinds else ():
        if event.fail and event.worker == settings.rank and event.time_s * 1e9 >= began_ns:
            threading.Thread(
                target=fail_when_due, args=(kernel, event.time_s), daemon=True, name="fail"
            ).start()


def leave_together(
    settings: RankSettings,
    plan: Plan,
    store: StoreClient,
    kernel: TorchKernel,
    listener: MembershipListener,
    answers: bool,
) -> None:
    """Wait until all ranks except failed ones have finished, and close the connections.

    Args: answers, True if this rank meanwhile tells rejoining workers that they are too late.
    """
    store.set(f"done/{settings.rank}", "")

    def is_over() -> bool:
        others = {*range(plan.num_ranks)} - listener.failed_ranks
        return store.check([f"done/{rank}" for rank in others])

    if answers:
        kernel.run_until(is_over)
    while not is_over():
        time.sleep(0.01)
    logger.info("all ranks are done; leaves")
    kernel.close_connections(GOODBYE_S)


def fail_when_due(kernel: TorchKernel, time_s: float) -> NoReturn:
    """End this process at `time_s` of the run's clock."""
    logger.info("will fail at %g s, as cluster.events declares", time_s)
    while not kernel.has_started or kernel.now_ns < time_s * 1e9:
        time.sleep(0.001)
    os._exit(EXIT_DECLARED_FAILURE)


def process_groups(
    stages: Sequence[StageConfig], hierarchy: Hierarchy | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a process group for each group of ranks in the plan or in the hierarchy of nodes.

    Limits: torch requires that all ranks make all groups, in the same order.
    """
    listed = {group for stage in stages for group in stage.topology.groups(stage)}
    listed |= set(hierarchy.groups) if hierarchy else set()
    return {group: dist.new_group(list(group), timeout=NO_TIMEOUT) for group in sorted(listed)}


def step_here_s(plan: Plan, parts: Parts, data: Data) -> float:
    """Return the seconds of a local step of worker 0 in this process: the median of five."""
    torch.set_num_threads(parts.runtime.threads)
    trainer = assemble_job(plan, device_of(parts.runtime), parts, data).stages[0].trainer
    assert isinstance(trainer, Trainer)
    warm_up(trainer, 0)
    params, moments = trainer.init()
    times = [time.perf_counter()]
    for step in range(5):
        read_scalars([trainer.local_step(params, moments, 0, step, 0.0)[0]])
        times.append(time.perf_counter())
    return median(after - before for before, after in pairwise(times))


def evaluation_here(plan: Plan, parts: Parts, data: Data) -> tuple[float, float]:
    """Return the seconds of one evaluation of the initial model in this process, and its training
    loss.
    """
    # With more threads than free cores, an evaluation of a small model takes 60 times as long. Then
    # `ashl advise` would evaluate so seldom that candidates reach the target together.
    torch.set_num_threads(parts.runtime.threads)
    learner = assemble_job(plan, device_of(parts.runtime), parts, data).learner
    loss = learner.evaluate(learner.init())["train_loss"]  # allocates memory, so it is not timed
    times = list[float]()
    while sum(times) < 0.05:  # short ones several times, as another process may delay one
        began_s = time.perf_counter()
        learner.evaluate(learner.init())
        times.append(time.perf_counter() - began_s)
    return median(times), loss or 0.0


def warm_up(trainer: Trainer, rank: int) -> None:
    """Compute three steps: the first of a process allocates memory and plans kernels, which takes
    longer than a step.
    """
    params, moments = trainer.init()
    for step in range(3):
        read_scalars([trainer.local_step(params, moments, rank, step, 0.0)[0]])

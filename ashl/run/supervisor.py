"""The controller's supervision of a real run: liveness, failures, restarts, and how the run ends.

`supervise` is the loop of the controller. It reads records from the control channel, detects
failures, restarts workers, answers join requests, completes checkpoints, and decides whether the
run ends. `LivenessMonitor` is its knowledge of each rank, which is running, failed, rejoining or
exited. `unexpected_exits` only lists processes that ended: `detect_failures` decides which of them
the run tolerates, and `supervise` ends the run for the others after `SETTLE_S`.

The controller notices the end of a process by its exit code, or on another node by its closed
connection. A rank whose reports have stopped is *silent*. After the heartbeat timeout the
controller evicts a silent worker if the run can continue without it. Otherwise the run ends
(`check_liveness`).

All of this runs in the controller's main thread. Only the channel has other threads: they receive
reports and join requests at any moment. So a pass of the loop reads all records first. The end of
a process counts as a failure in a later pass than the one that noticed it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch import Tensor

from ashl.config.signals import KILLED_BY, describe_exit
from ashl.errors import AshlError, DeadlockError, to_one_line
from ashl.plan.plan import Plan
from ashl.planning.compatibility import can_block_forever, describe_modes, survives_failure
from ashl.run.checkpoints import CheckpointManager
from ashl.run.control_channel import (
    PATIENCE_S,
    POLL_S,
    AwakeTime,
    Content,
    ControlChannel,
)
from ashl.run.handshake import JOINS, Hello, Place, PlaceRequests, check_hello
from ashl.run.monitor import Monitor
from ashl.run.process_setup import EXIT_DECLARED_FAILURE, EXIT_EVICTED
from ashl.run.rank import RankSettings, role_name
from ashl.runtime.effects import Epoch
from ashl.runtime.plain_state import decode
from ashl.runtime.records import (
    CheckpointPartSaved,
    End,
    Heartbeat,
    ModuleState,
    PacingStats,
    Placed,
    PlanMade,
    ProcessExited,
    ProfileMeasured,
    RankError,
    Ready,
    Record,
    Replan,
    Snapshot,
    StageEnd,
    StopAsked,
    WorkerFailed,
    WorkerRejoined,
)
from ashl.runtime.runtimes import wait_limit_s

logger = logging.getLogger(__name__)

DISCONNECTED = "disconnected"
OVER = "the run is over"  # the answer to a process that asks too late
DECLARED = "failed, as cluster.events says"
SAME_CAUSE_S = 1.0  # silences that began within this many seconds have one cause
SETTLE_S = 1.0  # after the first failure: time for the others' records, which may name the cause
# A rank sends five heartbeats a second. One that is silent for longer may be the cause of errors
# of others.
QUIET_S = 0.7
# A run that tolerates failures ends after this silence of a rank that it cannot do without. If the
# heartbeat timeout is longer, it ends after that: an overloaded node must not end it. Any other run
# ends after the heartbeat timeout.
FATAL_SILENCE_S = 10.0


@dataclass
class LivenessMonitor:
    """The controller's knowledge of each rank, from its records and from its process.

    A worker is running, failed (`failed`), rejoining (`failed` and `rejoining`) or exited
    (`exited`).
    """

    plan: Plan
    monitor: Monitor
    channel: ControlChannel
    processes: dict[int, BaseProcess]  # ranks on this node
    # ranks on this node, in their first incarnation
    rank_settings: Mapping[int, RankSettings]
    start: Callable[[RankSettings], None]  # starts an incarnation of a rank on this node
    requests: PlaceRequests  # requests of processes for the other ranks, or to join
    # True if the run can continue without a failed worker, which can rejoin
    survives_failure: bool
    regroups: bool = False  # a failure or a rejoin begins a new epoch
    exited: set[int] = field(default_factory=set)
    # failed workers without which the run continues, also rejoining ones, with the cause
    failed: dict[int, str] = field(default_factory=dict)
    last_failure_s: float = 0.0  # the channel's awake seconds at the latest worker failure
    # controller time at which an unexpected exit was noticed
    exit_noticed_s: dict[int, float] = field(default_factory=dict)
    # True once the worker is ready to be connected
    rejoining: dict[int, bool] = field(default_factory=dict)
    # evicted workers whose process the controller killed
    killed_as_silent: set[int] = field(default_factory=set)
    # restarts of each killed worker, up to runtime.max_restarts; evicted ones do not count
    restarts: Counter[int] = field(default_factory=Counter)
    # controller time of the zero of the run's clock, by the heartbeat with the least delay
    clock_zero_ns: int | None = None
    errors: list[RankError] = field(default_factory=list)
    pacing: list[PacingStats] = field(default_factory=list)  # by how much ranks were too slow
    # controller time of the first sign of a failure that the run may not tolerate
    failure_seen_s: float | None = None
    interrupted_s: float | None = None  # controller time of the user's request to stop

    def handle_record(self, record: Record, content: Content | None) -> None:
        """Apply a rank's record, with the model or module state that belongs to it."""
        log_record(record)
        match record:
            case CheckpointPartSaved():
                pass
            case ProcessExited() | Ready() | WorkerRejoined() | WorkerFailed() | RankError():
                self.handle_membership_record(record)
            case StopAsked():
                self.monitor.stop_reason = self.monitor.stop_reason or "interrupted"
            case PacingStats():
                self.pacing.append(record)
            case Snapshot():
                assert not isinstance(content, bytes)
                self.monitor.snapshot(record, content)
            case ModuleState():
                assert isinstance(content, bytes)
                state = decode(content, ("ashl", *self.plan.allow_targets))
                if state is not None:
                    self.monitor.job.learner.set_worker_state(record.rank, state)
            case _:
                self.adjust_clock_zero(record)
                self.monitor.emit(record)

    def handle_membership_record(self, record: Record) -> None:
        """Apply a record that says that a rank exited, rejoins or failed."""
        match record:
            case ProcessExited():
                self.exited.add(record.rank)
            case Ready(rank) if rank in self.rejoining:
                self.rejoining[rank] = True
                self.publish_membership()
            case WorkerRejoined(rank) if rank in self.rejoining:
                del self.rejoining[rank], self.failed[rank]
                self.publish_membership()
                self.monitor.emit(record)
            # the user has interrupted a process that had joined, which is no child of this one
            case WorkerFailed(rank, why=cause) if rank not in self.processes:
                self.continue_without(rank, cause)
            case RankError(rank) if rank in self.failed:
                self.abandon_rejoin(rank)
            case RankError():
                self.errors.append(record)
            case _:
                pass  # the controller abandoned this rejoin before the worker reported it

    def adjust_clock_zero(self, record: Record) -> None:
        """Estimate the controller time of the run's zero from a heartbeat."""
        if isinstance(record, Heartbeat) and record.time_ns > 0:
            zero_ns = time.monotonic_ns() - record.time_ns
            if self.clock_zero_ns is None or zero_ns < self.clock_zero_ns:
                self.clock_zero_ns = zero_ns

    def unexpected_exits(self) -> dict[int, str]:
        """Return the ranks whose process ended before the rank had exited in order, with the
        cause.
        """
        found: dict[int, str] = {}
        for rank in {*range(self.plan.num_ranks)} - self.exited - self.failed.keys():
            if rank not in self.processes:
                if self.channel.is_closed(rank):
                    found[rank] = DISCONNECTED
            elif (code := self.processes[rank].exitcode) is not None:
                found[rank] = DECLARED if code == EXIT_DECLARED_FAILURE else describe_exit(code)
        return found

    def detect_failures(self, timeout_s: float, silent: Sequence[int], read_s: float) -> None:
        """Continue without workers that were killed, failed as declared, or miss heartbeats while
        others do not.

        Does nothing before the run has begun. A failure counts once all records that the worker had
        sent are read.
        Args: silent, ranks without a report for `timeout_s`; read_s, controller time up to which
        records are read.
        """
        if not self.survives_failure or not any(
            beat.steps or beat.counts for beat in self.monitor.heartbeats.values()
        ):
            return
        self.detect_exits(read_s)
        self.abandon_silent_rejoins(timeout_s)
        same_cause = {*self.silent_ranks(timeout_s - min(SAME_CAUSE_S, timeout_s / 2))}
        if silent and self.can_continue_without(same_cause):
            for rank in silent:
                self.evict_silent(rank, timeout_s)

    def detect_exits(self, read_s: float) -> None:
        """Continue without workers that were killed or failed as declared."""
        reported = {error.rank for error in self.errors}
        for rank, cause in self.unexpected_exits().items():
            noticed_s = self.exit_noticed_s.setdefault(rank, time.monotonic())
            tolerated = cause.startswith(KILLED_BY) or (
                cause in (DECLARED, DISCONNECTED) and rank not in reported
            )
            if read_s > noticed_s and rank < self.plan.num_workers and tolerated:
                self.continue_without(rank, cause)

    def abandon_silent_rejoins(self, timeout_s: float) -> None:
        """Stop waiting for rejoining workers that ended or miss heartbeats; evict the latter."""
        for rank in [*self.rejoining]:
            if self.channel.silent_s(rank) > timeout_s:
                # one that only hung would count as rejoined as soon as it reports again
                self.channel.evict(rank, eviction(rank, timeout_s))
                if rank in self.processes:
                    self.processes[rank].kill()
                self.abandon_rejoin(rank)
            elif rank not in self.processes and self.channel.is_closed(rank):
                self.abandon_rejoin(rank)

    def evict_silent(self, rank: int, timeout_s: float) -> None:
        """Evict a worker that missed heartbeats for `timeout_s`; the run continues without it."""
        logger.warning(
            "evicts worker %d, incarnation %d: it missed heartbeats for %g s",
            rank,
            self.channel.incarnations[rank],
            timeout_s,
        )
        self.channel.evict(rank, eviction(rank, timeout_s))
        if rank in self.processes and can_block_forever(self.monitor.job.parts):
            # the other workers may be blocked in a collective with it
            self.processes[rank].kill()
            self.killed_as_silent.add(rank)
        self.continue_without(rank, silence(timeout_s))

    def can_continue_without(self, silent: set[int]) -> bool:
        """Return True if the run can continue without these ranks, which became silent at about the
        same time.

        The run needs its server or coordinator and at least one worker. It does not continue if a
        collective with a rank on another node can block forever.
        """
        running = {*range(self.plan.num_workers)} - self.exited - self.failed.keys()
        # without a server, another worker takes the place of a failed lead rank
        has_server = self.plan.lead_rank >= self.plan.num_workers
        if has_server and self.plan.lead_rank in silent:
            return False
        if not silent < running:
            return False
        return not silent - self.processes.keys() or not can_block_forever(self.monitor.job.parts)

    def continue_without(self, rank: int, cause: str) -> None:
        """Record a worker failure; the run continues without the worker."""
        self.rejoining.pop(rank, None)
        self.exit_noticed_s.pop(rank, None)
        if rank in self.failed:
            return self.publish_membership()
        self.failed[rank] = cause
        self.last_failure_s = self.channel.awake_s
        now_ns = time.monotonic_ns() - (self.clock_zero_ns or 0)
        if cause == DECLARED:
            declared = [
                round(event.time_s * 1e9)
                for event in self.monitor.job.parts.cluster.events
                if event.fail and event.worker == rank
            ]
            # the controller's estimate of the run's clock may be a little behind
            now_ns = min(declared, key=lambda time_ns: abs(time_ns - now_ns), default=now_ns)
        self.monitor.emit(WorkerFailed(rank, now_ns, "declared" if cause == DECLARED else cause))
        incarnation = self.channel.incarnations[rank]
        logger.warning(
            "worker %d, incarnation %d, failed: %s; the run continues without it",
            rank,
            incarnation,
            cause,
        )
        self.publish_membership()

    def abandon_rejoin(self, rank: int) -> None:
        """Stop waiting for a rejoining worker."""
        if self.rejoining.pop(rank, None) is not None:
            incarnation = self.channel.incarnations[rank]
            logger.warning(
                "worker %d does not rejoin: incarnation %d failed or is superseded",
                rank,
                incarnation,
            )
        self.publish_membership()

    def restart_workers(self, max_restarts: int) -> None:
        """Restart evicted workers on this node, and killed ones up to `max_restarts` times each.

        The controller stops waiting for a worker whose process ends while it rejoins.
        """
        for rank in [rank for rank in self.failed if rank in self.processes]:
            code = self.processes[rank].exitcode
            if code is None:
                continue
            if rank in self.rejoining:
                self.abandon_rejoin(rank)
            evicted = code == EXIT_EVICTED or rank in self.killed_as_silent
            if evicted or (code < 0 and self.restarts[rank] < max_restarts):
                self.restarts[rank] += not evicted
                self.killed_as_silent.discard(rank)
                self.expect_rejoin(rank)
                incarnation = self.channel.incarnations[rank]
                logger.info(
                    "restarts worker %d as incarnation %d: it %s",
                    rank,
                    incarnation,
                    self.failed[rank],
                )
                totals = self.monitor.heartbeats.get(rank)
                settings = self.rank_settings[rank]
                self.start(settings._replace(incarnation=incarnation, totals=totals))

    def expect_rejoin(self, rank: int) -> None:
        """Expect the next incarnation of a failed worker."""
        self.channel.incarnations[rank] += 1
        self.channel.last_heard_s[rank] = self.channel.awake_s
        self.rejoining[rank] = False
        self.publish_membership()

    def publish_membership(self) -> None:
        """Publish to all ranks which workers failed, and one worker that is ready to rejoin."""
        incarnations = self.channel.incarnations
        self.channel.absent = self.failed.keys() - self.rejoining.keys()
        failed = tuple(
            (rank, incarnations[rank] - (rank in self.rejoining)) for rank in self.failed
        )
        ready = tuple(
            (rank, incarnations[rank]) for rank, is_ready in self.rejoining.items() if is_ready
        )
        # workers rejoin one after the other
        update = self.channel.control_update._replace(failed=failed, ready=ready[:1])
        if self.regroups:
            update = update._replace(epoch=self.next_epoch(update.epoch))
        self.channel.control_update = update

    def next_epoch(self, epoch: Epoch) -> Epoch:
        """Return the present epoch if its members are unchanged, else the next one."""
        incarnations = self.channel.incarnations
        workers = tuple(
            rank
            for rank in range(self.plan.num_workers)
            if rank not in self.exited
            and (rank not in self.failed or self.rejoining.get(rank, False))
        )
        members = tuple(incarnations[rank] for rank in workers)
        if (workers, members) == (epoch.workers, epoch.incarnations):
            return epoch
        return Epoch(epoch.number + 1, workers, members)

    def silent_ranks(self, for_s: float) -> list[int]:
        """Return the running ranks without a report for longer than `for_s`, longest first."""
        running = self.channel.last_heard_s.keys() - self.exited - self.failed.keys()
        silent = [rank for rank in running if self.channel.silent_s(rank) > for_s]
        return sorted(silent, key=self.channel.silent_s, reverse=True)


def silence(timeout_s: float) -> str:
    """Return the cause of a failure by missed heartbeats."""
    return f"sent no heartbeat for {timeout_s:g} s"


def eviction(rank: int, timeout_s: float) -> End:
    """Return the end of a worker that missed heartbeats."""
    source = "runtime.heartbeat_timeout_s"
    sentence = f"worker {rank} {silence(timeout_s)} ({source}); the run continues without it"
    return End(EXIT_EVICTED, sentence)


def supervise(
    liveness: LivenessMonitor,
    run_dir: Path,
    checkpoint_manager: CheckpointManager,
) -> dict | None:
    """Read records and react to them until all ranks have exited or failed.

    Returns and raises as `ashl.run.launch.run_controller`.
    """
    plan, channel = liveness.plan, liveness.channel
    runtime = liveness.monitor.job.parts.runtime
    timeout_s = runtime.heartbeat_timeout_s
    # the ranks on this node have only just been started
    channel.last_heard_s |= dict.fromkeys(liveness.processes, channel.awake_s)
    # a resumed run has evaluations already
    channel.control_update = channel.control_update._replace(scores=liveness.monitor.scores)
    supervised = AwakeTime()
    while len(liveness.exited.union(liveness.failed)) < plan.num_ranks:
        now_s = time.monotonic()  # the records that were received before are applied next
        read_records(liveness, checkpoint_manager)
        publish_stop(liveness, now_s)
        silent = liveness.silent_ranks(timeout_s)
        liveness.detect_failures(timeout_s, silent, now_s)
        checkpoint_manager.complete_checkpoints(liveness.failed, liveness.monitor)
        if not channel.control_update.stop_reason and liveness.monitor.final is None:
            liveness.restart_workers(runtime.max_restarts)
        answer_requests(liveness)
        raise_settled_failure(liveness, run_dir, now_s)
        interrupted_s = liveness.interrupted_s
        if interrupted_s is not None and now_s - interrupted_s > PATIENCE_S:
            liveness.monitor.evaluate_pending()
            return None
        check_liveness(liveness, timeout_s, silent)
        channel.control_update = channel.control_update._replace(supervised_s=supervised.passed_s())
        liveness.monitor.draw_progress()
        time.sleep(POLL_S)
    liveness.monitor.evaluate_pending()
    if liveness.monitor.final is None and liveness.failed:
        rank, cause = [*liveness.failed.items()][-1]
        raise AshlError(
            f"worker {rank} {cause} when the others had exited, and the last model with it"
        )
    for rank, process in liveness.processes.items():
        if rank not in liveness.failed:
            process.join(PATIENCE_S)
    return pacing_summary(liveness.pacing, plan.num_workers)


def read_records(liveness: LivenessMonitor, checkpoint_manager: CheckpointManager) -> None:
    """Apply all records that the control channel has received."""
    channel = liveness.channel
    for record, content in channel.receive_records():
        liveness.handle_record(record, content)
        if isinstance(record, Snapshot):
            channel.control_update = channel.control_update._replace(scores=liveness.monitor.scores)
        elif isinstance(record, CheckpointPartSaved):
            assert not isinstance(content, Tensor)
            checkpoint_manager.add_part(record, content)


def publish_stop(liveness: LivenessMonitor, now_s: float) -> None:
    """Ask all ranks to stop, once, if the run is to stop."""
    channel, reason = liveness.channel, liveness.monitor.stop_reason
    if not reason or channel.control_update.stop_reason:
        return
    if reason == "interrupted":
        liveness.interrupted_s = now_s
    logger.info("asks all ranks to stop: %s", reason)
    channel.control_update = channel.control_update._replace(stop_reason=reason)


def raise_settled_failure(liveness: LivenessMonitor, run_dir: Path, now_s: float) -> None:
    """Raise the error of a failure that the run does not tolerate, `SETTLE_S` after its first sign.

    Args: now_s, controller time up to which records are read.
    """
    if not (liveness.errors or liveness.unexpected_exits()):
        liveness.failure_seen_s = None  # the run continues without the failed worker
    elif liveness.failure_seen_s is None:
        liveness.failure_seen_s = now_s
        logger.warning("a rank failed; waits %g s for records that name the cause", SETTLE_S)
    elif now_s - liveness.failure_seen_s > SETTLE_S:
        raise run_failure(liveness, run_dir)


# levels of the records that are logged above DEBUG
LEVELS: dict[type, int] = {
    **dict.fromkeys((StopAsked, Replan, PlanMade, ProfileMeasured, Placed, Ready), logging.INFO),
    **dict.fromkeys((WorkerRejoined, StageEnd, ProcessExited), logging.INFO),
    WorkerFailed: logging.WARNING,
    RankError: logging.ERROR,
}


def log_record(record: Record) -> None:
    """Log a rank's record; heartbeats are never logged."""
    level = LEVELS.get(type(record), logging.DEBUG)
    if logger.isEnabledFor(level) and not isinstance(record, Heartbeat):
        shown = {k: v for k, v in record._asdict().items() if k not in ("rank", "counts")}
        text = ", ".join(f"{name}={value}" for name, value in shown.items())[:300]
        logger.log(level, "rank %d reports %s: %s", record.rank, type(record).__name__, text)


def run_failure(liveness: LivenessMonitor, run_dir: Path) -> AshlError:
    """Return the error that names the rank at fault, the cause and the rank's log."""
    rank, cause = find_culprit(
        liveness.errors,
        liveness.unexpected_exits() | liveness.failed,
        liveness.silent_ranks(QUIET_S),
    )
    log = run_dir / f"rank{rank}.log"
    return AshlError(
        f"{rank_name(liveness, rank)}{cause}" + (f"; its log is {log}" if log.exists() else "")
    )


def find_culprit(
    errors: Sequence[RankError], ended: Mapping[int, str], silent: Collection[int]
) -> tuple[int, str]:
    """Return the rank at fault for a failure, and the rest of the sentence about it.

    Order: an error of a rank's own, then a process that ended, then a silent rank, then an error
    that is the consequence of another rank's failure.
    Args: ended, the cause by rank; silent, ranks without records, longest first.
    """
    own = next((error for error in errors if not error.consequence), None)
    if own is not None:
        return own.rank, f": {own.error}"
    reported = {error.rank for error in errors}
    if found := [rank for rank in ended if rank not in reported]:
        return found[0], f" {ended[found[0]]}"
    if found := [rank for rank in silent if rank not in reported]:
        return found[0], " disconnected: its connections were closed, and no heartbeat followed"
    return errors[0].rank, f": {errors[0].error}"


def rank_name(liveness: LivenessMonitor, rank: int) -> str:
    """Return a rank by its role and, if the run has several nodes, its node."""
    hosts = {place.host for place in liveness.monitor.hosts.values()}
    place = liveness.monitor.hosts.get(rank)
    return role_name(liveness.plan, rank) + (
        f" on {place.host}" if place and len(hosts) > 1 else ""
    )


def check_liveness(
    liveness: LivenessMonitor, timeout_s: float, judged_silent: Collection[int]
) -> None:
    """Raise AshlError if the run cannot do without a rank that misses heartbeats, or if all ranks
    wait for each other for `runtime.wait_timeout_s`. The error names the ranks.

    Args: timeout_s, the heartbeat timeout; judged_silent, the silent ranks that `detect_failures`
    has judged. It judges a rank that has become silent since then in the next pass.
    """
    channel = liveness.channel
    fatal_s, source = timeout_s, " (runtime.heartbeat_timeout_s)"
    if liveness.survives_failure and timeout_s < FATAL_SILENCE_S:
        fatal_s, source = FATAL_SILENCE_S, ""
    if any(rank in judged_silent for rank in liveness.silent_ranks(fatal_s)):
        for_so_long = f"for {fatal_s:g} s{source}"
        # with the ranks that became silent at about the same time
        silent = liveness.silent_ranks(fatal_s - min(SAME_CAUSE_S, fatal_s / 2))
        names = ", ".join(rank_name(liveness, rank) for rank in sorted(silent))
        raise AshlError(f"{names} sent no heartbeat {for_so_long}; the run ends here")
    running = {*range(liveness.plan.num_ranks)} - liveness.failed.keys()
    beats = [liveness.monitor.heartbeats.get(rank) for rank in sorted(running)]
    limit_s = wait_limit_s(liveness.plan.runtime)
    stuck = [beat for beat in beats if beat and beat.waiting and beat.idle_s > limit_s]
    # a failure, or a stop of this process, may have held up all ranks
    since_s = channel.awake_s - max(liveness.last_failure_s, channel.awake.resumed_s)
    if len(stuck) == len(running) and since_s > limit_s:
        waits = "; ".join(f"rank {beat.rank} {beat.waiting}" for beat in stuck)
        raise DeadlockError(f"deadlock: no rank made progress for {limit_s:g} s: {waits}")


# --- join requests


def answer_requests(liveness: LivenessMonitor) -> None:
    """Answer every request for a place: by the place of a process of the job that begins, by that
    of a failed worker, or by the reason against it.
    """
    requests = liveness.requests
    while requests.pending:
        hello, answer, thread = requests.pending.popleft()
        if not answer.set_running_or_notify_cancel():  # the process waits no longer
            continue
        place = requests.places.pop(hello.rank, None)
        if place is None:
            place = late_place(liveness, hello)
            logger.info(
                "a process on %s asks to join: %s",
                hello.host,
                place.refused or f"it becomes worker {place.settings.rank}",
            )
        if place.refused is None:
            # the process may end before its first report
            liveness.channel.expect_reports(place.settings.rank, thread)
        answer.set_result(place)


def late_place(liveness: LivenessMonitor, hello: Hello) -> Place:
    """Return the place of a failed worker for a process that asks after the begin, or a refusal."""
    requests = liveness.requests
    try:
        check_hello(hello, requests.own)
    except AshlError as error:
        return Place(refused=to_one_line(str(error)), exit_code=error.exit_code)
    worker = requests.workers.get(hello.rank, hello.worker)
    refusal = join_refusal(liveness, hello, worker)
    if refusal is not None:
        return refusal
    free = liveness.failed.keys() - liveness.rejoining.keys()
    return admit_process(liveness, min(free) if worker is None else worker)


def admit_process(liveness: LivenessMonitor, rank: int) -> Place:
    """Expect a joining process in the place of a failed worker, and return this place."""
    liveness.expect_rejoin(rank)
    liveness.processes.pop(rank, None)
    on_this_node = liveness.rank_settings.get(rank)
    settings = next(iter(liveness.rank_settings.values()))._replace(
        rank=rank,
        run_dir=None,
        interface=None,
        device=on_this_node.device if on_this_node else "",
        incarnation=liveness.channel.incarnations[rank],
        totals=liveness.monitor.heartbeats.get(rank),
    )
    return Place(settings, failure=liveness.failed[rank], plan=liveness.plan.to_json())


def join_refusal(liveness: LivenessMonitor, hello: Hello, worker: int | None) -> Place | None:
    """Return a rejection with its reason, if no process can join now in the place of `worker`, or
    of any worker if None; None if one can.
    """
    plan, monitor, failed = liveness.plan, liveness.monitor, liveness.failed
    parts = monitor.job.parts
    reason, may_change = None, False
    if not survives_failure(parts):
        reason = (
            f"a run with {describe_modes(parts)} admits no joining process; start a new run with"
            " run.checkpoint_s, which can be resumed"
        )
    elif monitor.final is not None or monitor.stop_reason:
        reason = OVER
    elif worker is not None and worker >= plan.num_workers:
        reason = f"there is no worker {worker}; the run has workers 0 to {plan.num_workers - 1}"
    else:
        may_change = True
        if monitor.counts() is None:
            reason = "the run has not begun"
        elif worker is not None and worker not in failed:
            reason = f"worker {worker} has not failed"
        elif not failed:
            reason = "no worker of this run has failed"
        elif liveness.rejoining.keys() >= ({*failed} if worker is None else {worker}):
            reason = "every failed worker is already rejoining"
    if reason is not None and hello.rank != JOINS and reason != OVER:
        reason = (
            f"a process of rank {hello.rank} is there already, and this one on {hello.host} cannot"
            f" take its place: {reason}; give every process a rank of its own, and every job a"
            " MASTER_PORT of its own"
        )
    return None if reason is None else Place(refused=reason, may_change=may_change)


def pacing_summary(reports: Sequence[PacingStats], num_workers: int) -> dict:
    """Return by how much the processes were slower than declared; empty if nothing was declared.

    `workers` has one row per worker: by how much its steps, encodings and transfers took longer, as
    a fraction of their declared time. A push that a server received counts for the worker that sent
    it. A transfer between servers counts for no worker. `slower_by` is the largest value.
    """
    late_s, declared_s = [0.0] * num_workers, [0.0] * num_workers
    for report in reports:
        for sender, late, declared in report.late:
            rank = report.rank if report.rank < num_workers else sender
            if rank < num_workers:
                late_s[rank] += late
                declared_s[rank] += declared
    if not any(declared_s):
        return {}
    shares = [
        late / declared if declared else 0.0
        for late, declared in zip(late_s, declared_s, strict=True)
    ]
    workers = [{"rank": rank, "slower_by": share} for rank, share in enumerate(shares)]
    return {"workers": workers, "slower_by": max(shares)}

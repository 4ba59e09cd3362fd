"""The controller's supervision of a real run: liveness, failures, restarts, and how the run ends.

`LivenessMonitor` holds what is known of each rank: running, failed, rejoining or exited.
`supervise` is the loop of the controller: it reads records from the control channel, detects
failures, restarts workers, answers join requests, takes checkpoints, and decides whether the run
ends. An unexpected exit is a fact (`LivenessMonitor.unexpected_exits`); that the run ends for it is
a decision (`supervise`).
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.planning.compatibility import admits_rejoin, can_block_forever, describe_modes
from ashl.run.checkpoints import CheckpointManager
from ashl.run.control_channel import (
    PATIENCE_S,
    POLL_S,
    ControlChannel,
    JoinAnswer,
    JoinRequest,
    described,
)
from ashl.run.membership_listener import AWAKE_S, SAME_CAUSE_S
from ashl.run.monitor import Monitor
from ashl.run.process_setup import EXIT_CONTROLLER_SILENT, EXIT_DECLARED_FAILURE, EXIT_EVICTED
from ashl.run.rank import RankSettings, role_name
from ashl.run.uploads import decode_state
from ashl.runtime.control_messages import End
from ashl.runtime.records import (
    Alive,
    CheckpointPartSaved,
    Heartbeat,
    Joined,
    Lateness,
    Left,
    Lost,
    Measured,
    Measures,
    ModuleState,
    PacingStats,
    PeerUnreachable,
    Placed,
    PlanMade,
    ProfileMeasured,
    RankError,
    Ready,
    Record,
    Replan,
    Round,
    Snapshot,
    StageBoundary,
    StageEnd,
    StopAsked,
    TimeTotals,
    UpdateShown,
)
from ashl.runtime.regroup_consensus import KNOWN_S
from ashl.runtime.time_accounting import KINDS

logger = logging.getLogger(__name__)

KILLED_BY = "was killed by"  # how it is reported, followed by the signal's name
DECLARED = "failed, as cluster.events says"
SETTLE_S = 1.0  # after the first failure: time for the others' records, which may name the cause
# of a rank that speaks five times a second, when another has lost the link to it: it has vanished
QUIET_S = 0.7
SURE_S = 2.0  # ... where others have lost the link to one of several and cannot say to whom


@dataclass
class LivenessMonitor:
    """What the controller knows of each rank, from its records and from its process.

    A worker is running, failed (`failed`), rejoining (`failed` and `rejoining`) or exited
    (`exited`).
    """

    plan: Plan
    channel: ControlChannel
    processes: dict[int, BaseProcess]  # of the ranks on this node
    rank_settings: Mapping[
        int, RankSettings
    ]  # of the ranks on this node, in their first incarnation
    start: Callable[[int, int], None]  # starts this incarnation of a rank on this node
    survives_failure: bool  # the run can continue without a worker
    admits_rejoin: bool  # a failed worker can rejoin
    exited: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(
        default_factory=dict
    )  # workers without which the run continues, with the cause
    last_failure_s: float = 0.0  # controller time of the latest worker failure
    exit_noticed_s: dict[int, float] = field(
        default_factory=dict
    )  # controller time at which an exit was noticed
    rejoining: dict[int, bool] = field(
        default_factory=dict
    )  # True once the worker is ready to be connected
    prior_totals: dict[int, Heartbeat] = field(
        default_factory=dict
    )  # totals of a worker's earlier incarnations
    # Peers that another rank cannot reach: whether the broken link leads to this peer alone, and
    # the controller time.
    unreachable: dict[int, tuple[bool, float]] = field(default_factory=dict)
    killed_as_silent: set[int] = field(
        default_factory=set
    )  # evicted workers whose process was killed here
    restarts: Counter[int] = field(
        default_factory=Counter
    )  # restarts of a killed worker, up to runtime.max_restarts
    clock_zero_ns: int | None = (
        None  # controller time of the run's zero, by the heartbeat with the least delay
    )
    errors: list[RankError] = field(default_factory=list)
    pace: list[PacingStats] = field(default_factory=list)

    def handle_record(self, monitor: Monitor, record: Record, vector: Tensor | None) -> None:
        """Take in what a rank reports, with the model or state that belongs to it."""
        log_record(record)
        if isinstance(record, Heartbeat) and record.time_ns > 0:
            zero_ns = time.monotonic_ns() - record.time_ns
            self.clock_zero_ns = (
                zero_ns if self.clock_zero_ns is None else min(self.clock_zero_ns, zero_ns)
            )
        match record:
            case Round() | StageEnd() | StageBoundary() | Replan() if record.stage not in range(
                len(self.plan.stages)
            ):
                raise AshlError(
                    f"rank {record.rank} tells of stage {record.stage + 1}, which the plan does not"
                    " have"
                )
            case Alive() | CheckpointPartSaved():
                pass
            case Left():
                self.exited.add(record.rank)
            case Ready(rank) if rank in self.rejoining:
                self.rejoining[rank] = True
                self.publish_membership()
            case Joined(rank, time_ns) if rank in self.rejoining:
                self.prior_totals[rank] = outage_until(self.prior_totals[rank], time_ns)
                del self.rejoining[rank], self.failed[rank]
                self.publish_membership()
                monitor.emit(record)
            case Lost(rank, why=why) if rank not in self.processes:
                self.continue_without(monitor, rank, why)
            case PeerUnreachable(_, rank, incarnation, alone) if (
                rank < self.plan.num_workers and incarnation == self.channel.incarnations[rank]
            ):
                self.unreachable[rank] = max(
                    self.unreachable.get(rank, (False, 0.0)), (alone, time.monotonic())
                )
            case RankError(rank) if rank in self.failed:
                self.abandon_rejoin(rank)
            case RankError():
                self.errors.append(record)
            case StopAsked():
                monitor.stopping = monitor.stopping or record.reason
            case PacingStats():
                self.pace.append(record)
            case Snapshot() | UpdateShown():
                monitor.snapshot(record, vector)
            case ModuleState():
                assert vector is not None
                monitor.set_module_state(
                    record.rank, decode_state(vector, ("ashl", *self.plan.allow_targets))
                )
            case Heartbeat() | TimeTotals() | StageBoundary() if record.rank in self.prior_totals:
                monitor.emit(add_prior_totals(self.prior_totals[record.rank], record))
            case _:
                monitor.emit(record)

    def unexpected_exits(self) -> dict[int, str]:
        """Return the ranks on this node whose process ended before the rank had exited in order,
        and how it ended.
        """
        away = self.exited.union(self.failed)
        ended = {
            rank: process.exitcode for rank, process in self.processes.items() if rank not in away
        }
        return {rank: describe_exit(code) for rank, code in ended.items() if code is not None}

    def detect_failures(
        self, monitor: Monitor, timeout_s: float, late: Sequence[int], drained: float
    ) -> None:
        """Continue without workers that were killed, failed as declared, or miss heartbeats while
        others do not.

        Does nothing before the run has begun. A failure counts once all records that the worker had
        sent are read.
        Args: late, ranks without a heartbeat for `timeout_s`; drained, controller time up to which
        records are read.
        """
        if not self.survives_failure or not any(
            beat.steps or beat.counts for beat in monitor.beats.values()
        ):
            return
        for rank, how in self.unexpected_exits().items():
            heard_out = drained > self.exit_noticed_s.setdefault(rank, time.monotonic())
            if (
                heard_out
                and rank < self.plan.num_workers
                and (how.startswith(KILLED_BY) or how == DECLARED)
            ):
                self.continue_without(monitor, rank, how)
        for rank in [*self.rejoining]:
            quiet_s = self.channel.drained_s - self.channel.last_heard_s[rank]
            if quiet_s > timeout_s or self.is_presumed_dead(rank, quiet_s):
                if rank in self.processes:
                    self.processes[rank].kill()
                self.abandon_rejoin(rank)
        for rank in self.presumed_dead():
            self.continue_without(monitor, rank, "disconnected")
        if late and self.can_continue_without(
            monitor, {*self.silent_ranks(timeout_s - min(SAME_CAUSE_S, timeout_s / 2))}
        ):
            for rank in late:
                fenced = self.channel.incarnations[rank]
                logger.warning(
                    "evicts worker %d, incarnation %d: it missed heartbeats for %g s",
                    rank,
                    fenced,
                    timeout_s,
                )
                how = f"sent no heartbeat for {timeout_s:g} s"
                self.channel.evict(
                    rank,
                    End(
                        EXIT_EVICTED,
                        f"worker {rank} {how} (runtime.heartbeat_timeout_s); the run continues"
                        " without it",
                    ),
                )
                if rank in self.processes and (
                    not self.admits_rejoin or can_block_forever(monitor.job.parts)
                ):
                    self.processes[rank].kill()  # others may wait for it in the middle of a sum
                    self.killed_as_silent.add(rank)
                self.continue_without(monitor, rank, how)

    def is_presumed_dead(self, rank: int, quiet_s: float) -> bool:
        """Return True if a rank on another node, silent and unreachable for its peers, counts as
        failed.
        """
        alone, at = self.unreachable.get(rank, (False, -math.inf))
        if rank in self.processes:
            return False
        return quiet_s > QUIET_S if alone else quiet_s > SURE_S and time.monotonic() - at < KNOWN_S

    def presumed_dead(self) -> list[int]:
        """Return the workers on other nodes that count as failed."""
        return [
            rank
            for rank in self.silent_ranks(QUIET_S)
            if self.is_presumed_dead(rank, self.channel.drained_s - self.channel.last_heard_s[rank])
        ]

    def can_continue_without(self, monitor: Monitor, alike: set[int]) -> bool:
        """Return True if the run can continue without these ranks, which fell silent at about the
        same time.
        """
        there = {*range(self.plan.num_workers)} - self.exited - self.failed.keys()
        served = (
            self.plan.lead_rank >= self.plan.num_workers
        )  # else another worker stands in for home
        if (
            (served and self.plan.lead_rank in alike)
            or not alike < there
            or is_cut_off(self, monitor, alike)
        ):
            return False
        return not alike - self.processes.keys() or not can_block_forever(monitor.job.parts)

    def continue_without(self, monitor: Monitor, rank: int, how: str) -> None:
        """Record a worker failure; the run continues without the worker."""
        self.rejoining.pop(rank, None)
        self.exit_noticed_s.pop(rank, None)
        if rank in self.failed:
            return self.publish_membership()
        self.failed[rank], self.last_failure_s = how, time.monotonic()
        now_ns = time.monotonic_ns() - (self.clock_zero_ns or 0)
        if how == DECLARED:
            declared = [
                round(e.time_s * 1e9)
                for e in monitor.job.parts.cluster.events
                if e.fail and e.worker == rank
            ]
            # home's clock may be a little behind
            now_ns = min(declared, key=lambda time_ns: abs(time_ns - now_ns), default=now_ns)
        monitor.emit(Lost(rank, now_ns, "declared" if how == DECLARED else how))
        incarnation = self.channel.incarnations[rank]
        logger.warning(
            "worker %d, incarnation %d, failed: %s; the run continues without it",
            rank,
            incarnation,
            how,
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

    def restart_workers(self, monitor: Monitor, max_restarts: int) -> None:
        """Restart evicted workers on this node, and killed ones up to `max_restarts` times each.

        A worker that ends while it rejoins is given up.
        """
        for rank in [rank for rank in self.failed if rank in self.processes and self.admits_rejoin]:
            code = self.processes[rank].exitcode
            if code is None:
                continue
            if rank in self.rejoining:
                self.abandon_rejoin(rank)
            if (
                code == EXIT_EVICTED
                or rank in self.killed_as_silent
                or (code < 0 and self.restarts[rank] < max_restarts)
            ):
                self.restarts[rank] += code != EXIT_EVICTED and rank not in self.killed_as_silent
                self.killed_as_silent.discard(rank)
                self.expect_rejoin(monitor, rank)
                incarnation = self.channel.incarnations[rank]
                logger.info(
                    "restarts worker %d as incarnation %d: it %s",
                    rank,
                    incarnation,
                    self.failed[rank],
                )
                self.start(rank, incarnation)

    def expect_rejoin(self, monitor: Monitor, rank: int) -> None:
        """Expect the next incarnation of a failed worker."""
        self.prior_totals[rank] = monitor.beats.get(rank) or empty_totals(rank)
        self.channel.incarnations[rank] += 1
        self.channel.last_heard_s[rank] = time.monotonic()
        self.rejoining[rank] = False
        self.unreachable.pop(rank, None)
        self.publish_membership()

    def publish_membership(self) -> None:
        """Publish to all ranks which workers failed, and the one that is ready to rejoin."""
        incarnations = self.channel.incarnations
        self.channel.absent = self.failed.keys() - self.rejoining.keys()
        lost = tuple((rank, incarnations[rank] - (rank in self.rejoining)) for rank in self.failed)
        ready = tuple(
            (rank, incarnations[rank]) for rank, is_ready in self.rejoining.items() if is_ready
        )
        self.channel.publish(
            self.channel.control_update._replace(lost=lost, ready=ready[:1])
        )  # one after the other

    def silent_ranks(self, for_s: float) -> list[int]:
        """Return the ranks without a record for longer than `for_s`, as of the last empty queue;
        longest first.
        """
        away = self.exited.union(self.failed)
        since = {
            rank: self.channel.drained_s - at
            for rank, at in self.channel.last_heard_s.items()
            if rank not in away
        }
        return sorted(
            (rank for rank in since if since[rank] > for_s), key=lambda rank: -since[rank]
        )


def supervise(
    liveness: LivenessMonitor,
    run_dir: Path,
    monitor: Monitor,
    checkpoint_manager: CheckpointManager,
) -> dict | None:
    """Read records and react to them until all ranks have exited or failed, as `run_controller`
    says.
    """
    plan, channel, processes, runtime = (
        liveness.plan,
        liveness.channel,
        liveness.processes,
        monitor.job.parts.runtime,
    )
    timeout_s = runtime.heartbeat_timeout_s
    channel.last_heard_s |= dict.fromkeys(
        processes, time.monotonic()
    )  # they have only just been started
    channel.publish(
        channel.control_update._replace(scores=monitor.scores)
    )  # of before, where it goes on
    announced, failed_at, interrupted_at = None, None, None
    looked, answered, unanswered_s = time.monotonic(), 0.0, 0.0
    while len(liveness.exited.union(liveness.failed)) < plan.num_ranks:
        drained = channel.drained_s  # what was said until then is heard now
        for record, vector in channel.receive_records():
            liveness.handle_record(monitor, record, vector)
            if isinstance(record, Snapshot):
                channel.publish(channel.control_update._replace(scores=monitor.scores))
            elif isinstance(record, CheckpointPartSaved):
                checkpoint_manager.add_part(record, monitor, vector)
        now = time.monotonic()
        unanswered_s += (
            min(now - looked, AWAKE_S) if channel.store_answered_s == answered else -unanswered_s
        )
        looked, answered = now, channel.store_answered_s
        if monitor.stopping and not announced:
            announced, interrupted_at = (
                monitor.stopping,
                now if monitor.stopping == "interrupted" else None,
            )
            logger.info("asks all ranks to stop: %s", announced)
            channel.publish(channel.control_update._replace(stopping=announced))
        late = liveness.silent_ranks(timeout_s)
        if (
            checkpoint_manager.every_s is None
        ):  # else the run is gone on with from its last checkpoint
            liveness.detect_failures(monitor, timeout_s, late, drained)
            if not announced and monitor.final is None:
                liveness.restart_workers(monitor, runtime.max_restarts)
        while channel.join_requests:
            number, ask = channel.join_requests.popleft()
            answer = answer_join_request(
                liveness, monitor, ask, checkpoint_manager.every_s is not None
            )
            if answer.refused is None:
                logger.info(
                    "admits a process as worker %d, incarnation %d",
                    answer.worker,
                    answer.incarnation,
                )
            else:
                logger.info("rejects a join request: %s", answer.refused)
            channel.send_join_answer(number, answer)
        if not (
            liveness.errors
            or liveness.unexpected_exits()
            or (checkpoint_manager.every_s is not None and liveness.presumed_dead())
        ):
            failed_at = None  # the run goes on without who was gone
        elif failed_at is None:
            failed_at = now
            logger.warning("a rank failed; waits %g s for records that name the cause", SETTLE_S)
        if failed_at is not None and drained - failed_at > SETTLE_S:
            raise run_failure(liveness, run_dir, monitor)
        if interrupted_at is not None and now - interrupted_at > PATIENCE_S:
            if vanished := [
                rank
                for rank in liveness.silent_ranks(PATIENCE_S - SETTLE_S)
                if rank not in processes
            ]:
                raise AshlError(
                    f"{rank_name(plan, monitor, vanished[0])} disconnected, and the run was"
                    " interrupted"
                )
            monitor.evaluate_pending()
            return None
        if unanswered_s > timeout_s:
            raise AshlError(
                f"{channel.store} did not answer for {timeout_s:g} s (runtime.heartbeat_timeout_s);"
                " the run ends here"
            )
        check_liveness(plan, monitor, liveness, timeout_s, bool({*late} - liveness.failed.keys()))
        checkpoint_manager.finish_if_complete(monitor)
        if wanted := checkpoint_manager.propose(monitor.beats.get(plan.lead_rank)):
            channel.publish(channel.control_update._replace(wanted=wanted))
        monitor.draw_progress()
        time.sleep(POLL_S)
    monitor.evaluate_pending()
    if monitor.final is None and liveness.failed:
        rank, how = [*liveness.failed.items()][-1]
        raise AshlError(f"worker {rank} {how} when the run had ended, and with it the last model")
    for rank, process in processes.items():
        if rank not in liveness.failed:
            process.join(PATIENCE_S)
    return pacing_summary(liveness.pace, plan.num_workers)


def log_record(record: Record) -> None:
    """Log what a rank reports: at INFO what happens seldom in a run, at DEBUG the rest, heartbeats
    left out.
    """
    match record:
        case Alive() | Heartbeat():
            pass
        case Placed():
            logger.info("rank %d joined: %s", record.rank, described(record))
        case Joined(rank, time_ns):
            logger.info("worker %d rejoined at %.3f s of the run", rank, time_ns / 1e9)
        case Ready(rank):
            logger.info("worker %d is ready to rejoin", rank)
        case StageEnd():
            logger.info(
                "stage %d ended at rank %d: %s", record.stage + 1, record.rank, described(record)
            )
        case Replan() | PlanMade() | ProfileMeasured():
            logger.info("rank %d reports %s", record.rank, type(record).__name__)
        case StopAsked():
            logger.info("rank %d asks to stop: %s", record.rank, record.reason)
        case PeerUnreachable():
            logger.warning("rank %d reports: %s", record.rank, described(record))
        case RankError(rank, error, consequence, blames):
            logger.error(
                "rank %d reports a failure: %s (consequence=%s, blames=%s)",
                rank,
                error,
                consequence,
                blames,
            )
        case Lost():
            logger.warning("rank %d reports: %s", record.rank, described(record))
        case Left(rank):
            logger.info("rank %d exited in order", rank)
        case _:
            logger.debug("rank %d reports %s", record.rank, type(record).__name__)


def run_failure(liveness: LivenessMonitor, run_dir: Path, monitor: Monitor) -> AshlError:
    """Return the error that names the rank at fault and its log."""
    rank, what = find_culprit(
        liveness.errors,
        liveness.unexpected_exits() | liveness.failed,
        liveness.silent_ranks(QUIET_S),
    )
    log = log_path(run_dir, rank)
    return AshlError(
        f"{rank_name(liveness.plan, monitor, rank)}{what}"
        + (f"; its log is {log}" if log.exists() else "")
    )


def describe_exit(code: int) -> str:
    if code == EXIT_CONTROLLER_SILENT:
        return "received nothing from this process for runtime.heartbeat_timeout_s, and exited"
    if code == EXIT_DECLARED_FAILURE:
        return DECLARED
    if code == EXIT_EVICTED:
        return "was silent for too long; the run continues without it"
    return (
        f"{KILLED_BY} {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )


def find_culprit(
    errors: Sequence[RankError], gone: Mapping[int, str], silent: Collection[int]
) -> tuple[int, str]:
    """Return the rank at fault for a failure, and the sentence about it.

    Order: an error of a rank's own, then a process that ended, then a rank that is silent and that
    others cannot reach.
    Args: silent, ranks without records, longest first.
    """
    own = next((error for error in errors if not error.consequence), None)
    if own is not None:
        return own.rank, f": {own.error}"
    reported = {error.rank for error in errors}
    blamed = {error.blames for error in errors}
    quiet = [rank for rank in silent if rank not in reported]
    named = [rank for rank in quiet if rank in blamed]
    killed = [rank for rank in gone if rank not in reported]
    if killed := [rank for rank in killed if rank in blamed] or (
        killed if not named else []
    ):  # some long before
        return killed[0], f" {gone[killed[0]]}"
    if vanished := named or quiet:
        return vanished[0], " disconnected: its connections were closed, and no heartbeat followed"
    return errors[0].rank, f": {errors[0].error}"


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.log"


def rank_name(plan: Plan, monitor: Monitor, rank: int) -> str:
    """Return a rank by its role and, if the run has several nodes, its node."""
    hosts = {place.host for place in monitor.hosts.values()}
    place = monitor.hosts.get(rank)
    return role_name(plan, rank) + (f" on {place.host}" if place and len(hosts) > 1 else "")


def is_cut_off(liveness: LivenessMonitor, monitor: Monitor, late: set[int]) -> bool:
    """Return True if all ranks on several other nodes are silent, and none on this node is."""
    here = {*liveness.processes}
    elsewhere = {place.host for rank, place in monitor.hosts.items() if rank not in here}
    away = liveness.exited.union(liveness.failed)
    return (
        len(elsewhere) > 1
        and not here & late
        and here | away | late == {*range(liveness.plan.num_ranks)}
    )


def check_liveness(
    plan: Plan, monitor: Monitor, liveness: LivenessMonitor, timeout_s: float, missing: bool
) -> None:
    """Raise AshlError, which names the ranks, if one misses heartbeats or all wait for
    each other.
    """
    for_so_long = f"for {timeout_s:g} s (runtime.heartbeat_timeout_s)"
    if missing:
        late = liveness.silent_ranks(
            timeout_s - min(SAME_CAUSE_S, timeout_s / 2)
        )  # with those who fell silent at about the same time
        if is_cut_off(liveness, monitor, {*late}):
            own_host = monitor.hosts[min(liveness.processes)].host
            raise AshlError(
                f"no heartbeat from any other node {for_so_long}; has {own_host}, "
                "the controller's node, lost its network?"
            )
        names = ", ".join(rank_name(plan, monitor, rank) for rank in sorted(late))
        raise AshlError(f"{names} sent no heartbeat {for_so_long} and is late; the run ends here")
    there = [rank for rank in range(plan.num_ranks) if rank not in liveness.failed]
    beats = [monitor.beats.get(rank) for rank in there]
    stuck = [beat for beat in beats if beat and beat.waiting and beat.idle_s > timeout_s]
    since_s = time.monotonic() - max(liveness.last_failure_s, liveness.channel.resumed_s)
    if len(stuck) == len(there) and since_s > timeout_s:
        waits = "; ".join(f"rank {beat.rank} {beat.waiting}" for beat in stuck)
        raise AshlError(f"deadlock: nothing has moved for {timeout_s:g} s: {waits}")


# --- answers to whoever asks for the place of a failed worker
# ---------------------------------------------------------


def answer_join_request(
    liveness: LivenessMonitor, monitor: Monitor, ask: JoinRequest, keeps: bool
) -> JoinAnswer:
    """Admit a joining process in the place of a failed worker, or return the reason against it.

    Args: keeps, True if the run takes checkpoints.
    """
    if why := join_refusal(liveness, monitor, ask.worker, keeps):
        return JoinAnswer(refused=why)
    rank = (
        min(liveness.failed.keys() - liveness.rejoining.keys())
        if ask.worker is None
        else ask.worker
    )
    liveness.expect_rejoin(monitor, rank)
    liveness.processes.pop(rank, None)
    place = liveness.rank_settings[rank]
    known = place.controller_host, place.rounds, place.device, place.have_own_gpus
    return JoinAnswer(
        None,
        rank,
        liveness.channel.incarnations[rank],
        liveness.failed[rank],
        liveness.plan.to_json(),
        *known,
    )


def join_refusal(
    liveness: LivenessMonitor, monitor: Monitor, worker: int | None, keeps: bool
) -> str | None:
    plan, parts = liveness.plan, monitor.job.parts
    if not admits_rejoin(parts):
        return (
            f"a run with {describe_modes(parts)} takes nobody; a new run with run.checkpoint_s can"
            " be resumed."
        )
    if keeps:
        return "a run that leaves checkpoints (run.checkpoint_s) takes nobody."
    if monitor.final is not None or monitor.stopping:
        return "the run is over."
    if monitor.counts() is None:
        return "the run has not begun."
    if worker is not None and worker >= plan.num_workers:
        return f"there is no worker {worker}; the run has workers 0 to {plan.num_workers - 1}."
    if worker is not None and worker not in liveness.failed:
        return f"worker {worker} has not failed."
    if not liveness.failed:
        return "no worker of this run has failed."
    if liveness.rejoining.keys() >= ({*liveness.failed} if worker is None else {worker}):
        return "every failed worker is already rejoining."
    return None


def empty_totals(rank: int) -> Heartbeat:
    """Return the totals of a worker that has sent no heartbeat."""
    return Heartbeat(rank, 0, 0, None, None, dict.fromkeys(KINDS, 0), 0, 0, {})


def outage_until(before: Heartbeat, time_ns: int) -> Heartbeat:
    """Return the totals of a failed worker at the time it rejoins: time without totals counts as
    down.
    """
    down = before.totals_ns["down"] + max(0, time_ns - sum(before.totals_ns.values()))
    return before._replace(totals_ns=before.totals_ns | {"down": down})


def add_prior_totals(
    before: Heartbeat, record: Heartbeat | TimeTotals | StageBoundary
) -> Heartbeat | TimeTotals | StageBoundary:
    """Add the totals of a worker's earlier incarnations to a record of its present one."""
    totals = {kind: before.totals_ns[kind] + ns for kind, ns in record.totals_ns.items()}
    if isinstance(record, StageBoundary):
        return record._replace(totals_ns=totals)
    record = record._replace(
        totals_ns=totals,
        bytes_up=before.bytes_up + record.bytes_up,
        bytes_down=before.bytes_down + record.bytes_down,
        collective_ns=before.collective_ns + record.collective_ns,
        measures=measured(before.measures, record.measures),
    )
    return (
        record._replace(steps=before.steps + record.steps)
        if isinstance(record, Heartbeat)
        else record
    )


def measured(before: Measures, now: Measures) -> dict[str, Measured]:
    """Add the values of two sets of measures by name."""
    found = dict(before)
    for name, (last, total, count) in now.items():
        _, so_far, times = before.get(name, (0.0, 0.0, 0))
        found[name] = Measured(last, so_far + total, times + count)
    return found


def pacing_summary(reports: Sequence[PacingStats], num_workers: int) -> dict:
    """Where the machine was too slow to keep the declared pace: by worker, with the pushes that a
    server took in for it, which share of its steps and transfers was late and how much longer than
    declared they took; by how much of all that is declared its encoding took longer than declared
    (often nothing is); and the worst.
    """
    steps: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    transfers: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    encodings: dict[int, list[Lateness]] = {rank: [] for rank in range(num_workers)}
    for report in reports:
        worker = report.rank < num_workers
        if worker:
            encodings[report.rank].append(report.encodings)
            steps[report.rank].append(report.steps)
        for src, counts in report.transfers:
            if worker or src < num_workers:  # what servers send to each other is nobody's
                transfers[report.rank if worker else src].append(counts)
    workers = [
        pacing_of(rank, steps[rank], transfers[rank], encodings[rank])
        for rank in range(num_workers)
    ]
    if not any(
        counts.count for rank in range(num_workers) for counts in steps[rank] + transfers[rank]
    ):
        return {}
    worst = ("steps_slower_by", "transfers_slower_by", "encodings_slower_by", "slower_by")
    return {"workers": workers, **{key: max(worker[key] for worker in workers) for key in worst}}


def pacing_of(
    rank: int,
    steps: Sequence[Lateness],
    transfers: Sequence[Lateness],
    encodings: Sequence[Lateness],
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
    """How much later these (or those among them) were than declared, as a share of what is declared
    of all of them.
    """
    total = sum(row.declared_s for row in counts)
    return sum(row.late_s for row in (counts if late is None else late)) / total if total else 0.0

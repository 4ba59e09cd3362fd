"""Home's judgement of a real run: who has left, who is gone, and whether the run ends for it, and by whose fault.

That a process is gone is a fact (`Attendance.gone`), that the run ends a decision (`attend`).
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch import Tensor

from ashl.errors import AshlError
from ashl.plan.plan import Plan
from ashl.planning.compatibility import admits_rejoin, can_block_forever, describe_modes
from ashl.run.checkpoints import Savings
from ashl.run.desk import PATIENCE_S, POLL_S, Desk
from ashl.run.doors import Answer, Ask
from ashl.run.lives import away_until, nothing_yet, with_earlier
from ashl.run.monitor import Monitor
from ashl.run.pace_kept import kept_pace
from ashl.run.parts import state_in
from ashl.run.rank import FAILED, Place
from ashl.run.watch import ALIKE_S, ALONE, AWAKE_S, DROPPED
from ashl.runtime.agreement import KNOWN_S
from ashl.runtime.news import End
from ashl.runtime.records import (
    Alive,
    Beat,
    Border,
    Joined,
    Kept,
    LedgerTotals,
    Left,
    Lost,
    Missed,
    ModuleState,
    PaceKept,
    RankError,
    Ready,
    Record,
    Replan,
    Round,
    Snapshot,
    StageEnd,
    StopAsked,
    UpdateShown,
)

KILLED = "was killed by"  # how it is reported, followed by the signal's name
DECLARED = "failed, as cluster.events says"
SETTLE_S = 1.0  # after the first failure: time for the others' records, which may name the cause
QUIET_S = 0.7  # of a rank that speaks five times a second, when another has lost the link to it: it has vanished
SURE_S = 2.0  # ... where others have lost the link to one of several and cannot say to whom


@dataclass
class Attendance:
    """What the ranks have said of themselves, and what is seen of them."""

    plan: Plan
    desk: Desk
    processes: dict[int, BaseProcess]  # of the ranks that run here
    places: Mapping[int, Place]  # ... in their first life
    start: Callable[[int, int], None]  # here, a rank in this life
    survives_failure: bool  # whether it may, without a worker
    admits_rejoin: bool  # ... and that may come back
    left: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)  # workers without which the run goes on, and how they ended
    lost_at: float = 0.0  # when the last of them was
    noticed: dict[int, float] = field(default_factory=dict)  # when it was seen that a process had ended
    coming: dict[int, bool] = field(
        default_factory=dict
    )  # those of them that are coming back, and whether all is ready
    earlier: dict[int, Beat] = field(default_factory=dict)  # how those stood in earlier lives that have come back
    missed: dict[int, tuple[bool, float]] = field(
        default_factory=dict
    )  # to whom a link is broken: whether to nobody else, and when it was last said
    ended: set[int] = field(default_factory=set)  # whose process was ended here, as it stood still
    starts: Counter[int] = field(default_factory=Counter)  # how often a worker that was killed has been started anew
    zero_ns: int | None = None  # of the run's clock, by home's, as beats have it that came without delay
    errors: list[RankError] = field(default_factory=list)
    pace: list[PaceKept] = field(default_factory=list)

    def hear(self, monitor: Monitor, record: Record, vector: Tensor | None) -> None:
        if isinstance(record, Beat) and record.time_ns > 0:
            zero_ns = time.monotonic_ns() - record.time_ns
            self.zero_ns = zero_ns if self.zero_ns is None else min(self.zero_ns, zero_ns)
        match record:
            case Round() | StageEnd() | Border() | Replan() if record.stage not in range(len(self.plan.stages)):
                raise AshlError(f"rank {record.rank} tells of stage {record.stage + 1}, which the plan does not have")
            case Alive() | Kept():
                pass
            case Left():
                self.left.add(record.rank)
            case Ready(rank) if rank in self.coming:
                self.coming[rank] = True
                self.publish()
            case Joined(rank, time_ns) if rank in self.coming:
                self.earlier[rank] = away_until(self.earlier[rank], time_ns)
                del self.coming[rank], self.lost[rank]
                self.publish()
                monitor.emit(record)
            case Lost(rank, why=why) if rank not in self.processes:
                self.without(monitor, rank, why)
            case Missed(_, rank, life, alone) if rank < self.plan.num_workers and life == self.desk.lives[rank]:
                self.missed[rank] = max(self.missed.get(rank, (False, 0.0)), (alone, time.monotonic()))
            case RankError(rank) if rank in self.lost:
                self.give_up(rank)
            case RankError():
                self.errors.append(record)
            case StopAsked():
                monitor.stopping = monitor.stopping or record.reason
            case PaceKept():
                self.pace.append(record)
            case Snapshot() | UpdateShown():
                monitor.snapshot(record, vector)
            case ModuleState():
                assert vector is not None
                monitor.take_state(record.rank, state_in(vector, ("ashl", *self.plan.allow_targets)))
            case Beat() | LedgerTotals() | Border() if record.rank in self.earlier:
                monitor.emit(with_earlier(self.earlier[record.rank], record))
            case _:
                monitor.emit(record)

    def gone(self) -> dict[int, str]:
        """The ranks here whose process has ended before it had said all, and how."""
        away = self.left.union(self.lost)
        ended = {rank: process.exitcode for rank, process in self.processes.items() if rank not in away}
        return {rank: how_ended(code) for rank, code in ended.items() if code is not None}

    def lose(self, monitor: Monitor, timeout_s: float, late: Sequence[int], drained: float) -> None:
        """Workers that were killed, failed as declared, or fell silent alone, and without which the run goes on, once
        it has begun and their last words have been heard. `late`: who is silent for so long, `drained`: until when
        what was said is heard."""
        if not self.survives_failure or not any(beat.steps or beat.counts for beat in monitor.beats.values()):
            return
        for rank, how in self.gone().items():
            heard_out = drained > self.noticed.setdefault(rank, time.monotonic())
            if heard_out and rank < self.plan.num_workers and (how.startswith(KILLED) or how == DECLARED):
                self.without(monitor, rank, how)
        for rank in [*self.coming]:
            quiet_s = self.desk.drained - self.desk.heard[rank]
            if quiet_s > timeout_s or self.vanished(rank, quiet_s):
                if rank in self.processes:
                    self.processes[rank].kill()
                self.give_up(rank)
        for rank in self.dead():
            self.without(monitor, rank, "vanished")
        if late and self.spared(monitor, {*self.silent(timeout_s - min(ALIKE_S, timeout_s / 2))}):
            for rank in late:
                how = f"was not heard of for {timeout_s:g} s"
                self.desk.drop(
                    rank, End(DROPPED, f"worker {rank} {how} (runtime.heartbeat_timeout_s), and the run went on")
                )
                if rank in self.processes and (not self.admits_rejoin or can_block_forever(monitor.job.parts)):
                    self.processes[rank].kill()  # others may wait for it in the middle of a sum
                    self.ended.add(rank)
                self.without(monitor, rank, how)

    def vanished(self, rank: int, quiet_s: float) -> bool:
        """Whether who is silent for so long, and is missed, is taken for dead. It is a process elsewhere."""
        alone, at = self.missed.get(rank, (False, -math.inf))
        if rank in self.processes:
            return False
        return quiet_s > QUIET_S if alone else quiet_s > SURE_S and time.monotonic() - at < KNOWN_S

    def dead(self) -> list[int]:
        """The workers elsewhere that are taken for dead."""
        return [rank for rank in self.silent(QUIET_S) if self.vanished(rank, self.desk.drained - self.desk.heard[rank])]

    def spared(self, monitor: Monitor, alike: set[int]) -> bool:
        """Whether the run goes on without these, who have fallen silent at about the same time."""
        there = {*range(self.plan.num_workers)} - self.left - self.lost.keys()
        served = self.plan.home >= self.plan.num_workers  # else another worker stands in for home
        if (served and self.plan.home in alike) or not alike < there or cut_off(self, monitor, alike):
            return False
        return not alike - self.processes.keys() or not can_block_forever(monitor.job.parts)

    def without(self, monitor: Monitor, rank: int, how: str) -> None:
        """The run goes on without this worker."""
        self.coming.pop(rank, None)
        self.noticed.pop(rank, None)
        if rank in self.lost:
            return self.publish()
        self.lost[rank], self.lost_at = how, time.monotonic()
        now_ns = time.monotonic_ns() - (self.zero_ns or 0)
        if how == DECLARED:
            declared = [round(e.time_s * 1e9) for e in monitor.job.parts.cluster.events if e.fail and e.worker == rank]
            # home's clock may be a little behind
            now_ns = min(declared, key=lambda time_ns: abs(time_ns - now_ns), default=now_ns)
        monitor.emit(Lost(rank, now_ns, "declared" if how == DECLARED else how))
        self.publish()

    def give_up(self, rank: int) -> None:
        """A worker that was coming will not."""
        self.coming.pop(rank, None)
        self.publish()

    def bring_back(self, monitor: Monitor, max_restarts: int) -> None:
        """Start anew who has taken note that it was dropped, and, so often, who was killed; give up on who died on its
        way."""
        for rank in [rank for rank in self.lost if rank in self.processes and self.admits_rejoin]:
            code = self.processes[rank].exitcode
            if code is None:
                continue
            if rank in self.coming:
                self.give_up(rank)
            if code == DROPPED or rank in self.ended or (code < 0 and self.starts[rank] < max_restarts):
                self.starts[rank] += code != DROPPED and rank not in self.ended
                self.ended.discard(rank)
                self.expect(monitor, rank)
                self.start(rank, self.desk.lives[rank])

    def expect(self, monitor: Monitor, rank: int) -> None:
        """A worker that is lost is coming back."""
        self.earlier[rank] = monitor.beats.get(rank) or nothing_yet(rank)
        self.desk.lives[rank] += 1
        self.desk.heard[rank] = time.monotonic()
        self.coming[rank] = False
        self.missed.pop(rank, None)
        self.publish()

    def publish(self) -> None:
        """Let all know who is there."""
        lives = self.desk.lives
        self.desk.away = self.lost.keys() - self.coming.keys()
        lost = tuple((rank, lives[rank] - (rank in self.coming)) for rank in self.lost)
        ready = tuple((rank, lives[rank]) for rank, is_ready in self.coming.items() if is_ready)
        self.desk.publish(self.desk.news._replace(lost=lost, ready=ready[:1]))  # one after the other

    def silent(self, for_s: float) -> list[int]:
        """Of whom nothing was heard for longer than that, as far as home has listened; longest first."""
        away = self.left.union(self.lost)
        since = {rank: self.desk.drained - at for rank, at in self.desk.heard.items() if rank not in away}
        return sorted((rank for rank in since if since[rank] > for_s), key=lambda rank: -since[rank])


def attend(seen: Attendance, run_dir: Path, monitor: Monitor, savings: Savings) -> dict | None:
    """Take in what the ranks tell until all have left, as `conduct` says."""
    plan, desk, processes, runtime = seen.plan, seen.desk, seen.processes, monitor.job.parts.runtime
    timeout_s = runtime.heartbeat_timeout_s
    desk.heard |= dict.fromkeys(processes, time.monotonic())  # they have only just been started
    desk.publish(desk.news._replace(scores=monitor.scores))  # of before, where it goes on
    announced, failed_at, interrupted_at = None, None, None
    looked, answered, unanswered_s = time.monotonic(), 0.0, 0.0
    while len(seen.left.union(seen.lost)) < plan.num_ranks:
        drained = desk.drained  # what was said until then is heard now
        for record, vector in desk.received():
            seen.hear(monitor, record, vector)
            if isinstance(record, Snapshot):
                desk.publish(desk.news._replace(scores=monitor.scores))
            elif isinstance(record, Kept):
                savings.hear(record, monitor, vector)
        now = time.monotonic()
        unanswered_s += min(now - looked, AWAKE_S) if desk.answered == answered else -unanswered_s
        looked, answered = now, desk.answered
        if monitor.stopping and not announced:
            announced, interrupted_at = monitor.stopping, now if monitor.stopping == "interrupted" else None
            desk.publish(desk.news._replace(stopping=announced))
        late = seen.silent(timeout_s)
        if savings.every_s is None:  # else the run is gone on with from its last checkpoint
            seen.lose(monitor, timeout_s, late, drained)
            if not announced and monitor.final is None:
                seen.bring_back(monitor, runtime.max_restarts)
        while desk.asks:
            number, ask = desk.asks.popleft()
            desk.answer(number, answer(seen, monitor, ask, savings.every_s is not None))
        if not (seen.errors or seen.gone() or (savings.every_s is not None and seen.dead())):
            failed_at = None  # the run goes on without who was gone
        elif failed_at is None:
            failed_at = now
        if failed_at is not None and drained - failed_at > SETTLE_S:
            raise failed(seen, run_dir, monitor)
        if interrupted_at is not None and now - interrupted_at > PATIENCE_S:
            if vanished := [rank for rank in seen.silent(PATIENCE_S - SETTLE_S) if rank not in processes]:
                raise AshlError(f"{who(plan, monitor, vanished[0])} vanished, and the run was interrupted")
            monitor.settle()
            return None
        if unanswered_s > timeout_s:
            raise AshlError(
                f"{desk.store} did not answer for {timeout_s:g} s (runtime.heartbeat_timeout_s); the run ends here"
            )
        check_late(plan, monitor, seen, timeout_s, bool({*late} - seen.lost.keys()))
        savings.settle(monitor)
        if wanted := savings.name(monitor.beats.get(plan.home)):
            desk.publish(desk.news._replace(wanted=wanted))
        monitor.tick()
        time.sleep(POLL_S)
    monitor.settle()
    if monitor.final is None and seen.lost:
        rank, how = [*seen.lost.items()][-1]
        raise AshlError(f"worker {rank} {how} when the run had ended, and with it the last model")
    for rank, process in processes.items():
        if rank not in seen.lost:
            process.join(PATIENCE_S)
    return kept_pace(seen.pace, plan.num_workers)


def failed(seen: Attendance, run_dir: Path, monitor: Monitor) -> AshlError:
    """What to say of a run that a rank has failed."""
    rank, what = culprit(seen.errors, seen.gone() | seen.lost, seen.silent(QUIET_S))
    log = log_of(run_dir, rank)
    return AshlError(f"{who(seen.plan, monitor, rank)}{what}" + (f"; its log is {log}" if log.exists() else ""))


def how_ended(code: int) -> str:
    if code == ALONE:
        return "heard nothing of this process for runtime.heartbeat_timeout_s, and left"
    if code == FAILED:
        return DECLARED
    if code == DROPPED:
        return "was silent for too long, and the run went on without it"
    return f"{KILLED} {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def culprit(errors: Sequence[RankError], gone: Mapping[int, str], silent: Collection[int]) -> tuple[int, str]:
    """Whose fault a failure is, and what to say of it: an error of a rank's own comes first, then a process that has
    ended, then one that others have lost and nothing is heard of, whoever complains of it. `silent`: longest first."""
    own = next((error for error in errors if not error.consequence), None)
    if own is not None:
        return own.rank, f": {own.error}"
    reported = {error.rank for error in errors}
    blamed = {error.blames for error in errors}
    quiet = [rank for rank in silent if rank not in reported]
    named = [rank for rank in quiet if rank in blamed]
    killed = [rank for rank in gone if rank not in reported]
    if killed := [rank for rank in killed if rank in blamed] or (killed if not named else []):  # some long before
        return killed[0], f" {gone[killed[0]]}"
    if vanished := named or quiet:
        return vanished[0], " vanished: its connections were closed, and nothing more was heard of it"
    return errors[0].rank, f": {errors[0].error}"


def log_of(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.log"


def role(plan: Plan, rank: int) -> str:
    if rank < plan.num_workers:
        return f"worker {rank}"
    coordinated = plan.stages[0].topology["_target_"].split(".")[-2] in ("gossip", "partial_all_reduce")
    return f"the {'coordinator' if coordinated else 'server'} (rank {rank})"


def who(plan: Plan, monitor: Monitor, rank: int) -> str:
    """A rank by its role and, where there are several, its host."""
    hosts = {place.host for place in monitor.hosts.values()}
    place = monitor.hosts.get(rank)
    return role(plan, rank) + (f" on {place.host}" if place and len(hosts) > 1 else "")


def cut_off(seen: Attendance, monitor: Monitor, late: set[int]) -> bool:
    """Whether all ranks on other machines are silent, and none here, where there are several others."""
    here = {*seen.processes}
    elsewhere = {place.host for rank, place in monitor.hosts.items() if rank not in here}
    away = seen.left.union(seen.lost)
    return len(elsewhere) > 1 and not here & late and here | away | late == {*range(seen.plan.num_ranks)}


def check_late(plan: Plan, monitor: Monitor, seen: Attendance, timeout_s: float, missing: bool) -> None:
    """Raises AshlError when a rank is not heard of, or when all wait for each other, naming who."""
    for_so_long = f"for {timeout_s:g} s (runtime.heartbeat_timeout_s)"
    if missing:
        late = seen.silent(timeout_s - min(ALIKE_S, timeout_s / 2))  # with those who fell silent at about the same time
        if cut_off(seen, monitor, {*late}):
            raise AshlError(
                f"nothing was heard of any other machine {for_so_long}; has {monitor.hosts[min(seen.processes)].host}, "
                "which keeps the records, lost its network?"
            )
        names = ", ".join(who(plan, monitor, rank) for rank in sorted(late))
        raise AshlError(f"{names} was not heard of {for_so_long} and is late; the run ends here")
    there = [rank for rank in range(plan.num_ranks) if rank not in seen.lost]
    beats = [monitor.beats.get(rank) for rank in there]
    stuck = [beat for beat in beats if beat and beat.waiting and beat.idle_s > timeout_s]
    since_s = time.monotonic() - max(seen.lost_at, seen.desk.resumed)
    if len(stuck) == len(there) and since_s > timeout_s:
        waits = "; ".join(f"rank {beat.rank} {beat.waiting}" for beat in stuck)
        raise AshlError(f"deadlock: nothing has moved for {timeout_s:g} s: {waits}")


# --- answers to whoever asks for the place of a failed worker ---------------------------------------------------------
#
# Home's answer to whoever asks for the place of a lost worker.


def answer(seen: Attendance, monitor: Monitor, ask: Ask, keeps: bool) -> Answer:
    """A place, which is taken with that, or why there is none. `keeps`: the run leaves checkpoints."""
    if why := refusal(seen, monitor, ask.worker, keeps):
        return Answer(refused=why)
    rank = min(seen.lost.keys() - seen.coming.keys()) if ask.worker is None else ask.worker
    seen.expect(monitor, rank)
    seen.processes.pop(rank, None)
    place = seen.places[rank]
    known = place.home, place.rounds, place.device, place.one_each
    return Answer(None, rank, seen.desk.lives[rank], seen.lost[rank], seen.plan.to_json(), *known)


def refusal(seen: Attendance, monitor: Monitor, worker: int | None, keeps: bool) -> str | None:
    plan, parts = seen.plan, monitor.job.parts
    if not admits_rejoin(parts):
        return f"a run with {describe_modes(parts)} takes nobody; a new run with run.checkpoint_s can be resumed."
    if keeps:
        return "a run that leaves checkpoints (run.checkpoint_s) takes nobody."
    if monitor.final is not None or monitor.stopping:
        return "the run is over."
    if monitor.counts() is None:
        return "the run has not begun."
    if worker is not None and worker >= plan.num_workers:
        return f"there is no worker {worker}; the run has workers 0 to {plan.num_workers - 1}."
    if worker is not None and worker not in seen.lost:
        return f"worker {worker} is not lost."
    if not seen.lost:
        return "no worker of this run is lost."
    if seen.coming.keys() >= ({*seen.lost} if worker is None else {worker}):
        return "who was lost is coming back already."
    return None

"""A rank's side of supervision: its view of which peers are members, and its watchdog.

`MembershipListener` applies the controller's control updates: it disconnects failed peers and
connects rejoining ones. `Watchdog` ends this process when the job's store, which the controller
serves, is silent for `runtime.heartbeat_timeout_s`. A call to a store over a broken network never
returns, nor does a collective of gloo. So the watchdog has its own thread, which calls neither. It
measures only the time in which this process is awake: after a stop, the store has not been silent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn, TypeVar

from ashl.run.authenticated_store import AuthenticatedStore
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import ControlUpdate, End
from ashl.runtime.rendezvous import admit_worker

T = TypeVar("T")
logger = logging.getLogger(__name__)


class MembershipListener:
    """Applies membership changes to this rank's connections, in the reporter's thread."""

    def __init__(
        self,
        kernel: TorchKernel,
        rank: int,
        incarnation: int,
        peers: Iterable[int],
        store: AuthenticatedStore,
        regroups: bool = False,
        is_worker: bool = True,
    ) -> None:
        """Args: incarnation, of this rank; regroups, True if a failure or a rejoin begins a new
        epoch.
        """
        self._kernel = kernel
        self._rank = rank
        self._incarnation = incarnation
        self._store = store
        self._regroups = regroups
        self._is_worker = is_worker
        # the latest incarnation of each peer that this rank has connected or is connecting
        self._incarnations = dict.fromkeys(peers, 0)
        self._failed: dict[int, int] = {}  # the latest failed incarnation of each failed peer
        self._lock = threading.Lock()

    @property
    def failed_ranks(self) -> set[int]:
        """Return the ranks whose latest incarnation failed."""
        with self._lock:
            return {
                rank
                for rank, incarnation in self._failed.items()
                if incarnation >= self._incarnations.get(rank, 0)
            }

    def on_membership(self, update: ControlUpdate) -> None:
        """Begin a new epoch; or disconnect newly failed peers, and connect a peer that is ready to
        rejoin.

        Does nothing before the kernel has connections: the controller repeats its updates.
        """
        if self._regroups:
            return self._on_epoch(update)
        if not self._kernel.started:
            return
        previous, failed = self._failed, dict(update.lost)
        with self._lock:
            self._failed = failed
        for rank, incarnation in failed.items():
            if incarnation >= self._incarnations.get(rank, 0) and previous.get(rank) != incarnation:
                logger.warning(
                    "worker %d, incarnation %d, failed; continues without it", rank, incarnation
                )
                self._kernel.mark_peer_failed(rank, "the run continues without it")
        for rank, incarnation in update.ready:
            if incarnation > self._incarnations.get(rank, incarnation):
                with self._lock:
                    self._incarnations[rank] = incarnation
                threading.Thread(
                    target=self._connect_rejoined,
                    args=(rank, incarnation),
                    daemon=True,
                    name=f"connect-{rank}",
                ).start()

    def _on_epoch(self, update: ControlUpdate) -> None:
        """Begin the epoch of this update, if this incarnation is a member."""
        with self._lock:
            self._failed = dict(update.lost)
        epoch = update.epoch
        known = dict(zip(epoch.workers, epoch.incarnations, strict=True))
        if not self._is_worker or known.get(self._rank) == self._incarnation:
            self._kernel.begin_epoch(epoch)

    def _connect_rejoined(self, rank: int, incarnation: int) -> None:
        """Connect to a rejoining worker, in a thread of its own."""
        group = admit_worker(self._store, self._rank, rank, incarnation, self._kernel.now_ns)
        self._kernel.connect_peer(rank, incarnation, group)
        if rank in self.failed_ranks:  # it has failed again in the meantime
            self._kernel.mark_peer_failed(rank, "the run continues without it")
        logger.info("worker %d rejoined as incarnation %d; is connected to it", rank, incarnation)


TICK_S = 0.1  # seconds between two checks of the watchdog
SAME_CAUSE_S = 1.0  # silences that began within this many seconds have one cause
AWAKE_S = 0.5  # a process with more seconds between two ticks was stopped in between


class AwakeTime:
    """Measures the seconds for which this process was not stopped.

    Limits: call `passed_s` at least every `AWAKE_S` seconds.
    """

    def __init__(self) -> None:
        self.resumed_s = 0.0  # seconds passed at the end of the latest stop
        self._last = time.monotonic()
        self._passed_s = 0.0

    def passed_s(self) -> float:
        now = time.monotonic()
        if now - self._last > AWAKE_S:
            self.resumed_s = self._passed_s
        self._passed_s += min(now - self._last, AWAKE_S)
        self._last = now
        return self._passed_s


class Watchdog:
    """Ends this process if the job's store does not answer for `timeout_s` seconds."""

    def __init__(self, timeout_s: float, store: str, code: int) -> None:
        """Args: store, its address; code, the exit code of this process if it is silent."""
        self._timeout_s = timeout_s
        self._awake = AwakeTime()
        self._awake_s = 0.0  # at the latest check
        self._answered_s = 0.0  # `_awake_s` when the store answered last
        self._end = End(
            code,
            f"the job's store at {store} did not answer for {timeout_s:g} s"
            " (runtime.heartbeat_timeout_s)",
        )
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, daemon=True, name="watchdog").start()

    def record_answer(self) -> None:
        """Record that the store has answered."""
        self._answered_s = self._awake_s

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def check(self) -> End | None:
        """Return the reason to end this process, if there is one."""
        self._awake_s = self._awake.passed_s()
        return self._end if self._awake_s - self._answered_s > self._timeout_s else None

    def _loop(self) -> None:
        while not self._stopped.wait(TICK_S):
            if end := self.check():
                logger.error("exits with code %d: %s", end.code, end.why)
                exit_process(end)


def exit_process(end: End) -> NoReturn:
    """End this process without destructors, which would wait for threads that may be blocked
    forever.
    """
    with suppress(OSError, ValueError):  # the disk may be full, or the terminal closed
        if end.why:
            sys.stderr.write(f"ashl: {end.why}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(end.code)

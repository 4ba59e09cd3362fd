"""A rank's side of supervision: its view of which peers are members, and its watchdog.

`MembershipListener` applies the controller's control updates: it disconnects failed peers and
connects those that rejoin. `Watchdog` ends this process when the job's store or the controller is
silent for `runtime.heartbeat_timeout_s`. A call to a store whose link is cut never returns, nor
does a collective of gloo, so the watchdog's thread calls neither. It counts only while this process
is awake: a process that was stopped must not take the others for silent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from ashl.run.authenticated_store import AuthenticatedStore
from ashl.runtime.control_messages import ControlUpdate, End
from ashl.runtime.process import TorchKernel
from ashl.runtime.regroup_consensus import RegroupConsensus
from ashl.runtime.rendezvous import admit_worker, confirm_known

logger = logging.getLogger(__name__)


class MembershipListener:
    """Applies membership changes to this rank's connections, in the reporter's thread."""

    def __init__(
        self,
        kernel: TorchKernel,
        rank: int,
        incarnation: int,
        peers: Mapping[int, int],
        store: AuthenticatedStore,
        consensus: RegroupConsensus | None,
    ) -> None:
        """Args: incarnation of this rank; peers, the incarnation of each peer at the start."""
        self._kernel, self._rank, self._incarnation, self._store, self._consensus = (
            kernel,
            rank,
            incarnation,
            store,
            consensus,
        )
        self._incarnations = dict(peers)  # the last one of each that was let in
        self._failed: dict[int, int] = {}  # the last one of each that is over
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
        if not self._kernel.started:
            return  # there are no links yet, and all is said again
        previous, lost = self._failed, dict(update.lost)
        with self._lock:
            self._failed = lost
        for rank, incarnation in lost.items():
            if incarnation >= self._incarnations.get(rank, 0) and previous.get(rank) != incarnation:
                logger.warning(
                    "worker %d, incarnation %d, failed; continues without it", rank, incarnation
                )
                self._kernel.mark_peer_failed(rank, "the run continues without it")
                if self._consensus is not None:
                    self._consensus.mark_failed(rank, incarnation)
        for rank, incarnation in update.ready:
            if incarnation > self._incarnations.get(rank, incarnation):
                with self._lock:
                    self._incarnations[rank] = incarnation
                threading.Thread(
                    target=self._connect_rejoined,
                    args=(rank, incarnation),
                    daemon=True,
                    name=f"let_in-{rank}",
                ).start()

    def _connect_rejoined(self, rank: int, incarnation: int) -> None:
        store = self._store.another()
        group = admit_worker(
            store, self._rank, self._incarnation, rank, incarnation, self._kernel.clock_ns
        )
        self._kernel.connect_peer(rank, incarnation, group)
        if self._consensus is not None:
            self._consensus.mark_connected(rank, incarnation)
            self._kernel.ctx.join_pending = True
        if rank in self.failed_ranks:  # in the meantime
            self._kernel.mark_peer_failed(rank, "the run continues without it")
        logger.info("worker %d rejoined as incarnation %d; is connected to it", rank, incarnation)
        confirm_known(store, self._rank, rank, incarnation)


TICK_S = 0.1
SAME_CAUSE_S = 1.0  # between silences that have one cause
AWAKE_S = 0.5  # longer between two ticks, and the process was stopped


class Watchdog:
    """Ends this process if the store or the controller is silent for `timeout_s` seconds."""

    def __init__(self, timeout_s: float, store: str, controller: str, code: int) -> None:
        """Args: store, its address; controller, its host; code, the exit code of this process if
        one is silent.
        """
        self._timeout_s, self._store, self._controller, self._code = (
            timeout_s,
            store,
            controller,
            code,
        )
        self._store_silent_s = self._controller_silent_s = 0.0  # seconds since
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, daemon=True, name="watchdog").start()

    def record_store_answer(self) -> None:
        """Record that the store has answered."""
        self._store_silent_s = 0.0

    def record_controller_message(self) -> None:
        """Record that the controller has sent a control update."""
        self._controller_silent_s = 0.0

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def check_timeouts(self, passed_s: float) -> End | None:
        """Return the reason to end this process, if there is one, `passed_s` seconds after the last
        check.
        """
        awake_s = min(passed_s, AWAKE_S)
        self._store_silent_s += awake_s
        self._controller_silent_s += awake_s
        if max(self._store_silent_s, self._controller_silent_s) <= self._timeout_s:
            return None
        for_so_long = f"for {self._timeout_s:g} s (runtime.heartbeat_timeout_s)"
        if (
            self._controller_silent_s - self._store_silent_s < SAME_CAUSE_S
        ):  # no news, because no answers
            return End(self._code, f"the job's store at {self._store} did not answer {for_so_long}")
        controller = f"the controller, on {self._controller},"
        return End(self._code, f"no heartbeat from {controller} {for_so_long}")

    def _loop(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(TICK_S):
            now = time.monotonic()
            if end := self.check_timeouts(now - last):
                logger.error("exits with code %d: %s", end.code, end.why)
                exit_process(end)
            last = now


def exit_process(end: End) -> NoReturn:
    """End this process without destructors: they would wait for threads that may be blocked
    forever.
    """
    with suppress(OSError, ValueError):  # a full disk; a closed terminal
        if end.why:
            sys.stderr.write(f"ashl: {end.why}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(end.code)


class AwakeTime:
    """Measures seconds for which this process was not stopped. Call `passed_s` at least every
    `AWAKE_S` seconds.
    """

    def __init__(self) -> None:
        self._last, self._passed_s = time.monotonic(), 0.0

    def passed_s(self) -> float:
        now = time.monotonic()
        self._passed_s += min(now - self._last, AWAKE_S)
        self._last = now
        return self._passed_s

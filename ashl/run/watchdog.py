"""A rank's watch over what it cannot do without: the job's store, and the process that keeps the records.

A call to a store whose link is cut never returns, nor does a sum of gloo's. So a thread that calls neither counts for
how long the store has not answered and nothing was heard of home, and ends the process when one of them lasts for
`runtime.heartbeat_timeout_s`. It counts only while this process is awake: one that was stopped and goes on has no
right to call the others silent.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ashl.runtime.control_messages import End

TICK_S = 0.1
EXIT_CONTROLLER_SILENT = 76  # exit code of a home's child that has heard nothing of it
INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # Ctrl-C, a queue, a terminal that closes
SAME_CAUSE_S = 1.0  # between silences that have one cause
EXIT_EVICTED = 78  # exit code of a worker without which the run has gone on, as it was silent for too long
AWAKE_S = 0.5  # longer between two ticks, and the process was stopped


class Watchdog:
    """Ends this process when the store, or home, is silent for too long."""

    def __init__(self, timeout_s: float, store: str, controller: str, code: int) -> None:
        """`store` is the address, `home` the host of the process that keeps the records, `code` the exit code."""
        self._timeout_s, self._store, self._controller, self._code = timeout_s, store, controller, code
        self._store_silent_s = self._controller_silent_s = 0.0  # seconds since
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, daemon=True, name="watchdog").start()

    def record_store_answer(self) -> None:
        """The store has answered."""
        self._store_silent_s = 0.0

    def record_controller_message(self) -> None:
        """There was news from home."""
        self._controller_silent_s = 0.0

    def stop(self) -> None:
        """There is nothing to wait for any longer."""
        self._stopped.set()

    def check_timeouts(self, passed_s: float) -> End | None:
        """Why this process has to end, where so long after the last look it has to."""
        awake_s = min(passed_s, AWAKE_S)
        self._store_silent_s += awake_s
        self._controller_silent_s += awake_s
        if max(self._store_silent_s, self._controller_silent_s) <= self._timeout_s:
            return None
        for_so_long = f"for {self._timeout_s:g} s (runtime.heartbeat_timeout_s)"
        if self._controller_silent_s - self._store_silent_s < SAME_CAUSE_S:  # no news, because no answers
            return End(self._code, f"the job's store at {self._store} did not answer {for_so_long}")
        controller = f"the process that keeps the records, on {self._controller},"
        return End(self._code, f"nothing was heard of {controller} {for_so_long}")

    def _loop(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(TICK_S):
            now = time.monotonic()
            if end := self.check_timeouts(now - last):
                exit_process(end)
            last = now


def exit_process(end: End) -> NoReturn:
    """The last words of a process whose other threads may be blocked for good. Its destructors would wait for them."""
    with suppress(OSError, ValueError):  # a full disk; a closed terminal
        if end.why:
            sys.stderr.write(f"ashl: {end.why}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(end.code)


class AwakeTime:
    """Seconds for which this process has not been stopped, if it is asked often: within `AWAKE_S`."""

    def __init__(self) -> None:
        self._last, self._passed_s = time.monotonic(), 0.0

    def passed_s(self) -> float:
        now = time.monotonic()
        self._passed_s += min(now - self._last, AWAKE_S)
        self._last = now
        return self._passed_s


@contextmanager
def handle_signals(handle: Callable[[int, object], None]) -> Generator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP like this for a while, in the main thread. A SIGHUP that is ignored, as under
    nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in INTERRUPTS - kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

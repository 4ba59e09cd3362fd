"""Signals that ask this process to end: handle them, and receive one when the parent ends. An exit
code tells which signal has ended a process.
"""

import ctypes
import signal
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

# Ctrl-C, the end of a job in a queue, and a terminal that closes.
INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
KILLED_BY = "was killed by"  # the name of a signal follows
PR_SET_PDEATHSIG = 1  # option of Linux's prctl


@contextmanager
def handle_signals(
    handle: Callable[[int, object], None], signals: Collection[signal.Signals] = INTERRUPTS
) -> Generator[None]:
    """Handle these signals by `handle` until the context ends.

    Limits: no effect outside the main thread; a SIGHUP that is ignored (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in {*signals} - kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent ends, also by SIGKILL.

    Other systems have no such call; there this does nothing.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def describe_exit(code: int) -> str:
    """Return how a process ended, as a verb phrase, from its exit code as Python returns it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"{KILLED_BY} {signal.Signals(-code).name}"
    except ValueError:  # Python names no real-time signals between the first and the last
        return f"{KILLED_BY} signal {-code}"

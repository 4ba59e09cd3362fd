"""Tie the life of this process to that of its parent."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # option of Linux's prctl


def end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent ends, also by SIGKILL.

    Other systems have no such call; there this does nothing.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

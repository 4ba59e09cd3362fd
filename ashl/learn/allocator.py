"""Memory for what lives for one step or one event."""

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h

YOUNG = 10_000  # objects between two collections; Python's own is 700


@cache
def keep_pages() -> None:
    """Tells glibc to keep freed memory in this process for the next vector, instead of giving it
    back to the system.

    Parameters are values here, so that every step makes new vectors. By default glibc maps and
    unmaps each one above a few hundred kilobytes, and faulting its pages in anew took longer than
    the arithmetic: on 11 million parameters an SGD step took 64 ms, and 25 ms with the pages kept.
    Elsewhere than on glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_ARENA_MAX, 1)  # the arenas of other threads would be given back all the same


@contextmanager
def collecting_seldom() -> Generator[None]:
    """Inside, Python looks for cyclic garbage less often, and not among what was there before,
    torch's modules above all. Events make none, and with a thousand workers looking for it took a
    fifth of a simulation that computes no gradients.
    """
    before, outermost = gc.get_threshold(), not gc.get_freeze_count()
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, *before[1:])
    if outermost:
        gc.freeze()
    try:
        yield
    finally:
        if outermost:
            gc.unfreeze()
        gc.set_threshold(*before)

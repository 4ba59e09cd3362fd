"""Tune memory allocation and garbage collection for vectors and events with a short life."""

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h

YOUNG = 10_000  # objects between two collections; Python's default is 700


@cache
def keep_pages() -> None:
    """Make glibc keep freed memory in this process for the next vector.

    Parameters are values, so that every step makes new vectors. By default glibc maps and unmaps
    each one above a few hundred kilobytes, and page faults take longer than the arithmetic: on 11
    million parameters an SGD step takes 64 ms, and 25 ms if the pages are kept. Without glibc this
    has no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        # memory in the arenas of other threads would still be returned to the system
        mallopt(M_ARENA_MAX, 1)


@contextmanager
def reduce_collections() -> Generator[None]:
    """Make Python look for cyclic garbage less often inside, and only among new objects.

    Older objects are mostly torch's modules. Events make no cyclic garbage. With a thousand
    workers, collections take a fifth of a simulation without gradients.
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

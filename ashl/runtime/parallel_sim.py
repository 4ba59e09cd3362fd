"""Use several cores of this machine for one simulation.

A worker's computation starts on a free core when the worker asks for it, and the simulation waits
for it when virtual time has reached its end. Computations are pure functions, so the result has the
same bits on any number of cores.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache as cached
from typing import Any, Literal

import torch

from ashl.config.cores import usable_cores
from ashl.device import HOST
from ashl.learn.learner import Learner
from ashl.runtime.effects import Compute
from ashl.runtime.kernel import Task
from ashl.runtime.sim import Sim

WORTH_S = 7e-4  # seconds: a shorter computation is not worth another thread
TRIED = 16  # number of timed computations; their median decides


class ParallelCompute:
    """Runs a computation here or on another thread; returns its result or a future of it."""

    def __init__(self, begin: Callable[[], ThreadPoolExecutor], tried: int) -> None:
        """Set up without threads: `begin` starts them once `tried` timed computations show that
        they pay.
        """
        self._pool = cached(begin)
        self._left = tried
        self._times = list[float]()
        self._worth = True

    def __call__(self, effect: Compute) -> Any:
        if effect.kind != "compute":  # encoding and merging change their arguments in place
            return effect.fn()
        if not self._left:
            return self._pool().submit(effect.fn) if self._worth else effect.fn()
        start = time.perf_counter()
        value = effect.fn()
        self._times.append(time.perf_counter() - start)
        self._left -= 1
        self._worth = bool(self._left) or statistics.median(self._times) >= WORTH_S
        return value


def count_cores(asked: int | Literal["auto"], num_workers: int) -> int:
    """Return the number of cores to use. `auto` is all of them, up to the number of workers, or one
    if this process is one of several, as in a sweep.
    """
    if asked != "auto":
        return asked
    if multiprocessing.parent_process() is not None:
        return 1
    return min(
        usable_cores(),
        num_workers,
    )


@contextmanager
def use_cores(
    sim: Sim, asked: int | Literal["auto"], num_workers: int, learner: Learner
) -> Generator[None]:
    """Let a simulation compute on several cores.

    One core is used if only one is asked for, on a device, and for a model that draws from the
    global random generator. Computations that no task waits for at the end are discarded.
    """
    count = count_cores(asked, num_workers)
    if count < 2 or learner.device != HOST or not learner.threadsafe:
        yield
        return
    threads, all_here, alone = torch.get_num_threads(), threading.Barrier(count), threading.Lock()

    def enter() -> None:
        all_here.wait()
        with alone:
            torch.set_num_threads(threads)
            learner.replicate()

    def resume(task: Task, value: Any) -> None:
        Sim._resume(sim, task, value.result() if isinstance(value, Future) else value)

    pool = ThreadPoolExecutor(count, "core")

    def begin() -> ThreadPoolExecutor:
        for task in [pool.submit(enter) for _ in range(count)]:
            task.result()
        return pool

    sim.begin_compute, sim._resume = ParallelCompute(begin, TRIED if asked == "auto" else 0), resume  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)

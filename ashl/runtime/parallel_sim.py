"""Use several cores of this machine for one simulation.

A worker's computation starts on a free core when the worker asks for it, and the simulation waits
for it when virtual time has reached its end. Computations are pure functions, so the result has the
same bits on any number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache as cached
from typing import Any, Literal

import torch

from ashl.learn.device import HOST
from ashl.learn.learner import Learner
from ashl.runtime.effects import Compute
from ashl.runtime.kernel import Task
from ashl.runtime.sim import Sim

WORTH_S = 7e-4  # a computation that takes less is not handed to another thread by itself
TRIED = 16  # computations, of which the median decides


class ParallelCompute:
    """Runs a computation now or on another thread; returns what came of it, or what will."""

    def __init__(self, begin: Callable[[], ThreadPoolExecutor], tried: int) -> None:
        """`begin` starts the threads, once it is known that they are worth it."""
        self._pool = cached(begin)
        self._left, self._times, self._worth = tried, list[float](), True

    def __call__(self, effect: Compute) -> Any:
        if effect.kind != "compute":  # encoding and merging change what they work on
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
    """How many to use: all of them, but one where this process is one of several, as a run of a
    sweep.
    """
    if asked != "auto":
        return asked
    if multiprocessing.parent_process() is not None:
        return 1
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_workers,
    )


@contextmanager
def use_cores(
    sim: Sim, asked: int | Literal["auto"], num_workers: int, learner: Learner
) -> Generator[None]:
    """Let a simulation compute on several cores, but where one does it all, or the model draws
    random numbers from the only generator that there is. What was begun and nobody waits for is
    thrown away.
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

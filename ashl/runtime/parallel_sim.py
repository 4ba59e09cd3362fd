"""Use several cores of this machine for one simulation.

A worker's gradient computation starts on another thread when the worker asks for it. The simulation
continues with other workers, and waits for the result when virtual time has reached the end of the
computation. These computations are pure functions, so the result has the same bits on any number of
cores. Encoding and merging stay on the simulation's thread.
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

# seconds: with `auto`, shorter computations stay on the simulation's thread, because passing one to
# another thread costs more than it saves
MIN_PARALLEL_S = 7e-4
# with `auto`, the number of timed computations whose median decides
TIMED_COMPUTATIONS = 16


class ParallelCompute:
    """Runs a computation on this thread or on another one.

    The first `num_timed` computations run here and are timed. After them, all run on other threads
    if the median is at least `MIN_PARALLEL_S`, else all run here.
    """

    def __init__(self, start_threads: Callable[[], ThreadPoolExecutor], num_timed: int) -> None:
        """Args: start_threads, called once, by the first computation for another thread; num_timed,
        0 = all computations run on other threads, without timing.
        """
        self._pool = cached(start_threads)
        self._num_untimed = num_timed
        self._times = list[float]()
        self._runs_on_threads = True

    def __call__(self, effect: Compute) -> Any:
        """Return the result of a computation, or its future if it runs on another thread."""
        if effect.kind != "compute":  # encoding and merging change their arguments in place
            return effect.fn()
        if not self._num_untimed:
            return self._pool().submit(effect.fn) if self._runs_on_threads else effect.fn()
        start = time.perf_counter()
        value = effect.fn()
        self._times.append(time.perf_counter() - start)
        self._num_untimed -= 1
        if not self._num_untimed:
            self._runs_on_threads = statistics.median(self._times) >= MIN_PARALLEL_S
        return value


def count_cores(asked: int | Literal["auto"], num_workers: int) -> int:
    """Return the number of cores to use.

    Args: asked, `runtime.cores`. A number is returned as it is, also above the number of workers or
    of cores. `auto` is all usable cores, up to the number of workers. It is one in a
    process that `multiprocessing` has started, as for a run of a sweep.
    """
    if asked != "auto":
        return asked
    if multiprocessing.parent_process() is not None:
        return 1
    return min(usable_cores(), num_workers)


@contextmanager
def use_cores(
    sim: Sim, asked: int | Literal["auto"], num_workers: int, learner: Learner
) -> Generator[None]:
    """Let a simulation compute on several cores within this context.

    With `auto`, the first computations are timed, and threads start only if they save time. A
    number starts that many threads without timing. The simulation uses one core in three cases: if
    `count_cores` returns one, if the learner computes on another device than the CPU, or if it is
    not `threadsafe`. On exit, computations that have not begun are discarded.
    """
    count = count_cores(asked, num_workers)
    if count < 2 or learner.device != HOST or not learner.threadsafe:
        yield
        return
    threads, all_started, lock = torch.get_num_threads(), threading.Barrier(count), threading.Lock()

    def prepare_thread() -> None:
        all_started.wait()  # so that each thread of the pool runs this once
        with lock:
            torch.set_num_threads(threads)
            learner.replicate()

    def resume(task: Task, value: Any) -> None:
        Sim._resume(sim, task, value.result() if isinstance(value, Future) else value)

    pool = ThreadPoolExecutor(count, "core")

    def start_threads() -> ThreadPoolExecutor:
        for prepared in [pool.submit(prepare_thread) for _ in range(count)]:
            prepared.result()
        return pool

    sim.begin_compute = ParallelCompute(start_threads, TIMED_COMPUTATIONS if asked == "auto" else 0)
    sim._resume = resume  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)
